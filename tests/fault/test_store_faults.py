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
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.store_loop import Expiry, Loop, Outage, drained, mover_at, outage, race, save, wrong_files
from tests.servers.faultproxy import FaultProxy, Kind, Plan, scripted
from tests.services import ENVIRONMENT, S3Server, rgw_server
from tierckpt.checkpoint import shared_commit
from tierckpt.config import KiB, MiB
from tierckpt.errors import PermissionDeniedError, PreconditionFailedError
from tierckpt.format.layout import METADATA, PRIVATE_DIR, parse_uri
from tierckpt.stores import get_concurrency, retry, verified_read
from tierckpt.stores.obstore_store import RemoteStore
from tierckpt.types import Tier

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


@pytest.mark.slow
async def test_control_unchecked_conditional_put_is_found(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a rejected conditional put counts as another writer's commit, without a check of the object."""

    async def always_false(*_: object) -> bool:
        return False

    async def unknown_writer(store: object, *_: object) -> str:
        return "another writer"

    monkeypatch.setattr(RemoteStore, "holds", always_false)
    monkeypatch.setattr(shared_commit, "read_claim", unknown_writer)
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
    with bucket_with_plan(server, proxy, Kind.LOST_ANSWER, share=1.0, only=LOST_REQUESTS[what], faults_max=2) as (
        uri,
        plan,
    ):
        async with mover_at(tmp_path / "node") as mover:
            saved = save(mover, parse_uri(f"{uri}/step-1"), (9 * MiB,) if what in {"part", "completion"} else (KiB,), 1)
            await drained(mover, saved, tmp_path)
        assert plan.fired == 2


@pytest.mark.slow
async def test_damaged_answer_is_retried_on_another_connection(
    server: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    with bucket_with_plan(server, proxy, Kind.BIT_FLIP, only=lambda _, path: ".distcp" in path, faults_max=1) as (
        uri,
        plan,
    ):
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
        async with mover_at(tmp_path / "node") as mover:
            await drained(mover, save(mover, parse_uri(f"{uri}/step-1"), (MiB,), 1), tmp_path)
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
        async with mover_at(tmp_path / "node") as mover:
            await drained(mover, save(mover, parse_uri(f"{uri}/step-1"), (KiB,), 1), tmp_path)
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

    async def always_true(*_: object) -> bool:
        return True

    real = RemoteStore.put

    async def put(self: RemoteStore, key: str, data: bytes, *, if_absent: bool = False) -> None:
        with contextlib.suppress(PreconditionFailedError):
            await real(self, key, data, if_absent=if_absent)

    monkeypatch.setattr(RemoteStore, "put", put)
    monkeypatch.setattr(shared_commit, "read_claim", always_true)
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


async def test_expired_credentials_are_renewed_once(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expiry = Expiry(proxy)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old")
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
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expiry = Expiry(proxy)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old")

    def expires_with_part_2(verb: str, path: str, head: bytes) -> bytes | None:
        if "partNumber=2" in path:
            expiry.has_come = True
            monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
        return expiry.answer(verb, path, head)

    proxy.answer = expires_with_part_2
    with bucket_with_plan(server, proxy, Kind.RESET) as (uri, _):
        async with mover_at(tmp_path / "node") as mover:
            await drained(mover, save(mover, parse_uri(f"{uri}/step-1"), (17 * MiB,), 1), tmp_path)
    assert expiry.refused >= 1


async def test_drain_waits_for_credentials_that_cannot_be_renewed(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the cause; local copy and journal entry are kept and drained with new credentials."""
    expiry = Expiry(proxy)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old")
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
