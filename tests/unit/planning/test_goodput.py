"""Goodput from the records of a run, against a simulated run and against the models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.planning.test_simulator import BLOCKING, CLUSTER, GB, MTBF, NODES, RATES, failing, with_peers
from tierckpt.errors import ConfigError
from tierckpt.planning import ettr, simulator
from tierckpt.planning.drain_policy import Rules
from tierckpt.planning.goodput import Goodput, analyse, read_start
from tierckpt.planning.simulator import Cluster, Configuration, SimulationResult, simulate


def line(what: str, at: float, step: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        "what": what,
        "at": at,
        "step": step,
        **{(k if k in ("saves", "process_at", "reason") else f"{k}_seconds"): v for k, v in more.items()},
    }


FIRST = [
    line("start", 102, 1, process_at=100, starting=2),
    line("save", 112, 10, productive=9, blocked=1, starting=2, saves=1),
    line("step", 122, 20, productive=19, blocked=1, starting=2, saves=1),
]
"""Ten steps, a save that blocks for a second, ten more steps, then a kill."""
SECOND = [
    line("start", 133, process_at=130, starting=3),
    line("restored", 135, 10, starting=3, loading=2),
    line("step", 155, 30, starting=3, loading=2, productive=20),
    line("end", 155, 30, starting=3, loading=2, productive=20, reason="closed"),
]


def report(*starts: list[dict[str, Any]]) -> Goodput:
    return analyse(start for start in map(read_start, starts) if start)


def test_each_second_of_a_run_is_classified() -> None:
    found = report(FIRST, SECOND)
    assert found.wall_seconds == 55
    assert {what: seconds for what, seconds in found.spent.items() if seconds} == {
        "kept": 29, "lost": 10, "blocked": 1, "down": 8, "starting": 5, "loading": 2,
    }  # fmt: skip
    assert found.ettr == pytest.approx(29 / 55)
    assert found.goodput == pytest.approx(29 / 47)
    assert found.kept_steps == 30
    [failure] = found.failures
    assert (failure.last_step, failure.restored_step, failure.lost_steps, failure.lost_seconds) == (20, 10, 10, 10)
    assert failure.away_seconds == 8 + 5


def test_steps_replayed_from_a_log_are_counted() -> None:
    logged = [SECOND[0], line("restored", 135, 19, loading=2) | {"replayed_steps": 9}, *SECOND[2:]]
    found = report(FIRST, logged)
    assert (found.replayed_steps, found.failures[0].lost_steps) == (9, 1)
    assert report(FIRST, SECOND).replayed_steps == 0


def test_a_start_killed_before_its_first_step_loses_nothing() -> None:
    early = [line("start", 126, process_at=125, starting=1)]
    found = report(FIRST, early, SECOND)
    assert (found.spent["lost"], len(found.failures)) == (10, 2)


def test_a_planned_stop_is_no_failure_and_a_fresh_start_loses_all_steps() -> None:
    ended = [*FIRST, line("end", 122, 20, productive=19, reason="closed")]
    goes_on = [line("start", 131, process_at=130), line("restored", 131, 20), line("step", 141, 30, productive=10)]
    found = report(ended, goes_on)
    assert (found.failures, found.kept_steps, found.unsaved_steps) == ((), 20, 10)
    afresh = [line("start", 131, 1, process_at=130), line("step", 141, 10, productive=10)]
    assert report(FIRST, afresh).failures[0].lost_steps == 20


@pytest.mark.parametrize(
    "damaged",
    [
        {"what": "step"},
        {"what": "step", "at": "now", "step": 3},
        {"what": "step", "at": 140, "step": "x", "productive_seconds": 5},
        {"what": "step", "at": 1e30, "step": 99},
        {"what": "step", "at": 140, "step": 99, "productive_seconds": -5},
        {"at": 1},
    ],
)
def test_unknown_lines_are_ignored(damaged: dict[str, Any]) -> None:
    assert report(FIRST, [*SECOND[:3], damaged, SECOND[3]]) == report(FIRST, SECOND)


def test_missing_records_are_explained() -> None:
    with pytest.raises(ConfigError, match="no record of any training"):
        report()
    assert read_start([line("step", 4, 1)]) is None


# --- compared with the simulator and the formulas -----------------------------------------------------------------


class Witnessed(simulator._Job):  # private: records the job's events
    """A job that keeps its own records, a list for each start. A step is a millisecond
    of work."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.records: list[list[dict[str, Any]]] = []
        self.begin()

    def begin(self) -> None:
        self.saves, self.before = 0, self.totals()
        self.records.append([])
        self.note("start", process_at=self.env.now)

    def note(self, what: str, **more: Any) -> None:
        totals = {name: now - self.before[name] for name, now in self.totals().items()}
        step = round(self.work * 1000)
        self.records[-1].append({"what": what, "at": self.env.now, "step": step, "saves": self.saves, **totals, **more})

    def totals(self) -> dict[str, float]:
        spent = self.spent
        return {
            "productive_seconds": self.work + spent["lost"],
            "blocked_seconds": spent["stalled"],
            "starting_seconds": spent["restarting"] + spent["waiting"],
            "loading_seconds": spent["loading"],
        }

    def _checkpoint(self) -> Any:
        self.saves += 1
        self.note("save")
        yield from super()._checkpoint()

    def _roll_back(self, *restored: Any) -> None:
        super()._roll_back(*restored)
        self._now_doing("training")
        self.note("restored")

    def lose_nodes(self, nodes: list[int], *, wipes: bool) -> None:
        super().lose_nodes(nodes, wipes=wipes)
        self.note("step")
        self.begin()

    def close(self) -> None:
        super().close()
        self.note("step")


