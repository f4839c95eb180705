"""A checkpoint that does not fit raises before any change; with ``strict=False`` the fitting part is loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import lr_scheduler

from tests.integration.state_compare import Job, about, frozen, places, same_state, state_of, states_of
from tests.integration.state_objects import Loader, Wrapper, job, mlp
from tests.integration.test_state_table import process_group
from tierckpt import Checkpointer, load_model, torch_internals
from tierckpt.errors import StateMismatchError, TierckptError

__all__ = ["process_group"]  # fixture


def save(uri: str, **state: Any) -> dict[str, Any]:
    with Checkpointer(uri) as checkpointer:
        checkpointer.save(1, state)
    return state


def restore(uri: str, state: dict[str, Any], **options: Any) -> Any:
    with Checkpointer(uri) as checkpointer:
        step = checkpointer.restore(state, **options)
    assert step == 1
    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(seed: int, **options: Any) -> Job:
    model = mlp(seed, **options)
    trained_job = job(model=model, optimizer=adamw(model))
    trained_job.step(0)
    return trained_job


@contextmanager
def unchanged(target: Job) -> Iterator[None]:
    was, flags, at = states_of(target), about(target), [id(tensor) for tensor in places(target)]
    keys, ran = list(target.state), []
    for value in target.state.values():
        if isinstance(value, torch.optim.Optimizer):
            value.register_step_pre_hook(lambda *_: ran.append("step"))
    yield
    assert list(target.state) == keys and ran == []
    same_state(was, states_of(target), "changed")
    same_state(flags, about(target), "changed")
    assert [id(tensor) for tensor in places(target)] == at


# --- strict, both ways ------------------------------------------------------------------------------------------------

NEW: dict[str, Callable[[], Any]] = {
    "a number": lambda: 7,
    "zero": lambda: 0,
    "a string": lambda: "x",
    "a dict": lambda: {"a": 1, "b": [2]},
    "an empty dict": dict,
    "a list": lambda: [1, torch.ones(2)],
    "a tensor": lambda: torch.full((3,), 7.0),
    "an object": lambda: Loader({"count": 7}),
    "an object without state": lambda: Loader({}),
    "a module": lambda: nn.Linear(2, 2),
    "an optimizer": lambda: adamw(nn.Linear(2, 2)),
    "a scheduler": lambda: lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), 5),
}


@pytest.mark.parametrize("name", NEW)
def test_new_entry_raises_or_keeps_its_value_without_strict(name: str, file_uri: str) -> None:
    save(file_uri, **trained(1).state, epoch=3)
    state = trained(2).state | {"epoch": 0, "new": NEW[name]()}
    before, value = frozen(state_of(state["new"])), state["new"]
    with unchanged(Job(state, lambda _: None)), pytest.raises(StateMismatchError, match="new"):
        restore(file_uri, state)
    step = restore(file_uri, state, strict=False)
    assert state["new"] is value and frozen(state_of(value)) == before
    assert state["epoch"] == 3
    assert any(key == "new" or key.startswith("new.") for key in step.missing_keys) or before == ("dict", [])
    assert not step.unexpected_keys


@pytest.mark.parametrize("strict", [True, False])
def test_plain_dict_is_replaced_by_the_checkpoints(strict: bool, file_uri: str) -> None:
    """``state`` selects the entry, not its keys."""
    notes = {"a": 1, "deep": {"x": torch.ones(2), "z": (None,)}}
    save(file_uri, notes=copy.deepcopy(notes))
    options = {} if strict else {"strict": False}
    state = {"notes": {"a": 0, "b": 7, "deep": {"x": torch.zeros(2), "y": torch.full((2,), 7.0)}}}
    restore(file_uri, state, **options)
    assert frozen(state["notes"]) == frozen(notes)


@pytest.mark.parametrize("way", ["restore", "load_model"])
@pytest.mark.parametrize("layers", [2, 4])
def test_smaller_and_larger_model_without_strict(layers: int, way: str, file_uri: str) -> None:
    weights = save(file_uri, model=mlp(1, layers=3), epoch=3)["model"].state_dict()
    state = {"model": mlp(2, layers=layers), "epoch": 0}
    before = copy.deepcopy(state["model"].state_dict())

    def load(**options: Any) -> Any:
        if way == "restore":
            return restore(file_uri, state, **options)
        return load_model(file_uri, state["model"], **options)

    with unchanged(Job(state, lambda _: None)), pytest.raises(StateMismatchError, match=f"{min(layers, 3)}"):
        load()
    loaded = load(strict=False)
    found = state["model"].state_dict()
    for key, value in found.items():
        assert torch.equal(value, weights[key] if key in weights else before[key]), key
    assert {key.removeprefix("model.") for key in loaded.missing_keys} == found.keys() - weights.keys()
    assert {key.removeprefix("model.") for key in loaded.unexpected_keys} == weights.keys() - found.keys()
    assert set(loaded.skipped_keys) == {*loaded.missing_keys, *loaded.unexpected_keys}
    assert state["epoch"] == (3 if way == "restore" else 0)


def test_strict_false_skips_nothing_if_all_fits(file_uri: str) -> None:
    save(file_uri, **trained(1).state, notes={"a": (1, 2)})
    step = restore(file_uri, trained(2).state | {"notes": {"a": None}}, strict=False)
    assert (step.missing_keys, step.unexpected_keys, step.skipped_keys) == ([], [], [])


@pytest.mark.parametrize("strict", [True, False])
def test_tensor_of_another_shape_raises_with_and_without_strict(strict: bool, file_uri: str) -> None:
    save(file_uri, model=mlp(1))
    target = Job({"model": mlp(2, width=8)}, lambda _: None)
    with unchanged(target), pytest.raises(StateMismatchError, match=r"model\.0\.weight"):
        restore(file_uri, target.state, strict=strict)


# --- an object that raises --------------------------------------------------------------------------------------------


class Refuses(Loader):
    """Loads part of its state, then raises."""

    def load_state_dict(self, state: Any) -> None:
        raise RuntimeError("no such shard")


class Strange(nn.Linear):
    """Raises after its parameters are loaded."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_load_state_dict_post_hook(self._raise)

    @staticmethod
    def _raise(*_: Any) -> None:
        raise RuntimeError("no such shard")


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("kind", ["object", "module", "optimizer"])
def test_object_that_raises_leaves_others_unchanged_or_named(kind: str, place: str, file_uri: str) -> None:
    def build(seed: int, is_restored: bool) -> dict[str, Any]:
        state = trained(seed).state | {"loader": Loader({"at": seed}), "epoch": seed}
        extra: Any = Loader({"x": seed})
        if is_restored and kind == "object":
            extra = Refuses({"x": seed})
        if kind == "module":
            extra = Strange() if is_restored else nn.Linear(4, 4)
        if kind == "optimizer":
            extra = adamw(state["model"])
            if is_restored:
                extra.register_load_state_dict_post_hook(Strange._raise)
        return {"extra": extra} | state if place == "first" else state | {"extra": extra}

    save(file_uri, **build(1, is_restored=False))
    state = build(2, is_restored=True)
    before = states_of(Job(state, lambda _: None))
    with pytest.raises(TierckptError) as raised:
        restore(file_uri, state)
    assert "no such shard" in f"{raised.value} {raised.value.__cause__}"
    now = states_of(Job(state, lambda _: None))
    changed = [name for name in state if now[name] != before[name]]
    assert all(name in str(raised.value) for name in changed), (changed, raised.value)


