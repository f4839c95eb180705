"""Conditional reads that servers reject: a file counts as changed only if the store reports a difference."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tierckpt.cache.file_set import FileSpec
from tierckpt.cache.store_chunks import Versions
from tierckpt.errors import PreconditionFailedError, StoreError
from tierckpt.stores.fsspec_store import UniversalStore
from tierckpt.types import ByteRange, ObjectInfo

DATA = b"0123456789"
ITEM = FileSpec("dir/a", "dir/a", len(DATA), "listed")
PART = ByteRange(2, 5)


class Server(UniversalStore):
    """A store with one ETag in listings, ``head`` in HEAD responses, and GETs that accept ``accepted`` conditions."""

    def __init__(self, head: str = "listed", accepted: tuple[str | None, ...] = (None,), status: int = 412) -> None:
        self.has_put_if_absent = False
        self.uri, self.data, self.listed, self.status = "s3://bucket/m", DATA, "listed", status
        self.headed, self.accepted, self.calls = head, accepted, list[str]()
        self.after_get: Callable[[Server], None] = lambda _: None

    async def head(self, key: str) -> ObjectInfo:
        self.calls.append("head")
        return ObjectInfo(key, len(self.data), self.headed)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        self.calls.append(f"list {prefix}")
        yield ObjectInfo("dir/b", 1, "other")
        yield ObjectInfo("dir/a", len(self.data), self.listed)

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> bytes:
        self.calls.append(f"get {if_match}")
        if if_match not in self.accepted:
            if self.status == 412:
                raise PreconditionFailedError("changed")
            raise StoreError("refused", status=self.status)
        data = self.data[byte_range.start : byte_range.stop]
        self.after_get(self)
        return data


def read(store: Any, times: int = 1) -> list[bytes]:
    async def reads() -> list[bytes]:
        versions = Versions(store)
        return [bytes(await versions.read(ITEM, PART, None)) for _ in range(times)]

    return asyncio.run(reads())


def test_other_etags_of_responses_are_compared_with_the_listing() -> None:
    store = Server(head="answered")
    assert read(store, 2) == [b"234"] * 2
    assert store.calls == ["get listed", "head", "list dir", "get None", "head", "get None", "head"]


def test_an_accepted_condition_needs_no_extra_request() -> None:
    store = Server(accepted=("listed",))
    assert read(store, 2) == [b"234"] * 2
    assert store.calls == ["get listed"] * 2


@pytest.mark.parametrize("status", [412, 501, 400])
def test_a_rejected_condition_is_replaced_by_head_requests(status: int) -> None:
    store = Server(status=status)
    assert read(store, 2) == [b"234"] * 2
    assert store.calls == ["get listed", "head", "get None", "head", "get None", "head"]


@pytest.mark.parametrize("fact", ["headed", "listed", "data"])
def test_changed_objects_raise(fact: str) -> None:
    store = Server()
    setattr(store, fact, b"another" if fact == "data" else "another")
    store.listed = store.headed if fact == "headed" else store.listed
    if fact == "listed":
        store.headed = "another"
    with pytest.raises(PreconditionFailedError):
        read(store)
    assert not [call for call in store.calls if call == "get None"]


def test_a_change_during_an_unconditional_read_is_detected() -> None:
    store = Server()
    store.after_get = lambda store: setattr(store, "headed", "another")
    with pytest.raises(PreconditionFailedError, match="dir/a has changed"):
        read(store)


def test_other_errors_pass_through() -> None:
    with pytest.raises(StoreError, match="refused"):
        read(Server(status=403))