def recorded(
    cluster: Cluster, configuration: Configuration, *, days: float, seed: int
) -> tuple[SimulationResult, list[list[dict[str, Any]]]]:
    jobs: list[Witnessed] = []

    def witnessed(world: Any) -> Witnessed:
        jobs.append(Witnessed(world))
        return jobs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "_Job", witnessed)  # private: as above
        run = simulate(cluster, configuration, days=days, seed=seed)
    return run, jobs[0].records


def measure(cluster: Cluster, configuration: Configuration, days: float, seed: int) -> tuple[SimulationResult, Goodput]:
    run, records = recorded(cluster, configuration, days=days, seed=seed)
    return run, report(*records)


BACKGROUND = replace(BLOCKING, interval_seconds=230, blocking=False, stall_seconds=5)
TIERED = Configuration(
    "two", 120, checkpoint_bytes=600 * GB, restart_seconds=50, stall_seconds=2, local=True, flush_seconds=5,
    local_load_seconds=10, restore_bytes=1500 * GB, rules=Rules(every=17),
)  # fmt: skip


@pytest.mark.parametrize(
    ("configuration", "expected"),
    [(BLOCKING, ettr.exact(230, 60, MTBF, 40)), (BACKGROUND, ettr.exact(230, 5, MTBF, 40, 60))],
)
def test_measured_ettr_matches_simulation_and_model(configuration: Configuration, expected: float) -> None:
    run, found = measure(CLUSTER, configuration, 15, 3)
    assert len(found.failures) == sum(run.failures.values()) > 2000
    assert found.ettr == pytest.approx(run.ettr, rel=2e-3)
    assert found.spent["lost"] == pytest.approx(run.lost_seconds, rel=0.01)
    assert found.spent["blocked"] == pytest.approx(run.stalled_seconds, rel=1e-3)
    assert found.ettr == pytest.approx(expected, rel=0.03)


def test_the_formula_with_measured_means_agrees_within_three_percent() -> None:
    """`tierckpt report` prints both values. For a job whose failures leave the SSDs intact."""
    cluster = Cluster(NODES, RATES, (failing(1800, "process", wipes=False),))
    run, found = measure(cluster, TIERED, 20, 2)
    assert found.expected_ettr == pytest.approx(run.ettr, rel=0.03)
    assert found.mtbf_seconds == pytest.approx(1800, rel=0.05)


def test_omitted_restarts_are_detected() -> None:
    """Seeded bug: shows that the comparison can fail."""
    run, records = recorded(CLUSTER, with_peers(NODES), days=10, seed=1)
    for start in records:
        for one in start:
            one["at"] -= records[0][0]["at"]
        start[0]["process_at"] = start[min(1, len(start) - 1)]["at"]
    found = report(*records)
    assert found.goodput != pytest.approx(run.ettr, rel=0.03)


