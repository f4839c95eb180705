"""Failing disks and killed processes during a save: the previous checkpoint stays whole.

After an error: the save raises a typed error, makes no further call on the failed file, and leaves no shard of the
attempt; the previous checkpoint loads bit for bit, and the next save works. After a kill: the same for the next
process, and no shared memory is leaked.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import tierckpt
from tests.fault import flush_children
from tests.fault.flush_children import ACTS, SEEDED, TRACED
from tests.fault.runner import start
from tests.services import needs
from tests.states import load, raises_ours, same, zeros_like
from tierckpt.arena import slots
from tierckpt.checkpoint.journal import Journal
from tierckpt.disk.io_tuner import IoShape, WriteTuner
from tierckpt.errors import CapacityError, StoreError, TierckptError
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.poll import LOCAL, Poll
from tierckpt.save import flush, write_ahead

KiB, MiB = 1 << 10, 1 << 20
EXISTING_SHM_FILES = frozenset(os.listdir("/dev/shm"))  # noqa: PTH208
SAVE_METHODS = ("sync", "async")
CHILDREN_SECONDS = 400.0
"""Time limit of ``flush_children``, with its waits, on a slow machine."""

pytestmark = pytest.mark.timeout(CHILDREN_SECONDS + 60)


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(100_000, generator=generator), "b": torch.randn(9, generator=generator), "step": step}


def save(uri: str, state: dict[str, Any], way: str = "sync", **options: Any) -> None:
    writer = tierckpt.TierStorageWriter(uri, **{"chunk_size_bytes": 64 * KiB, **options})
    with raises_ours():
        if way == "sync":
            dcp.save(state, storage_writer=writer, no_dist=True)
        else:
            stager = tierckpt.TierStager(chunk_size_bytes=writer.settings.chunk_size_bytes)
            dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True).result(60)


def loads_equal(uri: str, step: int, root: Path) -> bool:
    """Return whether the step loads bit for bit, by tierckpt's reader and by torch's."""
    target = zeros_like(state_of(step))
    dcp.load(target, storage_reader=FileSystemReader(local_dir(root, parse_uri(uri))), no_dist=True)
    return same(load(uri, state_of(step), local_root=root), state_of(step)) and same(target, state_of(step))


def shards(root: Path, uri: str) -> list[str]:
    return [path.name for path in local_dir(root, parse_uri(uri)).rglob("*.distcp")]


@pytest.fixture(autouse=True)
def small_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split a shard into seven writes by three threads."""
    shape = WriteTuner((IoShape(3, 64 * KiB),))
    monkeypatch.setattr("tierckpt.dcp.shard_delivery.write_tuner_for", lambda *_: shape)


# --- failing calls ------------------------------------------------------------------------------------------------


