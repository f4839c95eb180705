"""Bit rot: one flipped bit, or one bad block, in any file of a checkpoint on any tier is found, and never restored.

TIERCKPT_TEST_BIT_FLIPS sets how many random bits are flipped; ``every`` flips each bit of each file of a checkpoint
of 64 KiB on the local tier. Every fault is put on a disk, and met by the code that ``verify`` and the mover run.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.states import save
from tierckpt.checkpoint import local_commit, marks, shared_commit
from tierckpt.checkpoint.journal import READY, WRITING, JournalEntry
from tierckpt.checkpoint.verify import VerifyReport, verify
from tierckpt.client import close_all
from tierckpt.config import Settings
from tierckpt.dcp.save_session import SaveSession
from tierckpt.errors import IntegrityError, ManifestError, TierckptError
from tierckpt.format import layout
from tierckpt.format import manifest as manifests
from tierckpt.format.layout import CLAIM, DRAINED, MANIFEST, METADATA, local_dir, parse_uri, part, pending
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
    """With its metadata and manifest a checkpoint of a little more than 64 KiB."""
    return {"weight": torch.randn(16_000, generator=torch.Generator().manual_seed(seed)), "step": seed}


@dataclass(frozen=True)
class Kind:
    """One kind of file: where it lies, what it held in the checkpoint before, and who finds out about damage to it."""

    name: str
    path: Path
    good: bytes
    stale: bytes
    find: Callable[[], str]
    """Returns what is reported about the file, '' if nothing; or raises one of our errors."""


class Node:
    """One checkpoint, saved twice, on two tiers that share no file; and one whose drain is not at its end."""

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
        """The files of the checkpoint by tier and role; the names of two attempts differ, their roles do not."""
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

    def _committed(self, before: dict[str, bytes]) -> Iterator[Kind]:
        for name, good in self.after.items():
            directory = self.local if name.startswith("local") else self.shared
            yield Kind(name, directory / self.names[name], good, before[name], lambda name=name: self.verified(name))  # type: ignore[misc]

    def _draining(self) -> Iterator[Kind]:
        """Records that stand only while a checkpoint of several ranks is drained, and what reads them."""
        journal, files = self.mover.journal, self.manifest.files + self.manifest.metadata
        entry = JournalEntry("ab12", self.location.uri, 0, WRITING, 1.0, 16384)
        stale = journal.write(entry) and (journal.directory / "ab12.json").read_bytes()
        journal.write(replace(entry, files=files, manifest=self.manifest, state=READY))
        path = journal.directory / "ab12.json"
        yield Kind("journal entry", path, path.read_bytes(), stale, lambda path=path: self.journalled(path))  # type: ignore[misc]
        fragment = replace(self.manifest, attempt="cd34", world_size=2)
        for name, key in (("shared pending", pending("cd34")), ("shared fragment", part("cd34-0"))):
            path = self.shared / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(fragment.encode())
            stale = replace(fragment, attempt="ef56").encode()
            yield Kind(name, path, path.read_bytes(), stale, lambda key=key: self.drained(key))  # type: ignore[misc]

    # --- who finds out ------------------------------------------------------------------------------------------

    def verified(self, name: str) -> str:
        """What ``tierckpt verify --read-data`` says about a file."""
        tier, path = Tier(name.partition(" ")[0]), self.names[name]
        checkpoint, report = self.runner.run(verify(self.mover.selector, self.location, read_data=True))
        found = {**report.records, **report.problems}
        path = METADATA if path.startswith(layout.METADATA_DIR) else path
        if (tier, path) in found:
            return found[tier, path]
        return "" if not found and checkpoint.manifest == self.manifest else f"elsewhere: {found}"

    def journalled(self, path: Path) -> str:
        entry = self.mover.journal.read(path.stem)
        return "" if entry is not None and entry.state == READY else "the save did not finish"

    def drained(self, key: str) -> str:
        """What a mover says that needs the record to commit."""
        manifest = self.runner.run(self.read(key))
        return "" if manifest.attempt == "cd34" else f"of another attempt, {manifest.attempt}"

    async def read(self, key: str) -> Manifest:
        return manifests.decode(await self.mover.store(self.location).get(key), where=key)

    def close(self) -> None:
        self.runner.run(self.mover.close())
        self.runner.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    async def link(self: LocalStore, key: str, source: Path) -> bool:
        return False

    async def inline(work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        return work(*arguments, **named)

    logging.disable(logging.CRITICAL)  # each fault is logged, which costs more than to find it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "link", link)
        for module in (manifests, replicated_file):
            patch.setattr(module, "DIGEST_BLOCK_BYTES", 1024)
        node = Node(tmp_path_factory.mktemp("node"))
        patch.setattr(asyncio, "to_thread", inline)
        yield node
        node.close()
    logging.disable(logging.NOTSET)


# --- the faults -------------------------------------------------------------------------------------------------------

Damage = Callable[[Kind, random.Random], bytes]


def block_of(kind: Kind, chance: random.Random) -> tuple[int, int]:
    size = min(BLOCK_BYTES, max(16, len(kind.good) // 4))
    start = chance.randrange(-(-len(kind.good) // size)) * size
    return start, min(start + size, len(kind.good))


def flipped(kind: Kind, chance: random.Random) -> bytes:
    return flip(kind.good, chance.randrange(8 * len(kind.good)))


def flip(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def zeroed(kind: Kind, chance: random.Random) -> bytes:
    start, stop = block_of(kind, chance)
    return kind.good[:start] + bytes(stop - start) + kind.good[stop:]


def swapped(kind: Kind, chance: random.Random) -> bytes:
    data = bytearray(kind.good)
    (first, end), (second, last) = block_of(kind, chance), block_of(kind, chance)
    count = min(end - first, last - second)
    data[first : first + count], data[second : second + count] = (
        data[second : second + count],
        data[first : first + count],
    )
    return bytes(data)


def stale(kind: Kind, chance: random.Random) -> bytes:
    """One block of what lay here in the checkpoint before; all of it when the file has only one."""
    if len(kind.good) <= BLOCK_BYTES or chance.random() < 0.2:
        return kind.stale
    start, stop = block_of(kind, chance)
    return kind.good[:start] + kind.stale[start:stop].ljust(stop - start, b"\0") + kind.good[stop:]


def truncated(kind: Kind, chance: random.Random) -> bytes:
    return kind.good[: chance.choice((0, len(kind.good) - 1, chance.randrange(len(kind.good))))]


def extended(kind: Kind, chance: random.Random) -> bytes:
    """White space too, which JSON does not mind."""
    return kind.good + chance.choice((b"\n", b" " * 100, b"\0", bytes(BLOCK_BYTES), b"}", kind.good))


BLOCK_DAMAGES = (zeroed, swapped, stale, truncated, extended)


@dataclass
class Tally:
    planned: int = 0
    fired: int = 0
    undetected: list[str] = None  # type: ignore[assignment]
    kinds: Counter[str] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.undetected, self.kinds = [], Counter()


def put(node: Node, kind: Kind, damaged: bytes, tally: Tally, label: str) -> None:
    """Put one fault on the disk, look whether it is found, and mend it."""
    tally.planned += 1
    if damaged == kind.good:
        return  # two blocks that are alike were swapped: nothing has happened
    overwrite(kind.path, damaged)
    try:
        found = kind.find()
    except (IntegrityError, TierckptError) as error:
        found = str(error)
    finally:
        overwrite(kind.path, kind.good)
    tally.fired += 1
    tally.kinds[kind.name] += 1
    if not found and not passed_over(node, kind, damaged):
        tally.undetected.append(f"{label} of {kind.name}")


def overwrite(path: Path, data: bytes) -> None:
    """Change the bytes in place, as a disk does; to open for writing costs a flush on some file systems."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwrite(file, data, 0)
    os.ftruncate(file, len(data))
    os.close(file)


