"""Store faults from a proxy on real connections: the bytes are right, or a TierckptError is raised.

The loop saves and drains, then finds, fetches, verifies and restores as another node, with each kind of fault on 1, 5,
20 and 50 % of the requests, all kinds in parallel. Results are compared by digests of the test. At the end of a phase
the faults stop, and every save must reach the shared tier.

TIERCKPT_TEST_STORE_FAULT_SECONDS    duration of each kind, over its four rates (12; `make torture`: 600)
TIERCKPT_TEST_STORE_OUTAGE_SECONDS   duration of 100 % failures (10; `make torture`: 300)

Each harness counts the faults injected, and has a control: a seeded bug that it must report.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import secrets
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pytest

from tests.servers.faultproxy import FaultProxy, Kind, Plan, scripted
from tests.services import ENVIRONMENT, S3Server, rgw_server
from tierckpt.checkpoint import local_commit, shared_commit
from tierckpt.checkpoint.journal import READY
from tierckpt.checkpoint.verify import verify
from tierckpt.config import KiB, MiB, Settings
from tierckpt.disk.durable import durable_write, make_dirs
from tierckpt.errors import (
    IntegrityError,
    OperationTimeoutError,
    PartialTransferError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreUnavailableError,
    TierckptError,
)
from tierckpt.format.layout import METADATA, PRIVATE_DIR, Location, attempt_metadata, parse_uri
from tierckpt.format.manifest import FileEntry, Manifest, digests_of
from tierckpt.mover import Mover
from tierckpt.restore.restore import fetch_missing, restore
from tierckpt.stores import get_concurrency, retry, verified_read
from tierckpt.stores.obstore_store import RemoteStore
from tierckpt.types import Tier

T = TypeVar("T")

DEADLINE_SECONDS = 12.0
"""Of one verb, given to it as its timeout or held by its store's. A verb that takes much longer counts as hanging."""
GRACE_SECONDS = 60.0
HEAL_SECONDS = 60.0
CHUNK_BYTES = 512 * KiB

DAMAGE = {Kind.BIT_FLIP, Kind.WRONG_OBJECT, Kind.SHORT, Kind.TRUNCATED}
PASSING = (StoreUnavailableError, OperationTimeoutError, PartialTransferError)
"""Errors that a caller may get while its store fails: each means "later". Any other is a wrong verdict."""


@contextlib.asynccontextmanager
async def mover_at(root: Path, **more: object) -> AsyncIterator[Mover]:
    limits = {"chunk_size_bytes": CHUNK_BYTES, "concurrency": 2, "store_timeout_seconds": 6.0}
    mover = Mover(Settings.load(local_root=root, **limits, **more))
    try:
        yield mover
    finally:
        await mover.close()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Saved:
    """A checkpoint and the test's own digests of its files."""

    location: Location
    token: str
    digests: dict[str, str]


def save(mover: Mover, location: Location, sizes: tuple[int, ...], seed: int) -> Saved:
    """Save as one rank does, up to the local commit, by the protocol's own verbs (docs/internals/commit.md, 1)."""
    noise = random.Random(seed)
    token = secrets.token_hex(8)
    directory = mover.directory(location)
    make_dirs(directory)
    entry = mover.journal.open(token, location, 0, CHUNK_BYTES)
    contents = {f"__0_{index}-{token}.distcp": noise.randbytes(size) for index, size in enumerate(sizes)}
    files = tuple(_entry(path, data, token) for path, data in contents.items())
    for path, data in contents.items():
        durable_write(directory / path, data)
    metadata = noise.randbytes(3000)
    listed = _entry(METADATA, metadata, token, attempt_metadata(token))
    manifest = Manifest(token, 1, CHUNK_BYTES, (listed,), files, created_unix_seconds=time.time())
    local_commit.write_attempt_metadata(directory, manifest, {METADATA: metadata})
    mover.journal.write(replace(entry, files=files + manifest.metadata, manifest=manifest, state=READY))
    local_commit.commit_local(directory, location, manifest, {METADATA: metadata})
    return Saved(location, token, {path: digest(data) for path, data in {**contents, METADATA: metadata}.items()})


