"""Writing data to the SSD before the save is planned: conditions, and identical results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import tierckpt
from tests.open_files import open_files
from tests.states import load, same, zeros_like
from tests.states import save as save_at_once
from tierckpt.arena import slots
from tierckpt.cache import space
from tierckpt.dcp import staging
from tierckpt.errors import TierckptError
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.poll import LOCAL, Poll
from tierckpt.save import write_ahead

KiB, MiB = 1 << 10, 1 << 20
LARGE = 150_000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lower the 64 MiB threshold to less than 1 MiB."""
    monkeypatch.setattr(write_ahead, "BYTES_MIN", 128 * KiB)
    monkeypatch.setattr(write_ahead, "WRITE_BYTES", 64 * KiB)
    write_ahead.last_of.clear()
    yield
    slots.close_arenas()
    write_ahead.last_of.clear()


class Seen:
    """Counts write-ahead files that were started and used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.taken = 0
        start, take = write_ahead.WriteAhead.start, write_ahead.TempFile.take

        def starts(owner: Any) -> None:
            start(owner)
            self.begun += 1

        def takes(file: Any, path: Path) -> Any:
            fd = take(file, path)
            self.taken += fd is not None
            return fd

        monkeypatch.setattr(write_ahead.WriteAhead, "start", starts)
        monkeypatch.setattr(write_ahead.TempFile, "take", takes)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def state_of(step: int, size: int = LARGE) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "small": torch.randn(11, generator=generator),
        "w": torch.randn(size, generator=generator),
        "none": torch.empty(0),
        "half": torch.randn(size, generator=generator).to(torch.bfloat16),
        "step": step,
    }


def start(uri: str, state: dict[str, Any], stager: Any = None, **options: Any) -> Any:
    writer = tierckpt.TierStorageWriter(uri, **{"chunk_size_bytes": 64 * KiB, "drain": False, **options})
    return dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)


def by_stager(uri: str) -> Callable[[int], None]:
    stager = tierckpt.TierStager(chunk_size_bytes=64 * KiB)
    return lambda step: start(f"{uri}/step-{step}", state_of(step), stager).result(60)


def by_writer(uri: str) -> Callable[[int], None]:
    return lambda step: start(f"{uri}/step-{step}", state_of(step)).result(60)


def by_checkpointer(uri: str) -> Callable[[int], None]:
    checkpointer = tierckpt.Checkpointer(uri, chunk_size_bytes=64 * KiB, drain=False)

    def save(step: int) -> None:
        checkpointer.save(step, state_of(step))
        checkpointer.wait("local")

    return save


def stock_reads(uri: str, state: dict[str, Any], local_root: Path) -> bool:
    target = zeros_like(state)
    dcp.load(target, storage_reader=FileSystemReader(local_dir(local_root, parse_uri(uri))), no_dist=True)
    return same(target, state)


def is_discarded(root: Path) -> bool:
    """Return whether no descriptor of an unlinked file under ``root`` is open."""
    return not any(name.endswith("(deleted)") for name in open_files(root).values())


@pytest.mark.slow
@pytest.mark.parametrize("way", [by_stager, by_writer, by_checkpointer])
def test_write_ahead_starts_at_the_second_save_of_a_layout(
    way: Callable[[str], Callable[[int], None]], file_uri: str, local_root: Path, seen: Seen
) -> None:
    save = way(file_uri)
    for step in range(1, 5):
        save(step)
        assert (seen.begun, seen.taken) == (step - 1, step - 1)
    for step in range(1, 5):
        assert stock_reads(f"{file_uri}/step-{step}", state_of(step), local_root)
        assert same(load(f"{file_uri}/step-{step}", state_of(step)), state_of(step)), "digests or data are wrong"
    assert is_discarded(local_root)


def test_changed_layout_restarts_write_ahead(file_uri: str, local_root: Path, seen: Seen) -> None:
    stager = tierckpt.TierStager(chunk_size_bytes=64 * KiB)
    sizes = [LARGE, LARGE, 2 * LARGE, 2 * LARGE, LARGE]
    begun = []
    for step, size in enumerate(sizes):
        start(f"{file_uri}/step-{step}", state_of(step, size), stager).result(60)
        begun.append(seen.begun)
    assert begun == [0, 1, 1, 2, 3] and seen.taken == 3
    for step, size in enumerate(sizes):
        assert stock_reads(f"{file_uri}/step-{step}", state_of(step, size), local_root)


def test_partial_save_neither_uses_nor_sets_the_layout(file_uri: str, local_root: Path, seen: Seen) -> None:
    stager = tierckpt.TierStager(chunk_size_bytes=64 * KiB)
    start(f"{file_uri}/step-1", state_of(1), stager).result(60)
    staged = stager.stage(state_of(2))
    save_at_once(f"{file_uri}/step-2", {"w": staged["w"]}, chunk_size_bytes=64 * KiB, drain=False)
    assert (seen.begun, seen.taken) == (1, 0)
    assert stock_reads(f"{file_uri}/step-2", {"w": state_of(2)["w"]}, local_root)
    assert any(is_discarded(local_root) for _ in Poll(60, LOCAL))
    start(f"{file_uri}/step-3", state_of(3), stager).result(60)
    assert seen.begun == 1, "the last save of this layout was not written from where it was staged"


def test_staged_data_that_is_never_saved_is_discarded(file_uri: str, local_root: Path, seen: Seen) -> None:
    stager = tierckpt.TierStager(chunk_size_bytes=64 * KiB)
    start(f"{file_uri}/step-1", state_of(1), stager).result(60)
    staged = stager.stage(state_of(2))
    assert seen.begun == 1
    assert any(not is_discarded(local_root) for _ in Poll(60, LOCAL))  # a background thread opens the file
    del staged
    start(f"{file_uri}/step-3", state_of(3), stager).result(60)
    assert seen.taken == 0
    slots.close_arenas()
    assert any(is_discarded(local_root) for _ in Poll(60, LOCAL))
    assert stock_reads(f"{file_uri}/step-3", state_of(3), local_root)


def test_lazy_copies_are_not_written_ahead(file_uri: str, seen: Seen) -> None:
    """Lazy copies run during training, which has priority."""
    stager = tierckpt.TierStager(mode="lazy", chunk_size_bytes=64 * KiB)
    for step in (1, 2):
        start(f"{file_uri}/step-{step}", state_of(step), stager).upload_completion.result(60)
    assert seen.begun == 0


def test_a_failed_copy(file_uri: str, local_root: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    stager = tierckpt.TierStager(chunk_size_bytes=64 * KiB)
    start(f"{file_uri}/step-1", state_of(1), stager).result(60)
    with monkeypatch.context() as patch:

        def fails(pairs: Any) -> None:
            raise RuntimeError("the device is gone")

        patch.setattr(staging, "copy_tensors", fails)
        with pytest.raises(RuntimeError, match="device is gone"):
            stager.stage(state_of(2))
    start(f"{file_uri}/step-3", state_of(3), stager).result(60)
    assert stock_reads(f"{file_uri}/step-3", state_of(3), local_root)
    slots.close_arenas()
    assert seen.begun == 0 and is_discarded(local_root), "A1: writing must not start before the copy is complete"


def test_no_eviction_for_it(file_uri: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    stager = tierckpt.TierStager(chunk_size_bytes=64 * KiB)
    monkeypatch.setattr(space, "room_bytes", lambda settings: 100 * KiB)
    for step in (1, 2):
        start(f"{file_uri}/step-{step}", state_of(step), stager).result(60)
    assert seen.taken == 0


def test_space_is_reserved_once(file_uri: str, local_root: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last checkpoint that fits: once its file exists, there is no room for another."""
    requests: list[tuple[int, int]] = []
    real = space.make_room

    def spy(settings: Any, needed_bytes: int, directory: Path, *, reserved_bytes: int = 0) -> None:
        requests.append((needed_bytes, reserved_bytes))
        real(settings, needed_bytes, directory, reserved_bytes=reserved_bytes)

    monkeypatch.setattr(space, "make_room", spy)
    stager = tierckpt.TierStager(chunk_size_bytes=64 * KiB)
    for step in (1, 2):
        start(f"{file_uri}/step-{step}", state_of(step), stager).result(60)
    (first, none), (second, reserved) = requests
    assert first == second and none == 0 and abs(reserved - second) < 4 * KiB
    status = os.statvfs(local_root)
    monkeypatch.setattr(os, "statvfs", lambda *_: status)  # others use the disk too
    free = status.f_bavail * status.f_frsize
    margin = space.MARGIN_BYTES_MAX
    settings = tierckpt.Settings.load(local_root=local_root, local_full_policy="error", local_high_water=1.0)
    with pytest.raises(TierckptError, match="no room"):
        real(settings, free + margin, local_root)
    real(settings, free + margin, local_root, reserved_bytes=3 * margin)
