"""Space on the local tier, with a real file system of 40 MiB: evictions, waits and refusals."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tierckpt
from tests.held_drains import hold_drains
from tests.services import needs, unavailable
from tests.states import load, same, save
from tierckpt.cache import space
from tierckpt.checkpoint.journal import Journal
from tierckpt.client import close_all
from tierckpt.config import Settings
from tierckpt.disk import read_lease
from tierckpt.errors import CapacityError
from tierckpt.format.layout import local_dir, parse_uri

MiB = 1 << 20
STEP_BYTES = 8 * MiB


@pytest.fixture(params=["ext4", "tmpfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB: room for four steps."""
    place = tmp_path / "ssd"
    place.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=40m,mode=700", "tmpfs", str(place)]
    else:
        needs("mkfs.ext4")
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(40 * MiB)
        subprocess.run(["/usr/sbin/mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image], check=True)
        command = ["mount", "-o", "loop", str(image), str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        unavailable(f"mounting a small {request.param} needs root and a loop device")
    yield place
    close_all()
    subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """The shared tier on another file system, so that nothing is hard-linked."""
    return str(tmp_path / "shared/run")


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((STEP_BYTES // 4 - 2000,), float(step))}


def save_steps(uri: str, root: Path, *steps: int, drained: bool = True, **options: Any) -> None:
    for step in steps:
        save(f"{uri}/step-{step}", state_of(step), local_root=root, **options)
        if drained:
            tierckpt.wait(f"{uri}/step-{step}", timeout_seconds=60, local_root=root, **options)


def on_local(uri: str, root: Path) -> list[int]:
    directory = local_dir(root, parse_uri(uri))
    return sorted(
        int(path.parent.parent.name.rpartition("-")[2]) for path in directory.glob("*/.tierckpt/manifest.json")
    )


def intact(uri: str, step: int, root: Path) -> bool:
    return same(load(f"{uri}/step-{step}", state_of(step), local_root=root), state_of(step))


def used_share(disk: Path) -> float:
    status = os.statvfs(disk)
    return 1 - status.f_bavail / status.f_blocks


# --- evicting ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_above_the_high_water_mark_the_oldest_drained_are_evicted(disk: Path, uri: str) -> None:
    for step in range(1, 9):
        save_steps(uri, disk, step, local_high_water=0.7)
        assert used_share(disk) <= 0.71
    assert on_local(uri, disk) == [6, 7, 8]  # three fit in 28 MiB
    close_all()
    for step in (1, 7):
        assert intact(uri, step, disk)


@pytest.mark.slow
def test_byte_limit_counts_checkpoints_only(disk: Path, uri: str) -> None:
    (disk / "datasets").write_bytes(bytes(8 * MiB))
    for step in range(1, 6):
        save_steps(uri, disk, step, local_bytes_max="18MiB", local_high_water=1.0)
        total_bytes = sum(path.stat().st_size for path in (disk / "checkpoints").rglob("*.distcp"))
        assert total_bytes <= 18 * MiB
    assert on_local(uri, disk) == [4, 5]


@pytest.mark.slow
def test_oldest_step_is_evicted_first_after_a_clock_change(
    disk: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's clock is set back by a year between two saves."""
    save_steps(uri, disk, 1)
    set_back = SimpleNamespace(time=lambda: time.time() - 3e7, monotonic=time.monotonic)
    monkeypatch.setattr("tierckpt.dcp.save_session.time", set_back)
    save_steps(uri, disk, 2, 3)
    save_steps(uri, disk, 4, local_high_water=0.75)
    assert on_local(uri, disk) == [2, 3, 4]


@pytest.mark.slow
def test_checkpoints_being_read_and_the_newest_stay(disk: Path, uri: str) -> None:
    save_steps(uri, disk, 1, 2, 3)
    with read_lease.reading(disk, local_dir(disk, parse_uri(f"{uri}/step-1"))):
        save_steps(uri, disk, 4, local_high_water=0.75)
    assert on_local(uri, disk) == [1, 3, 4]


def test_undrained_checkpoints_are_not_evicted(disk: Path, uri: str) -> None:
    save_steps(uri, disk, 1, 2, 3, 4, drained=False, drain=False, local_high_water=1.0)
    with pytest.raises(CapacityError) as caught:
        save_steps(uri, disk, 5, drained=False, drain=False, local_high_water=1.0)
    assert caught.value.context["needed_bytes"] >= STEP_BYTES - 100_000
    assert caught.value.context["free_bytes"] < STEP_BYTES
    assert on_local(uri, disk) == [1, 2, 3, 4]
    assert Journal(disk).entries() == []
    assert not list(disk.rglob("step-5/*.distcp"))


def test_newest_checkpoint_is_not_evicted_for_the_next(disk: Path, uri: str) -> None:
    save_steps(uri, disk, 1)
    with pytest.raises(CapacityError, match="two checkpoints"):
        save_steps(uri, disk, 2, local_bytes_max="12MiB")
    assert on_local(uri, disk) == [1]


@pytest.mark.slow
def test_hard_linked_copies_are_not_evicted(disk: Path) -> None:
    uri, root = str(disk / "shared"), disk / "local"
    save_steps(uri, root, 1, 2, 3, 4, local_high_water=1.0)
    with pytest.raises(CapacityError):
        save_steps(uri, root, 5, local_high_water=1.0)
    assert on_local(uri, root) == [1, 2, 3, 4]


def test_disk_filled_by_others_above_the_mark_is_still_used(
    disk: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    (disk / "datasets").write_bytes(bytes(16 * MiB))
    with caplog.at_level(logging.WARNING, "tierckpt"):
        save_steps(uri, disk, 1, local_high_water=0.3)
    assert on_local(uri, disk) == [1]
    assert any("high-water" in record.getMessage() for record in caplog.records)


# --- waiting ----------------------------------------------------------------------------------------------------


@pytest.fixture
def held_drains(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    return hold_drains(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["ext4"], indirect=True)
def test_save_waits_for_a_drain_to_free_space(
    disk: Path, uri: str, held_drains: threading.Event, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    options = {"local_high_water": 0.75, "exit_timeout_seconds": 0}
    save_steps(uri, disk, 1, 2, 3, drained=False, **options)
    say = space.log.warning
    monkeypatch.setattr(space.log, "warning", lambda *what: (say(*what), held_drains.set()))
    with caplog.at_level(logging.WARNING, "tierckpt"):
        save_steps(uri, disk, 4, drained=False, **options)
    assert held_drains.is_set()
    waits = [record.getMessage() for record in caplog.records if "waits for" in record.getMessage()]
    assert len(waits) == 1
    assert f"the drain of {uri}/step-1" in waits[0]
    assert on_local(uri, disk) in ([1, 3, 4], [2, 3, 4]), "1 and 2 drain at once, and the first of them is evicted"
    for step in (1, 2, 3, 4):
        tierckpt.wait(f"{uri}/step-{step}", timeout_seconds=60, local_root=disk, **options)


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["ext4"], indirect=True)
@pytest.mark.parametrize(("policy", "seconds"), [("error", 1000.0), ("wait", 0.5)])
def test_save_without_space_is_refused_by_policy(
    disk: Path, uri: str, held_drains: threading.Event, policy: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``error`` the save fails at once, within the test's deadline."""
    monkeypatch.setattr(space, "ROOM_SECONDS", seconds)
    options: dict[str, Any] = {"local_high_water": 0.75, "exit_timeout_seconds": 0, "local_full_policy": policy}
    save_steps(uri, disk, 1, 2, 3, drained=False, **options)
    begun = time.monotonic()
    with pytest.raises(CapacityError) as caught:
        save_steps(uri, disk, 4, drained=False, **options)
    assert policy == "error" or time.monotonic() - begun >= seconds
    assert caught.value.context["draining"] == 2  # the newest stays in any case
    assert caught.value.context["needed_bytes"] >= STEP_BYTES - 100_000
    held_drains.set()
    for step in (1, 2, 3):
        tierckpt.wait(f"{uri}/step-{step}", timeout_seconds=60, local_root=disk, **options)
        assert intact(uri, step, disk)
    save_steps(uri, disk, 4, **options)  # now there is space


@pytest.mark.parametrize("disk", ["ext4"], indirect=True)
def test_save_larger_than_the_disk_fails_at_once(disk: Path, uri: str, held_drains: threading.Event) -> None:
    options: dict[str, Any] = {"exit_timeout_seconds": 0}
    save_steps(uri, disk, 1, 2, drained=False, **options)
    with pytest.raises(CapacityError):
        save(f"{uri}/step-3", {"w": torch.zeros(12 * MiB)}, local_root=disk, **options)  # 48 MiB
    held_drains.set()
    for step in (1, 2):
        tierckpt.wait(f"{uri}/step-{step}", timeout_seconds=60, local_root=disk, **options)


@pytest.mark.parametrize("disk", ["ext4"], indirect=True)
def test_save_does_not_wait_for_a_failed_drain(disk: Path, uri: str) -> None:
    options: dict[str, Any] = {"local_bytes_max": "18MiB"}
    save_steps(uri, disk, 1, 2, drained=False, drain=False, **options)
    journal = Journal(disk)
    entry = journal.open("token", parse_uri(f"{uri}/step-1"), 0, 4096)
    journal.write(replace(entry, state="ready", error="PermissionDeniedError: no permission"))
    settings = Settings.load(local_root=disk, **options)
    with pytest.raises(CapacityError) as caught:
        space.make_room(settings, STEP_BYTES, local_dir(disk, parse_uri(f"{uri}/step-3")))
    assert caught.value.context["last_error"].startswith("PermissionDeniedError")


# --- cost -------------------------------------------------------------------------------------------------------


def best_seconds(work: Callable[[], object], tries: int = 200) -> float:
    found = []
    for _ in range(tries):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return min(found)


def test_space_check_is_cheap_when_there_is_space(tmp_path: Path) -> None:
    """Twenty checkpoints of eight shards: a quarter of the time of a stat of all files. Best of many tries."""
    settings = Settings.load(local_root=tmp_path, local_high_water=1.0)
    run = tmp_path / "checkpoints/file/_/run"
    for step in range(20):
        (run / f"step-{step}/.tierckpt/metadata").mkdir(parents=True)
        for shard in range(8):
            (run / f"step-{step}/__{shard}_0-t.distcp").write_bytes(bytes(5000))
    old = time.time() - 100
    for path in [run.parent, *run.rglob("*"), run, tmp_path / "checkpoints", tmp_path / "checkpoints/file"]:
        os.utime(path, (old, old))
    directory = run / "step-19"
    seconds = best_seconds(lambda: space.make_room(settings, 1 << 20, directory))
    stat_seconds = best_seconds(lambda: [path.stat() for path in run.rglob("*")], 20)
    print(f"make_room with room: {seconds * 1e6:.0f} microseconds of {stat_seconds * 1e6:.0f}")
    assert seconds < stat_seconds / 4


def test_byte_counter_follows_file_changes(tmp_path: Path) -> None:
    assert space.checkpoint_bytes(tmp_path) == 0
    shard = tmp_path / "checkpoints/run/step-1/__0_0-t.distcp"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(bytes(8192))
    (shard.parent / "another").write_bytes(bytes(4096))
    assert space.checkpoint_bytes(tmp_path) == 12288
    os.link(shard, tmp_path / "shared")
    assert space.checkpoint_bytes(tmp_path) == 4096, "a file linked to the shared tier frees nothing"