def passed_over(node: Node, kind: Kind, damaged: bytes) -> bool:
    """An old record in place of the new one, whole: no damage to be told, as long as it is not gone by.

    A node may well hold an older manifest than the shared tier does: then the newer one is restored. A drained mark
    may be of the attempt before: then it says nothing about this one, which costs one request to find out.
    """
    if damaged != kind.stale or kind.name not in {"local manifest", "local drained"}:
        return False
    overwrite(kind.path, damaged)
    try:
        if kind.name == "local drained":
            return not marks.is_drained(node.local, node.manifest.attempt)
        return restored(node, f"passed-{random.getrandbits(40):x}") == contents(node)
    finally:
        overwrite(kind.path, kind.good)


def contents(node: Node) -> dict[str, str]:
    return {entry.path: "".join(entry.digests) for entry in node.manifest.entries}


def restored(node: Node, name: str) -> dict[str, str]:
    """The digests of what a restore makes of the checkpoint."""
    target = node.root / name
    node.runner.run(restore(node.mover, node.location, target))
    chunk = node.manifest.chunk_size_bytes
    digests = {}
    for entry in node.manifest.entries:
        digests[entry.path] = "".join(manifests.digests_of((target / entry.path).read_bytes(), chunk))
    return digests


# --- the tests --------------------------------------------------------------------------------------------------------


