"""Whose chunk is it: the same on every node, in proportion to weights, and little moves when members come and go."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tierckpt.peer.fetch import scheduler
from tierckpt.peer.fetch.scheduler import ChunkOwners, ranked
from tierckpt.peer.membership import Member

VERSION = "0123456789abcdef" * 2
CHUNKS = 20_000


def members(count: int, weight: float = 1.0) -> list[Member]:
    return [Member(f"node-{number}", f"10.0.0.{number}:7117", weight) for number in range(count)]


def owners(known: list[Member], version: str = VERSION) -> list[str]:
    return ChunkOwners(version, known).owners(CHUNKS)


def test_every_node_places_alike_in_whatever_order_it_has_heard_of_the_others() -> None:
    known = members(9)
    shuffled = random.Random(5).sample(known, len(known))
    assert owners(known) == owners(shuffled)
    assert ranked(f"{VERSION}/7", known) == ranked(f"{VERSION}/7", shuffled)


@pytest.mark.parametrize("weights", [(1.0,) * 5, (1.0, 2.0, 3.0, 0.5, 1.5)])
def test_owners_of_all_chunks_are_the_first_in_the_ranks_of_each(weights: tuple[float, ...]) -> None:
    known = [Member(f"node-{number}", "", weight) for number, weight in enumerate(weights)]
    place = ChunkOwners(VERSION, known)
    found = place.owners(500)
    for chunk in range(500):
        names = [member.name for member in ranked(f"{VERSION}/{chunk}", known)]
        assert place.ranks(chunk) == tuple(names)
        assert found[chunk] == names[0]


def test_parts_are_in_proportion_to_the_weights() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 1.0}
    parts = Counter(owners([Member(name, "", weight) for name, weight in weights.items()]))
    for name, weight in weights.items():
        assert parts[name] / CHUNKS == pytest.approx(weight / 8.0, abs=0.015)


def test_who_joins_takes_its_part_and_nothing_else_moves() -> None:
    before, after = owners(members(8)), owners(members(9))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {"node-8"}
    assert len(moved) / CHUNKS == pytest.approx(1 / 9, abs=0.015)


def test_what_a_member_leaves_goes_to_who_was_next_in_rank() -> None:
    known = members(8)
    left = ChunkOwners(VERSION, known)
    before, after = left.owners(2000), ChunkOwners(VERSION, known[:-1]).owners(2000)
    for chunk in range(2000):
        if before[chunk] == "node-7":
            assert after[chunk] == left.ranks(chunk)[1]
        else:
            assert after[chunk] == before[chunk]


def test_another_version_is_placed_otherwise() -> None:
    same = sum(one == other for one, other in zip(owners(members(8)), owners(members(8), "f" * 32), strict=True))
    assert same / CHUNKS == pytest.approx(1 / 8, abs=0.02)


def test_a_weight_that_cannot_be_counts_as_the_least() -> None:
    known = [*members(3), Member("liar", "", float("nan")), Member("idle", "", 0.0), Member("zero", "", -1.0)]
    assert set(owners(known)) == {"node-0", "node-1", "node-2"}


def test_of_very_many_members_some_share_the_chunks_and_they_hardly_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "OWNERS_MAX", 16)
    known = members(100)
    chosen, without = ChunkOwners(VERSION, known), ChunkOwners(VERSION, known[1:])
    assert len(chosen.members) == 16
    assert len(set(chosen.members) ^ set(without.members)) <= 2
