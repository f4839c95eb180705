"""One suite for every store. Subclass ``StoreContract`` and give it a ``place`` fixture; pytest does the rest.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def place(self, tmp_path): return MyPlace(...)

Runs under pytest-asyncio's auto mode. Tests check the backend's state through the ``Place``, which does not use the
store under test.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import gc
import itertools
import os
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import pytest

import tierckpt
from tierckpt.config import MiB
from tierckpt.errors import ConfigError, IntegrityError, ObjectNotFoundError, PreconditionFailedError, StoreError
from tierckpt.stores.base import Conditional, Store
from tierckpt.stores.verified_read import if_present
from tierckpt.types import Buffer, ByteRange

PACKAGE = str(Path(tierckpt.__file__).parent)
PART = 8 * MiB
RACERS = 16
ODD_KEYS = ["a b/c d", "ümlaut/日本語", "plus+and%25percent", "q?and#hash", "x&y=z;~!'()", "br[0]*{1}", ".hidden/.file"]
BAD_KEYS = ["", "/absolute", "a//b", "a/", "..", "../up", "a/../../up", "./a", "a/.", "nul\0byte"]


class Place(abc.ABC):
    """An empty place of a backend: a way to open stores on it, and raw access that bypasses them."""

    has_put_if_absent: bool = True
    """Features that the store declares, and the race test verifies."""

    @abc.abstractmethod
    def open(self) -> Store:
        """Return a new store with this place as its root. Called more than once."""

    @abc.abstractmethod
    def raw_keys(self) -> set[str]:
        """Return every object below the root, temporary and hidden ones too."""

    @abc.abstractmethod
    def raw_get(self, key: str) -> bytes:
        """Return an object's bytes."""

    @abc.abstractmethod
    def raw_put(self, key: str, data: bytes) -> None:
        """Write an object."""

    def unfinished(self) -> list[str]:
        """Return the transfers the backend still holds parts of, where it has such a thing and can tell."""
        return []


class SourceError(Exception):
    """The error that the iterators of these tests raise: a type unknown to every store."""


class Pieces:
    """An iterator of pieces that can fail, stall, reuse its buffer, and knows whether it was closed."""

    def __init__(self, pieces: Iterable[bytes], fail: Exception | None = None, stall: bool = False) -> None:
        self.pieces = list(pieces)
        self.fail = fail
        self.stall = stall
        self.stalled = asyncio.Event()
        self.closed = False

    async def iterate(self) -> AsyncIterator[Buffer]:
        try:
            for piece in self.pieces:
                await asyncio.sleep(0)
                yield piece
            if self.stall:
                self.stalled.set()
                await asyncio.sleep(3600)
            if self.fail is not None:
                raise self.fail
        finally:
            self.closed = True

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.pieces))


async def broken() -> AsyncIterator[Buffer]:
    yield b"1"
    raise SourceError


def cut(data: bytes, *sizes: int) -> list[bytes]:
    """Return ``data`` in pieces of the sizes in ``sizes``, repeated."""
    pieces, offset, cycle = [], 0, itertools.cycle(sizes)
    while offset < len(data):
        size = next(cycle)
        pieces.append(data[offset : offset + size])
        offset += size
    return pieces


