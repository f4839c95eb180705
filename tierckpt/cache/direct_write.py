"""Writes to the SSD with O_DIRECT, so that a fetch leaves no dirty pages."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..arena.slots import BounceBufferPool
from ..disk.durable import closing_file, translated
from ..disk.file_io import DirectFile, address_of, open_direct
from ..errors import CapacityError, OperationTimeoutError
from ..quantities import DISK_BLOCK_BYTES
from ..telemetry import BYTES
from ..types import Buffer, Tier

DIRECT_BYTES_MIN = 64 << 10
BUFFERS = 8
RECEIVE_BUFFERS = 16
BUFFER_SECONDS = 600.0

_buffers = BounceBufferPool(BUFFERS, "cache")
_receive_buffers = BounceBufferPool(RECEIVE_BUFFERS, "cache")
"""Requests in flight hold these: sharing ``_buffers`` would deadlock."""


def write_at(path: Path, data: Buffer, offset: int) -> None:
    """Write all of ``data`` at ``offset`` of an existing file; durable only after its fsync."""
    view = memoryview(data).cast("B")
    with translated(path):
        done = _write_direct(path, view, offset) if offset % DISK_BLOCK_BYTES == 0 else 0
        if done < len(view):
            with closing_file(os.open(path, os.O_WRONLY | os.O_CLOEXEC)) as file:
                DirectFile(file, direct=False).write(view[done:], offset + done)
    BYTES.emit(len(view), tier=Tier.LOCAL, direction="written")


def _write_direct(path: Path, view: memoryview, offset: int) -> int:
    """Return the bytes written; 0 without O_DIRECT."""
    whole = len(view) // DISK_BLOCK_BYTES * DISK_BLOCK_BYTES
    if whole < DIRECT_BYTES_MIN or (file := open_direct(path, os.O_WRONLY)) is None:
        return 0
    with closing_file(file):
        if is_aligned(view):
            DirectFile(file).write(view[:whole], offset)
        else:
            with _buffers.take(1, whole, BUFFER_SECONDS) as [slot]:
                slot.view[:whole] = view[:whole]
                DirectFile(file).write(slot.view[:whole], offset)
    return whole


def is_aligned(view: memoryview) -> bool:
    try:
        return address_of(view) % DISK_BLOCK_BYTES == 0
    except (TypeError, ValueError):
        return False


@contextlib.contextmanager
def receive_memory(size_bytes: int) -> Iterator[memoryview | None]:
    """Yield aligned memory for a chunk; None if all is in use."""
    with contextlib.ExitStack() as stack:
        memory: memoryview | None = None
        if size_bytes >= DIRECT_BYTES_MIN:
            with contextlib.suppress(OperationTimeoutError, CapacityError):
                [buffer] = stack.enter_context(_receive_buffers.take(1, size_bytes, 0.0))
                memory = buffer.view[:size_bytes]
        yield memory


def _reset_after_fork() -> None:
    global _buffers, _receive_buffers
    _buffers = BounceBufferPool(BUFFERS, "cache")
    _receive_buffers = BounceBufferPool(RECEIVE_BUFFERS, "cache")


os.register_at_fork(after_in_child=_reset_after_fork)
