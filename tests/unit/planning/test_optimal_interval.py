"""Optimal intervals compared with each other and with a search; ETTR compared with its derivation."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tierckpt.errors import ConfigError
from tierckpt.planning import (
    Level,
    checkfreq_steps,
    daly,
    ettr,
    exact,
    optimal_interval,
    plan,
    to_steps,
    two_level,
    young,
)

stalls = st.floats(1e-3, 1e3)
ratios = st.floats(3.0, 1e6)
"""MTBF divided by stall. Below 2 the formulas differ widely."""


def searched(stall: float, mtbf: float) -> float:
    """The interval with the best exact ETTR, by golden-section search."""
    low, high = 1e-6 * mtbf, 5 * mtbf
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(200):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if ettr.exact(left, stall, mtbf, 0.0) < ettr.exact(right, stall, mtbf, 0.0):
            low = left
        else:
            high = right
    return (low + high) / 2


@given(stall=stalls, ratio=ratios)
@settings(max_examples=100, deadline=None)
def test_the_exact_optimum_equals_a_search(stall: float, ratio: float) -> None:
    found = exact(stall, stall * ratio)
    assert found == pytest.approx(searched(stall, stall * ratio), rel=1e-4)


@given(stall=stalls, ratio=ratios)
@settings(max_examples=200, deadline=None)
def test_daly_is_closer_to_the_optimum_than_young(stall: float, ratio: float) -> None:
    mtbf = stall * ratio
    best = exact(stall, mtbf)
    assert abs(daly(stall, mtbf) - best) <= abs(young(stall, mtbf) - best) + 1e-9 * best
    assert best < young(stall, mtbf)


def test_published_values() -> None:
    assert young(2, 3600) == pytest.approx(120)
    assert daly(2, 3600) == pytest.approx(118.670, abs=0.001)
    assert daly(60, 20) == 20
    assert two_level(2, 3600, 60, 36000) == (pytest.approx(120), 17)
    assert to_steps(exact(2, 3600), 50.0, 2, 3600) == 2  # 118.7 s are between 2 and 3 steps
    assert to_steps(1.0, 50.0, 2, 3600) == 1
    assert exact(60, 600) == pytest.approx(229.91, abs=0.01)
    assert exact(0, 600) == 0


def test_neither_restart_nor_latency_moves_the_optimum() -> None:
    best = exact(5, 600)
    for restart, latency in itertools.product((0.0, 300.0), (0.0, 60.0)):
        here = ettr.exact(best, 5, 600, restart, latency)
        assert all(ettr.exact(best * factor, 5, 600, restart, latency) < here for factor in (0.9, 1.1))


def test_latency_costs_as_much_as_restart_time() -> None:
    """The derivation, checked with random runs: a run restores the newest state that was durable at its end."""
    chance, mtbf, span, stall, latency, restart = random.Random(7), 600.0, 100.0, 5.0, 60.0, 30.0
    kept = wall = 0.0
    for _ in range(60_000):
        lived = chance.expovariate(1 / mtbf)
        kept += span * max(0, math.floor((lived - latency) / (span + stall)))
        wall += lived
        while (tried := chance.expovariate(1 / mtbf)) < restart:
            wall += tried
        wall += restart
    assert kept / wall == pytest.approx(ettr.exact(span, stall, mtbf, restart, latency), rel=0.01)


# --- levels -------------------------------------------------------------------------------------------------------

LOCAL = Level("local", stall_seconds=2, restart_seconds=0, mtbf_seconds=3600)
SHARED = Level("shared", stall_seconds=60, restart_seconds=0, mtbf_seconds=36000)


def test_the_nested_formula_is_exact_for_one_level() -> None:
    level = Level("shared", 60, 30, 600, latency_seconds=10)
    assert ettr.nested([level], 200, [1]) == pytest.approx(ettr.exact(200, 60, 600, 30, 10))


def test_two_levels_halve_the_waste_of_one() -> None:
    """Stalls of 2 s and 60 s, failures per 1 h and 10 h. Simulated waste: 10.0 % at best, 22.8 % with one."""
    both = plan([LOCAL, SHARED], step_seconds=1.0)
    assert 1 / both.ettr - 1 == pytest.approx(0.098, abs=0.006)
    all_failures = 1 / (1 / 3600 + 1 / 36000)
    alone = plan([Level("shared", 60, 0, all_failures)], step_seconds=1.0)
    assert 1 / alone.ettr - 1 == pytest.approx(0.216, abs=0.02)


@given(
    stall=st.floats(0.01, 20),
    deep=st.floats(0.0, 200),
    mtbf=st.floats(2000, 1e6),
    rarer=st.floats(1, 100),
    step=st.floats(0.1, 60),
)
@example(stall=16.0, deep=17.0, mtbf=2000.0, rarer=7.0, step=1.5)  # from every 3rd to every 2nd: both intervals move
@settings(max_examples=60, deadline=None)
def test_the_plan_matches_a_grid_search(stall: float, deep: float, mtbf: float, rarer: float, step: float) -> None:
    levels = [Level("a", stall, 60, mtbf), Level("b", deep, 300, mtbf * rarer, 30.0)]
    found = plan(levels, step)
    grid = {max(1, round(1.35**power)) for power in range(36)}
    best = max(
        ettr.nested(levels, steps * step, (1, every))
        for steps, every in itertools.product(sorted(grid), sorted(grid))
        if steps * every * step < optimal_interval.LONGEST_SECONDS
    )
    assert found.ettr >= best - 2e-5


def test_no_level_exceeds_its_bandwidth() -> None:
    slow = Level("shared", 0.0, 60, 7200, latency_seconds=600, interval_min_seconds=600)
    found = plan([Level("local", 0.1, 30, 3600, interval_min_seconds=45), slow], step_seconds=7.0)
    assert found.steps_by_level[0] * 7 >= 45
    assert found.steps_by_level[1] * 7 >= 600
    assert found.bound_by[1] == "throughput"
    alone = plan([Level("local", 0.1, 30, 3600, interval_min_seconds=45)], step_seconds=7.0)
    assert (alone.steps, alone.bound_by) == (7, ("throughput",))


def test_free_checkpoints_are_taken_every_step() -> None:
    found = plan([Level("memory", 0.0, 30, 3600)], step_seconds=5.0)
    assert (found.steps, found.bound_by) == (1, ("step",))


def test_without_failures_the_interval_is_long_and_finite() -> None:
    found = plan([Level("local", 1.0, 30, math.inf)], step_seconds=10.0)
    assert 86400 < found.steps * 10 <= 30 * 86400


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: young(-1, 60), "stall of a checkpoint is -1: it must be 0 or more"),
        (lambda: exact(1, 0), "MTBF is 0"),
        (lambda: plan([], 1.0), "no levels to plan for"),
        (lambda: plan([Level("x", 1, 1e6, 10)], 1.0), "failures come faster than this job can restart"),
        (lambda: Level("x", 1, 1, 0), "mtbf_seconds of x is 0: it must be above 0"),
        (lambda: checkfreq_steps(0, 1, 1), "step time is 0"),
    ],
)
def test_invalid_input_is_explained(make, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=says):
        make()
