"""Shared prefetches: real agents and one counting store; and single sessions with simulated faulty peers.

Faults of nodes and networks are in tests/fault/test_fanout.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
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
from tierckpt.cache.fetch_job import NotNowError
from tierckpt.cache.file_set import FileSet, FileSpec
from tierckpt.errors import IntegrityError, ObjectNotFoundError, StoreUnavailableError
from tierckpt.format.manifest import digest_of
from tierckpt.peer.fetch import fetch_session, peer_table
from tierckpt.peer.fetch.fetch_session import FetchSession
from tierckpt.peer.fetch.peer_table import Tuning
from tierckpt.peer.membership import Member
from tierckpt.peer.peer_catalog import Live
from tierckpt.peer.peer_client import ChunkAnswer
from tierckpt.peer.peer_http import ChunkReport

MiB = 1 << 20
SIZES = {"model-1.safetensors": 9 * MiB + 77, "model-2.safetensors": 7 * MiB, "tokenizer.json": 4000}
SETTINGS = {"TIERCKPT_CHUNK_SIZE_BYTES": str(MiB // 2)}


# --- real nodes -----------------------------------------------------------------------------------------------------


def patient() -> None:
    """Ask the store only for what no peer has, however late they answer."""
    waits = ("settle_seconds_max", "hedge_seconds_min", "fetch_seconds_min", "stall_seconds", "stall_seconds_max")
    peer_table.Tuning = functools.partial(Tuning, **dict.fromkeys(waits, 60.0))  # type: ignore
    fetch_session.POLL_TIMEOUT_SECONDS = 60.0


BUGS = {"patient": patient}
"""Changes of a prefetch's process (tests/servers/fleet.py)."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("session")
    (folder / "store" / "models").mkdir(parents=True)
    with Origin.running(folder / "store", rate=20 * MiB) as origin, Fleet.running(folder / "logs", __name__) as fleet:
        model = Model.make(folder / "store" / "models", "one", SIZES)
        running = Cluster(fleet, origin, model, folder / "nodes")
        running.add([f"127.0.0.1:{free_port()}" for _ in range(3)], SETTINGS)
        try:
            running.start_agents()
            yield running
        finally:
            running.close()


@pytest.mark.slow
def test_sources_are_reported_and_a_directory_is_filled_from_peers(cluster: Cluster, tmp_path: Path) -> None:
    cluster.fetch()
    for result in cluster.results():
        assert result.is_right, dumped([result])
        sources = result.answer["bytes_by_source"]
        assert sources["peer"] + sources["shared"] == cluster.model.size_bytes
        assert sum(peer["bytes"] for peer in result.answer["peers"]) == sources["peer"]
        assert result.answer["slowest_chunk"]["from"]
        assert not any(peer["banned"] for peer in result.answer["peers"])
    assert sum(result.source("peer") for result in cluster.results()) > 0
    cluster.origin.reset()
    for entry in (cluster.nodes[0].local_root / "cache").glob("one-*"):  # or the node would copy its own
        shutil.rmtree(entry)
    target = tmp_path / "copy"
    cluster.fetch(cluster.nodes[:1], bug="patient", more=["--to", str(target)])
    [result] = cluster.results(cluster.nodes[:1])
    assert result.is_right, dumped([result])
    assert cluster.model.problems(target) == []
    assert result.source("peer") == cluster.model.size_bytes, "the other nodes hold the whole model"
    assert cluster.origin.sent_bytes() == 0


