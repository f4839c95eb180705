"""Which parameters move in which step of a window. ``planning.transfer_times`` decides how many steps, of what size."""

from __future__ import annotations

from collections.abc import Mapping

from ..planning.transfer_times import weights_of


def split_parts(sizes: Mapping[str, int], steps: int, gradient_share: float) -> list[list[str]]:
    """Cut the parameters, in their order, into at most ``steps`` parts. None is empty.

    Args:
        sizes: bytes of each parameter and its optimizer state.
        gradient_share: 0 makes equal parts; bytes of gradient for a byte of state make parts of equal traffic.
    """
    weights = weights_of(gradient_share, steps)
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
