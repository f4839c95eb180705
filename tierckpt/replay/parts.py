"""Which parameters move in which step of a window. How many steps it has, ``planning.transfer.best_steps`` decides.

With ``r`` bytes of gradient for a byte of state, a part that moves in step j of K costs r (K - j) more: its gradients
follow it in every later step. Sizes that fall by (1 - r) from step to step make the traffic of all steps equal.
Source: GoCkpt; the equations are derived in its terms.
"""

from __future__ import annotations

from collections.abc import Mapping

SHARE_MAX = 0.5
"""Before its first step an optimizer has no state: as many bytes of gradients as of all else. It will have some."""


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
