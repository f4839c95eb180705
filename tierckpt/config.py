"""One Settings object: keyword arguments > environment ``TIERCKPT_*`` > ``tierckpt.toml`` > defaults.

Sizes are written like ``"200GiB"``. Every field ends in its unit.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import ByteSize, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from .errors import ConfigError
from .format.uris import local_path
from .home import cache_home
from .quantities import DISK_BLOCK_BYTES, round_up
from .settings_file import NAME, read_settings_file
from .telemetry import logger

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

_NO_SETTINGS = re.compile(
    r"TIERCKPT_(TRACEBACK|PREFETCH_MINUTES|(TEST|DEMO)_\w+|(\w+_)?(SERVICE_(HOST|PORT)\w*|PORT_\d+_\w+))"
)
"""Variables of our own tools, and those that Kubernetes sets in the pods beside a Service called tierckpt."""
reported: set[str] = set()

log = logger("config")

_LISTEN = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})")

StagingPolicy: TypeAlias = Literal["wait", "skip", "drop_oldest_unflushed"]
PreemptSignal: TypeAlias = Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU"]


def ranks_of_node() -> int:
    """How many ranks of the job are on this node, as torchrun, Open MPI or Intel MPI says; 1 where nobody says it."""
    told = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"))
    return max(1, next((int(count) for count in told if count and count.isdigit()), 1))


def _said_where(field: tuple[int | str, ...], overrides: Mapping[str, Any]) -> str:
    """Where a value comes from that cannot work, as far as that is not plain."""
    name = str(field[0]) if field else ""
    if name in overrides or f"TIERCKPT_{name}".upper() in map(str.upper, os.environ):
        return ""
    return f" (in {Path(NAME).absolute()})" if name in read_settings_file() else ""


def _default_local_root() -> Path:
    return cache_home() / "tierckpt"


class Settings(BaseSettings):
    """All settings. Build one with ``Settings.load(**overrides)``, which turns bad values into ``ConfigError``.

    Each is also an environment variable (``TIERCKPT_LOCAL_ROOT``) and a keyword of every verb. Frozen and hashable.

    Example:
        >>> settings = tierckpt.Settings.load(local_root="ssd", drain=False)
        >>> tierckpt.latest("run", settings=settings) is None
        True
        >>> tierckpt.Settings.load(local_rot="ssd")
        Traceback (most recent call last):
            ...
        tierckpt.errors.ConfigError: ...
    """

    model_config = SettingsConfigDict(
        env_prefix="TIERCKPT_", env_ignore_empty=True, extra="forbid", frozen=True, ser_json_inf_nan="constants"
    )

    local_root: Path = Field(default_factory=_default_local_root)
    """Directory on node-local SSD that holds the local tier and the journal. This user's own: one that somebody else
    owns, can write to, or has linked to is refused."""

    local_readable_by: Literal["user", "group", "all"] = "user"
    """Who besides this user may read the checkpoints and the node cache below ``local_root``, as far as the umask lets
    them. Nobody else may ever write there, except to a file that a ``file://`` run on the same file system shares with
    the local tier (a hard link): it has the group and the mode of a new file of the run."""

    drain: bool = True
    """Drain each committed checkpoint to its URI in the background. False keeps it on the local tier only."""

    shard_size_bytes_max: ByteSize = Field(default=ByteSize(GiB), gt=0)
    """A shard is closed when the next item would pass this. The shard is the unit of retry, so it stays small."""

    chunk_size_bytes: ByteSize = ByteSize(8 * MiB)
    """Bytes covered by one digest, and moved by one request. A multiple of 4096, so that O_DIRECT can write a chunk."""

    staging_bytes_max: ByteSize | None = Field(default=None, gt=0)
    """Host memory the arena of one process may take, all slots together. None: what the node has free, and no more."""

    checkpoints_in_flight_max: int = Field(default=2, ge=1)
    """Checkpoints staged and not yet flushed. Each keeps a slot of the arena until it is on the local tier."""

    staging_policy: StagingPolicy = "wait"
    """What a save does when no slot is free. ``wait``: block until one is. ``skip``: leave this checkpoint out.
    ``drop_oldest_unflushed``: give up the oldest one whose flush has not begun. Never: take more memory."""

    concurrency: int = Field(default=4, ge=1, le=256)
    """Files in flight per mover. Each holds a few chunks, so this bounds the mover's memory."""

    mover: Literal["agent", "inline"] = "agent"
    """Who drains: the node's agent, a process that outlives this one and is started when there is none, or this
    process itself (for tests, notebooks and commands)."""

    grace_seconds: float = Field(default=25.0, ge=0)
    """What a process takes, after SIGTERM, to bring checkpoints to safety before it ends."""

    staging_memory: Literal["auto", "private", "shared"] = "auto"
    """Where a Checkpointer stages. ``shared``: the agent holds the memory too, and what a killed trainer had staged is
    still saved. ``auto``: shared where the agent drains and the kernel has huge pages for it, else private, which is
    faster to write from than shared memory of small pages."""

    preempt_signals: Annotated[tuple[PreemptSignal, ...], NoDecode] = ("SIGTERM",)
    """Signals after which a process brings its checkpoints to safety and ends. Slurm sends what ``--signal`` asks for:
    "SIGTERM,SIGUSR1". In the environment separated by commas."""

    preempt_notices: Literal["none", "aws", "gcp", "azure"] = "none"
    """Whose notices of preemption to look for, at the metadata address of the cloud: then the next ``step`` saves."""

    exposure_seconds_max: float | None = Field(default=None, gt=0)
    """The oldest that the newest state on shared storage may become; ``inf`` for no bound. If set, each save is
    decided on by measured throughputs (``planning/drain_policy.py``): what is not drained stays on the SSD until newer
    ones stand there, and what the SSD has no room for goes straight to shared storage. None: all checkpoints are
    drained, or every n-th where ``interval="auto"`` says so."""

    drain_bytes_per_second: ByteSize | None = Field(default=None, gt=0)
    """Most bytes per second that all drains of one mover together send. None: what the store takes."""

    local_bytes_max: ByteSize | None = Field(default=None, gt=0)
    """Most bytes of checkpoints on the local tier. None: what the disk has, up to ``local_high_water``."""

    local_high_water: float = Field(default=0.9, gt=0, le=1)
    """Share of the local disk in use at which drained checkpoints are evicted, oldest first, and at which a
    prefetch evicts what the node cache has not used for longest."""

    local_full_policy: Literal["wait", "error"] = "wait"
    """What a save does when the local tier is full and nothing there may be evicted yet: ``wait`` for a drain to end,
    or raise ``CapacityError`` at once."""

    cache_bytes_max: ByteSize | None = Field(default=None, gt=0)
    """Most bytes of the node cache (``<local_root>/cache``). None: what the disk has, up to ``local_high_water``."""

    peers: str | None = None
    """Where the agents of the other nodes are: ``host[:port],...``, ``slurm[:port]`` (the job's node list),
    ``dns:NAME[:port]`` (a headless service), or ``torchrun`` (the job's own store). None: it reads for itself."""

    peer_listen: str = "0.0.0.0:7117"
    """Where this node's agent serves the others, when there are ``peers``. Beyond loopback: a secret, or TLS."""

    peer_secret_file: Path | None = None
    """A file with what all nodes of the cluster know and nobody else, readable by its owner alone: requests are signed
    with it (HMAC-SHA256)."""

    peer_tls_dir: Path | None = None
    """A directory with ``tls.crt``, ``tls.key`` and ``ca.crt``, as a Kubernetes TLS secret has them: peers speak TLS,
    and each shows a certificate of this authority (mutual TLS)."""

    peer_domain: str = ""
    """This node's failure domain (rack, power feed): replicas go to other domains first."""

    replicas: int = Field(default=1, ge=1, le=16)
    """Nodes that hold each shard of a checkpoint after a save, its own among them. More than 1 needs ``peers``."""

    commit_timeout_seconds: float = Field(default=1800.0, gt=0)
    """How long a mover waits for the other ranks' parts before it calls the checkpoint abandoned."""

    exit_timeout_seconds: float = Field(default=300.0, ge=0)
    """How long a process waits at its end, or a Checkpointer when it is closed, for drains still running: once, and not
    twice. What is left stays on this node and in the journal."""

    store_timeout_seconds: float = Field(default=60.0, gt=0)
    """Time one request to a store may take, its retries included."""

    store_wait_seconds: float = Field(default=60.0, ge=0)
    """How long a restore, or a look for the newest checkpoint, waits for a store that does not answer. Then it raises
    ``StoreUnavailableError``: it never takes a store that it could not ask for an empty one."""

    @field_validator("local_root", "peer_secret_file", "peer_tls_dir")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        """The agent works in another directory."""
        return None if value is None else local_path(value, "it")

    @field_validator("local_root", "peer_secret_file", "peer_tls_dir", mode="before")
    @classmethod
    def _said(cls, value: Any) -> Any:
        """An empty text is no path: ``Path`` takes it for the working directory."""
        return local_path(value, "it") if isinstance(value, str) else value

    @field_validator("chunk_size_bytes")
    @classmethod
    def _whole_blocks(cls, value: ByteSize) -> ByteSize:
        valid = max(round_up(value), DISK_BLOCK_BYTES)
        if value != valid:
            raise ValueError(
                f"{int(value)} is not a positive multiple of {DISK_BLOCK_BYTES} (the block of O_DIRECT); "
                f"the next is {valid}"
            )
        return value

    @field_validator("preempt_signals", mode="before")
    @classmethod
    def _signal_list(cls, value: Any) -> Any:
        names = value.replace(",", " ").split() if isinstance(value, str) else value
        return tuple(
            name if not isinstance(name, str) or name.startswith("SIG") else f"SIG{name}" for name in names or ()
        )

    @field_validator("peer_listen")
    @classmethod
    def _address(cls, value: str) -> str:
        """Form only: what it means is found out where it is used."""
        match = _LISTEN.fullmatch(value)
        if match is None or int(match["port"]) > 65535:
            raise ValueError(f"{value[:100]!r} is no address; write 0.0.0.0:7117 or [::]:7117")
        return value

    @field_validator("peer_domain")
    @classmethod
    def _printable(cls, value: str) -> str:
        if len(value) > 128 or not (value.isascii() and (value.isprintable() or not value)):
            raise ValueError("a failure domain is up to 128 printable ASCII characters")
        return value

    @model_validator(mode="after")
    def _peers_fit(self) -> Self:
        if self.replicas > 1 and self.peers is None:
            raise ValueError(f"replicas is {self.replicas}, which needs peers: other nodes to hold them")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, InitSettingsSource(settings_cls, read_settings_file())

    @classmethod
    def received(cls, text: str | bytes) -> Settings:
        """Return the settings that another process of this release wrote with ``model_dump_json``."""
        return cls(**json.loads(text))

    @classmethod
    def load(cls, settings: Settings | None = None, **overrides: Any) -> Settings:
        """Return ``settings`` with ``overrides`` applied, or a fresh one from the environment.

        Raises:
            ConfigError: an unknown name or a value that cannot work; the message names each.
        """
        if settings is None:
            _warn_of_unknown_variables()
        try:
            if settings is None:
                return cls(**overrides)
            if not overrides:
                return settings
            return cls(**{**settings.model_dump(), **overrides})
        except ValidationError as error:
            # The caller's own arguments too: what its **overrides hold may be one of those, misspelt.
            caller = sys._getframe(1).f_code
            arguments = caller.co_varnames[: caller.co_argcount + caller.co_kwonlyargcount]
            names = {*cls.model_fields, *(name for name in arguments if name not in ("self", "cls"))}
            problems = [_problem(item, names) + _said_where(item["loc"], overrides) for item in error.errors()]
            raise ConfigError(
                f"invalid settings: {'; '.join(problems)}",
                hint="`tierckpt.Settings` documents each setting, and docs/guide/settings.md lists them",
            ) from None


