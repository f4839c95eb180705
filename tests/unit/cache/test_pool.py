"""Entries of the node cache: reserved and evictable ones, and their files (H1 to H3 of pool.py, E3 of space.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tierckpt.cache import partial_entry
from tierckpt.cache import pool as module
from tierckpt.cache.file_set import FileSet, FileSpec
from tierckpt.cache.partial_entry import PartialEntry, remove_dir
from tierckpt.cache.pool import Pool
from tierckpt.cache.space import reserve, shrink_cache
from tierckpt.config import Settings
from tierckpt.errors import CapacityError
from tierckpt.quantities import human_bytes

KIB = 1024
SIZE = 64 * KIB
QUOTA = 3 * SIZE


def model(name: str, size_bytes: int = SIZE, version: str = "1") -> FileSet:
    return FileSet(f"s3://bucket/{name}", (FileSpec("weights.bin", "weights.bin", size_bytes, version),), 16 * KIB)


@pytest.fixture
def pool(local_root: Path) -> Pool:
    return Pool(settings(local_root))


def settings(local_root: Path) -> Settings:
    """Only the quota limits these tests: the free space of the test machine must not matter."""
    return Settings.load(local_root=local_root, cache_bytes_max=QUOTA, local_high_water=1.0)


def fill(pool: Pool, frozen: FileSet, *, whole: bool = True) -> str:
    """A prefetch without a store. If not ``whole``, the process ends halfway."""
    lease = pool.lease(frozen.name)
    try:
        filling = PartialEntry(pool.directory(frozen.name), frozen, preallocate=True)
        try:
            reserve(pool, frozen, frozen.size_bytes)
        except CapacityError:
            remove_dir(filling.incoming)
            raise
        chunks = list(frozen.chunks())
        for index, chunk in chunks if whole else chunks[: len(chunks) // 2]:
            filling.store_chunk(index, chunk, os.urandom(frozen.chunk_range(index, chunk).size_bytes))
        if whole:
            filling.publish()
        filling.close()
    finally:
        lease.close()
    return frozen.name


def present(pool: Pool) -> set[str]:
    return {row.uri.rpartition("/")[2] for row in pool.rows()}


HOLD = """
import sys, time
from pathlib import Path
from tierckpt.cache.pool import Pool
from tierckpt.config import Settings
pool = Pool(Settings.load(local_root=Path(sys.argv[1])))
lease = pool.lease(sys.argv[2])
print("held", flush=True)
time.sleep(120)
"""


@pytest.fixture
def reader(local_root: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a process that holds an entry."""
    processes = []

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(local_root), name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "held"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_space_is_reserved_first_by_evicting_the_least_recently_used(pool: Pool) -> None:
    for name in "abc":
        fill(pool, model(name))
    pool.used(model("a").name)
    assert present(pool) == {"a", "b", "c"}
    filling = PartialEntry(pool.directory(model("d").name), model("d"), preallocate=False)
    room = reserve(pool, model("d"), SIZE)
    assert [row.uri for row in room.evicted] == ["s3://bucket/b"]
    assert not pool.directory(model("b").name).exists()
    assert sum(row.reserved_bytes for row in pool.rows()) == QUOTA
    filling.close()


def test_abandoned_partial_entries_are_evicted_first(pool: Pool) -> None:
    fill(pool, model("a"))
    fill(pool, model("b"))
    fill(pool, model("half"), whole=False)
    fill(pool, model("d"))
    assert present(pool) == {"a", "b", "d"}


def test_pinned_and_leased_entries_are_never_evicted(
    pool: Pool, reader: Callable[[str], subprocess.Popen[str]]
) -> None:
    leased, pinned, third = (fill(pool, model(name)) for name in ("leased", "pinned", "third"))
    process = reader(leased)
    pool.pin(pinned)
    fill(pool, model("fourth"))
    assert present(pool) == {"leased", "pinned", "fourth"}
    assert not pool.directory(third).exists()
    with pytest.raises(CapacityError) as caught:
        reserve(pool, model("large", 2 * SIZE), 2 * SIZE)
    facts = caught.value.context
    assert (facts["needed_bytes"], facts["free_bytes"], facts["evictable_bytes"]) == (2 * SIZE, 0, SIZE)
    assert (facts["pinned_bytes"], facts["leased_bytes"]) == (SIZE, SIZE)
    assert facts["pinned"] == f"s3://bucket/pinned ({human_bytes(SIZE)})"
    assert facts["leased"] == f"s3://bucket/leased ({human_bytes(SIZE)})"
    assert present(pool) == {"leased", "pinned", "fourth"}, "a refusal evicts nothing"

    process.send_signal(signal.SIGSTOP)  # stopped, with its files still open
    assert pool.leases(leased) in ([process.pid], [0])  # 0: the kernel does not report the owner
    assert not pool.evict(leased)
    process.kill()
    process.wait()
    assert pool.leases(leased) == []
    reserve(pool, model("large", 2 * SIZE), 2 * SIZE)
    assert "leased" not in present(pool)
    assert not pool.state_dir(leased).exists(), "a killed reader leaves no files"


def test_shrinking_the_quota_evicts(pool: Pool) -> None:
    for name in "abc":
        fill(pool, model(name))
    pool.pin(model("a").name)
    shrink_cache(pool, SIZE + 1)
    assert present(pool) == {"a"}
    shrink_cache(pool, SIZE)
    assert present(pool) == {"a"}


