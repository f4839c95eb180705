"""What is simulated: a cluster with its failures, and one configuration of tiers for the jobs on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..errors import ConfigError
from .checked_numbers import not_negative, positive, whole
from .drain_policy import Rules
from .sizer import Sizing, TierRow
from .transfer_times import Bandwidths, Mode

LOCAL_ONLY = 1 << 60
"""Every how manieth checkpoint goes to shared storage, when none is to."""


@dataclass(frozen=True, slots=True)
class FailureKind:
    """One cause of failures: how often it strikes a node, and what it takes with it.

    ``nodes`` fail at once: a block of neighbours (a rack) when ``together``, else that many anywhere. ``wipes``: their
    SSDs and memory are gone; otherwise only the processes are.
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
    """Nodes, what joins them to shared storage, and what happens to them.

    ``jobs`` split the nodes evenly and share the storage. ``spares`` None is always enough; otherwise a job waits for a
    node once they are used up, until one is repaired. Shared storage answers nobody for ``outage_seconds`` on end,
    every ``outage_every_seconds`` on average.
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
    """Seconds at which the first job's processes fail besides, for a run that is simulated after it was seen."""

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
    """How each job takes checkpoints and comes back. Bytes and seconds are per job.

    ``blocking`` writes straight to shared storage while training waits; otherwise ``stall_seconds`` of staging, then
    ``flush_seconds`` until it is on the SSDs (``local``) and ``replicate_seconds`` until peers hold it (``peer``), and
    the drain policy (``rules``) sends it on. With ``log_step_seconds`` every step is in a log behind the checkpoint,
    ``log_latency_seconds`` later, and a restart from local or peer replays each in ``replay_step_seconds``.
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
    """The failures the sizer assumed, as the simulator needs them: of processes, of nodes, of racks."""
    site = sizing.site
    rate = 86400.0 / sizing.mtbf_seconds / sizing.mesh.nodes
    losses = site.node_loss_share + site.domain_loss_share
    return (
        FailureKind("process", rate * (1 - losses), wipes=False),
        FailureKind("node", rate * site.node_loss_share),
        FailureKind("domain", rate * site.domain_loss_share, nodes=min(domain_nodes, sizing.mesh.nodes)),
    )


def configurations_of(sizing: Sizing, rpo_seconds: float = math.inf) -> tuple[Configuration, ...]:
    """The sizer's configurations, at the intervals it chose. Those that would get nowhere are left out."""
    return tuple(_configuration(sizing, row, rpo_seconds) for row in sizing.tiers if row.schedule is not None)


def configuration_of(mode: Mode, sizing: Sizing, interval_seconds: float) -> Configuration:
    """``mode`` with a checkpoint every ``interval_seconds``, on the local tier alone."""
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
            local_bytes_max=_room(sizing) if local else math.inf,
        ),
        expected_ettr=row.ettr,
    )


def _room(sizing: Sizing) -> float:
    """Bytes of whole checkpoints that the SSDs of all writing nodes hold."""
    return sizing.site.ssd_bytes / sizing.node_written_bytes * sizing.checkpoint_bytes
