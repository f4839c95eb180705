"""Processes that save, fail and die, one after another. ``test_flush_faults.py`` judges them.

``kills`` and ``traced`` fork a child for every act before anything here has a thread.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import tierckpt
from tests.fault.scenario_tools import after, before, die, until
from tests.fault.sweep import child
from tests.fault.sweep.child import CHILD_SECONDS, Child, Ended
from tests.services import in_full, shared_memory_alone
from tests.states import raises_ours, same
from tierckpt.arena import capacity
from tierckpt.checkpoint import local_commit
from tierckpt.dcp import staging
from tierckpt.disk import io_tuner
from tierckpt.disk.io_tuner import IoShape
from tierckpt.errors import TierckptError
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.save import flush, write_ahead

KiB, MiB = 1 << 10, 1 << 20
WAYS = ("sync", "private", "shared")
BEGAN_AHEAD = "began-ahead"
TRIES = 3


# --- the acts of the children --------------------------------------------------------------------------------------


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(150_000, generator=generator), "b": torch.randn(7, generator=generator), "step": step}


def save(uri: str, step: int, way: str) -> str:
    """Save ``step``. Returns the error's name, or nothing."""
    options: dict[str, Any] = {
        "chunk_size_bytes": 64 * KiB,
        "staging_memory": "private",
    }  # no agent finishes these saves
    writer = tierckpt.TierStorageWriter(f"{uri}/step-{step}", **options)
    try:
        with raises_ours():
            if way == "sync":
                dcp.save(state_of(step), storage_writer=writer, no_dist=True)
            else:
                if way == "ahead":  # from the second save on
                    write_ahead.BYTES_MIN = write_ahead.WRITE_BYTES = 64 * KiB
                    before(write_ahead.WriteAhead, "start", lambda _: (root().parent / BEGAN_AHEAD).touch())
                stager = tierckpt.TierStager(shared=way == "shared", **options)
                dcp.async_save(state_of(step), storage_writer=writer, async_stager=stager, no_dist=True).result(60)
    except TierckptError as error:
        return type(error).__name__
    return ""


def examine(uri: str) -> dict[str, Any]:
    """Restart the job: find the newest step, load it with both readers, and save again."""
    newest = tierckpt.latest(uri)
    step = int(newest.rpartition("-")[2]) if newest else 0
    loads = []
    for reader in (tierckpt.TierStorageReader(newest), FileSystemReader(local_dir(root(), parse_uri(str(newest))))):
        target = {"w": torch.zeros(150_000), "b": torch.zeros(7), "step": 0}
        dcp.load(target, storage_reader=reader, no_dist=True)
        loads.append(same(target, state_of(step)))
    again = save(uri, 2, "sync")
    tierckpt.wait(f"{uri}/step-2", timeout_seconds=60)
    target = {"w": torch.zeros(150_000)}
    dcp.load(target, storage_reader=tierckpt.TierStorageReader(f"{uri}/step-2"), no_dist=True)
    deadline = time.monotonic() + 10
    while journal_files() and time.monotonic() < deadline:  # the mover lets go of an entry after it has told of its end
        time.sleep(0.01)
    left = [path.name for path in local_dir(root(), parse_uri(f"{uri}/step-2")).rglob("*.distcp")]
    return {
        "newest": step,
        "loads": loads,
        "again": again,
        "again_loads": same(target["w"], state_of(2)["w"]),
        "shards_left": len(left),
        "journal_left": len(journal_files()),
    }


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
    "in the last write": lambda: in_write(10),
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
ACTS = [*((phase, way) for phase in PHASES for way in WAYS), *((phase, "ahead") for phase in AHEAD_PHASES)]
ACTS = ACTS if in_full([1]) else ACTS[::2]
SEEDED = "after a commit of shards that were not written"


def commit_too_early() -> None:
    """The bug that all of this is there to find."""
    flush.ShardFile.write = lambda *_: None  # type: ignore[method-assign]
    after(local_commit, "commit_local")


# --- the parent ---------------------------------------------------------------------------------------------------


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
        error = save(uri, 1, way)
        tierckpt.wait(f"{uri}/step-1", timeout_seconds=60)
        if phase:
            {**PHASES, SEEDED: commit_too_early}[phase]()
        return [error, save(uri, 2, way)]

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
        if not (phase == "while staging" and way == "sync"):
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
    first = run(folder, lambda: save(uri, 1, "sync"))
    call = injection.partition(":")[0]
    ended = child.trace(in_child(folder, lambda: save(uri, 2, "sync")), "", log, [injection], f"{call},pwrite64,fsync")
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
