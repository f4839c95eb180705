"""A redo log is folded into the state after its last step, bit for bit, or rejected."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.replay.test_apply import IMPLEMENTATIONS, KINDS, matrix
from tests.unit.replay.test_multi_step import SECONDS, Job, changes, check
from tierckpt.errors import IntegrityError, StateMismatchError, TierckptError
from tierckpt.replay import apply, redo
from tierckpt.replay.multi_step import MultiStepStager
from tierckpt.replay.redo import Conditions, Redo, Snapshot, gradient_names, pack, tolerance, unpack
from tierckpt.replay.tree import fill

OTHER = Conditions("torch 0.0", "another device", "foreach")


def window_of(job: Job | None = None, steps: int = 4, begun: int = 1) -> tuple[Snapshot, Any]:
    """A redo log of a window after ``begun`` steps, and the state after its last step."""
    job = job or Job()
    for _ in range(begun):
        job.train()
    with MultiStepStager(job.optimizer, window_steps=steps, defers=True) as stager:
        pending = stager.begin(job.state)
        for _ in range(steps - 1):
            job.train()
            stager.end_of_step()
        wanted = copy.deepcopy(job.state())
        job.train()
        return pending.result(SECONDS), wanted


def kept(snapshot: Snapshot) -> Redo:
    assert snapshot.redo is not None and snapshot.state is None
    return snapshot.redo


def stored(found: Redo) -> tuple[dict[str, torch.Tensor], Any]:
    tensors, recipe = pack(found, {key: f"tensors.{key}" for key, name in found.tensors if not name})
    return {name: one.clone() for name, one in tensors.items()}, json.loads(json.dumps(recipe))


def folded(snapshot: Snapshot, found: Redo) -> Any:
    return fill(snapshot.tree, found.tensors)


@pytest.mark.parametrize(("kind", "implementation", "begun"), matrix())
def test_every_optimizer_comes_back_from_its_parts(kind: str, implementation: str, begun: int) -> None:
    snapshot, wanted = window_of(Job(KINDS[kind], **IMPLEMENTATIONS[implementation]), begun=begun)
    again = unpack(*stored(kept(snapshot)))
    assert again.fold() == ""
    check(folded(snapshot, again), wanted)


def test_parts_are_of_several_versions_until_they_are_folded() -> None:
    snapshot, wanted = window_of()
    found = kept(snapshot)
    assert [part.version for part in found.parts] == [0, 1, 2, 3] and found.version == found.replay_steps == 3
    with pytest.raises(AssertionError):
        check(fill(snapshot.tree, found.tensors), wanted)
    gradients = sum(len(step.gradients) for step in found.steps)
    assert gradients == sum(len(part.parameters) * (3 - part.version) for part in found.parts)


def test_a_loop_of_its_own_folds_a_window_where_it_stands() -> None:
    snapshot, wanted = window_of()
    whole = snapshot.fold()
    assert whole.redo is None and whole.steps == snapshot.steps and not whole.inexact
    check(whole.state, wanted)
    assert whole.fold() is whole


Recipe = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def bugs() -> dict[str, Callable[[Tensors, Recipe], None]]:
    def stale(tensors: Tensors, recipe: Recipe) -> None:
        recipe["steps"][2]["hyperparameters"] = recipe["steps"][1]["hyperparameters"]

    def missing(tensors: Tensors, recipe: Recipe) -> None:
        del recipe["steps"][1]

    def missing_last(tensors: Tensors, recipe: Recipe) -> None:
        del recipe["steps"][-1]

    def twice(tensors: Tensors, recipe: Recipe) -> None:
        recipe["steps"].insert(1, recipe["steps"][1])

    def order(tensors: Tensors, recipe: Recipe) -> None:
        recipe["steps"].reverse()

    def implementation(tensors: Tensors, recipe: Recipe) -> None:
        for step in recipe["steps"]:
            for group in step["hyperparameters"]:
                group |= {"fused": True, "foreach": False}

    def version(tensors: Tensors, recipe: Recipe) -> None:
        recipe["parts"][0][0] += 1

    def gradient(tensors: Tensors, recipe: Recipe) -> None:
        name = gradient_names(recipe["steps"][1], recipe["names"])[0]
        tensors[name].view(-1).view(torch.uint8)[0] ^= 1

    def other_gradient(tensors: Tensors, recipe: Recipe) -> None:
        named = gradient_names(recipe["steps"][1], recipe["names"])
        first, second = [name for name in named if tensors[name].numel() == 169][:2]
        tensors[first], tensors[second] = tensors[second], tensors[first]

    def no_gradient(tensors: Tensors, recipe: Recipe) -> None:
        recipe["steps"][1]["gradients"].pop()

    def part(tensors: Tensors, recipe: Recipe) -> None:
        tensors[recipe["tensors"][0][2]].view(-1).view(torch.uint8)[0] ^= 1

    def moment(tensors: Tensors, recipe: Recipe) -> None:
        name = next(stored for _, name, stored, _ in recipe["tensors"] if name == "exp_avg")
        tensors[name].view(-1).view(torch.uint8)[2] ^= 1

    def skipped(tensors: Tensors, recipe: Recipe) -> None:
        recipe["steps"][1]["skipped"] = True

    def fingerprint(tensors: Tensors, recipe: Recipe) -> None:
        recipe["fingerprints"][0][2] = "1"

    def no_tensor(tensors: Tensors, recipe: Recipe) -> None:
        tensors.popitem()

    def newer(tensors: Tensors, recipe: Recipe) -> None:
        recipe["format"] = 99

    def other_optimizer(tensors: Tensors, recipe: Recipe) -> None:
        recipe["optimizer"] = "Adadelta"

    return dict(locals())


@pytest.mark.parametrize("bug", bugs())
def test_a_window_that_is_another_than_the_one_that_was_copied_is_refused(bug: str) -> None:
    snapshot, _ = window_of()
    tensors, recipe = stored(kept(snapshot))
    bugs()[bug](tensors, recipe)
    with pytest.raises(IntegrityError):
        unpack(tensors, recipe).fold()
    with pytest.raises(IntegrityError):
        unpack(tensors, recipe).fold("approximate")


def flipped(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """A device whose replay differs from training by ``bits`` ulps in one element."""
    real = apply.Replay.apply

    def of_another_device(self: Any, step: Any) -> None:
        real(self, step)
        for tensor in self.parameters.values():
            tensor.view(-1)[:1].view(torch.int32).add_(bits)

    monkeypatch.setattr(apply.Replay, "apply", of_another_device)


def test_one_bit_of_a_replay_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, _ = window_of()
    tensors, recipe = stored(kept(snapshot))
    flipped(monkeypatch, 1)
    with pytest.raises(IntegrityError, match="has other bits than in training, with the same build"):
        unpack(tensors, recipe).fold()


def test_another_device_is_said_and_taken_only_within_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, _ = window_of()
    found = kept(snapshot)
    found.conditions = OTHER
    tensors, recipe = stored(found)
    assert unpack(*copy.deepcopy((tensors, recipe))).fold() == ""  # the same bits, so no difference is reported
    flipped(monkeypatch, 1)
    with pytest.raises(StateMismatchError, match="another device in training"):
        unpack(*copy.deepcopy((tensors, recipe))).fold()
    again = unpack(*copy.deepcopy((tensors, recipe)))
    assert "device another device in training" in again.fold("approximate")
    flipped(monkeypatch, 1 << 12)
    with pytest.raises(StateMismatchError):
        unpack(tensors, recipe).fold("approximate")


def test_a_rounding_of_another_implementation_is_within_the_tolerance() -> None:
    """The CPU's fused AdamW and its for-loop round differently, like two devices."""
    snapshot, _ = window_of(Job(fused=True), 7)
    found = kept(snapshot)
    found.conditions = OTHER
    tensors, recipe = stored(found)
    for step in recipe["steps"]:
        for group in step["hyperparameters"]:
            group |= {"fused": None, "foreach": False}
    with pytest.raises(StateMismatchError):
        unpack(*copy.deepcopy((tensors, recipe))).fold()
    assert unpack(tensors, recipe).fold("approximate")


