"""The simulator: jobs of thousands of nodes with failures, event by event. Deterministic for a seed.

It adds to the formulas: failures during restarts and drains, queues at shared storage, failing racks, exhausted spares,
outages. The cost grows with checkpoints and failures, not with nodes.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from ..errors import ConfigError, MissingExtraError
from ..telemetry import ignore_progress
from ..types import Progress, ProgressListener
from . import drain_policy, replica_placement
from .checked_numbers import Checked, Count, NotNegative, Positive, positive, whole
from .drain_policy import Rules, Situation
from .ettr import DAY_SECONDS
from .sizer import Sizing, TierRow
from .transfer_times import Bandwidths, Mode

try:
    import simpy
except ModuleNotFoundError as error:
    raise MissingExtraError("the simulator needs simpy", hint="pip install 'tierckpt[cli]'") from error

PARTS = 100

Steps = Generator[simpy.Event, Any, None]

LOCAL_ONLY = 1 << 60


@dataclass(frozen=True, slots=True)
class FailureKind(Checked):
    """``nodes`` neighbours (a rack) fail at once. ``wipes``: SSDs and memory are lost, too, not only the processes."""

    name: str
    per_node_day: NotNegative
    nodes: Count = 1
    wipes: bool = True


@dataclass(frozen=True, slots=True)
class Cluster(Checked):
    """``jobs`` split the nodes evenly and share the storage.

    ``spares`` None is unlimited; otherwise a job without a spare waits for a repair. Shared storage is out for
    ``outage_seconds``, on average every ``outage_every_seconds``.
    """

    nodes: Count
    rates: Bandwidths
    failures: tuple[FailureKind, ...]
    jobs: Count = 1
    spares: Annotated[int | None, partial(whole, at_least=0)] = None
    repair_seconds: Positive = 4 * 3600.0
    outage_every_seconds: float = math.inf
    outage_seconds: float = 0.0
    strikes_at: tuple[float, ...] = ()
    """Failures of the first job's processes (seconds), to simulate an observed run."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.nodes % self.jobs:
            raise ConfigError(f"jobs are {self.jobs}: they must divide the {self.nodes} nodes evenly")
        for kind in self.failures:
            if kind.nodes > self.nodes:
                raise ConfigError(
                    f"a {kind.name} failure takes {kind.nodes} of {self.nodes} nodes: at most all of them"
                )

    @property
    def nodes_per_job(self) -> int:
        return self.nodes // self.jobs


@dataclass(frozen=True, slots=True)
class Configuration(Checked):
    """How each job takes and restores checkpoints. Bytes and seconds are per job.

    ``blocking`` writes to shared storage while training waits. Otherwise a checkpoint takes ``stall_seconds``, then
    ``flush_seconds`` to the SSDs and ``replicate_seconds`` to peers, and ``rules`` drain it. ``log_step_seconds``:
    every step is in a log, ``log_latency_seconds`` later, and a restart replays each in ``replay_step_seconds``.
    """

    name: str
    interval_seconds: Positive
    checkpoint_bytes: Positive
    restart_seconds: NotNegative
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