def _entry(path: str, data: bytes, token: str, source: str = "") -> FileEntry:
    return FileEntry(path, len(data), digests_of(data, CHUNK_BYTES), 0, token, source)


def wrong_files(directory: Path, saved: Saved) -> list[str]:
    """Names of the files in ``directory`` with other bytes than were saved."""
    return [
        path
        for path, expected in saved.digests.items()
        if not (directory / path).exists() or digest((directory / path).read_bytes()) != expected
    ]


# --- the loop ------------------------------------------------------------------------------------------------------


@dataclass
class Loop:
    """Save, drain and read back through one plan of the proxy, and record each violation."""

    uri: str
    plan: Plan
    root: Path
    violations: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    rounds: int = 0

    async def run(self, share: float, seconds: float, faults_min: int) -> None:
        """One phase: go on until the time is over and ``faults_min`` faults have happened, then heal.

        At the lowest rate also until a restore has succeeded.
        """
        begun, fired = time.monotonic(), self.plan.fired
        saved: list[Saved] = []
        async with mover_at(self.root / f"saver-{share}") as saver:
            self.plan.share = share
            while (
                time.monotonic() < begun + seconds
                or self.plan.fired < fired + faults_min
                or (share == FAULT_RATES[0] and not self.outcomes["restore ok"])
            ):
                if time.monotonic() > begun + seconds + 60:
                    faults = self.plan.fired - fired
                    self.violations.append(f"{share}: {faults} faults of {faults_min}; {self.outcomes}")
                    break
                saved.append(await self._round(saver, share))
            self.plan.share = 0.0
            for one in saved:
                await self._healed(saver, one)

    async def _round(self, saver: Mover, share: float) -> Saved:
        self.rounds += 1
        location = parse_uri(f"{self.uri}/{share}-{self.rounds}/step-1")
        saved = await asyncio.to_thread(save, saver, location, (MiB, 300 * KiB), self.rounds)
        saver.drains.submit(saved.token)
        if not await self._tried("drain", saver.drains.wait(location, Tier.SHARED, DEADLINE_SECONDS)):
            return saved
        await self._read_back(saved, self.root / f"reader-{share}-{self.rounds}")
        return saved

    async def _read_back(self, saved: Saved, root: Path) -> None:
        """Read in every way as a node without a copy, and check the bytes by our own digests."""
        async with mover_at(root) as reader:
            checkpoint = await self._tried("find", reader.selector.find(saved.location))
            if checkpoint is not None and checkpoint.manifest is not None:
                await self._tried("fetch", fetch_missing(reader, checkpoint, checkpoint.manifest.files))
                arrived = [entry for entry in checkpoint.manifest.files if checkpoint.local_path(entry)]
                self.outcomes["fetched"] += len(arrived)
                for entry in arrived:
                    self._expect(digest((checkpoint.directory / entry.key).read_bytes()) == saved.digests[entry.path])
            result = await self._tried("verify", verify(reader.selector, saved.location, read_data=True))
            if result is not None and self.plan.kind not in DAMAGE:
                shared = {path: text for (tier, path), text in result[1].problems.items() if tier is Tier.SHARED}
                self._expect(not shared, f"verify says {shared}")
            if await self._tried("restore", restore(reader, saved.location, root / "restored")):
                wrong = wrong_files(root / "restored", saved)
                self._expect(not wrong, f"restored wrong bytes: {wrong}")
            else:
                self._expect(not (root / "restored").exists(), "a failed restore published something")
        await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)

    def _expect(self, holds: bool, what: str = "wrong bytes") -> None:
        if not holds:
            self.violations.append(f"{self.plan.kind}: {what}")

    async def _tried(self, name: str, work: Awaitable[T]) -> T | None:
        """Await ``work``: its result (or True), or None after an error that a caller may meet."""
        try:
            async with asyncio.timeout(DEADLINE_SECONDS + GRACE_SECONDS):
                result = await work
            self.outcomes[f"{name} ok"] += 1
            return result if result is not None else True  # type: ignore[return-value]
        except TimeoutError as error:
            if not isinstance(error, TierckptError):
                self.violations.append(f"{self.plan.kind}: {name} hangs")
            self.outcomes[f"{name} later"] += 1
        except PASSING:
            self.outcomes[f"{name} later"] += 1
        except IntegrityError as error:
            self.outcomes[f"{name} damaged"] += 1
            self._expect(self.plan.kind in DAMAGE, f"{name} says damaged: {error}")
        except Exception as error:
            self.violations.append(f"{self.plan.kind}: {name}: {type(error).__name__}: {error}")
        return None

    async def _healed(self, saver: Mover, saved: Saved) -> None:
        """Without faults, every save is drained and can be read back."""
        try:
            await saver.drains.wait(saved.location, Tier.SHARED, HEAL_SECONDS)
            target = self.root / f"healed-{saved.token}"
            async with mover_at(self.root / f"healer-{saved.token}") as reader:
                await restore(reader, saved.location, target)
            self._expect(not wrong_files(target, saved), "wrong bytes on the shared tier")
            await asyncio.to_thread(shutil.rmtree, target)
        except TierckptError as error:
            self.violations.append(f"{self.plan.kind}: lost {saved.location.uri}: {type(error).__name__}: {error}")


