"""The spool of a file being written: in memory, then in an unnamed local file.

S1  Until it is kept, the kernel frees the file with its last descriptor (O_TMPFILE): a killed process leaves none.
S2  A file written front to back is digested on the way. After any other write it is read and digested again.
"""

from __future__ import annotations

import errno
import io
import os
import tempfile
from pathlib import Path
from typing import IO, Any

from ..cache import space
from ..config import Settings
from ..disk.durable import create_file, make_dirs, translated, write_all
from ..disk.file_io import begin_writeback
from ..format.layout import written_file
from ..format.manifest import BlockDigests, digest_of, digest_of_blocks

MEMORY_BYTES = 1 << 20
PIECE_BYTES = 8 << 20
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}


class Spool(io.BufferedIOBase):
    """A file to be written, and then kept on the local tier (``is_kept``) or read.

    ``write`` raises CapacityError, or the file system's error as a TierckptError.
    """

    def __init__(self, settings: Settings, *, is_kept: bool) -> None:
        self._settings, self._is_kept = settings, is_kept
        self._file: IO[bytes] = io.BytesIO()
        self._is_in_memory, self._can_be_named = True, False
        self._at = self._begun_bytes = 0
        self.size_bytes = 0
        self._room_bytes = MEMORY_BYTES
        self._digests, self._chunk = list[str](), BlockDigests()
        self._is_in_order = is_kept
        self._to_sync = -1

    @property
    def reserved_bytes(self) -> int:
        return self.size_bytes if self._can_be_named else 0

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._file.read(-1 if size is None else size)
        self._at += len(data)
        return data

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = self._file.seek(offset, whence)
        return self._at

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        with translated(self._settings.local_root):
            if self._is_in_memory and self._at + len(view) > MEMORY_BYTES:
                self._move_to_file()
            for start in range(0, len(view), PIECE_BYTES):
                self._write_piece(view[start : start + PIECE_BYTES])
        return len(view)

    def fileno(self) -> int:
        """Return a read-only descriptor: bytes written past ``write`` would not be digested."""
        if self._to_sync < 0:
            with translated(self._settings.local_root):
                if self._is_in_memory:
                    self._move_to_file()
                self._to_sync = os.open(f"/proc/self/fd/{self._file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
        self._file.flush()
        return self._to_sync

    def _move_to_file(self) -> None:
        file, root = None, self._settings.local_root
        if self._is_kept:
            directory = written_file(root, "").parent
            make_dirs(directory)
            try:
                fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o644)
                file, self._can_be_named = os.fdopen(fd, "w+b"), True
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
        if file is None:
            file = tempfile.TemporaryFile(dir=root if root.is_dir() else None)  # noqa: SIM115  # close does
        file.write(self._file.getvalue())  # type: ignore[attr-defined]
        file.seek(self._at)
        self._file, self._is_in_memory = file, False

    def _write_piece(self, piece: memoryview) -> None:
        stop = self._at + len(piece)
        if self._is_kept and stop > self._room_bytes:
            space.make_room(self._settings, stop, self._settings.local_root, reserved_bytes=self.size_bytes)
            self._room_bytes = stop + PIECE_BYTES
        self._file.write(piece)
        self._is_in_order = self._is_in_order and self._at == self.size_bytes
        self._at, self.size_bytes = stop, max(stop, self.size_bytes)
        if self._is_in_order:
            self._digest(piece)
            whole = stop - stop % PIECE_BYTES  # do not write again to a page under writeback
            if whole > self._begun_bytes:
                begin_writeback(self._file.fileno(), self._begun_bytes, whole - self._begun_bytes)
                self._begun_bytes = whole

    def _digest(self, view: memoryview) -> None:
        chunk = int(self._settings.chunk_size_bytes)
        while view:
            count = min(len(view), chunk - self._chunk.size_bytes)
            self._chunk.update(view[:count])
            view = view[count:]
            if self._chunk.size_bytes == chunk:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._digests.append(digest_of_blocks(self._chunk.end()))
        self._chunk = BlockDigests()

    def link_to(self, path: Path) -> tuple[str, ...]:
        """Link the file to ``path``, its bytes durable, its name not. Return its chunk digests. Cost: one fsync.

        Raises OSError, TierckptError.
        """
        self._file.flush()
        if not self._is_linked(path):
            self._file.seek(0)
            with os.fdopen(create_file(path, 0o644), "wb", 0) as file:
                while piece := self._file.read(PIECE_BYTES):
                    write_all(file.fileno(), piece)
                os.fsync(file.fileno())
        if self._is_in_order:
            if self._chunk.size_bytes:
                self._end_chunk()
            return tuple(self._digests)
        self._file.seek(0)
        chunk = int(self._settings.chunk_size_bytes)
        return tuple(digest_of(self._file.read(chunk)) for _ in range(0, self.size_bytes, chunk))

    def _is_linked(self, path: Path) -> bool:
        if not self._can_be_named:
            return False
        fd = self._file.fileno()
        os.fsync(fd)
        try:
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd)  # with a directory fd, linkat follows the link
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close without flushing: a forked child would write its parent's buffer a second time."""
        getattr(self._file, "raw", self._file).close()
        if self._to_sync >= 0:
            os.close(self._to_sync)
            self._to_sync = -1
        super().close()


def spool_stream(settings: Settings, stream: io.BufferedIOBase) -> Spool:
    spool = Spool(settings, is_kept=True)
    while piece := stream.read(PIECE_BYTES):
        spool.write(piece)
    return spool
