"""The list of members: changes are detected in time, and false rows have no effect."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from tierckpt.peer.gossip import Gossip
from tierckpt.peer.membership import (
    BUSY_SECONDS_MAX,
    CONTESTED_MAX,
    FORGET_SECONDS,
    HEARTBEAT_AHEAD_MAX_MS,
    MEMBERS_MAX,
    ROWS_MAX,
    WEIGHT_RATIO_MAX,
    GossipTiming,
    Member,
    MemberList,
    balanced,
)
from tierckpt.types import Json

EPOCH = 1_800_000_000.0


class World:
    """Nodes under one virtual clock. ``reaches`` decides which pairs can connect."""

    def __init__(self, count: int, seed: int = 1) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.tables: dict[str, MemberList] = {}
        self.reaches: Callable[[str, str], bool] = lambda _asker, _asked: True
        self.asked = 0
        for index in range(count):
            self.add(f"n{index}")

    def add(self, name: str, address: str | None = None) -> MemberList:
        member = Member(name, address or f"10.0.{len(self.tables) // 250}.{len(self.tables) % 250 + 1}:7117")
        table = MemberList(member, clock=lambda: self.now, unix=lambda: EPOCH + self.now)
        self.tables[name] = table
        return table

    def seeds(self) -> list[str]:
        return [self.tables["n0"].me.address] if "n0" in self.tables else []

    def round(self) -> None:
        """Run a round of every node; a silent node's answer takes the whole round to time out."""
        at = {table.me.address: (name, table) for name, table in self.tables.items()}
        for name, table in list(self.tables.items()):
            table.begin_round()
            for address in table.targets(self.rng, self.seeds()):
                self.asked += 1
                other, answerer = at.get(address, ("", None))
                if answerer is None or not (self.reaches(name, other) and self.reaches(other, name)):
                    table.failed(address)
                    continue
                answerer.merge(table.my_row())
                table.merge_answer(answerer.answer(self.rng), address)
        self.now += 0.5

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.round()

    def live_of(self, name: str) -> set[str]:
        return {member.name for member in self.tables[name].live()}

    def agree(self, names: set[str] | None = None) -> bool:
        return all(self.live_of(name) == (names or set(self.tables)) for name in (names or self.tables))


def row(name: str = "b", heartbeat: float = EPOCH * 1000, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "address": "10.1.1.1:7117",
        "weight": 1.0,
        "domain": "",
        "heartbeat": int(heartbeat),
        **fields,
    }


@pytest.fixture
def world() -> World:
    return World(8)


# --- coming and going ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 8, 20])
def test_all_who_know_one_place_come_to_know_each_other(count: int) -> None:
    world = World(count)
    world.run(4)
    assert world.agree()


@pytest.mark.parametrize(("count", "lost", "seconds"), [(8, "n5", 3), (40, "n23", GossipTiming().dead_after(40) + 1)])
def test_who_stops_is_gone_from_every_list(count: int, lost: str, seconds: float) -> None:
    world = World(count, seed=3)
    world.run(8)
    assert world.agree()
    del world.tables[lost]
    world.run(seconds)
    assert world.agree()


def test_goodbye_is_noticed_in_a_second(world: World) -> None:
    world.run(4)
    leaving = world.tables["n5"]
    leaving.leave()
    for name, table in world.tables.items():
        if name != "n5":
            table.merge(leaving.my_row())
    assert "n5" in world.live_of("n1"), "said by somebody else it would be a way to talk others out"
    world.run(1)
    assert all("n5" not in world.live_of(name) for name in world.tables)
    assert world.tables["n1"].states()["left"] == 1


def test_who_comes_back_elsewhere_under_its_name_is_known_there(world: World) -> None:
    world.run(4)
    del world.tables["n5"]
    world.run(5)
    world.add("n5", "10.9.9.9:7117")
    world.run(2.5)
    assert world.agree()
    assert {m.address for m in world.tables["n1"].live() if m.name == "n5"} == {"10.9.9.9:7117"}


def test_a_partition_empties_both_lists_and_heals_by_itself(world: World) -> None:
    world.run(4)
    one, other = {"n0", "n1", "n2"}, {"n3", "n4", "n5", "n6", "n7"}
    world.reaches = lambda asker, asked: (asker in one) == (asked in one)
    world.run(4)
    assert world.agree(one)
    assert world.agree(other)
    world.reaches = lambda _asker, _asked: True
    world.run(15)
    assert world.agree()


def test_who_can_be_reached_by_others_only_is_not_offered_here() -> None:
    world = World(4)
    world.run(4)
    world.reaches = lambda asker, asked: {asker, asked} != {"n1", "n2"}
    world.run(3)
    assert "n2" not in world.live_of("n1")
    assert "n2" in world.live_of("n3")


def test_where_nobody_listens_nobody_is_sent_until_it_speaks_again(world: World) -> None:
    world.run(4)
    table, gone = world.tables["n1"], world.tables["n5"].me.address
    table.received_request("n5")  # it asks, and is gone all the same
    table.failed(gone, refused=True)
    assert "n5" not in world.live_of("n1")
    assert gone in table.targets(random.Random(0)), "it is asked again"
    world.round()
    assert "n5" in world.live_of("n1")


