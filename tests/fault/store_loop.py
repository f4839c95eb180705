"""The harness of test_store_faults.py: save, drain and read back through the fault proxy, and record violations."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import secrets
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from tests.servers.faultproxy import FaultProxy, Kind, Plan, scripted
from tierckpt.checkpoint import local_commit
from tierckpt.checkpoint.journal import READY, JournalEntry
from tierckpt.checkpoint.verify import verify
from tierckpt.config import KiB, MiB, Settings
from tierckpt.disk.durable import durable_write, make_dirs
from tierckpt.errors import (
    IntegrityError,
    OperationTimeoutError,
    PartialTransferError,
    StoreUnavailableError,
    TierckptError,
)
from tierckpt.format.layout import METADATA, Location, attempt_metadata, parse_uri
from tierckpt.format.manifest import FileEntry, Manifest, digests_of
from tierckpt.mover import Mover
from tierckpt.restore.restore import fetch_missing, restore
from tierckpt.types import Tier

T = TypeVar("T")

DEADLINE_SECONDS = 12.0
"""Of one verb, given to it as its timeout or held by its store's. A verb that takes much longer counts as hanging."""
GRACE_SECONDS = 25.0
HEAL_SECONDS = 60.0
CHUNK_BYTES = 512 * KiB

DAMAGE = {Kind.BIT_FLIP, Kind.WRONG_OBJECT, Kind.SHORT, Kind.TRUNCATED}
PASSING = (StoreUnavailableError, OperationTimeoutError, PartialTransferError)
"""Errors that a caller may get while its store fails: each means "later". Any other is a wrong verdict."""


def settings_for(root: Path, **more: object) -> Settings:
    return Settings.load(
        local_root=root, chunk_size_bytes=CHUNK_BYTES, concurrency=2, store_timeout_seconds=6.0, **more
    )


@contextlib.asynccontextmanager
async def mover_at(root: Path, **more: object) -> AsyncIterator[Mover]:
    mover = Mover(settings_for(root, **more))
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
    mover.journal.write(_ready(entry, manifest))
    local_commit.commit_local(directory, location, manifest, {METADATA: metadata})
    return Saved(location, token, {path: digest(data) for path, data in {**contents, METADATA: metadata}.items()})


def _ready(entry: JournalEntry, manifest: Manifest) -> JournalEntry:
    return replace(entry, files=manifest.files + manifest.metadata, manifest=manifest, state=READY)


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
        """One phase: go on until the time is over and ``faults_min`` faults have happened, then heal."""
        begun, fired = time.monotonic(), self.plan.fired
        saved: list[Saved] = []
        async with mover_at(self.root / f"saver-{share}") as saver:
            self.plan.share = share
            while time.monotonic() < begun + seconds or self.plan.fired < fired + faults_min:
                if time.monotonic() > begun + seconds + 60:
                    self.violations.append(f"{share}: {self.plan.fired - fired} faults, not {faults_min}")
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
