"""The interval of a running job: chosen from a profile, then adapted to the measured overhead."""

from __future__ import annotations

import logging
import math
from itertools import pairwise
from typing import Any

import pytest

from tierckpt.config import Settings
from tierckpt.errors import ConfigError
from tierckpt.planning import ettr, exact
from tierckpt.planning.drain_policy import Rules
from tierckpt.planning.optimal_interval import (
    CALM_WINDOWS,
    Goal,
    JobProfile,
    MeasuredSpan,
    Pace,
    Steps,
    adapt,
    choose,
    slowest,
)
from tierckpt.training.drain_decider import DrainDecider, RankView, SaveDirective
from tierckpt.training.interval import PROFILE_STEPS, WARM_UP_STEPS, AutoInterval, IntervalController
from tierckpt.training.saves import SaveRecord

STEP = 0.5

# --- choosing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocked", "durable", "steps", "why"),
    [
        (0.01, 10.0, 20, "it is durable before the next begins"),
        (0.35, 1.0, 20, "it blocks 3.5 % of ten seconds"),
        (0.0, 0.0, 1, "there is no shorter one"),
    ],
)
def test_without_an_mtbf_the_interval_follows_checkfreq(blocked: float, durable: float, steps: int, why: str) -> None:
    assert choose(JobProfile(STEP, blocked, durable), Goal()).steps == steps, why


@pytest.mark.parametrize("mtbf", [600.0, 3600.0, 86400.0])
def test_with_a_failure_rate_the_interval_is_optimal(mtbf: float) -> None:
    profile = JobProfile(STEP, 0.4, 3.0)
    found = choose(profile, Goal(0.5, local_mtbf_seconds=mtbf)).steps
    assert abs(found * STEP - exact(0.4, mtbf)) < STEP
    best = ettr.exact(found * STEP, 0.4, mtbf, 0.0)
    assert all(best >= ettr.exact((found + other) * STEP, 0.4, mtbf, 0.0) for other in (-1, 1, 5, -5) if found + other)


def test_bounds_override_the_optimum() -> None:
    eager = choose(JobProfile(STEP, 0.4, 3.0), Goal(0.035, local_mtbf_seconds=10.0))
    assert eager.steps * STEP * 0.035 >= 0.4
    assert "throughput" in eager.reason


def test_each_level_has_its_interval() -> None:
    profile = JobProfile(STEP, 0.05, 1.0, shared_seconds=60.0, shared_stall_seconds=2.0)
    found = choose(profile, Goal(0.035, 3600.0, 36000.0))
    local, shared = found.steps * STEP, found.steps * found.every * STEP
    assert local == pytest.approx(exact(0.05, 3600.0), rel=0.25)
    assert shared == pytest.approx(exact(2.0, 36000.0), rel=0.25)
    assert shared >= 60.0, "shared storage keeps up"


def test_without_a_failure_rate_drains_match_shared_bandwidth() -> None:
    assert choose(JobProfile(STEP, 0.0, 1.0, shared_seconds=9.9), Goal()).every == 10
    assert choose(JobProfile(STEP, 0.0, 1.0, shared_seconds=9.9), Goal(), drains=False).every == 1


