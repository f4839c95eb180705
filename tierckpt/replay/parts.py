"""Which parameters move in which step of a window. How many steps it has, ``planning.transfer.best_steps`` decides.

Equal parts move least: 1 + r (K - 1) / 2 of the state, with ``r`` bytes of gradient for a byte of state: gradients of a
part follow it in every later step, so the last steps of a window have most to move. Where the link does not carry that,
sizes that fall by (1 - r) from step to step make the traffic of all steps equal, for 1.62 of the state instead of 1.5
(r = 1/6, K = 7). Source: GoCkpt; the equations are derived in its terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..planning.transfer import best_steps

SHARE_MAX = 0.5
"""Before its first step an optimizer has no state: as many bytes of gradients as of all else. It will have some."""


STALL_SECONDS_MAX = 0.04
"""What a window of equal parts may keep training waiting, before parts of equal traffic are moved instead."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a window would move, and what the link moves beside one step. 0: not known yet."""

    state_bytes: int
    gradient_bytes: int
    bytes_per_second: float = 0.0
    step_seconds: float = 0.0

    @property
    def share(self) -> float:
        """Bytes of gradient for each byte of state."""
        return self.gradient_bytes / max(1, self.state_bytes)

    @property
    def step_bytes(self) -> float:
        return self.bytes_per_second * self.step_seconds

    def best_steps(self) -> int:
        return best_steps(self.share, self.step_bytes, self.state_bytes)

    def stall_seconds(self, weights: Sequence[float]) -> float:
        """How long training waits for parts whose sizes are as ``weights``, by arithmetic."""
        moved = over = 0.0
        for weight in weights:
            size = self.state_bytes * weight / sum(weights)
            over += max(0.0, size + self.share * moved - self.step_bytes)
            moved += size
        return over / self.bytes_per_second if self.bytes_per_second else 0.0

    def falling_share(self, steps: int) -> float:
        """Return by what share parts are to fall from step to step: 0, equal parts, unless the link is too narrow."""
        share = min(self.share, SHARE_MAX)
        equal, falling = self.stall_seconds([1.0] * steps), self.stall_seconds([(1 - share) ** n for n in range(steps)])
        return 0.0 if equal <= max(falling, STALL_SECONDS_MAX) else share


def split_parts(sizes: Mapping[str, int], steps: int, gradient_share: float) -> list[list[str]]:
    """Cut the parameters, in their order, into at most ``steps`` parts. None is empty.

    Args:
        sizes: bytes of each parameter and its optimizer state.
        gradient_share: 0 makes equal parts; bytes of gradient for a byte of state make parts of equal traffic.
    """
    share = min(max(gradient_share, 0.0), SHARE_MAX)
    weights = [(1 - share) ** step for step in range(max(1, steps))]
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
