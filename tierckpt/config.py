"""Settings, read from keyword arguments, ``TIERCKPT_*`` variables, ``tierckpt.toml``, and defaults, in this order."""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import ByteSize, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from .errors import ConfigError
from .format.uris import local_path
from .home import cache_home
from .ownership import untrusted_reason
from .quantities import DISK_BLOCK_BYTES
from .telemetry import logger

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

_NO_SETTINGS = re.compile(
    r"TIERCKPT_(TRACEBACK|PREFETCH_MINUTES|(TEST|DEMO)_\w+|(\w+_)?(SERVICE_(HOST|PORT)\w*|PORT_\d+_\w+))"
)
"""Our own tools, and Kubernetes for a Service named tierckpt, set these."""
reported: set[str] = set()
FILE_NAME = "tierckpt.toml"
FILE_BYTES_MAX = 1 << 20
reported_files: set[tuple[str, str]] = set()
PEER_PORT = 7117
"""Port of an agent's peer server, and of an address in ``peers`` without a port."""

log = logger("config")

_LISTEN = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})")

StagingPolicy: TypeAlias = Literal["wait", "skip", "drop_oldest_unflushed"]
PreemptSignal: TypeAlias = Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU"]


def ranks_of_node() -> int:
    """Read the variables of torchrun, Open MPI or Intel MPI; 1 without any of them."""
    counts = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"))
    return max(1, next((int(count) for count in counts if count and count.isdigit()), 1))


def _source_of(field: tuple[int | str, ...], overrides: Mapping[str, Any]) -> str:
    name = str(field[0]) if field else ""
    if name in overrides or f"TIERCKPT_{name}".upper() in map(str.upper, os.environ):
        return ""
    return f" (in {Path(FILE_NAME).absolute()})" if name in read_settings_file() else ""


