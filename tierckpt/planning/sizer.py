"""The sizer: from a model, a mesh and a site to bytes, bandwidths, times, intervals and ETTR. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from ..errors import ConfigError
from . import ettr, optimal_interval, transfer_times
from .checked_numbers import Checked, Count, NotNegative, Positive, Share, positive, whole
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
class Site(Checked):
    """Hardware and operations of a site. The defaults are plain assumptions; give your own numbers.

    ``node_loss_share``, ``domain_loss_share``: of failures, those that lose a node's SSDs, and a whole rack's.
    ``restart_seconds``: without loading. ``drain_slowdown``: of training, by a drain.
    """

    rates: Bandwidths = field(
        default_factory=lambda: Bandwidths(
            shared_write=100e9, shared_read=100e9, local_write=10e9, local_read=40e9, nic=25e9, pcie=25e9
        )
    )
    step_seconds: Positive = 10.0
    mtbf_seconds: Annotated[float | None, positive] = None
    failures_per_node_day: Positive = FAILURES_PER_NODE_DAY
    node_loss_share: Share = 0.5
    domain_loss_share: Share = 0.02
    restart_seconds: NotNegative = 300.0
    drain_slowdown: Share = 0.01
    ssd_bytes: Positive = 30e12
    ssd_dwpd: Positive = 1.0
    keep_local: Count = 2
    in_flight: Count = 1
    replicas: Count = 2
    split: bool = True
    load_nodes: Annotated[int | None, whole] = None
    stall_budgets_seconds: tuple[float, ...] = STALL_BUDGETS_SECONDS

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.node_loss_share + self.domain_loss_share > 1:
            raise ConfigError(
                f"shares of node and domain losses are {self.node_loss_share:g} and {self.domain_loss_share:g}: "
                "together they must not pass 1"
            )
        for budget in self.stall_budgets_seconds:
            positive(budget, "stall budget")


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

    def interval_seconds(self, place: int) -> float | None:
        return self.schedule.steps_by_level[place] * self.schedule.step_seconds if self.schedule else None


def size(model: Model, state: TrainingState, mesh: Mesh | None = None, site: Site | None = None) -> Sizing:
    """Raises ConfigError that names the invalid value. Cost: milliseconds."""
    return Sizing(model, state, mesh or Mesh(), site or Site())


class Sizing:
    """Rates are bytes per second."""

    def __init__(self, model: Model, state: TrainingState, mesh: Mesh, site: Site) -> None:
        mesh.check(model)
        self.model, self.state, self.mesh, self.site = model, state, mesh, site
        self.bytes_per_parameter = state.saved_bytes
        self.model_bytes = model.parameters * state.weight_bytes
        self.checkpoint_bytes = model.parameters * state.saved_bytes
        self.rank_held_bytes = mesh.held_bytes(model, state)
        self.node_held_bytes = min(mesh.ranks_per_node * self.rank_held_bytes, self.checkpoint_bytes)
        self.rank_written_bytes = mesh.written_bytes(model, state, split=site.split)
        self.writing_nodes = mesh.writing_nodes(state, split=site.split)
        self.node_written_bytes = min(self.rank_written_bytes * mesh.ranks_per_node, self.checkpoint_bytes)
        self.host_bytes = (site.in_flight + 1) * self.node_written_bytes
        self.replica_bytes = 2 * (site.replicas - 1) * self.node_written_bytes
        self.mtbf_seconds = site.mtbf_seconds or ettr.mtbf_seconds(mesh.nodes, site.failures_per_node_day)
        self.stage_seconds = self.rank_written_bytes / site.rates.pcie
        self.drain_seconds = transfer_times.write_seconds(self.checkpoint_bytes, self.writing_nodes, site.rates)
        self._flush_seconds = self.node_written_bytes / site.rates.local_write
        # The interval at which a node's SSDs reach their rated writes.
        self._worn_out_seconds = self.node_written_bytes * DAY_SECONDS / (site.ssd_bytes * site.ssd_dwpd)
        self.components = tuple(
            ComponentRow(
                part.name,
                part.bytes_per_parameter,
                part.bytes_per_parameter * model.parameters,
                mesh.rank_bytes(model, part),
                part.is_saved,
            )
            for part in state.components
        )
        sizes = (self.checkpoint_bytes, self.node_written_bytes, self.rank_written_bytes)
        self.writes = tuple(WriteRow(budget, *(one / budget for one in sizes)) for budget in site.stall_budgets_seconds)
        self.restores = self._restores()
        fastest = min(row.seconds for row in self.restores) + site.restart_seconds
        if self.mtbf_seconds <= fastest:
            raise ConfigError(
                f"MTBF is {self.mtbf_seconds:.0f} s, and a restart takes {fastest:.0f} s at best: such a job makes no "
                "progress",
                hint=f"Valid is an MTBF well above {fastest:.0f} s: fewer nodes, fewer failures or a faster restart",
            )
        self.tiers = self._tiers({row.name: row.seconds for row in self.restores})
        local_interval, shared_interval = _intervals(self.tiers)
        self.drain_bytes_per_second = self.checkpoint_bytes / shared_interval
        self.load_nodes = site.load_nodes or mesh.nodes
        self.loads = self._loads()
        self.modes = self._modes()
        self.ssd = self._endurance(local_interval)
        self.warnings = self._warnings()

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

    def _restores(self) -> tuple[PathRow, ...]:
        """Naive: every replica reads the whole checkpoint. Sharded: every rank its part.

        Fanned out: each byte leaves shared storage once. Local: each node reads its own files, the rest from peers.
        """
        rates, nodes = self.site.rates, self.mesh.nodes
        naive = self.checkpoint_bytes * self.mesh.replicas
        from_shared = [
            ("naive", naive, naive / nodes),
            ("sharded", self.rank_held_bytes * self.mesh.gpus, self.rank_held_bytes * self.mesh.ranks_per_node),
            ("fanned out", self.checkpoint_bytes, self.node_held_bytes),
        ]
        to_device = self.rank_held_bytes / rates.pcie
        elsewhere = max(0.0, self.node_held_bytes - self.node_written_bytes)
        own = max(self.node_written_bytes / rates.local_read, elsewhere / rates.nic, to_device)
        return (
            *(
                PathRow(name, shared, max(transfer_times.read_seconds(shared, node, rates), to_device))
                for name, shared, node in from_shared
            ),
            PathRow("peer", 0.0, max(own, self.node_held_bytes / rates.nic)),
            PathRow("local", 0.0, own),
        )

    def _loads(self) -> tuple[PathRow, ...]:
        """Fanned out: each of N nodes reads 1/N of shared storage, and the rest from peers."""
        model_bytes, rates = self.model_bytes, self.site.rates
        all_bytes, part_bytes = self.load_nodes * model_bytes, model_bytes / self.load_nodes
        from_peers = (model_bytes - part_bytes) / rates.nic
        return (
            PathRow("direct", all_bytes, transfer_times.read_seconds(all_bytes, model_bytes, rates)),
            PathRow(
                "fanned out", model_bytes, transfer_times.read_seconds(model_bytes, part_bytes, rates) + from_peers
            ),
            PathRow("cached", 0.0, model_bytes / rates.local_read),
        )

    def _tiers(self, seconds: dict[str, float]) -> tuple[TierRow, ...]:
        """Copies to peers stall nothing."""
        site, flush, drain = self.site, self._flush_seconds, self.drain_seconds
        drain_stall = site.drain_slowdown * drain

        def level(name: str, stall: float, load: str, part: float, latency: float, interval_min: float) -> Level:
            mtbf = self.mtbf_seconds / part if part > 1e-12 else float("inf")
            return Level(name, stall, site.restart_seconds + seconds[load], mtbf, latency, interval_min)

        def drained(part: float) -> Level:
            return level("shared", drain_stall, "fanned out", part, flush + drain, drain)

        losses = site.node_loss_share + site.domain_loss_share
        local = level("local", self.stage_seconds, "local", 1 - losses, flush, max(flush, self._worn_out_seconds))
        copied = flush + self.node_written_bytes * (site.replicas - 1) / site.rates.nic
        rows = [
            self._row("shared, blocking", level("shared", drain, "sharded", 1.0, 0.0, 0.0)),
            self._row(
                "shared, in the background",
                level("shared", self.stage_seconds + drain_stall, "sharded", 1.0, drain, drain),
            ),
            self._row("local + shared", local, drained(losses)),
        ]
        if site.replicas > 1 and self.mesh.nodes >= site.replicas:
            peer = level("peer", 0.0, "peer", site.node_loss_share, copied, copied)
            rows.append(self._row("local + peer + shared", local, peer, drained(site.domain_loss_share)))
        return tuple(rows)

    def _row(self, name: str, *levels: Level) -> TierRow:
        try:
            schedule: Schedule | None = optimal_interval.plan(levels, self.site.step_seconds)
        except ConfigError:
            schedule = None
        return TierRow(name, levels, schedule, schedule.ettr if schedule else 0.0)

    def _modes(self) -> tuple[Mode, ...]:
        part = self.rank_written_bytes / self.state.saved_bytes
        gradients = sum(one.bytes_per_parameter for one in self.state.components if not one.is_saved)
        return transfer_times.modes(
            self.rank_written_bytes,
            part * gradients,
            part,
            ranks=self.node_written_bytes / self.rank_written_bytes,
            step_seconds=self.site.step_seconds,
            interval_min_seconds=max(self._flush_seconds, self._worn_out_seconds),
            rates=self.site.rates,
        )

    def _endurance(self, interval_seconds: float) -> Endurance:
        site = self.site
        daily = self.node_written_bytes * DAY_SECONDS / interval_seconds
        rated = site.ssd_bytes * site.ssd_dwpd * 365 * WARRANTY_YEARS
        needed = (site.keep_local + site.in_flight) * self.node_written_bytes
        return Endurance(needed, daily, daily / site.ssd_bytes, rated / (daily * 365))

    def _warnings(self) -> tuple[str, ...]:
        site, needed, found = self.site, self.ssd.needed_bytes, []
        if needed > site.ssd_bytes:
            found.append(
                f"the SSDs of a node hold {site.ssd_bytes / 1e12:.3g} TB, and {site.keep_local} checkpoints kept and "
                f"{site.in_flight} in flight take {needed / 1e12:.3g} TB: split replicated bytes, or keep fewer"
            )
        if self.drain_bytes_per_second > 0.8 * site.rates.shared_write:
            found.append("drains take more than 80 % of the write bandwidth of shared storage all the time")
        return tuple(found)


def _intervals(tiers: Sequence[TierRow]) -> tuple[float, float]:
    for row in reversed(tiers):
        if row.schedule is not None:
            return row.interval_seconds(0) or 1.0, row.interval_seconds(len(row.levels) - 1) or 1.0
    raise ConfigError(
        "failures come faster than this job can restart from any tier, so it would make no progress",
        hint="Give a longer MTBF, a shorter restart or faster tiers",
    )