def failures_of(sizing: Sizing, domain_nodes: int) -> tuple[FailureKind, ...]:
    site = sizing.site
    rate = DAY_SECONDS / sizing.mtbf_seconds / sizing.mesh.nodes
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


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Seconds are of one job, averaged over all jobs.

    ``kept``, ``lost``, ``stalled``, ``restarting``, ``loading`` and ``waiting`` (for a node) add up to ``wall``.
    """

    name: str
    ettr: float
    expected_ettr: float | None
    wall_seconds: float
    kept_seconds: float
    lost_seconds: float
    stalled_seconds: float
    restarting_seconds: float
    loading_seconds: float
    waiting_seconds: float
    failures: dict[str, int]
    restores: dict[str, int]
    checkpoints: int
    drains: int
    shared_bytes: float
    exposure_seconds_max: float
    interval_seconds: float
    every: int
    replaying_seconds: float = 0.0
    """Part of ``loading_seconds`` for the steps of a log."""

    @property
    def lost_by_failure_seconds(self) -> float:
        """Repeated training and replayed steps, per restore."""
        return (self.lost_seconds + self.replaying_seconds) / max(1, sum(self.restores.values()))


def simulate(
    cluster: Cluster,
    configuration: Configuration,
    *,
    days: float,
    seed: int = 0,
    listener: ProgressListener = ignore_progress,
) -> SimulationResult:
    """Run ``configuration`` on ``cluster`` for ``days``. ``listener`` is called with simulated seconds.

    Raises ConfigError: days of zero or less; more replicas than a job has nodes. Cost: about 50 microseconds of
    processor time for each checkpoint or failure.
    """
    seconds = positive(days, "days") * DAY_SECONDS
    world = _World(cluster, configuration, random.Random(seed))
    for part in range(1, PARTS + 1):
        world.env.run(until=seconds * part / PARTS)
        listener(Progress(f"simulate {configuration.name}", round(seconds * part / PARTS), round(seconds)))
    return world.result(seconds)


class _World:
    def __init__(self, cluster: Cluster, configuration: Configuration, chance: random.Random) -> None:
        self.env = simpy.Environment()
        self.cluster, self.configuration, self.chance = cluster, configuration, chance
        self.writes = Pipe(self.env, cluster.rates.shared_write)
        self.reads = Pipe(self.env, cluster.rates.shared_read)
        self.spares = simpy.Container(self.env, init=cluster.spares) if cluster.spares is not None else None
        self.holders: list[tuple[int, ...]] = []
        if configuration.peer:
            nodes, replicas = cluster.nodes_per_job, configuration.replicas
            if replicas > nodes:
                raise ConfigError(f"replicas are {replicas}: a job of {nodes} nodes holds at most {nodes} copies")
            self.holders = replica_placement.group_placement(nodes, replicas)
        self.failures: Counter[str] = Counter()
        self.jobs = [_Job(self) for _ in range(cluster.jobs)]
        rate = sum(kind.per_node_day for kind in cluster.failures) * cluster.nodes / DAY_SECONDS
        if rate > 0:
            self.env.process(self._fail(rate))
        if cluster.strikes_at:
            self.env.process(self._strike_at(cluster.strikes_at))
        if math.isfinite(cluster.outage_every_seconds) and cluster.outage_seconds > 0:
            self.env.process(self._go_away())

    def _fail(self, rate: float) -> Steps:
        kinds = self.cluster.failures
        weights = [kind.per_node_day for kind in kinds]
        while True:
            yield self.env.timeout(self.chance.expovariate(rate))
            kind = self.chance.choices(kinds, weights)[0]
            self.failures[kind.name] += 1
            by_job: dict[int, list[int]] = {}
            first = self.chance.randrange(self.cluster.nodes) // kind.nodes * kind.nodes
            for node in range(first, min(first + kind.nodes, self.cluster.nodes)):
                job, node_of_job = divmod(node, self.cluster.nodes_per_job)
                by_job.setdefault(job, []).append(node_of_job)
            for job, nodes_of_job in by_job.items():
                self.jobs[job].lose_nodes(nodes_of_job, wipes=kind.wipes)

    def _strike_at(self, times: Sequence[float]) -> Steps:
        for at in sorted(times):
            yield self.env.timeout(max(0.0, at - self.env.now))
            self.failures["seen"] += 1
            self.jobs[0].lose_nodes([0], wipes=False)

    def _go_away(self) -> Steps:
        rates = self.cluster.rates
        while True:
            yield self.env.timeout(self.chance.expovariate(1 / self.cluster.outage_every_seconds))
            self.writes.set_capacity(0.0)
            self.reads.set_capacity(0.0)
            yield self.env.timeout(self.cluster.outage_seconds)
            self.writes.set_capacity(rates.shared_write)
            self.reads.set_capacity(rates.shared_read)

    def result(self, wall: float) -> SimulationResult:
        for job in self.jobs:
            job.close()
        count = len(self.jobs)
        spent = {what: sum(job.spent[what] for job in self.jobs) / count for what in self.jobs[0].spent}
        kept = sum(job.work for job in self.jobs) / count
        restores: Counter[str] = sum((job.restores for job in self.jobs), start=Counter())
        return SimulationResult(
            name=self.configuration.name,
            ettr=kept / wall,
            expected_ettr=self.configuration.expected_ettr,
            wall_seconds=wall,
            kept_seconds=kept,
            lost_seconds=spent["lost"],
            stalled_seconds=spent["stalled"],
            restarting_seconds=spent["restarting"],
            loading_seconds=spent["loading"],
            waiting_seconds=spent["waiting"],
            failures=dict(self.failures),
            restores=dict(restores),
            checkpoints=sum(job.checkpoints for job in self.jobs),
            drains=sum(job.drains for job in self.jobs),
            shared_bytes=sum(job.drains for job in self.jobs) * self.configuration.checkpoint_bytes,
            exposure_seconds_max=max(job.exposure_max for job in self.jobs),
            interval_seconds=self.configuration.interval_seconds,
            every=self.configuration.rules.every,
            replaying_seconds=sum(job.replaying for job in self.jobs) / count,
        )


@dataclass(eq=False, slots=True)
class _Version:
    """Times when each tier had it whole; infinite: not there (any more)."""

    number: int
    work: float
    taken_at: float
    staged: bool = True
    local_at: float = math.inf
    peer_at: float = math.inf
    shared_at: float = math.inf
    skipped: bool = False


@dataclass(eq=False, slots=True)
class _Drain:
    version: _Version
    flow: Flow
    began_at: float


class _Job:
    def __init__(self, world: _World) -> None:
        self.world, self.env, self.plan = world, world.env, world.configuration
        self.nodes = world.cluster.nodes_per_job
        self.work = 0.0
        self.spent = dict.fromkeys(("lost", "stalled", "restarting", "loading", "waiting"), 0.0)
        self.restores: Counter[str] = Counter()
        self.checkpoints = self.drains = 0
        self.exposure_max = self.replaying = 0.0
        self.policy = drain_policy.PolicyState()
        self.place: drain_policy.Place = "local"
        self.versions: list[_Version] = []
        self.wiped: dict[int, float] = {}
        self.drain: _Drain | None = None
        self.epoch = 0
        self.debt = 0.0
        self.shared_work_at = 0.0
        self.doing, self.since = "training", 0.0
        self.missing = 0
        self.process = self.env.process(self._live())

    def _live(self) -> Steps:
        failed = False
        while True:
            try:
                if failed:
                    yield from self._come_back()
                    failed = False
                self._now_doing("training")
                yield self.env.timeout(self.plan.interval_seconds)
                self._now_doing("stalled")
                yield from self._checkpoint()
            except simpy.Interrupt:
                failed = True

    def _now_doing(self, what: str) -> None:
        elapsed = self.env.now - self.since
        if self.doing == "training":
            self.work += elapsed
        else:
            self.spent[self.doing] += elapsed
        self.doing, self.since = what, self.env.now

    def _checkpoint(self) -> Steps:
        number = self.checkpoints = self.checkpoints + 1
        version = _Version(number, self.work, self.env.now)
        if self.plan.blocking:
            yield from self._move(self.world.writes, self.plan.checkpoint_bytes)
            self.drains += 1
            self._on_shared(version)
            self.versions = [version]
            return
        stall, self.debt = self.plan.stall_seconds + self.debt, 0.0
        if stall > 0:
            yield self.env.timeout(stall)
        self.versions.append(version)
        if not self.plan.local:
            self._read_tiers()
            return
        if self.place == "shared" and self.drain is None:
            self._send(version)
            return
        version.staged = False
        self._later(self.plan.flush_seconds, lambda: self._flushed(version))
        if self.plan.peer:
            self._later(self.plan.replicate_seconds, lambda: setattr(version, "peer_at", self.env.now))

    def _later(self, seconds: float, what: Any) -> None:
        """Run ``what`` unless the job fails first."""
        epoch = self.epoch
        event = self.env.timeout(seconds)
        event.callbacks.append(lambda _: what() if epoch == self.epoch else None)

    def _flushed(self, version: _Version) -> None:
        version.local_at = self.env.now
        plan = self.plan
        self.policy = drain_policy.observe(self.policy, plan.rules, "local", plan.checkpoint_bytes, plan.flush_seconds)
        self._read_tiers()

    def _move(self, pipe: Pipe, size_bytes: float) -> Steps:
        flow = pipe.send(size_bytes, self.nodes * self.world.cluster.rates.nic)
        try:
            yield flow.done
        finally:
            pipe.cancel(flow)  # the job has failed meanwhile

    def _read_tiers(self) -> None:
        self.policy, decision = drain_policy.decide(self.policy, self.plan.rules, self._situation())
        self.place = decision.place
        by_number = {one.number: one for one in self.versions}
        for number in decision.skip:
            by_number[number].skipped = True
        for number in decision.remove:
            by_number[number].local_at = math.inf
        if decision.send is not None:
            self._send(by_number[decision.send])
        self._forget()

    def _situation(self) -> Situation:
        size_bytes = self.plan.checkpoint_bytes
        return Situation(
            now=self.env.now,
            versions=[
                drain_policy.Version(
                    one.number,
                    size_bytes,
                    one.taken_at,
                    one.staged or one.local_at < math.inf,
                    one.shared_at < math.inf,
                    one.skipped,
                )
                for one in self.versions
            ],
            next_bytes=size_bytes,
            interval_seconds=self.plan.interval_seconds + self.plan.stall_seconds,
            sending=self.drain.version.number if self.drain else None,
        )

    def _send(self, version: _Version) -> None:
        flow = self.world.writes.send(self.plan.checkpoint_bytes, self.nodes * self.world.cluster.rates.nic)
        drain = self.drain = _Drain(version, flow, self.env.now)
        flow.done.callbacks.append(lambda _: self._drained(drain))

    def _drained(self, drain: _Drain) -> None:
        seconds = self.env.now - drain.began_at
        self.drain = None
        self.drains += 1
        self.debt += seconds * self.plan.drain_slowdown
        self._on_shared(drain.version)
        self.policy = drain_policy.observe(self.policy, self.plan.rules, "shared", self.plan.checkpoint_bytes, seconds)
        self._read_tiers()

    def _on_shared(self, version: _Version) -> None:
        self.exposure_max = max(self.exposure_max, self.env.now - self.shared_work_at)
        version.shared_at = self.env.now
        self.shared_work_at = version.taken_at

    def _forget(self) -> None:
        shared = max((one.number for one in self.versions if one.shared_at < math.inf), default=0)
        newest = [one.number for one in self.versions[-3:]]
        sending = self.drain.version.number if self.drain else 0
        self.versions = [one for one in self.versions if one.number in newest or one.number in (shared, sending)]

    def lose_nodes(self, nodes: list[int], *, wipes: bool) -> None:
        self.epoch += 1
        if wipes:
            self.wiped |= dict.fromkeys(nodes, self.env.now)
            self.missing += len(nodes)
        if self.drain and not (self._from_local(self.drain.version) or self._from_peers(self.drain.version)):
            self.world.writes.cancel(self.drain.flow)
            self.drain = None
        self._now_doing("restarting")
        self.process.interrupt()

    def _come_back(self) -> Steps:
        self._now_doing("restarting")
        yield self.env.timeout(self.plan.restart_seconds)
        self._now_doing("waiting")
        if self.world.spares is not None:
            while self.missing:
                yield from self._take_spare(self.world.spares)
        self.missing = 0
        self._now_doing("loading")
        version, tier = self._newest_usable()
        if tier == "shared":
            yield from self._move(self.world.reads, self.plan.restore_bytes or self.plan.checkpoint_bytes)
        elif tier != "start":
            yield self.env.timeout(self.plan.local_load_seconds if tier == "local" else self.plan.peer_load_seconds)
        logged = self._logged_work(version, tier)
        if logged > version.work:
            replay = (logged - version.work) / self.plan.log_step_seconds * self.plan.replay_step_seconds
            yield self.env.timeout(replay)
            self.replaying += replay
        self._roll_back(version, tier, logged)

    def _take_spare(self, spares: simpy.Container) -> Steps:
        with spares.get(1) as request:
            try:
                yield request
            finally:
                if request.triggered:  # if the job has failed meanwhile, too
                    self.missing -= 1
                    self.env.process(self._repair(spares))

    def _repair(self, spares: simpy.Container) -> Steps:
        yield self.env.timeout(self.world.cluster.repair_seconds)
        yield spares.put(1)

    def _newest_usable(self) -> tuple[_Version, str]:
        for version in reversed(self.versions):
            if self._from_local(version):
                return version, "local"
            if self._from_peers(version):
                return version, "peer"
            if version.shared_at < math.inf:
                return version, "shared"
        return _Version(0, 0.0, 0.0, staged=False), "start"

    def _from_local(self, version: _Version) -> bool:
        return version.local_at < math.inf and not self._lost_since(version.local_at)

    def _from_peers(self, version: _Version) -> bool:
        if math.isinf(version.peer_at) or math.isinf(version.local_at):
            return False
        return replica_placement.survives(self.world.holders, self._lost_since(min(version.local_at, version.peer_at)))

    def _lost_since(self, when: float) -> set[int]:
        return {node for node, at in self.wiped.items() if at >= when}

    def _logged_work(self, version: _Version, tier: str) -> float:
        """Logs exist on the near tiers only."""
        step = self.plan.log_step_seconds
        if not step or tier not in ("local", "peer"):
            return version.work
        durable = max(version.work, self.work - self.plan.log_latency_seconds)
        return version.work + math.floor((durable - version.work) / step) * step

    def _roll_back(self, version: _Version, tier: str, work: float) -> None:
        """The restore fills the SSDs of all nodes."""
        self.restores[tier] += 1
        self.spent["lost"] += self.work - work
        self.work = work
        sending = self.drain.version if self.drain else None
        self.versions = [one for one in self.versions if one in (version, sending) or one.shared_at < math.inf]
        for one in self.versions:
            one.staged = False
            if self._lost_since(one.local_at):
                one.local_at = one.peer_at = math.inf
        if self.plan.local and version.number:
            version.local_at = self.env.now
            version.peer_at = self.env.now if self.plan.peer else math.inf
        self.wiped.clear()

    def close(self) -> None:
        self._now_doing("over")
        self.exposure_max = max(self.exposure_max, self.env.now - self.shared_work_at)


@dataclass(eq=False, slots=True)
class Flow:
    """``done`` fires after its last byte."""

    left: float
    cap: float
    done: simpy.Event
    rate: float = 0.0


class Pipe:
    """Max-min fair with separate caps. Two events per transfer."""

    def __init__(self, env: simpy.Environment, bytes_per_second: float) -> None:
        self._env = env
        self._capacity = bytes_per_second
        self._flows: list[Flow] = []
        self._at = 0.0
        self._turn = 0

    def send(self, size_bytes: float, cap_bytes_per_second: float = math.inf) -> Flow:
        self._pass()
        flow = Flow(size_bytes, cap_bytes_per_second, self._env.event())
        self._flows.append(flow)
        self._share()
        return flow

    def cancel(self, flow: Flow) -> None:
        if flow in self._flows:
            self._pass()
            self._flows.remove(flow)
            self._share()

    def set_capacity(self, bytes_per_second: float) -> None:
        """Zero: an outage; transfers wait."""
        self._pass()
        self._capacity = bytes_per_second
        self._share()

    def _pass(self) -> None:
        elapsed, self._at = self._env.now - self._at, self._env.now
        for flow in self._flows:
            flow.left -= flow.rate * elapsed

    def _share(self) -> None:
        left = self._capacity
        for index, flow in enumerate(sorted(self._flows, key=lambda flow: flow.cap)):
            flow.rate = min(flow.cap, left / (len(self._flows) - index))
            left -= flow.rate
        self._turn += 1
        first = min((flow.left / flow.rate for flow in self._flows if flow.rate > 0), default=math.inf)
        if math.isfinite(first):
            turn = self._turn
            alarm = self._env.timeout(max(0.0, first))
            alarm.callbacks.append(lambda _: self._finish(turn))

    def _finish(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._pass()
        for flow in [flow for flow in self._flows if flow.left <= flow.rate * 1e-6]:  # a microsecond is rounding error
            self._flows.remove(flow)
            flow.done.succeed()
        self._share()
