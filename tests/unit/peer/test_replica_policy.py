"""Placement of copies (R1-R3 of peer/replica_policy.py): over failure domains, by brute force; and removal."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import pytest

from tests.unit.planning.test_replica_placement import brute_force
from tierckpt.peer.membership import Member
from tierckpt.peer.replica_policy import (
    FreshCheckpoint,
    LogRow,
    fresh_of,
    holders,
    is_place,
    logs_of,
    outdated,
    sources,
)
from tierckpt.planning.replica_placement import group_placement, spread_placement, survival_probability, survives


def lost_with_a_domain(domains: tuple[str, ...], placed: list[tuple[int, ...]]) -> int:
    """Shards lost with the domain of their node."""
    return sum(len({domains[holder] for holder in held}) == 1 for held in placed)


# --- placement over domains ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("domains", "replicas"),
    [("abcdefgh", 2), ("aabbccdd", 2), ("aaaabbbb", 2), ("aabbccddeeff", 3), ("zzzzzzzz", 2), ("abababab", 4)],
)
def test_the_recovery_probability_is_the_formula_whatever_the_domains(domains: str, replicas: int) -> None:
    placed = spread_placement(domains, replicas)
    for lost in range(2 * replicas):
        assert brute_force(placed, lost) == pytest.approx(survival_probability(len(domains), replicas, lost))


@pytest.mark.parametrize(("nodes", "replicas"), [(7, 2), (9, 2), (11, 3), (10, 3)])
def test_mixed_placement_over_domains_stays_within_its_gap(nodes: int, replicas: int) -> None:
    placed = spread_placement([f"rack-{node % 3}" for node in range(nodes)], replicas)
    best = 1 - -(-nodes // replicas) / math.comb(nodes, replicas)
    assert brute_force(placed, replicas) >= best - (2 * replicas - 3) / math.comb(nodes, replicas)
    assert Counter(holder for held in placed for holder in held) == dict.fromkeys(range(nodes), replicas)


def test_no_other_order_of_the_nodes_loses_less_with_a_domain() -> None:
    """Every assignment of up to six nodes to up to four domains, against every order of them."""
    checked = 0
    for nodes, replicas in itertools.product(range(2, 7), (2, 3)):
        if replicas > nodes:
            continue
        shapes = {tuple(sorted(Counter(way).values())): way for way in itertools.product("abcd", repeat=nodes)}
        groups = group_placement(nodes, replicas)
        for domains in shapes.values():
            orders = set(itertools.permutations(domains))
            best = min(lost_with_a_domain(order, groups) for order in orders)
            assert lost_with_a_domain(domains, spread_placement(domains, replicas)) == best, (domains, replicas)
            checked += 1
    assert checked > 25


def test_the_loss_of_any_rack_is_survived_where_racks_are_no_larger_than_the_number_of_groups() -> None:
    domains = [f"rack-{node % 7}" for node in range(100)]
    placed = spread_placement(domains, 2)
    for rack in set(domains):
        assert survives(placed, {node for node, domain in enumerate(domains) if domain == rack})


# --- members -------------------------------------------------------------------------------------------------------


def members(*names: str) -> list[Member]:
    return [Member(name, "10.0.0.1:7117", domain=name[0]) for name in names]


def test_all_nodes_find_the_same_holders_in_whatever_order_they_know_each_other() -> None:
    names = ("a1", "a2", "b1", "b2", "c1")
    first = holders(members(*names), 2)
    for order in itertools.permutations(names):
        assert holders(members(*order), 2) == first
    assert all(held[0] == name and len(set(held)) == 2 for name, held in first.items())
    assert all({member[0] for member in held} != {name[0]} for name, held in first.items())


def test_who_is_to_hold_and_who_is_held_agree() -> None:
    placed = holders(members("a1", "a2", "b1", "b2", "c1", "c2", "d1"), 3)
    for me in placed:
        assert set(sources(placed, me)) == {name for name, held in placed.items() if me in held} - {me}


def test_a_small_cluster_has_as_many_copies_as_it_has_nodes() -> None:
    assert holders(members("a"), 3) == {"a": ("a",)}
    assert {name: {*held} for name, held in holders(members("a", "b"), 3).items()} == {"a": {"a", "b"}, "b": {"a", "b"}}
    assert holders([], 2) == {}


# --- reports -------------------------------------------------------------------------------------------------------

ROW = FreshCheckpoint("s3://bucket/run/step-7", "a" * 16, 7.0, frozenset({"t1", "t2"}), frozenset({"u1"}), True)


def test_what_a_node_tells_comes_back_as_it_was() -> None:
    assert fresh_of({"fresh": [ROW.to_json()]}) == [ROW]


@pytest.mark.parametrize(
    "change",
    [
        {"uri": "s3://bucket/../../etc"}, {"uri": "/run/../../../etc/cron.d"}, {"uri": "s3://bucket/run/step-7/"},
        {"uri": "file:///run"}, {"uri": "s3://user:password@bucket/run"}, {"uri": 7}, {"uri": "s3://bucket/\x00"},
        {"uri": "x" * 5000}, {"attempt": "../x"}, {"own": ["../../x"]}, {"own": "t1"}, {"held": [["t1"]]},
        {"created_unix_seconds": -1}, {"created_unix_seconds": float("nan")}, {"safe": 1},
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_is_dropped(change: dict[str, object]) -> None:
    assert fresh_of({"fresh": [{**ROW.to_json(), **change}, ROW.to_json()]}) == [ROW]


@pytest.mark.parametrize("answer", [None, [], {}, {"fresh": None}, {"fresh": {"a": 1}}, {"fresh": [None, 3, "x"]}])
def test_an_answer_that_is_none_tells_nothing(answer: object) -> None:
    assert fresh_of(answer) == []


SEGMENTS = (("000000000001-0a0b0c0d.gradients", 8192), ("000000000007-0a0b0c0d.gradients", 4096))
LOG = LogRow("s3://bucket/run", 3, "node-b", 9, SEGMENTS, ("save-1", "save-7"))


def test_what_a_node_tells_of_a_log_comes_back_as_it_was() -> None:
    assert logs_of({"logs": [json.loads(json.dumps(LOG.to_json()))]}) == [LOG]
    assert [LOG.after(step) for step in (0, 6, 7, 9)] == [[*SEGMENTS], [*SEGMENTS], [SEGMENTS[1]], [SEGMENTS[1]]]


@pytest.mark.parametrize(
    "change",
    [
        {"uri": "/run/../../../etc/cron.d"}, {"rank": -1}, {"rank": True}, {"of": "../node"}, {"of": 7},
        {"step": "9"}, {"segments": []}, {"segments": SEGMENTS[::-1]}, {"segments": [SEGMENTS[0], SEGMENTS[0]]},
        {"segments": [("../../000000000001-0a0b0c0d.gradients", 4096)]},
        {"segments": [("000000000001-0a0b0c0d.gradients", -1)]},
        {"segments": [("000000000001-0a0b0c0d.gradients", 4096.5)]}, {"segments": 7}, {"bases": None},
    ],
)  # fmt: skip
def test_a_log_that_cannot_be_is_dropped(change: dict[str, object]) -> None:
    assert logs_of({"logs": [{**LOG.to_json(), **change}, LOG.to_json()]}) == [LOG]


def test_a_place_is_below_the_local_root() -> None:
    assert is_place("/mnt/run/step-1")
    assert is_place("az://container/run/step-1")
    assert not is_place("/")


# --- two slots -----------------------------------------------------------------------------------------------------


def copy_of(step: int, **made_by: str) -> FreshCheckpoint:
    """A copy of the saves named, by the members that have made them."""
    uri = f"s3://bucket/run/step-{step}"
    return FreshCheckpoint(uri, f"attempt-{step}", float(step), frozenset(), frozenset(made_by), False, made_by)


def told_of(step: int, *, is_safe: bool, run: str = "run") -> FreshCheckpoint:
    uri = f"s3://bucket/{run}/step-{step}"
    return FreshCheckpoint(uri, f"attempt-{step}", float(step), frozenset({"x"}), frozenset(), is_safe)


def test_a_copy_goes_when_a_newer_one_is_on_all_its_holders() -> None:
    old = copy_of(1, t="n1")
    assert outdated([old], {"n1": [told_of(2, is_safe=True)]}) == [old]


@pytest.mark.parametrize(
    "told",
    [
        {"n1": [told_of(2, is_safe=False)]},
        {"n1": [told_of(1, is_safe=True)]},
        {"n1": [told_of(2, is_safe=True, run="other")]},
        {"n1": []},
        {"n2": [told_of(2, is_safe=True)]},
        {},
    ],
    ids=["newer not on all", "same step", "another run", "nothing told", "told by another", "its node is gone"],
)
def test_a_copy_stays_as_long_as_it_may_be_the_last(told: dict[str, list[FreshCheckpoint]]) -> None:
    assert outdated([copy_of(1, t="n1")], told) == []


def test_copies_of_several_nodes_go_when_all_of_them_are_replaced() -> None:
    old = copy_of(1, t="n1", u="n2")
    assert outdated([old], {"n1": [told_of(2, is_safe=True)], "n2": [told_of(2, is_safe=False)]}) == []
    assert outdated([old], {"n1": [told_of(2, is_safe=True)], "n2": [told_of(2, is_safe=True)]}) == [old]


def test_own_work_and_what_somebody_fetched_for_itself_is_never_outdated() -> None:
    told, copy = {"n1": [told_of(2, is_safe=True)]}, copy_of(1, t="n1")
    own, fetched = replace(copy, own=frozenset({"mine"})), replace(copy, held=frozenset({"t", "v"}))
    assert outdated([own, fetched], told) == []
    assert outdated([copy], told, {copy.uri}) == []
