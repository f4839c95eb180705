"""How many chunks of the store a node has under way at a time."""

from __future__ import annotations

import random

import pytest

from tierckpt.peer.fetch.ramp import Ramp

SLOTS_MAX = 8


def run(ramp: Ramp, seconds: float, count: int) -> None:
    for _ in range(count):
        ramp.completed(seconds, ramp.factor, SLOTS_MAX)


def test_where_each_takes_no_longer_for_it_more_are_under_way() -> None:
    ramp = Ramp()
    run(ramp, 1.0, 2 + 4 + 8)
    assert ramp.factor == SLOTS_MAX
    run(ramp, 1.0, 100)
    assert ramp.factor == SLOTS_MAX


def test_where_each_takes_longer_it_stays_with_few() -> None:
    ramp = Ramp()
    for _ in range(100):
        ramp.completed(float(ramp.factor), ramp.factor, SLOTS_MAX)
    assert ramp.factor == 1


def test_a_store_that_slows_down_later_makes_it_go_back() -> None:
    ramp = Ramp()
    run(ramp, 1.0, 2 + 4 + 8)
    run(ramp, 3.0, 16 + 8 + 4)
    assert ramp.factor == 1


@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_try_together_do_not_creep_up_together(seed: int) -> None:
    """Sixteen share a store that gives one chunk a second; each sees the others' requests in its own times."""
    rng = random.Random(seed)
    ramps = [Ramp() for _ in range(16)]
    for step in range(4000):
        ramp = rng.choices(ramps, [one.factor for one in ramps])[0]
        ramp.completed(float(sum(one.factor for one in ramps)), ramp.factor, SLOTS_MAX)
        if step > 500:
            assert sum(one.factor for one in ramps) <= 3 * len(ramps)


def test_what_is_late_makes_it_go_back_before_it_comes() -> None:
    ramp = Ramp()
    run(ramp, 1.0, 2 + 4)
    assert ramp.factor == 4
    ramp.under_way([2.0, 2.5, 2.5, 2.5])
    assert ramp.factor == 4
    ramp.under_way([0.1, 3.0, 3.0, 3.0])
    assert ramp.factor == 1
    run(ramp, 1.0, 100)
    assert ramp.factor == 1, "one try is enough"


def test_nothing_under_way_is_not_late() -> None:
    ramp = Ramp()
    run(ramp, 0.001, 2)
    ramp.under_way([])
    assert ramp.factor == 2
