"""The sizer: from a model, a mesh and a site to bytes, bandwidths, times, intervals and ETTR. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import ConfigError
from . import ettr, optimal_interval, transfer_times
from .checked_numbers import not_negative, positive, share, whole
from .ettr import DAY_SECONDS, Level
from .optimal_interval import Schedule
from .training_state import Mesh, Model, TrainingState
from .transfer_times import Bandwidths, Mode

STALL_BUDGETS_SECONDS = (1.0, 5.0, 10.0, 60.0, 120.0)
WARRANTY_YEARS = 5.0
"""Period for which vendors specify the drive writes per day."""

FAILURES_PER_NODE_DAY = 6.5e-3
"""Rate of 8-GPU nodes, as measured by Meta on RSC-1 (RSC-2: 2.34e-3)."""


@dataclass(frozen=True, slots=True)
class Site:
    """Hardware and operations of a site. The defaults are plain assumptions; give your own numbers.

    ``node_loss_share``, ``domain_loss_share``: of failures, those that lose a node's SSDs, and a whole rack's.
    ``restart_seconds``: without loading. ``drain_slowdown``: of training, by a drain.
    """

    rates: Bandwidths = field(
        default_factory=lambda: Bandwidths(
            shared_write=100e9, shared_read=100e9, local_write=10e9, local_read=40e9, nic=25e9, pcie=25e9
        )
    )
    step_seconds: float = 10.0
    mtbf_seconds: float | None = None
    failures_per_node_day: float = FAILURES_PER_NODE_DAY
    node_loss_share: float = 0.5
    domain_loss_share: float = 0.02
    restart_seconds: float = 300.0
    drain_slowdown: float = 0.01
    ssd_bytes: float = 30e12
    ssd_dwpd: float = 1.0
    keep_local: int = 2
    in_flight: int = 1
    replicas: int = 2
    split: bool = True
    load_nodes: int | None = None
    stall_budgets_seconds: tuple[float, ...] = STALL_BUDGETS_SECONDS

    def __post_init__(self) -> None:
        positive(self.step_seconds, "step time", "seconds")
        positive(self.failures_per_node_day, "failures per node and day")
        if self.mtbf_seconds is not None:
            positive(self.mtbf_seconds, "MTBF", "seconds")
        if share(self.node_loss_share, "share of node losses") + share(self.domain_loss_share, "of domain losses") > 1:
            raise ConfigError(
                f"shares of node and domain losses are {self.node_loss_share:g} and {self.domain_loss_share:g}: "
                "together they must not pass 1"
            )
        not_negative(self.restart_seconds, "restart time")
        share(self.drain_slowdown, "slowdown while draining")
        positive(self.ssd_bytes, "SSD capacity", "bytes")
        positive(self.ssd_dwpd, "drive writes per day")
        for name in ("keep_local", "in_flight", "replicas"):
            whole(getattr(self, name), name.replace("_", " "))
        for budget in self.stall_budgets_seconds:
            positive(budget, "stall budget", "seconds")


@dataclass(frozen=True, slots=True)
class ComponentRow:
    name: str
    bytes_per_parameter: float
    total_bytes: float
    rank_bytes: float
    saved: bool


@dataclass(frozen=True, slots=True)
class WriteRow:
    """Bandwidths of a blocking save within ``stall_seconds``."""

    stall_seconds: float
    bytes_per_second: float
    node_bytes_per_second: float
    rank_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class PathRow:
    name: str
    shared_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Endurance:
    needed_bytes: float
    written_bytes_per_day: float
    drive_writes_per_day: float
    years: float
    """Time until the rated terabytes written are used up."""


@dataclass(frozen=True, slots=True)
class TierRow:
    name: str
    levels: tuple[Level, ...]
    schedule: Schedule | None
    ettr: float
    young_seconds: float
    daly_seconds: float
    exact_seconds: float
    """Optima of the first level alone, against all failures."""

    def interval_seconds(self, place: int) -> float | None:
        return self.schedule.steps_by_level[place] * self.schedule.step_seconds if self.schedule else None


@dataclass(frozen=True, slots=True)
class Sizing:
    """Rates are bytes per second."""

    model: Model
    mesh: Mesh
    site: Site
    model_bytes: float
    checkpoint_bytes: float
    bytes_per_parameter: float
    components: tuple[ComponentRow, ...]
    rank_held_bytes: float
    rank_written_bytes: float
    node_held_bytes: float
    node_written_bytes: float
    writing_nodes: int
    mtbf_seconds: float
    stage_seconds: float
    host_bytes: float
    replica_bytes: float
    writes: tuple[WriteRow, ...]
    ssd: Endurance
    drain_seconds: float
    drain_bytes_per_second: float
    restores: tuple[PathRow, ...]
    loads: tuple[PathRow, ...]
    load_nodes: int
    tiers: tuple[TierRow, ...]
    modes: tuple[Mode, ...]
    warnings: tuple[str, ...]

    @property
    def log_step_bytes(self) -> float:
        """Bytes of a gradient log, over all ranks."""
        return sum(row.total_bytes for row in self.components if row.name == "gradients")

    @property
    def log_interval_steps(self) -> float:
        """Below it a log moves fewer bytes than full checkpoints."""
        return self.checkpoint_bytes / self.log_step_bytes

    @property
    def log_drive_writes_per_day(self) -> float:
        node_bytes = self.log_step_bytes * self.node_written_bytes / self.checkpoint_bytes
        return node_bytes * DAY_SECONDS / self.site.step_seconds / self.site.ssd_bytes

    @property
    def node_update_seconds(self) -> float:
        """Processor time of one step of a node's share, near storage."""
        share = self.node_written_bytes / self.checkpoint_bytes
        return self.model.parameters * share / transfer_times.UPDATES_PER_SECOND

    @property
    def copy_restart_seconds(self) -> float:
        """Restart from a copy on the SSDs or on a peer, loading included."""
        return self.site.restart_seconds + next(row.seconds for row in self.restores if row.name == "local")