# --- targets that cannot hold the data --------------------------------------------------------------------------------


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4))


def all_meta() -> nn.Module:
    with torch.device("meta"):
        return Normed()


def partly_meta() -> nn.Module:
    module = Normed()
    module[0] = nn.Linear(4, 4, device="meta")
    return module


@pytest.fixture(params=[False, True], ids=["no group", "process group"])
def group_or_none(request: pytest.FixtureRequest) -> None:
    if request.param:
        request.getfixturevalue("process_group")


@pytest.mark.usefixtures("group_or_none")
@pytest.mark.parametrize("way", ["restore", "with its optimizer", "load_model", "without strict"])
@pytest.mark.parametrize("make", [all_meta, partly_meta])
def test_a_module_on_meta_is_materialised_if_nothing_else_holds_its_parameters(
    make: Any, way: str, file_uri: str
) -> None:
    saved = Normed()
    saved(torch.randn(5, 4))
    save(file_uri, model=saved, **({"optimizer": adamw(saved)} if way == "with its optimizer" else {}))
    module = make()
    state: dict[str, Any] = {"model": module}
    if way == "with its optimizer":
        state["optimizer"] = adamw(module)
    is_refused = make is partly_meta or way == "with its optimizer"
    with pytest.raises(TierckptError, match="meta") if is_refused else nullcontext():
        if way == "load_model":
            load_model(file_uri, module)
        else:
            restore(file_uri, state, **({"strict": False} if way == "without strict" else {}))
    if is_refused:
        assert all(p.is_meta for p in module[0].parameters())
    else:
        assert frozen(saved.state_dict()) == frozen(module.state_dict())
        assert all(p.requires_grad and isinstance(p, nn.Parameter) for p in module.parameters())


def test_state_dict_of_an_optimizer_is_refused(file_uri: str) -> None:
    save(file_uri, **trained(1).state)
    with pytest.raises(TierckptError, match="pass the optimizer itself"):
        restore(file_uri, {name: value.state_dict() for name, value in trained(2).state.items()})


@pytest.mark.parametrize("saves", ["a module", "a state dict"])
@pytest.mark.parametrize("restores", ["a module", "a state dict"])
def test_module_and_state_dict_load_each_others_checkpoints(saves: str, restores: str, file_uri: str) -> None:
    """DCP users save and restore with ``model.state_dict()``."""
    saved, model = mlp(1), mlp(2)
    save(file_uri, model=saved if saves == "a module" else saved.state_dict(), epoch=3)
    state = {"model": model if restores == "a module" else model.state_dict(), "epoch": 0}  # is filled in place
    restore(file_uri, state)
    assert state["epoch"] == 3
    assert frozen(model.state_dict()) == frozen(saved.state_dict())


