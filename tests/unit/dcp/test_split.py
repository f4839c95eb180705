"""Replicated tensors are written once, divided among all ranks: row assignment, and loads by stock readers.

This process simulates all ranks in turn (a process group of the ``fake`` backend gives each its coordinates in
the mesh); files are written by stock FileSystemWriter and read by stock FileSystemReader.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _validate_global_plan,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.states import same
from tierckpt.dcp.split import Part, PartItem, amend, balance_replicated, keep_items, resolve, spread_items
from tierckpt.errors import CheckpointError

KIB = 1024
MIB = 1024 * KIB

State = dict[str, Any]


# --- a save of several simulated ranks -----------------------------------------------------------------------------


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def planners_of(world_size: int, state_of: Callable[[int], State]) -> list[DefaultSavePlanner]:
    planners = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            planner = DefaultSavePlanner()
            planner.set_up_planner(state_of(rank), is_coordinator=rank == 0)
            planner.create_local_plan()
            planners.append(planner)
    return planners


def planned(planners: list[DefaultSavePlanner], part_bytes_min: int) -> tuple[list[SavePlan], Metadata]:
    """The coordinator's result for the local plans, which it receives pickled."""
    gathered = [pickle.loads(pickle.dumps(keep_items(planner.plan))) for planner in planners]
    plans, metadata = planners[0].create_global_plan(gathered)
    return balance_replicated(plans, part_bytes_min), metadata


def plan(world_size: int, state_of: Callable[[int], State], part_bytes_min: int = 1) -> list[SavePlan]:
    return planned(planners_of(world_size, state_of), part_bytes_min)[0]


class Resolving(SavePlanner):
    """The planner as seen by a writer that fetches tensors through ``resolve``."""

    def __init__(self, planner: DefaultSavePlanner) -> None:
        self.planner = planner

    def resolve_data(self, write_item: WriteItem) -> Any:
        return resolve(self.planner, write_item)

    set_up_planner = create_local_plan = create_global_plan = finish_plan = None  # type: ignore[assignment]


def save(folder: Path, world_size: int, state_of: Callable[[int], State], part_bytes_min: int = 1) -> Metadata:
    """Save as ``world_size`` ranks; return the content of ``.metadata``."""
    planners = planners_of(world_size, state_of)
    plans, metadata = planned(planners, part_bytes_min)
    folder.mkdir(exist_ok=True)
    writer = dcp.FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    results = []
    for planner, ours in zip(planners, writer.prepare_global_plan(plans), strict=True):
        ours = pickle.loads(pickle.dumps(ours))
        results.append(writer.write_data(ours, Resolving(planner)).wait())
    amend(metadata, parts_of(plans))
    writer.finish(metadata, results)
    return metadata


def parts_of(plans: list[SavePlan]) -> list[Part]:
    return [item.part for plan in plans for item in plan.items if isinstance(item, PartItem)]


def load(folder: Path, like: State) -> State:
    target = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in like.items()}
    dcp.load(target, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return target


def bytes_of(plan: SavePlan) -> int:
    datas = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(data.chunk.sizes.numel() * data.properties.dtype.itemsize for data in datas)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(dtype)


def problems(metadata: Metadata, world_size: int) -> list[str]:
    """Chunks out of bounds, overlaps and gaps, as DCP's own validation finds them."""
    found: Any = _validate_global_plan([SavePlan([])] * max(world_size, 2), metadata)
    if type(found) is bool:  # torch before 2.13 returns a bool, and logs the problems
        return [] if found else ["refused by torch"]
    return cast(list[str], found)


# --- loads by stock readers ----------------------------------------------------------------------------------------

SHAPES: Mapping[str, tuple[int, ...]] = {
    "matrix": (64, 32),
    "uneven rows": (13, 7),
    "fewer rows than ranks": (3, 1000),
    "one row": (1, 1000),
    "a deep row": (1, 1, 37, 5),
    "one element": (1,),
    "0-dim": (),
    "empty": (0, 3),
    "empty inside": (3, 0),
    "vector": (1001,),
}


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_plain_tensors_of_every_shape_load_with_the_stock_reader(tmp_path: Path, world_size: int) -> None:
    for name, shape in SHAPES.items():
        state = {name: numbers(*shape)}
        metadata = save(tmp_path / name, world_size, lambda rank, state=state: state)  # type: ignore[misc]
        assert not problems(metadata, world_size)
        pieces = 1 if 0 in shape else max(1, min(world_size, next((size for size in shape if size > 1), 1)))
        assert len(chunks(metadata)[name]) == pieces
        assert same(load(tmp_path / name, state), state)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_a_mixed_state_loads_with_the_stock_reader(tmp_path: Path, world_size: int) -> None:
    state = {name: numbers(*shape) for name, shape in SHAPES.items()} | {"step": 3, "text": "x"}
    state |= {"large": numbers(1000, 100), "larger": numbers(777, 333, dtype=torch.bfloat16)}
    metadata = save(tmp_path, world_size, lambda rank: state, part_bytes_min=10_000)
    assert not problems(metadata, world_size)
    assert len(chunks(metadata)["larger"]) > 1
    assert same(load(tmp_path, state), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64])
