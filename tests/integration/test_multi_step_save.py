"""``EveryStep(window_steps=...)``: a save spread over several steps holds the state of the step it names."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tests.compat.worker import launch
from tests.unit.replay.test_multi_step import check
from tierckpt import Checkpointer, EveryStep
from tierckpt.errors import CheckpointError, ConfigError
from tierckpt.replay import multi_step
from tierckpt.training.every_step.window import MultiStepSave
from tierckpt.training.saves import SaveRecord

SECONDS = 60.0


class Job:
    """A loop with two optimizers, a schedule, a buffer and random state."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        self.model.register_buffer("seen", torch.zeros(()))
        halves = list(self.model.children())
        self.first = torch.optim.AdamW([p for one in halves[:3] for p in one.parameters()], lr=0.01)
        self.second = torch.optim.SGD([p for one in halves[3:] for p in one.parameters()], lr=0.01, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.first, 0.95)
        self.number = 0
        self.kept: dict[int, Any] = {}

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "first": self.first,
            "second": self.second,
            "schedule": self.schedule,
            "rng": tierckpt.RngState(),
            "data": {"at": self.number, "seen": torch.tensor([self.number])},
        }

    def train(self) -> None:
        self.number += 1
        for optimizer in (self.first, self.second):
            optimizer.zero_grad()
        self.model(torch.randn(4, 16)).square().mean().backward()
        for optimizer in (self.first, self.second):
            optimizer.step()
        self.schedule.step()
        self.model.seen += 1  # type: ignore[operator]
        self.kept[self.number] = copy.deepcopy(self.values())

    def values(self) -> dict[str, Any]:
        of_optimizers = {"first": self.first.state_dict(), "second": self.second.state_dict()}
        return {
            "model": self.model.state_dict(),
            **of_optimizers,
            "schedule": self.schedule.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def step(self, checkpointer: Checkpointer, times: int = 1) -> None:
        for _ in range(times):
            self.train()
            checkpointer.step(self.number, self.state)

    def begin(self, checkpointer: Checkpointer) -> Any:
        """Take the first step, and begin a save."""
        self.train()
        return checkpointer.save(1, self.state)


def windowed(uri: str, window_steps: Any = "auto", **options: Any) -> Checkpointer:
    return Checkpointer(uri, every_step=EveryStep(window_steps=window_steps), **options)


def check_restored(uri: str, step: int, wanted: Any, **options: Any) -> None:
    job = Job()
    state = job.state
    with Checkpointer(uri, **options) as checkpointer:
        assert checkpointer.restore(state, step) == step
    check(job.values(), wanted)
    assert state["data"]["at"] == step and state["data"]["seen"].tolist() == [step]


def train(uri: str, steps: int, window_steps: Any = "auto", **options: Any) -> tuple[Job, list[SaveRecord]]:
    job = Job()
    with windowed(uri, window_steps, **options) as checkpointer:
        job.step(checkpointer, steps)
    return job, checkpointer.stats


@pytest.mark.parametrize("window_steps", [1, 2, 4, 8])
def test_checkpoint_holds_the_last_step_of_its_window(window_steps: int, file_uri: str) -> None:
    job, stats = train(file_uri, 20, interval=8, window_steps=window_steps)
    ends = [8 + window_steps - 1, 16 + window_steps - 1]
    named = [record.step for record in stats]
    assert named == ([*ends, 20] if ends[-1] < 20 else [ends[0], 20]) and not any(record.error for record in stats)
    for record in stats:
        assert record.uri.endswith(f"/step-{record.step}")
        check_restored(file_uri, record.step, job.kept[record.step])
    assert stats[0].window_steps == window_steps and stats[0].moved_bytes > 0 and not stats[0].fallback
    assert bool(stats[-1].fallback) == (ends[-1] > 20), "the loop ends within the last window"


def test_future_names_the_step_and_completes_at_its_commit(file_uri: str) -> None:
    job = Job()
    with windowed(file_uri, 3) as checkpointer:
        saved = job.begin(checkpointer)
        assert isinstance(saved, MultiStepSave) and saved.record.step == 3
        assert not saved.cancel(), "cancelled although other ranks copy too"
        while not saved.done():
            job.step(checkpointer)
        saved.result(SECONDS)
        assert checkpointer.stats == [saved.record] and saved.record.local_commit_seconds is not None
    check_restored(file_uri, 3, job.kept[3])


@pytest.mark.parametrize("end", ["close", "wait", "the with block", "restore", "result"])
def test_ending_a_window_early_saves_the_current_state(end: str, file_uri: str) -> None:
    job = Job()
    with windowed(file_uri, 7) as checkpointer:
        saved = job.begin(checkpointer)
        job.step(checkpointer, 3)
        if end == "restore":
            assert checkpointer.restore(job.state) == 4
        elif end == "result":
            saved.result()
        elif end != "the with block":
            getattr(checkpointer, end)()
    saved.result(SECONDS)
    (record,) = checkpointer.stats
    assert record.step == 4 and "before the last step" in record.fallback
    check_restored(file_uri, 4, job.kept[4])


def test_window_ended_within_a_step_saves_nothing(file_uri: str) -> None:
    job = Job()
    with windowed(file_uri, 7) as checkpointer:
        saved = job.begin(checkpointer)
        job.train()
        with pytest.raises(CheckpointError, match="within the step after 1"):
            checkpointer.wait("local")
        assert saved.exception() is not None and not checkpointer.stats
        checkpointer.save(job.number, job.state).result()
    check_restored(file_uri, 2, job.kept[2])


@pytest.mark.parametrize("memory", ["is there", "runs out"])
def test_loop_that_ends_with_its_window_saves_it(memory: str, file_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step follows, and the loop does not call ``wait``."""
    job = Job()
    checkpointer = windowed(file_uri, 3)
    saved = job.begin(checkpointer)
    for _ in range(2):
        job.train()
        if job.number == 3 and memory == "runs out":

            def refuses(*_: Any) -> Any:
                raise MemoryError

            monkeypatch.setattr(multi_step.MultiStepStager, "_begin_part", refuses)  # private: allocates memory
        checkpointer.step(job.number, job.state)
    saved.result(SECONDS)
    assert checkpointer.stats[0].step == 3
    assert checkpointer.stats[0].fallback == ("" if memory == "is there" else multi_step.OUT_OF_MEMORY)
    checkpointer.close()


def test_abandoned_window_is_copied_at_once_and_recorded(file_uri: str) -> None:
    job = Job()
    with windowed(file_uri, 4) as checkpointer:
        job.begin(checkpointer)
        for number in range(5):
            job.train()
            if number == 1:
                job.first.load_state_dict(copy.deepcopy(job.first.state_dict()))
            checkpointer.step(job.number, job.state)
    (record,) = checkpointer.stats
    assert record.step == 4 and "load_state_dict" in record.fallback and not record.window_steps
    check_restored(file_uri, 4, job.kept[4])


def test_steps_that_bypass_hooks_copy_the_whole_state(file_uri: str) -> None:
    """An optimizer fused into backward: the saved one never steps, others update its parameters."""
    job = Job()
    fused = {p: torch.optim.SGD([p], lr=0.1) for p in job.model.parameters()}
    with windowed(file_uri, 3) as checkpointer:
        job.begin(checkpointer)
        for parameter, optimizer in fused.items():
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        for _ in range(3):
            job.number += 1
            job.model(torch.randn(4, 16)).square().mean().backward()
            job.kept[job.number] = copy.deepcopy(job.values())
            checkpointer.step(job.number, job.state)
    (record,) = checkpointer.stats
    assert record.step in (3, 4) and "stepped its parameters" in record.fallback
    check_restored(file_uri, record.step, job.kept[record.step])


def test_several_steps_of_an_optimizer_between_two_calls(file_uri: str) -> None:
    job = Job()
    with windowed(file_uri, 3, interval=4) as checkpointer:
        for call in range(1, 9):
            job.train()
            job.train()
            job.kept[-call] = job.kept[job.number]
            checkpointer.step(call, job.state | {"data": {"at": call, "seen": torch.tensor([call])}})
    assert [record.step for record in checkpointer.stats] == [6, 8]
    assert checkpointer.stats[0].window_steps == 3
    check_restored(file_uri, 6, job.kept[-6])


def test_auto_windows_fit_the_interval_without_overlap(file_uri: str) -> None:
    job, stats = train(file_uri, 14, interval=3)
    assert not any(record.fallback for record in stats[:-1])
    assert all(1 <= record.window_steps <= 3 for record in stats[:-1])
    begun = [record.step - record.window_steps + 1 for record in stats[:-1]]
    assert begun == [3, 6, 9, 12][: len(begun)] and len(begun) >= 3
    check_restored(file_uri, stats[1].step, job.kept[stats[1].step])


def test_preempted_job_saves_its_current_step(file_uri: str) -> None:
    job = Job()
    with windowed(file_uri, interval=7) as checkpointer:
        while not checkpointer.preempted:
            job.train()
            if job.number == 9:
                checkpointer.request_final_save(time.monotonic() + SECONDS, "a signal came")
            checkpointer.step(job.number, job.state)
    (record,) = checkpointer.stats
    assert record.step == 9 and record.fallback == "the job is preempted"
    check_restored(file_uri, 9, job.kept[9])


def test_failing_loop_abandons_the_window(file_uri: str) -> None:
    job = Job()
    with pytest.raises(ZeroDivisionError), windowed(file_uri) as checkpointer:
        saved = job.begin(checkpointer)
        raise ZeroDivisionError
    with pytest.raises(CheckpointError, match="closed before the window ended"):
        saved.result(SECONDS)
    job.train()
    assert checkpointer.stats == []


def test_two_windows_at_once_are_refused(file_uri: str) -> None:
    """A loop that never calls step gets this error too."""
    job = Job()
    with pytest.raises(CheckpointError, match="within the step after 1"), windowed(file_uri, 4) as checkpointer:
        job.begin(checkpointer)
        job.train()
        with pytest.raises(CheckpointError, match=r"second one cannot begin.*Call step\(\) after every step"):
            checkpointer.save(2, job.state)


@pytest.mark.parametrize(
    ("every_step", "options", "words"),
    [
        ({}, {"mode": "lazy"}, "mode is 'lazy'"),
        ({"window_steps": 4}, {"mode": "sync"}, "mode is 'sync'"),
        ({"window_steps": 0}, {}, "window_steps is 0"),
        ({"window_steps": True}, {}, "window_steps is True"),
        ({"window_steps": "many"}, {}, "window_steps is 'many'"),
        ({"window_steps": 2.5}, {}, "window_steps is 2.5"),
        ({"exact": "nearly"}, {}, "exact is 'nearly'"),
        ({}, {"interval": 2.5}, "interval is 2.5"),
        ({"window_steps": 8}, {"interval": 7}, "window_steps is 8, but a save begins every 7"),
    ],
)
def test_invalid_arguments(every_step: dict[str, Any], options: dict[str, Any], words: str, file_uri: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Checkpointer(file_uri, every_step=EveryStep(**every_step), **options)


def states_that_cannot_be_followed() -> dict[str, tuple[dict[str, Any], str]]:
    model = nn.Linear(2, 2)
    nowhere = nn.Linear(2, 2, device="meta")
    return {
        "no optimizer": ({"model": model}, "needs an optimizer in the state"),
        "not elementwise": ({"m": model, "o": torch.optim.LBFGS(model.parameters())}, "LBFGS cannot be replayed"),
        "meta": ({"m": nowhere, "o": torch.optim.AdamW(nowhere.parameters())}, "on the meta device"),
    }


@pytest.mark.parametrize("name", states_that_cannot_be_followed())
def test_untrackable_state_is_refused(name: str, file_uri: str) -> None:
    state, words = states_that_cannot_be_followed()[name]
    with windowed(file_uri) as checkpointer, pytest.raises(ConfigError, match=words):
        checkpointer.save(1, state)
    assert not any(getattr(one, "_optimizer_step_pre_hooks", None) for one in state.values())


def test_sync_returns_when_the_checkpoint_is_committed(file_uri: str) -> None:
    job = Job()
    with Checkpointer(file_uri, mode="sync") as checkpointer:
        job.train()
        assert checkpointer.save(1, job.state).done()
        (record,) = checkpointer.stats
        assert record.local_commit_seconds is not None and record.blocked_seconds >= record.local_commit_seconds
    check_restored(file_uri, 1, job.kept[1])


# --- several ranks save one step, whatever happens on one -------------------------------------------------------------


def on_two_ranks(what: str, directory: Path, **arguments: Any) -> list[list[str]]:
    """Two ranks, each in a process of its own. Returns the lines of each."""
    lines: list[list[str]] = launch(
        f"tests.integration.multi_step_save_ranks:{what}", 2, directory=str(directory), **arguments
    )
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp", "bucket views"])
def test_what_two_ranks_have_saved_is_restored_in_fresh_processes(kind: str, tmp_path: Path) -> None:
    saved = on_two_ranks("save", tmp_path, kind=kind)
    if kind != "bucket views":  # where gradients lie in buffers that are used again, one window is copied whole
        assert saved == [["saved 11 4 ", "saved 19 4 ", "saved 21 0 "]] * 2
    assert sum(not line.endswith(" ") for line in saved[0]) <= 1, saved
    restored = on_two_ranks("restore", tmp_path, kind=kind)
    assert restored == [[" ".join(["restored", line.split()[1]]) for line in of_rank] for of_rank in saved]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"), [("one rank edits", "outside the optimizer"), ("one rank loads", "load_state_dict")]
)
def test_a_rank_that_gives_up_has_all_ranks_copy_the_same_step_whole(fault: str, reason: str, tmp_path: Path) -> None:
    saved = on_two_ranks("save", tmp_path, kind="fsdp", fault=fault)
    first = saved[0][0].split(maxsplit=3)
    assert saved[0] == saved[1], "ranks differ"
    assert int(first[1]) in (11, 12, 13) and first[2] == "0" and reason in first[3]
    assert saved[0][1:] == ["saved 19 4 ", "saved 21 0 "], "the window after it is whole again"
    assert len(on_two_ranks("restore", tmp_path, kind="fsdp")[0]) == 3
