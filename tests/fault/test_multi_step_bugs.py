"""Seeded bugs of a multi-step save; letters mark known mistakes of other implementations.

A bug counts as found if the window is abandoned (its record says why), if the restored state is not that of its step,
or if training waits unnecessarily.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.exact import check_same
from tests.fault.training_jobs import Job, restored
from tests.waits import ANSWER_SECONDS, SEEDED_SECONDS, TooLongError, counted
from tierckpt import poll
from tierckpt.arena.memory import Memory
from tierckpt.replay import capture, link, multi_step
from tierckpt.replay.apply import Replay
from tierckpt.replay.capture import Step
from tierckpt.replay.checksum import Fingerprint
from tierckpt.replay.link import GRADIENTS, Link, TensorCopy
from tierckpt.training.codec import job_state as states
from tierckpt.training.every_step import window

WINDOW, WINDOW_START = 4, 3
Patch = pytest.MonkeyPatch
Bug = Callable[[Patch, Job], None]


def rest_captured_late(patch: Patch, job: Job) -> None:
    """(a) Buffers, schedule and random state come from a later step."""

    def fill_late(tree: Any, copies: Any) -> Any:
        now = states.collect(job.state)
        filled = original(tree, copies)
        return now | {"model": filled["model"] | {"seen": now["model"]["seen"]}, "optimizer": filled["optimizer"]}

    original, matches = window.fill, Fingerprint.matches
    patch.setattr(window, "fill", fill_late)
    patch.setattr(Fingerprint, "matches", lambda *of: time.sleep(0.05) or matches(*of))  # parts complete later


def replayed_in_another_layout(patch: Patch, job: Job) -> None:
    """(b) A fused step over pieces is not bit-equal to one over whole tensors."""

    def apply(replay: Replay, step: Step) -> None:
        replay.version = step.version
        for key, tensor in replay.parameters.items():
            state, count = replay.state[key], 13
            flat, gradient = tensor.view(-1), step.gradients[key].reshape(-1)
            for at in range(0, flat.numel(), count):
                piece = torch.nn.Parameter(flat[at : at + count])
                piece.grad = gradient[at : at + count].clone()
                options = {name: value for name, value in step.hyperparameters[0].items() if name != "foreach"}
                optimizer = torch.optim.AdamW([piece], **options)
                moments = {name: state[name].view(-1)[at : at + count] for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[piece] = {"step": state["step"].clone(), **moments}
                optimizer.step()
            state["step"] += 1

    patch.setattr(Replay, "apply", apply)


def gradients_in_half_precision(patch: Patch, job: Job) -> None:
    """(c) Gradients are cast to bfloat16, with a loss of bits."""
    patch.setattr(link, "lossless_upper_halves", lambda one: one.view(-1).to(torch.bfloat16).view(torch.int16))


def replayed_out_of_order(patch: Patch, job: Job) -> None:
    """(d) Two steps are applied in the wrong order, and the version is the larger one."""
    waiting: dict[int, Step] = {}

    def apply(replay: Replay, step: Step) -> None:
        if id(replay) not in waiting and replay.version == step.version - 1:
            waiting[id(replay)] = step
            return
        first = waiting.pop(id(replay), None)
        for one in (step, first):
            if one is not None:
                replay.version = one.version - 1
                original(replay, one)
        replay.version = step.version

    original = Replay.apply
    patch.setattr(Replay, "apply", apply)


def one_step_left_out(patch: Patch, job: Job) -> None:
    def apply(replay: Replay, step: Step) -> None:
        original(replay, step) if step.version != 2 else setattr(replay, "version", step.version)

    original = Replay.apply
    patch.setattr(Replay, "apply", apply)


def hyperparameters_of_the_first_step(patch: Patch, job: Job) -> None:
    first: list[Any] = []

    def stale(optimizer: Any, group: Any) -> Any:
        first.append(original(optimizer, group))
        return first[0]

    original = capture.hyperparameters_of
    patch.setattr(capture, "hyperparameters_of", stale)


def without(name: str) -> Bug:
    """(g) The replay ignores an option of the optimizer."""

    def bug(patch: Patch, job: Job) -> None:
        def without_option(optimizer: Any, group: Any) -> Any:
            return original(optimizer, group) | {name: False}

        original = capture.hyperparameters_of
        patch.setattr(capture, "hyperparameters_of", without_option)

    return bug


def skipped_steps_replayed(patch: Patch, job: Job) -> None:
    """(g) Steps that a GradScaler skips are replayed."""
    patch.setattr(Step, "is_skipped", False)


def unclipped_gradients(patch: Patch, job: Job) -> None:
    """(g) The replay does not apply gradient clipping."""

    def copy(this: Link, sources: Any, priority: int) -> TensorCopy:
        return original(this, [3 * one for one in sources] if priority == GRADIENTS else sources, priority)

    original = Link.copy
    patch.setattr(Link, "copy", copy)


def part_copied_late(patch: Patch, job: Job) -> None:
    """The update does not wait for the copy of the tensors that it overwrites (W1)."""
    patch.setattr(TensorCopy, "next_chunk", slow_down(TensorCopy.next_chunk))
    hooks: list[Any] = []

    def register(this: torch.optim.Optimizer, hook: Any) -> Any:
        hooks.append(hook)
        return original(this, (lambda *_: None) if len(hooks) == 1 else hook)

    original = torch.optim.Optimizer.register_step_pre_hook
    patch.setattr(torch.optim.Optimizer, "register_step_pre_hook", register)


def slow_down(original: Callable[[TensorCopy, float], Any]) -> Callable[[TensorCopy, float], Any]:
    def next_chunk(this: TensorCopy, _: float) -> Any:
        time.sleep(0.02)
        return original(this, 1)  # a tensor

    return next_chunk


FUSED = {"fused": True}
BUGS: dict[str, tuple[Bug, dict[str, Any]]] = {
    "(a) the rest is captured late": (rest_captured_late, {}),
    "(b) replayed in another layout": (replayed_in_another_layout, FUSED),
    "(c) gradients are cast": (gradients_in_half_precision, {}),
    "(d) replayed out of order": (replayed_out_of_order, {}),
    "(g) amsgrad": (without("amsgrad"), {"amsgrad": True}),
    "(g) skipped steps": (skipped_steps_replayed, FUSED | {"scaled": True}),
    "(g) the clip coefficient": (unclipped_gradients, {}),
    "a skipped step": (one_step_left_out, {}),
    "stale hyperparameters": (hyperparameters_of_the_first_step, {}),
    "part copied late": (part_copied_late, {}),
}


def make_job(options: dict[str, Any]) -> Job:
    job = Job(**{name: value for name, value in options.items() if name != "scaled"})
    if "scaled" in options:
        job.scaler = torch.amp.GradScaler("cpu")
    return job


def find_problem(job: Job, uri: Path) -> str:
    """Run a multi-step save. Returns the problem found, or ""."""
    with tierckpt.Checkpointer(uri, every_step=tierckpt.EveryStep(window_steps=WINDOW)) as checkpointer:
        expected, saved = {}, None
        while saved is None or not saved.done():
            job.train()
            expected[job.step] = job.values()
            checkpointer.step(job.step, job.state)
            if job.step == WINDOW_START:
                saved = checkpointer.save(job.step, job.state)
        saved.result()
    (record,) = checkpointer.stats
    if record.fallback:
        return record.fallback
    assert record.window_steps == WINDOW and record.step == WINDOW_START + WINDOW - 1
    again = Job(type(job.optimizer), **{n: v for n, v in job.optimizer.defaults.items() if n in ("amsgrad", "fused")})
    restored(uri, again, record.step)
    try:
        check_same(again.values(), expected[record.step])
    except AssertionError as error:
        return f"wrong state: {error}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_checks_find_each_seeded_bug(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug, options = BUGS[name]
    job = make_job(options)
    with monkeypatch.context() as patch:
        bug(patch, job)
        assert find_problem(job, tmp_path / "run")


@pytest.mark.parametrize("name", ["(a) the rest is captured late", "(g) amsgrad", "(g) skipped steps"])
def test_checks_find_no_problem_without_a_bug(name: str, tmp_path: Path) -> None:
    assert not find_problem(make_job(BUGS[name][1]), tmp_path / "run")


def test_control_without_the_fingerprint_a_wrong_state_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state comparison of the harness must also find bugs without the fingerprint."""
    monkeypatch.setattr(Fingerprint, "matches", lambda *_: True)
    job = Job()
    one_step_left_out(monkeypatch, job)
    assert "wrong state" in find_problem(job, tmp_path / "run")