class Disk:
    """Wraps system calls: counts those on shards, and lets the n-th of a kind fail once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str, bool]] = []
        self.fired = 0
        self._failed = ""
        self._plan: tuple[str, int, int] | None = None
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._failure_known = threading.Event()
        self.failure_wait_seconds = 0.0
        """Seconds that the failing call waits, at most, until the flush knows of its failure."""
        fail = flush.FlushJob.fail

        def fails(job: Any, error: BaseException) -> None:
            fail(job, error)
            self._failure_known.set()

        monkeypatch.setattr(flush.FlushJob, "fail", fails)
        self._real = {name: getattr(os, name) for name in ("pwrite", "fsync", "ftruncate")}
        for name in self._real:
            monkeypatch.setattr(os, name, lambda *arguments, name=name: self._call(name, *arguments))

    def fail(self, kind: str, number: int, code: int) -> None:
        """Let the ``number``-th next call of ``kind`` fail: ``pwrite``, ``fsync``, ``fsync elsewhere``, and so on."""
        self._plan, self._counts, self.calls, self.fired = (kind, number, code), {}, [], 0
        self._failed = ""
        self._failure_known.clear()

    def _call(self, name: str, fd: int, *rest: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
        kind = name if path.endswith(".distcp") else f"{name} elsewhere"
        with self._lock:
            count = self._counts[kind] = self._counts.get(kind, 0) + 1
            failing = self._plan is not None and self._plan[:2] == (kind, count)
            if failing:
                self.fired, self._failed = self.fired + 1, path
            self.calls.append((kind, path, failing))
        if failing and self._plan is not None:
            code = self._plan[2]
            if code == 0:
                return 0  # a write of no bytes
            raise OSError(code, os.strerror(code))
        if path == self._failed and not self._failure_known.wait(self.failure_wait_seconds):
            self._failure_known.set()
        return self._real[name](fd, *rest)

    def count(self, kind: str) -> int:
        return sum(made == kind for made, _, _ in self.calls)

    def after_failure(self) -> list[str]:
        """Return the calls on the failed file, by any thread, after the failure."""
        at, path = next((number, call[1]) for number, call in enumerate(self.calls) if call[2])
        return [kind for kind, other, _ in self.calls[at + 1 :] if other == path]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


FAULTS = [
    *(("pwrite", number, errno.EIO) for number in (1, 4, 7)),
    *(pytest.param("pwrite", number, errno.EIO, marks=pytest.mark.slow) for number in (2, 3, 5, 6)),
    *(("pwrite", number, errno.ENOSPC) for number in (1, 4, 7)),
    *(("pwrite", number, 0) for number in (1, 7)),
    ("fsync", 1, errno.EIO),
    ("fsync", 1, errno.ENOSPC),
    ("ftruncate", 1, errno.EIO),
]


@pytest.mark.parametrize("way", SAVE_METHODS)
@pytest.mark.parametrize(("kind", "number", "code"), FAULTS, ids=lambda value: str(value))
def test_failing_call_on_a_shard_raises_and_keeps_the_previous_checkpoint(
    kind: str, number: int, code: int, way: str, file_uri: str, local_root: Path, disk: Disk
) -> None:
    save(f"{file_uri}/step-1", state_of(1), way)
    disk.failure_wait_seconds = 60.0
    disk.fail(kind, number, code)
    expected = CapacityError if code in (0, errno.ENOSPC) else StoreError
    with pytest.raises(expected, match=r"distcp"):
        save(f"{file_uri}/step-2", state_of(2), way)
    assert disk.fired == 1
    later = disk.after_failure()
    assert len(later) <= 2 and "fsync" not in later, "only calls that the other two threads had begun"
    if kind == "fsync":
        assert not later
    assert shards(local_root, f"{file_uri}/step-2") == []
    assert Journal(local_root).entries() == []
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-1"
    assert loads_equal(f"{file_uri}/step-1", 1, local_root)
    save(f"{file_uri}/step-2", state_of(2), way)
    assert loads_equal(f"{file_uri}/step-2", 2, local_root)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, 0])
def test_failing_write_ahead_continues_or_raises(
    number: int, code: int, file_uri: str, local_root: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A4: the save continues with another file, or raises if the flush had already taken the failed one."""
    monkeypatch.setattr(write_ahead, "BYTES_MIN", 64 * KiB)
    monkeypatch.setattr(write_ahead, "WRITE_BYTES", 64 * KiB)
    take = write_ahead.TempFile.take

    def take_late(self: write_ahead.TempFile, path: Path) -> int | None:
        """Wait for a write before the file gets its name, also on a loaded machine."""
        for _ in Poll(60.0, LOCAL):
            if self.owner.is_stopped or disk.count("pwrite elsewhere"):
                break
        return take(self, path)

    monkeypatch.setattr(write_ahead.TempFile, "take", take_late)
    save(f"{file_uri}/step-1", state_of(1), "async")
    disk.fail("pwrite elsewhere", number, code)
    try:
        save(f"{file_uri}/step-2", state_of(2), "async")
        raised = False
    except (CapacityError, StoreError):
        raised = True
    assert disk.count("pwrite elsewhere") >= 1, "no write before the file had a name"
    assert disk.fired == (disk.count("pwrite elsewhere") >= number)
    assert not raised or disk.fired
    assert (shards(local_root, f"{file_uri}/step-2") == []) == raised
    assert loads_equal(f"{file_uri}/step-1", 1, local_root)
    if not raised:
        assert loads_equal(f"{file_uri}/step-2", 2, local_root)
    disk.fail("nothing", 1, 0)
    save(f"{file_uri}/step-2", state_of(2), "async")
    assert loads_equal(f"{file_uri}/step-2", 2, local_root)


def test_control_save_without_a_fault(file_uri: str, local_root: Path, disk: Disk) -> None:
    """Control: the same save and checks without a fault; also the number of calls that can fail."""
    disk.fail("pwrite", 1000, errno.EIO)
    save(f"{file_uri}/step-1", state_of(1), drain=False)
    assert (disk.fired, disk.count("pwrite"), disk.count("fsync"), disk.count("ftruncate")) == (0, 7, 1, 1)
    assert loads_equal(f"{file_uri}/step-1", 1, local_root)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 13))