def test_reserved_blocks_do_not_count_as_used(pool: Pool, local_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with 20 used, 20 free, and 60 blocks reserved for root or the host is half full, as in df."""
    fill(pool, model("a"))
    status = os.statvfs_result((SIZE, SIZE, 100, 80, 20, 1000, 1000, 1000, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    fill(Pool(Settings.load(local_root=local_root, local_high_water=0.7)), model("b"))
    assert present(pool) == {"a", "b"}
    fill(Pool(Settings.load(local_root=local_root, local_high_water=0.4)), model("c"))
    assert present(pool) == {"c"}


# --- readers and evictors --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_leased_entry_stays_visible(pool: Pool) -> None:
    """H2, many times: a reader that sees the entry while it holds its lease sees it until it releases the lease."""
    torn, kept, evicted = [], 0, 0
    for _ in range(25):
        name = fill(pool, model("a"))
        line, found = threading.Barrier(2), []

        def read(name: str = name, line: threading.Barrier = line, found: list[bool] = found) -> None:
            other = Pool(pool.settings)
            line.wait()
            lease = other.lease(name)
            if (other.directory(name) / "weights.bin").exists():
                time.sleep(0.01)
                found.append((other.directory(name) / "weights.bin").exists())
            lease.close()

        thread = threading.Thread(target=read)
        thread.start()
        line.wait()
        went = pool.evict(name)
        thread.join()
        torn += [True for here in found if not here]
        kept, evicted = kept + (not went), evicted + went
        assert went or found == [True]
    assert torn == []
    assert kept + evicted == 25


@pytest.mark.parametrize("where", ["mark", "rename", "delete"])
def test_a_crash_during_an_eviction_leaves_the_entry_whole_or_invisible(where: str, local_root: Path) -> None:
    pool = Pool(settings(local_root))
    name = fill(pool, model("a"))
    pid = os.fork()
    if pid == 0:
        end = lambda *_, **__: os._exit(9)  # noqa: E731
        if where == "mark":
            module.remove_dir = end  # type: ignore[assignment]
        elif where == "rename":
            Path.rename = lambda self, to, real=Path.rename: (real(self, to), end())  # type: ignore[method-assign, assignment]
        else:
            partial_entry.remove_tree = end  # type: ignore[assignment]
        pool.evict(name)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    after = Pool(settings(local_root))
    if where == "mark":
        assert present(after) == {"a"}
        assert (after.directory(name) / "weights.bin").stat().st_size == SIZE
    else:
        assert present(after) == set()
        assert not after.directory(name).exists()
    fill(after, model("a"))
    assert present(after) == {"a"}
    assert list(after.root.glob(".*.evicted")) == []
    assert after.evict(name)


@pytest.mark.slow
def test_concurrent_reservations_stay_within_the_quota(local_root: Path) -> None:
    pids = []
    for number in range(8):
        pid = os.fork()
        if pid == 0:
            own = Pool(settings(local_root))
            frozen = model(f"m{number}")
            lease = own.lease(frozen.name)
            filling = PartialEntry(own.directory(frozen.name), frozen, preallocate=True)
            try:
                reserve(own, frozen, SIZE)
                code = 0
            except CapacityError:
                code = 1
            (local_root / f"said-{number}").touch()
            deadline = time.monotonic() + 60
            while len(list(local_root.glob("said-*"))) < 8 and time.monotonic() < deadline:
                time.sleep(0.01)
            filling.close()
            lease.close()
            os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert sorted(codes) == [0] * 3 + [1] * 5


# --- listing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(pool: Pool) -> Pool:
    fill(pool, model("a"))
    pool.pin(fill(pool, model("b")))
    fill(pool, model("half"), whole=False)
    pool.used(model("a").name)
    return pool


def test_the_listing_has_every_entry(filled: Pool, local_root: Path) -> None:
    before = filled.rows()
    assert [(row.uri.rpartition("/")[2], row.state, row.is_pinned) for row in before] == [
        ("b", "complete", True),
        ("half", "partial", False),
        ("a", "complete", False),
    ]
    module.read_known.cache_clear()  # as in a new process
    assert Pool(settings(local_root)).rows() == before
    assert filled.rows("s3://bucket/a", "s3://bucket/half") == before[1:]


def test_the_listing_shows_changes_of_other_processes(filled: Pool, local_root: Path) -> None:
    [before] = filled.rows("s3://bucket/a")
    remove_dir(filled.directory(before.name))
    assert not filled.rows("s3://bucket/a")
    fill(filled, model("half"))
    assert [row.state for row in filled.rows("s3://bucket/half")] == ["complete"]
    receipt = filled.directory(model("b").name) / module.RECEIPT
    receipt.write_bytes(b"damaged" * 10)
    assert not filled.rows("s3://bucket/b")


def test_an_entry_published_during_a_listing_is_counted(filled: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    half, incoming_of = model("half").name, Pool.incoming

    def published_meanwhile(pool: Pool, name: str) -> Path | None:
        found = incoming_of(pool, name)
        if name == half and found is not None:
            monkeypatch.setattr(Pool, "incoming", incoming_of)
            fill(pool, model("half"))
            return None
        return found

    monkeypatch.setattr(Pool, "incoming", published_meanwhile)
    assert [row.state for row in filled.rows("s3://bucket/half")] == ["complete"]
