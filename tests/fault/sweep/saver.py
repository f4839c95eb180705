"""A save as ``dcp/writer.py`` does it, but without torch: the same functions in the same order."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tierckpt.arena.slots import write_buffers
from tierckpt.cache import space
from tierckpt.checkpoint import local_commit
from tierckpt.checkpoint.journal import READY, WRITING, JournalEntry
from tierckpt.checkpoint.shared_commit import discard
from tierckpt.config import Settings
from tierckpt.disk import durable
from tierckpt.disk.durable import translated
from tierckpt.disk.io_tuner import WRITE_BYTES_MAX, IoShape, segment_bytes
from tierckpt.disk.local_root import check_local_root
from tierckpt.errors import TierckptError
from tierckpt.format import layout
from tierckpt.format.layout import SHARD_SUFFIX, Location, local_dir
from tierckpt.format.manifest import FileEntry, Flushed, Manifest, digests_of
from tierckpt.mover import Mover
from tierckpt.quantities import round_up
from tierckpt.save import direct_put, flush, shard_plan

KiB = 1 << 10
CHUNK_BYTES = 64 * KiB
SHAPE = IoShape(1, CHUNK_BYTES)
SHARD_BYTES = (150_000, 5_000)
"""Three writes, the last one partial; and one write."""


def content(label: str, rank: int, index: int) -> bytes:
    """Return the bytes of shard ``index`` of ``rank`` in save ``label``, different for each."""
    return random.Random(f"{label}/{rank}/{index}").randbytes(SHARD_BYTES[index])


def do_nothing() -> None:
    pass


class Saver:
    """Saves with one mover, event loop and thread."""

    def __init__(self, settings: Settings, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.settings = settings
        self.mover = Mover(settings)
        self.run = run
        self._recovered = False

    def save(
        self,
        location: Location,
        label: str,
        *,
        ranks: int = 1,
        alone: bool = False,
        planned: Callable[[], None] = do_nothing,
        committed: Callable[[], None] = do_nothing,
        send: bool = True,
        is_direct_put: bool = False,
    ) -> None:
        """Save ``label`` by ``ranks`` ranks, the coordinator last; ``alone``: without collectives.

        ``is_direct_put``: shards go directly to the shared tier, and to the SSD only if that fails.

        ``planned`` is called once the replaced attempts are known, ``committed`` after the local commit. Without
        ``send``, the save ends before anything is sent to the shared tier, as if the process died.
        """
        with translated(self.settings.local_root, is_above=True):  # as the writer does
            check_local_root(self.settings)
            replaces = self.run(self.mover.replaced.find(location, overwrite=True))
            planned()
            one = _Save(self, location, label, ranks, alone, replaces)
            try:
                for rank in (*range(1, ranks), 0):
                    one.begin(rank)
                    one.write(rank, is_direct_put)
                    if rank == 0 or alone:
                        one.finish(rank)
                        if rank == 0 and not one.is_direct_put:
                            committed()
                    one.hand_over(send)
            except BaseException:
                one.abort()
                raise
            finally:
                one.release()

    def recover(self) -> None:
        """Recover once in the life of the process, as the client does."""
        if not self._recovered:
            self._recovered = True
            self.run(self.mover.drains.recover())

    def leave_unfinished(self, location: Location, label: str) -> None:
        """Leave the files of a process that was killed while it wrote shards."""
        one = _Save(self, location, label, 1, False, ())
        one.begin(0)
        one.write(0)
        one.release()


class _Save:
    def __init__(
        self, saver: Saver, location: Location, label: str, ranks: int, alone: bool, replaces: tuple[str, ...]
    ) -> None:
        self.saver, self.location, self.label, self.ranks, self.alone = saver, location, label, ranks, alone
        self.settings, self.mover, self.journal = saver.settings, saver.mover, saver.mover.journal
        self.replaces = replaces
        self.directory = local_dir(self.settings.local_root, location)
        self.attempt = secrets.token_hex(8)
        self.collected: list[FileEntry] = []
        self.lock = contextlib.ExitStack()
        self.entry: JournalEntry | None = None
        self.is_direct_put = False

    def begin(self, rank: int) -> None:
        self.saver.recover()
        token = f"{self.attempt}-{rank}" if self.alone else self.attempt if rank == 0 else secrets.token_hex(8)
        durable.make_dirs(self.directory)
        self.lock.enter_context(self.journal.own(token))
        self.entry = self.journal.open(token, self.location, rank, CHUNK_BYTES)

    def write(self, rank: int, is_direct_put: bool = False) -> None:
        assert self.entry is not None
        token = self.entry.token
        shards = [
            shard_plan.Shard(
                self.directory / layout.shard_name(f"__{rank}_", index, token),
                [shard_plan.ShardRecord(0, content(self.label, rank, index))],
            )
            for index in range(len(SHARD_BYTES))
        ]
        flushed = self._put_directly(shards) if is_direct_put else None
        self.is_direct_put = flushed is not None
        if flushed is None:
            space.make_room(self.settings, sum(shard.size_bytes for shard in shards), self.directory)
            flushed = self._flush(shards)
        files = tuple(FileEntry(file.path.name, file.size_bytes, file.digests, rank, token) for file in flushed)
        self.collected += files
        self.entry = dataclasses.replace(self.entry, files=files)
        durable.fsync_dir(self.directory)

    def _put_directly(self, shards: list[shard_plan.Shard]) -> list[Flushed] | None:
        """Put shards on the shared tier; None if it rejects them."""
        store, flow = self.mover.store(self.location), self.mover.limiter.flow(0.0)
        try:
            with write_buffers().take(1, CHUNK_BYTES, 30.0) as [slot]:
                return self.saver.run(direct_put.send(store, shards, slot, CHUNK_BYTES, flow))  # type: ignore[no-any-return]
        except TierckptError:
            self._discard([shard.path.name for shard in shards])
            return None

    def _discard(self, names: list[str]) -> None:
        with contextlib.suppress(TierckptError):
            self.saver.run(
                discard(self.mover.store(self.location), [name for name in names if name.endswith(SHARD_SUFFIX)])
            )

    def _flush(self, shards: list[shard_plan.Shard]) -> list[Flushed]:
        segment = segment_bytes(CHUNK_BYTES, WRITE_BYTES_MAX)
        slot_bytes = min(segment, round_up(max(shard.size_bytes for shard in shards)))
        with write_buffers().take(1, slot_bytes, 30.0) as slots:
            return flush.flush(shards, slots=slots, shape=SHAPE, chunk_size_bytes=CHUNK_BYTES)

    def finish(self, rank: int) -> None:
        assert self.entry is not None
        files = list(self.entry.files) if self.alone else self.collected
        data = json.dumps({"label": self.label, "files": sorted(file.path for file in files)}).encode()
        name = layout.rank_metadata(rank) if self.alone else layout.METADATA
        source = layout.attempt_metadata(self.entry.token if self.alone else self.attempt)
        digests = digests_of(data, CHUNK_BYTES)
        manifest = Manifest(
            attempt=self.attempt,
            world_size=self.ranks,
            chunk_size_bytes=CHUNK_BYTES,
            metadata=(FileEntry(name, len(data), digests, rank, self.entry.token, source=source),),
            files=tuple(sorted(files, key=lambda file: file.path)),
            replaces=self.replaces,
            created_unix_seconds=time.time(),
        )
        metadata = {name: data}
        local_commit.write_attempt_metadata(self.directory, manifest, metadata)
        self.entry = dataclasses.replace(
            self.entry, files=self.entry.files + manifest.metadata, manifest=manifest, state=READY
        )
        self.journal.write(self.entry)
        if self.entry.is_fragment:
            local_commit.commit_local_fragment(self.directory, self.location, manifest)
        else:
            local_commit.commit_local(self.directory, self.location, manifest, metadata)

    def hand_over(self, send: bool) -> None:
        """Leave the entry to the mover of the next ``drain_all``. If the tiers share links, commit on shared now."""
        entry = self.entry
        assert entry is not None
        if not self.settings.drain:
            self.journal.remove(entry.token)
            self.release()
            return
        if entry.state != READY:
            entry = self.journal.write(dataclasses.replace(entry, state=READY))
        self.release()
        if not send or self.is_direct_put:
            return
        with contextlib.suppress(TierckptError):  # as in the writer: the mover retries
            linked = self.saver.run(self.mover.drains.send_linked(entry))
            if linked and entry.manifest is not None and not entry.is_fragment:
                self.saver.run(self.mover.drains.drain_now(entry.token))

    def abort(self) -> None:
        if self.entry is None:
            return
        entry, token = self.entry, self.entry.token
        if entry.state == READY:
            self.journal.write(dataclasses.replace(entry, state=WRITING))
        if not local_commit.discard_attempt(self.directory, token, entry.manifest):
            self.journal.write(dataclasses.replace(entry, state=READY))
            self.release()
            return
        if self.is_direct_put:
            self._discard([file.path for file in entry.files])
        self.journal.remove(token)
        self.release()

    def release(self) -> None:
        self.lock.close()
        self.entry = None


async def inline(work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """Replacement of ``asyncio.to_thread``: one thread makes all system calls in a fixed order."""
    return work(*arguments, **options)


async def link_fails(*_: Any) -> bool:
    """Replacement of ``LocalStore.link``: links fail, as between two file systems, so that files are copied."""
    return False
