"""Resharding: what any layout saved on any world size loads bit for bit into any other.

Every layout of every world size is saved once; then each world size loads all of them into each of its layouts. The
loaders act as another node: their local root is empty at first, so they read the shared tier, then their own copy.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.compat.everything import differences
from tests.compat.layouts import LAYOUTS, build, put_back, state_of, train, whole
from tests.compat.worker import launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

SAVED = sorted(f"{layout}-on-{world}" for world, layouts in LAYOUTS.items() for layout in layouts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resharding")
    (folder / "shared").mkdir()
    names: list[str] = []
    for world in LAYOUTS:
        env = {"TIERCKPT_LOCAL_ROOT": str(folder / "node-a")}
        names += launch("tests.compat.test_resharding:save_layouts", world, env=env, folder=str(folder / "shared"))
    assert sorted(names) == SAVED
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_checkpoint_loads_into_every_layout(world: int, saved: Path) -> None:
    env = {"TIERCKPT_LOCAL_ROOT": str(saved / f"node-of-{world}")}
    outcome = launch("tests.compat.test_resharding:load_layouts", world, env=env, folder=str(saved / "shared"))
    expected = {f"{name} -> {layout}": "equal" for name in SAVED for layout in LAYOUTS[world]}
    assert outcome == expected


# --- one rank -------------------------------------------------------------------------------------------------------


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
    every: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, differences(got, expected))
    differing = sorted({key for keys in every for key in keys})
    return f"differs: {differing}" if differing else "equal"
