"""Write-ahead: writes staged data to the SSD before the save is planned or hashed.

If the last save of a layout was written in its staged form, the next one will be too. Blocks of pure data are written
once all is copied (docs/adr/0007-flush.md); the flush writes the rest.

    A1  Writes begin only after all is copied, and cover only blocks inside one tensor, which does not change before the
        lease ends. The flush makes everything else from the same memory.
    A2  A file has no name (O_TMPFILE) until a flush takes it: otherwise the kernel frees it, and no reader sees it.
    A3  A flush takes a file only for the same memory in the same place, and skips a write only if its own records show
        nothing but one tensor's data there. A wrong guess costs writes, never bytes.
    A4  An error before a flush has taken the file drops it. Afterwards the file belongs to the flush, and is never
        retried (F3 of ``save/flush.py``).
    A5  No descriptor is closed while a thread may write to it: another file may get its number.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..arena.memory import Memory
from ..arena.slots import Lease
from ..cache import space
from ..config import Settings
from ..disk.file_io import DirectFile, allocate, open_direct
from ..disk.io_tuner import segment_bytes
from ..errors import CapacityError
from ..quantities import round_up
from ..resources import start_thread
from ..telemetry import logger

log = logger("flush")

BYTES_MIN = 64 << 20
"""A smaller state is written before threads have started."""
THREADS = 2
OPEN_SECONDS = 30.0
WRITE_BYTES = 8 << 20
LAYOUTS_KNOWN_MAX = 8


@dataclass(frozen=True, slots=True)
class Span:
    """A file as staged: the address of its offset 0, and the place of each tensor's data in it."""

    address: int
    size_bytes: int
    data: Sequence[tuple[int, int]]

    def units(self, unit_bytes: int) -> Iterator[int]:
        for start, end in self.data:
            first = round_up(start, unit_bytes)
            yield from range(first, end - unit_bytes + 1, unit_bytes)


@dataclass(slots=True, eq=False)
class TempFile:
    owner: WriteAhead
    span: Span
    fd: int = -1
    begun: set[int] = field(default_factory=set)
    writing: int = 0
    is_taken: bool = False
    is_ended: bool = False
    error: BaseException | None = None

    def take(self, path: Path) -> int | None:
        """Give the file its name. Return its descriptor, which the caller closes after ``end`` returned True.

        None without a usable file (A4). Raises FileExistsError.
        """
        with self.owner.changed:
            # Opening takes milliseconds: faster than creating another file.
            self.owner.changed.wait_for(lambda: self.fd >= 0 or self.owner.has_ended, OPEN_SECONDS)
            try:
                if self.fd >= 0 and self.error is None and not self.owner.is_discarded:
                    # With a directory fd, Python calls linkat and follows the link.
                    os.link(f"/proc/self/fd/{self.fd}", path, src_dir_fd=self.fd)
                    self.is_taken = True
                    return self.fd
            except FileExistsError:
                raise
            except OSError as error:
                log.info("%s: cannot use the data written ahead: %s", path.parent, error)
            self.is_ended = True
            return None

    def covers(self, start: int, end: int) -> bool:
        """Whether ``[start, end)`` is written or being written here. If not, the caller owns all of it."""
        units = range(start - start % self.owner.unit_bytes, end, self.owner.unit_bytes)
        with self.owner.changed:
            if self.begun.issuperset(units):
                return True
            self.begun.update(units)
            return False

    def end(self, timeout_seconds: float) -> bool:
        """Start no more writes, and wait for pending ones. Return False on timeout."""
        with self.owner.changed:
            self.is_ended = True
            return self.owner.changed.wait_for(lambda: not self.writing, timeout_seconds)

    def is_wanted(self, offset: int) -> bool:
        """Return False if the flush was first, or after an error (A4)."""
        return not self.is_ended and self.error is None and offset not in self.begun

    def close(self) -> None:
        if self.fd >= 0 and not self.is_taken:
            os.close(self.fd)
            self.fd = -1


