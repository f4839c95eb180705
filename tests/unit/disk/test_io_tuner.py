"""The best mode of a device is measured, and measured again later."""

from __future__ import annotations

from collections import Counter

from tierckpt.disk.io_tuner import (
    EQUAL_RATE_SHARE,
    MEASURED_BYTES_MIN,
    SHAPE_RETRY_INTERVAL,
    SHAPES,
    TRIES_MIN,
    IoShape,
    WriteTuner,
)

BIG = MEASURED_BYTES_MIN * 4


def drive(tuner: WriteTuner, rates: dict[IoShape, float], flushes: int) -> Counter[IoShape]:
    """A device that writes as fast as ``rates`` say, in GB/s. Returns which shapes were used."""
    used: Counter[IoShape] = Counter()
    for _ in range(flushes):
        shape = tuner.choose(BIG)
        used[shape] += 1
        tuner.learn(shape, BIG, BIG / (rates[shape] * 1e9))
    return used


def test_every_shape_is_tried_and_the_fastest_is_kept() -> None:
    for best in SHAPES:
        rates = {shape: 2.0 if shape == best else 1.0 for shape in SHAPES}
        tuner = WriteTuner(SHAPES)
        drive(tuner, rates, len(SHAPES) * TRIES_MIN)
        used = drive(tuner, rates, 50)
        assert used[best] >= 45


def test_one_slow_flush_does_not_decide() -> None:
    tuner, best = WriteTuner(SHAPES), SHAPES[1]
    drive(tuner, {shape: 2.0 if shape == best else 1.0 for shape in SHAPES}, 20)
    tuner.learn(best, BIG, 100.0)
    assert tuner.choose(1) == best


def test_a_device_that_changes_its_mind_is_followed() -> None:
    tuner, before, after = WriteTuner(SHAPES), SHAPES[1], SHAPES[2]
    drive(tuner, {shape: 2.0 if shape == before else 1.0 for shape in SHAPES}, 30)
    changed = {shape: 2.0 if shape == after else 0.5 for shape in SHAPES}
    drive(tuner, changed, SHAPE_RETRY_INTERVAL * (len(SHAPES) + 1) * 3)
    assert drive(tuner, changed, 15)[after] >= 13


def test_others_get_a_second_chance_now_and_then() -> None:
    tuner = WriteTuner(SHAPES)
    used = drive(tuner, {shape: 2.0 if shape == SHAPES[0] else 1.0 for shape in SHAPES}, SHAPE_RETRY_INTERVAL * 20)
    assert all(used[shape] > TRIES_MIN for shape in SHAPES)
    assert used[SHAPES[0]] > SHAPE_RETRY_INTERVAL * 20 * 0.8


def test_small_flushes_teach_nothing_and_are_no_experiments() -> None:
    tuner = WriteTuner(SHAPES)
    for _ in range(50):
        assert tuner.choose(MEASURED_BYTES_MIN - 1) == SHAPES[0]
        tuner.learn(SHAPES[2], MEASURED_BYTES_MIN - 1, 1e-9)
        tuner.learn(SHAPES[2], BIG, 0.0)
    assert tuner.flushes == 0 and tuner.choose(1) == SHAPES[0]


def test_of_shapes_that_are_as_good_the_cheapest_is_taken() -> None:
    for loss, expected in ((EQUAL_RATE_SHARE + 0.01, SHAPES[0]), (EQUAL_RATE_SHARE - 0.01, SHAPES[-1])):
        tuner = WriteTuner(SHAPES)
        drive(tuner, {shape: 1.0 if shape == SHAPES[-1] else loss for shape in SHAPES}, len(SHAPES) * TRIES_MIN)
        assert tuner.choose(1) == expected