def test_the_tolerance_is_that_of_the_contract() -> None:
    value = torch.tensor([1.0, 0.0, -2.0])
    unit = 2.0**-24
    assert tolerance("", value, 3, 1e-3, 0.5).tolist() == [24 * unit, 24 * unit * 1e-3, 48 * unit]
    assert tolerance("exp_avg_sq", value, 3, 1e-3, 0.5).tolist() == [12 * unit, 0.0, 24 * unit]
    assert tolerance("step", value, 3, 1e-3, 0.5).tolist() == [0.0, 0.0, 0.0]
    assert tolerance("seen", torch.tensor([3]), 3, 1e-3, 0.5).tolist() == [0.0]
    assert tolerance("exp_avg", value, 3, 1e-3, 0.5).tolist() == [16 * unit + 6 * unit] * 3


def changed(change: Callable[[Job], object]) -> Snapshot:
    """A redo log with ``change`` made in its second step."""
    job = Job()
    job.train()
    with MultiStepStager(job.optimizer, window_steps=4, defers=True) as stager:
        pending = stager.begin(job.state)
        for number in range(6):
            job.train()
            if number == 1:
                change(job)
            stager.end_of_step()
        return pending.result(SECONDS)


@pytest.mark.parametrize("reason", changes())
def test_what_breaks_a_window_breaks_one_that_is_kept(reason: str) -> None:
    """An edit that version counters do not show (``.data``) is detected by ``fold``."""
    with pytest.raises(TierckptError, match=reason):
        kept(changed(changes()[reason])).fold()


def test_a_learning_rate_that_is_a_tensor() -> None:
    snapshot, wanted = window_of(Job(lr=torch.tensor(1e-3)))
    again = unpack(*stored(kept(snapshot)))
    assert again.fold() == ""
    check(folded(snapshot, again)["model"], wanted["model"])


def test_a_recipe_that_is_nothing_is_refused() -> None:
    for nothing in ({}, {"format": redo.FORMAT}, {"format": redo.FORMAT, "optimizer": "LBFGS"}):
        with pytest.raises(TierckptError):
            unpack({}, nothing)
