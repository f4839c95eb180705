"""The checkpoint manager of a released torchtitan with only ``tierckpt://`` as its folder."""

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

REAL_MODULES = ("torchtitan.components.checkpointer", "torchtitan.tools.filesystem")


class Configurable:
    class Config: ...


@pytest.fixture
def manager_class() -> Iterator[Any]:
    with imported(wheel_python("torchtitan"), REAL_MODULES, (), {"torchtitan.config.Configurable": Configurable}):
        import_module("torchtitan.tools.filesystem")  # before its stand-in takes the name
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


def test_torchtitan_resumes_after_a_lost_node_with_keep_latest_k(
    manager_class: Any, s3_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    fsspec.get_filesystem_class("tierckpt").clear_instance_cache()  # instances keep another test's settings
    folder = f"tierckpt://s3/{s3_uri.removeprefix('s3://')}/run"
    manager, model = run_of(manager_class, folder, 1.0)
    assert not manager.load()
    for step in (1, 2, 3):
        torch.nn.init.constant_(model.weight, float(step))
        manager.save(step)
    manager.close()  # completes its removals
    fs, name = fsspec.core.url_to_fs(folder)
    fs.wait(name, timeout_seconds=60)
    close_all()
    shutil.rmtree(local_root)  # lose the node
    assert sorted(path.rpartition("/")[2] for path in fs.ls(name, detail=False)) == ["step-2", "step-3"]
    manager, model = run_of(manager_class, folder, 0.0)
    assert manager.load()
    manager.close()
    assert model.weight.unique().tolist() == [3.0]
