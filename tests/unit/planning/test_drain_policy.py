"""The drain policy (planning/drain_policy.py, D1 to D7): traces, an oracle, and seeded wrong policies."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.drain_world import EVERY, INTERVAL, SIZE, Outcome, Trace, oracle, run
from tierckpt.errors import ConfigError
from tierckpt.planning import drain_policy
from tierckpt.planning.drain_policy import Decision, PolicyState, Rules, Situation, Version

HOURS_2 = 7200
REGRET_MAX = 0.15
RULES = Rules(every=EVERY, rpo_seconds=900, outage_seconds=400, local_bytes_max=6 * SIZE)


def flat(rate: float) -> Trace:
    return lambda now: rate


def noise(seed: int) -> Trace:
    """Log-normal noise per minute, correlated with the previous minute."""
    chance, rates, level = random.Random(seed), [], 0.0
    for _ in range(HOURS_2 // 60 + 1):
        level = 0.8 * level + 0.5 * chance.gauss(0, 1)
        rates.append(2 * math.exp(0.6 * level))
    return lambda now: rates[now // 60]


FAST_SSD = flat(10.0)
TRACES: dict[str, tuple[Trace, Trace]] = {
    "steady": (flat(2.0), FAST_SSD),
    "step down": (lambda now: 2.0 if now < 3600 else 0.7, FAST_SSD),
    "step up": (lambda now: 0.7 if now < 3600 else 4.0, FAST_SSD),
    "sine": (lambda now: 2 + 1.2 * math.sin(now * 2 * math.pi / 900), FAST_SSD),
    "outage": (lambda now: 0.0 if 3000 <= now < 3400 else 2.0, FAST_SSD),
    "slow SSD": (flat(2.0), lambda now: 0.5 if 2400 <= now < 4800 else 10.0),
    "SSD no faster": (flat(2.0), flat(1.5)),
    "shared storage faster": (flat(12.0), FAST_SSD),
    "noise 1": (noise(1), FAST_SSD),
    "noise 2": (noise(2), FAST_SSD),
}


def regret(outcome: Outcome, shared: Trace, local: Trace) -> float:
    best = oracle(RULES.rpo_seconds, HOURS_2, shared, local)
    assert best is not None, "the oracle breaks the bound: this trace proves nothing"
    return outcome.cost / best - 1


@pytest.mark.parametrize(("shared", "local"), TRACES.values(), ids=TRACES)
def test_the_rpo_holds_with_small_regret(shared: Trace, local: Trace) -> None:
    outcome = run(RULES, HOURS_2, shared, local)
    assert outcome.age_max <= RULES.rpo_seconds
    assert outcome.local_max <= RULES.local_bytes_max
    assert outcome.lost_newest == 0
    assert -1e-9 <= regret(outcome, shared, local) <= REGRET_MAX
    assert outcome.sent == sorted(outcome.sent)


@pytest.mark.slow
@given(begin=st.integers(200, 6000), length=st.integers(1, 400), rate=st.floats(1.0, 8.0))
@settings(max_examples=12, deadline=None)
def test_the_rpo_holds_through_expected_outages(begin: int, length: int, rate: float) -> None:
    outcome = run(RULES, HOURS_2, lambda now: 0.0 if begin <= now < begin + length else rate, FAST_SSD)
    assert outcome.age_max <= RULES.rpo_seconds
    assert len(outcome.sent) >= 25


# --- wrong policies that the harness must detect ---------------------------------------------------------------------

Decide = Callable[[PolicyState, Rules, Situation], tuple[PolicyState, Decision]]


def oldest_first(state: PolicyState, rules: Rules, now: Situation) -> tuple[PolicyState, Decision]:
    state, decision = drain_policy.decide(state, rules, now)
    pending = [one for one in now.versions if one.on_local and not one.on_shared]
    idle = now.sending is None and pending
    return state, replace(decision, place="local", skip=(), send=pending[0].number if idle else None)


def drain_any(state: PolicyState, rules: Rules, now: Situation) -> tuple[PolicyState, Decision]:
    return drain_policy.decide(state, replace(rules, every=1), now)


def without_rpo(state: PolicyState, rules: Rules, now: Situation) -> tuple[PolicyState, Decision]:
    return drain_policy.decide(state, replace(rules, every=20, rpo_seconds=math.inf), now)


@pytest.mark.parametrize(
    ("wrong", "trace"),
    [(oldest_first, "step down"), (drain_any, "steady"), (without_rpo, "steady")],
    ids=["oldest first", "sends everything", "no bound"],
)
def test_the_harness_detects_wrong_policies(wrong: Decide, trace: str) -> None:
    shared, local = TRACES[trace]
    outcome = run(RULES, HOURS_2, shared, local, wrong)
    broken = outcome.age_max > RULES.rpo_seconds
    assert broken or regret(outcome, shared, local) > REGRET_MAX


# --- zero bandwidth -------------------------------------------------------------------------------------------------


def test_an_endless_outage_neither_stops_saves_nor_fills_the_ssd() -> None:
    outcome = run(RULES, HOURS_2, flat(0.0), FAST_SSD)
    assert (outcome.direct, outcome.stalls, outcome.sent) == (0, 0, [])
    assert outcome.local_max <= RULES.local_bytes_max
    assert outcome.lost_newest == 0
    assert outcome.age_max > RULES.rpo_seconds


def test_the_newest_save_is_drained_first_after_an_outage() -> None:
    outcome = run(RULES, HOURS_2, lambda now: 0.0 if 600 <= now < 5400 else 2.0, FAST_SSD)
    assert outcome.stalls == 0
    stuck, first = next((before, after) for before, after in itertools.pairwise(outcome.sent) if after - before > 50)
    assert first >= 5400 // INTERVAL  # newer than the eighty pending saves
    assert outcome.sent[-1] > first
    assert stuck <= 600 // INTERVAL + 1 + EVERY  # drains that began before the outage was detected


def test_both_tiers_stall_and_recover() -> None:
    outcome = run(RULES, HOURS_2, lambda now: 0.0 if now < 1800 else 2.0, lambda now: 0.0 if now < 1800 else 10.0)
    assert outcome.sent
    assert outcome.sent[-1] >= (HOURS_2 - 400) // INTERVAL


def test_a_full_ssd_causes_direct_saves() -> None:
    tiny = replace(RULES, local_bytes_max=0.5 * SIZE, every=1)
    outcome = run(tiny, 1800, flat(4.0), FAST_SSD)
    assert outcome.direct >= 25
    assert outcome.local_max <= SIZE  # the first save, before the first decision


# --- single decisions -----------------------------------------------------------------------------------------------


def situation(*versions: Version, now: float = 1000.0, **more: float | int | None) -> Situation:
    return Situation(now=now, versions=versions, next_bytes=SIZE, interval_seconds=INTERVAL, **more)  # type: ignore[arg-type]


def version(number: int, **more: bool | float) -> Version:
    return Version(number, SIZE, number * INTERVAL, **more)  # type: ignore[arg-type]


MEASURED = PolicyState(local_rate=10.0, shared_rate=2.0)


def decided(now: Situation, rules: Rules = RULES) -> Decision:
    return drain_policy.decide(MEASURED, rules, now)[1]


def test_d1_drains_the_newest_and_skips_older_saves() -> None:
    decision = decided(situation(version(1, on_shared=True), version(2), version(3), version(4)))
    assert (decision.send, decision.skip) == (4, (2, 3))


def test_d2_finishes_a_running_drain() -> None:
    decision = decided(situation(version(1, sent_bytes=1.0), version(2), version(3), sending=1))
    assert decision.send is None
    assert 1 not in decision.skip
    assert "being sent" in decision.reason


def test_d3_stops_waiting_before_the_rpo_breaks() -> None:
    rules = replace(RULES, every=100)
    fresh = situation(version(1, on_shared=True), version(2), now=200.0)
    old = situation(version(1, on_shared=True), version(2), now=480.0)
    assert decided(fresh, rules).send is None
    decision = decided(old, rules)
    assert decision.send == 2
    assert "bound of 900 s" in decision.reason


def test_d4_evicts_the_oldest_but_never_the_newest_two() -> None:
    held = (version(1), version(2, on_shared=True), version(3), version(4), version(5), version(6))
    assert decided(situation(*held, sending=3)).remove == (1,)
    decision = decided(situation(*held, sending=3), replace(RULES, local_bytes_max=2 * SIZE))
    assert decision.remove == (1, 2, 4)
    assert decision.place == "shared"


def test_d5_switches_after_three_votes_or_a_large_factor() -> None:
    close, clear = PolicyState(local_rate=2.0, shared_rate=2.0), PolicyState(local_rate=1.0, shared_rate=2.0)
    rules = replace(RULES, every=1)
    look = situation(version(1, on_shared=True), now=70.0)
    state, places = close, []
    for _ in range(3):
        state, decision = drain_policy.decide(state, rules, look)
        places.append(decision.place)
    assert places == ["local", "local", "shared"]
    assert drain_policy.decide(clear, rules, look)[1].place == "shared"


@pytest.mark.parametrize(
    ("change", "rules", "rate"),
    [
        ({}, RULES, 0.5),
        ({"now": 500.0}, RULES, 1.0),
        ({"now": 700.0}, RULES, None),
        ({"training_bytes_per_second": 100.0}, replace(RULES, rpo_seconds=math.inf), 0.1),
        ({"training_bytes_per_second": 0.0, "step_slowdown": 0.06}, RULES, 1.0),
        ({"training_bytes_per_second": 0.0}, RULES, None),
    ],
    ids=["calm", "the RPO is near", "the RPO is very near", "starved without an RPO", "slowed", "idle"],
)
def test_d7_training_has_priority_far_from_the_rpo(change: dict[str, float], rules: Rules, rate: float | None) -> None:
    calm = situation(version(1, on_shared=True), version(2), now=100.0, sending=2, training_bytes_per_second=1.5)
    found = decided(replace(calm, **change), rules).rate_bytes_per_second  # type: ignore[arg-type]
    assert found == (None if rate is None else pytest.approx(rate))


def test_a_zero_measurement_is_an_outage() -> None:
    state = drain_policy.observe(MEASURED, RULES, "shared", 0.0, 10.0)
    assert state.shared_rate == pytest.approx(1.6)
    assert drain_policy.observe(MEASURED, RULES, "local", 5.0, 0.0) == MEASURED


@pytest.mark.parametrize("field", [{"every": 0}, {"rpo_seconds": 0.0}, {"weight": 2.0}, {"keep_local": 0}])
def test_invalid_rules_are_rejected(field: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(field)).split("_")[0]):
        Rules(**field)  # type: ignore[arg-type]
