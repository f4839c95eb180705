"""The arena: staging memory in slots, each holding one checkpoint of one rank until it is on the SSD.

At most ``slots_max``, and ``size_bytes_max`` together (P7). The process reuses them.

Life of a lease: free -> staged -> flushing -> written, or not -> free. After its flush it may be taken even while its
tensors are referenced; a staged one only under ``drop_oldest_unflushed``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from ..config import Settings
from ..disk.illness import ill_disk, requests
from ..disk.io_tuner import READ_THREADS_MAX, WRITE_THREADS_MAX
from ..errors import CapacityError, CheckpointSkippedError, OperationTimeoutError
from ..poll import BRIEF, Poll
from ..quantities import round_up
from ..telemetry import logger
from .memory import HUGE_PAGE_BYTES, Memory

log = logger("arena")

SLOT_SECONDS = 600.0
COLLECT_SECONDS = 0.5
MiB = 1 << 20


def slot_taken_error() -> CheckpointSkippedError:
    return CheckpointSkippedError(
        "the staged copy has given its place to a newer checkpoint",
        hint="Raise checkpoints_in_flight_max, save less often, or use the staging_policy 'wait'",
    )


class SlotPolicy(StrEnum):
    WAIT = "wait"
    SKIP = "skip"
    DROP_OLDEST_UNFLUSHED = "drop_oldest_unflushed"


class SlotState(StrEnum):
    STAGED = "staged"
    FLUSHING = "flushing"
    WRITTEN = "written"
    FAILED = "not written"
    DROPPED = "dropped"


class AheadOfFlush(Protocol):
    """Writes a lease's data to unnamed files."""

    @property
    def reserved_bytes(self) -> int: ...

    def file(self, address: int, size_bytes: int) -> Any: ...

    def discard(self) -> None: ...


@dataclass(eq=False)
class Lease:
    """One checkpoint's hold on the first ``size_bytes`` of a slot's ``memory``."""

    memory: Memory
    size_bytes: int
    number: int
    state: SlotState = SlotState.STAGED
    in_use: Callable[[], bool] = lambda: True
    """False once no tensor refers to the memory. Set by the code that makes the tensors."""
    storage: int = 0
    """Id of the storage of those tensors; 0: unknown."""
    replaced_other: bool = False
    tensors: int | None = None
    """Number of tensors with data in it; None if unknown."""
    ahead: AheadOfFlush | None = None
    in_place: bool = False
    """The flush wrote files from the staged data."""
    _writers: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _may_drop: Callable[[], bool] = lambda: True

    def ask_before_drop(self, may_drop: Callable[[], bool]) -> None:
        """Have ``may_drop`` decide whether a newer checkpoint may replace this one while it is only staged.

        Raises CheckpointSkippedError: replaced already.
        """
        with self._lock:
            if self.state is SlotState.DROPPED:
                raise slot_taken_error()
            self._may_drop = may_drop

    def covers(self, address: int) -> bool:
        return 0 <= address - self.memory.address < self.size_bytes

    def begin_flush(self) -> None:
        """Hold the memory during the write. Raises CheckpointSkippedError: a newer checkpoint has taken the slot."""
        with self._lock:
            if self.state is SlotState.DROPPED:
                raise slot_taken_error()
            self._writers += 1
            self.state = SlotState.FLUSHING

    def end_flush(self, *, written: bool) -> None:
        with self._lock:
            self._writers -= 1
            if not self._writers:
                self.state = SlotState.WRITTEN if written else SlotState.FAILED
                self.discard_ahead()

    def discard_ahead(self) -> None:
        if self.ahead is not None:
            self.ahead.discard()

    def try_reclaim(self, *, drop: bool = False) -> bool:
        """Take the memory back if no reference is left, or with ``drop`` if it was only staged."""
        with self._lock:
            if self.state is SlotState.FLUSHING:
                return False
            if self.state is SlotState.STAGED and self.in_use() and not (drop and self._may_drop()):
                return False
            self.state = SlotState.DROPPED
            self.discard_ahead()
            return True


