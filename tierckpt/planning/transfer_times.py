"""Transfer times of restores and model loads, and of copies out of an accelerator.

Times are bounds of the slowest link. The four ways, with M bytes of state, G = rM of gradients, link bandwidth b, and F
for the forward and backward pass:
    async           training waits for the whole copy: M/b
    lazy            the next update waits for the rest of the copy: M/b - F (DataStates-LLM)
    multi-step      a part in each of K steps, plus the gradients of earlier parts: the time beyond F (GoCkpt)
    gradient log    G each step, after a base: fewer bytes than full checkpoints every i steps if i < M/G
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import ettr, optimal_interval
from .checked_numbers import Checked, Positive

STEPS_DEFAULT = 7
STEPS_MAX = 32
SHARE_MAX = 0.5
"""Value before an optimizer's first step: as many bytes of gradients as of all else."""
STALL_SECONDS_MAX = 0.04
"""Maximum stall of equal parts; above it, parts of equal traffic are used instead."""
UPDATES_PER_SECOND = 1e9
"""Rate of a node's processors: fused AdamW of ``torch.optim`` does 0.9 to 1.6 billion on two cores."""


@dataclass(frozen=True, slots=True)
class Bandwidths(Checked):
    """Bytes per second: of shared storage in total, of one node's SSDs and network, of one GPU's link to its host."""

    shared_write: Positive
    shared_read: Positive
    local_write: Positive
    local_read: Positive
    nic: Positive
    pcie: Positive


def write_seconds(size_bytes: float, nodes: int, rates: Bandwidths) -> float:
    return max(size_bytes / rates.shared_write, size_bytes / (nodes * rates.nic))


def read_seconds(shared_bytes: float, node_bytes: float, rates: Bandwidths) -> float:
    return max(shared_bytes / rates.shared_read, node_bytes / rates.nic)


def best_steps(gradient_share: float, steps_bytes: float = 0.0, state_bytes: float = 0.0) -> int:
    """Return the number of steps of a window: the fewest in which the link carries all, else K = 1/r + 1/2.

    ``gradient_share``: r, bytes of gradient for each byte of state. ``steps_bytes``: that the link moves during one
    forward and backward pass; 0 if unknown.
    """
    if not 0 < gradient_share < 1:
        return STEPS_DEFAULT
    most = max(1, min(STEPS_MAX, round(1 / gradient_share + 0.5)))
    if steps_bytes <= 0 or state_bytes <= 0:
        return min(most, STEPS_DEFAULT)
    # The traffic of a step, as a share of the state, is r / (1 - (1 - r)^K).
    step_bytes = state_bytes * gradient_share
    fitting = (steps for steps in range(1, most) if step_bytes / (1 - (1 - gradient_share) ** steps) <= steps_bytes)
    return next(fitting, most)


def weights_of(falling_share: float, steps: int) -> list[float]:
    return [(1 - falling_share) ** step for step in range(steps)]


