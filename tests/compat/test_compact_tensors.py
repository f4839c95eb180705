"""Tensors that are smaller than shape times dtype cross between stock DCP and tierckpt, or are refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from tests.compat.compact_tensors import Packed, large, packed, packed_twice, raw
from tierckpt import TierSavePlanner, TierStager, TierStorageReader, TierStorageWriter
from tierckpt.dcp import split
from tierckpt.dcp.planner import cache
from tierckpt.errors import StateMismatchError

MADE: dict[str, Callable[[int], torch.Tensor]] = {
    "subclass": packed,
    "nested subclass": packed_twice,
    "parameter": lambda fill: nn.Parameter(packed(fill), requires_grad=False),
    "of a part of its values": lambda fill: Packed((torch.arange(1 << 15) % 5 * fill).to(torch.int8)[7:99], (40, 40)),
}
SPARSE = torch.eye(4).to_sparse()
REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: SPARSE,
    "csr": lambda: SPARSE.to_sparse_csr(),
    "csc": lambda: SPARSE.to_sparse_csc(),
    "bsr": lambda: SPARSE.to_sparse_bsr((2, 2)),
    "bsc": lambda: SPARSE.to_sparse_bsc((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8),
    "meta": lambda: torch.empty(4, device="meta"),
}
STAGED_ONLY: dict[str, Callable[[], torch.Tensor]] = {
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged),
    "int4": lambda: torch.empty(4, dtype=torch.int4),
}
"""DCP's planner rejects them before it calls a storage writer."""


def load(uri: str, reader: Any, make: Callable[[int], torch.Tensor]) -> None:
    state = {"layer": {"weight": make(1)}, "bias": torch.zeros(3)}
    dcp.load(state, storage_reader=reader(uri), no_dist=True)
    weight = state["layer"]["weight"]  # type: ignore[index]
    assert torch.equal(raw(weight), raw(make(3))) and state["bias"].sum() == 3  # type: ignore[union-attr]


def state_of(make: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    return {"layer": {"weight": make(3)}, "bias": torch.ones(3)}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize(
    ("writer", "reader"),
    list(itertools.product((TierStorageWriter, FileSystemWriter), (TierStorageReader, FileSystemReader))),
)
def test_a_compact_tensor_crosses_in_both_directions(file_uri: str, name: str, writer: Any, reader: Any) -> None:
    dcp.save(state_of(MADE[name]), storage_writer=writer(file_uri), no_dist=True)
    load(file_uri, reader, MADE[name])


@pytest.mark.parametrize("name", MADE)
def test_a_compact_tensor_is_staged_by_its_parts(file_uri: str, name: str) -> None:
    """It has no ``new_empty`` and no ``clone``: few have."""
    state = state_of(MADE[name])
    stager = TierStager()
    staged = stager.stage(state)
    raw(state["layer"]["weight"]).zero_()
    dcp.save(staged, storage_writer=TierStorageWriter(file_uri), no_dist=True)
    stager.close()
    load(file_uri, TierStorageReader, MADE[name])


def test_a_planner_that_remembers_plans_it_again(tmp_path: Path) -> None:
    cache.start_anew()
    for step in (1, 2):
        uri = str(tmp_path / f"{step}")
        planner = TierSavePlanner()
        dcp.save(state_of(packed), storage_writer=TierStorageWriter(uri), planner=planner, no_dist=True)
        load(uri, TierStorageReader, packed)


@pytest.mark.parametrize("name", REFUSED)
def test_what_dcp_cannot_save_is_refused_with_its_name(file_uri: str, name: str) -> None:
    state = {"layer": {"weight": REFUSED[name]()}}
    with pytest.raises(CheckpointException, match=r"StateMismatchError: layer\.weight"):
        dcp.save(state, storage_writer=TierStorageWriter(file_uri), no_dist=True)


@pytest.mark.parametrize("name", [*REFUSED, *STAGED_ONLY])
def test_what_dcp_cannot_save_is_refused_when_it_is_staged(name: str) -> None:
    with pytest.raises(StateMismatchError, match=r"^layer\.weight "):
        TierStager().stage({"layer": {"weight": (REFUSED | STAGED_ONLY)[name]()}})


def test_a_class_that_is_not_allowed_is_read_with_trust_only(file_uri: str) -> None:
    known = torch.serialization.get_safe_globals()
    dcp.save(state_of(packed), storage_writer=TierStorageWriter(file_uri), no_dist=True)
    torch.serialization.clear_safe_globals()
    try:
        with pytest.raises(CheckpointException, match=r"layer\.weight is refused: it needs .*Packed"):
            load(file_uri, TierStorageReader, packed)
        load(file_uri, lambda uri: TierStorageReader(uri, trust_pickle=True), packed)
    finally:
        torch.serialization.add_safe_globals(known)


def _save_on_rank(rank: int, rendezvous: str, uri: str, root: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    state = {"weight": large(3), "dense": torch.ones(1 << 21)}
    written = []
    resolve = split.keep_subclasses_whole

    def noted(items: Any, planner: Any) -> Any:
        written.extend(item for item in items if isinstance(item, split.PartItem))
        return resolve(items, planner)

    split.keep_subclasses_whole = noted
    for stager in (False, True):
        name = f"{uri}-{stager}"
        writer = TierStorageWriter(name, local_root=root)
        if stager:
            dcp.async_save(state, storage_writer=writer).result()  # type: ignore[union-attr]
        else:
            dcp.save(state, storage_writer=writer)
        assert "weight" in {item.index.fqn for item in written}  # the plan has cut it
        for reader in (TierStorageReader(name, local_root=root), FileSystemReader(name)):
            found = {"weight": large(1), "dense": torch.zeros(1 << 21)}
            dcp.load(found, storage_reader=reader)
            assert torch.equal(raw(found["weight"]), raw(state["weight"]))
            assert torch.equal(found["dense"], state["dense"])
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_replicated_one_is_written_whole_by_one_rank(tmp_path: Path, file_uri: str, local_root: Path) -> None:
    arguments = (str(tmp_path / "rendezvous"), file_uri, str(local_root))
    torch.multiprocessing.spawn(_save_on_rank, arguments, nprocs=2)  # type: ignore[no-untyped-call]