def test_failing_fsync_of_names_or_manifests_leaves_latest_loadable(
    number: int, file_uri: str, local_root: Path, disk: Disk
) -> None:
    """Directories, journal, metadata, manifest: the checkpoint that ``latest`` names loads."""
    save(f"{file_uri}/step-1", state_of(1), drain=False)
    disk.fail("fsync elsewhere", number, errno.EIO)
    try:
        save(f"{file_uri}/step-2", state_of(2), drain=False)
        raised = False
    except TierckptError:
        raised = True
    reached = disk.count("fsync elsewhere") >= number
    assert disk.fired == reached
    newest = tierckpt.latest(file_uri, drain=False)
    assert newest is not None
    step = int(newest[-1])
    assert step == 2 or raised, "a save returned without a commit"
    assert loads_equal(newest, step, local_root)
    save(f"{file_uri}/step-3", state_of(3), drain=False)
    assert loads_equal(f"{file_uri}/step-3", 3, local_root)


def test_control_swallowed_write_error_is_found(
    file_uri: str, local_root: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with this seeded bug, the save of a torn shard succeeds."""
    real = flush.ShardFile.write

    def swallow_error(self: Any, view: memoryview, offset: int) -> None:
        try:
            real(self, view, offset)
        except OSError:
            pass

    monkeypatch.setattr(flush.ShardFile, "write", swallow_error)
    disk.fail("pwrite", 3, errno.EIO)
    save(f"{file_uri}/step-1", state_of(1), drain=False)
    assert disk.fired == 1
    with pytest.raises((TierckptError, AssertionError, dcp.CheckpointException)):  # torch's, for a damaged head
        assert loads_equal(f"{file_uri}/step-1", 1, local_root)


def test_failed_saves_release_their_staging_memory(
    file_uri: str, local_root: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one slot, unobserved errors of several saves do not use up the staging memory."""
    monkeypatch.setattr(slots, "SLOT_SECONDS", 5)
    stager, futures = tierckpt.TierStager(checkpoints_in_flight_max=1), []
    for step in range(1, 4):
        disk.fail("pwrite", 2, errno.EIO)
        writer = tierckpt.TierStorageWriter(f"{file_uri}/step-{step}", chunk_size_bytes=64 * KiB)
        future = dcp.async_save(state_of(step), storage_writer=writer, async_stager=stager, no_dist=True)
        assert future.exception(60) is not None
        futures.append(future)
    disk.fail("nothing", 1, 0)
    writer = tierckpt.TierStorageWriter(f"{file_uri}/step-9", chunk_size_bytes=64 * KiB)
    dcp.async_save(state_of(9), storage_writer=writer, async_stager=stager, no_dist=True).result(60)
    assert loads_equal(f"{file_uri}/step-9", 9, local_root)


def test_checkpointer_raises_the_error_at_the_next_call(file_uri: str, disk: Disk) -> None:
    checkpointer = tierckpt.Checkpointer(file_uri)
    checkpointer.save(1, state_of(1))
    checkpointer.wait()
    disk.fail("fsync", 1, errno.EIO)
    checkpointer.save(2, state_of(2))
    with pytest.raises(StoreError, match="Input/output error"):
        checkpointer.wait("local")
    assert disk.fired == 1 and not disk.after_failure()
    checkpointer.save(3, state_of(3))
    checkpointer.wait()
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-3"
    restored = zeros_like(state_of(3))
    assert checkpointer.restore(restored) == 3 and same(restored["w"], state_of(3)["w"])
    checkpointer.close()


# --- full disks ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount a file system of 8 MiB on a loop device: ``small_disk("-O", "^extent")``."""
    place, image = tmp_path / "small", tmp_path / "small.img"

    def mount(*options: str) -> Path:
        needs("mkfs.ext4")
        place.mkdir()
        with image.open("wb") as file:
            file.truncate(8 * MiB)
        subprocess.run(["/usr/sbin/mkfs.ext4", "-q", "-m", "0", *options, image], check=True)
        subprocess.run(["mount", "-o", "loop", image, place], check=True)
        return place

    yield mount
    if place.is_dir():
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize(
    ("detected_by", "way"),
    [
        ("fallocate", "sync"),
        ("pwrite", "async"),
        pytest.param("fallocate", "async", marks=pytest.mark.slow),
        pytest.param("pwrite", "sync", marks=pytest.mark.slow),
    ],
)
def test_full_disk_raises_capacity_error(
    detected_by: str,
    way: str,
    small_disk: Callable[..., Path],
    file_uri: str,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The space estimate is disabled, as if others filled the disk meanwhile: the file system returns ENOSPC."""
    monkeypatch.setattr("tierckpt.cache.space.make_room", lambda *_, **__: None)
    root = small_disk(*(["-O", "^extent,^64bit,^has_journal"] if detected_by == "pwrite" else []))
    options = {"local_root": root, "drain": False}
    save(f"{file_uri}/step-1", state_of(1), way, **options)
    free = shutil.disk_usage(root).free
    disk.fail("nothing", 1, 0)
    with pytest.raises(CapacityError, match="no room") as caught:
        save(f"{file_uri}/step-2", {**state_of(2), "blob": os.urandom(9 * MiB)}, way, **options)
    assert caught.value.context["tier"] == "local"
    assert (disk.count("pwrite") > 0) == (detected_by == "pwrite")
    assert disk.count("fsync") == 0
    assert shards(root, f"{file_uri}/step-2") == []
    assert abs(shutil.disk_usage(root).free - free) < 128 * KiB
    assert loads_equal(f"{file_uri}/step-1", 1, root)
    save(f"{file_uri}/step-3", state_of(3), way, **options)
    assert loads_equal(f"{file_uri}/step-3", 3, root)


# --- kernel faults and kills --------------------------------------------------------------------------------------


class Outcomes:
    """Outcomes of ``flush_children``. Both programs run in parallel with earlier tests."""

    def __init__(self, folder: Path, kills: list[str]) -> None:
        self._jobs = {"kills": start(flush_children.kills, folder / "kills", named=kills)}
        if shutil.which("strace") is not None:
            self._jobs["traced"] = start(flush_children.traced, folder / "traced")
        self._found: dict[str, Any] = {}

    def of(self, what: str) -> Any:
        if what not in self._found:
            if what not in self._jobs:
                pytest.skip("strace is not installed")
            self._found[what] = self._jobs[what].result(CHILDREN_SECONDS)
        return self._found[what]


@pytest.fixture(scope="module", autouse=True)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Run the kills that tests of this session need."""
    asked = [
        item
        for item in request.session.items
        if getattr(item, "originalname", "") == test_kill_9_keeps_the_last_commit.__name__
    ]
    kills = ["{phase}/{way}".format_map(item.callspec.params) for item in asked]  # type: ignore[attr-defined]
    return Outcomes(tmp_path_factory.mktemp("children"), kills)


def check_restart(found: dict[str, Any], newest: int) -> None:
    assert found["examined"] == 0, found["error of examine"]
    assert found["newest"] == newest
    assert found["loads"] == [True, True], "does not load by tierckpt's and torch's readers"
    assert found["again"] == "" and found["again_loads"], "the job cannot save again"
    assert found["shards_left"] == 1 and found["journal_left"] == 0, "files of the dead attempt are left"


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "way"), ACTS)
def test_kill_9_keeps_the_last_commit(phase: str, way: str, outcomes: Outcomes) -> None:
    if phase == "while staging" and way == "sync":
        assert f"{phase} {way}" not in outcomes.of("kills")["outcome"], "dcp.save has no staging"
        return
    found = outcomes.of("kills")["outcome"][f"{phase} {way}"]
    assert found["code"] == -9 and found["saved"] is None, "the process was not killed"
    assert found["ahead"] == (way == "ahead" and phase != "while staging"), "A1"
    check_restart(found, 2 if phase == "after the commit" else 1)


