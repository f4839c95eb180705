"""A spool equals an in-memory file for any sequence of writes, and is kept whole or not at all."""

from __future__ import annotations

import errno
import io
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.unit.save.conftest import refuse_unnamed_files
from tierckpt.cache import space
from tierckpt.config import Settings
from tierckpt.errors import CapacityError
from tierckpt.format.manifest import digest_of
from tierckpt.save import spool
from tierckpt.save.spool import Spool

KiB = 1 << 10


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(spool, "MEMORY_BYTES", 50 * KiB)
    monkeypatch.setattr(spool, "PIECE_BYTES", 64 * KiB)
    return Settings(local_root=tmp_path / "local", chunk_size_bytes=300 * KiB)


@pytest.fixture(params=["named", "copied: no O_TMPFILE", "copied: no link"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    def unlinked(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOENT, "no /proc")

    if "O_TMPFILE" in request.param:
        refuse_unnamed_files(monkeypatch)
    if "link" in request.param:
        monkeypatch.setattr(os, "link", unlinked)
    return str(request.param)


@pytest.mark.parametrize("goes_back", [False, True])
@pytest.mark.usefixtures("way")
def test_bytes_and_digests(goes_back: bool, settings: Settings, tmp_path: Path) -> None:
    chunk = int(settings.chunk_size_bytes)
    for seed in range(15):
        dice, model = random.Random(seed), io.BytesIO()
        with Spool(settings, is_kept=True) as file:
            for _ in range(dice.randrange(12)):
                if goes_back and dice.random() < 0.3:
                    place = dice.randrange(model.getbuffer().nbytes + 1000)
                    assert (file.seek(place), model.seek(place)) == (place, place)
                data = dice.randbytes(dice.choice([0, 1, 700, 64 * KiB, 100 * KiB + 1, 400 * KiB]))
                assert file.write(data) == model.write(data)
                assert file.tell() == model.tell()
                if dice.random() < 0.2:
                    os.fsync(file.fileno())
                    with pytest.raises(OSError, match="Bad file descriptor"):
                        os.write(file.fileno(), b"past its digests")
            kept = tmp_path / f"kept-{seed}"
            digests = file.link_to(kept)
            assert file.size_bytes == len(model.getvalue())
        assert kept.read_bytes() == model.getvalue()
        pieces = [model.getvalue()[start : start + chunk] for start in range(0, len(model.getvalue()), chunk)]
        assert list(digests) == [digest_of(piece) for piece in pieces]


def test_a_large_file_is_not_written_twice(settings: Settings, way: str, tmp_path: Path) -> None:
    with Spool(settings, is_kept=True) as file:
        file.write(bytes(300 * KiB))
        # private: which inode it writes to, nobody else needs to know
        written = os.fstat(file._file.fileno()).st_ino
        file.link_to(tmp_path / "kept")
    assert ((tmp_path / "kept").stat().st_ino == written) == (way == "named")


def test_an_unfinished_spool_has_no_name(settings: Settings) -> None:
    file = Spool(settings, is_kept=True)
    file.write(bytes(300 * KiB))
    assert not [path for path in settings.local_root.rglob("*") if path.is_file()]
    file.close()


def test_a_child_that_ends_writes_nothing_of_what_its_parent_has_in_hand(settings: Settings, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(300 * KiB)
    with Spool(settings, is_kept=True) as file:
        file.write(data)
        file.write(b"in a buffer")
        pid = os.fork()
        if pid == 0:
            file.close()  # as the interpreter does at its end
            os._exit(0)
        os.waitpid(pid, 0)
        file.write(b" of the parent")
        file.link_to(tmp_path / "kept")
    assert (tmp_path / "kept").read_bytes() == data + b"in a buffer of the parent"


def test_a_full_disk_fails_the_write(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def room(_: Settings, needed_bytes: int, directory: Path, *, reserved_bytes: int) -> None:
        asked.append((needed_bytes, reserved_bytes))
        if needed_bytes > 1000 * KiB:
            raise CapacityError("no room", hint="none")

    monkeypatch.setattr(space, "make_room", room)
    with Spool(settings, is_kept=True) as file, pytest.raises(CapacityError):
        for _ in range(100):
            file.write(bytes(50 * KiB))
    assert file.size_bytes <= (1000 + 64) * KiB
    assert all(reserved < needed <= reserved + 2 * 64 * KiB for needed, reserved in asked)
