"""The scheduler's rules one by one, with a clock held by the test."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from tierckpt.peer.fetch import scheduler
from tierckpt.peer.fetch.peer_table import PeerTable
from tierckpt.peer.fetch.scheduler import (
    SHARED,
    ChunkOwners,
    ChunkRequest,
    FetchScheduler,
    StoreSlots,
    Tuning,
    WaitUntil,
    ranked,
)
from tierckpt.peer.membership import Member

VERSION = "0123456789abcdef" * 2
TOTAL = 64
SETTLED = 1.0
TUNING = Tuning()


def member(name: str) -> Member:
    return Member(name, f"{name}:1")


def schedule(
    others: Iterable[str] = "bcd", *, me: str = "a", whole: str = "", total: int = TOTAL, seed: int = 3
) -> FetchScheduler:
    """Of node ``me``, which has met ``others`` and has let the first moment pass. Those in ``whole`` have all."""
    made = FetchScheduler(PeerTable(total, me, rng=random.Random(seed)), VERSION)
    names = [me, *others]
    made.set_members([member(name) for name in names], names, 0.0)
    for name in others:
        made.table.update(name, 0.1)
    for name in whole:
        made.table.update(name, 0.2, whole=True)
    return made


def all_asks(made: FetchScheduler, now: float, most: int = 200) -> list[ChunkRequest]:
    """Everything that it wants to have under way at a time."""
    found: list[ChunkRequest] = []
    while len(found) < most and isinstance(decision := made.choose(now), ChunkRequest):
        found.append(decision)
    return found


def from_store(asks: Iterable[ChunkRequest]) -> list[int]:
    return [ask.chunk for ask in asks if ask.source is SHARED]


def owned_later(made: FetchScheduler, name: str) -> list[int]:
    """``owned``, once the first moment has passed."""
    made.assign_owners(SETTLED)
    return owned(made, name)


def owned(made: FetchScheduler, name: str) -> list[int]:
    return [chunk for chunk, owner in enumerate(made.chunk_owners) if owner == name]


def test_nobody_goes_to_the_store_before_all_have_told_what_they_hold() -> None:
    made = schedule()
    assert isinstance(made.choose(0.1), WaitUntil)
    assert isinstance(made.choose(TUNING.settle_seconds + 0.01), ChunkRequest)


MANY = [f"n{number}" for number in range(20)]


def fetch_all(made: FetchScheduler, others: Iterable[str], now: float = SETTLED) -> list[ChunkRequest]:
    """All that it fetches from the store while the others are there and get nowhere."""
    found: list[ChunkRequest] = []
    while asks := [ask for ask in all_asks(made, now) if ask.source is SHARED]:
        for ask in asks:
            made.completed(ask, now)
        found += asks
        now += 0.01
        for name in others:
            made.table.update(name, now, fetching=())
    return found


def test_a_node_fetches_its_own_from_the_store_first_and_then_helps_who_is_behind() -> None:
    made = schedule()
    own, asks = set(owned_later(made, "a")), fetch_all(made, "bcd")
    assert {ask.chunk for ask in asks[: len(own)]} == own
    assert {ask.reason for ask in asks[: len(own)]} == {"owned"}
    assert {ask.reason for ask in asks[len(own) :]} == {"owner lags"}


def test_helpers_of_one_that_is_behind_take_different_chunks_from_the_end_of_its_own() -> None:
    taken: list[int] = []
    for name in "bcd":
        made = schedule("abcd".replace(name, ""), me=name, seed=1)
        for other in "bcd":
            made.table.update(
                other, 0.1, new=[chunk for chunk in range(TOTAL) if owned_later(made, "a").count(chunk) == 0]
            )
        asks = fetch_all(made, "a")
        taken += [ask.chunk for ask in asks if ask.reason == "owner lags"]
    order = made.order_of("a", owned_later(made, "a"))
    assert len(taken) == len(set(taken))
    assert set(taken) <= set(order[TUNING.steal_margin :])


def test_what_somebody_holds_is_asked_of_the_holder_even_when_it_is_our_own() -> None:
    made = schedule(whole="b")
    asks = all_asks(made, SETTLED)
    assert asks
    assert {ask.source for ask in asks} == {"b"}


def test_what_another_fetches_from_the_store_is_not_fetched_too() -> None:
    made = schedule()
    all_asks(made, SETTLED)
    mine = owned(made, "a")
    fresh = schedule()
    fresh.table.update("b", 0.2, fetching=mine)
    assert from_store(all_asks(fresh, SETTLED)) == []


def test_a_chunk_that_is_on_its_way_to_its_owner_is_waited_for_there_by_the_next_in_rank() -> None:
    made = schedule("bc")
    all_asks(made, SETTLED)
    chunk = owned(made, "b")[0]
    made.table.update("b", SETTLED, fetching=[chunk])
    waits = [ask for ask in all_asks(made, SETTLED) if ask.wait_seconds]
    assert [(ask.chunk, ask.source) for ask in waits] == [(chunk, "b")]


def test_rare_chunks_come_first() -> None:
    hits = 0
    for seed in range(20):
        again = schedule("bc", seed=seed)
        again.table.update("b", 0.1, new=[*range(8), 50])
        again.table.update("c", 0.1, new=range(8))
        first = [ask.chunk for ask in all_asks(again, SETTLED) if ask.source is not SHARED][:3]
        hits += 50 in first
    assert hits >= 15


def test_the_window_that_the_loader_needs_next_comes_before_the_rest() -> None:
    made = schedule("bc", whole="bc")
    window = range(20, 28)
    asked = [ask.chunk for _ in range(8) if isinstance(ask := made.choose(SETTLED, window), ChunkRequest)]
    assert set(asked) == set(window)


def test_no_peer_has_more_than_its_part_of_the_requests() -> None:
    made = schedule("bcde", whole="b")
    for name in "cde":
        made.table.update(name, 0.2, new=[1])
    asks = all_asks(made, SETTLED)
    assert sum(ask.source == "b" for ask in asks) <= TUNING.slots // 2


def test_one_that_does_not_answer_is_left_alone_and_its_chunks_go_to_the_next_in_rank() -> None:
    made = schedule("b")
    theirs = set(owned_later(made, "b"))
    made.table.mark_unreachable("b", SETTLED)
    first = made.source(min(theirs), SETTLED)
    assert first == ChunkRequest(min(theirs), SHARED, "owner unreachable")
    made.completed(first, SETTLED)
    fetched = {ask.chunk for ask in fetch_all(made, ())}
    assert theirs - {min(theirs)} <= fetched


def test_what_a_peer_said_it_has_and_does_not_give_is_not_asked_of_it_again() -> None:
    made = schedule("b", whole="b")
    first = made.choose(SETTLED)
    assert isinstance(first, ChunkRequest)
    made.failed(first, SETTLED, "missing")
    made.table.update("b", SETTLED, whole=True)
    assert all(ask.source is SHARED for ask in all_asks(made, SETTLED) if ask.chunk == first.chunk)


def test_one_that_is_busy_is_asked_again_a_moment_later() -> None:
    made = schedule("b", whole="b")
    ask = made.choose(SETTLED)
    assert isinstance(ask, ChunkRequest)
    made.failed(ask, SETTLED, "busy")
    again = made.choose(SETTLED + 2 * TUNING.retry_seconds_min)
    assert isinstance(again, ChunkRequest)
    assert again.source == "b"


def test_what_is_late_is_asked_of_another_holder_and_of_no_third() -> None:
    made = schedule()
    made.table.update("b", 0.2, new=[5])
    ask = made.source(5, SETTLED)
    assert isinstance(ask, ChunkRequest)
    assert ask.source == "b"
    assert made.hedge_at(ask) >= SETTLED + TUNING.hedge_seconds_min
    late = made.hedge_at(ask)
    assert made.hedge(5, late) is None, "nobody else has it"
    made.table.update("c", late, new=[5])
    made.table.update("d", late, new=[5])
    other = made.hedge(5, late)
    assert other is not None
    assert other.source in ("c", "d")
    assert made.hedge(5, late) is None


def test_hedges_under_way_are_few() -> None:
    made = schedule("bc", whole="bc")
    asks = all_asks(made, SETTLED)
    hedges = [made.hedge(ask.chunk, SETTLED + 100.0) for ask in asks]
    assert sum(hedge is not None for hedge in hedges) == TUNING.hedges_max


def answered_by_all_but_b(made: FetchScheduler) -> float:
    """Have all but b answer at once, for a while. Returns the time then."""
    now = SETTLED
    for _ in range(12):
        for ask in all_asks(made, now):
            if ask.source != "b":
                made.completed(ask, now + 0.1)
        now += 0.1
    return now


def test_of_a_slow_peer_requests_are_taken_back_and_its_chunks_are_stood_in_for() -> None:
    made = schedule(total=2048)
    for name in "bcd":
        made.table.update(name, 0.2, new=range(400))
    now = answered_by_all_but_b(made)
    asked_of_b = list(made.table.peers["b"].requests)
    assert len(asked_of_b) > 1
    made.choose(now + 1.0)
    taken_back = made.take_unwanted()
    assert {ask.source for ask in taken_back} == {"b"}
    assert len(taken_back) >= len(asked_of_b) - 1
    for ask in taken_back:
        made.failed(ask, now + 1.0, "cancelled")
    assert "owner unreachable" in {ask.reason for ask in fetch_all(made, (), now + 1.0)}
    asked_again = all_asks(made, now + 1.0)
    assert sum(ask.source == "b" for ask in asked_again) <= 1


def test_one_that_is_ahead_takes_what_others_hold_before_more_from_the_store() -> None:
    made = schedule(total=2048)
    mine = owned_later(made, "a")
    brought = mine[: TUNING.ahead_max]
    made.table.update("b", SETTLED, new=owned(made, "b")[:400])
    for chunk in brought[:-1]:
        made.completed(ChunkRequest(chunk, SHARED, "owned"), SETTLED)
    assert made.choose(SETTLED).source is SHARED  # type: ignore[union-attr]
    made.completed(ChunkRequest(brought[-1], SHARED, "owned"), SETTLED)
    asks = [made.choose(SETTLED) for _ in range(3)]
    assert {ask.source for ask in asks if isinstance(ask, ChunkRequest)} == {"b"}
    made.table.update("c", SETTLED, new=brought[:1])  # a chunk has spread
    assert made.choose(SETTLED).source is SHARED  # type: ignore[union-attr]


@pytest.mark.parametrize(("slow_to", "owns"), [("b", True), ("bc", False), ("bcd", False), ("bx", True)])
def test_who_is_slow_to_two_thirds_of_the_others_owns_nothing_until_they_say_so_no_more(
    slow_to: str, owns: bool
) -> None:
    names = "abcd"
    made = schedule(others=names[1:])
    members = [member(name) for name in names]
    made.set_members(members, names, SETTLED, slow_to=slow_to)
    asks = all_asks(made, SETTLED)
    assert bool(from_store(asks)) == owns
    made.set_members(members, names, SETTLED + 1.0)
    again = from_store([*asks, *all_asks(made, SETTLED + 1.0)])
    assert again
    assert set(again) <= set(owned(made, "a"))


@pytest.mark.parametrize(("owed_seconds", "is_slow"), [(0.8, False), (4.0, True)])
def test_one_answer_that_is_late_as_some_are_does_not_make_a_peer_slow(owed_seconds: float, is_slow: bool) -> None:
    made = schedule(total=2048)
    for name in "bcd":
        made.table.update(name, 0.2, new=range(400))
    made.assign_owners(now := SETTLED)
    made._own.clear()  # private: it owns no chunk to fetch
    for number in range(40):
        ask = made.choose(now)
        assert isinstance(ask, ChunkRequest)
        made.completed(ask, now + (0.6 if number % 5 == 4 else 0.1))
        now += 0.7
    asked = next(ask for ask in all_asks(made, now) if ask.source == "b")
    for ask, _ in [pair for pairs in list(made.table.requests.values()) for pair in pairs]:
        if ask is not asked:
            made.completed(ask, now + 0.1)
    made.choose(now + owed_seconds)
    assert ("b" in made.table.slow) == is_slow


def test_when_nothing_moves_any_node_ends_up_at_the_store() -> None:
    made = schedule("bcdef")
    now, seen = SETTLED, set[int]()
    for _ in range(400):
        now += 0.25
        for name in "bcdef":
            made.table.update(name, now, fetching=())
        for ask in all_asks(made, now):
            seen.add(ask.chunk)
            made.completed(ask, now)
        made.table.progress_at = min(made.table.progress_at, now - 10.0)  # its own fetches do not count here
    assert seen == set(range(TOTAL))


def test_somebody_who_reads_on_demand_asks_the_holder_then_the_owner_then_the_store() -> None:
    made = schedule("bc")
    all_asks(made, SETTLED)
    chunk = owned(made, "b")[-1]
    first = made.source(chunk, SETTLED)
    assert isinstance(first, ChunkRequest)
    assert (first.source, first.wait_seconds) == ("b", TUNING.wait_seconds)
    made.failed(first, SETTLED, "missing")
    tried: set[str | None] = {"b"}
    while isinstance(ask := made.source(chunk, SETTLED, tried), ChunkRequest) and ask.source is not SHARED:
        made.failed(ask, SETTLED, "missing")
        tried.add(ask.source)
    assert ask == ChunkRequest(chunk, SHARED, "no holder")


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_many_nodes_have_few_chunks_of_the_store_under_way(nodes: int) -> None:
    made = schedule(others=[f"n{number}" for number in range(nodes - 1)], total=256)
    assert len(from_store(all_asks(made, SETTLED))) == made.store_slots() <= max(1, 256 // (32 * nodes))


def test_of_far_more_members_than_chunks_it_watches_some_that_own_any() -> None:
    made = FetchScheduler(PeerTable(4, "a", rng=random.Random(3)), VERSION)
    names = ["a", *(f"n{number}" for number in range(500))]
    made.set_members([member(name) for name in names], names, 0.0)
    made.assign_owners(SETTLED + TUNING.settle_seconds_max)
    assert len(made.table.peers.keys() & set(made.chunk_owners)) >= 2
    assert len(made.table.peers) <= TUNING.watched_max + 2


# --- number of concurrent requests to the store -----------------------------------------------------------------------

SLOTS_MAX = 8


def run_rounds(slots: StoreSlots, seconds: float, count: int) -> None:
    for _ in range(count):
        slots.completed(seconds, slots.factor, SLOTS_MAX)


def test_where_each_takes_longer_it_stays_with_few() -> None:
    slots = StoreSlots()
    for _ in range(100):
        slots.completed(float(slots.factor), slots.factor, SLOTS_MAX)
    assert slots.factor == 1


def test_a_store_that_slows_down_later_makes_it_go_back() -> None:
    slots = StoreSlots()
    run_rounds(slots, 1.0, 2 + 4 + 8)
    run_rounds(slots, 3.0, 16 + 8 + 4)
    assert slots.factor == 1


@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_try_together_do_not_creep_up_together(seed: int) -> None:
    """Sixteen share a store that gives one chunk a second; each sees the others' requests in its own times."""
    rng = random.Random(seed)
    all_slots = [StoreSlots() for _ in range(16)]
    for step in range(4000):
        slots = rng.choices(all_slots, [one.factor for one in all_slots])[0]
        slots.completed(float(sum(one.factor for one in all_slots)), slots.factor, SLOTS_MAX)
        if step > 500:
            assert sum(one.factor for one in all_slots) <= 3 * len(all_slots)


def test_what_is_late_makes_it_go_back_before_it_comes() -> None:
    slots = StoreSlots()
    run_rounds(slots, 1.0, 2 + 4)
    assert slots.factor == 4
    slots.in_flight([2.0, 2.5, 2.5, 2.5])
    assert slots.factor == 4
    slots.in_flight([0.1, 3.0, 3.0, 3.0])
    assert slots.factor == 1
    run_rounds(slots, 1.0, 100)
    assert slots.factor == 1, "one try is enough"


# --- whose chunk is it ------------------------------------------------------------------------------------------------
# The same on every node, in proportion to weights, and little moves when members come and go.

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
