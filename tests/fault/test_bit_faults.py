"""Bit rot: a flipped bit or bad block in any file of a checkpoint on any tier is found and never restored.

TIERCKPT_TEST_BIT_FLIPS sets the number of random flips; ``every`` flips each bit of each file of a 64 KiB checkpoint on
the local tier. Faults are written to disk and found by the code of ``verify`` and the mover.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import files
from tests.fault.sweep.saver import inline, link_fails
from tests.states import save
from tierckpt.checkpoint import local_commit, shared_commit
from tierckpt.checkpoint.journal import READY, WRITING, JournalEntry
from tierckpt.checkpoint.verify import VerifyReport, verify
from tierckpt.client import close_all
from tierckpt.config import Settings
from tierckpt.dcp.save_session import SaveSession
from tierckpt.errors import ManifestError, TierckptError
from tierckpt.format import layout
from tierckpt.format import manifest as manifests
from tierckpt.format.layout import CLAIM, DRAINED, MANIFEST, METADATA, Location, local_dir, parse_uri, part, pending
from tierckpt.format.manifest import Manifest
from tierckpt.mover import Mover
from tierckpt.read import replicated_file
from tierckpt.restore.restore import restore
from tierckpt.stores import verified_read
from tierckpt.stores.local import LocalStore
from tierckpt.types import Tier

FLIPS = os.environ.get("TIERCKPT_TEST_BIT_FLIPS", "500")
BLOCK_FAULTS = 600 if FLIPS != "every" else 10_000
BLOCK_BYTES = 512


def state_of(seed: int) -> dict[str, Any]:
    """Return a state with a checkpoint of slightly more than 64 KiB, metadata and manifest included."""
    return {"weight": torch.randn(16_000, generator=torch.Generator().manual_seed(seed)), "step": seed}


@dataclass(frozen=True)
class FileKind:
    """A kind of file: path, current and previous content, and the check that must find damage."""

    name: str
    path: Path
    good: bytes
    stale: bytes
    find: Callable[[], str]
    """Returns the problem reported for the file, "" if none, or raises a TierckptError."""


class Node:
    """One checkpoint, saved twice, on two tiers without shared links; and records of an unfinished drain."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.settings = Settings.load(None, local_root=root / "local", chunk_size_bytes="16KiB", mover="inline")
        self.location = parse_uri(root / "shared" / "run" / "step-1")
        self.local, self.shared = local_dir(self.settings.local_root, self.location), Path(self.location.path)
        self._save(1)
        before = self._files()
        self._save(2)
        self.manifest = local_commit.read_local_manifest(self.local) or pytest.fail("not committed")
        self.after = self._files()
        self.runner = asyncio.Runner()
        self.mover = Mover(self.settings)
        self.kinds = [*self._committed(before), *self._draining()]

    def _save(self, seed: int) -> None:
        options = {key: getattr(self.settings, key) for key in ("local_root", "chunk_size_bytes", "mover")}
        save(self.location.uri, state_of(seed), **options)
        close_all()
        runner = Mover(self.settings)
        asyncio.run(self._drain(runner))

    async def _drain(self, mover: Mover) -> None:
        await mover.drains.drain_all(patient=True)
        await mover.close()

    def _files(self) -> dict[str, bytes]:
        """Return the files by tier and role: names differ between attempts, roles do not."""
        found = {}
        for tier, directory in ((Tier.LOCAL, self.local), (Tier.SHARED, self.shared)):
            manifest = manifests.decode((directory / MANIFEST).read_bytes())
            digests, shard = sorted(entry.key for entry in manifest.files)
            names = {"shard": shard, "metadata": manifest.metadata[0].key, "stock metadata": METADATA}
            names["block digests"] = digests
            names |= {"manifest": MANIFEST} | ({"drained": DRAINED} if tier is Tier.LOCAL else {"claim": CLAIM})
            found |= {f"{tier} {role}": (directory / name).read_bytes() for role, name in names.items()}
            self.names = {**getattr(self, "names", {}), **{f"{tier} {role}": name for role, name in names.items()}}
        return found

    def _committed(self, before: dict[str, bytes]) -> Iterator[FileKind]:
        for name, good in self.after.items():
            directory = self.local if name.startswith("local") else self.shared
            yield FileKind(
                name, directory / self.names[name], good, before[name], lambda name=name: self.verify_file(name)
            )  # type: ignore[misc]

    def _draining(self) -> Iterator[FileKind]:
        """Yield the records that exist only during a drain, with the code that reads them."""
        journal, files = self.mover.journal, self.manifest.files + self.manifest.metadata
        entry = JournalEntry("ab12", self.location.uri, 0, WRITING, 1.0, 16384)
        stale = journal.write(entry) and (journal.directory / "ab12.json").read_bytes()
        journal.write(replace(entry, files=files, manifest=self.manifest, state=READY))
        path = journal.directory / "ab12.json"
        yield FileKind("journal entry", path, path.read_bytes(), stale, lambda path=path: self.read_journal(path))  # type: ignore[misc]
        fragment = replace(self.manifest, attempt="cd34", world_size=2)
        for name, key in (("shared pending", pending("cd34")), ("shared fragment", part("cd34-0"))):
            path = self.shared / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(fragment.encode())
            stale = replace(fragment, attempt="ef56").encode()
            yield FileKind(name, path, path.read_bytes(), stale, lambda key=key: self.read_record(key))  # type: ignore[misc]

    # --- checks -------------------------------------------------------------------------------------------------

    def verify_file(self, name: str) -> str:
        """Return the problem that ``tierckpt verify --read-data`` reports for a file."""
        tier, path = Tier(name.partition(" ")[0]), self.names[name]
        checkpoint, report = self.runner.run(verify(self.mover.selector, self.location, read_data=True))
        found = {**report.records, **report.problems}
        path = METADATA if path.startswith(layout.METADATA_DIR) else path
        if (tier, path) in found:
            return found[tier, path]
        return "" if not found and checkpoint.manifest == self.manifest else f"elsewhere: {found}"

    def read_journal(self, path: Path) -> str:
        entry = self.mover.journal.read(path.stem)
        return "" if entry is not None and entry.state == READY else "the save did not finish"

    def read_record(self, key: str) -> str:
        """Return the problem that the commit of a drain finds in the record."""
        manifest = self.runner.run(self.read(key))
        return "" if manifest.attempt == "cd34" else f"of another attempt, {manifest.attempt}"

    async def read(self, key: str) -> Manifest:
        return manifests.decode(await self.mover.store(self.location).get(key), where=key)

    def close(self) -> None:
        self.runner.run(self.mover.close())
        self.runner.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    logging.disable(logging.CRITICAL)  # a log line for each fault costs more than the check
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "link", link_fails)
        for module in (manifests, replicated_file):
            patch.setattr(module, "DIGEST_BLOCK_BYTES", 1024)
        node = Node(tmp_path_factory.mktemp("node"))
        patch.setattr(asyncio, "to_thread", inline)
        yield node
        node.close()
    logging.disable(logging.NOTSET)


