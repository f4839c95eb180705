"""Slots of the arena: the life of a lease, its bounds (P7), the three policies; and the write buffers."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tierckpt.arena import slots
from tierckpt.arena.memory import Memory
from tierckpt.arena.slots import Arena, BounceBufferPool, Lease, SlotPolicy, SlotState
from tierckpt.config import Settings
from tierckpt.errors import CapacityError, CheckpointSkippedError, OperationTimeoutError

MiB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(slots_max=2, timeout_seconds=0.1)
    yield made
    made.close()


def leased(arena: Arena, size_bytes: int = 2 * MiB) -> Lease:
    lease = arena.lease(size_bytes)
    assert lease is not None
    return lease


def written(lease: Lease) -> Lease:
    lease.begin_flush()
    lease.end_flush(written=True)
    return lease


def let_go(lease: Lease) -> None:
    """Simulate the end of the last tensor of a staged checkpoint."""
    lease.in_use = lambda: False


# --- the life of a lease ------------------------------------------------------------------------------------------


def test_a_flush_that_failed_may_be_tried_again_until_the_memory_is_needed() -> None:
    arena = Arena(slots_max=1, timeout_seconds=0.1)
    lease = leased(arena)
    for _ in range(2):
        lease.begin_flush()
        lease.end_flush(written=False)
        assert lease.state is SlotState.FAILED
    assert leased(arena).memory is lease.memory, "though an error that somebody keeps refers to it"
    with pytest.raises(CheckpointSkippedError):
        lease.begin_flush()
    arena.close()


@pytest.mark.slow
def test_tensors_in_a_cycle_of_garbage_block_nobody() -> None:
    """An exception and its traceback often form a cycle, and a thread that waits for memory does not collect it."""
    arena = Arena(slots_max=1, timeout_seconds=20)
    lease = leased(arena)
    cycle: list[Any] = [set()]  # stands for a tensor
    cycle.append(cycle)
    gone = weakref.ref(cycle[0])
    lease.in_use = lambda: gone() is not None
    del cycle
    assert leased(arena).memory is lease.memory
    arena.close()


def test_two_flushes_hold_it_until_both_are_done(arena: Arena) -> None:
    lease = leased(arena)
    lease.begin_flush()
    lease.begin_flush()
    lease.end_flush(written=True)
    assert lease.state is SlotState.FLUSHING and not lease.try_reclaim(drop=True)
    lease.end_flush(written=True)
    assert lease.state is SlotState.WRITTEN


def test_memory_that_was_given_away_cannot_be_flushed(arena: Arena) -> None:
    lease = leased(arena)
    let_go(lease)
    again = leased(arena)
    assert again.memory is lease.memory, "a free slot is used before another is created"
    with pytest.raises(CheckpointSkippedError, match="newer checkpoint"):
        lease.begin_flush()
    assert again.state is SlotState.STAGED


def test_a_written_checkpoint_gives_its_place_though_somebody_still_has_its_tensors(arena: Arena) -> None:
    """Its bytes are on the SSD. The oldest one is reused first, and no slot is created while there is one."""
    first, second = leased(arena), leased(arena)
    written(first)
    written(second)
    third = leased(arena)
    assert third.memory is first.memory
    assert (first.state, second.state) == (SlotState.DROPPED, SlotState.WRITTEN)
    assert leased(arena).memory is second.memory


def test_an_address_belongs_to_the_checkpoint_not_to_the_slot(arena: Arena) -> None:
    lease = leased(arena, 3 * MiB)
    address = lease.memory.address
    assert lease.memory.size_bytes == 4 * MiB
    assert lease.covers(address) and lease.covers(address + 3 * MiB - 1)
    assert not lease.covers(address - 1) and not lease.covers(address + 3 * MiB)


# --- when every slot is taken -------------------------------------------------------------------------------------


def test_wait_has_a_deadline_and_says_who_has_the_slots(arena: Arena) -> None:
    leased(arena)
    leased(arena).begin_flush()
    begun = time.monotonic()
    with pytest.raises(OperationTimeoutError, match=r"2 slots.*checkpoint 1 is staged, checkpoint 2 is flushing"):
        arena.lease(1)
    assert time.monotonic() - begun >= 0.1
    assert arena.allocations == 2


def test_the_newest_comes_first() -> None:
    """``drop_oldest_unflushed``: drops the oldest unstarted save and notifies it; the others are whole."""
    arena = Arena(slots_max=3, policy=SlotPolicy.DROP_OLDEST_UNFLUSHED, timeout_seconds=0.1)
    flushing, oldest, newest = leased(arena), leased(arena), leased(arena)
    flushing.begin_flush()
    taken = leased(arena)
    assert taken.memory is oldest.memory
    assert (flushing.state, oldest.state, newest.state) == (SlotState.FLUSHING, SlotState.DROPPED, SlotState.STAGED)
    with pytest.raises(CheckpointSkippedError):
        oldest.begin_flush()
    arena.close()


def test_what_is_written_goes_before_what_is_not() -> None:
    arena = Arena(slots_max=2, policy=SlotPolicy.DROP_OLDEST_UNFLUSHED, timeout_seconds=0.1)
    staged, done = leased(arena), written(leased(arena))
    assert leased(arena).memory is done.memory
    assert staged.state is SlotState.STAGED
    arena.close()


def test_a_slot_grows_only_with_the_state(arena: Arena) -> None:
    for size_bytes, allocations in [(4, 1), (3, 1), (4, 1), (6, 2), (4, 2), (6, 2)]:
        lease = leased(arena, size_bytes * MiB)
        assert lease.memory.size_bytes >= size_bytes * MiB
        assert arena.allocations == allocations
        let_go(lease)
    assert arena.size_bytes == 6 * MiB, "the slot that was too small is freed"


def test_a_checkpoint_that_never_fits_is_an_error_at_once() -> None:
    arena = Arena(slots_max=2, size_bytes_max=4 * MiB, timeout_seconds=20)
    with pytest.raises(CapacityError, match="staging_bytes_max"):  # one that waited would be OperationTimeoutError
        arena.lease(5 * MiB)
    assert arena.allocations == 0


def test_full_by_bytes_drops_the_oldest_unflushed_too() -> None:
    arena = Arena(slots_max=4, size_bytes_max=6 * MiB, policy=SlotPolicy.DROP_OLDEST_UNFLUSHED, timeout_seconds=0.1)
    first = leased(arena, 4 * MiB)
    second = leased(arena, 6 * MiB)
    assert first.state is SlotState.DROPPED and second.memory.size_bytes == 6 * MiB
    assert arena.size_bytes == 6 * MiB
    arena.close()


def test_memory_that_cannot_be_had_takes_no_slot(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Memory.allocate

    def none_left(*_: object, **__: object) -> Memory:
        raise CapacityError("no room (seeded)")

    monkeypatch.setattr(Memory, "allocate", none_left)
    for _ in range(3):
        with pytest.raises(CapacityError, match="seeded"):
            arena.lease(1)
    monkeypatch.setattr(Memory, "allocate", real)
    leased(arena), leased(arena)
    assert arena.allocations == 2


@pytest.mark.slow
def test_random_lives_keep_every_bound() -> None:
    """Any order of events: bounds hold, no two live checkpoints share memory, none in a flush is taken."""
    generator = random.Random(3)
    for policy in SlotPolicy:
        arena = Arena(slots_max=3, size_bytes_max=14 * MiB, policy=policy, timeout_seconds=0)
        live: list[Lease] = []
        for _ in range(150):
            live = [lease for lease in live if lease.state is not SlotState.DROPPED]
            lease = generator.choice(live) if live else None
            event = generator.random()
            if event < 0.4 or lease is None:
                flushing = [one for one in live if one.state is SlotState.FLUSHING]
                try:
                    new = arena.lease(generator.randrange(1, 7 * MiB))
                except OperationTimeoutError:
                    new = None
                assert all(one.state is SlotState.FLUSHING for one in flushing)
                live += [new] if new is not None else []
            elif lease.state is SlotState.FLUSHING:
                lease.end_flush(written=event < 0.8)
            elif event < 0.85:
                lease.begin_flush()
            else:
                let_go(lease)
            held = [one.memory for one in live if one.state is not SlotState.DROPPED]
            assert len(held) == len(set(map(id, held))) <= 3
            assert arena.size_bytes <= 14 * MiB
        arena.close()


def test_threads_that_stage_and_flush_never_share_a_slot() -> None:
    """Each writes its own number all over its lease, flushes, and must still find it there."""
    arena = Arena(slots_max=3, timeout_seconds=120)
    torn: list[str] = []

    def job(number: int) -> None:
        generator = random.Random(number)
        for _ in range(25):
            lease = arena.lease(64 * 1024)
            assert lease is not None
            pattern = bytes([number]) * lease.size_bytes
            lease.memory.view[: lease.size_bytes] = pattern
            lease.begin_flush()
            time.sleep(generator.random() * 0.002)
            if bytes(lease.memory.view[: lease.size_bytes]) != pattern:
                torn.append(f"{number} lost its bytes")
            lease.end_flush(written=True)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(job, range(1, 7)))
    assert torn == []
    assert arena.allocations <= 3 and arena.size_bytes <= 6 * MiB
    arena.close()


def test_begin_flush_and_reclaim_race_to_one_winner() -> None:
    def begins_flush(lease: Lease, barrier: threading.Barrier) -> bool:
        barrier.wait()
        with contextlib.suppress(CheckpointSkippedError):
            lease.begin_flush()
            return True
        return False

    with ThreadPoolExecutor(1) as pool:
        for _ in range(300):
            lease, barrier = Lease(memory=None, size_bytes=1, number=1), threading.Barrier(2)  # type: ignore[arg-type]
            flushed = pool.submit(begins_flush, lease, barrier)
            barrier.wait()
            assert lease.try_reclaim(drop=True) != flushed.result(60)


def test_one_arena_for_all_writers_with_the_same_settings(tmp_path: Path) -> None:
    first = slots.arena_for(Settings.load(local_root=tmp_path / "a"))
    assert slots.arena_for(Settings.load(local_root=tmp_path / "b")) is first, "writers come and go"
    assert slots.arena_for(Settings.load(), shared=True) is not first
    assert slots.arena_for(Settings.load(checkpoints_in_flight_max=5)).slots_max == 5


# --- write buffers ------------------------------------------------------------------------------------------------


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many pieces of memory exist: now, and at most."""
    count = [0, 0]
    real = Memory.allocate

    def allocate(size_bytes: int) -> Memory:
        memory = real(size_bytes)
        count[0] += 1
        count[1] = max(count)
        weakref.finalize(memory, lambda: count.__setitem__(0, count[0] - 1))
        return memory

    monkeypatch.setattr(Memory, "allocate", allocate)
    yield count
    gc.collect()


