"""Digests of 256 KiB blocks next to the shards, so that a part of a chunk can be verified on its own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from xxhash import xxh3_128

from tests.unit.read.test_replicated_file_copies import Counted, missing, pulled
from tierckpt.arena.slots import BounceBufferPool
from tierckpt.errors import IntegrityError, ManifestError
from tierckpt.format import manifest as manifests
from tierckpt.format.layout import blocks_file
from tierckpt.format.manifest import DIGEST_BLOCK_BYTES as BLOCK
from tierckpt.format.manifest import FileEntry, Flushed, Manifest, digest_of
from tierckpt.read import parallel_read as pulling
from tierckpt.read import replicated_file
from tierckpt.read.parallel_read import NEAR_BYTES
from tierckpt.read.replicated_file import FileCopy, LocalCopy, RemoteCopy, ReplicatedFile, ShardBlockDigests
from tierckpt.types import ByteRange, Tier

CHUNK = 4 * BLOCK
SIZE = 3 * CHUNK + BLOCK + 777


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(3).randbytes(SIZE)


@pytest.fixture(scope="module")
def buffers() -> BounceBufferPool:
    return BounceBufferPool(2, "read")


def flushed(path: Path, data: bytes, chunk: int = CHUNK) -> Flushed:
    """``data`` as a flush reports it, at ``path``."""
    path.write_bytes(data)
    chunks = [data[at : at + chunk] for at in range(0, len(data), chunk)]
    digests = tuple(map(digest_of, chunks))
    return Flushed(path, len(data), digests, b"".join(map(manifests.blocks_of, chunks)))


def entry_of(shard: Flushed, token: str = "aa") -> FileEntry:
    return FileEntry(shard.path.name, shard.size_bytes, shard.digests, 0, token)


# --- the digest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK])
def test_a_chunk_of_one_block_has_the_digest_it_always_had(size: int, data: bytes) -> None:
    assert digest_of(data[:size]) == xxh3_128(data[:size]).hexdigest()


@pytest.mark.parametrize("size", [BLOCK + 1, 2 * BLOCK, CHUNK - 1, CHUNK])
def test_a_larger_chunk_has_the_digest_of_the_digests_of_its_blocks(size: int, data: bytes) -> None:
    parts = [data[at : min(at + BLOCK, size)] for at in range(0, size, BLOCK)]
    expected = xxh3_128(b"".join(xxh3_128(part).digest() for part in parts)).hexdigest()
    assert digest_of(data[:size]) == f"t{expected}"
    assert manifests.has_digest(data[:size], f"t{expected}")
    assert not manifests.has_digest(data[1 : size + 1], f"t{expected}")


# --- in the manifest -------------------------------------------------------------------------------------------------


def manifest_of(*files: FileEntry, chunk: int = CHUNK) -> Manifest:
    metadata = FileEntry(".metadata", 0, (), 0, "aa", source=".tierckpt/metadata/aa")
    return Manifest("aa", 1, chunk, (metadata,), files)


def test_a_manifest_names_the_kind_of_its_digests(data: bytes) -> None:
    def kind(*digests: str, size: int) -> str:
        return str(json.loads(manifest_of(FileEntry("a", size, digests)).encode())["digest"])

    assert kind(digest_of(data[:100]), size=100) == "xxh3-128"
    assert kind(xxh3_128(data[:CHUNK]).hexdigest(), size=CHUNK) == "xxh3-128"
    assert kind(digest_of(data[:CHUNK]), size=CHUNK) == "xxh3-128-blocks"


def test_manifests_of_both_kinds_come_back_and_a_wrong_name_is_refused(data: bytes) -> None:
    for digest in (digest_of(data[:CHUNK]), xxh3_128(data[:CHUNK]).hexdigest()):
        whole = manifest_of(FileEntry("a", CHUNK, (digest,)))
        assert manifests.decode(whole.encode()) == whole
        body = json.loads(whole.encode())
        del body["self_digest"]
        body["digest"] = "xxh3-128" if digest.startswith("t") else "xxh3-128-blocks"
        with pytest.raises(ManifestError, match="other digests"):
            manifests.decode(manifests.seal(body))


# --- next to the shards ----------------------------------------------------------------------------------------------


def test_the_digests_of_a_ranks_blocks_are_one_file_that_the_manifest_names(tmp_path: Path, data: bytes) -> None:
    shards = [flushed(tmp_path / name, data[:size]) for name, size in (("b", CHUNK + 5), ("a", SIZE), ("c", 0))]
    [entry] = replicated_file.write_digests(tmp_path, shards, 3, "aa", CHUNK)
    kept = (tmp_path / ".tierckpt/blocks/aa").read_bytes()
    assert (entry.path, entry.rank, entry.token, entry.size_bytes) == (".tierckpt/blocks/aa", 3, "aa", len(kept))
    assert entry.digests == (digest_of(kept),)
    counts = {"a": 3 * 4 + 2, "b": 4 + 1, "c": 0}
    assert len(kept) == 16 * sum(counts.values())
    places = replicated_file.digest_locations(manifest_of(*map(entry_of, shards), entry))
    assert {name: start for name, (_, start) in places.items()} == {"a": 0, "b": 16 * 14, "c": 16 * 19}
    first = [xxh3_128(data[at : at + BLOCK]).digest() for at in range(0, CHUNK, BLOCK)]
    assert kept[:64] == b"".join(first)


def test_nothing_is_kept_where_each_chunk_is_a_block(tmp_path: Path, data: bytes) -> None:
    shards = [flushed(tmp_path / "a", data[:BLOCK]), flushed(tmp_path / "b", data, BLOCK)]
    assert replicated_file.write_digests(tmp_path, shards[:1], 0, "aa", CHUNK) == []
    assert replicated_file.write_digests(tmp_path, shards[1:], 0, "aa", BLOCK) == []
    assert replicated_file.digest_locations(manifest_of(entry_of(shards[0]))) == {}


def test_a_file_of_another_size_than_the_shards_need_is_not_used(tmp_path: Path, data: bytes) -> None:
    shard = flushed(tmp_path / "a", data)
    [entry] = replicated_file.write_digests(tmp_path, [shard], 0, "aa", CHUNK)
    short = replace(entry, size_bytes=entry.size_bytes - 16)
    assert replicated_file.digest_locations(manifest_of(entry_of(shard), entry)) != {}
    assert replicated_file.digest_locations(manifest_of(entry_of(shard), short)) == {}


# --- reading by them -------------------------------------------------------------------------------------------------


class Place:
    """A shard and its block digests in a directory."""

    def __init__(self, directory: Path, data: bytes, chunk: int = CHUNK) -> None:
        self.path, self.data, self.chunk = directory / "shard", data, chunk
        shard = flushed(self.path, data, chunk)
        self.entry = entry_of(shard)
        replicated_file.write_digests(directory, [shard], 0, "aa", chunk)
        self.kept_path = directory / blocks_file("aa")
        self.copy = Counted(self.path)

    def copies(self, *more: FileCopy, known: list[FileCopy] | None = None) -> ReplicatedFile:
        sources = [LocalCopy(self.kept_path)] if known is None else known
        digests = ShardBlockDigests(self.entry, self.chunk, 0, sources)
        return ReplicatedFile(self.entry, self.chunk, [self.copy, *more], digests)

    def pulled(
        self, copies: ReplicatedFile, buffers: BounceBufferPool, *spans: tuple[int, int], peeks: tuple[int, ...] = ()
    ) -> bool:
        """Pull ``spans``; True when they are right."""
        return pulled(copies, spans, buffers, peeks) == [self.data[slice(*span)] for span in spans]

    def damage(self, at: int) -> bytearray:
        """Flip a bit of the shard. Returns its bytes."""
        damaged = bytearray(self.data)
        damaged[at] ^= 1
        self.path.write_bytes(damaged)
        self.copy = Counted(self.path)
        return damaged


@pytest.fixture
def place(tmp_path: Path, data: bytes) -> Place:
    return Place(tmp_path, data)


def test_only_needed_blocks_are_read(place: Place, buffers: BounceBufferPool) -> None:
    wanted = [(BLOCK + 5, 2 * BLOCK + 5), (CHUNK + 1, CHUNK + 2), (2 * CHUNK, 3 * CHUNK), (SIZE - 1, SIZE)]
    assert place.pulled(place.copies(), buffers, *wanted)
    assert sorted(place.copy.asked) == [
        (BLOCK, 3 * BLOCK),
        (CHUNK, CHUNK + BLOCK),
        (2 * CHUNK, 3 * CHUNK),
        (3 * CHUNK + BLOCK, SIZE),
    ]


def test_chunks_without_block_digests(place: Place, buffers: BounceBufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    part = 2 * BLOCK
    monkeypatch.setattr(pulling, "READ_BYTES", part)
    assert place.pulled(place.copies(), buffers, (1, part + 1), (CHUNK - 1, SIZE))
    assert sorted(place.copy.asked) == [(at, min(at + part, SIZE)) for at in range(0, SIZE, part)]
    place.copy = Counted(place.path)
    assert place.pulled(place.copies(known=[]), buffers, (1, part + 1), (CHUNK - 1, SIZE))
    assert sorted(place.copy.asked) == [(at, min(at + CHUNK, SIZE)) for at in range(0, SIZE, CHUNK)]


def test_remote_block_digests(place: Place, buffers: BounceBufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "READ_BYTES", BLOCK)
    kept, asked = place.kept_path.read_bytes(), list[ByteRange]()

    def get(byte_range: ByteRange) -> bytes:
        asked.append(byte_range)
        return kept[byte_range.start : byte_range.stop]

    elsewhere = [RemoteCopy("s3://b/x", get)]
    assert place.pulled(place.copies(known=list(elsewhere)), buffers, (0, 2 * CHUNK))
    assert (sorted(place.copy.asked), asked) == ([(0, CHUNK), (CHUNK, 2 * CHUNK)], [])
    place.copy = Counted(place.path)
    assert place.pulled(place.copies(known=list(elsewhere)), buffers, (5, 6))
    assert (place.copy.asked, len(asked)) == ([(0, BLOCK)], 1)
    assert place.pulled(place.copies(known=list(elsewhere)), buffers, (7, 9), peeks=(0,))
    assert len(asked) == 1, "peeked ranges are not verified"
    place.copy = RemoteCopy("s3://b/shard", lambda asked: place.data[asked.start : asked.stop])  # type: ignore[assignment]
    assert place.pulled(place.copies(known=list(elsewhere)), buffers, (0, 2 * CHUNK))
    assert len(asked) == 1


def test_next_copy_of_a_bad_part(place: Place, buffers: BounceBufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "READ_BYTES", BLOCK)
    place.damage(BLOCK)
    whole = RemoteCopy("node-2", lambda at: place.data[at.start : at.stop], Tier.PEER, chunk_size_bytes=CHUNK)
    assert place.pulled(place.copies(whole), buffers, (0, SIZE))
    assert place.path.with_name("shard.bad").exists()


def test_only_damage_in_the_needed_blocks_matters(place: Place, buffers: BounceBufferPool) -> None:
    for at, is_read in ((3 * BLOCK, True), (BLOCK, False), (2 * BLOCK - 1, False)):
        place.damage(at)
        if is_read:
            assert place.pulled(place.copies(), buffers, (BLOCK + 5, BLOCK + 6))
            continue
        with pytest.raises(IntegrityError, match="no good copy of shard"):
            place.pulled(place.copies(), buffers, (BLOCK + 5, BLOCK + 6))
        assert place.path.with_name("shard.bad").exists()


def lost(place: Place) -> None:
    place.kept_path.unlink()


def short(place: Place) -> None:
    place.kept_path.write_bytes(place.kept_path.read_bytes()[:7])


def swapped(place: Place) -> None:
    """Digests of other blocks of the same file: each of them is one that was taken."""
    kept = place.kept_path.read_bytes()
    place.kept_path.write_bytes(kept[64:] + kept[:64])


def wrong_in_the_first_chunk(place: Place) -> None:
    kept = bytearray(place.kept_path.read_bytes())
    kept[20] ^= 1
    place.kept_path.write_bytes(kept)


@pytest.mark.parametrize("damage", [lost, short, swapped, wrong_in_the_first_chunk])
def test_bad_block_digests(damage: Callable[[Place], None], place: Place, buffers: BounceBufferPool) -> None:
    damage(place)
    assert place.pulled(place.copies(), buffers, (BLOCK + 5, BLOCK + 6))
    assert place.copy.asked == [(0, CHUNK)]
    assert not place.path.with_name("shard.bad").exists()


def test_good_block_digests_of_another_copy_are_found(place: Place, buffers: BounceBufferPool) -> None:
    good = place.kept_path.read_bytes()
    wrong_in_the_first_chunk(place)
    elsewhere = RemoteCopy("s3://b/x", lambda asked: good[asked.start : asked.stop])
    copies = place.copies(known=[LocalCopy(place.kept_path), elsewhere])
    assert place.pulled(copies, buffers, (BLOCK + 5, BLOCK + 6))
    assert place.copy.asked == [(BLOCK, 2 * BLOCK)]


def test_damaged_block_digests_never_pass_damaged_blocks(place: Place, buffers: BounceBufferPool) -> None:
    """Both are wrong, and agree with each other."""
    damaged = place.damage(BLOCK)
    kept = bytearray(place.kept_path.read_bytes())
    kept[16:32] = xxh3_128(damaged[BLOCK : 2 * BLOCK]).digest()
    place.kept_path.write_bytes(kept)
    with pytest.raises(IntegrityError, match="no good copy of shard"):
        place.pulled(place.copies(), buffers, (BLOCK + 5, BLOCK + 6))


def test_a_peek_reads_a_page_and_is_not_verified(place: Place, buffers: BounceBufferPool) -> None:
    assert place.pulled(place.copies(), buffers, (5, 90), (3 * BLOCK, CHUNK), peeks=(0,))
    assert sorted(place.copy.asked) == [(0, 4096), (3 * BLOCK, CHUNK)]
    assert place.pulled(place.copies(), buffers, (4090, 4099), (5000, CHUNK), peeks=(0,))  # within other reads
    place.damage(6)
    assert not place.pulled(place.copies(), buffers, (5, 90), (3 * BLOCK, CHUNK), peeks=(0,))
    assert not place.path.with_name("shard.bad").exists()


def test_an_unverified_read_of_a_lost_file_is_empty(place: Place, buffers: BounceBufferPool) -> None:
    copies = ReplicatedFile(place.entry, CHUNK, [RemoteCopy("s3://b/x", missing)])
    assert not place.pulled(copies, buffers, (5, 90), peeks=(0,))


# --- from a store ----------------------------------------------------------------------------------------------------


def test_ranges_of_a_remote_file_that_are_near_are_one_request(tmp_path: Path, buffers: BounceBufferPool) -> None:
    chunk = 16 * BLOCK
    place = Place(tmp_path, random.Random(4).randbytes(3 * chunk), chunk)
    asked: list[tuple[int, int]] = []

    def get(byte_range: ByteRange) -> memoryview:
        asked.append((byte_range.start, byte_range.stop))
        return memoryview(place.data)[byte_range.start : byte_range.stop]

    place.copy = RemoteCopy("s3://b/a", get)  # type: ignore[assignment]
    kept = place.kept_path.read_bytes()
    copies = place.copies(known=[RemoteCopy("s3://b/k", lambda asked: kept[asked.start : asked.stop])])
    near, far = BLOCK + NEAR_BYTES, 2 * BLOCK + NEAR_BYTES
    wanted = [(0, 1), (near, near + 1), (chunk, chunk + 1), (chunk + far, chunk + far + 1), (2 * chunk, 3 * chunk)]
    assert place.pulled(copies, buffers, *wanted)
    assert sorted(asked) == [
        (0, near + BLOCK),
        (chunk, chunk + BLOCK),
        (chunk + far, chunk + far + BLOCK),
        (2 * chunk, 3 * chunk),
    ]
