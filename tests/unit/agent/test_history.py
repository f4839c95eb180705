"""The history of the drains: slots, bounds, and a restart of the agent."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tierckpt.agent.history import FIELDS, FILE, RINGS, RUNS_MAX, History, write
from tierckpt.checkpoint.journal import READY, SET_ASIDE, JournalEntry
from tierckpt.format.layout import agent_dir
from tierckpt.format.manifest import FileEntry

BEGIN = 1_800_000_000.0
"""Of a minute."""
RUN = "s3://bucket/run"


class Clock:
    """Moves the monotonic clock and the wall clock together."""

    def __init__(self) -> None:
        self.now = BEGIN

    def __call__(self) -> float:
        return self.now - BEGIN


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def history(clock: Clock) -> History:
    return History(clock)


def waiting(uri: str, size_bytes: int, age_seconds: float, now: float, state: str = READY) -> JournalEntry:
    files = (FileEntry("x.distcp", size_bytes, ()),)
    return JournalEntry("t", uri, 0, state, now - age_seconds, files=files)


def values(history: History, ring: str, run: str, now: float) -> dict[str, list[float]]:
    """The values of slots that have a sample."""
    found = history.to_json(run, now=now)[ring]
    assert {len(found[field]) for field in FIELDS} == {RINGS[ring][1]}
    return {field: [value for value in found[field] if value is not None] for field in FIELDS}


def test_a_slot_has_the_rate_and_the_lag_of_a_run_and_of_all(clock: Clock, history: History) -> None:
    for _ in range(3):
        clock.now += 2
        history.count_sent(f"{RUN}/step-1", 400)
        history.count_sent("s3://bucket/other/step-7", 200)
        history.count_sent("s3://bucket/file.bin", 20)
        entries = [
            waiting(f"{RUN}/step-2", 1000, 30, clock.now),
            waiting(f"{RUN}/step-1", 500, 40, clock.now),
            waiting(f"{RUN}/step-0", 9999, 99, clock.now, SET_ASIDE),
        ]
        history.sample(entries, clock.now)
    assert values(history, "recent", RUN, clock.now) == {
        "bytes_per_second": [200.0] * 3, "lag_bytes": [1500.0] * 3, "lag_seconds": [40.0] * 3,
    }  # fmt: skip
    assert values(history, "recent", "s3://bucket/other", clock.now)["bytes_per_second"] == [100.0] * 3
    assert values(history, "recent", "", clock.now)["bytes_per_second"] == [310.0] * 3
    assert values(history, "day", "", clock.now) == {
        "bytes_per_second": [310.0], "lag_bytes": [1500.0], "lag_seconds": [40.0],
    }  # fmt: skip
    clock.now += 2
    history.sample([], clock.now)
    assert values(history, "recent", RUN, clock.now)["lag_bytes"] == [1500.0] * 3 + [0.0]
    assert values(history, "day", RUN, clock.now)["lag_bytes"] == [1500.0]  # the largest of the minute
    assert history.to_json("s3://bucket/unknown", now=clock.now)["recent"]["lag_bytes"] == [None] * 300


def test_a_slot_without_a_sample_has_no_value_and_old_ones_go(clock: Clock, history: History) -> None:
    for seconds in (2, 2, 6, 2):
        clock.now += seconds
        history.sample([], clock.now)
    recent = history.to_json(now=clock.now)["recent"]
    assert [value is None for value in recent["lag_bytes"]][-6:] == [False, False, True, True, False, False]
    seconds, count = RINGS["recent"]
    clock.now += seconds * count
    history.sample([], clock.now)
    assert values(history, "recent", "", clock.now)["lag_bytes"] == [0.0]


@pytest.mark.parametrize("step", [1, 7, 40])
def test_what_is_asked_for_in_parts_is_the_whole(clock: Clock, history: History, step: int) -> None:
    """As the page asks: from the last slot that it has, which may have changed since."""
    made = random.Random(step)
    kept: dict[int, float | None] = {}
    last = -1
    for number in range(400):
        clock.now += 2
        history.sample([waiting(f"{RUN}/step-1", made.randrange(1 << 20), 1, clock.now)], clock.now)
        if number % step == 0:
            part = history.to_json(after={"recent": last - 1}, now=clock.now)["recent"]
            kept |= dict(enumerate(part["lag_bytes"], start=part["first"]))
            last = max(kept)
    part = history.to_json(after={"recent": last - 1}, now=clock.now)["recent"]
    kept |= dict(enumerate(part["lag_bytes"], start=part["first"]))
    whole = history.to_json(now=clock.now)["recent"]
    assert [kept[whole["first"] + n] for n in range(RINGS["recent"][1])] == whole["lag_bytes"]


def test_its_memory_does_not_grow_with_the_runs(clock: Clock, history: History) -> None:
    for _ in range(40):
        clock.now += 2
        entries = [waiting(f"s3://bucket/run-{number}/step-1", number, 1, clock.now) for number in range(5 * RUNS_MAX)]
        history.sample(entries, clock.now)
    assert {len(values) for ring in history.rings.values() for values in ring.slots.values()} == {RUNS_MAX + 1}
    newest = f"s3://bucket/run-{5 * RUNS_MAX - 1}"
    for ring in RINGS:
        assert values(history, ring, newest, clock.now)["lag_bytes"][-1] == 5 * RUNS_MAX - 1


def test_a_restart_leaves_it(clock: Clock, history: History, local_root: Path) -> None:
    assert history.unwritten() is None
    clock.now += 2
    history.sample([waiting(f"{RUN}/step-1", 1000, 5, clock.now)], clock.now)
    data = history.unwritten()
    assert data is not None and history.unwritten() is None
    agent_dir(local_root).mkdir(parents=True)
    write(local_root, data)
    again = History.read(local_root)
    for run in ("", RUN):
        assert again.to_json(run, now=clock.now) == history.to_json(run, now=clock.now)
    clock.now += 2
    again.sample([], clock.now)
    assert values(again, "recent", RUN, clock.now)["lag_bytes"] == [1000.0, 0.0]


@pytest.mark.parametrize(
    "damaged",
    [lambda data: data[:-10], lambda data: data.replace(b"1000.0", b"1001.0"), lambda data: b"", None],
    ids=["cut", "flipped", "empty", "absent"],
)
def test_a_damaged_file_costs_the_history_only(
    clock: Clock, history: History, local_root: Path, damaged: Callable[[bytes], bytes] | None
) -> None:
    clock.now += 2
    history.sample([waiting(f"{RUN}/step-1", 1000, 5, clock.now)], clock.now)
    path = agent_dir(local_root) / FILE
    path.parent.mkdir(parents=True)
    if damaged is not None:
        path.write_bytes(damaged(history.encode()))
    again = History.read(local_root)
    again.sample([], clock.now)
    assert [value for value in again.to_json(now=clock.now)["day"]["lag_bytes"] if value is not None] == [0.0]
