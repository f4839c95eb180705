"""Finds which bytes of a file are in the page cache; those are copied from there, all others are read past it."""

from __future__ import annotations

import ctypes
import mmap
import os

from ..types import ByteRange

PAGE_BYTES = mmap.PAGESIZE

WINDOW_BYTES = 64 << 20
"""Range per cached result of "not in the page cache": a load asks for each 2 MiB."""

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class Resident:
    """Asks the kernel by ``mincore(2)`` on a mapping of ``file`` that nobody ever touches.

    If residency is unknown (no mapping, or the kernel hides it for a file of another user), none is assumed.
    Pages that appear after a window was found empty are not used: the range is read past the page cache.
    """

    def __init__(self, file: int) -> None:
        self._map: mmap.mmap | None = None
        self._is_empty: dict[int, bool] = {}
        try:
            self._size_bytes = os.fstat(file).st_size
            # Copy-on-write, so that ctypes may have its address; without a write there is no copy.
            self._map = mmap.mmap(file, self._size_bytes, access=mmap.ACCESS_COPY)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        except (OSError, ValueError):
            self._map = None

    def has(self, byte_range: ByteRange) -> bool:
        """True when every page of ``byte_range`` is in the page cache now."""
        start = byte_range.start // PAGE_BYTES * PAGE_BYTES
        if self._map is None or not start < byte_range.stop <= self._size_bytes:
            return False
        windows = range(start // WINDOW_BYTES, -(-byte_range.stop // WINDOW_BYTES))
        if all(self._was_empty(window) for window in windows):
            return False
        return b"\0" not in self.pages(start, byte_range.stop)

    def _was_empty(self, window: int) -> bool:
        """Return True if none of it was in the page cache at the first check."""
        if window not in self._is_empty:
            start = window * WINDOW_BYTES
            self._is_empty[window] = b"\1" not in self.pages(start, min(start + WINDOW_BYTES, self._size_bytes))
        return self._is_empty[window]

    def pages(self, start: int, stop: int) -> bytes:
        """One byte for each page: 1 where it is in the page cache, 0 where it is not, or the kernel does not tell."""
        pages = -(-(stop - start) // PAGE_BYTES)
        found = ctypes.create_string_buffer(pages)
        if _mincore(self._address + start, stop - start, found):
            return bytes(pages)
        return found.raw  # the other bits are reserved, and zero