def test_buffers_are_kept_and_handed_on(alive: list[int]) -> None:
    bounce = BounceBufferPool(4)
    with bounce.take(3, 2 * MiB, 1) as first:
        assert len(first) == 3
    with bounce.take(2, MiB, 1) as second:
        assert set(second) < set(first)
    with bounce.take(9, 2 * MiB, 1) as third:
        assert len(third) == 4, "as many as there are"
    assert alive == [4, 4]


@pytest.mark.slow
def test_larger_buffers_take_the_place_of_smaller_ones(alive: list[int]) -> None:
    bounce = BounceBufferPool(3)
    for size_bytes in (2 * MiB, 4 * MiB, 2 * MiB, 6 * MiB):
        with bounce.take(3, size_bytes, 1) as taken:
            assert len(taken) == 3 and all(memory.size_bytes >= size_bytes for memory in taken)
            taken = []
        gc.collect()
        assert alive[0] <= 3
    assert alive[1] <= 4


def test_what_is_left_is_better_than_waiting(alive: list[int]) -> None:
    bounce = BounceBufferPool(3)
    with bounce.take(2, MiB, 1), bounce.take(2, MiB, 1) as rest:
        assert len(rest) == 1
        with pytest.raises(OperationTimeoutError, match="write buffers"), bounce.take(1, MiB, 0.05):
            pytest.fail("a fourth buffer")
    assert alive[1] == 3


