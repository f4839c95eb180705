"""One rank of the resharding matrix (started by test_resharding.py)."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.compat.layouts import LAYOUTS, build, put_back, state_of, train, whole
from tests.states import same


def save_layouts(folder: str) -> list[str]:
    """Save every layout of this world through tierckpt, and the whole tensors without it."""
    world = dist.get_world_size()
    names = []
    for index, layout in enumerate(LAYOUTS[world]):
        name = f"{layout}-on-{world}"
        model, optimizer = build(layout, seed=10 * world + index)
        train(model, optimizer)
        state = state_of(model, optimizer)
        dcp.save(state, storage_writer=tierckpt.TierStorageWriter(f"{folder}/{name}"))
        expected = whole(state)
        if dist.get_rank() == 0:
            torch.save(expected, f"{folder}/{name}.expected")
        names.append(name)
    for name in names:
        tierckpt.wait(f"{folder}/{name}", tier="shared", timeout_seconds=60)
    return names


def load_layouts(folder: str) -> dict[str, str]:
    """Load each saved checkpoint into this world's every layout. Returns by pair ``equal``, or what differs."""
    saved = sorted(path.stem for path in Path(folder).glob("*.expected"))
    outcome = {}
    for layout in LAYOUTS[dist.get_world_size()]:
        model, optimizer = build(layout, seed=999)
        for name in saved:
            state = state_of(model, optimizer)
            dcp.load(state, storage_reader=tierckpt.TierStorageReader(f"{folder}/{name}"))
            put_back(state, model, optimizer)
            expected = torch.load(f"{folder}/{name}.expected")
            outcome[f"{name} -> {layout}"] = _compare(whole(state_of(model, optimizer)), expected)
    return outcome


def _compare(got: dict, expected: dict) -> str:
    flat = {"got": dict(_leaves(got)), "expected": dict(_leaves(expected))}
    wrong = [key for key in flat["expected"] if not same(flat["got"].get(key), flat["expected"][key])]
    every: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, wrong)
    differing = sorted({key for keys in every for key in keys})
    return f"differs: {differing}" if differing else "equal"


def _leaves(value: object, prefix: str = ""):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}/{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{prefix}/{index}")
    else:
        yield prefix, value
