"""Failing disks and killed processes during a save: the previous checkpoint stays whole.

After an error: the save raises a typed error, makes no further call on the failed file, and leaves no shard of the
attempt; the previous checkpoint loads bit for bit, and the next save works. After a kill: the same for the next
process, and no shared memory is leaked.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import tierckpt
from tests.fault.runner import start
from tests.fault.scenario_tools import after, before, die, until
from tests.fault.sweep import child
from tests.fault.sweep.child import CHILD_SECONDS, Child, Ended
from tests.services import in_full, needs, shared_memory_alone
from tests.states import load, raises_ours, same, zeros_like
from tierckpt.arena import capacity, slots
from tierckpt.checkpoint import local_commit
from tierckpt.checkpoint.journal import Journal
from tierckpt.dcp import staging
from tierckpt.disk import io_tuner
from tierckpt.disk.io_tuner import IoShape, WriteTuner
from tierckpt.errors import CapacityError, StoreError, TierckptError
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.poll import LOCAL, Poll
from tierckpt.save import flush, write_ahead

KiB, MiB = 1 << 10, 1 << 20
EXISTING_SHM_FILES = frozenset(os.listdir("/dev/shm"))  # noqa: PTH208
SAVE_METHODS = ("sync", "async")
CHILDREN_SECONDS = 400.0
"""Time limit of ``kills`` and ``traced``, with their waits, on a slow machine."""

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
            stager = tierckpt.TierStager(shared=way == "shared", settings=writer.settings)
            dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True).result(60)


def try_to_save(uri: str, step: int, way: str, **options: Any) -> str:
    """Save ``step``. Returns the error's name, or nothing."""
    if way == "ahead":  # from the second save on
        write_ahead.BYTES_MIN = write_ahead.WRITE_BYTES = 64 * KiB
        before(write_ahead.WriteAhead, "start", lambda _: (root().parent / BEGAN_AHEAD).touch())
    try:
        save(f"{uri}/step-{step}", state_of(step), way, **options)
    except TierckptError as error:
        return type(error).__name__
    return ""


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
    error = try_to_save(file_uri, 2, "async")
    assert error in ("", "CapacityError", "StoreError")
    assert disk.count("pwrite elsewhere") >= 1, "no write before the file had a name"
    assert disk.fired == (disk.count("pwrite elsewhere") >= number)
    assert not error or disk.fired
    assert (shards(local_root, f"{file_uri}/step-2") == []) == bool(error)
    assert loads_equal(f"{file_uri}/step-1", 1, local_root)
    if not error:
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
    error = try_to_save(file_uri, 2, "sync", drain=False)
    reached = disk.count("fsync elsewhere") >= number
    assert disk.fired == reached
    newest = tierckpt.latest(file_uri, drain=False)
    assert newest is not None
    step = int(newest[-1])
    assert step == 2 or error, "a save returned without a commit"
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


# --- kills: acts of children that ``kills`` and ``traced`` fork before anything there has a thread -----------------

WAYS = ("sync", "private", "shared")
BEGAN_AHEAD = "began-ahead"
TRIES = 3
IN_CHILD = {"staging_memory": "private"}
"""No agent finishes these saves."""


def examine(uri: str) -> dict[str, Any]:
    """Restart the job: find the newest step, load it with both readers, and save again."""
    newest = str(tierckpt.latest(uri))
    step = int(newest[-1])
    loads = loads_equal(newest, step, root())
    again = try_to_save(uri, 2, "sync", **IN_CHILD)
    tierckpt.wait(f"{uri}/step-2", timeout_seconds=60)
    until(lambda: not journal_files(), 10)  # the mover lets go of an entry after it has told of its end
    again_loads, left = loads_equal(f"{uri}/step-2", 2, root()), shards(root(), f"{uri}/step-2")
    return {"newest": step, "loads": loads, "again": again, "again_loads": again_loads, "shards_left": len(left)}


def journal_files() -> list[Path]:
    return [path for path in root().rglob("journal/*") if path.is_file()]


def root() -> Path:
    return Path(os.environ["TIERCKPT_LOCAL_ROOT"])


