"""The Checkpointer in one process, as a training loop uses it."""

from __future__ import annotations

import copy
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierckpt
from tests.integration.state_objects import Loader
from tierckpt import Checkpointer, RngState
from tierckpt.checkpoint.description import describe_run
from tierckpt.errors import CheckpointError, ConfigError
from tierckpt.format.layout import local_dir, parse_uri


def job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        "rng": RngState(),
        "loader": Loader({"seen": [], "workers": {}}),
        "epoch": seed,
        "notes": {"name": "x", "history": [1.5, 2.5], "table": torch.arange(3)},
        "pair": (1, "two"),
    }


def train(state: dict[str, Any], step: int) -> str:
    position = state["loader"].state
    position["seen"].append(step)
    position["workers"][str(step)] = {"at": step}  # its shape changes, as that of StatefulDataLoader
    loss = state["model"](torch.randn(8, 16)).pow(2).mean() * random.random() * float(np.random.rand())
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["scheduler"].step()
    return loss.item().hex()


def test_resumed_run_equals_an_uninterrupted_one(shared_uri: str, local_root: Path) -> None:
    state = job(1)
    with Checkpointer(shared_uri) as checkpointer:
        assert checkpointer.restore(state) is None
        losses = []
        for step in range(1, 13):
            losses.append(train(state, step))
            if step % 5 == 0:
                checkpointer.save(step, state)
    shutil.rmtree(local_root)  # lose the node
    resumed = job(2)
    with Checkpointer(shared_uri) as checkpointer:
        assert checkpointer.restore(resumed) == 10
        assert (resumed["epoch"], resumed["pair"]) == (1, (1, "two"))
        assert resumed["notes"]["history"] == [1.5, 2.5]
        assert resumed["loader"].state["seen"] == list(range(1, 11))
        assert [train(resumed, step) for step in (11, 12)] == losses[10:]
        assert checkpointer.restore(job(3), step=5) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "local", "shared"), [(2, 2, 2), ({"local": 1, "shared": 3}, 1, 3), ({"shared": 1}, 5, 1)]
)
def test_keep_last_on_each_tier(keep: Any, local: int, shared: int, shared_uri: str, local_root: Path) -> None:
    with Checkpointer(shared_uri, keep_last=keep) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, {"value": torch.full((10,), step)})
            checkpointer.wait()
    directory = local_dir(local_root, parse_uri(shared_uri))
    kept = sorted(path.parent.parent.name for path in directory.glob("*/.tierckpt/manifest.json"))
    assert kept == [f"step-{step}" for step in range(6 - local, 6)]
    shutil.rmtree(local_root)
    client = tierckpt.client.get_client(tierckpt.Settings.load())
    rows = client.run(describe_run(client.mover.selector, parse_uri(shared_uri)))
    assert [(row.step, row.shared) for row in rows] == [(step, "committed") for step in range(6 - shared, 6)]


def test_retention_keeps_undrained_checkpoints(s3_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tierckpt.drain.background_drains.BackgroundDrains.submit", lambda self, token: None
    )  # drains block
    checkpointer = Checkpointer(s3_uri, keep_last=1)
    for step in (1, 2, 3):
        checkpointer.save(step, {"value": step}).result(timeout=60)
    assert len(list(local_dir(local_root, parse_uri(s3_uri)).glob("step-*/.tierckpt/manifest.json"))) == 3


def test_records_describe_each_save(s3_uri: str) -> None:
    with Checkpointer(s3_uri) as checkpointer:
        checkpointer.save(1, {"value": torch.zeros(1000)})
        checkpointer.wait()
        (record,) = checkpointer.stats
        assert record.step == 1
        assert record.size_bytes > 4000
        assert record.local_commit_seconds is not None
        assert record.shared_commit_seconds is not None
        assert 0 < record.blocked_seconds <= record.local_commit_seconds <= record.shared_commit_seconds
        checkpointer.restore({"value": torch.zeros(1000)})
        assert checkpointer.restore_seconds is not None


def test_pickling_a_checkpointer_raises(file_uri: str) -> None:
    """As in a spawned DataLoader worker whose data set refers to a Checkpointer."""
    with tierckpt.Checkpointer(file_uri) as checkpointer:
        for move in (pickle.dumps, copy.deepcopy):
            with pytest.raises(ConfigError, match="Create one in each rank"):
                move(checkpointer)


def test_closed_checkpointer_raises(file_uri: str) -> None:
    checkpointer = Checkpointer(file_uri)
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpointer.save(1, {"value": 1})


@pytest.mark.parametrize("keep", [0, -1, {"local": 0}, {"attic": 3}])
def test_retention_of_zero_checkpoints_is_refused(keep: Any, file_uri: str) -> None:
    with pytest.raises(ConfigError, match="keep_last"):
        Checkpointer(file_uri, keep_last=keep)


def test_ctrl_c_in_a_restore_is_a_keyboard_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP wraps any exception of a read; an interrupted process must still die by SIGINT, without a traceback."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"weights": torch.ones(4)})
        checkpointer.wait()
        monkeypatch.setattr(tierckpt.TierStorageReader, "read_data", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            checkpointer.restore({"weights": torch.zeros(4)})
    assert caught.value.__suppress_context__
