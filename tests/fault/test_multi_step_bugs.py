"""Seeded bugs of a multi-step save: the checks must find each mistake that others have made.

A bug is found when the window gives itself up (its record says why), when the restored state is not that of the step
that it names, or when training waits for what it need not wait for.
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

WINDOW, BEGUN = 4, 3
Patch = pytest.MonkeyPatch
Bug = Callable[[Patch, Job], None]


def taken_when_it_is_written(patch: Patch, job: Job) -> None:
    """(a) Buffers, schedule and random state are of a later step."""

    def late(tree: Any, copies: Any) -> Any:
        now = states.collect(job.state)
        filled = original(tree, copies)
        return now | {"model": filled["model"] | {"seen": now["model"]["seen"]}, "optimizer": filled["optimizer"]}

    original, matches = window.fill, Fingerprint.matches
    patch.setattr(window, "fill", late)
    patch.setattr(Fingerprint, "matches", lambda *of: time.sleep(0.05) or matches(*of))  # parts complete later


def replayed_in_another_layout(patch: Patch, job: Job) -> None:
    """(b) A fused step of pieces has other bits than one of whole tensors."""

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
    """(c) Gradients are cast, whatever that loses."""
    patch.setattr(link, "lossless_upper_halves", lambda one: one.view(-1).to(torch.bfloat16).view(torch.int16))


def replayed_out_of_order(patch: Patch, job: Job) -> None:
    """(d) A step that came early is applied, and the version is the largest that was seen."""
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
    """(g) An option of the optimizer is not known to the replay."""

    def bug(patch: Patch, job: Job) -> None:
        def fewer(optimizer: Any, group: Any) -> Any:
            return original(optimizer, group) | {name: False}

        original = capture.hyperparameters_of
        patch.setattr(capture, "hyperparameters_of", fewer)

    return bug


def skipped_steps_are_made(patch: Patch, job: Job) -> None:
    """(g) What a GradScaler skips is replayed."""
    patch.setattr(Step, "is_skipped", False)


def gradients_before_they_are_clipped(patch: Patch, job: Job) -> None:
    """(g) The clip coefficient is not known to the replay."""

    def copied(this: Link, sources: Any, priority: int) -> TensorCopy:
        return original(this, [3 * one for one in sources] if priority == GRADIENTS else sources, priority)

    original = Link.copy
    patch.setattr(Link, "copy", copied)


def a_part_is_copied_late(patch: Patch, job: Job) -> None:
    """The update does not wait for the copy of what it writes over (W1)."""
    patch.setattr(TensorCopy, "next_chunk", slow(TensorCopy.next_chunk))
    hooks: list[Any] = []

    def register(this: torch.optim.Optimizer, hook: Any) -> Any:
        hooks.append(hook)
        return original(this, (lambda *_: None) if len(hooks) == 1 else hook)

    original = torch.optim.Optimizer.register_step_pre_hook
    patch.setattr(torch.optim.Optimizer, "register_step_pre_hook", register)


def slow(original: Callable[[TensorCopy, float], Any]) -> Callable[[TensorCopy, float], Any]:
    def next_chunk(this: TensorCopy, _: float) -> Any:
        time.sleep(0.02)
        return original(this, 1)  # a tensor

    return next_chunk


FUSED = {"fused": True}
BUGS: dict[str, tuple[Bug, dict[str, Any]]] = {
    "(a) the rest is taken when it is written": (taken_when_it_is_written, {}),
    "(b) replayed in another layout": (replayed_in_another_layout, FUSED),
    "(c) gradients are cast": (gradients_in_half_precision, {}),
    "(d) replayed out of order": (replayed_out_of_order, {}),
    "(g) amsgrad": (without("amsgrad"), {"amsgrad": True}),
    "(g) skipped steps": (skipped_steps_are_made, FUSED | {"scaled": True}),
    "(g) the clip coefficient": (gradients_before_they_are_clipped, {}),
    "a step is left out": (one_step_left_out, {}),
    "stale hyperparameters": (hyperparameters_of_the_first_step, {}),
    "a part is copied late": (a_part_is_copied_late, {}),
}


def job_of(options: dict[str, Any]) -> Job:
    job = Job(**{name: value for name, value in options.items() if name != "scaled"})
    if "scaled" in options:
        job.scaler = torch.amp.GradScaler("cpu")
    return job


def fault_found(job: Job, uri: Path) -> str:
    """Save over several steps. Returns what is wrong with that, in words; '' when all is well."""
    with tierckpt.Checkpointer(uri, every_step=tierckpt.EveryStep(window_steps=WINDOW)) as checkpointer:
        kept, saved = {}, None
        while saved is None or not saved.done():
            job.train()
            kept[job.step] = job.values()
            checkpointer.step(job.step, job.state)
            if job.step == BEGUN:
                saved = checkpointer.save(job.step, job.state)
        saved.result()
    (record,) = checkpointer.stats
    if record.fallback:
        return record.fallback
    assert record.window_steps == WINDOW and record.step == BEGUN + WINDOW - 1
    again = Job(type(job.optimizer), **{n: v for n, v in job.optimizer.defaults.items() if n in ("amsgrad", "fused")})
    restored(uri, again, record.step)
    try:
        check_same(again.values(), kept[record.step])
    except AssertionError as error:
        return f"another state: {error}"
    return ""


@pytest.mark.parametrize("name", BUGS)
def test_each_bug_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug, options = BUGS[name]
    job = job_of(options)
    with monkeypatch.context() as patch:
        bug(patch, job)
        assert fault_found(job, tmp_path / "run")


@pytest.mark.parametrize("name", ["(a) the rest is taken when it is written", "(g) amsgrad", "(g) skipped steps"])
def test_nothing_is_found_where_there_is_no_bug(name: str, tmp_path: Path) -> None:
    assert not fault_found(job_of(BUGS[name][1]), tmp_path / "run")


def test_without_the_fingerprint_a_mixed_version_would_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded: the comparison with the state of the step must be able to fail, too."""
    monkeypatch.setattr(Fingerprint, "matches", lambda *_: True)
    job = Job()
    one_step_left_out(monkeypatch, job)
    assert "another state" in fault_found(job, tmp_path / "run")