@pytest.mark.parametrize("error", [OperationTimeoutError("late"), KeyboardInterrupt()], ids=["late", "interrupt"])
def test_buffers_that_a_hanging_thread_may_still_use_are_not_handed_on(error: BaseException) -> None:
    bounce = BounceBufferPool(2)
    with pytest.raises(type(error)), bounce.take(2, MiB, 1) as hanging:
        kept = list(hanging)
        raise error
    with bounce.take(2, MiB, 1) as taken:
        assert len(taken) == 2 and not set(taken) & set(kept)


def test_memory_that_cannot_be_had_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    bounce, real = BounceBufferPool(2), Memory.allocate
    given = iter([False, True, False])

    def allocate(size_bytes: int) -> Memory:
        if next(given, True):
            return real(size_bytes)
        raise CapacityError("no room (seeded)")

    monkeypatch.setattr(Memory, "allocate", allocate)
    with pytest.raises(CapacityError), bounce.take(2, MiB, 0.1):
        pytest.fail("no slot was granted")
    with bounce.take(2, MiB, 0.1) as taken:
        assert len(taken) == 1, "on a node that is full a save is slower, and no error"
        with bounce.take(1, MiB, 0.1) as more:
            assert len(more) == 1, "a refused slot is not counted"
    with bounce.take(2, MiB, 0.1) as taken:
        assert len(taken) == 2


def test_many_threads_share_few_buffers(alive: list[int]) -> None:
    """Bounded whatever sizes they ask for, nobody starves, nobody meets another in a buffer, errors included."""
    bounce, wrong = BounceBufferPool(3), []

    def job(number: int) -> None:
        generator = random.Random(number)
        for turn in range(12):
            fails = pytest.raises(ZeroDivisionError) if turn % 4 == 3 else contextlib.nullcontext()
            with fails, bounce.take(generator.randrange(1, 4), generator.randrange(1, 3 * MiB), 30) as taken:
                for memory in taken:
                    memory.view[:8] = bytes([number]) * 8
                time.sleep(0.001)
                wrong.extend(1 for memory in taken if bytes(memory.view[:8]) != bytes([number]) * 8)
                1 // (turn % 4 != 3)  # an error every fourth time

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(job, range(8)))
    assert not wrong
    with bounce.take(4, MiB, 1) as all_of_them:
        assert len(all_of_them) == 3, "every buffer was given back"
