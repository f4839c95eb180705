"""TierSavePlanner: cached plans equal those of DCP, with real ranks, any writer, and changing structures."""

from __future__ import annotations

import functools
import gc
import pickle
import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import tierckpt
from tests.compat.scenarios import local_parts
from tests.compat.worker import launch
from tests.states import same, zeros_like
from tests.unit.dcp.test_split import as_rank
from tierckpt.dcp import planner as planner_module
from tierckpt.dcp.planner import TierSavePlanner
from tierckpt.errors import CheckpointError

HERE = "tests.unit.dcp.test_planner"
WAIT_SECONDS = 60

State = dict[str, Any]


@pytest.fixture(autouse=True)
def memory_of_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Start with empty caches. Call it to switch to the caches of another simulated rank."""
    memories = [planner_module.PlanCache() for _ in range(8)]

    def act_as(rank: int) -> None:
        monkeypatch.setattr(planner_module, "cache", memories[rank])

    act_as(0)
    return act_as


# --- one rank ------------------------------------------------------------------------------------------------------


def plan(planner: SavePlanner, state: State) -> tuple[SavePlan, Metadata, bool]:
    """Plan as one rank: the final plan, the metadata, and whether the local plan was built in full."""
    planner.set_up_planner(state, None, True)
    local = pickle.loads(pickle.dumps(planner.create_local_plan()))
    plans, metadata = planner.create_global_plan([local])
    return planner.finish_plan(pickle.loads(pickle.dumps(plans[0]))), metadata, local.usable


def is_as_stock(planner: SavePlanner, state: State) -> bool:
    """Plan ``state`` here and by DCP without any cache: the plans must be equal. Return whether it was in full."""
    ours, metadata, full = plan(planner, state)
    stock, stock_metadata, _ = plan(DefaultSavePlanner(), state)
    assert ours == stock
    assert metadata == stock_metadata
    theirs = DefaultSavePlanner()
    theirs.set_up_planner(state, None, True)
    for mine, item in zip(ours.items, stock.items, strict=True):
        assert mine.index.index == item.index.index  # not compared by ==
        if item.tensor_data is not None:
            assert planner.resolve_data(item) is theirs.resolve_data(item)  # type: ignore[attr-defined]
    return full


def base() -> State:
    return {
        "model": {"weight": torch.rand(4, 3), "bias": torch.rand(3), "norm": {"scale": torch.rand(3)}},
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0), "average": torch.rand(4, 3)}, 1: {"step": torch.tensor(2.0)}},
            "param_groups": [{"lr": 0.1, "params": [0, 1]}],
        },
        "history": [torch.rand(2), {"loss": 0.5}, 3],
        "numbers": [1, 2, 3],
        "step": 7,
        "nothing": {},
    }


def change(path: str, value: Any) -> Callable[[State], State]:
    *parents, last = path.split(".")

    def apply(state: State) -> State:
        target: Any = state
        for parent in parents:
            target = target[int(parent) if parent.isdigit() else parent]
        target[int(last) if last.isdigit() else last] = value() if callable(value) else value
        return state

    return apply


class Name(StrEnum):
    MODEL = "model"


STRUCTURES: dict[str, Callable[[State], State]] = {
    "dtype": change("model.weight", lambda: torch.rand(4, 3).to(torch.bfloat16)),
    "shape": change("model.weight", lambda: torch.rand(3, 4)),
    "requires grad": change("model.weight", lambda: torch.rand(4, 3, requires_grad=True)),
    "parameter": change("model.weight", lambda: nn.Parameter(torch.rand(4, 3))),
    "sparse": change("model.weight", lambda: torch.rand(4, 3).to_sparse()),
    "0-dim": change("model.weight", lambda: torch.tensor(1.0)),
    "another tensor": change("model.other", lambda: torch.rand(2)),
    "another object": change("other", 3),
    "another empty container": change("other", dict),
    "a tensor where an object was": change("step", lambda: torch.tensor(7)),
    "an object where a tensor was": change("model.weight", 3),
    "a container where an object was": change("step", lambda: {"a": 1}),
    "a container where a tensor was": change("model.weight", lambda: {"a": torch.rand(1)}),
    "an object where a container was": change("optimizer.state", None),
    "a tensor in a list of numbers": change("numbers.1", lambda: torch.rand(1)),
    "a container in a list of numbers": change("numbers.1", dict),
    "a list that grows": change("history", lambda: [torch.rand(2), {"loss": 0.5}, 3, 4]),
    "a list without its tensors": change("history", lambda: [1, 2, 3]),
    "a tuple of tensors": change("history", lambda: (torch.rand(2), torch.rand(2))),
    "an ordered mapping": change("model", lambda: OrderedDict(weight=torch.rand(4, 3), bias=torch.rand(3))),
    "another name": change("model", lambda: {"weight": torch.rand(4, 3), "prejudice": torch.rand(3)}),
    "another order": lambda state: state | {"model": dict(reversed(state["model"].items()))},
    "keys that are equal and not the same": change("optimizer.state", lambda: {False: {"step": 1}, True: {"step": 2}}),
    "a name that is equal and not the same": lambda state: {Name(k) if k == "model" else k: state[k] for k in state},
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_changed_structures_are_planned_in_full(name: str) -> None:
    planner = TierSavePlanner()
    assert is_as_stock(planner, base())
    assert is_as_stock(planner, STRUCTURES[name](base()))
    assert not is_as_stock(planner, base())


OBJECTS: dict[str, Callable[[State], State]] = {
    "number": change("step", 8),
    "text where a number was": change("step", "eight"),
    "an object of any class": change("step", Path("/tmp")),
    "a list of other length": change("numbers", [4, 5, 6, 7]),
    "a list where a number was": change("step", [1, [2, 3]]),
    "a tuple of tensors where a number was": change("step", lambda: (torch.rand(1),)),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_resolved_from_the_current_save(name: str) -> None:
    planner = TierSavePlanner()
    assert is_as_stock(planner, base())
    state = OBJECTS[name](base())
    assert not is_as_stock(planner, state)
    for item in planner.plan.items:
        if item.tensor_data is None and item.index.fqn in state:
            data = planner.resolve_data(item)
            data.seek(0)
            assert same(torch.load(data, weights_only=False), state[item.index.fqn])


def test_plans_equal_those_of_dcp_after_random_changes() -> None:
    """Random walks among structures with small differences."""
    generator = random.Random(7)
    planner = TierSavePlanner()
    full = 0
    for _ in range(150):
        state = base()
        for name in generator.sample(sorted(STRUCTURES), generator.choice([0, 0, 1, 2])):
            try:
                state = STRUCTURES[name](state)
            except (KeyError, TypeError, AttributeError):
                continue  # two changes of the same place
        full += is_as_stock(planner if generator.random() < 0.5 else TierSavePlanner(), state)
    assert 20 < full < 140


def test_alternating_structures_are_cached_up_to_a_limit() -> None:
    structures = [{"t": torch.rand(size)} for size in range(1, 6)]
    planner = TierSavePlanner()
    for state in structures[:4]:
        assert is_as_stock(planner, state)
    assert not any(is_as_stock(planner, state) for state in structures[:4] * 3)
    assert is_as_stock(planner, structures[4])  # evicts the least recently used plan
    assert not is_as_stock(planner, structures[3])
    assert is_as_stock(planner, structures[0])


def test_different_planner_classes_share_no_cache() -> None:
    class Renaming(TierSavePlanner):
        def set_up_planner(self, state_dict: State, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            super().set_up_planner({f"my.{key}": value for key, value in state_dict.items()}, None, is_coordinator)

    state = {"t": torch.rand(2)}
    assert is_as_stock(TierSavePlanner(), state)
    for planner in (Renaming(), Renaming()):
        final, _, _ = plan(planner, state)
        assert [item.index.fqn for item in final.items] == ["my.t"]
    assert plan(TierSavePlanner(cache_key="other"), state)[2]
    assert plan(TierSavePlanner(dedup_save_to_lowest_rank=True), state)[2]
    assert not plan(TierSavePlanner(), state)[2]


@pytest.mark.parametrize("option", ["flatten_state_dict", "flatten_sharded_tensors", "enable_plan_caching"])
def test_options_that_disable_the_cache(option: str) -> None:
    options = {option: False}
    state = {"t": torch.rand(2), "note": 3}
    for _ in range(3):
        ours, metadata, full = plan(TierSavePlanner(**options), state)
        stock = DefaultSavePlanner(**({} if option == "enable_plan_caching" else options))
        assert (ours, metadata) == plan(stock, state)[:2]
        assert full


def test_objects_that_create_write_items_are_called_for_each_plan() -> None:
    class Thing:
        def __init__(self, name: str) -> None:
            self.name = name

        def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
            planner = DefaultSavePlanner()
            planner.set_up_planner({f"{fqn}.{self.name}": torch.rand(2)}, None, True)
            return planner.create_local_plan().items

    planner = TierSavePlanner()
    for name in ("a", "b"):
        final, _, full = plan(planner, {"thing": Thing(name), "t": torch.rand(2)})
        assert full
        assert [item.index.fqn for item in final.items] == [f"thing.{name}", "t"]


def test_metadata_changes_by_a_writer_do_not_reach_the_next_save() -> None:
    planner = TierSavePlanner()
    for step in range(3):
        _, metadata, _ = plan(planner, base())
        assert metadata.storage_data is None
        assert metadata.version is None
        assert metadata.state_dict_metadata.keys() >= {"model.weight", "step"}
        metadata.storage_data, metadata.version = step, "x"
        metadata.state_dict_metadata.clear()


def test_the_cache_keeps_no_tensor_or_object_alive() -> None:
    class Thing: ...

    planner = TierSavePlanner()
    for _ in range(2):
        state = base() | {"thing": Thing()}
        plan(planner, state)
    alive = [weakref.ref(value) for value in (state["model"]["weight"], state["history"][0], state["thing"])]
    del state, planner
    gc.collect()
    assert [reference() for reference in alive] == [None, None, None]


def test_a_planner_pickles_without_the_state_of_a_save() -> None:
    planner = TierSavePlanner(dedup_save_to_lowest_rank=True, cache_key=("a", 1))
    plan(planner, {"t": torch.rand(100_000)})
    data = pickle.dumps(planner)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert is_as_stock(again, base())
    assert again.dedup_save_to_lowest_rank


@pytest.mark.slow
def test_a_cached_plan_costs_less_than_a_tenth() -> None:
    count = 10_000
    state = {
        "model": {f"layer.{i}.weight": torch.empty(4, 3) for i in range(count)},
        "optimizer": {i: {"average": torch.empty(4, 3), "step": torch.tensor(1.0)} for i in range(count)},
        "step": 1,
    }

    def calls() -> int:
        """The number of function calls in one plan (tierckpt, torch and Python): independent of the machine."""
        planner, made = TierSavePlanner(), 0

        def count_it(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event in {"call", "c_call"}

        sys.setprofile(count_it)
        try:
            planner.set_up_planner(state, None, True)
            plans, _ = planner.create_global_plan([planner.create_local_plan()])
            final = planner.finish_plan(plans[0])
        finally:
            sys.setprofile(None)
        assert len(final.items) == 3 * count + 1
        return made

    first = calls()
    assert calls() < first / 10


# --- sharded tensors and several simulated ranks -------------------------------------------------------------------


class Ranks:
    """Several simulated ranks, each with its own planner and caches."""

    def __init__(self, count: int, act_as: Callable[[int], None]) -> None:
        self.act_as = act_as
        self.planners = [TierSavePlanner() for _ in range(count)]

    def is_as_stock(self, state_of: Callable[[int], State]) -> list[bool]:
        """Plan one save here and by DCP: the plans must be equal. Return which ranks planned in full."""
        *ours, full = self._plan(self.planners, state_of)
        *stock, _ = self._plan([DefaultSavePlanner() for _ in self.planners], state_of)
        assert ours == stock
        return full

    def _plan(
        self, planners: Sequence[SavePlanner], state_of: Callable[[int], State]
    ) -> tuple[list[SavePlan], Metadata, list[bool]]:
        locals_ = []
        for rank, planner in enumerate(planners):
            self.act_as(rank)
            with as_rank(rank, len(planners)):
                planner.set_up_planner(state_of(rank), None, rank == 0)
                locals_.append(pickle.loads(pickle.dumps(planner.create_local_plan())))
        self.act_as(0)
        plans, metadata = planners[0].create_global_plan(locals_)
        finals = []
        for rank, (planner, ours) in enumerate(zip(planners, plans, strict=True)):
            self.act_as(rank)
            finals.append(planner.finish_plan(pickle.loads(pickle.dumps(ours))))
        return finals, metadata, [local.usable for local in locals_]


def sharded_state(shape: tuple[int, int], placements: list[Placement], mesh_shape: tuple[int, ...], _: int) -> State:
    mesh = init_device_mesh("cpu", mesh_shape)
    local = torch.rand(shape)
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = local.tensor_split(mesh.size(dim), placement.dim)[mesh.get_local_rank(dim)]
    sizes = {"shape": torch.Size(shape), "stride": (shape[1], 1)}
    return {"t": DTensor.from_local(local, mesh, placements, run_check=False, **sizes), "note": torch.rand(3)}


def test_plans_of_sharded_tensors_equal_those_of_dcp(memory_of_rank: Callable[[int], None]) -> None:
    ranks = Ranks(4, memory_of_rank)
    layouts: list[tuple[list[Placement], tuple[int, ...]]] = [
        ([Shard(0)], (4,)),
        ([Shard(1)], (4,)),
        ([Replicate()], (4,)),
        ([Replicate(), Shard(0)], (2, 2)),
        ([Shard(0), Replicate()], (2, 2)),
        ([Shard(0), Shard(1)], (2, 2)),
    ]
    for placements, mesh_shape in layouts:
        state_of = functools.partial(sharded_state, (8, 4), placements, mesh_shape)
        assert ranks.is_as_stock(state_of) == [True] * 4, (placements, mesh_shape)
        assert ranks.is_as_stock(state_of) == [False] * 4, (placements, mesh_shape)


def test_only_changed_ranks_plan_in_full(memory_of_rank: Callable[[int], None]) -> None:
    ranks = Ranks(3, memory_of_rank)

    def full(*sizes: int) -> list[bool]:
        return ranks.is_as_stock(lambda rank: {"both": torch.rand(8, 8), f"own {rank}": torch.rand(sizes[rank])})

    assert full(1, 1, 1) == [True, True, True]
    assert full(1, 1, 1) == [False, False, False]
    assert full(1, 500, 1) == [False, True, False]
    assert full(1, 500, 1) == [False, False, False]
    assert full(9, 1, 1) == [True, False, False]  # rank 1 has it cached; the coordinator merges its own cached plan
    assert full(9, 1, 1) == [False, False, False]
    assert full(1, 1, 1) == [False, False, False]
    assert full(1, 1, 2) == [False, False, True]


def test_a_changing_rank_does_not_invalidate_the_caches_of_others(memory_of_rank: Callable[[int], None]) -> None:
    """The coordinator's cache is evicted; no rank may refer to it."""
    ranks = Ranks(2, memory_of_rank)
    seen = [
        ranks.is_as_stock(lambda rank, sizes=(turn, turn // 5 % 2): {f"own {rank}": torch.rand(sizes[rank])})  # type: ignore[misc]
        for turn in range(20)
    ]
    assert all(coordinator for coordinator, _ in seen)
    assert [turn for turn, (_, other) in enumerate(seen) if other] == [0, 5, 10, 15]


def test_the_save_after_one_with_an_unknown_plan_succeeds(memory_of_rank: Callable[[int], None]) -> None:
    state = base()
    planner = TierSavePlanner()
    plan(planner, state)
    planner.set_up_planner(state, None, True)
    ticket = planner.create_local_plan()
    memory_of_rank(1)  # a coordinator of another process group
    with pytest.raises(CheckpointError, match="does not have"):
        TierSavePlanner().create_global_plan([ticket])
    with pytest.raises(CheckpointError, match="does not have"):
        TierSavePlanner().create_global_plan([SavePlan([], usable=False)])
    memory_of_rank(0)
    assert is_as_stock(planner, state)


# --- real ranks, real files ----------------------------------------------------------------------------------------


class Watching(TierSavePlanner):
    """Counts the bytes that this rank exchanges with the coordinator."""

    sent_bytes = received_bytes = 0

    def create_local_plan(self) -> SavePlan:
        local = super().create_local_plan()
        self.sent_bytes = len(pickle.dumps(local))
        return local

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.received_bytes = len(pickle.dumps(new_plan))
        return super().finish_plan(new_plan)


def state_of_rank(step: int, dtype: torch.dtype, extra: bool) -> State:
    """Sharded, replicated (large enough to be split), per-rank and plain values; ``extra`` on rank 1 only."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.arange(33 * 5, dtype=torch.float32).reshape(33, 5) + step
    own: State = {"extra": torch.full((7,), float(step))} if extra and dist.get_rank() == 1 else {}
    return {
        "sharded": distribute_tensor(values.to(dtype), mesh, [Shard(0)]),
        "replicated": (torch.arange(6_000_001) + step).to(dtype).reshape(1, -1),
        "layers": {f"{i}": torch.full((i + 1, 2), step + i).to(dtype) for i in range(300)},
        "objects": {"step": step, "text": f"step {step}"},
        "own": {str(dist.get_rank()): torch.full((3,), dist.get_rank() + 100 * step)},
        **own,
    }


STEPS = [
    (torch.float32, False),
    (torch.float32, False),
    (torch.bfloat16, False),
    (torch.bfloat16, False),
    (torch.bfloat16, True),
    (torch.bfloat16, True),
    (torch.float32, False),
]


def saves(folder: str, kind: str, one_planner: bool) -> list[dict[str, Any]]:
    """Save each of STEPS and load it with stock FileSystemReader."""
    planner, outcome = Watching(), []
    for step, (dtype, extra) in enumerate(STEPS):
        planner = planner if one_planner else Watching()
        path, state = f"{folder}/step-{step}", state_of_rank(step, dtype, extra)
        outcome.append(save_and_compare(path, kind, planner, state))
    return outcome


def save_and_compare(path: str, kind: str, planner: Watching, state: State) -> dict[str, Any]:
    tier = kind == "tier"
    writer = tierckpt.TierStorageWriter(path) if tier else dcp.FileSystemWriter(path)
    dcp.save(state, storage_writer=writer, planner=planner)
    if tier:
        tierckpt.wait(path, tier="shared", timeout_seconds=WAIT_SECONDS)
    dist.barrier()
    target = zeros_like(state)
    dcp.load(target, storage_reader=dcp.FileSystemReader(path))
    metadata = dcp.FileSystemReader(path).read_metadata()
    entry = metadata.state_dict_metadata["replicated"]
    assert isinstance(entry, TensorStorageMetadata)
    facts = {
        "right": same(local_parts(target), local_parts(state)),
        "dtype": entry.properties.dtype == state["replicated"].dtype,
        "small": planner.sent_bytes < 1000 and planner.received_bytes < 1000,
        "chunks": len(entry.chunks),
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, facts)
    return {name: [one[name] for one in gathered] for name in facts}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("one_planner", [True, False], ids=["one planner", "a new one for each save"])
@pytest.mark.parametrize("kind", ["stock", "tier"])
def test_two_ranks_save_correctly_after_changes(kind: str, one_planner: bool, tmp_path: Path) -> None:
    rounds = launch(f"{HERE}:saves", 2, folder=str(tmp_path / "shared"), kind=kind, one_planner=one_planner)
    assert [step["right"] for step in rounds] == [[True, True]] * len(STEPS)
    assert [step["dtype"] for step in rounds] == [[True, True]] * len(STEPS)
    # Again, then back to an earlier structure: both ranks send only a reference. After a change both get plans.
    assert [step["small"] for step in rounds] == [
        [again] * 2 for again in (False, True, False, True, False, True, True)
    ]
    assert {count for step in rounds for count in step["chunks"]} == ({2} if kind == "tier" else {1})


def writers_in_turn(folder: str) -> list[dict[str, Any]]:
    planner = Watching()
    return [
        save_and_compare(f"{folder}/step-{step}", kind, planner, state_of_rank(step, torch.float32, False))
        for step, kind in enumerate(["stock", "tier", "tier", "stock", "stock", "tier"])
    ]


@pytest.mark.slow
@pytest.mark.distributed
def test_plans_are_not_reused_for_another_writer(tmp_path: Path) -> None:
    """TierStorageWriter splits replicated tensors into parts that the stock writer does not understand."""
    rounds = launch(f"{HERE}:writers_in_turn", 2, folder=str(tmp_path / "shared"))
    assert [step["right"] for step in rounds] == [[True, True]] * 6
    assert [step["small"][0] for step in rounds] == [False, False, True, False, True, False]


def failing_writer(path: str, phase: str) -> dcp.FileSystemWriter:
    """A writer that fails in the method ``phase``, on the coordinator or the last rank."""

    def fail(*_: Any) -> Any:
        raise OSError(f"failed in {phase}")

    writer = dcp.FileSystemWriter(path)
    if dist.get_rank() == (0 if phase == "prepare_global_plan" else 1):
        setattr(writer, phase, fail)
    return writer


def saves_after_failures(folder: str) -> list[dict[str, Any]]:
    """A save that fails in each phase, with a cached and with a new structure; then successful ones."""
    planner, rounds = Watching(), []
    for step, phase in enumerate(["prepare_local_plan", "prepare_global_plan", "write_data"] * 2):
        known = step >= 3
        if known:
            good = state_of_rank(step, torch.float64, False)
            rounds.append(save_and_compare(f"{folder}/step-{step}-before", "stock", planner, good))
        dtype = torch.float64 if known else (torch.float32, torch.bfloat16, torch.float16)[step]
        state = state_of_rank(step, dtype, True)
        try:
            dcp.save(state, storage_writer=failing_writer(f"{folder}/step-{step}-failed", phase), planner=planner)
            raise AssertionError("the save must fail")
        except dcp.CheckpointException as error:
            assert "failed in" in str(error), error
        for attempt in range(2):
            rounds.append(save_and_compare(f"{folder}/step-{step}-{attempt}", "stock", planner, state))
            assert rounds[-1]["small"][0] or attempt == 0, "the second good save must be a small one"
    return rounds


@pytest.mark.slow
@pytest.mark.distributed
def test_a_failure_in_any_phase_leaves_no_stale_cache(tmp_path: Path) -> None:
    rounds = launch(f"{HERE}:saves_after_failures", 2, folder=str(tmp_path / "shared"))
    assert all(step["right"] == [True, True] and step["dtype"] == [True, True] for step in rounds)
    assert len(rounds) == 15