@pytest.mark.parametrize("is_broken", [False, True], ids=["as it is", "(f) host waits in every step"])
def test_no_call_waits_for_the_copy_that_it_begins(is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[TensorCopy] = []

    def copied(this: Link, sources: Any, priority: int) -> TensorCopy:
        begun.append(original(this, sources, priority))
        if is_broken:
            begun[-1].done.result(60)
        return begun[-1]

    original = Link.copy
    monkeypatch.setattr(Link, "copy", copied)
    job = Job()
    job.train()
    with (
        contextlib.closing(Link(bytes_per_second=1e5 if is_broken else 1e3)) as slow_link,
        multi_step.MultiStepStager(job.optimizer, 2, link=slow_link) as stager,
    ):
        stager.begin(job.optimizer.state_dict)
        assert begun[0].done.done() == is_broken


@pytest.mark.parametrize("is_broken", [False, True], ids=["as it is", "(e) memory is mapped anew for each window"])
def test_windows_in_the_steady_state_map_no_memory(is_broken: bool, tmp_path: Path, monkeypatch: Patch) -> None:
    maps, tensors = [0], link.PinnedMemory.tensors
    allocate = Memory.allocate

    def counting(*given: Any, **options: Any) -> Memory:
        maps[0] += 1
        return allocate(*given, **options)

    monkeypatch.setattr(Memory, "allocate", counting)
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


class HungLink:
    """No chunk is copied from when ``moves`` is cleared until it is set again."""

    def __init__(self, patch: Patch) -> None:
        self.moves = threading.Event()
        self.moves.set()
        original = TensorCopy.next_chunk

        def next_chunk(this: TensorCopy, chunk_bytes: float) -> Any:
            self.moves.wait(60)
            return original(this, chunk_bytes)

        patch.setattr(TensorCopy, "next_chunk", next_chunk)


WAITS = {"save on a window that is copied": WINDOW, "the step that writes over a part": 2}


@pytest.mark.parametrize("bug", [False, True], ids=["as it is", "the wait that was"])
@pytest.mark.parametrize("where", WAITS)
def test_nothing_waits_for_a_link_that_hangs(where: str, bug: bool, tmp_path: Path, monkeypatch: Patch) -> None:
    """Half a second at most; then the state is copied whole, and the record says why."""
    job, held = Job(), HungLink(monkeypatch)
    if bug:
        monkeypatch.setattr(poll, "LOOK_SECONDS", 600.0)
    with tierckpt.Checkpointer(tmp_path / "run", every_step=tierckpt.EveryStep(window_steps=WINDOW)) as checkpointer:
        job.train()
        checkpointer.save(job.step, job.state)
        for _ in range(WAITS[where] - 2):
            job.train()
            checkpointer.step(job.step, job.state)
        job.train()
        held.moves.clear()
        checkpointer.step(job.step, job.state)  # begins to copy a part
        found = pytest.raises(TooLongError) if bug else contextlib.nullcontext()
        with found, counted(SEEDED_SECONDS if bug else ANSWER_SECONDS):
            if WAITS[where] < WINDOW:
                job.train()
                checkpointer.step(job.step, job.state)
            else:
                checkpointer.save(job.step, job.state)
        held.moves.set()
        while not (bug or checkpointer.stats):
            job.train()
            checkpointer.step(job.step, job.state)
        step, kept = job.step, job.values()
    if not bug:
        assert checkpointer.stats[0].fallback == multi_step.COPY_HANGS and checkpointer.stats[0].step == step
        again = Job()
        assert restored(tmp_path / "run", again) == step
        check_same(again.values(), kept)