def size(model: Model, state: TrainingState, mesh: Mesh | None = None, site: Site | None = None) -> Sizing:
    """Raises ConfigError that names the invalid value. Cost: milliseconds."""
    mesh, site = mesh or Mesh(), site or Site()
    mesh.check(model)
    job = _Quantities(model, state, mesh, site)
    restores = job.restores()
    fastest = min(row.seconds for row in restores) + site.restart_seconds
    if job.mtbf <= fastest:
        raise ConfigError(
            f"MTBF is {job.mtbf:.0f} s, and a restart takes {fastest:.0f} s at best: such a job makes no progress",
            hint=f"Valid is an MTBF well above {fastest:.0f} s: fewer nodes, fewer failures or a faster restart",
        )
    tiers = job.tiers({row.name: row.seconds for row in restores})
    local_interval, shared_interval = _intervals(tiers)
    load_nodes = whole(site.load_nodes, "nodes to load on") if site.load_nodes is not None else mesh.nodes
    return Sizing(
        model=model,
        mesh=mesh,
        site=site,
        model_bytes=job.model_bytes,
        checkpoint_bytes=job.checkpoint_bytes,
        bytes_per_parameter=state.saved_bytes,
        components=job.components(),
        rank_held_bytes=job.rank_held,
        rank_written_bytes=job.rank_written,
        node_held_bytes=job.node_held,
        node_written_bytes=job.node_written,
        writing_nodes=job.writing_nodes,
        mtbf_seconds=job.mtbf,
        stage_seconds=job.stage_seconds,
        host_bytes=job.host_bytes,
        replica_bytes=job.replica_bytes,
        writes=job.writes(),
        ssd=job.endurance(local_interval),
        drain_seconds=job.drain_seconds,
        drain_bytes_per_second=job.checkpoint_bytes / shared_interval,
        restores=restores,
        loads=_loads(job.model_bytes, load_nodes, site.rates),
        load_nodes=load_nodes,
        tiers=tiers,
        modes=job.modes(),
        warnings=job.warnings(shared_interval),
    )