def test_nothing_is_found_in_a_good_checkpoint(node: Node) -> None:
    assert {kind.name: kind.find() for kind in node.kinds} == {kind.name: "" for kind in node.kinds}
    assert restored(node, "good") == contents(node)


@pytest.mark.timeout(400 if FLIPS != "every" else 7200)
def test_every_flipped_bit_is_found(node: Node) -> None:
    tally, begun = Tally(), time.monotonic()
    if FLIPS == "every":
        for kind in node.kinds:
            if not kind.name.startswith("shared"):
                for bit in range(8 * len(kind.good)):
                    put(node, kind, flip(kind.good, bit), tally, f"bit {bit}")
        assert tally.fired >= 64 * 1024 * 8
    else:
        chance = random.Random(0)
        for index in range(int(FLIPS)):
            kind = node.kinds[index % len(node.kinds)]
            put(node, kind, flipped(kind, chance), tally, f"flip {index}")
        assert tally.fired == int(FLIPS)
    print(f"\nbit flips: {tally.fired} in {time.monotonic() - begun:.1f} s, {dict(tally.kinds)}", file=sys.stderr)
    assert tally.undetected == []


@pytest.mark.timeout(400 if FLIPS != "every" else 1800)
@pytest.mark.parametrize("damage", BLOCK_DAMAGES, ids=lambda damage: damage.__name__)
def test_every_bad_block_is_found(damage: Damage, node: Node) -> None:
    tally, chance = Tally(), random.Random(0)
    while tally.fired < BLOCK_FAULTS // len(BLOCK_DAMAGES):
        kind = node.kinds[tally.planned % len(node.kinds)]
        put(node, kind, damage(kind, chance), tally, damage.__name__)
        assert tally.planned < 4 * BLOCK_FAULTS
    assert tally.undetected == []
    assert len(tally.kinds) == len(node.kinds)


@pytest.mark.slow
@pytest.mark.parametrize("damage", (flipped, *BLOCK_DAMAGES), ids=lambda damage: damage.__name__)
def test_a_damaged_copy_is_restored_from_the_other_tier(damage: Damage, node: Node) -> None:
    chance = random.Random(1)
    for index, kind in enumerate(node.kinds):
        overwrite(kind.path, damage(kind, chance))
        try:
            assert restored(node, f"{damage.__name__}-{index}") == contents(node), kind.name
        finally:
            kind.path.with_name(f"{kind.path.name}.bad").unlink(missing_ok=True)
            overwrite(kind.path, kind.good)


def test_the_part_record_says_nothing_but_that_it_is_there(node: Node) -> None:
    """``{}``, and nobody reads it: the one file whose damage is not found, and does not matter."""
    entry = JournalEntry("ab12", node.location.uri, 1, READY, 1.0, 16384, node.manifest.files)
    store = node.mover.store(node.location)
    two = replace(node.manifest, files=(*node.manifest.files, replace(node.manifest.files[0], path="b", token="b")))
    for content in (b"{}", b"}{", b"", bytes(BLOCK_BYTES)):
        node.runner.run(store.put(part("b"), content))
        assert node.runner.run(node.mover.drainer.all_parts(two, replace(entry, token=two.files[0].token), store))
    node.runner.run(store.delete(part("b")))


