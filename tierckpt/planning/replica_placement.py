"""Placement of replicas, and the probability to survive a loss of several nodes (Gemini, SOSP 2023).

No domain smaller than N/m holds all copies of a shard.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence

from ..errors import ConfigError
from .checked_numbers import whole


def group_placement(nodes: int, replicas: int) -> list[tuple[int, ...]]:
    """Return the holders of each node's shard, itself first: groups that hold each other's shards.

    If ``replicas`` does not divide ``nodes``, the last ones form a ring. Raises ConfigError: more replicas than nodes.
    """
    holders: list[tuple[int, ...]] = [()] * nodes
    for ring in _rings(nodes, replicas):
        for index, node in enumerate(ring):
            holders[node] = tuple(ring[(index + ahead) % len(ring)] for ahead in range(replicas))
    return holders


def spread_placement(domains: Sequence[str], replicas: int) -> list[tuple[int, ...]]:
    """Return the holders of each node's shard, itself first, in different ``domains`` if possible.

    Raises ConfigError: more replicas than nodes. Cost: N log N.
    """
    rings = _rings(len(domains), replicas)
    seated = _arrange_domains(domains, [len(ring) for ring in rings])
    node_at: dict[int, int] = {}
    for ring, nodes in zip(rings, seated, strict=True):
        # In a ring the holders are neighbours: place nodes of one domain as far apart as possible.
        places = sorted(range(len(ring)), key=lambda place: (place % replicas, place))
        node_at |= {ring[place]: node for place, node in zip(places, nodes, strict=True)}
    placed = group_placement(len(domains), replicas)
    holders = {node_at[at]: tuple(node_at[other] for other in held) for at, held in enumerate(placed)}
    return [holders[node] for node in range(len(domains))]


def _arrange_domains(domains: Sequence[str], sizes: Sequence[int]) -> list[list[int]]:
    members: dict[str, list[int]] = {}
    for node, domain in enumerate(domains):
        members.setdefault(domain, []).append(node)
    seated: list[list[int]] = [[] for _ in sizes]
    emptiest = [(-size, at) for at, size in enumerate(sizes)]
    heapq.heapify(emptiest)
    for nodes in sorted(members.values(), key=lambda nodes: (-len(nodes), domains[nodes[0]])):
        waiting = list(nodes)
        while waiting:
            chosen = [heapq.heappop(emptiest) for _ in range(min(len(waiting), len(emptiest)))]
            for minus_free, at in chosen:
                seated[at].append(waiting.pop(0))
                if minus_free < -1:
                    heapq.heappush(emptiest, (minus_free + 1, at))
    return seated


def _rings(nodes: int, replicas: int) -> list[list[int]]:
    """Return groups of ``replicas`` nodes, preceded by a larger one with the rest, if any."""
    _check(nodes, replicas)
    stride = nodes // replicas
    whole_groups = stride if nodes % replicas == 0 else stride - 1
    groups = [[first + index * stride for index in range(replicas)] for first in range(whole_groups)]
    rest = sorted(set(range(nodes)).difference(*groups))
    return [rest, *groups] if rest else groups


def survives(holders: Sequence[Collection[int]], lost: Collection[int]) -> bool:
    return all(any(holder not in lost for holder in holders[node]) for node in lost)


def survival_probability(nodes: int, replicas: int, lost: int) -> float:
    """Return a lower bound of the probability to survive a loss of ``lost`` random nodes.

    Exact for fewer than ``2 * replicas`` lost and ``replicas`` a divisor of ``nodes``: 1 - (N/m)·C(N-m, k-m)/C(N, k).
    """
    _check(nodes, replicas)
    if not 0 <= lost <= nodes:
        raise ConfigError(f"lost nodes are {lost}: of {nodes} nodes between 0 and {nodes} can be lost")
    if lost < replicas:
        return 1.0
    wiped = nodes / replicas * math.comb(nodes - replicas, lost - replicas) / math.comb(nodes, lost)
    return max(0.0, 1 - wiped)


def _check(nodes: int, replicas: int) -> None:
    whole(nodes, "nodes")
    if whole(replicas, "replicas") > nodes:
        raise ConfigError(f"replicas are {replicas}: {nodes} nodes hold at most {nodes} copies")
