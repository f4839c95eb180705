"""Reading together: what ranks agree on (pure), and the window, with real processes that take, die and come late."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.read.test_replicated_file_copies import pieces_of
from tierckpt.arena.shared_buffer import PASSED_ALL, UNITS_MAX, Process, SharedWindow, reserve
from tierckpt.arena.slots import BounceBufferPool
from tierckpt.disk.processes import start_ticks
from tierckpt.errors import ConfigError
from tierckpt.format.manifest import FileEntry, digest_of
from tierckpt.read.replicated_file import LocalCopy, ReplicatedFile
from tierckpt.read.shared_read import (
    ReadInterest,
    SharedRead,
    SharedReadPlan,
    Units,
    merge_ranges,
    overlaps,
    plan_shared_reads,
    unit_bytes,
)

CHUNK = 4096
MiB = 1 << 20
HERE = Process(1, 7)

ranges = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)).map(lambda pair: (pair[0], sum(pair))), max_size=8)


def interest(group: str = "node", **wanted: list[tuple[int, int]]) -> ReadInterest:
    return ReadInterest(
        group, HERE, f"/proc/{group}", MiB, {name: merge_ranges(found) for name, found in wanted.items()}, 4, 16
    )


def bytes_in(found: Iterable[tuple[int, int]]) -> set[int]:
    return {at for start, stop in found for at in range(start, stop)}


# --- the plan ---------------------------------------------------------------------------------------------------


@given(ranges)
def test_merged_ranges_are_in_order_apart_and_cover_the_same(found: list[tuple[int, int]]) -> None:
    together = merge_ranges(found)
    assert bytes_in(found) == bytes_in(together)
    assert all(start < stop for start, stop in together)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(together))


@given(st.lists(ranges, max_size=4))
def test_overlaps_are_what_two_or_more_want(lists: list[list[tuple[int, int]]]) -> None:
    twice = {at for at in range(300) if sum(at in bytes_in(found) for found in lists) > 1}
    assert bytes_in(overlaps([merge_ranges(found) for found in lists])) == twice


@given(st.lists(ranges, min_size=2, max_size=4), st.integers(0, 240), st.integers(1, 60))
def test_a_piece_is_cut_at_units(lists: list[list[tuple[int, int]]], start: int, size: int) -> None:
    plan = plan_shared_reads([interest(shard=found) for found in lists])[0]
    if plan is None:
        return
    units = Units(plan)
    parts = units.cut("shard", start, start + size)
    assert [part[0] for part in parts] == [start, *[part[1] for part in parts[:-1]]]
    assert parts[-1][1] == start + size
    for begin, end, unit in parts:
        if unit is not None:
            place = units.range("shard", unit)
            assert place.start <= begin < end <= place.stop
            assert place.size_bytes <= 16
            assert place.start // 16 == (place.stop - 1) // 16, "every chunk is in one unit"
    numbers = [unit for _, _, unit in parts if unit is not None]
    assert numbers == sorted(set(numbers))
    assert units.first_of("shard", start, start + size) == next(iter(numbers), None)


def test_a_rank_without_neighbours_or_common_bytes_gets_no_plan() -> None:
    assert plan_shared_reads([None, interest(shard=[(0, 50)])]) == [None, None]
    assert plan_shared_reads([interest("one", shard=[(0, 50)]), interest("other", shard=[(0, 50)])]) == [None, None]
    assert plan_shared_reads([interest(shard=[(0, 50)]), interest(shard=[(50, 90)])]) == [None, None]
    assert plan_shared_reads([interest(first=[(0, 50)]), interest(second=[(0, 50)])]) == [None, None]


def test_each_node_agrees_for_itself() -> None:
    plans = plan_shared_reads([interest(group, shard=[(0, 50)]) for group in ("a", "b", "a", "b")] + [None])
    assert [plan and (plan.me, plan.window) for plan in plans] == [
        (0, "/proc/a"),
        (0, "/proc/b"),
        (1, "/proc/a"),
        (1, "/proc/b"),
        None,
    ]


def test_what_a_window_cannot_count_is_read_apart() -> None:
    """Like metadata with absurd offsets: no memory is allocated for them."""
    huge = [(0, 1 << 60)]
    assert plan_shared_reads([interest(shard=huge), interest(shard=huge)]) == [None, None]
    assert UNITS_MAX < (1 << 60) // 16


def test_units_are_whole_chunks_and_a_window_has_several() -> None:
    assert unit_bytes(8 * MiB, 256 * MiB) == 8 * MiB
    assert unit_bytes(64 << 10, 256 * MiB) == 8 * MiB
    assert unit_bytes(64 << 10, 2 * MiB) == 128 << 10
    assert unit_bytes(100 * MiB, 256 * MiB) == 100 * MiB
    tight = ReadInterest("node", HERE, "w", 256 * MiB, {"shard": [(0, 50)]}, CHUNK, 100 * MiB)
    assert plan_shared_reads([tight, tight]) == [None, None]  # not even four of them


# --- the window -------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[SharedWindow, SharedWindow]]:
    """Two members' views of one window with slots of 512 KiB."""
    members = (Process.this(), Process.this())
    memory = reserve(4 * MiB)
    assert memory.name is not None
    yield (SharedWindow(memory, members, 0, MiB // 2), SharedWindow.open(memory.name, members, 1, MiB // 2))
    memory.close()


def test_a_unit_has_one_filler_until_it_is_there(pair: tuple[SharedWindow, SharedWindow]) -> None:
    one, other = pair
    assert one.claim(3)
    assert not other.claim(3)
    one.release(3, filled=False)
    assert other.claim(3)
    other.slot(3)[:4] = b"good"
    other.release(3, filled=True)
    assert one.is_there(3)
    assert not one.claim(3)
    assert bytes(one.slot(3)[:4]) == b"good"


def test_a_slot_is_used_again_when_everybody_is_past_it(pair: tuple[SharedWindow, SharedWindow]) -> None:
    one, other = pair
    assert (one.join(), other.join()) == (True, True)
    assert one.has_slot(one.slots - 1)
    one.advance(1)
    assert not one.has_slot(one.slots)
    other.advance(1)
    assert one.has_slot(one.slots)
    assert not one.has_slot(one.slots + 1)


def test_a_late_member_is_not_awaited(pair: tuple[SharedWindow, SharedWindow]) -> None:
    one, other = pair
    assert one.join()
    one.advance(PASSED_ALL)
    assert one.awaited()
    assert not one.has_slot(one.slots)
    one.close_joining()
    assert not one.awaited()
    assert one.has_slot(one.slots)
    assert not other.join()


def test_the_last_to_leave_gives_the_pages_back() -> None:
    members = (Process.this(), Process.this())
    with reserve(4 * MiB) as memory:
        assert memory.name is not None
        one = SharedWindow(memory, members, 0, MiB)
        other = SharedWindow.open(memory.name, members, 1, MiB)
        one.slot(0)[:] = b"x" * MiB
        before = Path(f"/proc/self/fd/{memory.fd}").stat().st_blocks
        one.leave()
        assert Path(f"/proc/self/fd/{memory.fd}").stat().st_blocks >= before
        other.leave()
        assert Path(f"/proc/self/fd/{memory.fd}").stat().st_blocks == 0


def test_a_window_whose_owner_has_closed_it_cannot_be_opened() -> None:
    memory = reserve(MiB)
    name = memory.name
    memory.close()
    with pytest.raises(ConfigError):
        SharedWindow.open(str(name), (Process.this(),), 0, MiB)


# --- processes --------------------------------------------------------------------------------------------------

FILE_BYTES = 300 * CHUNK + 77
TAKERS = 3
SLOTS = 4


def content() -> bytes:
    return random.Random(5).randbytes(FILE_BYTES)


class Watched(LocalCopy):
    """A copy that counts its reads, and ends its process at a given one."""

    def __init__(self, path: Path, die_at: int) -> None:
        super().__init__(path)
        self.reads, self._die_at = 0, die_at

    def read(self, byte_range: Any, into: memoryview | None = None, /) -> Any:
        self.reads += 1
        if self.reads == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(byte_range, into)


def take(number: int, path: Path, seed: int, die_at: int, pipe: Any) -> None:
    """One process: announces its ranges, gets its plan, reads, and reports its result and number of reads."""
    data = content()
    entry = FileEntry("f", FILE_BYTES, tuple(digest_of(data[at : at + CHUNK]) for at in range(0, FILE_BYTES, CHUNK)))
    wanted = merge_ranges(
        (start, min(FILE_BYTES, start + 40 * CHUNK))
        for start in (random.Random(f"{seed} {number} {one}").randrange(FILE_BYTES) for one in range(8))
    )
    memory = reserve(8 * CHUNK)
    pipe.send(ReadInterest("node", Process.this(), str(memory.name), 8 * CHUNK, {"f": wanted}, CHUNK, 2 * CHUNK))
    plan: SharedReadPlan = pipe.recv()
    mine = (plan.members, plan.me, plan.unit_bytes)
    window = SharedWindow(memory, *mine) if plan.me == 0 else SharedWindow.open(plan.window, *mine)
    window.slots = SLOTS  # fewer than there would be room for
    together = SharedRead(plan, window, 20.0, lambda item: ("f", []))
    copy = Watched(path, die_at)
    memories, pieces = pieces_of(wanted)
    copies = ReplicatedFile(entry, CHUNK, [copy])
    half = len(pieces) // 2
    together.pull(
        [(copies, pieces[:half])], BounceBufferPool(2, "read"), later=together.units.first_of("f", *wanted[half])
    )
    together.pull([(copies, pieces[half:])], BounceBufferPool(2, "read"), later=None)
    together.stop_sharing()
    right = all(bytes(one) == data[start:stop] for one, (start, stop) in zip(memories, wanted, strict=True))
    pipe.send((right, copy.reads, together.is_alone))
    pipe.recv()  # the first one's memory stays until all are done


def chunks_of(interests: list[ReadInterest]) -> set[int]:
    return {
        index
        for found in interests
        for start, stop in found.wanted["f"]
        for index in range(start // CHUNK, -(-stop // CHUNK))
    }


class Readers:
    """Three processes that read one file together; one may be killed."""

    def __init__(self, seed: int, victim: int | None, path: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", __name__])
        self.victim = victim
        self.pipes = [context.Pipe() for _ in range(TAKERS)]
        self.processes = [
            context.Process(target=take, args=(one, path, seed, 20 if one == victim else 0, theirs), daemon=True)
            for one, (_, theirs) in enumerate(self.pipes)
        ]
        for process in self.processes:
            process.start()

    def begin(self) -> None:
        self.interests: list[ReadInterest] = [ours.recv() for ours, _ in self.pipes]
        for (ours, _), plan in zip(self.pipes, plan_shared_reads(self.interests), strict=True):
            ours.send(plan)

    def outcomes(self) -> list[tuple[bool, int, bool]]:
        living = [ours for one, (ours, _) in enumerate(self.pipes) if one != self.victim]
        assert all(ours.poll(60) for ours in living), "it hangs"
        return [ours.recv() for ours in living]

    def end(self) -> list[int | None]:
        for ours, _ in self.pipes:
            ours.send("end")
        for process in self.processes:
            process.join(60)
            process.kill()
        return [process.exitcode for process in self.processes]


@pytest.mark.slow
def test_processes_with_wishes_of_their_own_read_each_chunk_once_and_survive_a_kill(tmp_path: Path) -> None:
    (path := tmp_path / "f").write_bytes(content())
    teams = [Readers(1, None, path), Readers(2, 0, path), Readers(3, 2, path)]
    try:
        for team in teams:
            team.begin()
        found = [team.outcomes() for team in teams]
    finally:
        codes = [team.end() for team in teams]
    assert [[right for right, _, _ in outcomes] for outcomes in found] == [[True] * 3, [True] * 2, [True] * 2]
    assert not any(alone for outcomes in found for _, _, alone in outcomes)
    reads, wanted = sum(reads for _, reads, _ in found[0]), len(chunks_of(teams[0].interests))
    assert wanted <= reads <= wanted + 2 * TAKERS  # more only at the ends of a process's range
    killed = -signal.SIGKILL
    assert codes == [[0, 0, 0], [killed, 0, 0], [0, 0, killed]]


def test_a_process_is_told_from_its_remains_and_from_a_later_one() -> None:
    assert Process.this().is_alive()
    assert not Process(os.getpid(), 12345).is_alive()
    with subprocess.Popen(["sleep", "60"]) as child:
        began = start_ticks(child.pid)
        assert Process(child.pid, began).is_alive()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has exited, and is not reaped
        assert not Process(child.pid, began).is_alive()
