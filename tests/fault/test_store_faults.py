"""Store faults, made by a proxy on real connections: whatever it breaks, bytes are right or the error is one of ours.

The loop: save, drain, then as another node find, fetch, verify and restore, for each kind of fault at 1, 5, 20 and 50 %
of the requests, all kinds side by side. What came back is compared by digests of the test's own. When a phase ends the
faults stop, and everything it saved must reach the shared tier: nothing is lost.

TIERCKPT_TEST_STORE_FAULT_SECONDS    for each kind, over its four shares (12; `make torture`: 600)
TIERCKPT_TEST_STORE_OUTAGE_SECONDS   of 100 % failures (10; `make torture`: 300)

Each harness here has a control: a seeded bug that it must report. Each counts the faults that really happened.
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
SHARES = (0.01, 0.05, 0.2, 0.5) if SECONDS > 10 else (0.05, 0.5)


def faults_min(share: float, seconds: float) -> int:
    """Faults that a phase must have seen at least: one round makes about forty requests."""
    return max(1, int(30 * share)) * max(1, int(seconds / 30))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_concurrency, "WINDOW_SECONDS", 2.0)
    monkeypatch.setattr(get_concurrency, "BYTES_PER_SECOND_MIN", MiB)
    monkeypatch.setattr(retry, "PAUSE_SECONDS_MAX", 2.0)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> S3Server:
    """Ceph RGW where it is configured, else moto."""
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
def planned(server: S3Server, proxy: FaultProxy, kind: Kind, **more: object) -> Iterator[tuple[str, Plan]]:
    """A fresh bucket whose requests fail as ``kind`` once ``share`` is set. Yields a URI in it and the plan."""
    with server.bucket() as bucket:
        proxy.plans[bucket] = Plan(kind, **more)  # type: ignore[arg-type]
        yield f"s3://{bucket}/run", proxy.plans[bucket]
        proxy.plans.pop(bucket)


@pytest.mark.slow
@pytest.mark.timeout(300 + 6 * SECONDS)
async def test_every_kind_at_every_share(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    async def one(kind: Kind) -> Loop:
        with planned(server, proxy, kind, seed=1) as (uri, plan):
            loop = Loop(uri, plan, tmp_path / kind)
            for share in SHARES:
                seconds = SECONDS / len(SHARES)
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
        least = sum(faults_min(share, SECONDS / len(SHARES)) for share in SHARES)
        assert loop.plan.fired >= least, f"{loop.plan.kind}: too few faults"
        assert loop.outcomes["restore ok"] > 0, f"{loop.plan.kind}: nothing was ever read back"


@pytest.mark.slow
async def test_a_loop_without_digests_is_found_out(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with the digest check switched off, flipped bits reach the files, and the loop must say so."""
    monkeypatch.setattr(verified_read, "is_good", lambda *_: True)
    with planned(server, proxy, Kind.BIT_FLIP, only=lambda verb, path: ".distcp" in path) as (uri, plan):
        loop = Loop(uri, plan, tmp_path)
        await loop.run(0.5, 1.0, 3)
    assert any("wrong bytes" in violation for violation in loop.violations)