def behind_a_full_link(world: World, name: str, seconds: float) -> None:
    """What ``name`` says of itself does not get through, as it asks or as it answers; its other requests do."""
    world.reaches = lambda asker, asked: name not in (asker, asked)
    for _ in range(round(seconds / 0.5)):
        for other, table in world.tables.items():
            table.received_request(name)
            world.tables[name].received_request(other)
        world.round()


def test_who_asks_is_not_gone_though_its_word_is_late_but_not_for_ever(world: World) -> None:
    world.run(8)  # everybody has asked everybody
    behind_a_full_link(world, "n5", 6.0)
    assert world.agree()
    behind_a_full_link(world, "n5", BUSY_SECONDS_MAX)
    assert all("n5" not in world.live_of(name) for name in world.tables if name != "n5")
    world.reaches = lambda _asker, _asked: True
    world.run(15)
    assert world.agree()


def test_who_asks_and_never_answered_is_not_offered() -> None:
    world = World(4)
    world.reaches = lambda asker, asked: {asker, asked} != {"n1", "n2"}
    for _ in range(16):
        world.tables["n1"].received_request("n2")
        world.round()
    assert "n2" not in world.live_of("n1")


def test_a_node_that_was_stopped_does_not_take_its_own_stall_for_the_others_silence(world: World) -> None:
    world.run(4)
    table = world.tables["n0"]
    world.now += 60
    table.begin_round()
    assert len(table.live()) == 8


def test_a_node_whose_own_rounds_come_late_is_patient_with_the_others(world: World) -> None:
    world.run(4)
    table = world.tables["n0"]
    assert table.patience == 1.0
    for _ in range(3):
        world.now += 1.5  # overloaded: its rounds should be 0.5 s apart
        table.begin_round()
    assert {member.name for member in table.live()} == set(world.tables), "after 4.5 s"
    world.run(20)
    assert table.patience == 1.0


def test_the_dead_are_forgotten_and_a_tale_of_them_does_not_raise_them(world: World) -> None:
    world.run(4)
    old = world.tables.pop("n5").my_row()
    world.run(4)
    table = world.tables["n1"]
    assert table.states()["dead"] == 1
    world.now += FORGET_SECONDS
    table.begin_round()
    assert "n5" not in table.records
    table.merge(old)
    assert "n5" not in {member.name for member in table.live()}


# --- false rows ---------------------------------------------------------------------------------------------------


def test_nobody_is_talked_out_by_claims_of_others(world: World) -> None:
    """A member claims in every round that n5 has left, has another address, or a far higher heartbeat."""
    world.run(4)
    victim = world.tables["n5"]
    lies = (
        lambda heartbeat: row("n5", heartbeat + 5000, address=victim.me.address, left=True),
        lambda heartbeat: row("n5", heartbeat + HEARTBEAT_AHEAD_MAX_MS - 10_000, address=victim.me.address),
        lambda heartbeat: row("n5", 1 << 70, address=victim.me.address),
    )
    for lie in lies:
        for _ in range(12):
            for name, table in world.tables.items():
                if name != "n5":
                    table.merge(lie((EPOCH + world.now) * 1000))
            world.round()
            assert all("n5" in world.live_of(name) for name in world.tables)
    world.run(8)  # and when the liar falls silent, its high heartbeats do not make the true ones look old
    assert world.agree()


def test_a_claimed_address_is_corrected_by_the_member_itself(world: World) -> None:
    world.run(4)
    for table in world.tables.values():
        table.merge(row("n5", (EPOCH + world.now) * 1000 + 5000, address="10.66.66.66:1"))
    world.run(4)
    assert {m.address for t in world.tables.values() for m in t.live() if m.name == "n5"} == {
        world.tables["n5"].me.address
    }


def test_another_one_of_our_name_is_told_from_what_others_remember_of_us(world: World) -> None:
    table = world.tables["n0"]
    table.merge(row("n0", EPOCH * 1000 + 5))  # a memory, of another address: once
    assert 0 < table.contested < CONTESTED_MAX
    table.merge_answer({"me": row("n0"), "members": []}, "10.1.1.1:7117")
    assert table.contested >= CONTESTED_MAX


def test_its_own_word_at_its_address_holds_against_a_higher_beat_that_others_told(world: World) -> None:
    table = world.tables["n0"]
    table.merge(row("b", EPOCH * 1000 + 100_000))
    table.merge_answer({"me": row("b", EPOCH * 1000 + 7), "members": []}, "10.1.1.1:7117")
    assert table.records["b"].heartbeat == EPOCH * 1000 + 7
    table.merge_answer({"me": row("b", EPOCH * 1000 + 3, left=True), "members": []}, "10.6.6.6:7117")
    assert table.state(table.records["b"]) == "live", "an answer from another address is not b's"


def test_who_was_never_heard_of_twice_is_not_offered(world: World) -> None:
    table = world.tables["n0"]
    table.merge(row("ghost"))
    assert table.live() == [table.me]
    assert "10.1.1.1:7117" in table.targets(random.Random(0)), "it is asked itself"


