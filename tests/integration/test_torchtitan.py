"""The checkpoint manager of a released torchtitan, with ``tierckpt://`` as its folder and nothing else of tierckpt."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tests.engine_wheels import imported, wheel_python
from tierckpt.client import close_all

REAL = ("torchtitan.components.checkpointer", "torchtitan.tools.filesystem")


class Configurable:
    class Config: ...


@pytest.fixture
def manager_class() -> Iterator[Any]:
    with imported(wheel_python("torchtitan"), REAL, (), {"torchtitan.config.Configurable": Configurable}):
        import_module("torchtitan.tools.filesystem")  # or its stand-in would have a name for it
        yield import_module("torchtitan.components.checkpointer.dcp").CheckpointManager


def run_of(manager_class: Any, folder: str, value: float) -> tuple[Any, torch.nn.Linear]:
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    manager = manager_class(
        manager_class.Config(enable=True, folder=folder, interval=1, keep_latest_k=2),
        dataloader=None,
        model_parts=[model],
        optimizers=optimizer,
        lr_schedulers=torch.optim.lr_scheduler.ConstantLR(optimizer),
        states={},
        sd_adapter=None,
        base_folder="out",
    )
    return manager, model


def test_a_lost_node_resumes_at_the_newest_step_and_keep_latest_k_holds(
    manager_class: Any, s3_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    fsspec.get_filesystem_class("tierckpt").clear_instance_cache()  # it would have another test's settings
    folder = f"tierckpt://s3/{s3_uri.removeprefix('s3://')}/run"
    manager, model = run_of(manager_class, folder, 1.0)
    assert not manager.load()
    for step in (1, 2, 3):
        torch.nn.init.constant_(model.weight, float(step))
        manager.save(step)
    manager.close()  # what it removes is removed by then
    fs, name = fsspec.core.url_to_fs(folder)
    fs.wait(name, timeout_seconds=60)
    close_all()
    shutil.rmtree(local_root)  # the node is lost
    assert sorted(path.rpartition("/")[2] for path in fs.ls(name, detail=False)) == ["step-2", "step-3"]
    manager, model = run_of(manager_class, folder, 0.0)
    assert manager.load()
    manager.close()
    assert model.weight.unique().tolist() == [3.0]
