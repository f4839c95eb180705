"""Chunks that a node reports and serves (J1 to J4 in tierckpt/peer/inventory.py)."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from tests.peer_node import CHUNK, begin, bytes_of, commit, freeze, land, model, publish
from tierckpt.cache.file_set import FileSet
from tierckpt.cache.partial_entry import FILLING, PUBLISHES, PartialEntry
from tierckpt.disk.file_io import open_beneath
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.format.manifest import digest_of
from tierckpt.peer import chunk_files, inventory
from tierckpt.peer.chunk_files import frozen_of
from tierckpt.peer.inventory import Holdings
from tierckpt.peer.peer_http import ChunkReport

DATA = model()


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "SCAN_SECONDS", 0.0)
    monkeypatch.setattr(chunk_files, "RECHECK_SECONDS", 0.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "node"


def given(here: Holdings, frozen: FileSet, ordinal: int) -> bytes | None:
    opened = here.open(frozen.version, CHUNK, ordinal)
    if opened is None:
        return None
    try:
        data = os.pread(opened.file, opened.byte_range.size_bytes, opened.byte_range.start)
    finally:
        opened.close()
    assert opened.digest == digest_of(data)
    return data


def same(here: Holdings, frozen: FileSet, data: dict[str, bytes]) -> int:
    """How many chunks are given; each that is must be right."""
    pieces = {ordinal: given(here, frozen, ordinal) for ordinal in range(frozen.first_ordinals[-1])}
    assert all(piece in (None, bytes_of(frozen, data, ordinal)) for ordinal, piece in pieces.items())
    return sum(piece is not None for piece in pieces.values())


# --- on its way ----------------------------------------------------------------------------------------------------


def test_what_has_landed_is_listed_in_order_with_its_digests_and_nothing_else_is_given(root: Path) -> None:
    here, frozen = Holdings(root), freeze(DATA)
    filling = begin(root, frozen)
    for ordinal in (7, 2, 4):
        land(filling, DATA, [ordinal])
    held = here.report(frozen.version, CHUNK)
    assert [ordinal for ordinal, _ in held.new] == [7, 2, 4]
    assert [digest for _, digest in held.new] == [digest_of(bytes_of(frozen, DATA, at)) for at in (7, 2, 4)]
    assert (held.total, held.landed, held.next, held.whole) == (10, 3, 3, False)
    assert given(here, frozen, 2) == bytes_of(frozen, DATA, 2)
    assert given(here, frozen, 3) is None
    assert same(here, frozen, DATA) == 3
    filling.close()


def test_a_list_is_asked_on_from_where_it_ended_and_from_the_beginning_when_it_is_another(root: Path) -> None:
    here, frozen = Holdings(root), freeze(DATA)
    filling = begin(root, frozen)
    land(filling, DATA, [1, 2])
    first = here.report(frozen.version, CHUNK, 0, most=1)
    assert [at for at, _ in first.new] == [1]
    assert (first.landed, first.next) == (2, 1)
    land(filling, DATA, [5])
    assert [at for at, _ in here.report(frozen.version, CHUNK, first.next).new] == [2, 5]
    assert [at for at, _ in here.report(frozen.version, CHUNK, 99).new] == [1, 2, 5]
    filling.close()


def test_digests_that_the_version_has_are_not_told_again(root: Path) -> None:
    here, frozen = Holdings(root), freeze(DATA, known=True)
    filling = begin(root, frozen)
    land(filling, DATA, [3])
    assert here.report(frozen.version, CHUNK).new == ((3, ""),)
    filling.close()


def test_lines_of_another_boot_and_torn_ones_are_not_believed(root: Path) -> None:
    here, frozen = Holdings(root), freeze(DATA)
    filling = begin(root, frozen)
    land(filling, DATA, [0])
    folder = filling.incoming / FILLING
    (folder / f"progress-ffffffff-{CHUNK}").write_text(f"\n0 1 {'0' * 32}\n")
    with (folder / filling.progress_path.name).open("ab") as stream:
        stream.write(b"\n0 2 " + b"0" * 20)
    assert [at for at, _ in here.report(frozen.version, CHUNK).new] == [0]
    land(filling, DATA, [2])
    assert [at for at, _ in here.report(frozen.version, CHUNK).new] == [0, 2]
    filling.close()


def test_what_was_forgotten_is_not_given_and_is_listed_again_when_it_is_back(root: Path) -> None:
    here, frozen = Holdings(root), freeze(DATA)
    filling = begin(root, frozen)
    land(filling, DATA, [0, 6])
    assert same(here, frozen, DATA) == 2
    filling.append_line("!0.")
    filling.refresh()
    assert given(here, frozen, 0) is None
    land(filling, DATA, [0])
    assert [at for at, _ in here.report(frozen.version, CHUNK, 2).new] == [0]
    assert given(here, frozen, 0) is not None
    filling.close()


def test_chunks_that_live_processes_read_from_shared_storage_are_said_to_be_on_their_way(root: Path) -> None:
    here, frozen = Holdings(root), freeze(DATA)
    filling = begin(root, frozen)
    filling.mark_shared(1, 3, True)
    filling.claims.take(PUBLISHES)
    assert here.report(frozen.version, CHUNK).fetching == {5 + 3}
    assert here.is_fetching(frozen.version)
    filling.close()
    assert here.report(frozen.version, CHUNK).fetching == frozenset()
    assert not here.is_fetching(frozen.version)


def test_a_chunk_that_lands_between_two_looks_is_never_nowhere(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, frozen = Holdings(root), freeze(DATA)
    filling = begin(root, frozen)
    filling.mark_shared(1, 3, True)
    assert here.report(frozen.version, CHUNK).fetching == {5 + 3}
    source = here.by_version[frozen.version][0]
    assert isinstance(source, chunk_files.Incoming)
    look = source.claimed

    def look_just_after_it_landed() -> list[tuple[int, int]]:
        land(filling, DATA, [5 + 3])
        filling.mark_shared(1, 3, False)
        return list(look())

    monkeypatch.setattr(source, "claimed", look_just_after_it_landed)
    held = here.report(frozen.version, CHUNK)
    assert 5 + 3 in held.fetching | {ordinal for ordinal, _ in held.new}
    filling.close()


# --- whole ---------------------------------------------------------------------------------------------------------


def test_an_entry_that_became_whole_is_given_on_and_says_so(root: Path) -> None:
    here, frozen = Holdings(root), freeze(DATA)
    filling = begin(root, frozen)
    land(filling, DATA)
    assert same(here, frozen, DATA) == 10
    assert filling.publish()
    filling.close()
    assert same(here, frozen, DATA) == 10
    held = here.report(frozen.version, CHUNK)
    assert held.whole
    assert held.new == ()


def test_an_entry_that_is_evicted_is_not_given_any_more(root: Path) -> None:
    here, frozen = Holdings(root), publish(root, DATA)
    assert same(here, frozen, DATA) == 10
    shutil.rmtree(root / "cache" / frozen.name)
    assert given(here, frozen, 0) is None
    assert here.report(frozen.version, CHUNK) == ChunkReport()


@pytest.mark.parametrize("size", [0, 1, CHUNK // 2, 1 << 40])
def test_chunks_of_another_size_are_not_served(root: Path, size: int) -> None:
    here, frozen = Holdings(root), publish(root, DATA)
    assert here.report(frozen.version, size) == ChunkReport()
    assert here.open(frozen.version, size, 0) is None


def test_a_damaged_chunk_of_an_earlier_boot_is_not_given_and_the_rest_is(root: Path) -> None:
    frozen = publish(root, DATA)
    path = root / "cache" / frozen.name / frozen.files[0].path
    with path.open("r+b") as stream:
        stream.seek(CHUNK + 5)
        stream.write(b"rotten")
    here = Holdings(root)
    assert given(here, frozen, 1) is None
    assert here.bad == 1
    assert given(here, frozen, 0) is not None
    assert given(here, frozen, 1) is None
    assert here.bad == 1, "it is known to be damaged, and not read again and again"


def test_a_mended_chunk_is_given_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = publish(root, DATA)
    path = root / "cache" / frozen.name / frozen.files[0].path
    good = path.read_bytes()
    path.write_bytes(b"x" * len(good))
    here = Holdings(root)
    assert given(here, frozen, 1) is None
    path.write_bytes(good)
    monkeypatch.setattr(chunk_files, "BAD_SECONDS", 0.0)
    assert given(here, frozen, 1) is not None


def test_a_file_that_is_shorter_than_its_receipt_says_is_not_given(root: Path) -> None:
    frozen = publish(root, DATA)
    os.truncate(root / "cache" / frozen.name / frozen.files[0].path, CHUNK + 1)
    here = Holdings(root)
    assert given(here, frozen, 0) is not None
    assert given(here, frozen, 1) is None


def test_each_chunk_is_digested_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, digested = publish(root, DATA), []
    digest_at = chunk_files.digest_at
    monkeypatch.setattr(chunk_files, "digest_at", lambda *asked, **how: digested.append(1) or digest_at(*asked, **how))
    here = Holdings(root)
    for _ in range(5):
        assert same(here, frozen, DATA) == 10
    assert len(digested) == 10


def test_what_landed_under_our_eyes_is_not_digested_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, frozen = Holdings(root), freeze(DATA)
    filling = begin(root, frozen)
    land(filling, DATA)
    assert same(here, frozen, DATA) == 10
    monkeypatch.setattr(chunk_files, "digest_at", lambda *asked, **how: pytest.fail("digested again"))
    filling.publish()
    filling.close()
    assert same(here, frozen, DATA) == 10


# --- elsewhere -----------------------------------------------------------------------------------------------------


def test_a_directory_elsewhere_is_served_for_as_long_as_somebody_says_so(root: Path, tmp_path: Path) -> None:
    here, frozen, target = Holdings(root), freeze(DATA), tmp_path / "elsewhere" / "model"
    filling = PartialEntry(target, frozen, preallocate=True)
    land(filling, DATA, [3])
    assert given(here, frozen, 3) is None
    here.add(frozen.version, target)
    here.add(frozen.version, target)
    assert given(here, frozen, 3) is not None
    land(filling, DATA)
    filling.publish()
    filling.close()
    assert same(here, frozen, DATA) == 10
    here.remove(frozen.version, target)
    assert same(here, frozen, DATA) == 10
    here.remove(frozen.version, target)
    assert given(here, frozen, 3) is None


# --- checkpoints of the local tier ---------------------------------------------------------------------------------


def test_a_committed_checkpoint_is_a_source_at_once_under_the_version_that_everybody_computes(root: Path) -> None:
    here = Holdings(root)
    manifest = commit(root, "s3://bucket/run/step-100", DATA)
    frozen = frozen_of(manifest, "anything")
    about = {**DATA, ".metadata": b"what DCP knows of it"}
    assert here.report(frozen.version, CHUNK).whole
    assert same(here, frozen, about) == 11


def test_a_node_that_holds_some_files_of_a_checkpoint_gives_those(root: Path) -> None:
    here, [first, second] = Holdings(root), sorted(DATA)
    manifest = commit(root, "s3://bucket/run/step-100", DATA, leave_out=[second])
    frozen = frozen_of(manifest, "anything")
    held = here.report(frozen.version, CHUNK)
    assert not held.whole
    names = {frozen.files[list(frozen.chunks())[at][0]].path for at, _ in held.new}
    assert names == {first, ".metadata"}
    path = local_dir(root, parse_uri("s3://bucket/run/step-100")) / second
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(DATA[second])
    assert here.report(frozen.version, CHUNK).whole


@pytest.mark.parametrize("uri", ["s3://bucket/run/step-100", "/mnt/nfs/run/step-100", "s3://bucket/step-100"])
def test_manifests_and_steps_are_found_by_the_digest_of_their_uri(root: Path, uri: str) -> None:
    here, manifest = Holdings(root), commit(root, uri, DATA)
    location = parse_uri(uri)
    assert here.manifest(digest_of(location.uri.encode())) == manifest.encode()
    assert here.steps(digest_of(location.parent.uri.encode())) == {"step-100": manifest.attempt}
    assert here.manifest(digest_of(location.parent.uri.encode())) is None
    assert here.steps(digest_of(b"s3://other")) == {}


def test_a_checkpoint_saved_again_is_another_version(root: Path) -> None:
    here, uri = Holdings(root), "s3://bucket/run/step-100"
    old = frozen_of(commit(root, uri, DATA), "")
    assert here.report(old.version, CHUNK).whole
    changed = {**DATA, "part-0/model.bin": bytes(CHUNK)}
    new = frozen_of(commit(root, uri, changed), "")
    assert here.report(new.version, CHUNK).whole
    assert same(here, new, {**changed, ".metadata": b"what DCP knows of it"}) == len(list(new.chunks()))
    assert here.report(old.version, CHUNK) == ChunkReport()


def test_a_checkpoint_on_its_way_to_the_local_tier_is_found(root: Path) -> None:
    here, frozen = Holdings(root), freeze(DATA, known=True)
    target = local_dir(root, parse_uri("s3://bucket/run/step-7"))
    filling = PartialEntry(target, frozen, preallocate=True)
    land(filling, DATA, [4])
    assert given(here, frozen, 4) is not None
    assert [fill["chunks_landed"] for fill in here.fills()] == [1]
    filling.close()


# --- no way out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swapped", ["file", "folder", "entry"])
def test_a_link_swapped_in_is_not_followed(root: Path, tmp_path: Path, swapped: str) -> None:
    frozen, secret = publish(root, DATA), tmp_path / "secret"
    entry, name = root / "cache" / frozen.name, frozen.files[0].path
    here = Holdings(root)
    assert given(here, frozen, 0) is not None
    at = {"file": entry / name, "folder": (entry / name).parent, "entry": entry}[swapped]
    shutil.copytree(at, secret) if at.is_dir() else shutil.copy(at, secret)
    shutil.rmtree(at) if at.is_dir() else at.unlink()
    at.symlink_to(secret)
    assert given(here, frozen, 0) is None
    assert given(Holdings(root), frozen, 0) is None


@pytest.mark.parametrize("path", ["../secret", "a/../../secret", "/etc/passwd", "a\0b", ".", "fifo", "."])
def test_nothing_but_a_file_below_is_opened(tmp_path: Path, path: str) -> None:
    (tmp_path / "below" / "a").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    os.mkfifo(tmp_path / "below" / "fifo")
    with pytest.raises(OSError):
        open_beneath(tmp_path / "below", path)


# --- asked often, by many ------------------------------------------------------------------------------------------


def test_asking_again_reads_nothing_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "SCAN_SECONDS", 60.0)
    here, frozen = Holdings(root), freeze(DATA)
    filling = begin(root, frozen)
    land(filling, DATA, [0])
    here.report(frozen.version, CHUNK)
    read: list[Path] = []
    opened = chunk_files.open_beneath
    monkeypatch.setattr(chunk_files, "open_beneath", lambda *asked: read.append(asked[1]) or opened(*asked))
    for _ in range(100):
        here.report(frozen.version, CHUNK)
    assert read == []
    land(filling, DATA, [1])
    assert [at for at, _ in here.report(frozen.version, CHUNK, 1).new] == [1]
    assert len(read) == 1
    filling.close()


def test_many_threads_ask_while_it_is_filled_and_published(root: Path) -> None:
    here, frozen = Holdings(root), freeze(DATA)
    wrong: list[int] = []
    ended = threading.Event()

    def ask() -> None:
        at = 0
        while not ended.is_set():
            piece = given(here, frozen, at % 10)
            if piece is not None and digest_of(piece) != digest_of(bytes_of(frozen, DATA, at % 10)):
                wrong.append(at)
            at += 1

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    filling = begin(root, frozen)
    for ordinal in range(10):
        land(filling, DATA, [ordinal])
        here.report(frozen.version, CHUNK, ordinal)
    filling.publish()
    filling.close()
    ended.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert same(here, frozen, DATA) == 10
