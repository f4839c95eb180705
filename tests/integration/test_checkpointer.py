"""The Checkpointer in one process, as a training loop uses it."""

from __future__ import annotations

import argparse
import copy
import datetime
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
from tierckpt.errors import CheckpointError, ConfigError


def job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=np.float64(1e-2))
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        "rng": RngState(),
        "generator": torch.Generator().manual_seed(seed),
        "loader": Loader({"seen": [], "workers": {}}),
        "epoch": seed,
        "notes": {"name": "x", "history": [1.5, 2.5], "table": torch.arange(3)},
        "args": argparse.Namespace(begun=datetime.datetime(2024, 5, seed, tzinfo=datetime.UTC), out=Path(f"/{seed}")),
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
    generator = resumed["generator"]
    with Checkpointer(shared_uri) as checkpointer:
        assert checkpointer.restore(resumed) == 10
        assert (resumed["epoch"], resumed["pair"]) == (1, (1, "two"))
        assert (resumed["notes"]["history"], resumed["args"]) == ([1.5, 2.5], state["args"])
        assert type(resumed["optimizer"].param_groups[0]["lr"]) is np.float64
        assert resumed["generator"] is generator
        assert torch.equal(generator.get_state(), state["generator"].get_state())
        assert resumed["loader"].state["seen"] == list(range(1, 11))
        assert [train(resumed, step) for step in (11, 12)] == losses[10:]
        assert checkpointer.restore(job(3), step=5) == 5


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