@contextlib.contextmanager
def unreachable_frames() -> Iterator[list[types.FrameType]]:
    """Yield a list that holds, at the end, the frames of tierckpt that only the garbage collector would free."""
    frames: list[types.FrameType] = []
    gc.collect()
    gc.disable()
    try:
        yield frames
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        frames += [
            found for found in gc.garbage if isinstance(found, types.FrameType) and PACKAGE in found.f_code.co_filename
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def keys_of(store: Store, prefix: str = "") -> list[str]:
    return sorted([info.key async for info in store.list(prefix)])


class StoreContract(abc.ABC):
    """The contract of stores/base.py, sentence by sentence."""

    @pytest.fixture
    @abc.abstractmethod
    def place(self) -> Place:
        """Return a fresh, empty place."""

    @pytest.fixture
    async def store(self, place: Place) -> AsyncIterator[Store]:
        store = place.open()
        yield store
        await store.close()

    # --- small objects ---------------------------------------------------------------------------------------------

    async def test_is_a_store(self, place: Place, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.has_put_if_absent is place.has_put_if_absent
        assert store.uri

    async def test_what_is_put_is_in_the_backend(self, place: Place, store: Store) -> None:
        await store.put("dir/object", b"hello")
        assert place.raw_keys() == {"dir/object"}
        assert place.raw_get("dir/object") == await store.get("dir/object") == b"hello"
        assert [info async for info in store.list()] == [await store.head("dir/object")]

    async def test_what_others_wrote_is_read(self, place: Place, store: Store) -> None:
        place.raw_put("dir/object", b"theirs")
        assert await store.get("dir/object") == b"theirs"
        assert (await store.head("dir/object")).size_bytes == 6
        place.raw_put("dir/object", b"changed")
        assert (await store.head("dir/object")).size_bytes == 7
        assert await keys_of(store) == ["dir/object"]

    async def test_only_the_version_that_was_seen_is_replaced_or_removed(self, place: Place, store: Store) -> None:
        if not isinstance(store, Conditional):
            assert not place.has_put_if_absent
            return
        await store.put("object", b"one")
        seen = (await store.head("object")).etag or ""
        await store.replace("object", b"three", etag=seen)
        assert place.raw_get("object") == b"three"
        for change in (store.replace("object", b"four", etag=seen), store.remove("object", etag=seen)):
            with pytest.raises(PreconditionFailedError):
                await change
        assert place.raw_get("object") == b"three"
        seen = (await store.head("object")).etag or ""
        await store.remove("object", etag=seen)
        await store.remove("object", etag=seen)
        with pytest.raises(PreconditionFailedError):
            await store.replace("object", b"five", etag=seen)
        with pytest.raises(ObjectNotFoundError):
            await store.head("object")

    @pytest.mark.parametrize(
        "data",
        [b"abcdef", bytearray(b"abcdef"), memoryview(b"__abcdef__")[2:8], memoryview(bytearray(b"abcdef"))],
        ids=["bytes", "bytearray", "slice", "writable-view"],
    )
    async def test_put_takes_any_buffer(self, place: Place, store: Store, data: Buffer) -> None:
        await store.put("object", data)
        assert place.raw_get("object") == b"abcdef"

    async def test_empty_object(self, place: Place, store: Store) -> None:
        await store.put("empty", b"")
        assert place.raw_get("empty") == b""
        assert await store.get("empty") == b""
        assert (await store.head("empty")).size_bytes == 0
        assert await keys_of(store) == ["empty"]

    async def test_etag_changes_with_the_content(self, store: Store) -> None:
        await store.put("object", b"one")
        first = await store.head("object")
        assert await store.head("object") == first
        assert first.etag
        await asyncio.sleep(0.02)  # past the clock tick that a file's etag depends on
        await store.put("object", b"two")
        assert (await store.head("object")).etag != first.etag

    async def test_missing_object(self, store: Store) -> None:
        await store.put("there", b"1")
        await store.put("dir/object", b"1")
        for key in ("not", "no/such/dir/not", "there/below"):
            for read in (store.head(key), store.get(key), store.get_range(key, ByteRange(0, 1))):
                with pytest.raises(ObjectNotFoundError):
                    await read
        with pytest.raises(ObjectNotFoundError):
            await store.head("dir")

    async def test_errors_are_in_no_reference_cycle(self, store: Store) -> None:
        """Training loops disable the garbage collector, and each cycle would keep the frames of a request."""
        await store.put("object", b"1")
        whole = ByteRange(0, 1)
        verbs: list[Callable[[], Awaitable[object]]] = [
            lambda: store.head("not"),
            lambda: if_present(store.head("not")),
            lambda: store.get("not"),
            lambda: store.get_range("not", whole),
            lambda: store.get_range("object", whole, if_match="another"),
            lambda: store.put("object", b"2", if_absent=True),
            lambda: store.put_stream("stream", broken(), 2),
            lambda: store.delete("not"),
        ]
        if isinstance(store, Conditional):
            verbs.append(lambda: store.replace("object", b"2", etag="another"))
            verbs.append(lambda: store.remove("object", etag="another"))
        for verb in verbs:  # the first use of a verb leaves garbage of its own
            with contextlib.suppress(StoreError, SourceError):
                await verb()
        with unreachable_frames() as frames:
            for verb in verbs:
                with contextlib.suppress(StoreError, SourceError):
                    await verb()
            await asyncio.sleep(0.01)
        assert not frames

    @pytest.mark.parametrize("key", BAD_KEYS)
    async def test_keys_stay_below_the_root(self, place: Place, store: Store, key: str) -> None:
        for verb in (store.put(key, b"x"), store.head(key), store.get(key), store.delete(key)):
            with pytest.raises(ConfigError):
                await verb
        with pytest.raises(ConfigError):
            await store.put_stream(key, Pieces([b"x"]).iterate(), 1)
        assert place.raw_keys() == set()

    # --- ranges ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 1000), (999, 1000), (123, 777), (500, 500), (1000, 1000)])
    async def test_ranges(self, store: Store, start: int, stop: int) -> None:
        data = os.urandom(1000)
        await store.put("object", data)
        assert bytes(await store.get_range("object", ByteRange(start, stop))) == data[start:stop]

    @pytest.mark.parametrize(("start", "stop"), [(0, 11), (9, 20), (10, 11), (50, 60)])
    async def test_a_range_past_the_end_is_an_error(self, store: Store, start: int, stop: int) -> None:
        await store.put("object", b"0123456789")
        with pytest.raises(IntegrityError):
            await store.get_range("object", ByteRange(start, stop))

    async def test_if_match(self, store: Store) -> None:
        await store.put("object", b"0123456789")
        etag = (await store.head("object")).etag
        assert bytes(await store.get_range("object", ByteRange(2, 5), if_match=etag)) == b"234"
        await asyncio.sleep(0.02)
        await store.put("object", b"9876543210")
        for byte_range in (ByteRange(2, 5), ByteRange(3, 3)):
            with pytest.raises(PreconditionFailedError):
                await store.get_range("object", byte_range, if_match=etag)

    # --- large objects ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size_bytes", [0, 1, PART - 1, PART, PART + 1, 2 * PART])
    async def test_put_stream_of_size(self, place: Place, store: Store, size_bytes: int) -> None:
        data = os.urandom(size_bytes)
        source = Pieces(cut(data, 3 * MiB + 7, 1, MiB))
        await store.put_stream("dir/object", source.iterate(), size_bytes)
        assert place.raw_get("dir/object") == data
        assert (await store.head("dir/object")).size_bytes == size_bytes
        assert source.closed

    async def test_put_stream_of_many_parts_and_parallel_ranges(self, place: Place, store: Store) -> None:
        data = os.urandom(40 * MiB + 12345)
        await store.put_stream("big", Pieces(cut(data, 8 * MiB)).iterate(), len(data))
        assert place.raw_get("big") == data
        ranges = [ByteRange(start, min(start + 3 * MiB, len(data))) for start in range(0, len(data), 3 * MiB)]
        chunks = await asyncio.gather(*(store.get_range("big", byte_range) for byte_range in ranges))
        assert b"".join(map(bytes, chunks)) == data

    async def test_put_stream_of_many_small_pieces_and_empty_ones(self, place: Place, store: Store) -> None:
        data = os.urandom(200_000)
        pieces = [b"", *cut(data, 1000), b"", data[:7], b""]
        await store.put_stream("object", Pieces(pieces).iterate(), len(data) + 7)
        assert place.raw_get("object") == data + data[:7]

    async def test_a_piece_may_be_overwritten_once_the_next_is_asked_for(self, place: Place, store: Store) -> None:
        async def reuse() -> AsyncIterator[Buffer]:
            buffer = bytearray(3 * MiB)
            for value in range(8):
                buffer[:] = bytes([value]) * len(buffer)
                yield memoryview(buffer)
            buffer[:] = b"\xff" * len(buffer)

        await store.put_stream("object", reuse(), 24 * MiB)
        assert place.raw_get("object") == b"".join(bytes([value]) * (3 * MiB) for value in range(8))

    async def test_put_and_put_stream_replace(self, place: Place, store: Store) -> None:
        await store.put("object", b"long old content")
        await store.put("object", b"new")
        assert place.raw_get("object") == b"new"
        await store.put_stream("object", Pieces([b"old" * 1000]).iterate(), 3000)
        await store.put_stream("object", Pieces([b"new"]).iterate(), 3)
        assert place.raw_get("object") == b"new"

    # --- all or nothing (S1) ---------------------------------------------------------------------------------------

    async def _nothing_is_left(self, place: Place, store: Store, keys: set[str]) -> None:
        assert place.raw_keys() == keys
        assert place.unfinished() == []
        assert await keys_of(store) == sorted(keys)

    @pytest.mark.parametrize("pieces", [0, 1, 2, 5], ids=lambda count: f"after-{count}-pieces")
    async def test_a_failing_source_leaves_nothing(self, place: Place, store: Store, pieces: int) -> None:
        cause = SourceError("the disk of the source died")
        source = Pieces([b"y" * (5 * MiB)] * pieces, fail=cause)
        with pytest.raises(SourceError) as caught:
            await store.put_stream("object", source.iterate(), 30 * MiB)
        assert caught.value is cause
        assert source.closed
        await self._nothing_is_left(place, store, set())

    async def test_a_failing_source_keeps_the_old_object(self, place: Place, store: Store) -> None:
        """And that a file is missing does not mean that an object is."""
        await store.put("object", b"old")
        cause = FileNotFoundError("source.bin")
        with pytest.raises(FileNotFoundError) as caught:
            await store.put_stream("object", Pieces([b"y" * PART] * 2, fail=cause).iterate(), 3 * PART)
        assert caught.value is cause
        assert place.raw_get("object") == b"old"
        await self._nothing_is_left(place, store, {"object"})

    @pytest.mark.parametrize("expected", [9, 11, 3 * PART])
    async def test_a_source_of_the_wrong_size_leaves_nothing(self, place: Place, store: Store, expected: int) -> None:
        with pytest.raises(IntegrityError):
            await store.put_stream("object", Pieces([b"01234", b"56789"]).iterate(), expected)
        await self._nothing_is_left(place, store, set())

    @pytest.mark.parametrize("pieces", [0, 1, 3], ids=lambda count: f"after-{count}-pieces")
    async def test_a_stalled_transfer_is_not_listed_and_a_cancelled_one_leaves_nothing(
        self, place: Place, store: Store, pieces: int
    ) -> None:
        source = Pieces([b"y" * (6 * MiB)] * pieces, stall=True)
        transfer = asyncio.create_task(store.put_stream("dir/object", source.iterate(), 30 * MiB))
        await asyncio.wait_for(source.stalled.wait(), 60)
        assert await keys_of(store) == []
        with pytest.raises(ObjectNotFoundError):
            await store.head("dir/object")
        transfer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await transfer
        assert source.closed
        await self._nothing_is_left(place, store, set())

    async def test_cancelled_at_any_moment(self, place: Place, store: Store) -> None:
        await store.put("warm", b"1")
        data = os.urandom(20 * MiB)
        for step in range(8):
            transfer = asyncio.create_task(store.put_stream("object", Pieces(cut(data, MiB)).iterate(), len(data)))
            await asyncio.sleep(0.004 * 2**step)
            transfer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await transfer
            assert place.unfinished() == []
            if "object" in place.raw_keys():  # the cancellation came too late: then the object is whole
                assert place.raw_get("object") == data
                await store.delete("object")
            assert place.raw_keys() == {"warm"}

    async def test_readers_see_old_or_new_never_a_mixture(self, store: Store) -> None:
        size_bytes = 300_000
        versions = [bytes([value]) * size_bytes for value in range(12)]
        await store.put("object", versions[0])

        async def write() -> None:
            for version in versions[1:]:
                await store.put_stream("object", Pieces(cut(version, 100_000)).iterate(), size_bytes)

        writer = asyncio.create_task(write())
        reads = 0
        while not writer.done() or not reads:
            assert await store.get("object") in versions
            reads += 1
        await writer
        assert await store.get("object") == versions[-1]

    # --- put-if-absent (S2) ----------------------------------------------------------------------------------------

    async def test_put_if_absent(self, place: Place, store: Store) -> None:
        await store.put("dir/claim", b"mine", if_absent=True)
        with pytest.raises(PreconditionFailedError):
            await store.put("dir/claim", b"theirs", if_absent=True)
        assert place.raw_get("dir/claim") == b"mine"
        await self._nothing_is_left(place, store, {"dir/claim"})

    async def test_put_if_absent_has_one_winner(self, place: Place) -> None:
        stores = [place.open() for _ in range(4)]

        async def claim(racer: int) -> int | None:
            try:
                await stores[racer % len(stores)].put("claim", f"racer {racer}".encode(), if_absent=True)
            except PreconditionFailedError:
                return None
            return racer

        winners = [racer for racer in await asyncio.gather(*map(claim, range(RACERS))) if racer is not None]
        if place.has_put_if_absent:
            assert len(winners) == 1
        assert place.raw_get("claim") in {f"racer {racer}".encode() for racer in winners}
        assert place.raw_keys() == {"claim"}
        for store in stores:
            await store.close()

    # --- listing and deleting --------------------------------------------------------------------------------------

    async def test_list_of_nothing(self, store: Store) -> None:
        assert await keys_of(store) == []
        assert await keys_of(store, "no/such/dir") == []
        assert await store.list_dirs() == []
        assert await store.list_dirs("no/such/dir") == []

    async def test_list_goes_by_directories(self, store: Store) -> None:
        for key in ("a/b/one", "a/b/deep/er/two", "a/bc/three", "a/four", "five"):
            await store.put(key, key.encode())
        assert await keys_of(store, "a/b") == ["a/b/deep/er/two", "a/b/one"]
        assert await keys_of(store, "a/b/") == ["a/b/deep/er/two", "a/b/one"]
        assert await keys_of(store, "a/four") == []
        assert await keys_of(store) == ["a/b/deep/er/two", "a/b/one", "a/bc/three", "a/four", "five"]
        sizes = {info.key: info.size_bytes async for info in store.list()}
        assert sizes == {key: len(key) for key in sizes}

    async def test_list_dirs(self, store: Store) -> None:
        for key in ("step-2/.metadata", "step-10/deep/x", "step-1/y", "file", ".hidden/z"):
            await store.put(key, b"1")
        assert await store.list_dirs() == [".hidden", "step-1", "step-10", "step-2"]
        assert await store.list_dirs("step-10") == ["deep"]
        assert await store.list_dirs("step-10/") == ["deep"]
        assert await store.list_dirs("step-1") == []

    async def test_list_level(self, store: Store) -> None:
        for key in ("a/one", "a/empty", "a/deep/er/two", "ab", "three"):
            await store.put(key, b"" if key == "a/empty" else b"1")
        for spelling in ("a", "a/"):
            found = await store.list_level(spelling)
            assert found is not None
            assert sorted((info.key, info.size_bytes) for info in found[0]) == [("a/empty", 0), ("a/one", 1)]
            assert found[1] == ["deep"]
        found = await store.list_level()
        assert found is not None
        assert (sorted(info.key for info in found[0]), found[1]) == (["ab", "three"], ["a"])
        assert await store.list_level("a/dee") is None
        assert await store.list_level("a/one") is None

    @pytest.mark.parametrize("key", ODD_KEYS)
    async def test_odd_keys(self, place: Place, store: Store, key: str) -> None:
        await store.put(key, b"small")
        assert place.raw_get(key) == b"small"
        await store.put_stream(key, Pieces([b"stre", b"am"]).iterate(), 6)
        assert place.raw_keys() == {key}
        assert bytes(await store.get_range(key, ByteRange(1, 5))) == b"trea"
        assert (await store.head(key)).key == key
        assert await keys_of(store) == [key]
        if "/" in key:
            directory = key.partition("/")[0]
            assert await store.list_dirs() == [directory]
            assert await keys_of(store, directory) == [key]
        await store.delete(key)
        assert place.raw_keys() == set()

    async def test_more_keys_than_one_page(self, place: Place, store: Store) -> None:
        expected = [f"many/{number % 7}/{number:05}" for number in range(1100)]
        at_once = asyncio.Semaphore(16)

        async def put(key: str) -> None:
            async with at_once:
                await store.put(key, b"")

        await asyncio.gather(*map(put, expected))
        await store.put("other", b"stays")
        assert place.raw_keys() == {*expected, "other"}
        assert await keys_of(store, "many") == sorted(expected)
        await store.delete_dir("many")
        assert place.raw_keys() == {"other"}

    async def test_delete(self, place: Place, store: Store) -> None:
        await store.put("dir/one", b"1")
        await store.put("dir/two", b"2")
        await store.delete("dir/one")
        assert place.raw_keys() == {"dir/two"}
        await store.delete("dir/one")
        await store.delete("no/such/key")
        assert place.raw_keys() == {"dir/two"}

    async def test_delete_dir(self, place: Place, store: Store) -> None:
        for key in ("a/b/one", "a/b/deep/two", "a/bc/three", "a/b.txt"):
            await store.put(key, b"1")
        await store.delete_dir("a/b")
        assert place.raw_keys() == {"a/bc/three", "a/b.txt"}
        assert await store.list_dirs("a") == ["bc"]
        await store.delete_dir("a/b")
        await store.delete_dir("no/such/dir")
        assert place.raw_keys() == {"a/bc/three", "a/b.txt"}

    # --- the rest --------------------------------------------------------------------------------------------------

    async def test_link_links_or_says_no(self, place: Place, store: Store, tmp_path: Path) -> None:
        source = tmp_path / "source.bin"
        source.write_bytes(b"linked bytes")
        if await store.link("dir/linked", source):
            assert place.raw_get("dir/linked") == b"linked bytes"
            assert await store.link("dir/linked", source), "linking the same file again is no error"
        else:
            assert place.raw_keys() == set()
        assert source.read_bytes() == b"linked bytes"

    async def test_many_at_once(self, place: Place, store: Store) -> None:
        objects = {f"dir/{number}": os.urandom(10_000 + number) for number in range(32)}
        await asyncio.gather(*(store.put(key, data) for key, data in objects.items()))
        read = await asyncio.gather(*map(store.get, objects))
        assert dict(zip(objects, read, strict=True)) == objects
        assert place.raw_keys() == set(objects)

    async def test_close_twice(self, store: Store) -> None:
        await store.put("object", b"1")
        await store.close()
        await store.close()
