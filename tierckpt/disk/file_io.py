"""Reads and writes of local files at an offset, whole or with an error of ours."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from ..telemetry import BYTES
from ..types import Buffer, ByteRange, Tier
from .durable import translated
from .quarantine import open_regular


def open_file(path: Path) -> int:
    with translated(path):
        return open_regular(path)


def pread_all(file: int, byte_range: ByteRange, path: Path) -> bytes:
    with translated(path):
        pieces, offset = [], byte_range.start
        while offset < byte_range.stop:
            piece = os.pread(file, byte_range.stop - offset, offset)
            if not piece:
                break  # shorter than the manifest says: the digest check names it
            pieces.append(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def pwrite_all(file: int, chunk: Buffer, offset: int, path: Path) -> None:
    with translated(path):
        view = memoryview(chunk)
        while view:
            written = os.pwrite(file, view, offset)
            view, offset = view[written:], offset + written
        BYTES.emit(len(chunk), tier=Tier.LOCAL, direction="written")


_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EPERM}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def allocate(file: int, size_bytes: int) -> None:
    """Take the room of ``size_bytes`` on the disk: a full one is found before the first byte, and extents are long.

    The system call itself and not ``posix_fallocate``: where a file system has none, that one writes zeros, over what
    another process may just have written. There the room is not taken.
    """
    while size_bytes and _libc.fallocate(file, 0, 0, size_bytes):
        number = ctypes.get_errno()
        if number in _NO_FALLOCATE:
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