def unknown_variables() -> dict[str, str]:
    """Return, by name, what is wrong with each variable of the environment that looks like a setting and is none."""
    settings = [f"TIERCKPT_{name}".upper() for name in Settings.model_fields]
    found = {}
    for name in os.environ:
        upper = name.upper()
        is_service = os.environ.get(name, "").startswith(("tcp://", "udp://"))
        if not upper.startswith("TIER") or upper in settings or _NO_SETTINGS.fullmatch(upper) or is_service:
            continue
        is_ours = upper.startswith("TIERCKPT_")
        near = difflib.get_close_matches(upper, settings, n=1, cutoff=0.8 if is_ours else 0.9)
        if is_ours or near:
            advice = f"did you mean {near[0]}?" if near else "docs/guide/settings.md lists the settings"
            found[name] = f"{name} is no setting and is ignored ({advice})"
    return found


def _warn_of_unknown_variables() -> None:
    """Once each, as every function of the library reads settings."""
    for name, problem in unknown_variables().items():
        if name not in reported:
            reported.add(name)
            log.warning("%s", problem)


def _problem(item: Any, names: Collection[str]) -> str:
    """What is wrong with one setting, in one line."""
    name = ".".join(map(str, item["loc"]))
    if item["type"] != "extra_forbidden":
        return ": ".join(filter(None, (name, item["msg"].removeprefix("Value error, "))))
    near = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.7)
    return f"there is no {name!r}" + (f" (did you mean {' or '.join(near)}?)" if near else "")