@pytest.mark.parametrize(
    "bad",
    [
        None, [], "b", {}, row(name="../b"), row(name=7), row(name="b" * 200), row(name=""), row(domain="a\nb"),
        row(weight=float("nan")), row(weight=-1), row(weight="fast"), row(weight=1e300), row(address="host:7117"),
        row(address="169.254.169.254:80"), row(address="[fe80::1]:7117"), row(address="[::ffff:169.254.169.254]:80"),
        row(address="[fd00:ec2::254]:80"), row(address="224.0.0.1:7117"), row(address="0.0.0.0:7117"),
        row(address="10.0.0.1:0"), row(address="10.0.0.1:99999"), row(address="10.0.0.1"), row(address="fd00::1:7117"),
        row(address="127.0.0.1:7117"), row(heartbeat=1 << 60), row() | {"heartbeat": "x"},
        row() | {"heartbeat": float("inf")},
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_is_refused_and_counted(world: World, bad: Any) -> None:
    table = world.tables["n0"]
    table.merge(bad)
    assert (table.refused, table.records) == (1, {})


@pytest.mark.parametrize("bad", [None, [], {}, {"members": 3}, {"me": row("x"), "members": {}}])
def test_an_answer_that_is_none_changes_nothing(world: World, bad: Any) -> None:
    table = world.tables["n0"]
    table.merge_answer(bad, "10.1.1.1:7117")
    assert table.records == {}
    assert table.refused


@pytest.mark.slow
def test_a_flood_of_names_fills_the_list_only_to_its_bound(world: World) -> None:
    table = world.tables["n0"]
    for index in range(MEMBERS_MAX + 100):
        table.merge(row(f"x{index}", address=f"10.{index // 65536}.{index // 256 % 256}.{index % 256}:7117"))
    assert len(table.records) == MEMBERS_MAX
    for _ in range(round(table.timing.dead_after(MEMBERS_MAX) / 1.5) + 1):
        world.now += 0.75
        table.begin_round()
        world.now += 0.75
        table.begin_round()
    table.merge(row("newcomer"))
    assert "newcomer" in table.records, "the dead make room"


# --- bounds and weights -------------------------------------------------------------------------------------------


def test_a_round_asks_few_however_many_there_are(world: World) -> None:
    table = world.tables["n0"]
    for index in range(2000):
        for heartbeat in (1, 2):
            table.merge(
                row(f"x{index}", heartbeat + EPOCH * 1000, address=f"10.5.{index // 250}.{index % 250 + 1}:7117")
            )
    seeds = [f"10.7.{index // 250}.{index % 250 + 1}:7117" for index in range(2000)]
    assert len(table.targets(random.Random(0), seeds)) <= 12
    assert len(table.answer(random.Random(0))["members"]) == ROWS_MAX


def test_weights_are_made_comparable() -> None:
    members = [Member("a", "x", 0.0), Member("b", "x", 100.0), Member("c", "x", 200.0), Member("d", "x", 1e12)]
    assert [member.weight for member in balanced(members)] == [200.0, 100.0, 200.0, 200.0 * WEIGHT_RATIO_MAX]
    assert [member.weight for member in balanced(members[:1])] == [1.0]


# --- the task that asks (gossip.py) -------------------------------------------------------------------------------


def test_whatever_those_asked_do_the_task_goes_on_and_nobody_is_asked_twice_at_a_time() -> None:
    table = MemberList(Member("me", "10.0.0.1:7117"), timing=GossipTiming(0.01, 0.05, 5.0))
    asked: list[str] = []
    under_way: list[str] = []

    async def ask(address: str, me: Json, /) -> Json:
        assert address not in under_way
        asked.append(address)
        under_way.append(address)
        try:
            return await behave(address)
        finally:
            under_way.remove(address)

    async def behave(address: str) -> Json:
        match address:
            case "10.0.0.2:7117":
                return {"me": row("good", time.time() * 1000, address=address), "members": []}
            case "10.0.0.3:7117":
                raise ConnectionRefusedError
            case "10.0.0.4:7117":
                await asyncio.sleep(60)
            case "10.0.0.5:7117":
                raise ZeroDivisionError
        return ["no", "object"]  # type: ignore[return-value]

    looks = 0
    unhandled: list[Any] = []

    async def look_up() -> list[str]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError("no name server")
        return [f"10.0.0.{number}:7117" for number in range(2, 7)]

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        gossip = Gossip(table, ask, look_up, random.Random(0))
        task = asyncio.create_task(gossip.run())
        deadline = time.monotonic() + 60
        while (asked.count("10.0.0.2:7117") < 8 or len(set(asked)) < 5) and time.monotonic() < deadline:
            if not gossip.seeds:
                gossip.look_up_now()
            await asyncio.sleep(0.02)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert not unhandled
    assert [member.name for member in table.live()] == ["good", "me"]
    assert set(asked) == {f"10.0.0.{number}:7117" for number in range(2, 7)}
    assert asked.count("10.0.0.4:7117") < asked.count("10.0.0.2:7117"), "silent nodes get fewer requests"