class Arena:
    def __init__(
        self,
        *,
        slots_max: int = 2,
        size_bytes_max: int | None = None,
        policy: SlotPolicy = SlotPolicy.WAIT,
        timeout_seconds: float | None = None,
        shared: bool = False,
        read_elsewhere: bool = False,
        numa_nodes: Sequence[int] = (),
    ) -> None:
        self.slots_max = slots_max
        self.size_bytes_max = size_bytes_max
        self.policy = policy
        self._timeout_seconds = timeout_seconds
        self.shared = shared
        self.read_elsewhere = read_elsewhere
        """Another process reads the staged data: its use is unknown here."""
        self.numa_nodes = tuple(numa_nodes)
        self.allocations = 0
        self._free: list[Memory] = []
        self._leases: list[Lease] = []
        self._count = 0
        self._lock = threading.Lock()

    @property
    def timeout_seconds(self) -> float:
        return SLOT_SECONDS if self._timeout_seconds is None else self._timeout_seconds

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return self._size_bytes()

    def _size_bytes(self) -> int:
        return sum(memory.size_bytes for memory in self._free) + sum(lease.memory.size_bytes for lease in self._leases)

    def lease(self, size_bytes: int) -> Lease | None:
        """Return memory for one staged checkpoint; None when all slots are taken and the policy is ``skip``.

        Raises:
            CapacityError: above ``size_bytes_max``, or the node lacks the memory.
            CheckpointSkippedError: the disk hangs, and no slot becomes free first.
            OperationTimeoutError: no slot became free within ``timeout_seconds``.
        """
        size_bytes_kept = round_up(size_bytes, HUGE_PAGE_BYTES)
        if self.size_bytes_max is not None and size_bytes_kept > self.size_bytes_max:
            raise CapacityError(
                f"staging needs {size_bytes_kept} bytes and staging_bytes_max is {self.size_bytes_max}",
                hint="Raise staging_bytes_max, or use dcp.save, which stages nothing",
            )
        started_at, collected = time.monotonic(), False
        for _ in Poll(self.timeout_seconds, BRIEF):
            with self._lock:
                lease = self._take(size_bytes, drop=False)
                if lease is None and self.policy is SlotPolicy.DROP_OLDEST_UNFLUSHED:
                    lease = self._take(size_bytes, drop=True)
            if lease is not None:
                return lease
            if self.policy is SlotPolicy.SKIP:
                return None
            if requests.is_ill:
                raise ill_disk("the local root")
            if not collected and time.monotonic() - started_at > min(COLLECT_SECONDS, self.timeout_seconds / 2):
                # A failed save's error may keep its tensors in a cycle, and a waiting thread runs no GC.
                collected = True
                gc.collect()
        bytes_max = "" if self.size_bytes_max is None else f", {self.size_bytes_max} bytes"
        states = ", ".join(f"checkpoint {lease.number} is {lease.state}" for lease in self._leases)
        raise OperationTimeoutError(
            f"staging is full ({self.slots_max} slots{bytes_max}): {states}",
            hint="A save hangs, or staged copies are kept and not saved; or raise checkpoints_in_flight_max "
            "or staging_bytes_max",
            waited_seconds=self.timeout_seconds,
        )

    def leases(self) -> tuple[Lease, ...]:
        return tuple(self._leases)

    def close(self) -> None:
        """Release every unreferenced slot. Others are freed with their last tensor."""
        with self._lock:
            for lease in self._leases:
                lease.discard_ahead()
                self._free.append(lease.memory)
            self._leases.clear()
            for memory in self._free:
                memory.close()
            self._free.clear()

    def _take(self, size_bytes: int, *, drop: bool) -> Lease | None:
        took_place = self._reclaim(size_bytes, drop=drop)
        memory = self._fitting(size_bytes)
        if memory is None:
            if not self._has_room(size_bytes):
                return None
            memory = self._allocate(size_bytes)
        self._count += 1
        lease = Lease(memory, size_bytes, self._count, replaced_other=took_place)
        self._leases.append(lease)
        return lease

    def _reclaim(self, size_bytes: int, *, drop: bool) -> bool:
        """Free unused slots, then the oldest droppable one. True if a checkpoint was dropped."""
        dropped = False
        for lease in tuple(self._leases):
            if not lease.in_use() and lease.try_reclaim():
                self._give_back(lease)
        # Oldest first, before making a new slot: a finished save soon releases its tensors.
        for lease in tuple(self._leases):
            if self._fits(size_bytes):
                return False
            if lease.state in (SlotState.WRITTEN, SlotState.FAILED) and lease.try_reclaim():
                self._give_back(lease)
        # If another process reads the oldest, wait for it.
        for lease in tuple(self._leases) if drop and not self.read_elsewhere else ():
            if self._fits(size_bytes) or self._has_room(size_bytes):
                break
            if lease.state is SlotState.STAGED and lease.try_reclaim(drop=True):
                log.warning("checkpoint %d was not flushed in time; a newer one takes its place", lease.number)
                self._give_back(lease)
                dropped = True
        return dropped

    def _fits(self, size_bytes: int) -> bool:
        return any(memory.size_bytes >= size_bytes for memory in self._free)

    def _has_room(self, size_bytes: int) -> bool:
        leased_bytes = sum(lease.memory.size_bytes for lease in self._leases)
        return len(self._leases) < self.slots_max and (
            self.size_bytes_max is None or leased_bytes + round_up(size_bytes, HUGE_PAGE_BYTES) <= self.size_bytes_max
        )

    def _give_back(self, lease: Lease) -> None:
        self._leases.remove(lease)
        self._free.append(lease.memory)

    def _fitting(self, size_bytes: int) -> Memory | None:
        fitting = [memory for memory in self._free if memory.size_bytes >= size_bytes]
        best = min(fitting, key=lambda memory: memory.size_bytes, default=None)
        if best is not None:
            self._free.remove(best)
        return best

    def _allocate(self, size_bytes: int) -> Memory:
        for memory in self._free:
            memory.close()
        self._free.clear()
        memory = Memory.allocate(size_bytes, shared=self.shared, numa_nodes=self.numa_nodes)
        self.allocations += 1
        log.info("staging slot of %d MiB (%s, huge pages: %s)", memory.size_bytes // MiB, memory.kind, memory.huge)
        return memory


class BounceBufferPool:
    """Huge-page buffers between files and unaligned memory. Thread-safe."""

    def __init__(self, count_max: int, what: str = "write") -> None:
        self.count_max = count_max
        self._purpose = what
        self._free: list[Memory] = []
        self._taken = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, count: int, size_bytes: int, timeout_seconds: float) -> Iterator[list[Memory]]:
        """Yield up to ``count`` pieces of ``size_bytes``: those that exist and fit in memory, at least one.

        Raises OperationTimeoutError, if other flushes used all of them; CapacityError.
        """
        used_bytes = self._take(count, size_bytes, timeout_seconds)
        usable = used_bytes
        try:
            yield used_bytes
        except (OperationTimeoutError, KeyboardInterrupt):
            usable = []  # a hanging thread may still use them
            raise
        finally:
            with self._changed:
                self._taken -= len(used_bytes)
                self._free += usable
                self._changed.notify_all()

    def _take(self, count: int, size_bytes: int, timeout_seconds: float) -> list[Memory]:
        with self._changed:
            if not self._changed.wait_for(lambda: self._taken < self.count_max, timeout_seconds):
                raise OperationTimeoutError(
                    f"all {self.count_max} {self._purpose} buffers have been in use all the time",
                    hint="Look for a hung disk",
                    waited_seconds=timeout_seconds,
                )
            count = min(count, self.count_max - self._taken)
            fitting = [memory for memory in self._free if memory.size_bytes >= size_bytes][:count]
            for memory in self._free if len(fitting) < count else ():
                if memory.size_bytes < size_bytes:
                    memory.close()
            self._free = [memory for memory in self._free if memory not in fitting and memory.size_bytes >= size_bytes]
            self._taken += count
        try:
            while len(fitting) < count:
                fitting.append(Memory.allocate(size_bytes))
        except BaseException as error:
            kept = fitting if isinstance(error, CapacityError) else []
            with self._changed:
                self._taken -= count - len(kept)
                self._free += [] if kept else fitting
                self._changed.notify_all()
            if not kept:
                raise
            log.info("%d of %d %s buffers: %s", len(fitting), count, self._purpose, error)
        return fitting