@dataclass
class Outage:
    """Saves go on through it. Request rates of the server, and the recovery time."""

    normal_per_second: float = 0.0
    outage_per_second: float = 0.0
    recovery_seconds: float = 0.0
    slowest_save_seconds: float = 0.0
    not_drained: int = 0
    saves: int = 0

    @property
    def amplification(self) -> float:
        return self.outage_per_second / self.normal_per_second


async def outage(uri: str, plan: Plan, root: Path, seconds: float, normal_seconds: float = 5.0) -> Outage:
    """Save every half second, as a job does (it also looks for the owner of the id), through a failure of the store."""
    result, saved, steps = Outage(), [], 0
    async with mover_at(root, exit_timeout_seconds=0) as mover:

        async def save_for(duration: float) -> float:
            begun, first = time.monotonic(), plan.requests
            async with asyncio.TaskGroup() as group:
                while time.monotonic() < begun + duration:
                    group.create_task(save_one())
                    await asyncio.sleep(0.5)
                count = plan.requests - first  # before the saves that still wait for the store end
            return count / duration

        async def save_one() -> None:
            nonlocal steps
            steps += 1
            begun, step = time.monotonic(), steps
            location = parse_uri(f"{uri}/step-{step}")
            await mover.replaced.find(location, overwrite=True)
            saved.append(await asyncio.to_thread(save, mover, location, (64 * KiB,), step))
            mover.drains.submit(saved[-1].token)
            result.slowest_save_seconds = max(result.slowest_save_seconds, time.monotonic() - begun)

        await save_for(1.0)  # connections and caches
        result.normal_per_second = await save_for(normal_seconds)
        plan.share = 1.0
        result.outage_per_second = await save_for(seconds)
        plan.share = 0.0
        ended = time.monotonic()
        for one in saved:
            try:
                await mover.drains.wait(one.location, Tier.SHARED, max(1.0, ended + 60 - time.monotonic()))
            except TierckptError:
                result.not_drained += 1
        result.recovery_seconds = time.monotonic() - ended
        result.saves = len(saved)
        async with mover_at(root.with_name(f"{root.name}-reader")) as reader:
            await restore(reader, saved[-1].location, root.with_name(f"{root.name}-restored"))
        assert not wrong_files(root.with_name(f"{root.name}-restored"), saved[-1])
    return result


