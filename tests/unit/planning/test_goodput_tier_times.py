"""Times and counts of each tier, from the records of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tierckpt.planning.goodput import Save, Seen, TierTimes, tier_times

NOW = 1000.0
HERE = Seen(is_here=True)


@dataclass
class Start:
    made: list[Save]
    end: str = ""
    drain: bool = True
    replicas: int = 1


def commit(step: int, created_at: float, at: float | None, what: str = "shared") -> dict[str, Any]:
    return {"what": what, "step": step, "created_at": created_at, "at": at}


def tiers(*starts: Start, commits: list[dict[str, Any]] = [], seen: Seen = HERE) -> tuple[TierTimes, ...]:  # noqa: B006
    return tier_times(starts, commits, seen, NOW)


def saves(*steps: int, local: float | None = 1.0, **more: Any) -> list[Save]:
    """A save every ten seconds."""
    return [Save(step, 10.0 * step, local, **more) for step in steps]


def test_times_run_from_save_to_commit() -> None:
    took = [1, 2, 3, 4, 5, 6, 7, 8, 9, 600]
    made = saves(*range(1, 11))
    commits = [commit(one.step, one.at + 1, one.at + seconds) for one, seconds in zip(made, took, strict=True)]
    local, peer, shared = tiers(Start(made), commits=commits)
    assert (local.reached, local.median_seconds, local.maximum_seconds) == (10, 1, 1)
    assert (shared.reached, shared.saves, shared.untimed) == (10, 10, 0)
    assert (shared.median_seconds, shared.p90_seconds, shared.maximum_seconds) == (5.5, 9, 600)
    assert (peer.is_used, peer.saves) == (False, 0)


def test_clock_skew_and_missing_times_give_no_wrong_value() -> None:
    """Stores: a clock 100 s behind, times in whole seconds, or no times."""
    made = saves(20, 21, 22)
    commits = [commit(20, 200.5, 100.0), commit(21, 210.5, 209.2), commit(22, 220.5, None)]
    *_, shared = tiers(Start(made), commits=commits)
    assert (shared.reached, shared.untimed, shared.maximum_seconds) == (3, 2, 0)
    *_, shared = tiers(Start(saves(20)), commits=[commit(20, 200.5, None)])
    assert (shared.reached, shared.untimed, shared.median_seconds, shared.p90_seconds) == (1, 1, None, None)


@pytest.mark.parametrize("seen", [HERE, Seen()], ids=["here", "elsewhere"])
def test_pending_saves_come_from_the_journal_or_the_store(seen: Seen) -> None:
    commits = [commit(1, 10.5, 12.0)]
    waits = frozenset({2, 3}) if seen.is_here else frozenset[int]()
    *_, shared = tiers(Start(saves(1, 2, 3)), commits=commits, seen=Seen(seen.is_here, waits))
    assert (shared.waiting_steps, shared.oldest_waiting_seconds, shared.saves) == ((2, 3), NOW - 20, 3)
    *_, given_up = tiers(Start(saves(1, 2, 3)), commits=commits)
    assert (given_up.waiting_steps, given_up.skipped_steps) == ((), (2, 3))


def test_values_without_a_source_are_unknown() -> None:
    *_, shared = tiers(Start(saves(1)), seen=Seen(is_here=False, is_asked=False))
    assert (shared.is_used, shared.unknown_steps) == (True, (1,))
    trimmed = [{"what": "trimmed", "at": 50.0}, commit(5, 50.5, 52.0)]
    *_, shared = tiers(Start(saves(1, 5)), commits=trimmed, seen=Seen())
    assert (shared.reached, shared.unknown_steps, shared.waiting_steps) == (1, (1,), ())


def test_abandoned_saves_are_not_pending() -> None:
    made = [*saves(1, is_sent=False), *saves(2, local=None), *saves(3), Save(3, 35.0, 1.0)]
    local, _, shared = tiers(Start(made), seen=Seen(True, frozenset({3})))
    assert (local.reached, local.skipped_steps, local.waiting_steps) == (3, (2,), ())
    assert (shared.skipped_steps, shared.waiting_steps, shared.oldest_waiting_seconds) == ((1, 2, 3), (3,), NOW - 35)
    *_, shared = tiers(Start(made, drain=False))
    assert (shared.is_used, shared.saves) == (False, 0)


def test_saves_in_progress_are_pending_while_their_process_lives() -> None:
    made = [*saves(1), *saves(2, local=None)]
    assert [tiers(Start(made, end))[0].waiting_steps for end in ("", "failed")] == [(2,), ()]
    assert tiers(Start(made), Start(saves(3)))[0].waiting_steps == ()
    assert tiers(Start(made), seen=Seen())[2].waiting_steps == (1, 2)


def test_two_saves_of_one_step_are_distinct() -> None:
    """A killed start made the first of them, and did not drain it."""
    first, second = Start([Save(1, 10.0, 1.0)]), Start([Save(1, 50.0, 1.0)], end="closed")
    *_, shared = tiers(first, second, commits=[commit(1, 50.5, 53.0), commit(1, 50.5, 700.0)])
    assert (shared.reached, shared.maximum_seconds, shared.skipped_steps) == (1, 3, (1,))
    *_, shared = tiers(first, second, commits=[commit(1, 10.5, 12.0), commit(1, 50.5, 53.0)])
    assert (shared.reached, shared.maximum_seconds, shared.skipped_steps) == (2, 3, ())
    soon = Start([Save(1, 10.0, 0.2), Save(1, 10.3, 0.2)])
    *_, shared = tiers(soon, commits=[commit(1, 10.1, 10.2), commit(1, 10.4, 40.3)])
    assert shared.reached == 2
    assert (shared.median_seconds, shared.maximum_seconds) == pytest.approx((15.1, 30))


def test_only_the_newest_save_is_pending_on_peers() -> None:
    start = Start(saves(1, 2, 3), replicas=2)
    commits = [commit(1, 10.5, 14.0, "peer")]
    _, peer, _ = tiers(start, commits=commits)
    assert (peer.reached, peer.maximum_seconds, peer.skipped_steps, peer.waiting_steps) == (1, 4, (2,), (3,))
    _, peer, _ = tiers(start, commits=commits, seen=Seen())
    assert (peer.waiting_steps, peer.unknown_steps) == ((), (3,))


def test_a_direct_save_is_not_on_the_ssd() -> None:
    local, _, shared = tiers(Start(saves(1, is_direct_put=True)), commits=[commit(1, 10.5, 11.0)])
    assert (local.saves, shared.reached) == (0, 1)


@pytest.mark.parametrize(
    "damage", [{"created_at": "x"}, {"created_at": True}, {"step": "1"}, {"step": [1]}, {"at": "now"}, {"what": 3}]
)
def test_damaged_lines_are_ignored(damage: dict[str, Any]) -> None:
    commits = [{"what": "trimmed"}, commit(1, 10.5, 12.0) | damage]
    *_, shared = tiers(Start(saves(1)), commits=commits)
    assert shared.median_seconds is None