def test_rows_of_every_width_load_with_the_stock_reader(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"t": numbers(17, 3, dtype=dtype), "transposed": numbers(8, 30, dtype=dtype).t()}
    save(tmp_path, 4, lambda rank: state)
    assert same(load(tmp_path, state), {key: value.contiguous() for key, value in state.items()})


HSDP = [((2, 2), (13, 24)), ((2, 3), (13, 5)), ((3, 2), (1, 40)), ((4, 2), (16, 16)), ((2, 4), (3, 9))]


@pytest.mark.parametrize(("mesh_shape", "shape"), HSDP)
@pytest.mark.parametrize("dim", [0, 1])
def test_stock_loads_hsdp_shards(tmp_path: Path, mesh_shape: tuple[int, int], shape: tuple[int, int], dim: int) -> None:
    whole = numbers(*shape)
    world_size = mesh_shape[0] * mesh_shape[1]

    def state_of(rank: int) -> State:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
        pieces = whole.tensor_split([-(-shape[dim] // mesh_shape[1]) * i for i in range(1, mesh_shape[1])], dim)
        local = pieces[rank % mesh_shape[1]].contiguous()
        sharded = DTensor.from_local(
            local, mesh, [Replicate(), Shard(dim)], run_check=False, shape=whole.size(), stride=whole.stride()
        )
        return {"t": sharded, "everywhere": DTensor.from_local(whole, mesh, [Replicate(), Replicate()])}

    metadata = save(tmp_path, world_size, state_of)
    assert not problems(metadata, world_size)
    assert len(chunks(metadata)["t"]) + len(chunks(metadata)["everywhere"]) > mesh_shape[1] + 1
    assert same(load(tmp_path, {"t": whole, "everywhere": whole}), {"t": whole, "everywhere": whole})
    loaded_in_halves = load_rows(tmp_path, metadata, whole)
    assert torch.equal(loaded_in_halves, whole)


def load_rows(folder: Path, metadata: Metadata, whole: torch.Tensor) -> torch.Tensor:
    """The tensor as two ranks load it that shard along dimension 1, independent of the saved layout."""
    halves = []
    for rank in (0, 1):
        with as_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            local = torch.zeros_like(whole.chunk(2, 1)[rank]).contiguous()
            target = DTensor.from_local(
                local, mesh, [Shard(1)], run_check=False, shape=whole.size(), stride=whole.stride()
            )
            assert create_default_local_load_plan({"t": target}, metadata).items
            dcp.load({"t": target}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
            halves.append(local)
    return torch.cat(halves, 1)


# --- assignment of rows --------------------------------------------------------------------------------------------


def nested_groups(rank: int) -> State:
    """HSDP and a replicated embedding: the halves differ in size, and the embedding compensates."""
    pair = rank % 2
    return {"everywhere": torch.empty(600, 100), f"half {pair}": torch.empty(300 if pair else 100, 100)}


def unreplicated_items(rank: int) -> State:
    own = {f"own {rank}": torch.empty(10, 1000)} if rank in (0, 2) else {}
    return {"shared": torch.empty(1000, 100), **own}


@pytest.mark.parametrize(
    ("state_of", "part_bytes_min", "spread_bytes"),
    [
        (lambda _: {f"layer {i}": torch.empty(64 + i, 1000) for i in range(10)}, 64 * KIB, 4000),  # one row
        (nested_groups, 1000, 800),
        (unreplicated_items, 1000, 400),
        (lambda _: {"wide": torch.empty(3, 10_000), "rest": torch.empty(1000, 10)}, 1, 0),  # rows larger than a share
    ],
    ids=["equal layers", "nested groups", "unreplicated items", "wide rows"],
)
def test_ranks_write_equal_amounts(state_of: Callable[[int], State], part_bytes_min: int, spread_bytes: int) -> None:
    plans = plan(4, state_of, part_bytes_min=part_bytes_min)
    loads = [bytes_of(ours) for ours in plans]
    tensors = {name: tensor for rank in range(4) for name, tensor in state_of(rank).items()}
    assert sum(loads) == sum(tensor.nbytes for tensor in tensors.values())
    assert max(loads) - min(loads) <= spread_bytes
    names = [{item.index.fqn for item in ours.items} for ours in plans]
    assert all(written <= state_of(rank).keys() for rank, written in enumerate(names))


def test_only_a_huge_tensor_is_split() -> None:
    state = {f"small {i}": torch.empty(100) for i in range(50)} | {"huge": torch.empty(4096, 1024, dtype=torch.int8)}
    plans = plan(4, lambda rank: state, part_bytes_min=MIB // 2)
    assert {part.fqn for part in parts_of(plans)} == {"huge"}
    assert len(parts_of(plans)) == 4
    loads = [bytes_of(ours) for ours in plans]
    assert max(loads) - min(loads) < 0.03 * MIB


def test_splits_are_few() -> None:
    """Items are assigned end to end: at most one more part than ranks, not every tensor split by every rank."""
    state = {f"layer {i}": torch.empty(100, 1000) for i in range(40)}
    plans = plan(8, lambda rank: state, part_bytes_min=64 * KIB)
    assert sum(len(ours.items) for ours in plans) <= 40 + 8 - 1


def test_an_overloaded_rank_gets_no_replicated_items() -> None:
    def state_of(rank: int) -> State:
        return {"shared": torch.empty(100, 100)} | ({"own": torch.empty(1000, 1000)} if rank == 1 else {})

    plans = plan(3, state_of)
    assert [item.index.fqn for item in plans[1].items] == ["own"]
    assert abs(bytes_of(plans[0]) - bytes_of(plans[2])) <= 400


def test_ranks_write_only_data_that_they_hold() -> None:
    generator = random.Random(5)
    names = [f"t{i}" for i in range(60)]
    holders = {name: generator.sample(range(6), generator.randint(1, 6)) for name in names}
    tensors = {name: torch.empty(generator.randint(1, 50), generator.randint(1, 50)) for name in names}

    def state_of(rank: int) -> State:
        return {name: tensors[name] for name in names if rank in holders[name]}

    plans = plan(6, state_of)
    written: dict[str, int] = dict.fromkeys(names, 0)
    for rank, ours in enumerate(plans):
        for item in ours.items:
            assert rank in holders[item.index.fqn]
            written[item.index.fqn] += bytes_of(SavePlan([item]))
    assert written == {name: tensors[name].nbytes for name in names}


def test_small_items_stay_whole_and_are_distributed_evenly() -> None:
    state: State = {f"scalar {i}": torch.tensor(float(i)) for i in range(40)} | {f"object {i}": i for i in range(40)}
    plans = plan(4, lambda rank: state, part_bytes_min=4 * MIB)
    assert not parts_of(plans)
    assert [len(ours.items) for ours in plans] == [20, 20, 20, 20]
    everything = sorted(item.index.fqn for ours in plans for item in ours.items)
    assert everything == sorted(state)


def test_parts_have_a_minimum_size() -> None:
    plans = plan(8, lambda rank: {"t": torch.empty(1024, 1024, dtype=torch.int8)}, part_bytes_min=MIB // 3)
    assert sorted(bytes_of(ours) for ours in plans) == [0] * 5 + [349184, 349184, 350208]


def test_mismatched_replicas_are_not_split() -> None:
    def state_of(rank: int) -> State:
        return {"t": torch.empty(64, 64, dtype=torch.float32 if rank == 0 else torch.float64)}

    plans = plan(3, state_of)
    dtypes = {item.tensor_data.properties.dtype for ours in plans for item in ours.items if item.tensor_data}
    assert len(dtypes) == 1
    ranks = [rank for rank, ours in enumerate(plans) if ours.items]
    assert ranks in ([0], [1, 2])


def test_sparse_and_quantized_tensors_stay_whole() -> None:
    def item(fqn: str, tensor: torch.Tensor, **properties: Any) -> WriteItem:
        state = DefaultSavePlanner()
        state.set_up_planner({fqn: tensor}, is_coordinator=True)
        (made,) = state.create_local_plan().items
        assert made.tensor_data is not None
        changed = dataclasses.replace(made.tensor_data.properties, **properties)
        return dataclasses.replace(made, tensor_data=dataclasses.replace(made.tensor_data, properties=changed))

    items = [
        item("sparse", torch.empty(100, 10), layout=torch.sparse_coo),
        item("quantized", torch.empty(100, 10), dtype=torch.qint8),
    ]
    plans = spread_items([SavePlan(items), SavePlan([])], [items, items], 1)
    assert not parts_of(plans)


def test_the_same_structure_gives_the_same_assignment() -> None:
    def state_of(rank: int) -> State:
        return {f"layer {i}": torch.rand(50 + i, 100) for i in range(20)} | {"step": random.random()}

    assert plan(5, state_of) == plan(5, state_of)


def test_other_plans_stay_unchanged() -> None:
    state = {"t": torch.empty(100, 10)}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    ours = planner.create_local_plan()
    for plans, held in [
        ([ours], [ours.items]),  # one rank
        ([ours, SavePlan([])], [[], []]),  # no rank reported its tensors
        ([ours, ours], [ours.items, ours.items]),  # a planner without dedup
        ([SavePlan([], usable=False)] * 2, [[], []]),  # nothing changed since the last save
        ([ours, SavePlan([], usable=False)], [ours.items, ours.items]),
    ]:
        assert spread_items(plans, held, 1) is plans


def test_plans_cached_by_dcp_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached plan of a rank would mix parts of two assignments in one checkpoint."""
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        monkeypatch.setattr(SavePlanner, f"_cached_{name}", {})
    state = {"t": torch.empty(100, 10)}
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner.set_up_planner(state, is_coordinator=True)
    local = keep_items(planner.create_local_plan())
    plans, _ = planner.create_global_plan([local, local])
    shared = balance_replicated(plans, 1)
    assert not parts_of(shared)
    assert [ours.storage_data for ours in shared] == [None, None]


def test_input_plans_are_not_modified() -> None:
    planners = planners_of(2, lambda rank: {"t": torch.empty(100, 10), "u": torch.empty(1, 10)})
    gathered = [keep_items(planner.plan) for planner in planners]
    plans, _ = planners[0].create_global_plan(gathered)
    before = pickle.dumps(plans)
    balance_replicated(plans, 1)
    assert pickle.dumps(plans) == before


def test_plans_returned_to_ranks_are_small() -> None:
    """Only the writer's data for the rank may remain in ``storage_data``; the scatter stays small."""
    state = {"t": torch.empty(100, 10)}
    planners = planners_of(2, lambda rank: state)
    kept = dataclasses.replace(planners[0].plan, storage_data="the writer's")
    balanced = balance_replicated([keep_items(planners[1].plan), kept])
    assert [ours.storage_data for ours in balanced] == [None, "the writer's"]


def test_a_part_is_a_view_of_its_rows() -> None:
    tensor = numbers(1, 12, 5)
    plans = plan(3, lambda rank: {"t": tensor})
    planner = planners_of(1, lambda rank: {"t": tensor})[0]
    rows = [resolve(planner, item) for ours in plans for item in ours.items]
    assert torch.equal(torch.cat(rows, 1), tensor)
    assert all(row.is_contiguous() and row.untyped_storage().data_ptr() == tensor.data_ptr() for row in rows)


# --- metadata ------------------------------------------------------------------------------------------------------


def made(shape: tuple[int, ...] = (4000, 3), world_size: int = 4) -> tuple[Metadata, list[Part]]:
    state = {"t": torch.empty(shape), "u": torch.empty(shape), "small": torch.tensor(1.0), "note": "x"}
    plans, metadata = planned(planners_of(world_size, lambda rank: state), 1)
    return metadata, parts_of(plans)


def chunks(metadata: Metadata) -> dict[str, Any]:
    return {
        fqn: [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        for fqn, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def test_amending_is_idempotent_and_independent_of_order() -> None:
    metadata, parts = made()
    assert len(parts) > 3
    seen = []
    for order in itertools.islice(itertools.permutations(parts), 50):
        for _ in range(2):
            amend(metadata, order)
            seen.append(chunks(metadata))
    assert all(one == seen[0] for one in seen)
    assert not problems(metadata, 4)


def test_a_new_split_replaces_the_previous_one() -> None:
    """DCP's plan cache passes the same Metadata object to every save."""
    metadata, parts = made(world_size=4)
    before = chunks(metadata)
    for others in (made(world_size=3)[1], made(world_size=2)[1], parts):
        amend(metadata, others)
        assert not problems(metadata, 4)
    amend(metadata, [Part(part.fqn, part.whole, part.whole) for part in parts])
    assert chunks(metadata) == before


def test_amending_a_shallow_copy_keeps_the_original() -> None:
    metadata, parts = made()
    before = chunks(metadata)
    copy = dataclasses.replace(metadata, state_dict_metadata=dict(metadata.state_dict_metadata))
    amend(copy, parts)
    assert chunks(metadata) == before != chunks(copy)


def test_parts_with_gaps_or_overlaps_are_rejected() -> None:
    metadata, parts = made()
    before = chunks(metadata)
    part = parts[1]
    (row, *columns), (rows, *widths) = part.box
    longer = dataclasses.replace(part, box=((row, *columns), (rows + 1, *widths)))
    narrower = dataclasses.replace(part, box=((row, *columns), (rows, *(width - 1 for width in widths))))
    for wrong in (parts[:1] + parts[2:], [*parts, longer], [longer if p is part else p for p in parts], [narrower]):
        with pytest.raises(CheckpointError, match="do not make up its chunk"):
            amend(metadata, wrong)
        assert chunks(metadata) == before
    with pytest.raises(CheckpointError, match="no such tensor"):
        amend(metadata, [dataclasses.replace(part, fqn="note")])
