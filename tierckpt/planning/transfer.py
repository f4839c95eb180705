"""How long bytes take: restores and model loads, naive, from local copies, and fanned out between nodes.

Times are bounds by bandwidth: the slowest link that all bytes of the plan must pass. Latencies and small files come on
top, and are small beside them for the sizes this is for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .quantities import positive, whole


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes per second: of shared storage as a whole, of one node's SSDs and network, of one GPU's link to its host."""

    shared_write: float
    shared_read: float
    local_write: float
    local_read: float
    nic: float
    pcie: float

    def __post_init__(self) -> None:
        for name in ("shared_write", "shared_read", "local_write", "local_read", "nic", "pcie"):
            positive(getattr(self, name), f"bandwidth {name.replace('_', ' ')}", "bytes per second")


def write_seconds(size_bytes: float, nodes: int, rates: Bandwidths) -> float:
    """``size_bytes`` from ``nodes`` to shared storage."""
    return max(size_bytes / rates.shared_write, size_bytes / (nodes * rates.nic))


def read_seconds(shared_bytes: float, node_bytes: float, rates: Bandwidths) -> float:
    """``shared_bytes`` out of shared storage, of which each node takes in ``node_bytes``."""
    return max(shared_bytes / rates.shared_read, node_bytes / rates.nic)


def load_direct_seconds(model_bytes: float, nodes: int, rates: Bandwidths) -> float:
    """Every node reads the whole model from shared storage: N·M/B, or what its network takes."""
    return read_seconds(whole(nodes, "nodes") * model_bytes, model_bytes, rates)


def load_cached_seconds(model_bytes: float, rates: Bandwidths) -> float:
    """Every node reads it from its own SSDs, however many nodes there are."""
    return model_bytes / rates.local_read


def load_fanout_seconds(model_bytes: float, nodes: int, rates: Bandwidths) -> float:
    """Each byte leaves shared storage once, each node reads 1/N and has the rest from its peers, one after the other.

    M/B + M(N-1)/N/b: flat in N. A loader that passes chunks on while more arrive comes near the larger of the two.
    """
    share = model_bytes / whole(nodes, "nodes")
    return read_seconds(model_bytes, share, rates) + (model_bytes - share) / rates.nic


def load_tree_seconds(model_bytes: float, nodes: int, rates: Bandwidths) -> float:
    """One node reads it and passes it on whole, and so does each that has it: M/B + ⌈log2 N⌉·M/b. For comparison."""
    rounds = math.ceil(math.log2(whole(nodes, "nodes")))
    return read_seconds(model_bytes, model_bytes, rates) + rounds * model_bytes / rates.nic


def local_aggregate_rate(nodes: int, rates: Bandwidths) -> float:
    """What the SSDs of all nodes read together: the figure that shared storage would have to match."""
    return nodes * rates.local_read