def test_the_slowest_rank_sets_the_interval() -> None:
    assert slowest([JobProfile(1, 0.1, 5), JobProfile(2, 0.3, 1, 7)]) == JobProfile(2, 0.3, 5, 7)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Goal(overhead_max=0.0), "overhead_max is 0"),
        (lambda: AutoInterval(overhead_max=0.0), "overhead_max is 0"),
        (lambda: AutoInterval(mtbf_seconds={"remote": 1.0}), "mtbf_seconds is {'remote': 1.0}"),
        (lambda: Goal(overhead_max=1.5), "overhead_max is 1.5"),
        (lambda: Goal.of(0.03, -5), "mtbf_seconds is -5: it must be a number above 0"),
        (lambda: Goal.of(0.03, {"node": 5.0}), "a number, or one for 'local'"),
        (lambda: Goal.of(0.03, {"local": 0.0}), "mtbf_seconds of 'local' is 0"),
        (lambda: IntervalController(0, sending()), "interval is 0: use 'auto' or a whole number"),
        (lambda: IntervalController("often", sending()), "interval is 'often'"),  # type: ignore[arg-type]
        (lambda: IntervalController(True, sending()), "interval is True"),
    ],
)
def test_invalid_input_is_explained(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_extreme_failure_rates_do_not_stop_training() -> None:
    found = choose(JobProfile(100.0, 50.0, 100.0), Goal(0.5, local_mtbf_seconds=0.5))
    assert found.steps >= 1
    assert "as often as possible" in found.reason


def test_the_interval_grows_by_a_quarter_and_shrinks_gradually() -> None:
    choice = Pace(20, 1, "profile")
    pace = adapt(None, choice, 0.0, 0.035)
    assert pace.steps == 20
    longer = adapt(pace, choice, 0.05, 0.035)
    assert longer.steps == 25
    steps = [longer.steps]
    for _ in range(6 * CALM_WINDOWS):
        longer = adapt(longer, choice, 0.01, 0.035)
        steps.append(longer.steps)
    assert steps[CALM_WINDOWS] == 24
    assert steps[-1] == 20, "never shorter than the chosen interval"
    assert adapt(Pace(25, 1, calm=2), choice, 0.03, 0.035).calm == 0, "unchanged between half the bound and the bound"


def test_noise_does_not_disable_checkpoints() -> None:
    pace: Pace | None = None
    for _ in range(100):
        pace = adapt(pace, Pace(10, 1, ""), 9.0, 0.035)
    assert pace is not None
    assert pace.steps == 160


def test_a_worse_profile_takes_effect_at_once() -> None:
    assert adapt(Pace(10, 1), Pace(40, 4, ""), 0.0, 0.035) == Pace(40, 4)


def test_overhead_is_relative_to_the_median_undisturbed_step() -> None:
    window = MeasuredSpan(Steps(80, 40.0, 0.5), Steps(), Steps(20, 12.0, 0.6), blocked_seconds=1.0)
    assert window.baseline() == 0.5
    assert window.overhead(0.5) == pytest.approx((1.0 + 2.0) / 50)
    assert MeasuredSpan().overhead(0.5) == 0.0
    assert MeasuredSpan(flushing=Steps(3, 1.8, 0.6)).baseline(0.5) == 0.5, (
        "all steps were disturbed: the earlier baseline counts"
    )


# --- one simulated job ---------------------------------------------------------------------------------------------


def sending(**overrides: Any) -> DrainDecider:
    return DrainDecider(Settings.load(local_root="/nowhere", mover="inline", **overrides))


class Job:
    """A job whose steps and saves take the test's times."""

    def __init__(self, pacer: IntervalController, blocked: float, durable: float, shared: float | None) -> None:
        self.pacer, self.costs = pacer, (blocked, durable, shared)
        self.now, self.step = 0.0, 0
        self.records: list[SaveRecord] = []
        self.saved: list[int] = []
        self.slowdown = 0.0
        pacer.resumed(now=0.0)

    def run(self, steps: int) -> list[int]:
        """Returns the intervals between the saves."""
        first = len(self.saved)
        for _ in range(steps):
            self.step += 1
            busy = bool(self.saved) and self.step - self.saved[-1] <= self.costs[1] / STEP
            self.now += STEP * (1 + self.slowdown if busy else 1)
            self.pacer.stepped("flushing" if busy else "plain", self.now)
            blocked = 0.0
            if self.pacer.is_due(self.step):
                is_sent = self.pacer.before_save(self.step, self.records).is_sent
                blocked, durable, shared = self.costs
                arrived = durable + shared if is_sent and shared is not None else None
                self.records.append(SaveRecord(self.step, "", 1000, blocked, durable, arrived, is_sent=is_sent))
                self.saved.append(self.step)
                self.now += blocked
            self.pacer.resumed(blocked, self.now)
        return [b - a for a, b in pairwise(self.saved[first:])]


def test_a_job_profiles_and_then_keeps_its_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tierckpt.interval")
    job = Job(IntervalController("auto", sending(drain=False)), 0.1, 15.0, None)
    intervals = job.run(400)
    assert job.saved[0] == PROFILE_STEPS > WARM_UP_STEPS
    assert set(intervals[1:]) == {30}
    [line] = caplog.messages
    assert "a checkpoint every 30 steps (15 s)" in line
    assert "a step takes 0.5 s, a save blocks 0.1 s and is durable after 15 s" in line


def test_the_interval_follows_the_cost_up_and_down() -> None:
    job = Job(IntervalController("auto", sending(drain=False)), 0.05, 5.0, None)
    before = job.run(200)[-1]
    job.slowdown = 0.6
    during = job.run(400)[-1]
    job.slowdown = 0.0
    after = job.run(20_000)[-1]
    assert before < during
    assert after == before == 10


def test_slow_shared_storage_gets_every_nth_save() -> None:
    job = Job(IntervalController("auto", sending()), 0.05, 5.0, 18.0)
    job.run(400)
    sent = [record.is_sent for record in job.records[10:]]
    places = [place for place, one in enumerate(sent) if one]
    assert {b - a for a, b in pairwise(places)} == {4}


def test_requested_saves_are_drained() -> None:
    job = Job(IntervalController("auto", sending()), 0.05, 5.0, 60.0)
    job.run(400)
    assert not job.records[-1].is_sent or not job.records[-2].is_sent
    assert all(job.pacer.before_save(500 + n, job.records, is_asked=True).is_sent for n in range(3))


def test_a_fixed_interval_drains_every_save() -> None:
    job = Job(IntervalController(7, sending()), 0.1, 1.0, 50.0)
    job.run(30)
    assert job.saved == [7, 14, 21, 28]
    assert all(record.is_sent for record in job.records)


# --- adaptive drains -----------------------------------------------------------------------------------------------


def test_saves_during_a_drain_stay_local_and_log_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tierckpt.policy")
    adaptive = sending(exposure_seconds_max=math.inf)
    records: list[SaveRecord] = []
    sent = []
    for number in range(1, 8):
        is_sent = adaptive.decide(number, records, 1, 10.0).is_sent
        sent.append(is_sent)
        records.append(SaveRecord(number, "", 10**9, 0.1, 1.0, None, is_sent=is_sent))
        if number == 4:
            records[0].shared_commit_seconds = 31.0
    assert sent == [True, False, False, False, True, False, False]
    assert "step 2 stays on the SSD: checkpoint 1 is being sent" in caplog.messages[1]
    assert "shared_bytes_per_second 3.33333e+07" in caplog.messages[4]


def test_an_exposure_bound_drains_earlier() -> None:
    def sent(bound: float) -> int:
        adaptive = sending(exposure_seconds_max=bound)
        records = [SaveRecord(1, "", 10**9, 0.1, 1.0, 2.0)]
        count = 0
        for number in range(2, 10):
            for record in records:
                record.begun_at -= 10.0
                if record.is_sent:
                    record.shared_commit_seconds = 2.0
            is_sent = adaptive.decide(number, records, 5, 10.0).is_sent
            count += is_sent
            records.append(SaveRecord(number, "", 10**9, 0.1, 1.0, None, is_sent=is_sent))
        return count

    assert sent(math.inf) == 1
    assert sent(25.0) == 4


def test_a_save_in_progress_counts_with_the_previous_size() -> None:
    """Its own size is unknown, and must not count as 0."""
    adaptive = sending(exposure_seconds_max=math.inf)
    records = [SaveRecord(1, "", 10**9, 0.1, 1.0, 6.0), SaveRecord(2, "", 0, 0.1)]
    assert not adaptive.decide(3, records, 1, 10.0, view=RankView(2.5)).is_direct_put
    assert adaptive.decide(4, records, 1, 10.0, view=RankView(0.5)).is_direct_put


def test_a_drain_is_throttled_to_its_allowed_slowdown(caplog: pytest.LogCaptureFixture) -> None:
    """D7: a model of training that an unlimited drain at 200 MB/s slows by 24 %, in proportion to its rate."""
    caplog.set_level(logging.INFO, "tierckpt.policy")
    adaptive = sending(exposure_seconds_max=math.inf)
    records: list[SaveRecord] = []
    rates, slowdowns, rate = [], [], 200e6
    for number in range(1, 25):
        slowdown = 0.24 * rate / 200e6
        slowdowns.append(slowdown)
        for record in records:
            record.begun_at -= 100.0
        order = adaptive.decide(number, records, 1, 100.0, view=RankView(drain_slowdown=slowdown))
        rate = min(200e6, order.bytes_per_second or math.inf)
        rates.append(rate)
        records.append(SaveRecord(number, "", 10**9, 0.1, 1.0, 1.0 + 10**9 / rate))
    assert slowdowns[0] == pytest.approx(0.24)
    assert slowdowns[-1] == pytest.approx(Rules().step_slowdown_max, rel=0.05)
    assert rates[-1] == pytest.approx(25e6, rel=0.05)
    assert "drain_bytes_per_second" in caplog.messages[-1] and "step_slowdown 0.2" in caplog.messages[-1]


def test_a_throttle_ends_when_drains_cost_nothing() -> None:
    adaptive = sending(exposure_seconds_max=math.inf)
    records = [SaveRecord(1, "", 10**9, 0.1, 1.0, 6.0)]
    for number in range(2, 12):
        throttled = adaptive.decide(number, records, 1, 100.0, view=RankView(drain_slowdown=0.3))
        records.append(SaveRecord(number, "", 10**9, 0.1, 1.0, 6.0))
    assert throttled.bytes_per_second is not None and throttled.bytes_per_second < 100e6
    for number in range(12, 30):
        free = adaptive.decide(number, records, 1, 100.0, view=RankView(drain_slowdown=0.0))
        records.append(SaveRecord(number, "", 10**9, 0.1, 1.0, 6.0))
    assert free.bytes_per_second is None or free.bytes_per_second >= 190e6


def test_nodes_divide_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "32")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert SaveDirective(bytes_per_second=100e6).throttle_of_node() == 25_000_000
    assert SaveDirective().throttle_of_node() is None