async def drained(mover: Mover, saved: Saved, root: Path) -> None:
    """Drain, and read it back as a node without a copy."""
    mover.drains.submit(saved.token)
    await mover.drains.wait(saved.location, Tier.SHARED, 30)
    async with mover_at(root / "reader") as reader:
        await restore(reader, saved.location, root / "restored")
    assert wrong_files(root / "restored", saved) == []


async def save_and_drain(uri: str, root: Path, sizes: tuple[int, ...]) -> None:
    async with mover_at(root / "node") as mover:
        await drained(mover, save(mover, parse_uri(f"{uri}/step-1"), sizes, 1), root)


async def race(uri: str, root: Path, writers: int) -> list[str]:
    """Save to one id from independent nodes. Returns the outcome of each."""
    location = parse_uri(f"{uri}/step-1")

    async def one(index: int) -> str:
        async with mover_at(root / f"node-{index}") as mover:
            mover.drains.submit(save(mover, location, (KiB,), index).token)
            try:
                await mover.drains.wait(location, Tier.SHARED, 30)
            except TierckptError as error:
                return type(error).__name__
            return "committed"

    return sorted(await asyncio.gather(*(one(index) for index in range(writers))))


class Expiry:
    """A server that stops to take the token it took before. Says so as S3 does: 400, and to a HEAD nothing more."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.has_come = False
        self.refused = 0
        proxy.answer = self.answer

    def answer(self, verb: str, path: str, head: bytes) -> bytes | None:
        if not self.has_come or b"x-amz-security-token: old" not in head.lower():
            return None
        self.refused += 1
        return scripted("400 Bad Request", "ExpiredToken", verb)


# --- the tests --------------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.server

SECONDS = float(ENVIRONMENT.get("TIERCKPT_TEST_STORE_FAULT_SECONDS", "2"))
OUTAGE_SECONDS = float(ENVIRONMENT.get("TIERCKPT_TEST_STORE_OUTAGE_SECONDS", "4"))
FAULT_RATES = (0.01, 0.05, 0.2, 0.5) if SECONDS > 10 else (0.05, 0.5)


def faults_min(share: float, seconds: float) -> int:
    """Return the least number of faults of a phase: one round makes about forty requests."""
    return max(1, int(30 * share)) * max(1, int(seconds / 30))


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_concurrency, "WINDOW_SECONDS", 2.0)
    monkeypatch.setattr(get_concurrency, "BYTES_PER_SECOND_MIN", MiB)
    monkeypatch.setattr(retry, "PAUSE_SECONDS_MAX", 2.0)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> S3Server:
    """Ceph RGW if configured, else moto."""
    if ENVIRONMENT.get("TIERCKPT_TEST_S3_ENDPOINT"):
        return rgw_server()
    moto: S3Server = request.getfixturevalue("moto")
    return moto


@pytest.fixture
def proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server.endpoint)
    with proxy.running() as endpoint:
        for name, value in {**server.environment(), "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        yield proxy


@contextlib.contextmanager
def bucket_with_plan(server: S3Server, proxy: FaultProxy, kind: Kind, **more: object) -> Iterator[tuple[str, Plan]]:
    """Yield a URI in a new bucket, and the plan by which its requests fail as ``kind`` once ``share`` is set."""
    with server.bucket() as bucket:
        proxy.plans[bucket] = Plan(kind, **more)  # type: ignore[arg-type]
        yield f"s3://{bucket}/run", proxy.plans[bucket]
        proxy.plans.pop(bucket)


@pytest.mark.slow
@pytest.mark.timeout(300 + 6 * SECONDS)
async def test_every_fault_kind_at_every_rate(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    async def one(kind: Kind) -> Loop:
        with bucket_with_plan(server, proxy, kind, seed=1) as (uri, plan):
            loop = Loop(uri, plan, tmp_path / kind)
            for share in FAULT_RATES:
                seconds = SECONDS / len(FAULT_RATES)
                before = plan.fired, plan.eligible
                await loop.run(share, seconds, faults_min(share, seconds))
                loop.outcomes[f"faults at {share}"] = plan.fired - before[0]
            return loop

    loops = await asyncio.gather(*(one(kind) for kind in Kind))
    for loop in loops:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(loop.outcomes.items()))
        print(
            f"{loop.plan.kind}: {loop.rounds} rounds, {loop.plan.requests} requests, {loop.plan.fired} broken; {counts}"
        )
    assert [violation for loop in loops for violation in loop.violations] == []
    for loop in loops:
        least = sum(faults_min(share, SECONDS / len(FAULT_RATES)) for share in FAULT_RATES)
        assert loop.plan.fired >= least, f"{loop.plan.kind}: too few faults"
        assert loop.outcomes["restore ok"] > 0, f"{loop.plan.kind}: no restore succeeded"


@pytest.mark.slow
async def test_control_missing_digest_check_is_found(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without digest checks, flipped bits reach the files."""
    monkeypatch.setattr(verified_read, "is_good", lambda *_: True)
    with bucket_with_plan(server, proxy, Kind.BIT_FLIP, only=lambda verb, path: ".distcp" in path) as (uri, plan):
        loop = Loop(uri, plan, tmp_path)
        await loop.run(0.5, 1.0, 3)
    assert any("wrong bytes" in violation for violation in loop.violations)


