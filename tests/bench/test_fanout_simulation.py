"""Placement and schedule under a virtual clock: the required figures, and a bad schedule that must fail them.

An injected fault must have fired. ``python bench/fanout_simulation.py`` runs more and larger cases.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from fanout_simulation import Case, Outcome, simulate

from tierckpt.peer.fetch.peer_table import Tuning
from tierckpt.peer.fetch.scheduler import FetchScheduler

CHUNKS = 128
"""Few, so that it ends soon; each is then a larger part of the whole, and bounds are wider than the figures."""
EXPECTED = {"owned", "no peers", "owner lags"}


@cache
def run(name: str, **changes: object) -> Outcome:
    outcome = simulate(Case(name, **{"nodes": 8, "chunks": CHUNKS, **changes}))  # type: ignore[arg-type]
    assert outcome.unfinished == 0
    return outcome


@pytest.mark.parametrize("origin", [1.0, 4.0])
def test_eight_alike_nodes_need_little_more_than_the_least_time(origin: float) -> None:
    outcome = run("alike", origin=origin, chunks=256)
    assert outcome.ratio <= 1.2
    assert outcome.store_ratio <= 1.02
    assert set(outcome.reasons) <= EXPECTED


def test_time_hardly_grows_with_the_number_of_nodes() -> None:
    two, eight = (run("alike", nodes=nodes, origin=4.0, chunks=256) for nodes in (2, 8))
    assert eight.seconds <= 1.1 * two.seconds


@pytest.mark.slow
def test_of_many_nodes_with_a_chunk_each_few_fetch_what_another_one_fetches() -> None:
    """All wait for the store, longer than an owner may take when others get answers."""
    outcome = run("alike", nodes=64, chunks=64)
    assert outcome.store_ratio <= 1.1, outcome.reasons
    assert set(outcome.reasons) <= EXPECTED


@pytest.mark.parametrize("origin", [1.0, 4.0])
def test_a_slow_node_does_not_hold_the_others_up(origin: float) -> None:
    outcome = run("one slow", origin=origin, slow=1)
    assert outcome.ratio <= 1.5
    assert outcome.store_ratio <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("origin", [4.0])
def test_a_node_that_only_sends_slowly_does_not_hold_the_others_up(
    origin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody tells it, it goes on owning chunks, which then wait for its uplink or come from the store twice."""

    def outcomes(name: str) -> list[Outcome]:
        changes = {"origin": origin, "slow": 1, "slow_up_only": True, "chunks": 256}
        return [run(name, seed=seed, **changes) for seed in range(1, 7)]

    told = outcomes("one sends slowly")
    meet = FetchScheduler.set_members
    monkeypatch.setattr(
        FetchScheduler, "set_members", lambda self, live, interested, now, **_: meet(self, live, interested, now)
    )
    untold = outcomes("nobody tells it")
    assert max(one.ratio for one in told) <= 1.3
    assert max(one.store_ratio for one in told) <= 1.02
    assert max(one.ratio for one in told) < max(one.ratio for one in untold)
    assert sum(one.store_ratio for one in told) < sum(one.store_ratio for one in untold)


@pytest.mark.parametrize("killed", [False, True])
def test_a_dead_owner_does_not_hold_the_others_up(killed: bool) -> None:
    outcome = run("dead owner", dead_at=0.3, killed=killed)
    assert outcome.ratio <= 1.4
    assert outcome.store_ratio <= 1.05
    assert outcome.reasons["owner unreachable"] > 0, "the fault has not fired"


def test_who_comes_late_costs_the_store_nothing() -> None:
    outcome = run("late joiner", late=1)
    assert outcome.store_ratio <= 1.02
    assert outcome.late_seconds <= 1.3


def test_a_partition_costs_what_the_other_side_would_have_sent_and_heals() -> None:
    outcome = run("partition heals", cut=(0.2, 0.6))
    assert 1.0 <= outcome.store_ratio <= 1.5
    assert outcome.ratio <= 1.6
    assert outcome.reasons.get("owner unreachable", 0) > 0, "the fault has not fired"


def test_a_corrupt_peer_is_told_once_by_each_and_costs_what_it_owned() -> None:
    outcome = run("corrupt peer", corrupt=1)
    assert 0 < outcome.wrong <= 8 * Tuning().slots
    assert outcome.store_ratio <= 1.0 + 1.5 / 8


@pytest.mark.slow
def test_a_schedule_that_asks_only_owners_is_told_from_the_good_one() -> None:
    """The seeded fault. A slow owner's uplink then carries a copy for each of the others."""
    good = run("one sends slowly", origin=4.0, slow=1, slow_up_only=True)
    bad = run("owners only", origin=4.0, slow=1, slow_up_only=True, owner_only=True)
    assert bad.ratio > 2 * good.ratio
