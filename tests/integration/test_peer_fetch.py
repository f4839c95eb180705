"""Filling together: real agents, real prefetches, one store that counts; and what a session makes of peers that lie.

Faults of nodes and networks are in tests/fault/test_fanout.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.servers.cluster import Cluster, Model, dumped
from tests.servers.fleet import Fleet
from tests.servers.origin import Origin
from tests.services import free_port
from tierckpt.cache.file_set import FileSet, FileSpec
from tierckpt.cache.peer_fill import NotNowError
from tierckpt.errors import IntegrityError, ObjectNotFoundError, PeerError, StoreUnavailableError
from tierckpt.format.manifest import digest_of
from tierckpt.peer.fetch.fetch_session import ClusterView, FetchSession
from tierckpt.peer.fetch.peer_table import Tuning
from tierckpt.peer.membership import Member
from tierckpt.peer.peer_client import ChunkAnswer
from tierckpt.peer.peer_http import ChunkReport

MiB = 1 << 20
SIZES = {"model-1.safetensors": 9 * MiB + 77, "model-2.safetensors": 7 * MiB, "tokenizer.json": 4000}
SETTINGS = {"TIERCKPT_CHUNK_SIZE_BYTES": str(MiB // 2)}


# --- real nodes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("session")
    (folder / "store" / "models").mkdir(parents=True)
    with Origin.running(folder / "store", rate=20 * MiB) as origin, Fleet.running(folder / "logs") as fleet:
        model = Model.make(folder / "store" / "models", "one", SIZES)
        made = Cluster(fleet, origin, model, folder / "nodes")
        made.add([f"127.0.0.1:{free_port()}" for _ in range(3)], SETTINGS)
        try:
            made.start_agents()
            yield made
        finally:
            made.close()


@pytest.mark.slow
def test_three_nodes_read_a_model_once_and_say_where_it_came_from(cluster: Cluster) -> None:
    cluster.origin.reset()
    cluster.fetch()
    results = cluster.results()
    assert all(result.is_right for result in results), dumped(results)
    size = cluster.model.size_bytes
    assert size <= cluster.origin.sent_bytes() <= 1.02 * size + 2 * MiB, dumped(results)
    for result in results:
        sources = result.answer["bytes_by_source"]
        assert sources["peer"] + sources["shared"] == size
        assert sum(peer["bytes"] for peer in result.answer["peers"]) == sources["peer"] > 0
        assert result.answer["slowest_chunk"]["from"]
        assert not any(peer["banned"] for peer in result.answer["peers"])


@pytest.mark.slow
def test_a_directory_is_filled_from_peers_as_the_cache_is(cluster: Cluster, tmp_path: Path) -> None:
    cluster.fetch()
    cluster.results()
    cluster.origin.reset()
    for entry in (cluster.nodes[0].local_root / "cache").glob("one-*"):  # else the node copies its own
        shutil.rmtree(entry)
    target = tmp_path / "copy"
    cluster.fetch(cluster.nodes[:1], more=["--to", str(target)])
    [result] = cluster.results(cluster.nodes[:1])
    assert result.is_right, dumped([result])
    assert cluster.model.problems(target) == []
    assert result.source("peer") == cluster.model.size_bytes, "the others have all of it"
    assert cluster.origin.sent_bytes() == 0


def test_without_an_agent_that_takes_part_everything_comes_from_the_store(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.nodes[0]
    lonely = type(node)(
        "lonely", tmp_path / "lonely", "", {**node.env, "TIERCKPT_LOCAL_ROOT": str(tmp_path / "lonely")}
    )
    cluster.origin.reset()
    lonely.env["TIERCKPT_PEER_LISTEN"] = cluster.nodes[1].address  # which is taken
    cluster.log_level = "info"
    cluster.fetch([lonely])
    [result] = cluster.results([lonely])
    assert result.is_right, dumped([result])
    assert result.source("shared") == cluster.model.size_bytes
    assert lonely.fetch is not None
    assert lonely.fetch.log().count("without peers") == 1


# --- one session among peers that the test plays ----------------------------------------------------------------------

CHUNK = 1000
COUNT = 12
QUICK = Tuning(settle_seconds=0.1, wait_seconds=0.2, stall_seconds=0.3, hedge_seconds_min=0.2)


@dataclass
class Played:
    """A cluster of which only one node is real. ``give`` decides what a peer answers."""

    has_digests: bool = True
    holders: dict[str, set[int]] = field(default_factory=dict)
    give: Callable[[str, int, bytes], bytes] = lambda name, ordinal, data: data
    claim: Callable[[str, int, str], str] = lambda name, ordinal, digest: digest
    asked: list[tuple[str, int]] = field(default_factory=list)
    from_store_ordinals: list[int] = field(default_factory=list)
    marks: list[tuple[int, bool]] = field(default_factory=list)
    nowhere: list[int] = field(default_factory=list)
    """Chunks that were not said to be on their way any more, and not here yet."""
    reports: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        data = random.Random(1).randbytes(CHUNK * COUNT)
        self.chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        digests = tuple(map(digest_of, self.chunks)) if self.has_digests else ()
        self.frozen = FileSet("s3://bucket/model", (FileSpec("m", "m", len(data), "e", digests),), CHUNK)
        self.landed: dict[int, bytes] = {}

    # the node's own part

    def has(self, index: int, chunk: int) -> bool:
        return chunk in self.landed

    async def read(self, index: int, chunk: int, into: memoryview) -> tuple[memoryview, str]:
        self.from_store_ordinals.append(chunk)
        into[:] = self.chunks[chunk]
        return into, digest_of(into)

    def mark_shared(self, index: int, chunk: int, is_fetched: bool) -> None:
        self.marks.append((chunk, is_fetched))
        if not is_fetched and chunk not in self.landed:
            self.nowhere.append(chunk)

    async def view(self, is_fetching: bool) -> ClusterView:
        members = tuple(Member(name, f"{name}:1") for name in ("me", *self.holders))
        return ClusterView(members[0], members, frozenset())

    async def report_slow(self, member: Member, version: str) -> None:
        pass

    async def report(self, report: object) -> None:
        self.reports.append(report)

    # the peers

    async def chunk(
        self,
        member: Member,
        version: str,
        chunk_size_bytes: int,
        ordinal: int,
        into: memoryview,
        *,
        expected: str = "",
        after: int = 0,
        wait_seconds: float = 0.0,
    ) -> ChunkAnswer:
        self.asked.append((member.name, ordinal))
        await asyncio.sleep(0)
        if ordinal not in self.holders[member.name]:
            await asyncio.sleep(wait_seconds)
            raise ObjectNotFoundError("not here")
        into[:] = self.give(member.name, ordinal, self.chunks[ordinal])
        digest = digest_of(into)
        if digest != (expected or self.claim(member.name, ordinal, digest)):
            raise IntegrityError("other bytes")
        return ChunkAnswer(digest, self._held(member.name, after))

    async def chunk_report(
        self, member: Member, version: str, chunk_size_bytes: int, *, after: int = 0, interested: bool = False
    ) -> ChunkReport:
        return self._held(member.name, after)

    def _held(self, name: str, after: int) -> ChunkReport:
        lines = [
            (ordinal, "" if self.has_digests else self.claim(name, ordinal, self._digest(name, ordinal)))
            for ordinal in sorted(self.holders[name])
        ]
        return ChunkReport(COUNT, len(lines), len(lines), tuple(lines[after:]))

    def _digest(self, name: str, ordinal: int) -> str:
        return digest_of(self.give(name, ordinal, self.chunks[ordinal]))

    async def close(self) -> None:
        pass

    async def begin(self) -> FetchSession:
        return FetchSession(self, self, self, await self.view(False), self, tuning=QUICK)

    async def fill(self) -> FetchSession:
        """Fetch all as a fill does, with two workers."""
        session = await self.begin()

        async def work() -> None:
            order = session.order([(0, chunk) for chunk in range(COUNT) if chunk not in self.landed], whole=True)
            while (taken := await order.take()) is not None:
                into = memoryview(bytearray(CHUNK))
                try:
                    await session.fetch_chunk(taken.index, taken.chunk, into, taken.request)
                except NotNowError:
                    pass
                else:
                    self.landed[taken.chunk] = bytes(into)
                    await session.chunk_written(taken.index, taken.chunk)
                    order.done(taken)

        try:
            async with asyncio.timeout(60):
                await work()
        finally:
            await session.close()
        return session

    @property
    def is_right(self) -> bool:
        ours = b"".join(self.landed[chunk] for chunk in sorted(self.landed))
        return hashlib.sha256(ours).digest() == hashlib.sha256(b"".join(self.chunks)).digest()


EVERY = set(range(COUNT))


async def test_what_peers_hold_is_not_read_from_the_store() -> None:
    played = Played(holders={"b": EVERY, "c": set(range(6))})
    session = await played.fill()
    assert played.is_right
    assert played.from_store_ordinals == []
    assert sum(session.sources.peer_bytes.values()) == CHUNK * COUNT
    assert played.reports


async def test_who_is_slow_is_told_and_who_is_told_by_all_steps_back() -> None:
    played, told = Played(holders={"b": EVERY, "c": EVERY}), asyncio.Queue[tuple[str, str]]()

    async def report_slow(member: Member, version: str) -> None:
        told.put_nowait((member.name, version))

    played.report_slow = report_slow  # type: ignore[method-assign]

    async def view(is_fetching: bool) -> ClusterView:
        found = await Played.view(played, is_fetching)
        return dataclasses.replace(found, interested=frozenset("bc"), slow_to=frozenset("bc"))

    played.view = view  # type: ignore[method-assign]
    session = await played.begin()
    try:
        assert session.scheduler.is_slow
        session.table.slow = frozenset("b")
        async with asyncio.timeout(60):
            assert await told.get() == ("b", played.frozen.version)
    finally:
        await session.close()


async def test_what_nobody_holds_is_read_from_the_store_and_marked_meanwhile() -> None:
    played = Played(holders={"b": set(), "c": set()})
    await played.fill()
    assert played.is_right
    assert sorted(played.from_store_ordinals) == sorted(EVERY)
    assert sorted(chunk for chunk, begun in played.marks if begun) == sorted(EVERY)
    assert sorted(chunk for chunk, begun in played.marks if not begun) == sorted(EVERY)
    assert played.nowhere == []


async def test_what_does_not_come_from_the_store_is_not_said_to_be_on_its_way_any_more() -> None:
    played = Played(holders={"b": set()})

    async def refuse(index: int, chunk: int, into: memoryview) -> str:
        raise StoreUnavailableError("no")

    played.read = refuse  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailableError):
        await played.fill()
    begun = [chunk for chunk, is_fetched in played.marks if is_fetched]
    assert begun and sorted(begun) == sorted(chunk for chunk, is_fetched in played.marks if not is_fetched)


async def test_a_peer_with_wrong_bytes_is_found_out_and_not_asked_again() -> None:
    played = Played(holders={"evil": EVERY, "good": EVERY})
    played.give = lambda name, ordinal, data: data[::-1] if name == "evil" else data
    session = await played.fill()
    assert played.is_right
    assert session.sources.banned == {"evil"}
    assert sum(name == "evil" for name, _ in played.asked) <= QUICK.slots
    assert "evil" not in session.sources.peer_bytes
    assert [peer["bytes"] for peer in session.sources.peers() if peer["banned"]] == [0], "it is told of all the same"


async def test_without_digests_peers_that_disagree_are_not_believed_and_the_store_decides() -> None:
    played = Played(has_digests=False, holders={"evil": EVERY, "good": EVERY})
    played.give = lambda name, ordinal, data: data[::-1] if name == "evil" and ordinal == 3 else data
    session = await played.fill()
    assert played.is_right
    assert 3 in played.from_store_ordinals
    assert session.sources.banned == {"evil"}
    assert session.sources.fallbacks["digest conflict"] >= 1


async def test_a_peer_that_claims_another_digest_than_its_bytes_have_is_banned() -> None:
    played = Played(has_digests=False, holders={"evil": EVERY})
    played.claim = lambda name, ordinal, digest: "t" + "0" * 32
    session = await played.fill()
    assert played.is_right
    assert session.sources.banned == {"evil"}


async def test_a_peer_that_was_right_about_one_chunk_stays_banned_for_the_bytes_of_another() -> None:
    played = Played(has_digests=False, holders={"evil": EVERY})
    played.give = lambda name, ordinal, data: data[::-1]
    played.claim = lambda name, ordinal, digest: digest_of(played.chunks[ordinal])
    session = await played.fill()
    assert played.is_right
    assert session.sources.banned == {"evil"}
    assert session.table.peers["evil"].is_banned
    assert session.table.peers["evil"].failures == 0, "it can be reached"


async def test_peers_that_cannot_be_reached_cost_time_and_nothing_else() -> None:
    played = Played(holders={"b": EVERY})

    def refuse(name: str, ordinal: int, data: bytes) -> bytes:
        raise PeerError("no connection")

    played.give = refuse
    await played.fill()
    assert played.is_right
    assert sorted(played.from_store_ordinals) == sorted(EVERY)


async def test_an_error_of_the_store_is_the_error_of_the_fill() -> None:
    played = Played(holders={"b": set()})

    async def away(index: int, chunk: int, into: memoryview) -> str:
        raise StoreUnavailableError("the store is away")

    played.read = away  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailableError):
        await played.fill()
