"""Which bytes of a file are in the page cache: they are read from there for a copy, all others past it."""

from __future__ import annotations

import ctypes
import mmap
import os

from ..types import ByteRange

PAGE_BYTES = mmap.PAGESIZE

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class Resident:
    """Asks the kernel by ``mincore(2)`` on a mapping of ``file`` that nobody ever touches.

    Where it cannot be known (no mapping, or somebody else's file, of which the kernel tells nothing) nothing is there.
    """

    def __init__(self, file: int) -> None:
        self._map: mmap.mmap | None = None
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
        pages = -(-(byte_range.stop - start) // PAGE_BYTES)
        found = ctypes.create_string_buffer(pages)
        if _mincore(self._address + start, byte_range.stop - start, found):
            return False
        return found.raw.count(b"\x01") == pages  # the other bits are reserved, and zero
