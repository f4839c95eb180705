"""Select the newest checkpoint while a job saves the next one and removes the previous one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierckpt
from tests.compat.worker import launch
from tierckpt import Checkpointer
from tierckpt.checkpoint import catalog, select
from tierckpt.checkpoint.catalog import Checkpoint
from tierckpt.checkpoint.description import describe_run
from tierckpt.checkpoint.select import Selector
from tierckpt.client import get_client
from tierckpt.config import Settings
from tierckpt.errors import OperationTimeoutError
from tierckpt.format.layout import Location, parse_uri, step_of
from tierckpt.loading.export import export_safetensors
from tierckpt.restore.restore import restore

Look = Callable[[str, Path], int | None]


def save(uri: str, root: Path, step: int) -> None:
    """The other job, on another node: it keeps one checkpoint."""
    with Checkpointer(uri, local_root=root, keep_last=1) as job:
        job.save(step, {"model": {"w": torch.full((4,), float(step))}}).result(60)


def restored(uri: str, tmp_path: Path) -> int | None:
    state: dict[str, Any] = {"model": {"w": torch.zeros(4)}}
    step = Checkpointer(uri).restore(state)
    assert step is None or torch.equal(state["model"]["w"], torch.full((4,), float(step)))
    return step


def copied(uri: str, tmp_path: Path) -> int | None:
    client = get_client(Settings.load())
    return step_of(client.run(restore(client.mover, parse_uri(uri), tmp_path / "copied")).location.name)


LOOKS: dict[str, Look] = {
    "latest": lambda uri, _: step_of((tierckpt.latest(uri) or "").rpartition("/")[2]),
    "latest_step": lambda uri, _: Checkpointer(uri).latest_step(),
    "restore": restored,
    "load_model": lambda uri, _: int(tierckpt.load_model(uri)["w"][0]),
    "export": lambda uri, tmp_path: step_of(export_safetensors(uri, tmp_path / "to").uri.rpartition("/")[2]),
    "copy": copied,
}


class Job:
    """Commits the next step, and removes the one before, just before (or after) one is read."""

    def __init__(self, uri: str, root: Path, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
        self.uri, self.root, self.left, self.step = uri, root, times, 1
        self.first: int | None = None
        """Saves after this step was checked, not before."""
        save(uri, root, 1)
        found = Selector.find

        async def find(selector: Selector, location: Location) -> Checkpoint:
            if self.first is None and step_of(location.name) is not None:
                await self.go_on()
            try:
                return await found(selector, location)
            finally:
                if self.first is not None and step_of(location.name) == self.first:
                    await self.go_on()

        monkeypatch.setattr(Selector, "find", find)

    async def go_on(self) -> None:
        if self.left:
            self.left, self.step = self.left - 1, self.step + 1
            await asyncio.to_thread(save, self.uri, self.root, self.step)


@pytest.mark.parametrize("look", LOOKS)
def test_removed_steps_are_relisted(look: str, file_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Job(file_uri, tmp_path / "job", monkeypatch, times=2)
    assert LOOKS[look](file_uri, tmp_path) == 3


def test_an_uncommitted_step_is_read_again(file_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 2 is committed after its check, and step 1 removed before its own: no name is found, and none is usable."""
    job = Job(file_uri, tmp_path / "job", monkeypatch)
    (Path(file_uri) / "step-2").mkdir()
    (Path(file_uri) / "step-2" / "__0_0.distcp").write_bytes(b"begun")
    job.first = 2
    assert LOOKS["latest"](file_uri, tmp_path) == 2


def test_a_new_step_is_preferred_to_an_older(file_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader keeps step 1 from being removed; steps 2 and 3 are each replaced by the next."""
    job = Job(file_uri, tmp_path / "job", monkeypatch)
    save(file_uri, tmp_path / "job", 3)
    job.step = 3
    with Checkpointer(file_uri, local_root=tmp_path / "other") as other:
        other.save(2, {"model": {"w": torch.zeros(4)}}).result(60)
    assert LOOKS["latest"](file_uri, tmp_path) == 4


def test_steps_removed_before_each_read_raise(file_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (select, catalog):
        monkeypatch.setattr(module, "LISTINGS_MAX", 2)
    Job(file_uri, tmp_path / "job", monkeypatch, times=5)
    with pytest.raises(OperationTimeoutError, match="removed before they were read") as caught:
        tierckpt.latest(file_uri)
    assert caught.value.exit_code == 7


def test_a_run_of_unfinished_saves_has_none(file_uri: str) -> None:
    for name in ("step-1", "logs"):
        (Path(file_uri) / name).mkdir(parents=True)
        (Path(file_uri) / name / "__0_0.distcp").write_bytes(b"begun")
    assert tierckpt.latest(file_uri) is None
    assert Checkpointer(file_uri).restore({"w": torch.zeros(1)}) is None


def test_a_step_removed_before_its_row_is_read(file_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(file_uri, tmp_path / "job", 1)
    described, saved = catalog.describe, [2, 3]

    async def describe(location: Location, *args: Any) -> catalog.CheckpointRow | None:
        if saved and location.name.startswith("step-"):
            await asyncio.to_thread(save, file_uri, tmp_path / "job", saved.pop(0))
        return await described(location, *args)

    monkeypatch.setattr(catalog, "describe", describe)
    client = get_client(Settings.load())
    assert [row.step for row in client.run(describe_run(client.mover.selector, parse_uri(file_uri)))] == [3]
    saved.append(4)
    runs, _ = client.run(client.mover.selector.runs([parse_uri(str(Path(file_uri).parent))]))
    assert [run.newest.step for run in runs if run.location.path == file_uri] == [4]


def look_one_after_the_other(uri: str, other: str) -> list[Any]:
    """Rank 0 looks before, rank 1 after the other job commits step 2 and removes step 1."""
    rank, newest, looks = dist.get_rank(), Selector.newest, []

    async def one_by_one(self: Selector, *args: Any, **options: Any) -> Any:
        looks.append(1)
        if len(looks) > 1:
            return await newest(self, *args, **options)
        found = await newest(self, *args, **options) if rank == 0 else None
        await asyncio.to_thread(dist.barrier)
        if rank == 1:
            await asyncio.to_thread(save_alone, uri, other)
            found = await newest(self, *args, **options)
        return found

    Selector.newest = one_by_one  # type: ignore[method-assign]
    state = {"model": {"w": torch.zeros(4)}}
    step = Checkpointer(uri).restore(state)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (step, float(state["model"]["w"][0])))
    return gathered


def save_alone(uri: str, root: str) -> None:
    """In a process of its own: here every save has all ranks."""
    code = "import sys; from pathlib import Path; from tests.unit.checkpoint.test_select import save"
    command = [sys.executable, "-c", f"{code}; save(sys.argv[1], Path(sys.argv[2]), 2)", uri, root]
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    subprocess.run(command, check=True, env=environment)


@pytest.mark.slow
def test_ranks_that_look_at_different_moments_look_again(file_uri: str, tmp_path: Path) -> None:
    save(file_uri, tmp_path / "job", 1)
    scenario = "tests.unit.checkpoint.test_select:look_one_after_the_other"
    assert launch(scenario, 2, uri=file_uri, other=str(tmp_path / "job")) == [[2, 2.0], [2, 2.0]]