# --- load_model -------------------------------------------------------------------------------------------------------


def test_load_model_restores_extra_state_and_resized_buffers(file_uri: str) -> None:
    from tests.integration.state_modules import Extra, Queue

    def build() -> nn.Module:
        return nn.Sequential(Queue(), Extra("uint8 tensor"))

    saved, module = build(), build()
    for _ in range(3):
        saved(torch.randn(4, 4))
    save(file_uri, model=saved)
    load_model(file_uri, module)
    assert frozen(saved.state_dict()) == frozen(module.state_dict())


# --- refused at save --------------------------------------------------------------------------------------------------


def test_unconsolidated_zero_redundancy_optimizer_is_saved(process_group: None, file_uri: str) -> None:
    jobs = []
    for seed in (1, 2):
        model = mlp(seed)
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        jobs.append(job(model=model, optimizer=optimizer))
    jobs[0].step(0)
    save(file_uri, **jobs[0].state)
    restore(file_uri, jobs[1].state)
    for one in jobs:
        one.step(1)
    assert frozen(jobs[0].state["model"].state_dict()) == frozen(jobs[1].state["model"].state_dict())


def test_a_module_on_meta_is_refused_at_save(file_uri: str) -> None:
    with Checkpointer(file_uri) as checkpointer:
        with pytest.raises(TierckptError, match="meta"):
            checkpointer.save(1, {"model": partly_meta()})
        assert checkpointer.latest_step() is None


class WithHandle(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"hook": lambda: 0}


PLACES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an option of a group": lambda state: state["optimizer"].param_groups[0].update(hook=lambda: 0),
    "the state of a parameter": lambda state: next(iter(state["optimizer"].state.values())).update(hook=lambda: 0),
    "a value of an object": lambda state: state.update(loader=Loader({"hook": [lambda: 0]})),
    "extra state": lambda state: setattr(state["model"][0], "__class__", WithHandle),
    "a plain value": lambda state: state.update(notes={"hook": lambda: 0}),
}


@pytest.mark.parametrize("place", PLACES)
def test_unrestorable_value_is_refused_at_save_with_its_key(place: str, file_uri: str) -> None:
    state = trained(1).state
    PLACES[place](state)
    with Checkpointer(file_uri) as checkpointer:
        with pytest.raises(StateMismatchError, match=r"extra_state|hook"):
            checkpointer.save(1, state)
        assert checkpointer.latest_step() is None


# --- wrappers of optimizers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_in, restored_in", [(0, 1), (1, 0), (2, 1)])
def test_wrapped_and_bare_optimizer_share_checkpoints(saved_in: int, restored_in: int, file_uri: str) -> None:
    jobs = []
    for seed, depth in ((1, saved_in), (2, restored_in)):
        model = mlp(seed)
        optimizer = adamw(model)
        for _ in range(depth):
            optimizer = Wrapper(optimizer)
        jobs.append(job(model=model, optimizer=optimizer))
    for step in range(2):
        jobs[0].step(step)
    save(file_uri, **jobs[0].state)
    restore(file_uri, jobs[1].state)
    assert not getattr(jobs[1].state["optimizer"], "accelerate_step_called", False)
    for step in range(2, 4):
        same_state(states_of(jobs[0]), states_of(jobs[1]), f"before step {step}")
        for one in jobs:
            one.step(step)


@pytest.mark.parametrize("only", ["optimizer", "model"])
def test_only_one_entry_leaves_the_other_untouched(only: str, file_uri: str) -> None:
    saved, target = trained(1), trained(2)
    save(file_uri, **saved.state)
    other = {"model": "optimizer", "optimizer": "model"}[only]
    rest = Job({other: target.state[other]}, lambda _: None)
    with unchanged(rest):
        restore(file_uri, target.state, only=only)
    assert states_of(target)[only] == states_of(saved)[only]


def test_tied_weights_take_the_last_value(file_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``load_state_dict`` does; one call for all tensors copies in any order on a GPU."""

    def in_any_order(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in reversed([*zip(targets, sources, strict=True)]):
            target.copy_(source)

    monkeypatch.setattr(torch_internals, "foreach_copy", in_any_order)
    saved = nn.ModuleDict({name: nn.Linear(3, 3) for name in "abc"})
    tied, reference = (nn.ModuleDict({name: nn.Linear(3, 3) for name in "abc"}) for _ in range(2))
    for one in (tied, reference):
        one["c"].weight = one["a"].weight  # type: ignore[union-attr]
    save(file_uri, model=saved)
    restore(file_uri, {"model": tied})
    reference.load_state_dict(saved.state_dict())
    assert frozen(tied.state_dict()) == frozen(reference.state_dict())


def test_generator_in_module_state_is_restored(file_uri: str) -> None:
    class Sampler(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(seed)

        def get_extra_state(self) -> dict[str, Any]:
            return {"generator": self.generator}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.generator = state["generator"]

    saved, resumed = Sampler(1), Sampler(2)
    save(file_uri, model=saved)
    restore(file_uri, {"model": resumed})
    assert torch.equal(*(torch.rand(4, generator=one.generator, device="cpu") for one in (resumed, saved)))