def start_of(
    at: float, steps: range, saves: Iterable[int], *, resumes: int | None = None, end: str = "", by: str = "step"
) -> list[dict[str, Any]]:
    """A start that trains ``steps`` of one second each, and saves after the steps in ``saves``."""
    first = steps[0] if by == "step" else min(saves)
    lines = [line("start", at, first if resumes is None else None, process_at=at)]
    lines[0]["begins_with"] = by if resumes is None else "restore"
    if resumes is not None:
        lines.append(line("restored", at, resumes))
    count = 0
    for number, step in enumerate(steps, 1):
        if step in saves:
            count += 1
            lines.append(line("save", at + number, step, productive=number, saves=count))
            lines.append(line("durable", at + number, step, productive=number, saves=count, durable=0.1))
        elif by == "step":
            lines.append(line("step", at + number, step, productive=number, saves=count))
    if end:
        lines.append(line("end", at + len(steps), steps[-1], productive=len(steps), saves=count, reason=end))
    return lines


def counts(*starts: list[dict[str, Any]]) -> tuple[int, int, int]:
    found = report(*starts)
    assert found.trained_steps == found.kept_steps + found.unsaved_steps + found.lost_steps
    assert sum(found.spent.values()) == pytest.approx(found.wall_seconds, abs=1e-6)
    return found.kept_steps, found.unsaved_steps, found.lost_steps


def every(interval: int, last: int) -> range:
    return range(interval, last + 1, interval)


def test_a_run_without_losses_keeps_all_steps() -> None:
    """Also if the loop calls only ``save``, and first after a later step than the run's first."""
    run = range(1, 301)
    assert counts(start_of(0, run, every(10, 300), end="closed")) == (300, 0, 0)
    assert counts(start_of(0, run, every(10, 300), end="closed", by="save")) == (300, 0, 0)
    assert counts(start_of(0, run, every(1, 300), end="closed", by="save")) == (300, 0, 0)
    assert counts(start_of(0, range(300), range(9, 300, 10), end="closed")) == (300, 0, 0)  # counted from 0


def test_steps_after_the_last_save_are_kept_until_repeated() -> None:
    closed = start_of(0, range(1, 26), every(10, 25), end="closed")
    assert counts(closed) == (25, 0, 0) and report(closed).after_save_steps == 5
    assert counts(closed, start_of(100, range(21, 31), [30], resumes=20, end="closed")) == (30, 0, 5)


@pytest.mark.parametrize("interval", [1, 10])
def test_lost_steps_are_the_repeated_ones(interval: int) -> None:
    killed = start_of(0, range(1, 56), every(interval, 50))
    assert counts(killed) == (50, 5, 0)
    assert report(killed).spent["unsaved"] == pytest.approx(5)
    again = start_of(100, range(51, 81), [80], resumes=50, end="closed")
    assert counts(killed, again) == (80, 0, 5)
    twice = start_of(100, range(51, 56), [], resumes=50)  # at the same step
    assert counts(killed, twice) == (50, 5, 5)
    assert counts(killed, twice, [one | {"at": one["at"] + 200} | (
        {"process_at": 300, "world_size": 8} if one["what"] == "start" else {}) for one in again
    ]) == (80, 0, 10)  # fmt: skip


def test_an_unrecorded_restore_counts_from_the_newest_earlier_save() -> None:
    killed = start_of(0, range(1, 56), every(10, 50), by="save")
    assert counts(killed, start_of(100, range(41, 81), every(10, 80)[4:], by="save", end="closed")) == (80, 0, 10)


def test_commits_by_the_agent_and_gradient_logs_keep_steps() -> None:
    killed = start_of(0, range(1, 56), [10, 20])
    killed.insert(-1, line("save", 54.5, 54, productive=54, saves=3))
    [start] = filter(None, [read_start(killed)])
    assert analyse([start]).kept_steps == 20
    commit = {"what": "shared", "step": 54, "created_at": 70.0, "at": 75.0}
    assert analyse([start], [commit]).kept_steps == 54
    killed[0]["gradient_log"] = True
    assert counts(killed) == (55, 0, 0)


def test_a_background_commit_counts_with_its_own_step() -> None:
    lines = start_of(0, range(1, 56), [50])
    lines = [one for one in lines if one["step"] != 55]
    lines.append(line("durable", 56, 50, productive=55, durable=6, saves=1) | {"reached_step": 55})
    assert counts(lines) == (50, 5, 0)
