"""Saves with one torch for the others, and loads theirs: run in an environment of each version.

python -m tests.compat.torch_version save DIRECTORY     ours/, stock/ and run/ (Checkpointer) below it
python -m tests.compat.torch_version load DIRECTORY     prints "READER of WRITER: right", or the error
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.compat.everything import blank, differences


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "plain": base.clone(),
        "transposed": base.t(),
        "rows": base[::2],
        "expanded": torch.ones(3).expand(4, 3),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "half": base.to(torch.bfloat16),
        "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "list": [torch.ones(2), {"deep": torch.zeros(3)}],
        "text": "a",
        "number": 5,
    }


def job() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10), "n": 3}


def save(directory: Path) -> None:
    dcp.save(state(), storage_writer=tierckpt.TierStorageWriter(str(directory / "ours")), no_dist=True)
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(directory / "stock"), no_dist=True)
    with tierckpt.Checkpointer(str(directory / "run")) as checkpointer:
        checkpointer.save(1, job())


def check_loaded(reader: Any) -> None:
    into = blank(state())
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert differences(into, state()) == []


def check_restored(uri: str) -> None:
    wanted, into = job(), job()
    with torch.no_grad():
        for parameter in into["model"].parameters():
            parameter.zero_()
    with tierckpt.Checkpointer(uri) as checkpointer:
        assert checkpointer.restore(into) == 1
    for left, right in zip(wanted["model"].parameters(), into["model"].parameters(), strict=True):
        assert torch.equal(left, right)
        for name, value in wanted["optimizer"].state[left].items():
            assert torch.equal(value, into["optimizer"].state[right][name]), name


def load(directory: Path) -> None:
    cases = {
        "ours of ours": lambda: check_loaded(tierckpt.TierStorageReader(str(directory / "ours"))),
        "ours of stock": lambda: check_loaded(tierckpt.TierStorageReader(str(directory / "stock"))),
        "stock of ours": lambda: check_loaded(dcp.FileSystemReader(directory / "ours")),
        "stock of stock": lambda: check_loaded(dcp.FileSystemReader(directory / "stock")),
        "Checkpointer of Checkpointer": lambda: check_restored(str(directory / "run")),
    }
    for name, work in cases.items():
        try:
            work()
            print(f"{name}: right", flush=True)
        except BaseException as error:  # DCP's CheckpointException is no Exception
            print(f"{name}: {type(error).__name__} {' '.join(str(error).split())[-200:]}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
