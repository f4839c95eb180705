"""Reads and writes local files at an offset: past the page cache (direct I/O), or through it.

Direct I/O needs whole disk blocks and block-aligned memory. ``cut`` removes the padding of the last block.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
from pathlib import Path

from ..ownership import file_mode
from ..quantities import DISK_BLOCK_BYTES
from ..telemetry import BYTES, logger
from ..types import Buffer, ByteRange, Tier
from .durable import closing_file, translated
from .illness import requests
from .quarantine import open_regular

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_DIRECTORY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY


def open_beneath(directory: Path, relative: str) -> int:
    """Open the regular file ``relative`` of ``directory`` for reading; the caller closes it.

    Raises OSError: it is missing or not a regular file, or a symbolic link is in ``relative`` or the last component of
    ``directory``.
    """
    *folders, name = relative.split("/")
    if "\0" in relative or any(part in ("", ".", "..") for part in (*folders, name)):
        raise OSError(errno.EXDEV, "it leads outside, or is not a path", relative)
    directory_fd = os.open(directory, _DIRECTORY)
    try:
        for folder in folders:
            below = os.open(folder, _DIRECTORY, dir_fd=directory_fd)
            os.close(directory_fd)
            directory_fd = below
        file = os.open(name, _FLAGS, dir_fd=directory_fd)
    finally:
        os.close(directory_fd)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "no regular file", relative)
    return file


PAGE_BYTES = mmap.PAGESIZE

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class Resident:
    """Queries ``mincore(2)`` on a mapping of ``file`` that is never touched. Unknown residency counts as none."""

    def __init__(self, file: int) -> None:
        self._map: mmap.mmap | None = None
        try:
            self._size_bytes = os.fstat(file).st_size
            # Copy-on-write, so that ctypes may have its address; never written.
            self._map = mmap.mmap(file, self._size_bytes, access=mmap.ACCESS_COPY)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        except (OSError, ValueError):
            self._map = None

    def has(self, byte_range: ByteRange) -> bool:
        start = byte_range.start // PAGE_BYTES * PAGE_BYTES
        if self._map is None or not start < byte_range.stop <= self._size_bytes:
            return False
        return b"\0" not in self.pages(start, byte_range.stop)

    def pages(self, start: int, stop: int) -> bytes:
        """Return one byte per page: 1 in the page cache; 0 not, or unknown."""
        pages = -(-(stop - start) // PAGE_BYTES)
        found = ctypes.create_string_buffer(pages)
        if _mincore(self._address + start, stop - start, found):
            return bytes(pages)
        return found.raw


log = logger("disk")

FICLONERANGE = 0x4020940D
DIRECT_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


def open_direct(path: Path, flags: int) -> int | None:
    """None if unsupported. Raises OSError."""
    try:
        with requests.counted():
            return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, file_mode(path))
    except OSError as error:
        if error.errno not in DIRECT_REFUSED:
            raise
        log.debug("%s: no O_DIRECT here (%s), the page cache is used", path.parent, error.strerror)
        return None


class DirectFile:
    """A file written at offsets by several threads, past the page cache if ``direct``."""

    def __init__(self, fd: int = -1, *, direct: bool = True) -> None:
        self.fd = fd
        self.direct = direct

    def create(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        if self.direct:
            fd = open_direct(path, flags)
            if fd is not None:
                self.fd = fd
                return
            path.unlink(missing_ok=True)  # some systems make the file before they refuse
        self.direct = False
        self.fd = os.open(path, flags | os.O_CLOEXEC, file_mode(path))

    def write(self, view: memoryview, offset: int) -> None:
        """A short direct write continues from the last whole block.

        If direct I/O is refused only now, or needs more alignment, the page cache is used.
        """
        while view:
            was_direct = self.direct  # another thread may leave direct I/O meanwhile
            try:
                with requests.counted():
                    count = os.pwrite(self.fd, view, offset)
            except OSError as error:
                if not was_direct or error.errno not in DIRECT_REFUSED:
                    raise
                self._leave_direct()
                continue
            if self.direct and count < len(view):
                count -= count % DISK_BLOCK_BYTES
            if count <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            view, offset = view[count:], offset + count

    def _leave_direct(self) -> None:
        """Reopen the file under its descriptor, which threads write to: FUSE reads flags only in ``open``."""
        with closing_file(os.open(f"/proc/self/fd/{self.fd}", os.O_WRONLY | os.O_CLOEXEC)) as file:
            os.dup2(file, self.fd, inheritable=False)
            self.direct = False

    def cut(self, size_bytes: int, *, durable: bool) -> None:
        """Cut off the last block's padding, and sync all bytes. The caller syncs the name."""
        with requests.counted():
            if size_bytes % DISK_BLOCK_BYTES:
                os.ftruncate(self.fd, size_bytes)
            if durable:
                os.fsync(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def read_direct(file: int, into: memoryview, offset: int, bounce: memoryview | None = None) -> int:
    """Read whole blocks into ``into``, through ``bounce`` if given. Returns the number of bytes.

    Reading stops at an error, as at the end of the file. The caller reads the rest through the page cache, which raises
    the error.
    """
    done = 0
    with contextlib.suppress(OSError):
        while done < len(into):
            part = into[done:] if bounce is None else bounce[: len(into) - done]
            count = os.preadv(file, [part], offset + done)
            if bounce is not None:
                ctypes.memmove(address_of(into) + done, address_of(bounce), count)  # without the interpreter lock
            done += count
            if not count or count % DISK_BLOCK_BYTES:
                break
    return done


def read_into(file: int, into: memoryview, offset: int) -> int:
    """Returns the number of bytes. Raises OSError."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def stat_version(status: os.stat_result) -> str:
    """Return the version of a file: last write time and size.

    No inode number: FUSE servers change it at each stat. No ctime: a hard link or a chmod changes it. A rewrite of
    the same size within one tick of the file system's clock (2 s on vfat, some milliseconds on ext4) is missed.
    """
    return f"{status.st_mtime_ns:x}-{status.st_size:x}"


def address_of(memory: memoryview | bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# ctypes.memmove releases the interpreter lock: another thread then takes it for 5 ms.
copy_small = ctypes.PyDLL(None).memmove
"""Copies some KiB and keeps the interpreter lock."""
copy_small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
copy_small.restype = None


def open_file(path: Path) -> int:
    with translated(path):
        return open_regular(path)


def pread_all(file: int, byte_range: ByteRange, path: Path, tier: Tier = Tier.LOCAL) -> bytes:
    """Return fewer bytes if the file is too short."""
    with translated(path, tier):
        pieces, offset = [], byte_range.start
        while offset < byte_range.stop:
            piece = os.pread(file, byte_range.stop - offset, offset)
            if not piece:
                break
            pieces.append(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def pwrite_all(file: int, chunk: Buffer, offset: int, path: Path) -> None:
    with translated(path):
        DirectFile(file, direct=False).write(memoryview(chunk), offset)
        BYTES.emit(len(chunk), tier=Tier.LOCAL, direction="written")


_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EPERM}
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_SYNC_FILE_RANGE_WRITE = 2


def allocate(file: int, size_bytes: int) -> None:
    """Find a full disk before the first byte, and make extents long, if supported.

    ``posix_fallocate`` may write zeros over what another process has just written.
    """
    while size_bytes and libc.fallocate(file, 0, 0, size_bytes):
        number = ctypes.get_errno()
        if number in _NO_FALLOCATE:
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def clone_range(source: Path, target: Path, byte_range: ByteRange) -> bool:
    """Share the blocks of a range (reflink); False if unsupported."""
    start, size_bytes = byte_range.start, byte_range.size_bytes
    try:
        with source.open("rb") as old, target.open("r+b") as new:
            fcntl.ioctl(new, FICLONERANGE, struct.pack("qQQQ", old.fileno(), start, size_bytes, start))
    except OSError:
        return False
    return True


def begin_writeback(file: int, start: int, size_bytes: int) -> None:
    libc.sync_file_range(file, start, size_bytes, _SYNC_FILE_RANGE_WRITE)
