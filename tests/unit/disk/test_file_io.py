"""Local files past the page cache and through it: whole, or an error."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fuse_mount import mounted
from tests.open_files import open_files
from tierckpt.disk.file_io import DirectFile, open_direct, read_direct, read_into, stat_version
from tierckpt.quantities import DISK_BLOCK_BYTES

SIZE = 5 * DISK_BLOCK_BYTES + 777
PADDED = 6 * DISK_BLOCK_BYTES


@pytest.fixture
def memory() -> Iterator[memoryview]:
    with mmap.mmap(-1, 2 * PADDED) as block:
        view = memoryview(block)
        view[:SIZE] = os.urandom(SIZE)
        yield view
        view.release()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A file system that creates a file and then refuses to open it for direct I/O. Returns the refused paths."""
    real, names = os.open, []

    def refuse(path: Path, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            names.append(path)
            if flags & os.O_CREAT:
                os.close(real(path, flags & ~os.O_DIRECT, *more))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    return names


def written(path: Path, memory: memoryview) -> tuple[bytes, bool]:
    file = DirectFile()
    file.create(path)
    try:
        file.write(memory[:PADDED], 0)
        file.cut(SIZE, durable=True)
    finally:
        file.close()
    return path.read_bytes(), file.direct


def test_a_file_that_ends_within_a_block_is_cut(tmp_path: Path, memory: memoryview) -> None:
    assert written(tmp_path / "file", memory)[0] == memory[:SIZE]


def test_a_file_that_is_there_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(FileExistsError):
        DirectFile().create(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_refused_direct_io_uses_the_page_cache(tmp_path: Path, memory: memoryview, refused: list[Path]) -> None:
    for name in ("one", "two"):
        assert written(tmp_path / name, memory) == (memory[:SIZE], False)
    assert open_direct(tmp_path / "one", os.O_RDONLY) is None
    assert len(refused) == 3


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC])
def test_other_errors_are_raised(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        DirectFile().create(tmp_path / "file")


def test_a_short_write_continues_at_a_block(
    tmp_path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, offsets = os.pwrite, []

    def short(file: int, view: memoryview, offset: int) -> int:
        if file not in open_files(tmp_path):
            return real(file, view, offset)
        offsets.append(offset)
        return real(file, view[: DISK_BLOCK_BYTES + 512], offset)

    monkeypatch.setattr(os, "pwrite", short)
    assert written(tmp_path / "file", memory)[0] == memory[:SIZE]
    assert all(offset % DISK_BLOCK_BYTES == 0 for offset in offsets)
    assert len(offsets) == 6


def test_an_empty_write_is_a_full_disk(tmp_path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 511)
    file = DirectFile()
    file.create(tmp_path / "file")
    file.direct = True
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        file.write(memory[:PADDED], 0)
    file.close()


@pytest.mark.parametrize("is_buffered", [False, True])
def test_reads_end_with_the_file(tmp_path: Path, memory: memoryview, is_buffered: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(memory[:SIZE])
    through = memory[:DISK_BLOCK_BYTES] if is_buffered else None
    expected = path.read_bytes()
    into = memory[PADDED:]
    file = open_direct(path, os.O_RDONLY)
    if file is not None:  # where the file system of the tests has direct I/O
        assert read_direct(file, into, 0, through) == SIZE
        assert into[:SIZE] == expected
        os.close(file)
    file = os.open(path, os.O_RDONLY)
    assert read_into(file, into, 100) == SIZE - 100
    assert into[: SIZE - 100] == expected[100:]
    assert read_into(file, into[:5], SIZE) == 0
    os.close(file)


def test_an_error_shortens_a_direct_read(tmp_path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "file", os.preadv
    path.write_bytes(memory[:SIZE])

    def fail(file: int, into: list[memoryview], offset: int) -> int:
        if offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, [into[0][:DISK_BLOCK_BYTES]], offset)

    monkeypatch.setattr(os, "preadv", fail)
    file = os.open(path, os.O_RDONLY)
    assert read_direct(file, memory[PADDED:], 0) == DISK_BLOCK_BYTES
    os.close(file)


def test_direct_io_that_is_refused_at_the_first_write_or_read(tmp_path: Path, memory: memoryview) -> None:
    """ZFS before 2.3, some FUSE servers: the open goes well. Several threads write to the same descriptor."""
    with mounted(tmp_path, no=["direct_io"]) as mount:
        path, file = mount.path / "file", DirectFile()
        file.create(path)
        assert file.direct
        starts = range(0, PADDED, DISK_BLOCK_BYTES)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda start: file.write(memory[start : start + DISK_BLOCK_BYTES], start), starts))
        assert not file.direct and not os.get_inheritable(file.fd)
        file.cut(SIZE, durable=True)
        file.close()
        assert path.read_bytes() == memory[:SIZE]
        direct = open_direct(path, os.O_RDONLY)
        assert direct is not None
        assert read_direct(direct, memory[PADDED : PADDED + DISK_BLOCK_BYTES], 0) == 0
        os.close(direct)


def test_a_version_is_the_size_and_the_time_of_the_last_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"data")
    before = stat_version(path.stat())
    os.link(path, tmp_path / "other")
    path.chmod(0o600)
    assert stat_version(path.stat()) == before
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert stat_version(path.stat()) != before
