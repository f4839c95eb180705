"""``torch.set_default_device`` of the user does not affect tierckpt, which allocates in host memory.

The default is ``meta`` here: a tensor created without a device has no data and cannot be filled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import tierckpt
from tests.fault.step_log_scenarios import Job
from tests.states import load, same, save, small_state, zeros_like
from tierckpt import Checkpointer, EveryStep, NearStorageOptimizer
from tierckpt.loading.export import export_safetensors

WINDOW, LOG = EveryStep(window_steps=3), EveryStep(gradient_log=True)


@pytest.fixture
def no_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def on_host() -> Job:
    with torch.device("cpu"):
        return Job()


def train(job: Job) -> int:
    with torch.device("cpu"):  # for its inputs
        return job.train()


@pytest.mark.parametrize(
    "options", [{"mode": "async"}, {"mode": "sync"}, {"every_step": WINDOW}, {"every_step": LOG}], ids=str
)
def test_a_job_is_restored_bit_for_bit(options: dict[str, Any], no_device: None, file_uri: str) -> None:
    job, digests = on_host(), dict[int, str]()
    with (
        contextlib.suppress(KeyboardInterrupt),
        Checkpointer(file_uri, interval=4, drain=False, **options) as checkpointer,
    ):
        for _ in range(9):
            number = train(job)
            digests[number] = job.digest()
            if (saved := checkpointer.step(number, job.state)) is not None and WINDOW not in options.values():
                saved.result(60)
        checkpointer.wait("local")
        raise KeyboardInterrupt  # skip the final save
    again = on_host()
    with Checkpointer(file_uri, drain=False, **options) as checkpointer:
        step = checkpointer.restore(again.state)
    assert step == 9 if LOG in options.values() else step in (8, 9)
    assert again.digest() == digests[step]


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_stagers_copy_to_the_host(mode: Any, no_device: None, file_uri: str, local_root: Path) -> None:
    with torch.device("cpu"):
        state = small_state()
    stager = tierckpt.TierStager(mode=mode, local_root=local_root)
    writer = tierckpt.TierStorageWriter(file_uri, local_root=local_root)
    saved: Any = dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
    getattr(saved, "upload_completion", saved).result(60)
    stager.close()
    assert same(load(file_uri, zeros_like(state)), state)


@pytest.mark.slow
def test_near_storage_steps_and_restores(no_device: None, file_uri: str, tmp_path: Path) -> None:
    def build(name: str) -> dict[str, Any]:
        with torch.device("cpu"):
            torch.manual_seed(1)
            model = torch.nn.Linear(8, 8).to(torch.bfloat16)
        optimizer = NearStorageOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, directory=tmp_path / name)
        return {"model": model, "optimizer": optimizer}

    state = build("a")
    for number in range(3):
        state["model"](torch.full((2, 8), number, device="cpu", dtype=torch.bfloat16)).float().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    with Checkpointer(file_uri) as checkpointer:
        checkpointer.save(3, state).result(60)
    again = build("b")
    with Checkpointer(file_uri) as checkpointer:
        assert checkpointer.restore(again) == 3
    assert same(again["model"].state_dict(), dict(state["model"].state_dict()))
    for one in (state, again):
        one["optimizer"].close()


def test_files_of_a_model_load_and_a_checkpoint_is_exported(no_device: None, file_uri: str, tmp_path: Path) -> None:
    with torch.device("cpu"):
        model = {"a": torch.rand(70, 30), "b": torch.rand(5).to(torch.bfloat16)}
    save_file(model, tmp_path / "model.safetensors")
    assert same(tierckpt.load_safetensors(tmp_path / "model.safetensors"), model)
    save(file_uri, {"model": model})
    export_safetensors(file_uri, tmp_path / "out", only="model", dtype="fp16")
    found = tierckpt.load_safetensors(tmp_path / "out")
    assert same({key: one.half() for key, one in model.items()}, dict(found))
