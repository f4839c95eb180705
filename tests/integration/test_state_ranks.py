"""A restore over ranks equals the state of one process, also in another layout and world size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compat.worker import launch
from tests.integration.state_ranks import CHANGES, KINDS, LAYOUTS, SAVED, pairs

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]
HERE = "tests.integration.state_ranks"


def on_ranks(function: str, world: int, scratch: Path, **arguments: Any) -> Any:
    env = {"TIERCKPT_LOCAL_ROOT": str(scratch / f"node-of-{function}-{world}"), "TIERCKPT_MOVER": "inline"}
    return launch(f"{HERE}:{function}", world, timeout_seconds=500, env=env, **arguments)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("states")
    (folder / "shared").mkdir()
    outcome: dict[str, str] = {}
    for world in LAYOUTS:
        outcome |= on_ranks("save_layouts", world, folder, folder=str(folder / "shared"))
    return folder / "shared", outcome


def test_a_save_over_ranks_changes_nothing(saved: tuple[Path, dict[str, str]]) -> None:
    assert saved[1] == {f"{kind}, {name}": "equal" for kind in KINDS for name in SAVED}


@pytest.mark.parametrize("world", LAYOUTS)
def test_every_job_goes_on_in_every_layout(world: int, saved: tuple[Path, dict[str, str]]) -> None:
    folder, _ = saved
    outcome = on_ranks("load_layouts", world, folder.parent, folder=str(folder))
    assert outcome == {f"{kind}, {name} -> {layout}": "equal" for kind, name, layout in pairs(world)}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pipeline"])
def test_all_ranks_refuse_what_does_not_fit_and_change_nothing(layout: str, change: str, tmp_path: Path) -> None:
    outcome = on_ranks("refused", 2, tmp_path, uri=str(tmp_path / "run"), layout=layout, change=change)
    assert len(set(outcome.values())) == 1 and outcome["0"].endswith("Error"), outcome


def test_a_sharded_module_on_meta_is_materialised_or_refused(tmp_path: Path) -> None:
    assert on_ranks("materialised", 2, tmp_path, uri=str(tmp_path / "run")) in ("equal", "refused")


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_a_checkpoint_of_another_precision_is_cast(layout: str, tmp_path: Path) -> None:
    assert on_ranks("other_precision", 2, tmp_path, uri=str(tmp_path / "run"), layout=layout) == "equal"