class WriteAhead:
    """The files of a staged checkpoint, and the threads that write them. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        memory: Memory,
        spans: Sequence[Span],
        unit_bytes: int,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        self.unit_bytes = unit_bytes
        self._directory, self._has_room = directory, has_room
        self._memory = memory
        self._files = [TempFile(self, span) for span in spans]
        self._queue = deque((file, offset) for file in self._files for offset in file.span.units(unit_bytes))
        self.is_stopped = self.is_discarded = False
        self._working = 0
        self.changed = threading.Condition()

    @property
    def has_ended(self) -> bool:
        return self.is_stopped or not self._working

    @property
    def planned_bytes(self) -> int:
        return len(self._queue) * self.unit_bytes

    @property
    def reserved_bytes(self) -> int:
        with self.changed:
            return sum(file.span.size_bytes for file in self._files if file.fd >= 0 and not file.is_taken)

    def start(self) -> None:
        _started.add(self)
        for number in range(THREADS):
            with self.changed:
                self._working += 1
            thread = threading.Thread(target=self._run, args=(number == 0,), name="tierckpt-ahead", daemon=True)
            try:
                start_thread(thread)
            except CapacityError as error:
                self._stop(error)
                self._end_thread()
                return

    def discard(self) -> None:
        """Drop the files that no flush has taken, without waiting."""
        with self.changed:
            self.is_stopped = self.is_discarded = True
            self.changed.notify_all()
            if not self._working:
                self.close()

    def file(self, address: int, size_bytes: int) -> TempFile | None:
        """Return the file at ``address``, if it has this size (A3)."""
        place = address, size_bytes
        return next((file for file in self._files if (file.span.address, file.span.size_bytes) == place), None)

    def _run(self, is_first: bool) -> None:
        try:
            if is_first:
                self._open_files()
            while (taken := self._next()) is not None:
                self._write(*taken)
        except BaseException as error:
            self._stop(error)
        finally:
            self._end_thread()

    def _open_files(self) -> None:
        if not self._has_room():  # not while training waits for the disk; evicts nothing
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for file in self._files:
            # A name can only be linked on the same file system.
            fd = open_direct(self._directory, os.O_TMPFILE | os.O_WRONLY)
            if fd is None:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            try:
                allocate(fd, file.span.size_bytes)
            except BaseException:
                os.close(fd)
                raise
            with self.changed:
                file.fd = fd
                self.changed.notify_all()

    def _next(self) -> tuple[TempFile, int] | None:
        with self.changed:
            while True:
                while self._queue and not self._queue[0][0].is_wanted(self._queue[0][1]):
                    self._queue.popleft()
                if self.is_stopped or not self._queue:
                    return None
                file, offset = self._queue[0]
                if file.fd >= 0:
                    self._queue.popleft()
                    file.begun.add(offset)
                    file.writing += 1
                    return file, offset
                if not self.changed.wait(OPEN_SECONDS):
                    self.is_stopped = True

    def _write(self, file: TempFile, offset: int) -> None:
        start = file.span.address + offset - self._memory.address
        try:
            DirectFile(file.fd).write(self._memory.view[start : start + self.unit_bytes], offset)
        except BaseException as error:
            file.error = error
        finally:
            with self.changed:
                file.writing -= 1
                self.changed.notify_all()

    def _stop(self, error: BaseException) -> None:
        log.info("%s: write-ahead stopped: %s", self._directory, error)
        with self.changed:
            self.is_stopped = True
            self.changed.notify_all()

    def _end_thread(self) -> None:
        with self.changed:
            self._working -= 1
            self.changed.notify_all()
            if self.is_discarded and not self._working:
                self.close()

    def close(self) -> None:
        for file in self._files:
            file.close()


def prepare(
    settings: Settings, lease: Lease, layout: int, size_bytes: int, spans: Callable[[int], Sequence[Span]]
) -> WriteAhead | None:
    """Return a ``WriteAhead`` for data to be staged in ``lease``, to be started after the copy.

    ``layout`` identifies it; ``spans`` returns its files, with the staging memory at an address.

    None unless this process wrote its last save of this layout in its staged form, and the disk has room without
    eviction.
    """
    if size_bytes < BYTES_MIN or not lease.memory.huge:
        return None
    with _lock:
        last = last_of.pop(layout, None)
        last_of[layout] = lease
        while len(last_of) > LAYOUTS_KNOWN_MAX:
            last_of.popitem(last=False)
    if last is None or not last.in_place:
        return None
    unit = segment_bytes(settings.chunk_size_bytes, WRITE_BYTES)
    files = spans(lease.memory.address)
    ahead = WriteAhead(settings.local_root, lease.memory, files, unit, lambda: space.room_bytes(settings) >= size_bytes)
    if ahead.planned_bytes < BYTES_MIN:
        return None
    lease.ahead = ahead
    return ahead


last_of: OrderedDict[int, Lease] = OrderedDict()
_lock = threading.Lock()
_started: weakref.WeakSet[WriteAhead] = weakref.WeakSet()


def _reset_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    last_of.clear()
    for ahead in list(_started):
        ahead.close()  # they would keep the blocks of a file that the parent removes
    _started.clear()


os.register_at_fork(after_in_child=_reset_in_child)