@pytest.mark.slow
def test_without_an_agent_everything_comes_from_the_store(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.nodes[0]
    lonely = type(node)(
        "lonely", tmp_path / "lonely", "", {**node.env, "TIERCKPT_LOCAL_ROOT": str(tmp_path / "lonely")}
    )
    cluster.origin.reset()
    lonely.env["TIERCKPT_PEER_LISTEN"] = cluster.nodes[1].address  # in use
    cluster.log_level = "info"
    cluster.fetch([lonely])
    [result] = cluster.results([lonely])
    assert result.is_right, dumped([result])
    assert result.source("shared") == cluster.model.size_bytes
    assert lonely.fetch is not None
    assert lonely.fetch.log().count("without peers") == 1


# --- one session with simulated peers ---------------------------------------------------------------------------------

CHUNK = 1000
COUNT = 12
SHORT_TIMEOUTS = Tuning(settle_seconds=0.1, wait_seconds=0.2, stall_seconds=0.3, hedge_seconds_min=0.2)


@dataclass
class SimulatedCluster:
    """A cluster with one real node. ``give`` decides the answers of the peers."""

    has_digests: bool = True
    holders: dict[str, set[int]] = field(default_factory=dict)
    give: Callable[[str, int, bytes], bytes] = lambda name, ordinal, data: data
    claim: Callable[[str, int, str], str] = lambda name, ordinal, digest: digest
    asked: list[tuple[str, int]] = field(default_factory=list)
    from_store_ordinals: list[int] = field(default_factory=list)
    marks: list[tuple[int, bool]] = field(default_factory=list)
    nowhere: list[int] = field(default_factory=list)
    """Chunks that were not said to be on their way any more, and not here yet."""

    def __post_init__(self) -> None:
        data = random.Random(1).randbytes(CHUNK * COUNT)
        self.chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        digests = tuple(map(digest_of, self.chunks)) if self.has_digests else ()
        self.frozen = FileSet("s3://bucket/model", (FileSpec("m", "m", len(data), "e", digests),), CHUNK)
        self.landed: dict[int, bytes] = {}

    # the node itself

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

    async def view(self, is_fetching: bool) -> Live:
        members = tuple(Member(name, f"{name}:1") for name in ("me", *self.holders))
        return Live(members[0], members[1:])

    async def report_slow(self, member: Member, version: str) -> None:
        pass

    async def report(self, report: object) -> None:
        pass

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
        return FetchSession(self, self, self, await self.view(False), self, tuning=SHORT_TIMEOUTS)

    async def fill(self) -> FetchSession:
        """Fetch everything with two workers, as a prefetch does."""
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


ALL_CHUNKS = set(range(COUNT))


async def test_slow_node_is_notified_and_steps_back() -> None:
    peers_cluster = SimulatedCluster(holders={"b": ALL_CHUNKS, "c": ALL_CHUNKS})
    notices = asyncio.Queue[tuple[str, str]]()

    async def report_slow(member: Member, version: str) -> None:
        notices.put_nowait((member.name, version))

    peers_cluster.report_slow = report_slow  # type: ignore[method-assign]

    async def view(is_fetching: bool) -> Live:
        found = await SimulatedCluster.view(peers_cluster, is_fetching)
        return dataclasses.replace(found, interested=frozenset("bc"), slow_to=frozenset("bc"))

    peers_cluster.view = view  # type: ignore[method-assign]
    session = await peers_cluster.begin()
    try:
        assert session.scheduler.is_slow
        session.table.slow = frozenset("b")
        async with asyncio.timeout(60):
            assert await notices.get() == ("b", peers_cluster.frozen.version)
    finally:
        await session.close()


async def test_chunks_without_holder_are_marked_and_read_from_the_store() -> None:
    peers_cluster = SimulatedCluster(holders={"b": set(), "c": set()})
    await peers_cluster.fill()
    assert peers_cluster.is_right
    assert sorted(peers_cluster.from_store_ordinals) == sorted(ALL_CHUNKS)
    assert sorted(chunk for chunk, begun in peers_cluster.marks if begun) == sorted(ALL_CHUNKS)
    assert sorted(chunk for chunk, begun in peers_cluster.marks if not begun) == sorted(ALL_CHUNKS)
    assert peers_cluster.nowhere == []


async def test_failed_store_read_removes_its_mark() -> None:
    peers_cluster = SimulatedCluster(holders={"b": set()})

    async def refuse(index: int, chunk: int, into: memoryview) -> str:
        raise StoreUnavailableError("no")

    peers_cluster.read = refuse  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailableError):
        await peers_cluster.fill()
    begun = [chunk for chunk, is_fetched in peers_cluster.marks if is_fetched]
    assert begun and sorted(begun) == sorted(chunk for chunk, is_fetched in peers_cluster.marks if not is_fetched)


async def test_peer_with_wrong_bytes_is_banned() -> None:
    peers_cluster = SimulatedCluster(holders={"evil": ALL_CHUNKS, "good": ALL_CHUNKS})
    peers_cluster.give = lambda name, ordinal, data: data[::-1] if name == "evil" else data
    session = await peers_cluster.fill()
    assert peers_cluster.is_right
    assert session.sources.banned == {"evil"}
    assert sum(name == "evil" for name, _ in peers_cluster.asked) <= SHORT_TIMEOUTS.slots
    assert "evil" not in session.sources.peer_bytes
    assert [peer["bytes"] for peer in session.sources.peers() if peer["banned"]] == [0], "banned peers are reported too"


async def test_without_digests_the_store_decides_between_peers() -> None:
    peers_cluster = SimulatedCluster(has_digests=False, holders={"evil": ALL_CHUNKS, "good": ALL_CHUNKS})
    peers_cluster.give = lambda name, ordinal, data: data[::-1] if name == "evil" and ordinal == 3 else data
    session = await peers_cluster.fill()
    assert peers_cluster.is_right
    assert 3 in peers_cluster.from_store_ordinals
    assert session.sources.banned == {"evil"}
    assert session.sources.fallbacks["digest conflict"] >= 1


async def test_correct_digest_claim_does_not_lift_a_ban() -> None:
    peers_cluster = SimulatedCluster(has_digests=False, holders={"evil": ALL_CHUNKS})
    peers_cluster.give = lambda name, ordinal, data: data[::-1]
    peers_cluster.claim = lambda name, ordinal, digest: digest_of(peers_cluster.chunks[ordinal])
    session = await peers_cluster.fill()
    assert peers_cluster.is_right
    assert session.sources.banned == {"evil"}
    assert session.table.peers["evil"].is_banned
    assert session.table.peers["evil"].failures == 0, "a wrong digest is not a connection failure"
