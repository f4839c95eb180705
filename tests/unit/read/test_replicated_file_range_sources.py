"""Chunks of files from peers: a failed peer gets no more requests, and the shared tier is the fallback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tierckpt.checkpoint.peer_copies import PeerCopies
from tierckpt.errors import IntegrityError, ObjectNotFoundError, PeerError
from tierckpt.format.manifest import FileEntry, digest_of
from tierckpt.read.replicated_file import PEERS_TRIED_MAX, NearestSource, PeerSource
from tierckpt.stores.base import Store
from tierckpt.types import ByteRange

CHUNK = 4
DATA = b"0123456789"
ENTRY = FileEntry("shard", len(DATA), tuple(digest_of(DATA[at : at + CHUNK]) for at in range(0, len(DATA), CHUNK)))
FIRST = ByteRange(0, CHUNK)


@dataclass(frozen=True)
class Node:
    name: str


@dataclass
class Copies:
    """Copies on other nodes: ``answers`` has each node's reaction to a request."""

    answers: dict[str, Callable[[], bytes]]
    asked: list[str] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)

    @property
    def manifest(self) -> Any:
        class Manifest:
            entries = (ENTRY,)
            chunk_size_bytes = CHUNK

        return Manifest

    def holders(self, _: FileEntry) -> Sequence[Node]:
        return [Node(name) for name in self.answers]

    def report_damage(self, member: Node) -> None:
        self.reported.append(member.name)

    async def chunk(self, member: Node, entry: FileEntry, index: int) -> bytes:
        self.asked.append(member.name)
        self.answers[member.name]()
        return DATA[index * CHUNK : (index + 1) * CHUNK]


class Shared:
    uri = "s3://bucket/run/step-1"

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> bytes:
        return b"shared"


def raising(error: Exception) -> Callable[[], bytes]:
    def fail() -> bytes:
        raise error

    return fail


def good() -> bytes:
    return b""


def get(source: PeerSource | NearestSource, times: int = 1) -> list[bytes]:
    async def all_of_it() -> list[bytes]:
        return [bytes(await source.get_range("shard", FIRST)) for _ in range(times)]

    return asyncio.run(all_of_it())


def test_who_fails_is_not_asked_again_who_gives_wrong_bytes_is_reported_and_who_lacks_it_may_have_another() -> None:
    copies = Copies(
        {
            "slow": raising(PeerError("timed out")),
            "liar": raising(IntegrityError("other bytes")),
            "new": raising(ObjectNotFoundError("not yet")),
            "whole": good,
        }
    )
    source = NearestSource(cast(Store, Shared()), cast(PeerCopies, copies))
    assert get(source, times=2) == [b"shared", DATA[:CHUNK]]
    assert copies.asked == ["slow", "liar", "new", "new", "whole"], f"{PEERS_TRIED_MAX} at a time"
    assert copies.reported == ["liar"]
    assert source.peer_bytes == CHUNK


def test_without_a_store_the_error_is_that_of_the_peers_and_all_who_are_named_are_asked() -> None:
    names = [f"node-{number}" for number in range(PEERS_TRIED_MAX + 2)]
    copies = Copies({name: raising(PeerError(f"{name} is away")) for name in names})
    source = PeerSource(cast(PeerCopies, copies), copies.holders(ENTRY))
    for _ in range(2):
        with pytest.raises(PeerError, match="is away"):
            get(source)
    assert copies.asked == names
