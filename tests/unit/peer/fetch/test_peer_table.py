"""A node's measurements of its peers: their chunks, order of arrival, and requests in flight."""

from __future__ import annotations

import random

import pytest

from tierckpt.peer.fetch.peer_table import SHARED, ChunkRequest, PeerTable, any_of, mask, positions
from tierckpt.peer.membership import Member

TOTAL = 40


def table(*names: str) -> PeerTable:
    made = PeerTable(TOTAL, "a", rng=random.Random(1))
    made.set_members([Member(name, f"{name}:1") for name in ("a", *names)], 0.0)
    return made


@pytest.mark.parametrize("chunks", [[], [0], [7], [8], [4095], [0, 63, 64, 65], [17, 900, 901], list(range(300))])
def test_a_set_of_chunks_has_the_positions_that_it_was_made_of(chunks: list[int]) -> None:
    assert positions(mask(chunks)) == chunks
    assert not chunks or any_of(mask(chunks), random.Random(2)) in chunks


def test_a_chunk_that_is_reported_twice_is_one_copy() -> None:
    made = table("b", "c")
    made.update("b", 0.1, new=[3, 3, 5])
    made.update("b", 0.2, new=[3])
    made.update("b", 0.3, whole=True)
    made.update("c", 0.3, new=[5, TOTAL])
    assert [made.copies[chunk] for chunk in (3, 4, 5)] == [1, 1, 2]
    assert made.available == (1 << TOTAL) - 1


def test_a_chunk_that_a_peer_holds_is_not_being_fetched_by_it() -> None:
    made = table("b")
    made.update("b", 0.1, fetching=[3, 4])
    made.update("b", 0.2, new=[3])
    assert made.peers["b"].fetching == {4: 0.1}
    made.update("b", 0.3, fetching=[4, 5])
    assert made.peers["b"].fetching == {4: 0.1, 5: 0.3}, "since when is kept"


def test_what_is_in_flight_is_forgotten_when_it_ends_either_way() -> None:
    made = table("b")
    requests = [ChunkRequest(3, "b", "holder"), ChunkRequest(3, SHARED, "owned"), ChunkRequest(4, "b", "owner", 2.0)]
    for request in requests:
        made.begin(request, 1.0)
    assert (made.in_flight, made.store_requests, made.waiting_requests) == (mask([3, 4]), 1, 1)
    made.failed(requests[0], 1.5, "cancelled")
    assert made.in_flight == mask([3, 4]), "the other request for it is left"
    assert made.completed(requests[1], 2.0) == 1.0
    made.failed(requests[2], 2.0, "missing")
    assert (made.in_flight, made.store_requests, made.waiting_requests) == (0, 0, 0)
    assert made.requests == {} == made.peers["b"].requests
    assert made.from_store == mask([3])
    assert not made.missing >> 3 & 1