def test_records_of_the_release_before_are_taken_as_they_are(node: Node) -> None:
    """They had no digest. What a damaged name of the digest leaves is not one of them."""
    claim, note = node.shared / CLAIM, node.local / DRAINED
    attempt = node.manifest.attempt
    claims, notes = claim.read_bytes(), note.read_bytes()
    try:
        claim.write_bytes(f'{{"attempt": "{attempt}", "replaces": []}}'.encode())
        note.write_bytes(f'{{"attempt": "{attempt}"}}'.encode())
        assert node.runner.run(shared_commit.read_claim(node.mover.store(node.location))) == attempt
        assert marks.is_drained(node.local, attempt)
        claim.write_bytes(claims.replace(b"self_digest", b"selF_digest"))
        note.write_bytes(notes.replace(b"self_digest", b"selF_digest"))
        with pytest.raises(ManifestError, match=r"claim\.json"):
            node.runner.run(shared_commit.read_claim(node.mover.store(node.location)))
        assert not marks.is_drained(node.local, attempt)
    finally:
        claim.write_bytes(claims)
        note.write_bytes(notes)


def test_an_old_state_of_a_journal_entry_removes_nothing_that_is_committed(tmp_path: Path) -> None:
    """A stale block brings back the entry of a save that had not finished then. It has since: its shards stay."""
    options = {"local_root": tmp_path / "local", "chunk_size_bytes": "16KiB", "mover": "inline"}
    location = parse_uri(tmp_path / "shared" / "step-1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SaveSession, "hand_over", lambda self, **_: self.release())
        save(location.uri, state_of(1), **options)
    mover = Mover(Settings.load(None, **options))
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
    ("owner", "name", "finish_for_dead_rank", "missed"),
    [
        (verified_read, "check", no_check, {"local shard", "shared shard", "local metadata", "shared stock metadata"}),
        (manifests, "check_seal", no_seal, {"local manifest", "shared claim", "local drained", "journal entry"}),
    ],
)
def test_without_a_digest_flips_go_unseen(
    owner: Any, name: str, finish_for_dead_rank: Any, missed: set[str], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, finish_for_dead_rank)
    tally, chance = Tally(), random.Random(0)
    for index in range(800):  # of a record many are seen without its seal too: they make other text of it than JSON
        kind = node.kinds[index % len(node.kinds)]
        put(node, kind, flipped(kind, chance), tally, "flip")
    assert missed <= {text.removeprefix("flip of ") for text in tally.undetected}


# --- between the local commit and the shared one ---------------------------------------------------------------------


def drained_after_damage(root: Path) -> tuple[str, bool]:
    """Flip one bit of a shard that is committed here, then drain: what the mover says, and whether others can load it.

    The shared tier is told that it cannot link, so that bytes are sent.
    """
    options = {"local_root": root / "local", "chunk_size_bytes": "16KiB", "mover": "inline"}
    location = parse_uri(root / "shared" / "step-1")
    mover = Mover(Settings.load(None, **options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SaveSession, "hand_over", lambda self, **_: self.release())  # killed then
        save(location.uri, state_of(1), **options)
    [shard] = local_dir(root / "local", location).glob("*.distcp")
    bit_flipped = bytearray(shard.read_bytes())
    bit_flipped[len(bit_flipped) // 2] ^= 1
    overwrite(shard, bytes(bit_flipped))

    async def drain() -> tuple[str, bool]:
        _, errors = await mover.drains.drain_all(patient=False)
        committed = await shared_commit.read_shared_manifest(mover.store(location)) is not None
        await mover.close()
        return ", ".join(type(error).__name__ for error in errors), committed

    return asyncio.run(drain())


async def never_links(*_: Any) -> bool:
    return False


def test_a_shard_that_was_damaged_before_the_drain_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "link", never_links)
    assert drained_after_damage(tmp_path) == ("IntegrityError", False)


@pytest.mark.slow
def test_a_digest_taken_from_what_is_sent_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: "digest after upload" says yes to whatever lies on the disk."""
    monkeypatch.setattr(LocalStore, "link", never_links)
    monkeypatch.setattr(verified_read, "is_good", lambda *_: True)
    assert drained_after_damage(tmp_path) == ("", True)