def answering(value: object) -> Callable[..., Awaitable[object]]:
    async def call(*_: object) -> object:
        return value

    return call


@pytest.mark.slow
async def test_control_unchecked_conditional_put_is_found(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a rejected conditional put counts as another writer's commit, without a check of the object."""
    monkeypatch.setattr(RemoteStore, "holds", answering(False))
    monkeypatch.setattr(shared_commit, "read_claim", answering("another writer"))
    with bucket_with_plan(server, proxy, Kind.LOST_ANSWER, only=lambda verb, path: verb == "PUT") as (uri, plan):
        loop = Loop(uri, plan, tmp_path)
        await loop.run(0.5, 1.0, 3)
    assert any("AlreadyCommittedError" in violation for violation in loop.violations)


# --- total outage --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240 + 2 * OUTAGE_SECONDS)
async def test_total_outage_loses_nothing_and_adds_few_requests(
    server: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    """100 % failures add almost no requests, lose nothing, and everything is drained within a minute afterwards."""

    async def one(kind: Kind) -> tuple[Outage, Plan]:
        with bucket_with_plan(server, proxy, kind) as (uri, plan):
            return await outage(uri, plan, tmp_path / kind, OUTAGE_SECONDS), plan

    for result, plan in await asyncio.gather(one(Kind.SLOW_DOWN), one(Kind.RESET)):
        print(f"{plan.kind}: {result}, amplification {result.amplification:.2f}, {plan.fired} refused")
        assert plan.fired >= 5, "too few requests during the outage"
        assert result.amplification <= 1.2
        assert result.not_drained == 0
        assert result.slowest_save_seconds <= 40, "a save waits for the unreachable shared tier"


@pytest.mark.slow
async def test_control_unlimited_retries_are_found(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: retries without a budget and a breaker that never opens fail the outage test."""
    monkeypatch.setattr(retry.RetryBudget, "take", lambda self: True)
    monkeypatch.setattr(retry.StoreBreaker, "failed", lambda self, error: None)
    monkeypatch.setattr(retry, "BACKOFF_SECONDS_MAX", 0.05)
    with bucket_with_plan(server, proxy, Kind.SLOW_DOWN) as (uri, plan):
        result = await outage(uri, plan, tmp_path / "node", 5.0, normal_seconds=3.0)
    assert result.amplification > 1.2


# --- single faults -------------------------------------------------------------------------------------------------


LOST_REQUESTS = {
    "shard": lambda verb, path: verb == "PUT" and path.endswith(".distcp"),
    "claim": lambda verb, path: verb == "PUT" and path.endswith("claim.json"),
    "manifest": lambda verb, path: verb == "PUT" and path.endswith("manifest.json"),
    "part": lambda verb, path: verb == "PUT" and "partNumber=2" in path,
    "completion": lambda verb, path: verb == "POST" and "uploadId=" in path,
    "removal": lambda verb, path: verb == "POST" and path.endswith("?delete"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LOST_REQUESTS)
async def test_request_with_a_lost_answer_counts_once(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, what: str
) -> None:
    """The server applied the request. A retry or check counts it once and finds no other writer."""
    twice = {"share": 1.0, "only": LOST_REQUESTS[what], "faults_max": 2}
    with bucket_with_plan(server, proxy, Kind.LOST_ANSWER, **twice) as (uri, plan):
        await save_and_drain(uri, tmp_path, (9 * MiB,) if what in {"part", "completion"} else (KiB,))
        assert plan.fired == 2


@pytest.mark.slow
async def test_damaged_answer_is_retried_on_another_connection(
    server: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    once = {"only": lambda _, path: ".distcp" in path, "faults_max": 1}
    with bucket_with_plan(server, proxy, Kind.BIT_FLIP, **once) as (uri, plan):
        async with mover_at(tmp_path / "node") as mover:
            saved = save(mover, parse_uri(f"{uri}/step-1"), (KiB,), 1)
            plan.share = 1.0
            await drained(mover, saved, tmp_path)
        ((verb, path, connection),) = plan.broken
        connections = plan.after[verb, path]
        assert connection not in connections[connections.index(connection) + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["GET", "PUT"])
async def test_slow_transfer_is_aborted_and_retried(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, verb: str
) -> None:
    """5 KiB/s triggers no socket timeout; the megabyte would take three minutes."""
    is_shard = lambda method, path: method == verb and ".distcp" in path  # noqa: E731
    with bucket_with_plan(server, proxy, Kind.DRIP, share=1.0, only=is_shard, faults_max=1) as (uri, plan):
        started = time.monotonic()
        await save_and_drain(uri, tmp_path, (MiB,))
        assert plan.fired == 1
        assert time.monotonic() - started < 100


async def test_claim_is_retried_after_a_409(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    """409 ConditionalRequestConflict: a concurrent write that may fail. Retry, and trust only 412."""
    conflicts = [2]

    def answer(verb: str, path: str, head: bytes) -> bytes | None:
        if verb == "PUT" and path.endswith("claim.json") and conflicts[0]:
            conflicts[0] -= 1
            return scripted("409 Conflict", "ConditionalRequestConflict", verb)
        return None

    proxy.answer = answer
    with bucket_with_plan(server, proxy, Kind.RESET) as (uri, _):
        await save_and_drain(uri, tmp_path, (KiB,))
    assert conflicts == [0]


@pytest.mark.slow
async def test_concurrent_commits_have_one_winner(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    """Also if the answers to some conditional puts are lost."""
    with bucket_with_plan(server, proxy, Kind.LOST_ANSWER, share=0.3, only=LOST_REQUESTS["claim"]) as (uri, plan):
        for turn in range(4):
            outcomes = await race(f"{uri}/{turn}", tmp_path / str(turn), 3)
            assert outcomes == ["AlreadyCommittedError", "AlreadyCommittedError", "committed"]
        assert plan.fired >= 3


async def test_control_race_with_several_winners_is_found(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: 412 is taken for an own success."""

    real = RemoteStore.put

    async def put(self: RemoteStore, key: str, data: bytes, *, if_absent: bool = False) -> None:
        with contextlib.suppress(PreconditionFailedError):
            await real(self, key, data, if_absent=if_absent)

    monkeypatch.setattr(RemoteStore, "put", put)
    monkeypatch.setattr(shared_commit, "read_claim", answering(True))
    with bucket_with_plan(server, proxy, Kind.RESET) as (uri, _):
        outcomes = await race(uri, tmp_path, 3)
    assert outcomes != ["AlreadyCommittedError", "AlreadyCommittedError", "committed"]


async def test_stale_listing_only_delays_the_commit(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    """Rank 1 comes last and must find the pending manifest, which the listing does not show yet."""
    hidden = [3]

    def answer(verb: str, path: str, head: bytes) -> bytes | None:
        if verb == "GET" and "list-type=2" in path and "pending" in path and hidden[0]:
            hidden[0] -= 1
            body = b"<ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>0</KeyCount></ListBucketResult>"
            return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        return None

    proxy.answer = answer
    with bucket_with_plan(server, proxy, Kind.RESET) as (uri, _):
        location = parse_uri(f"{uri}/step-1")
        async with mover_at(tmp_path / "node-0") as first, mover_at(tmp_path / "node-1") as last:
            theirs = save(last, location, (KiB,), 1)
            ours = save(first, location, (KiB,), 0)
            entry, other = first.journal.read(ours.token), last.journal.read(theirs.token)
            assert entry is not None and entry.manifest is not None and other is not None
            shards = entry.manifest.files + tuple(file for file in other.files if file.path != METADATA)
            whole = replace(entry.manifest, world_size=2, files=shards)
            shutil.rmtree(last.directory(location) / PRIVATE_DIR)  # only the coordinator's node knows the manifest
            last.journal.write(replace(other, manifest=None, rank=1, files=shards[1:]))
            await first.drainer.send_files(replace(entry, manifest=whole))  # then its node is lost
            last.drains.submit(theirs.token)
            await last.drains.wait(location, Tier.SHARED, 30)
            committed = await shared_commit.read_shared_manifest(last.store(location))
    assert committed is not None and committed.tokens == {ours.token, theirs.token}
    assert hidden == [0]


@pytest.fixture
def expiry(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Expiry:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old")
    return Expiry(proxy)


async def test_expired_credentials_are_renewed_once(
    server: S3Server, proxy: FaultProxy, expiry: Expiry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket_with_plan(server, proxy, Kind.RESET) as (uri, _):
        async with mover_at(tmp_path / "node") as mover:
            saved = save(mover, parse_uri(f"{uri}/step-1"), (9 * MiB, KiB, KiB, KiB), 1)
            store = mover.store(saved.location)
            await shared_commit.read_claim(store)
            expiry.has_come = True
            monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
            await drained(mover, saved, tmp_path)
            assert mover.drainer.retries.counts["credentials_renewed"] == 1
    assert 1 <= expiry.refused <= 4, "only requests in flight are rejected"


@pytest.mark.slow
async def test_credentials_that_expire_during_an_upload_are_renewed(
    server: S3Server, proxy: FaultProxy, expiry: Expiry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def expires_with_part_2(verb: str, path: str, head: bytes) -> bytes | None:
        if "partNumber=2" in path:
            expiry.has_come = True
            monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
        return expiry.answer(verb, path, head)

    proxy.answer = expires_with_part_2
    with bucket_with_plan(server, proxy, Kind.RESET) as (uri, _):
        await save_and_drain(uri, tmp_path, (17 * MiB,))
    assert expiry.refused >= 1


async def test_drain_waits_for_credentials_that_cannot_be_renewed(
    server: S3Server, proxy: FaultProxy, expiry: Expiry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the cause; local copy and journal entry are kept and drained with new credentials."""
    with bucket_with_plan(server, proxy, Kind.RESET) as (uri, _):
        async with mover_at(tmp_path / "node") as mover:
            saved = save(mover, parse_uri(f"{uri}/step-1"), (KiB,), 1)
            await shared_commit.read_claim(mover.store(saved.location))
            expiry.has_come = True
            mover.drains.submit(saved.token)
            with pytest.raises(PermissionDeniedError, match="no newer ones"):
                await mover.drains.wait(saved.location, Tier.SHARED, 30)
            assert [entry.token for entry in mover.journal.entries()] == [saved.token]
            assert "PermissionDeniedError" in mover.journal.entries()[0].error
            assert wrong_files(mover.directory(saved.location), saved) == []
            assert expiry.refused <= 4, "too many requests with expired credentials"
        monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
        async with mover_at(tmp_path / "node") as mover:
            await drained(mover, saved, tmp_path)