@pytest.mark.slow
async def test_a_blind_verdict_is_found_out(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: "my put was refused, so somebody else has won", without a look at whose object is there."""

    async def never(*_: object) -> bool:
        return False

    async def blind(store: object, *_: object) -> str:
        return "somebody"

    monkeypatch.setattr(RemoteStore, "holds", never)
    monkeypatch.setattr(shared_commit, "read_claim", blind)
    with planned(server, proxy, Kind.LOST_ANSWER, only=lambda verb, path: verb == "PUT") as (uri, plan):
        loop = Loop(uri, plan, tmp_path)
        await loop.run(0.5, 1.0, 3)
    assert any("AlreadyCommittedError" in violation for violation in loop.violations)


# --- total outage --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240 + 2 * OUTAGE_SECONDS)
async def test_a_total_outage(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    """100 % failures: the server is asked no more than in good times, nothing is lost, all is drained in a minute."""

    async def one(kind: Kind) -> tuple[Outage, Plan]:
        with planned(server, proxy, kind) as (uri, plan):
            return await outage(uri, plan, tmp_path / kind, OUTAGE_SECONDS), plan

    for result, plan in await asyncio.gather(one(Kind.SLOW_DOWN), one(Kind.RESET)):
        print(f"{plan.kind}: {result}, amplification {result.amplification:.2f}, {plan.fired} refused")
        assert plan.fired >= 5, "the outage was seen"
        assert result.amplification <= 1.2
        assert result.not_drained == 0
        assert result.slowest_save_seconds <= 40, "a save must not wait for a shared tier that is away"


@pytest.mark.slow
async def test_a_flood_is_found_out(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: everything tried again without a budget, and a breaker that never opens, must fail the outage test."""
    monkeypatch.setattr(retry.RetryBudget, "take", lambda self: True)
    monkeypatch.setattr(retry.StoreBreaker, "failed", lambda self, error: None)
    monkeypatch.setattr(retry, "BACKOFF_SECONDS_MAX", 0.05)
    with planned(server, proxy, Kind.SLOW_DOWN) as (uri, plan):
        result = await outage(uri, plan, tmp_path / "node", 5.0, normal_seconds=3.0)
    assert result.amplification > 1.2


# --- one fault, one place ------------------------------------------------------------------------------------------


LOST = {
    "shard": lambda verb, path: verb == "PUT" and path.endswith(".distcp"),
    "claim": lambda verb, path: verb == "PUT" and path.endswith("claim.json"),
    "manifest": lambda verb, path: verb == "PUT" and path.endswith("manifest.json"),
    "part": lambda verb, path: verb == "PUT" and "partNumber=2" in path,
    "completion": lambda verb, path: verb == "POST" and "uploadId=" in path,
    "removal": lambda verb, path: verb == "POST" and path.endswith("?delete"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LOST)
async def test_an_answer_is_lost(server: S3Server, proxy: FaultProxy, tmp_path: Path, what: str) -> None:
    """The server did it, nobody heard. Done again or looked up, it counts once, and nobody else is said to have won."""
    with planned(server, proxy, Kind.LOST_ANSWER, share=1.0, only=LOST[what], faults_max=2) as (uri, plan):
        async with mover_at(tmp_path / "node") as mover:
            saved = save(mover, parse_uri(f"{uri}/step-1"), (9 * MiB,) if what in {"part", "completion"} else (KiB,), 1)
            await drained(mover, saved, tmp_path)
        assert plan.fired == 2


async def test_damage_is_asked_for_again_on_another_connection(
    server: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    with planned(server, proxy, Kind.BIT_FLIP, only=lambda _, path: ".distcp" in path, faults_max=1) as (uri, plan):
        async with mover_at(tmp_path / "node") as mover:
            saved = save(mover, parse_uri(f"{uri}/step-1"), (KiB,), 1)
            plan.share = 1.0
            await drained(mover, saved, tmp_path)
        ((verb, path, connection),) = plan.broken
        asked = plan.after[verb, path]
        assert connection not in asked[asked.index(connection) + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["GET", "PUT"])
async def test_a_drip_is_broken_off(server: S3Server, proxy: FaultProxy, tmp_path: Path, verb: str) -> None:
    """5 KiB/s keeps every socket timeout quiet. At that speed the megabyte would take three minutes."""
    is_shard = lambda asked, path: asked == verb and ".distcp" in path  # noqa: E731
    with planned(server, proxy, Kind.DRIP, share=1.0, only=is_shard, faults_max=1) as (uri, plan):
        begun = time.monotonic()
        async with mover_at(tmp_path / "node") as mover:
            await drained(mover, save(mover, parse_uri(f"{uri}/step-1"), (MiB,), 1), tmp_path)
        assert plan.fired == 1
        assert time.monotonic() - begun < 100


async def test_a_conflict_is_not_a_defeat(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    """409 ConditionalRequestConflict: somebody writes at the same moment, and may fail. Ask again, then believe 412."""
    conflicts = [2]

    def answer(verb: str, path: str, head: bytes) -> bytes | None:
        if verb == "PUT" and path.endswith("claim.json") and conflicts[0]:
            conflicts[0] -= 1
            return scripted("409 Conflict", "ConditionalRequestConflict", verb)
        return None

    proxy.answer = answer
    with planned(server, proxy, Kind.RESET) as (uri, _):
        async with mover_at(tmp_path / "node") as mover:
            await drained(mover, save(mover, parse_uri(f"{uri}/step-1"), (KiB,), 1), tmp_path)
    assert conflicts == [0]


@pytest.mark.slow
async def test_a_race_has_one_winner(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    """Also when the answers to some of the conditional puts are lost."""
    with planned(server, proxy, Kind.LOST_ANSWER, share=0.3, only=LOST["claim"]) as (uri, plan):
        for turn in range(4):
            told = await race(f"{uri}/{turn}", tmp_path / str(turn), 3)
            assert told == ["AlreadyCommittedError", "AlreadyCommittedError", "committed"]
        assert plan.fired >= 3


async def test_a_race_that_everybody_wins_is_found_out(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: "412 means that it is there, so it is ours"."""

    async def always(*_: object) -> bool:
        return True

    real = RemoteStore.put

    async def put(self: RemoteStore, key: str, data: bytes, *, if_absent: bool = False) -> None:
        with contextlib.suppress(PreconditionFailedError):
            await real(self, key, data, if_absent=if_absent)

    monkeypatch.setattr(RemoteStore, "put", put)
    monkeypatch.setattr(shared_commit, "read_claim", always)
    with planned(server, proxy, Kind.RESET) as (uri, _):
        told = await race(uri, tmp_path, 3)
    assert told != ["AlreadyCommittedError", "AlreadyCommittedError", "committed"]


async def test_an_old_listing_delays_and_decides_nothing(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    """Rank 1 comes last and must find the manifest to be, which the listing does not show yet."""
    hidden = [3]

    def answer(verb: str, path: str, head: bytes) -> bytes | None:
        if verb == "GET" and "list-type=2" in path and "pending" in path and hidden[0]:
            hidden[0] -= 1
            body = b"<ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>0</KeyCount></ListBucketResult>"
            return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        return None

    proxy.answer = answer
    with planned(server, proxy, Kind.RESET) as (uri, _):
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
            await first.drainer.send_files(replace(entry, manifest=whole))  # and then its node is gone
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
    with planned(server, proxy, Kind.RESET) as (uri, _):
        async with mover_at(tmp_path / "node") as mover:
            saved = save(mover, parse_uri(f"{uri}/step-1"), (9 * MiB, KiB, KiB, KiB), 1)
            store = mover.store(saved.location)
            await shared_commit.read_claim(store)
            expiry.has_come = True
            monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
            await drained(mover, saved, tmp_path)
            assert mover.drainer.retries.counts["credentials_renewed"] == 1
    assert 1 <= expiry.refused <= 4, "those that were under way"


async def test_credentials_expire_in_the_middle_of_a_large_file(
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
    with planned(server, proxy, Kind.RESET) as (uri, _):
        async with mover_at(tmp_path / "node") as mover:
            await drained(mover, save(mover, parse_uri(f"{uri}/step-1"), (17 * MiB,), 1), tmp_path)
    assert expiry.refused >= 1


async def test_credentials_that_cannot_be_renewed(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says so, the local copy is kept, and so is the entry in the journal: later it is drained after all."""
    expiry = Expiry(proxy)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old")
    with planned(server, proxy, Kind.RESET) as (uri, _):
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
            assert expiry.refused <= 4, "nobody hammers a server that says no"
        monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
        async with mover_at(tmp_path / "node") as mover:
            await drained(mover, saved, tmp_path)
