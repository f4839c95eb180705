"""Input of the simulator: a cluster with its failures, and a configuration of tiers for its jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..errors import ConfigError
from .checked_numbers import not_negative, positive, whole
from .drain_policy import Rules
from .sizer import Sizing, TierRow
from .transfer_times import Bandwidths, Mode

LOCAL_ONLY = 1 << 60


@dataclass(frozen=True, slots=True)
class FailureKind:
    """``nodes`` fail at once: neighbours (a rack) if ``together``, else random ones.

    ``wipes``: their SSDs and memory are lost; otherwise only the processes.
    """

    name: str
    per_node_day: float
    nodes: int = 1
    together: bool = True
    wipes: bool = True

    def __post_init__(self) -> None:
        not_negative(self.per_node_day, f"{self.name} failures per node and day")
        whole(self.nodes, f"nodes of a {self.name} failure")


@dataclass(frozen=True, slots=True)
class Cluster:
    """``jobs`` split the nodes evenly and share the storage.

    ``spares`` None is unlimited; otherwise a job without a spare waits for a repair. Shared storage is out for
    ``outage_seconds``, on average every ``outage_every_seconds``.
    """

    nodes: int
    rates: Bandwidths
    failures: tuple[FailureKind, ...]
    jobs: int = 1
    spares: int | None = None
    repair_seconds: float = 4 * 3600.0
    outage_every_seconds: float = math.inf
    outage_seconds: float = 0.0
    strikes_at: tuple[float, ...] = ()
    """Failures of the first job's processes (seconds), to simulate an observed run."""

    def __post_init__(self) -> None:
        whole(self.nodes, "nodes")
        if whole(self.jobs, "jobs") > self.nodes or self.nodes % self.jobs:
            raise ConfigError(f"jobs are {self.jobs}: they must divide the {self.nodes} nodes evenly")
        for kind in self.failures:
            if kind.nodes > self.nodes:
                raise ConfigError(
                    f"a {kind.name} failure takes {kind.nodes} of {self.nodes} nodes: at most all of them"
                )
        if self.spares is not None:
            whole(self.spares, "spares", at_least=0)
        positive(self.repair_seconds, "repair time", "seconds")

    @property
    def nodes_per_job(self) -> int:
        return self.nodes // self.jobs


@dataclass(frozen=True, slots=True)
class Configuration:
    """How each job takes and restores checkpoints. Bytes and seconds are per job.

    ``blocking`` writes to shared storage while training waits. Otherwise a checkpoint takes ``stall_seconds``, then
    ``flush_seconds`` to the SSDs and ``replicate_seconds`` to peers, and ``rules`` drain it. ``log_step_seconds``:
    every step is in a log, ``log_latency_seconds`` later, and a restart replays each in ``replay_step_seconds``.
    """

    name: str
    interval_seconds: float
    checkpoint_bytes: float
    restart_seconds: float
    stall_seconds: float = 0.0
    blocking: bool = False
    local: bool = False
    peer: bool = False
    flush_seconds: float = 0.0
    replicate_seconds: float = 0.0
    replicas: int = 2
    local_load_seconds: float = 0.0
    peer_load_seconds: float = 0.0
    restore_bytes: float | None = None
    drain_slowdown: float = 0.0
    log_step_seconds: float = 0.0
    log_latency_seconds: float = 0.0
    replay_step_seconds: float = 0.0
    rules: Rules = field(default_factory=Rules)
    expected_ettr: float | None = None

    def __post_init__(self) -> None:
        positive(self.interval_seconds, f"interval of {self.name!r}", "seconds")
        positive(self.checkpoint_bytes, f"checkpoint bytes of {self.name!r}")
        not_negative(self.restart_seconds, f"restart time of {self.name!r}")


def failures_of(sizing: Sizing, domain_nodes: int) -> tuple[FailureKind, ...]:
    site = sizing.site
    rate = 86400.0 / sizing.mtbf_seconds / sizing.mesh.nodes
    losses = site.node_loss_share + site.domain_loss_share
    return (
        FailureKind("process", rate * (1 - losses), wipes=False),
        FailureKind("node", rate * site.node_loss_share),
        FailureKind("domain", rate * site.domain_loss_share, nodes=min(domain_nodes, sizing.mesh.nodes)),
    )


def configurations_of(sizing: Sizing, rpo_seconds: float = math.inf) -> tuple[Configuration, ...]:
    """Omits those that would make no progress."""
    return tuple(_configuration(sizing, row, rpo_seconds) for row in sizing.tiers if row.schedule is not None)


def configuration_of(mode: Mode, sizing: Sizing, interval_seconds: float) -> Configuration:
    """On the local tier only."""
    return Configuration(
        name=mode.name,
        interval_seconds=interval_seconds,
        checkpoint_bytes=sizing.checkpoint_bytes,
        restart_seconds=sizing.site.restart_seconds,
        stall_seconds=interval_seconds * mode.stalled_share(interval_seconds),
        local=True,
        flush_seconds=mode.latency_seconds,
        local_load_seconds=sizing.copy_restart_seconds - sizing.site.restart_seconds,
        log_step_seconds=mode.step_seconds if mode.is_log else 0.0,
        log_latency_seconds=mode.latency_seconds,
        replay_step_seconds=mode.replay_step_seconds,
        rules=Rules(every=LOCAL_ONLY),
        expected_ettr=mode.ettr(interval_seconds, sizing.mtbf_seconds, sizing.copy_restart_seconds),
    )


def _configuration(sizing: Sizing, row: TierRow, rpo_seconds: float) -> Configuration:
    names = [level.name for level in row.levels]
    seconds = {path.name: path.seconds for path in sizing.restores}
    interval_seconds = row.interval_seconds(0) or 0.0
    every = round((row.interval_seconds(len(names) - 1) or 0.0) / interval_seconds)
    local, peer = "local" in names, "peer" in names
    blocking = row.name.endswith("blocking")
    sharded = next(path for path in sizing.restores if path.name == "sharded")
    site = sizing.site
    return Configuration(
        name=row.name,
        interval_seconds=interval_seconds,
        checkpoint_bytes=sizing.checkpoint_bytes,
        restart_seconds=site.restart_seconds,
        stall_seconds=0.0 if blocking else sizing.stage_seconds,
        blocking=blocking,
        local=local,
        peer=peer,
        flush_seconds=row.levels[0].latency_seconds if local else 0.0,
        replicate_seconds=row.levels[1].latency_seconds if peer else 0.0,
        replicas=site.replicas,
        local_load_seconds=seconds["local"],
        peer_load_seconds=seconds["peer"],
        restore_bytes=sizing.checkpoint_bytes if local else sharded.shared_bytes,
        drain_slowdown=0.0 if blocking else site.drain_slowdown,
        rules=Rules(
            every=every,
            rpo_seconds=rpo_seconds,
            keep_local=site.keep_local,
            local_bytes_max=site.ssd_bytes / sizing.node_written_bytes * sizing.checkpoint_bytes if local else math.inf,
        ),
        expected_ettr=row.ettr,
    )