# --- the faults -------------------------------------------------------------------------------------------------------

Damage = Callable[[FileKind, random.Random], bytes]


def block_of(kind: FileKind, rng: random.Random) -> tuple[int, int]:
    size = min(BLOCK_BYTES, max(16, len(kind.good) // 4))
    start = rng.randrange(-(-len(kind.good) // size)) * size
    return start, min(start + size, len(kind.good))


def flipped(kind: FileKind, rng: random.Random) -> bytes:
    return flip(kind.good, rng.randrange(8 * len(kind.good)))


def flip(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def zeroed(kind: FileKind, rng: random.Random) -> bytes:
    start, stop = block_of(kind, rng)
    return kind.good[:start] + bytes(stop - start) + kind.good[stop:]


def swapped(kind: FileKind, rng: random.Random) -> bytes:
    data = bytearray(kind.good)
    (first, end), (second, last) = block_of(kind, rng), block_of(kind, rng)
    count = min(end - first, last - second)
    data[first : first + count], data[second : second + count] = (
        data[second : second + count],
        data[first : first + count],
    )
    return bytes(data)


def stale(kind: FileKind, rng: random.Random) -> bytes:
    """Replace a block, or a small file, by its content in the previous checkpoint."""
    if len(kind.good) <= BLOCK_BYTES or rng.random() < 0.2:
        return kind.stale
    start, stop = block_of(kind, rng)
    return kind.good[:start] + kind.stale[start:stop].ljust(stop - start, b"\0") + kind.good[stop:]


def truncated(kind: FileKind, rng: random.Random) -> bytes:
    return kind.good[: rng.choice((0, len(kind.good) - 1, rng.randrange(len(kind.good))))]


def extended(kind: FileKind, rng: random.Random) -> bytes:
    """Append bytes, among them white space, which JSON allows."""
    return kind.good + rng.choice((b"\n", b" " * 100, b"\0", bytes(BLOCK_BYTES), b"}", kind.good))


BLOCK_FAULT_KINDS = (zeroed, swapped, stale, truncated, extended)


@dataclass
class Tally:
    planned: int = 0
    fired: int = 0
    undetected: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def inject(node: Node, kind: FileKind, damaged: bytes, tally: Tally, label: str) -> None:
    """Write one fault to disk, run the check, and repair the file."""
    tally.planned += 1
    if damaged == kind.good:
        return  # swapped equal blocks: no fault
    overwrite(kind.path, damaged)
    try:
        found = kind.find()
    except TierckptError as error:
        found = str(error)
    finally:
        overwrite(kind.path, kind.good)
    tally.fired += 1
    tally.kinds[kind.name] += 1
    if not found and not is_valid_older_record(node, kind, damaged):
        tally.undetected.append(f"{label} of {kind.name}")


def flip_some(node: Node, count: int, tally: Tally) -> None:
    rng = random.Random(0)
    for index in range(count):
        kind = node.kinds[index % len(node.kinds)]
        inject(node, kind, flipped(kind, rng), tally, "flip")


def overwrite(path: Path, data: bytes) -> None:
    """Write in place, as a disk does. No O_TRUNC, which costs a flush on some file systems."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwrite(file, data, 0)
    os.ftruncate(file, len(data))
    os.close(file)


def is_valid_older_record(node: Node, kind: FileKind, damaged: bytes) -> bool:
    """Return whether ``damaged`` is a whole older record that tierckpt handles correctly, so not reported.

    A local manifest may be older than the shared one: then the newer checkpoint is restored. A drained mark may be of
    the previous attempt: then it is ignored, at the cost of one request.
    """
    if damaged != kind.stale or kind.name not in {"local manifest", "local drained"}:
        return False
    overwrite(kind.path, damaged)
    try:
        if kind.name == "local drained":
            return not local_commit.is_drained(node.local, node.manifest.attempt)
        return restored(node, f"passed-{random.getrandbits(40):x}") == expected_digests(node)
    finally:
        overwrite(kind.path, kind.good)


def expected_digests(node: Node) -> dict[str, str]:
    return {entry.path: "".join(entry.digests) for entry in node.manifest.entries}


def restored(node: Node, name: str) -> dict[str, str]:
    """Restore the checkpoint and return its digests."""
    target = node.root / name
    node.runner.run(restore(node.mover, node.location, target))
    chunk = node.manifest.chunk_size_bytes
    digests = {}
    for entry in node.manifest.entries:
        digests[entry.path] = "".join(manifests.digests_of((target / entry.path).read_bytes(), chunk))
    return digests


# --- the tests --------------------------------------------------------------------------------------------------------


def test_good_checkpoint_has_no_problems(node: Node) -> None:
    assert {kind.name: kind.find() for kind in node.kinds} == {kind.name: "" for kind in node.kinds}
    assert restored(node, "good") == expected_digests(node)


@pytest.mark.timeout(400 if FLIPS != "every" else 7200)
def test_every_flipped_bit_is_found(node: Node) -> None:
    tally, started = Tally(), time.monotonic()
    if FLIPS == "every":
        for kind in node.kinds:
            if not kind.name.startswith("shared"):
                for bit in range(8 * len(kind.good)):
                    inject(node, kind, flip(kind.good, bit), tally, f"bit {bit}")
        assert tally.fired >= 64 * 1024 * 8
    else:
        flip_some(node, int(FLIPS), tally)
        assert tally.fired == int(FLIPS)
    print(f"\nbit flips: {tally.fired} in {time.monotonic() - started:.1f} s, {dict(tally.kinds)}", file=sys.stderr)
    assert tally.undetected == []


@pytest.mark.timeout(400 if FLIPS != "every" else 1800)
@pytest.mark.parametrize("damage", BLOCK_FAULT_KINDS, ids=lambda damage: damage.__name__)
def test_every_bad_block_is_found(damage: Damage, node: Node) -> None:
    tally, rng = Tally(), random.Random(0)
    while tally.fired < BLOCK_FAULTS // len(BLOCK_FAULT_KINDS):
        kind = node.kinds[tally.planned % len(node.kinds)]
        inject(node, kind, damage(kind, rng), tally, damage.__name__)
        assert tally.planned < 4 * BLOCK_FAULTS
    assert tally.undetected == []
    assert len(tally.kinds) == len(node.kinds)


@pytest.mark.slow
@pytest.mark.parametrize("damage", (flipped, *BLOCK_FAULT_KINDS), ids=lambda damage: damage.__name__)
def test_damaged_file_is_restored_from_the_other_tier(damage: Damage, node: Node) -> None:
    rng = random.Random(1)
    for index, kind in enumerate(node.kinds):
        overwrite(kind.path, damage(kind, rng))
        try:
            assert restored(node, f"{damage.__name__}-{index}") == expected_digests(node), kind.name
        finally:
            kind.path.with_name(f"{kind.path.name}.bad").unlink(missing_ok=True)
            overwrite(kind.path, kind.good)


def test_damage_to_a_part_record_has_no_effect(node: Node) -> None:
    """Its content, ``{}``, is never read: damage is not found and has no effect."""
    entry = JournalEntry("ab12", node.location.uri, 1, READY, 1.0, 16384, node.manifest.files)
    store = node.mover.store(node.location)
    two = replace(node.manifest, files=(*node.manifest.files, replace(node.manifest.files[0], path="b", token="b")))
    for content in (b"{}", b"}{", b"", bytes(BLOCK_BYTES)):
        node.runner.run(store.put(part("b"), content))
        assert node.runner.run(node.mover.drainer.all_parts(two, replace(entry, token=two.files[0].token), store))
    node.runner.run(store.delete(part("b")))


def test_records_without_a_digest_are_refused(node: Node) -> None:
    """A record without its digest, or with a damaged name of it, is damaged."""
    claim, note = node.shared / CLAIM, node.local / DRAINED
    attempt = node.manifest.attempt
    claims, notes = claim.read_bytes(), note.read_bytes()
    try:
        for claim_record, note_record in (
            (f'{{"attempt": "{attempt}", "replaces": []}}'.encode(), f'{{"attempt": "{attempt}"}}'.encode()),
            (claims.replace(b"self_digest", b"selF_digest"), notes.replace(b"self_digest", b"selF_digest")),
        ):
            claim.write_bytes(claim_record)
            note.write_bytes(note_record)
            with pytest.raises(ManifestError, match=r"claim\.json"):
                node.runner.run(shared_commit.read_claim(node.mover.store(node.location)))
            assert not local_commit.is_drained(node.local, attempt)
    finally:
        claim.write_bytes(claims)
        note.write_bytes(notes)


def committed_undrained(root: Path) -> tuple[Mover, Location]:
    """A save as if its process was killed after the local commit, and a new mover."""
    options = {"local_root": root / "local", "chunk_size_bytes": "16KiB", "mover": "inline"}
    location = parse_uri(root / "shared" / "step-1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SaveSession, "hand_over", lambda self, **_: self.release())
        save(location.uri, state_of(1), **options)
    return Mover(Settings.load(None, **options)), location


def test_stale_journal_entry_removes_no_committed_shards(tmp_path: Path) -> None:
    """A stale block restores the entry of the unfinished save. The save has been committed: its shards stay."""
    mover, location = committed_undrained(tmp_path)
    [entry] = mover.journal.entries()
    mover.journal.write(replace(entry, state=WRITING, files=(), manifest=None))

    async def recover() -> VerifyReport:
        await mover.drains.recover()
        await mover.drains.idle(10.0)
        _, report = await verify(mover.selector, location, read_data=True)
        await mover.close()
        return report

    report = asyncio.run(recover())
    assert (report.problems, report.records, report.lost) == ({}, {}, [])


# --- negative controls ------------------------------------------------------------------------------------------------


async def no_check(*_: Any) -> None:
    pass


def no_seal(body: dict[str, Any], data: Any, bad: Any) -> None:
    body.pop("self_digest", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "replacement", "missed"),
    [
        (verified_read, "check", no_check, {"local shard", "shared shard", "local metadata", "shared stock metadata"}),
        (manifests, "check_seal", no_seal, {"local manifest", "shared claim", "local drained", "journal entry"}),
    ],
)
def test_flips_are_missed_without_digest_checks(
    owner: Any, name: str, replacement: Any, missed: set[str], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, replacement)
    tally = Tally()
    flip_some(node, 800, tally)  # many flips are found without the seal: the record is no valid JSON any more
    assert missed <= {text.removeprefix("flip of ") for text in tally.undetected}


# --- damage between local and shared commit --------------------------------------------------------------------------


def drain_after_damage(root: Path) -> tuple[str, bool]:
    """Flip one bit of a locally committed shard, then drain. Returns the errors and whether shared has a commit.

    Links fail, so that bytes are sent.
    """
    mover, location = committed_undrained(root)
    [shard] = local_dir(root / "local", location).glob("*.distcp")
    files.flip(shard)

    async def drain() -> tuple[str, bool]:
        _, errors = await mover.drains.drain_all(patient=False)
        committed = await shared_commit.read_shared_manifest(mover.store(location)) is not None
        await mover.close()
        return ", ".join(type(error).__name__ for error in errors), committed

    return asyncio.run(drain())


def test_drain_does_not_send_a_damaged_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "link", link_fails)
    assert drain_after_damage(tmp_path) == ("IntegrityError", False)


@pytest.mark.slow
def test_digest_at_upload_would_accept_a_damaged_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a digest computed at upload accepts the damaged file."""
    monkeypatch.setattr(LocalStore, "link", link_fails)
    monkeypatch.setattr(verified_read, "is_good", lambda *_: True)
    assert drain_after_damage(tmp_path) == ("", True)
