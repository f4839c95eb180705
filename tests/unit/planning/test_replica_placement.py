"""Replica placement: recovery probability of Gemini's groups, compared with brute force over all losses."""

from __future__ import annotations

import itertools
import math

import pytest

from tierckpt.errors import ConfigError
from tierckpt.planning.replica_placement import group_placement, survival_probability, survives


def brute_force(holders: list[tuple[int, ...]], lost: int) -> float:
    """The share of simultaneous losses of ``lost`` nodes that leave a copy of each shard."""
    ways = list(itertools.combinations(range(len(holders)), lost))
    return sum(survives(holders, set(way)) for way in ways) / len(ways)


@pytest.mark.parametrize(
    ("nodes", "replicas", "lost", "probability"),
    [
        (16, 2, 2, 0.9333),
        (16, 2, 3, 0.80),
        (128, 2, 2, 0.9921),
        (128, 2, 3, 0.9764),
        (1000, 2, 2, 0.9990),
        (16, 3, 3, 0.9905),
    ],
)
def test_published_values(nodes: int, replicas: int, lost: int, probability: float) -> None:
    assert survival_probability(nodes, replicas, lost) == pytest.approx(probability, abs=5e-5)


@pytest.mark.parametrize(("nodes", "replicas"), [(8, 2), (12, 2), (9, 3), (12, 3), (8, 4)])
def test_the_formula_equals_brute_force(nodes: int, replicas: int) -> None:
    holders = group_placement(nodes, replicas)
    for lost in range(nodes + 1):
        counted, formula = brute_force(holders, lost), survival_probability(nodes, replicas, lost)
        if lost < 2 * replicas:
            assert counted == pytest.approx(formula)
        else:
            assert counted >= formula - 1e-12


@pytest.mark.parametrize("nodes", [8, 12, 16])
def test_groups_survive_more_losses_than_a_ring(nodes: int) -> None:
    """With two replicas, a ring loses a shard with N pairs of nodes, groups with N/2."""
    pairs = math.comb(nodes, 2)
    ring = [(node, (node + 1) % nodes) for node in range(nodes)]
    assert brute_force(ring, 2) == pytest.approx(1 - nodes / pairs)
    assert brute_force(group_placement(nodes, 2), 2) == pytest.approx(1 - nodes / 2 / pairs)


@pytest.mark.parametrize(("nodes", "replicas"), [(8, 2), (9, 2), (16, 4), (13, 3), (5, 5), (6, 1)])
def test_copies_of_a_shard_are_on_different_nodes(nodes: int, replicas: int) -> None:
    placement = group_placement(nodes, replicas)
    assert len(placement) == nodes
    for node, holders in enumerate(placement):
        assert holders[0] == node
        assert len(set(holders)) == replicas
    load = [sum(node in holders for holders in placement) for node in range(nodes)]
    assert load == [replicas] * nodes


@pytest.mark.parametrize(("nodes", "replicas", "rack"), [(64, 2, 16), (64, 2, 32), (48, 3, 16), (50, 2, 10)])
def test_copies_of_a_shard_span_racks(nodes: int, replicas: int, rack: int) -> None:
    holders = group_placement(nodes, replicas)
    for first in range(0, nodes, rack):
        assert survives(holders, set(range(first, min(nodes, first + rack))))


def test_invalid_input_is_explained() -> None:
    with pytest.raises(ConfigError, match="replicas are 3: 2 nodes hold at most 2 copies"):
        group_placement(2, 3)
    with pytest.raises(ConfigError, match="lost nodes are 9"):
        survival_probability(8, 2, 9)