class _Quantities:
    def __init__(self, model: Model, state: TrainingState, mesh: Mesh, site: Site) -> None:
        self.model, self.state, self.mesh, self.site = model, state, mesh, site
        self.model_bytes = model.parameters * state.weight_bytes
        self.checkpoint_bytes = model.parameters * state.saved_bytes
        self.rank_held = mesh.held_bytes(model, state)
        self.node_held = mesh.held_by_node_bytes(model, state)
        self.rank_written = mesh.written_bytes(model, state, split=site.split)
        self.writing_nodes = mesh.writing_nodes(state, split=site.split)
        self.node_written = min(self.rank_written * mesh.ranks_per_node, self.checkpoint_bytes)
        self.mtbf = site.mtbf_seconds or ettr.mtbf_seconds(mesh.nodes, site.failures_per_node_day)
        self.stage_seconds = self.rank_written / site.rates.pcie
        self.drain_seconds = transfer_times.write_seconds(self.checkpoint_bytes, self.writing_nodes, site.rates)

    @property
    def flush_seconds(self) -> float:
        return self.node_written / self.site.rates.local_write

    @property
    def host_bytes(self) -> float:
        return (self.site.in_flight + 1) * self.node_written

    @property
    def replica_bytes(self) -> float:
        return 2 * (self.site.replicas - 1) * self.node_written

    def components(self) -> tuple[ComponentRow, ...]:
        return tuple(
            ComponentRow(
                part.name,
                part.bytes_per_parameter,
                part.bytes_per_parameter * self.model.parameters,
                self.mesh.rank_bytes(self.model, part),
                part.is_saved,
            )
            for part in self.state.components
        )

    def writes(self) -> tuple[WriteRow, ...]:
        return tuple(
            WriteRow(budget, self.checkpoint_bytes / budget, self.node_written / budget, self.rank_written / budget)
            for budget in self.site.stall_budgets_seconds
        )

    def restores(self) -> tuple[PathRow, ...]:
        """Naive: every replica reads the whole checkpoint. Sharded: every rank its part.

        Fanned out: each byte leaves shared storage once. Local: each node reads its own files, the rest from peers.
        """
        rates, nodes, ranks = self.site.rates, self.mesh.nodes, self.mesh.ranks_per_node
        naive = self.checkpoint_bytes * self.mesh.replicas
        sharded = self.rank_held * self.mesh.gpus
        to_device = self.rank_held / rates.pcie
        elsewhere = max(0.0, self.node_held - self.node_written)
        own = max(self.node_written / rates.local_read, elsewhere / rates.nic, to_device)
        return (
            PathRow("naive", naive, max(transfer_times.read_seconds(naive, naive / nodes, rates), to_device)),
            PathRow(
                "sharded", sharded, max(transfer_times.read_seconds(sharded, self.rank_held * ranks, rates), to_device)
            ),
            PathRow(
                "fanned out",
                self.checkpoint_bytes,
                max(transfer_times.read_seconds(self.checkpoint_bytes, self.node_held, rates), to_device),
            ),
            PathRow("peer", 0.0, max(own, self.node_held / rates.nic)),
            PathRow("local", 0.0, own),
        )

    def tiers(self, seconds: dict[str, float]) -> tuple[TierRow, ...]:
        """Copies to peers stall nothing."""
        site = self.site
        blocking = Level("shared", self.drain_seconds, site.restart_seconds + seconds["sharded"], self.mtbf)
        background = Level(
            "shared",
            self.stage_seconds + site.drain_slowdown * self.drain_seconds,
            site.restart_seconds + seconds["sharded"],
            self.mtbf,
            latency_seconds=self.drain_seconds,
            interval_min_seconds=self.drain_seconds,
        )
        losses = site.node_loss_share + site.domain_loss_share
        local = self._near("local", 1 - losses, seconds["local"], self.flush_seconds)
        drained = self._drained(losses, seconds["fanned out"])
        peer_seconds = self.flush_seconds + self.node_written * (site.replicas - 1) / site.rates.nic
        peer = Level(
            "peer",
            0.0,
            site.restart_seconds + seconds["peer"],
            self._mtbf_of(site.node_loss_share),
            latency_seconds=peer_seconds,
            interval_min_seconds=peer_seconds,
        )
        rows = [
            self._row("shared, blocking", (blocking,)),
            self._row("shared, in the background", (background,)),
            self._row("local + shared", (local, drained)),
        ]
        if site.replicas > 1 and self.mesh.nodes >= site.replicas:
            deep = self._drained(site.domain_loss_share, seconds["fanned out"])
            rows.append(self._row("local + peer + shared", (local, peer, deep)))
        return tuple(rows)

    def modes(self) -> tuple[Mode, ...]:
        part = self.rank_written / self.state.saved_bytes
        gradients = sum(one.bytes_per_parameter for one in self.state.components if not one.is_saved)
        return transfer_times.modes(
            self.rank_written,
            part * gradients,
            part,
            ranks=self.node_written / self.rank_written,
            step_seconds=self.site.step_seconds,
            interval_min_seconds=max(self.flush_seconds, self.worn_out_seconds),
            rates=self.site.rates,
        )

    @property
    def worn_out_seconds(self) -> float:
        """Interval at which a node's SSDs reach their rated writes."""
        return self.node_written * DAY_SECONDS / (self.site.ssd_bytes * self.site.ssd_dwpd)

    def _near(self, name: str, part: float, load_seconds: float, flush_seconds: float) -> Level:
        return Level(
            name,
            self.stage_seconds,
            self.site.restart_seconds + load_seconds,
            self._mtbf_of(part),
            latency_seconds=flush_seconds,
            interval_min_seconds=max(flush_seconds, self.worn_out_seconds),
        )

    def _drained(self, part: float, load_seconds: float) -> Level:
        return Level(
            "shared",
            self.site.drain_slowdown * self.drain_seconds,
            self.site.restart_seconds + load_seconds,
            self._mtbf_of(part),
            latency_seconds=self.flush_seconds + self.drain_seconds,
            interval_min_seconds=self.drain_seconds,
        )

    def _row(self, name: str, levels: tuple[Level, ...]) -> TierRow:
        stall = levels[0].stall_seconds
        optima = [
            find(stall, self.mtbf) for find in (optimal_interval.young, optimal_interval.daly, optimal_interval.exact)
        ]
        try:
            schedule: Schedule | None = optimal_interval.plan(levels, self.site.step_seconds)
        except ConfigError:
            schedule = None
        return TierRow(name, levels, schedule, schedule.ettr if schedule else 0.0, *optima)

    def _mtbf_of(self, part: float) -> float:
        return self.mtbf / part if part > 1e-12 else float("inf")

    def endurance(self, interval_seconds: float) -> Endurance:
        site = self.site
        daily = self.node_written * DAY_SECONDS / interval_seconds
        rated = site.ssd_bytes * site.ssd_dwpd * 365 * WARRANTY_YEARS
        needed = (site.keep_local + site.in_flight) * self.node_written
        return Endurance(needed, daily, daily / site.ssd_bytes, rated / (daily * 365))

    def warnings(self, shared_interval: float) -> tuple[str, ...]:
        site, found = self.site, []
        needed = (site.keep_local + site.in_flight) * self.node_written
        if needed > site.ssd_bytes:
            found.append(
                f"the SSDs of a node hold {site.ssd_bytes / 1e12:.3g} TB, and {site.keep_local} checkpoints kept and "
                f"{site.in_flight} in flight take {needed / 1e12:.3g} TB: split replicated bytes, or keep fewer"
            )
        if self.checkpoint_bytes / shared_interval > 0.8 * site.rates.shared_write:
            found.append("drains take more than 80 % of the write bandwidth of shared storage all the time")
        return tuple(found)


def _loads(model_bytes: float, nodes: int, rates: Bandwidths) -> tuple[PathRow, ...]:
    return (
        PathRow("direct", nodes * model_bytes, transfer_times.load_direct_seconds(model_bytes, nodes, rates)),
        PathRow("fanned out", model_bytes, transfer_times.load_fanout_seconds(model_bytes, nodes, rates)),
        PathRow("cached", 0.0, transfer_times.load_cached_seconds(model_bytes, rates)),
    )


def _intervals(tiers: Sequence[TierRow]) -> tuple[float, float]:
    for row in reversed(tiers):
        if row.schedule is not None:
            return row.interval_seconds(0) or 1.0, row.interval_seconds(len(row.levels) - 1) or 1.0
    raise ConfigError(
        "failures come faster than this job can restart from any tier, so it would make no progress",
        hint="Give a longer MTBF, a shorter restart or faster tiers",
    )
