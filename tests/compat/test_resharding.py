"""Resharding: what any layout saved on any world size loads bit for bit into any other.

Every layout of every world size is saved once; then each world size loads all of them into each of its layouts. The
loaders act as another node: their local root is empty at first, so they read the shared tier, then their own copy.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.layouts import LAYOUTS
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
        names += launch("tests.compat.resharding:save_layouts", world, env=env, folder=str(folder / "shared"))
    assert sorted(names) == SAVED
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_checkpoint_loads_into_every_layout(world: int, saved: Path) -> None:
    env = {"TIERCKPT_LOCAL_ROOT": str(saved / f"node-of-{world}")}
    outcome = launch("tests.compat.resharding:load_layouts", world, env=env, folder=str(saved / "shared"))
    expected = {f"{name} -> {layout}": "equal" for name in SAVED for layout in LAYOUTS[world]}
    assert outcome == expected