def test_without_a_kill_both_checkpoints_load(outcomes: Outcomes) -> None:
    found = outcomes.of("kills")["outcome"]["sync"]
    assert found["code"] == 0 and found["saved"] == ["", ""]
    check_restart(found, 2)


def test_control_premature_commit_is_found(outcomes: Outcomes) -> None:
    """Control of the kills."""
    found = outcomes.of("kills")["outcome"][f"{SEEDED} sync"]
    assert found["code"] == -9
    assert found["examined"] != 0 or found["loads"] != [True, True]


def test_killed_process_leaks_no_shared_memory(outcomes: Outcomes) -> None:
    before, staged, after = outcomes.of("kills")["memory"]
    assert staged - before > 192, "the shared copy of 256 MiB is not visible"
    assert after - before < 64
    assert not {name for name in os.listdir("/dev/shm") if "tierckpt" in name} - EXISTING_SHM_FILES  # noqa: PTH208


@pytest.mark.parametrize("name", TRACED)
def test_errors_from_the_kernel(name: str, outcomes: Outcomes) -> None:
    found, error = outcomes.of("traced")[name], TRACED[name][1]
    assert found["first"] == ""
    assert found["fired"] == (0 if name == "nothing" else 1), "the fault was not injected, or the call was retried"
    assert (found["code"], found["error"]) == ((-9, None) if error is None else (0, error))
    if error:
        failed = [number for number, line in enumerate(found["shard_calls"]) if "(INJECTED)" in line]
        assert all(number == len(found["shard_calls"]) - 1 for number in failed), "further calls on the failed file"
    check_restart(found, 2 if error == "" else 1)
