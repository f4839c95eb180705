"""A directory filled by one or more processes is published as a whole (G1 to G4 in
tierckpt/cache/partial_entry.py)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tierckpt.cache import direct_write
from tierckpt.cache import partial_entry as module
from tierckpt.cache.file_set import FileSet, FileSpec, decode
from tierckpt.cache.partial_entry import ENTRY, FILLING, PartialEntry, incoming_of, landed_in, remove_abandoned
from tierckpt.cache.receipt import read_receipt, whole_receipt
from tierckpt.errors import IntegrityError, ManifestError, ObjectNotFoundError, StoreError
from tierckpt.format.manifest import digest_of
from tierckpt.types import ByteRange

CHUNK = 128 * 1024
DATA = {"a/one.bin": os.urandom(3 * CHUNK + 7), "two.bin": os.urandom(CHUNK), "empty": b""}


def frozen(chunk_size_bytes: int = CHUNK, **changed: bytes) -> FileSet:
    data = DATA | {name.replace("_", "."): value for name, value in changed.items()}
    files = tuple(FileSpec(name, name, len(value), f"etag-{digest_of(value)}") for name, value in sorted(data.items()))
    return FileSet("s3://bucket/model", files, chunk_size_bytes)


def begin(directory: Path, what: FileSet | None = None) -> PartialEntry:
    return PartialEntry(directory, what or frozen(), preallocate=True)


def land(filling: PartialEntry, *skip: tuple[int, int]) -> None:
    for index, chunk in filling.frozen.chunks():
        if (index, chunk) not in skip:
            at = filling.frozen.chunk_range(index, chunk)
            filling.store_chunk(index, chunk, DATA[filling.frozen.files[index].path][at.start : at.stop])


def same(directory: Path) -> bool:
    return all(digest_of((directory / name).read_bytes()) == digest_of(value) for name, value in DATA.items())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "node" / "model"


@pytest.fixture
def filling(target: Path) -> PartialEntry:
    return begin(target)


def test_a_complete_entry_is_published_with_its_receipt(target: Path, filling: PartialEntry) -> None:
    land(filling)
    assert not target.exists()
    assert filling.publish()
    filling.close()
    assert same(target)
    receipt = read_receipt(target)
    assert receipt is not None
    assert receipt.frozen == frozen()
    assert receipt.landed[0] == tuple(
        digest_of(DATA["a/one.bin"][start : start + CHUNK]) for start in range(0, 3 * CHUNK + 7, CHUNK)
    )
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    assert sorted(path.name for path in (target / ".tierckpt").iterdir()) == ["prefetched.json"]


def test_a_late_filler_leaves_no_second_directory(target: Path, filling: PartialEntry) -> None:
    unfinished = begin(target.with_name("other"))
    land(filling)
    assert filling.publish()
    late, later = begin(target), begin(target)
    assert late.incoming.exists(), "the late filler created the directory again"
    for one in (filling, late):
        one.close()
        one.tidy()
        assert late.incoming.exists(), "another process still uses it"
    later.close()
    later.tidy()
    unfinished.close()
    unfinished.tidy()
    assert sorted(path.name for path in target.parent.iterdir()) == [unfinished.incoming.name, "model"]
    assert same(target)


def test_an_incomplete_entry_is_not_published(target: Path, filling: PartialEntry) -> None:
    land(filling, (0, 2))
    assert not filling.publish()
    assert not target.exists()
    assert landed_in(target, frozen().version) == {"a/one.bin": 2 * CHUNK + 7, "empty": 0, "two.bin": CHUNK}


def test_landed_chunks_are_visible_to_later_and_concurrent_fillers(target: Path) -> None:
    first = begin(target)
    other = begin(target)
    land(first, (0, 1))
    other.refresh()
    assert [chunk for chunk in range(4) if other.has(0, chunk)] == [0, 2, 3]
    first.close()
    second = begin(target)
    assert second.landed_bytes == 3 * CHUNK + 7
    into = memoryview(bytearray(10))
    assert second.read(0, ByteRange(2 * CHUNK + 1, 2 * CHUNK + 11), into)
    assert bytes(into) == DATA["a/one.bin"][2 * CHUNK + 1 : 2 * CHUNK + 11]
    assert not second.read(0, ByteRange(CHUNK - 1, CHUNK + 1), into)
    land(second)
    assert other.publish()
    assert second.publish()
    assert same(target)


def test_damaged_chunks_are_not_written(target: Path) -> None:
    data = DATA["two.bin"]
    what = FileSet("s3://b/m", (FileSpec("two.bin", "two.bin", len(data), None, (digest_of(data),)),), CHUNK)
    filling = begin(target, what)
    with pytest.raises(IntegrityError):
        filling.store_chunk(0, 0, b"\x00" * len(data))
    with pytest.raises(IntegrityError):
        filling.store_chunk(0, 0, data[:-1])
    assert not filling.has(0, 0)
    filling.store_chunk(0, 0, data)
    assert filling.publish()


def test_progress_of_an_earlier_boot_is_ignored(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    land(begin(target), (0, 0))
    monkeypatch.setattr(module, "boot_id", lambda: "another-boot")
    assert begin(target).landed_bytes == 0
    assert sum(landed_in(target, frozen().version).values()) == 0


def test_a_second_filler_adopts_the_chunk_size(target: Path) -> None:
    first = begin(target)
    land(first, (0, 0))
    second = begin(target, frozen(chunk_size_bytes=4096))
    assert second.frozen.chunk_size_bytes == CHUNK
    assert second.landed_bytes == first.landed_bytes


def test_a_torn_progress_line_is_ignored(target: Path, filling: PartialEntry) -> None:
    land(filling, (0, 0), (2, 0))
    [progress] = (filling.incoming / FILLING).glob("progress-*")
    digest = digest_of(DATA["two.bin"])
    with progress.open("ab") as file:
        file.write(f"\n2 0 {digest[:9]}".encode())  # a process was killed here
    again = begin(target)
    again.store_chunk(0, 0, DATA["a/one.bin"][:CHUNK])
    last = begin(target)
    assert (last.has(0, 0), last.has(2, 0)) == (True, False)


def test_a_short_write_of_a_progress_line_is_repeated(
    target: Path, filling: PartialEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, shorted = os.write, []

    def half(file: int, data: bytes) -> int:
        if len(shorted) < 3:
            shorted.append(data)
            return real(file, data[: len(data) // 2])
        return real(file, data)

    monkeypatch.setattr(os, "write", half)
    filling.store_chunk(2, 0, DATA["two.bin"])
    assert len(shorted) == 3
    assert begin(target).has(2, 0)


def test_a_concurrent_first_chunk_is_not_damage(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, others = module.read_whole, []

    def too_early(*args: Any) -> bytes:
        try:
            return read(*args)
        except ObjectNotFoundError:
            monkeypatch.setattr(module, "read_whole", read)
            others.append(begin(target))
            land(others[0], (0, 2))
            raise

    monkeypatch.setattr(module, "read_whole", too_early)
    late = begin(target)
    assert late.landed_bytes == others[0].landed_bytes > 0
    land(others[0])
    assert late.publish()
    assert same(target)


@pytest.mark.parametrize("record", ["", "nonsense", '{"uri": 1}'])
def test_a_damaged_file_list_restarts_the_fill(record: str, target: Path, filling: PartialEntry) -> None:
    land(filling, (0, 0))
    filling.close()
    (filling.incoming / ENTRY).write_text(record)
    again = begin(target)
    assert again.landed_bytes == 0
    land(again)
    assert again.publish()
    assert same(target)


def test_a_removed_file_is_fetched_again(target: Path, filling: PartialEntry) -> None:
    land(filling, (2, 0))
    filling.close()
    (filling.incoming / "a/one.bin").unlink()
    again = begin(target)
    land(again, *[(0, chunk) for chunk in range(4)])
    with pytest.raises(StoreError, match="removed"):
        again.publish()
    assert not target.exists()
    third = begin(target)
    assert [third.has(0, chunk) for chunk in range(4)] == [False] * 4
    land(third)
    assert third.publish()
    assert same(target)


def test_a_file_with_a_failed_fsync_is_discarded(
    target: Path, filling: PartialEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    land(filling, (0, 0))
    real = os.fsync
    bad = (filling.incoming / "a/one.bin").stat().st_ino

    def fails(file: int) -> None:
        if os.fstat(file).st_ino == bad:
            raise OSError(5, "Input/output error")
        real(file)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StoreError):
        filling.store_chunk(0, 0, DATA["a/one.bin"][:CHUNK])
    monkeypatch.setattr(os, "fsync", real)
    again = begin(target)
    assert [again.has(0, chunk) for chunk in range(4)] == [False] * 4
    assert again.has(2, 0)


def test_a_receipt_matches_one_version_and_its_file_sizes(target: Path, filling: PartialEntry) -> None:
    land(filling)
    filling.publish()
    assert whole_receipt(target, frozen().version) is not None
    assert whole_receipt(target, frozen(two_bin=b"x").version) is None
    (target / "two.bin").write_bytes(b"short")
    assert whole_receipt(target, frozen().version) is None


def test_partial_entries_of_other_versions_are_removed_unless_in_use(target: Path) -> None:
    old, busy = begin(target, frozen(two_bin=b"old")), begin(target, frozen(two_bin=b"busy"))
    old.close()
    keep = incoming_of(target, frozen().version)
    remove_abandoned(target, keep)
    assert not old.incoming.exists()
    assert busy.incoming.exists()


def test_removal_during_a_fill_raises(target: Path, filling: PartialEntry) -> None:
    filling.store_chunk(2, 0, DATA["two.bin"])
    module.remove_dir(filling.incoming)
    with pytest.raises(ObjectNotFoundError):
        filling.store_chunk(0, 0, DATA["a/one.bin"][:CHUNK])
    with pytest.raises(StoreError, match="removed"):
        filling.publish()


def test_a_file_list_round_trips_and_detects_damage() -> None:
    what = frozen()
    assert frozen(chunk_size_bytes=4096).version == what.version
    assert frozen(two_bin=b"x").version != what.version
    assert decode(what.encode(), where="here").frozen == what
    for damage in (b'"count":3', b'"path":"two.bin"'):
        assert damage in what.encode()
        with pytest.raises(ManifestError):
            decode(what.encode().replace(damage, damage[:-2] + b"X" + damage[-1:]), where="here")
    escape = FileSet("s3://b/m", (FileSpec("../../etc/passwd", "x", 1),), CHUNK)
    with pytest.raises(ManifestError, match="cannot be"):
        decode(escape.encode(), where="here")


# --- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 1, 4095, CHUNK, 3 * CHUNK + 17])
def test_written_bytes_are_read_back(size_bytes: int, tmp_path: Path) -> None:
    path, data = tmp_path / "file", os.urandom(size_bytes)
    path.write_bytes(b"\xff" * (CHUNK + size_bytes + 5))
    direct_write.write_at(path, data, CHUNK)
    assert digest_of(path.read_bytes()) == digest_of(b"\xff" * CHUNK + data + b"\xff" * 5)