def split_parts(sizes: Mapping[str, int], weights: Sequence[float]) -> list[list[str]]:
    """Split the parameters, in order, into at most ``len(weights)`` non-empty parts of these relative sizes."""
    total, weight = sum(sizes.values()), sum(weights)
    parts: list[list[str]] = [[]]
    moved, bound = 0.0, total * weights[0] / weight
    for key, size in sizes.items():
        while parts[-1] and moved + size / 2 > bound and len(parts) < len(weights):
            bound += total * weights[len(parts)] / weight
            parts.append([])
        parts[-1].append(key)
        moved += size
    return [part for part in parts if part]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a window would move, and that the link moves during one step. 0: unknown.

    Equal parts move least, but most in the last steps. Sizes that fall by (1 - r) make the traffic of all steps equal,
    for 1.62 of the state instead of 1.5 (r = 1/6, K = 7; GoCkpt).
    """

    state_bytes: float
    gradient_bytes: float
    bytes_per_second: float = 0.0
    step_seconds: float = 0.0

    @property
    def gradient_share(self) -> float:
        """Bytes of gradient for each byte of state."""
        return self.gradient_bytes / max(1, self.state_bytes)

    @property
    def step_bytes(self) -> float:
        return self.bytes_per_second * self.step_seconds

    def best_steps(self) -> int:
        return best_steps(self.gradient_share, self.step_bytes, self.state_bytes)

    def moved_bytes(self, weights: Sequence[float]) -> list[float]:
        """Count for each step its part, and the gradients of earlier parts."""
        total, copied, found = sum(weights), 0.0, []
        for weight in weights:
            size = self.state_bytes * weight / total
            found.append(size + self.gradient_share * copied)
            copied += size
        return found

    def stall_seconds(self, weights: Sequence[float]) -> float:
        over = sum(max(0.0, moved - self.step_bytes) for moved in self.moved_bytes(weights))
        return over / self.bytes_per_second if self.bytes_per_second else 0.0

    def falling_share(self, steps: int) -> float:
        """0 unless the link is too narrow."""
        share = min(self.gradient_share, SHARE_MAX)
        equal, falling = (self.stall_seconds(weights_of(one, steps)) for one in (0.0, share))
        return 0.0 if equal <= max(falling, STALL_SECONDS_MAX) else share


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to take checkpoints, and its cost. Bytes are of one rank's link.

    ``stall_seconds``: of one checkpoint; ``stall_step_seconds``: of every other step. A checkpoint, and with ``is_log``
    every step, is on the SSD ``latency_seconds`` after the stall.
    """

    name: str
    window_steps: int
    step_seconds: float
    stall_seconds: float
    stall_step_seconds: float
    link_bytes: float
    link_step_bytes: float
    latency_seconds: float
    interval_min_seconds: float
    is_log: bool = False
    replay_step_seconds: float = 0.0

    def stalled_share(self, interval_seconds: float) -> float:
        return self.stall_seconds / interval_seconds + self.stall_step_seconds / self.step_seconds

    def replay_seconds(self, interval_seconds: float) -> float:
        return self.replay_step_seconds * interval_seconds / self.step_seconds / 2

    def lost_seconds(self, interval_seconds: float) -> float:
        """Mean cost of a failure: repeated training and replayed steps."""
        since = self.step_seconds if self.is_log else interval_seconds
        return since / 2 + self.latency_seconds + self.replay_seconds(interval_seconds)

    def best_interval_seconds(self, mtbf_seconds: float) -> float:
        """Return the interval of least stall and loss, in whole steps. Bases of a log do not stall."""
        found = max(self.interval_min_seconds, optimal_interval.exact(self.stall_seconds, mtbf_seconds))
        return max(1, math.ceil(found / self.step_seconds - 1e-9)) * self.step_seconds

    def ettr(self, interval_seconds: float, mtbf_seconds: float, restart_seconds: float) -> float:
        """A log takes a checkpoint each step."""
        span = self.step_seconds if self.is_log else interval_seconds
        restart = restart_seconds + self.replay_seconds(interval_seconds)
        return ettr.exact(
            span, span * self.stalled_share(interval_seconds), mtbf_seconds, restart, self.latency_seconds
        )


def modes(
    state_bytes: float,
    gradient_bytes: float,
    parameters: float,
    *,
    ranks: float,
    step_seconds: float,
    interval_min_seconds: float,
    rates: Bandwidths,
) -> tuple[Mode, ...]:
    """Return the four ways for a rank that writes ``state_bytes``, with ``ranks`` a node."""
    copy, flush = state_bytes / rates.pcie, ranks * state_bytes / rates.local_write
    traffic = Traffic(state_bytes, gradient_bytes, rates.pcie, step_seconds)
    steps = traffic.best_steps()
    parts = weights_of(traffic.falling_share(steps), steps)
    moved, written = gradient_bytes / rates.pcie, ranks * gradient_bytes / rates.local_write
    update = ranks * parameters / UPDATES_PER_SECOND
    beside = max(0.0, copy - step_seconds)
    window = max(steps * step_seconds, interval_min_seconds)
    return (
        Mode("async", 0, step_seconds, copy, 0.0, state_bytes, 0.0, flush, interval_min_seconds),
        Mode("lazy", 1, step_seconds, beside, 0.0, state_bytes, 0.0, copy - beside + flush, interval_min_seconds),
        Mode(
            "multi-step", steps, step_seconds, traffic.stall_seconds(parts), 0.0, sum(traffic.moved_bytes(parts)), 0.0,
            moved + update + flush, window,
        ),
        Mode(
            "gradient log", 0, step_seconds, 0.0, max(0.0, max(moved, written) - step_seconds), 0.0, gradient_bytes,
            moved + written, interval_min_seconds, is_log=True,
            replay_step_seconds=max(moved, ranks * gradient_bytes / rates.local_read),
        ),
    )  # fmt: skip