@pytest.mark.parametrize(
    "is_broken", [pytest.param(False, marks=pytest.mark.slow), True], ids=["no bug", "(f) host waits in every step"]
)
def test_begin_does_not_wait_for_its_copy(is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[TensorCopy] = []

    def copy(this: Link, sources: Any, priority: int) -> TensorCopy:
        copies.append(original(this, sources, priority))
        if is_broken:
            copies[-1].done.result(60)
        return copies[-1]

    original = Link.copy
    monkeypatch.setattr(Link, "copy", copy)
    job = Job()
    job.train()
    with (
        contextlib.closing(Link(bytes_per_second=1e5 if is_broken else 1e3)) as slow_link,
        multi_step.MultiStepStager(job.optimizer, 2, link=slow_link) as stager,
    ):
        stager.begin(job.optimizer.state_dict)
        assert copies[0].done.done() == is_broken


@pytest.mark.parametrize("is_broken", [False, True], ids=["no bug", "(e) memory is mapped for each window"])
def test_later_windows_allocate_no_memory(is_broken: bool, tmp_path: Path, monkeypatch: Patch) -> None:
    maps, tensors = [0], link.PinnedMemory.tensors
    allocate = Memory.allocate

    def counting_allocate(*arguments: Any, **options: Any) -> Memory:
        maps[0] += 1
        return allocate(*arguments, **options)

    monkeypatch.setattr(Memory, "allocate", counting_allocate)
    if is_broken:
        monkeypatch.setattr(link.PinnedMemory, "tensors", lambda _, sources: tensors(link.PinnedMemory(), sources))
    job, counts = Job(), []
    with tierckpt.Checkpointer(tmp_path / "run", every_step=tierckpt.EveryStep(window_steps=WINDOW)) as checkpointer:
        for _ in range(5):
            job.train()
            saved = checkpointer.save(job.step, job.state)
            while not saved.done():
                job.train()
                checkpointer.step(job.step, job.state)
            saved.result()
            counts.append(maps[0])
    assert not any(record.fallback for record in checkpointer.stats) and counts[0] >= WINDOW
    assert (counts[-1] > counts[2]) == is_broken, counts


class BlockedCopies:
    """Blocks the copy of chunks while ``can_copy`` is cleared."""

    def __init__(self, patch: Patch) -> None:
        self.can_copy = threading.Event()
        self.can_copy.set()
        original = TensorCopy.next_chunk

        def next_chunk(this: TensorCopy, chunk_bytes: float) -> Any:
            self.can_copy.wait(60)
            return original(this, chunk_bytes)

        patch.setattr(TensorCopy, "next_chunk", next_chunk)


STEPS_TO_CALL = {"save during a window's copy": WINDOW, "step that overwrites an uncopied part": 2}


@pytest.mark.ill
@pytest.mark.parametrize("bug", [False, True], ids=["no bug", "unbounded wait"])
@pytest.mark.parametrize("call", STEPS_TO_CALL)
def test_training_waits_at_most_half_a_second_for_a_blocked_copy(
    call: str, bug: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The call waits at most half a second; then the state is copied whole, and the record says why."""
    job, link_copies = Job(), BlockedCopies(monkeypatch)
    if bug:
        monkeypatch.setattr(poll, "HANG_SECONDS", 600.0)
    with tierckpt.Checkpointer(tmp_path / "run", every_step=tierckpt.EveryStep(window_steps=WINDOW)) as checkpointer:
        job.train()
        checkpointer.save(job.step, job.state)
        for _ in range(STEPS_TO_CALL[call] - 2):
            job.train()
            checkpointer.step(job.step, job.state)
        job.train()
        link_copies.can_copy.clear()
        checkpointer.step(job.step, job.state)  # starts the copy of a part
        found = pytest.raises(TooLongError) if bug else contextlib.nullcontext()
        with found, counted(SEEDED_SECONDS if bug else ANSWER_SECONDS):
            if STEPS_TO_CALL[call] < WINDOW:
                job.train()
                checkpointer.step(job.step, job.state)
            else:
                checkpointer.save(job.step, job.state)
        link_copies.can_copy.set()
        while not (bug or checkpointer.stats):
            job.train()
            checkpointer.step(job.step, job.state)
        step, expected = job.step, job.values()
    if not bug:
        assert checkpointer.stats[0].fallback == multi_step.COPY_HANGS and checkpointer.stats[0].step == step
        again = Job()
        assert restored(tmp_path / "run", again) == step
        check_same(again.values(), expected)