shared_arenas: dict[tuple[object, ...], Arena] = {}
_bounces: dict[str, BounceBufferPool] = {}


def arena_for(
    settings: Settings, *, shared: bool = False, read_elsewhere: bool = False, numa_nodes: Sequence[int] = ()
) -> Arena:
    """Share an arena for equal settings: writers change, their staging memory stays."""
    options: dict[str, Any] = {
        "slots_max": settings.checkpoints_in_flight_max,
        "size_bytes_max": settings.staging_bytes_max,
        "policy": SlotPolicy(settings.staging_policy),
        "shared": shared,
        "read_elsewhere": read_elsewhere,
        "numa_nodes": tuple(numa_nodes),
    }
    return shared_arenas.setdefault(tuple(options.values()), Arena(**options))


def write_buffers() -> BounceBufferPool:
    return _bounces.setdefault("write", BounceBufferPool(WRITE_THREADS_MAX, "write"))


def read_buffers() -> BounceBufferPool:
    return _bounces.setdefault("read", BounceBufferPool(READ_THREADS_MAX, "read"))


def leases() -> list[Lease]:
    return [lease for arena in tuple(shared_arenas.values()) for lease in arena.leases()]


def close_arenas() -> None:
    while shared_arenas:
        shared_arenas.popitem()[1].close()
    _bounces.clear()


def _reset_after_fork() -> None:
    """The parent's leases read as zeros here, and its locks are not ours."""
    shared_arenas.clear()
    _bounces.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
