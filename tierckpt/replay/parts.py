"""Which parameters move in which step of a window, and how many steps it has.

With ``r`` bytes of gradient for a byte of state, a part that moves in step j of K costs r (K - j) more: its gradients
follow it in every later step. Sizes that fall by (1 - r) from step to step make the traffic of all steps equal. The
transfer that a window hides, K - r K (K - 1) / 2 of a step's, is largest at K = 1/r + 1/2: 7 or 8 for 14 bytes of state
and 2 of gradient. Source: GoCkpt; the equations are derived in its terms.
"""

from __future__ import annotations

from collections.abc import Mapping

STEPS_DEFAULT = 7
STEPS_MAX = 32
SHARE_MAX = 0.5
"""Before its first step an optimizer has no state: as many bytes of gradients as of all else. It will have some."""


def best_steps(gradient_share: float, steps_bytes: float = 0.0, state_bytes: float = 0.0) -> int:
    """Return how many steps a window should have.

    Args:
        gradient_share: bytes of gradient for each byte of state.
        steps_bytes: what the link moves during the forward and backward passes of one step; 0 when it is not known.
        state_bytes: of parameters and optimizer state.
    """
    if not 0 < gradient_share < 1:
        return STEPS_DEFAULT
    most = max(1, min(STEPS_MAX, round(1 / gradient_share + 0.5)))
    if steps_bytes <= 0 or state_bytes <= 0:
        return min(most, STEPS_DEFAULT)
    for steps in range(1, most + 1):
        if state_bytes * gradient_share / (1 - (1 - gradient_share) ** steps) <= steps_bytes:
            return steps
    return most


def split_parts(sizes: Mapping[str, int], steps: int, gradient_share: float) -> list[list[str]]:
    """Cut the parameters, in their order, into at most ``steps`` parts of equalised traffic. None is empty.

    Args:
        sizes: bytes of each parameter and its optimizer state.
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