def in_write(number: int) -> None:
    """Half of the n-th write reaches the disk."""
    real, count = os.pwrite, iter(range(1, 1000))

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        if next(count) == number:
            real(fd, view[: len(view) // 8192 * 4096], offset)
            die()
        return real(fd, view, offset)

    os.pwrite = pwrite


def in_half_of_the_copy() -> None:
    real = staging.copy_tensors

    def half(pairs: Any) -> None:
        real(pairs[: len(pairs) // 2])
        die()

    staging.copy_tensors = half


PHASES: dict[str, Callable[[], None]] = {
    "while staging": in_half_of_the_copy,
    "before the shard is opened": lambda: before(flush.ShardFile, "open"),
    "after the shard is opened": lambda: after(flush.ShardFile, "open"),
    "in the first write": lambda: in_write(1),
    "in the fourth write": lambda: in_write(4),
    "in the last write": lambda: in_write(7),
    "before the fsync": lambda: before(flush.ShardFile, "finish"),
    "after the fsync": lambda: after(flush.ShardFile, "finish"),
    "before the metadata is kept": lambda: before(local_commit, "write_attempt_metadata"),
    "after the metadata is kept": lambda: after(local_commit, "write_attempt_metadata"),
    "before the commit": lambda: before(local_commit, "commit_local"),
    "after the commit": lambda: after(local_commit, "commit_local"),
}
AHEAD_PHASES = (
    "while staging",
    "after the shard is opened",
    "in the first write",
    "in the fourth write",
    "before the fsync",
)
ACTS = [*((phase, way) for phase in PHASES for way in WAYS), *((phase, "ahead") for phase in AHEAD_PHASES)][1:]
"""The first one is left out: ``dcp.save`` has no staging."""
ACTS = ACTS if in_full([1]) else ACTS[1::2]
SEEDED = "after a commit of shards that were not written"


def commit_too_early() -> None:
    """The bug that all of this is there to find."""
    flush.ShardFile.write = lambda *_: None  # type: ignore[method-assign]
    after(local_commit, "commit_local")


def in_child(folder: Path, act: Callable[[], Any]) -> Callable[[], Any]:
    """What a child runs that has its local root in ``folder``."""

    def run() -> Any:
        torch.set_num_threads(1)
        os.environ["TIERCKPT_LOCAL_ROOT"] = str(folder / "local")
        return act()

    return run


def run(folder: Path, act: Callable[[], Any]) -> Ended:
    return child.run(in_child(folder, act), "")


def kill(folder: Path, phase: str, way: str) -> dict[str, Any]:
    """Save step 1, die in step 2, restart."""
    uri = str(folder / "shared")

    def act() -> Any:
        error = try_to_save(uri, 1, way, **IN_CHILD)
        tierckpt.wait(f"{uri}/step-1", timeout_seconds=60)
        if phase:
            {**PHASES, SEEDED: commit_too_early}[phase]()
        return [error, try_to_save(uri, 2, way, **IN_CHILD)]

    folder.mkdir()
    saved = run(folder, act)
    began_ahead, examined = (folder / BEGAN_AHEAD).exists(), run(folder, lambda: examine(uri))
    return {"code": saved.code, "saved": saved.answer, "ahead": began_ahead, **outcome_of(examined)}


def outcome_of(examined: Ended) -> dict[str, Any]:
    return {"examined": examined.code, "error of examine": examined.text, **(examined.answer or {})}


def kills(folder: Path, named: list[str]) -> dict[str, Any]:
    io_tuner.SHAPES = (IoShape(1, 64 * KiB),)
    outcome = {}
    for number, (phase, _, way) in enumerate(act.partition("/") for act in ("/sync", f"{SEEDED}/sync", *named)):
        outcome[f"{phase} {way}".strip()] = kill(folder / str(number), phase, way)
    with shared_memory_alone():
        return {"outcome": outcome, "memory": memory(folder / "memory")}


def memory(folder: Path) -> list[int]:
    """MiB of shared memory in use: before, while a child holds a staged checkpoint, and after it was killed."""
    seen = [shmem_bytes()]

    def act() -> None:
        staged = tierckpt.TierStager(shared=True).stage({"w": torch.ones(64 * MiB)})
        (folder / "staged").write_text("")
        time.sleep(CHILD_SECONDS)
        del staged

    folder.mkdir()
    staging = Child(in_child(folder, act), "")
    staging.go()
    until((folder / "staged").exists)
    seen.append(shmem_bytes())
    os.kill(staging.pid, signal.SIGKILL)
    staging.end()
    deadline = time.monotonic() + 5
    while shmem_bytes() > seen[0] + 64 * MiB and time.monotonic() < deadline:
        time.sleep(0.05)
    return [size // MiB for size in (*seen, shmem_bytes())]


def shmem_bytes() -> int:
    return capacity.meminfo_bytes(Path("/proc/meminfo"))["Shmem"]


# --- with the kernel's own answers --------------------------------------------------------------------------------

TRACED = {
    "EIO on the 1st write": ("pwrite64:error=EIO:when={write1}", "StoreError"),
    "EIO on the 5th write": ("pwrite64:error=EIO:when={write5}", "StoreError"),
    "ENOSPC on the 2nd write": ("pwrite64:error=ENOSPC:when={write2}", "CapacityError"),
    "a 3rd write that writes nothing": ("pwrite64:retval=0:when={write3}", "CapacityError"),
    "EIO on every fsync": ("fsync:error=EIO", "StoreError"),
    "EIO on the fsync of the shard": ("fsync:error=EIO:when={shard}", "StoreError"),
    "ENOSPC from fallocate": ("fallocate:error=ENOSPC", "CapacityError"),
    "fallocate not supported": ("fallocate:error=EOPNOTSUPP", ""),
    "EROFS when the shard is opened": ("openat:error=EROFS:when={open}", "PermissionDeniedError"),
    "killed in the 4th write": ("pwrite64:signal=SIGKILL:when={write4}", None),
    "killed in the fsync of the shard": ("fsync:signal=SIGKILL:when={shard}", None),
    "nothing": ("pwrite64:error=EIO:when=60000", ""),
}
"""An injection of strace, and the error of the save; "": it works, None: it is killed."""


def traced(folder: Path) -> dict[str, Any]:
    """Each of TRACED, by strace, which makes the kernel answer as told to the process that saves."""
    io_tuner.SHAPES = (IoShape(1, 64 * KiB),)
    positions = {}
    for call, name in (("fsync", "shard"), ("openat", "open")):
        calls = trace(folder / f"count-{call}", f"{call}:delay_enter=1")["calls"]
        positions[name] = 1 + next(number for number, line in enumerate(calls) if ".distcp" in line)
    calls = trace(folder / "count-pwrite64", "pwrite64:delay_enter=1")["calls"]
    first = next(number for number, line in enumerate(calls) if ".distcp" in line)  # small files of state come before
    positions |= {f"write{count}": first + count for count in range(1, 6)}
    found = {}
    for number, (name, (injection, _)) in enumerate(TRACED.items()):
        for again in range(TRIES):
            found[name] = trace(folder / f"{number}-{again}", injection.format(**positions))
            if "{" not in injection or ".distcp" in found[name]["hit"]:
                break  # else a call came in between that is not there each time, and took the shard's number
    return found


def trace(folder: Path, injection: str) -> dict[str, Any]:
    folder.mkdir()
    uri, log = str(folder / "shared"), folder / "strace"
    first = run(folder, lambda: try_to_save(uri, 1, "sync", **IN_CHILD))
    call = injection.partition(":")[0]
    act = in_child(folder, lambda: try_to_save(uri, 2, "sync", **IN_CHILD))
    ended = child.trace(act, "", log, [injection], f"{call},pwrite64,fsync")
    lines = log.read_text().splitlines()
    return {
        "first": first.answer,
        "code": ended.code,
        "error": ended.answer,
        "fired": sum("(INJECTED)" in line or "SIGKILL" in line for line in lines),
        "hit": next((line for line in lines if "(INJECTED)" in line), lines[-2] if len(lines) > 1 else ""),
        "calls": [line for line in lines if line.startswith(f"{call}(")],
        "shard_calls": [line for line in lines if ".distcp" in line and line.startswith(("pwrite64(", "fsync("))],
        **outcome_of(run(folder, lambda: examine(uri))),
    }


# --- the tests of kernel faults and kills -------------------------------------------------------------------------


class Outcomes:
    """Outcomes of ``kills`` and ``traced``. Both programs run in parallel with earlier tests."""

    def __init__(self, folder: Path, acts: list[str]) -> None:
        self._jobs = {"kills": start(kills, folder / "kills", named=acts)}
        if shutil.which("strace") is not None:
            self._jobs["traced"] = start(traced, folder / "traced")
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
    acts = ["{phase}/{way}".format_map(item.callspec.params) for item in asked]  # type: ignore[attr-defined]
    return Outcomes(tmp_path_factory.mktemp("children"), acts)


def check_restart(found: dict[str, Any], newest: int) -> None:
    assert found["examined"] == 0, found["error of examine"]
    assert found["newest"] == newest
    assert found["loads"], "does not load by tierckpt's and torch's readers"
    assert found["again"] == "" and found["again_loads"], "the job cannot save again"
    assert found["shards_left"] == 1, "files of the dead attempt are left"


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "way"), ACTS)
def test_kill_9_keeps_the_last_commit(phase: str, way: str, outcomes: Outcomes) -> None:
    found = outcomes.of("kills")["outcome"][f"{phase} {way}"]
    assert found["code"] == -9 and found["saved"] is None, "the process was not killed"
    assert found["ahead"] == (way == "ahead" and phase != "while staging"), "A1"
    check_restart(found, 2 if phase == "after the commit" else 1)


def test_without_a_kill_both_checkpoints_load(outcomes: Outcomes) -> None:
    found = outcomes.of("kills")["outcome"]["sync"]
    assert found["code"] == 0 and found["saved"] == ["", ""]
    check_restart(found, 2)


def test_control_premature_commit_is_found(outcomes: Outcomes) -> None:
    found = outcomes.of("kills")["outcome"][f"{SEEDED} sync"]
    assert found["code"] == -9
    assert found["examined"] != 0 or not found["loads"]


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