class Settings(BaseSettings):
    """All settings. Each is also an environment variable (``TIERCKPT_LOCAL_ROOT``) and a keyword of every verb.

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

    local_root: Path = Field(default_factory=lambda: cache_home() / "tierckpt")
    """Directory on node-local SSD for the local tier and the journal. Must belong to this user: a directory that
    another user owns, can write to, or has linked to is refused."""

    local_readable_by: Literal["user", "group", "all"] = "user"
    """Users that may read the checkpoints and the node cache under ``local_root``, within the umask. Only this user may
    write there. Files shared with a ``file://`` run by hard links have the group and mode of the run."""

    drain: bool = True
    """Drain each committed checkpoint to its URI in the background. False keeps it on the local tier only."""

    shard_size_bytes_max: ByteSize = Field(default=ByteSize(GiB), gt=0)
    """Maximum size of a shard file, in bytes. A failed transfer is retried by shard, so small shards lose less."""

    chunk_size_bytes: ByteSize = Field(default=ByteSize(8 * MiB), gt=0, multiple_of=DISK_BLOCK_BYTES)
    """Bytes per digest and per request: a multiple of 4096, for O_DIRECT."""

    staging_bytes_max: ByteSize | None = Field(default=None, gt=0)
    """Maximum host memory, in bytes, for the staging slots of one process. None: the free memory of the node."""

    checkpoints_in_flight_max: int = Field(default=2, ge=1)
    """Maximum number of checkpoints that are staged and not yet flushed. Each holds a staging slot until then."""

    staging_policy: StagingPolicy = "wait"
    """Action of a save when no staging slot is free. ``wait``: block until one is. ``skip``: skip this checkpoint.
    ``drop_oldest_unflushed``: drop the oldest staged checkpoint that is not being flushed."""

    concurrency: int = Field(default=4, ge=1, le=256)
    """Files in flight per mover. Each holds a few chunks, so this limits the memory of the mover."""

    mover: Literal["agent", "inline"] = "agent"
    """Process that drains. ``agent``: the node's agent, started on demand, which outlives this process. ``inline``:
    this process (for tests, notebooks and commands)."""

    grace_seconds: float = Field(default=25.0, ge=0)
    """Seconds after SIGTERM during which pending saves are flushed and drained. 0: no signal handler."""

    staging_memory: Literal["auto", "private", "shared"] = "auto"
    """Kind of staging memory. ``shared``: the agent saves the staged checkpoint of a killed trainer. ``private``: that
    checkpoint is lost. ``auto``: shared if the agent drains and the kernel has huge pages for shared memory."""

    preempt_signals: Annotated[tuple[PreemptSignal, ...], NoDecode] = ("SIGTERM",)
    """Signals that flush and drain pending saves and then end the process, such as the one of Slurm's ``--signal``.
    Separated by commas in the environment: "SIGTERM,SIGUSR1"."""

    preempt_notices: Literal["none", "aws", "gcp", "azure"] = "none"
    """Cloud with a metadata address to poll for preemption notices. After a notice, the next ``step`` saves."""

    exposure_seconds_max: float | None = Field(default=None, gt=0)
    """Maximum age, in seconds, of the newest checkpoint on shared storage; ``inf``: no limit. If set, measured
    throughput decides for each save whether it is drained, stays on the SSD, or goes straight to shared storage.
    None: every save is drained, or every n-th with ``interval="auto"``."""

    drain_bytes_per_second: ByteSize | None = Field(default=None, gt=0)
    """Rate limit, in bytes per second, of all drains of one mover together. None: no limit."""

    local_bytes_max: ByteSize | None = Field(default=None, gt=0)
    """Maximum bytes of checkpoints on the local tier. None: the disk, up to ``local_high_water``."""

    local_high_water: float = Field(default=0.9, gt=0, le=1)
    """Share of the local disk in use above which drained checkpoints are evicted, oldest first, and the least recently
    used entries of the node cache."""

    local_full_policy: Literal["wait", "error"] = "wait"
    """Action of a save when the local tier is full and no checkpoint can be evicted. ``wait``: wait for a drain.
    ``error``: raise ``CapacityError``."""

    cache_bytes_max: ByteSize | None = Field(default=None, gt=0)
    """Maximum bytes of the node cache (``<local_root>/cache``). None: the disk, up to ``local_high_water``."""

    peers: str | None = None
    """Addresses of the other nodes' agents: ``host[:port],...``, ``slurm[:port]`` (the job's node list),
    ``dns:NAME[:port]`` (a headless service), or ``torchrun`` (the rendezvous store of the job). None: no peers. A
    missing port is ``PEER_PORT``, whatever ``peer_listen`` is."""

    peer_listen: str = f"0.0.0.0:{PEER_PORT}"
    """Address on which this node's agent serves ``peers``. An address beyond loopback needs a secret or TLS."""

    peer_secret_file: Path | None = None
    """File with the secret that all nodes share, readable by its owner alone. Signs requests (HMAC-SHA256)."""

    peer_tls_dir: Path | None = None
    """Directory with ``tls.crt``, ``tls.key`` and ``ca.crt``, as in a Kubernetes TLS secret: peers use mutual TLS with
    certificates of this authority."""

    peer_domain: str = Field(default="", max_length=128, pattern="^[ -~]*$")
    """Failure domain of this node (rack, power feed). Replicas go to other domains first."""

    replicas: int = Field(default=1, ge=1, le=16)
    """Number of nodes that hold each shard after a save, this one included. More than 1 needs ``peers``."""

    commit_timeout_seconds: float = Field(default=1800.0, gt=0)
    """Seconds that a mover waits for the parts of other ranks before it abandons the checkpoint."""

    exit_timeout_seconds: float = Field(default=300.0, ge=0)
    """Seconds that the exit of a process, or ``Checkpointer.close``, waits for running drains, once in a process. The
    journal keeps the others."""

    store_timeout_seconds: float = Field(default=60.0, gt=0)
    """Maximum seconds for one request to a store, including its retries."""

    store_wait_seconds: float = Field(default=60.0, ge=0)
    """Seconds that a restore, or a search for the newest checkpoint, waits for a store that does not answer, before it
    raises ``StoreUnavailableError``."""

    @field_validator("local_root", "peer_secret_file", "peer_tls_dir", mode="before")
    @classmethod
    def _absolute(cls, value: Any) -> Any:
        """The agent has another working directory. ``Path`` takes an empty string for the working directory."""
        return None if value is None else local_path(value, "it")

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
        """The host is resolved when it is used."""
        match = _LISTEN.fullmatch(value)
        if match is None or int(match["port"]) > 65535:
            raise ValueError(f"{value[:100]!r} is not an address; write 0.0.0.0:{PEER_PORT} or [::]:{PEER_PORT}")
        return value

    @model_validator(mode="after")
    def _peers_fit(self) -> Self:
        if self.replicas > 1 and self.peers is None:
            raise ValueError(f"replicas={self.replicas} needs peers: the other nodes that hold them")
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
        return cls(**json.loads(text))

    @classmethod
    def load(cls, settings: Settings | None = None, **overrides: Any) -> Settings:
        """Return ``settings`` with ``overrides`` applied, or fresh ones. Raises ConfigError with all problems."""
        if settings is None:
            for name, problem in unknown_variables().items():
                if name not in reported:
                    reported.add(name)
                    log.warning("%s", problem)
        try:
            if settings is None:
                return cls(**overrides)
            if not overrides:
                return settings
            return cls(**{**settings.model_dump(), **overrides})
        except ValidationError as error:
            problems = [_problem(item) + _source_of(item["loc"], overrides) for item in error.errors()]
            hint = "`tierckpt.Settings` documents each setting, and docs/guide/settings.md lists them"
            raise ConfigError(f"invalid settings: {'; '.join(problems)}", hint=hint) from None


def unknown_variables() -> dict[str, str]:
    """Return messages by name."""
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
            found[name] = f"{name} is not a setting and is ignored ({advice})"
    return found


def _problem(item: Any) -> str:
    name = ".".join(map(str, item["loc"]))
    if item["type"] != "extra_forbidden":
        return ": ".join(filter(None, (name, item["msg"].removeprefix("Value error, "))))
    near = difflib.get_close_matches(name, Settings.model_fields, n=1, cutoff=0.7)
    return f"unknown setting {name!r}" + (f" (did you mean {near[0]}?)" if near else "")


def read_settings_file() -> dict[str, Any]:
    """Return the values of ``tierckpt.toml`` in the working directory; {} without one.

    Ignores, with one warning, a file that another user than root may have written or can replace. Raises ConfigError:
    no TOML, no file, unreadable or too large.
    """
    path = Path(FILE_NAME)
    try:
        path.lstat()
        path = path.absolute()
    except OSError:
        return {}
    if why := untrusted_reason(path):
        if (str(path), why) not in reported_files:
            reported_files.add((str(path), why))
            log.warning(
                "%s is ignored: %s. Settings are taken from a file that this user or root owns and nobody else can "
                "write to or replace (`chmod go-w` the file and its directory), and from TIERCKPT_* variables",
                path,
                why,
            )
        return {}
    try:
        return tomllib.loads(_read_file(path).decode())
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", hint="Write lines like `concurrency = 2`") from None


def _read_file(path: Path) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a FIFO is not waited for
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"{path} is not a file", hint="Move it away: settings are read from a file of that name")
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is larger than the {FILE_BYTES_MAX} bytes that settings may take")
    return data
