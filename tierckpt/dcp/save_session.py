"""SaveSession: one rank's save to one id, from its journal entry to the drain.

open or take_over     the journal entry, and the lock that says that its owner lives (J1)
writing, note         the shards, by ``delivery``; they are durable
commit (coordinator)  metadata and manifest: the checkpoint is committed on the local tier
hand_over             the entry is the drain's
abort, let_go         the end of a save that is not committed, or of which nobody here knows whether it is
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from ..arena.slots import Lease
from ..checkpoint import branches, local_commit, local_only, marks
from ..checkpoint import epoch as epochs
from ..checkpoint.catalog import file_size
from ..checkpoint.journal import AWAITING_COMMIT, LOCAL_ONLY, READY, WRITING, Entry, Journal
from ..client import Client
from ..disk import read_lease
from ..disk.durable import make_dirs
from ..errors import CheckpointError, ManifestError, TierckptError, UnsafeCheckpointError
from ..format import manifest as manifests
from ..format.layout import METADATA, SHARD_SUFFIX, Location, attempt_metadata, local_dir, rank_metadata
from ..format.manifest import FileEntry, Manifest, digests_of
from ..telemetry import COMMITS, logger
from ..torch_internals import CHECKED_VERSIONS, StorageInfo, StorageWriterTransforms
from ..types import Tier
from . import split
from .gc_pause import gc_paused
from .handoff.handoff_client import HandoffHandle
from .metadata_pickle import encode
from .sealed import read_back
from .shard_delivery import Route, ShardDelivery

log = logger("save")

DCP_VERSION = "1.0.0"


@dataclass(frozen=True)
class TierWriteResult(WriteResult):
    """DCP's result for one item; the first of each rank also carries that rank's shards to the coordinator."""

    files: tuple[FileEntry, ...] = ()
    parts: tuple[split.Part, ...] = ()
    """Which of the items are parts of what other ranks hold too; the metadata must name them."""


def told(results: list[WriteResult], files: tuple[FileEntry, ...], parts: tuple[split.Part, ...]) -> list[WriteResult]:
    """Return the rank's results. The first one also carries the rank's files and parts."""
    if results:
        first = results[0]
        results[0] = TierWriteResult(first.index, first.size_in_bytes, first.storage_data, files, parts)
    return results


def encode_results(results: list[WriteResult]) -> dict[str, Any]:
    """Return a rank's results, with its files and parts, as JSON."""
    first = results[0] if results else None
    return {
        "results": [_encode_result(result) for result in results],
        "files": [manifests.encode_entry(file) for file in getattr(first, "files", ())],
        "parts": [[part.fqn, part.whole, part.box] for part in getattr(first, "parts", ())],
    }


def decode_results(body: Mapping[str, Any], chunk_size_bytes: int, *, where: str) -> list[WriteResult]:
    """Return the results of ``encode_results``. Raises ManifestError when ``body`` is not that."""
    with gc_paused():
        try:
            results = [_decode_result(*item) for item in body["results"]]
            parts = tuple(split.Part(str(fqn), _box(whole), _box(box)) for fqn, whole, box in body["parts"])
            items = body["files"]
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"{where}: {error}", hint="The record is damaged; nothing is committed") from error
        return told(results, manifests.decode_entries(items, chunk_size_bytes, where=where), parts)


def _encode_result(result: WriteResult) -> list[Any]:
    index, stored = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    place = [stored.relative_path, stored.offset, stored.length]
    return [index.fqn, offset, index.index, result.size_in_bytes, *place]


def _decode_result(
    fqn: str, offset: list[int] | None, number: int | None, size_bytes: int, path: str, at: int, length: int
) -> WriteResult:
    if not (isinstance(fqn, str) and isinstance(path, str)):
        raise TypeError("a name that is no text")
    index = MetadataIndex(fqn, None if offset is None else torch.Size(offset), number)
    return WriteResult(index, int(size_bytes), StorageInfo(path, int(at), int(length)))


def _box(value: list[list[int]]) -> split.Box:
    offsets, sizes = value
    return tuple(map(int, offsets)), tuple(map(int, sizes))


def files_of(results: list[list[WriteResult]]) -> list[FileEntry]:
    """Return the shards of all ranks."""
    return [file for rank in results for file in getattr(rank[0] if rank else None, "files", ())]


def _parts_of(results: list[list[WriteResult]]) -> list[split.Part]:
    return [part for rank in results for part in getattr(rank[0] if rank else None, "parts", ())]


@dataclass
class SaveRole:
    """A rank's part in a save, and what its caller has decided of the save. Can be pickled."""

    save_id: str
    """DCP's name for the save, in its metadata."""
    rank: int = 0
    world_size: int = 1
    is_coordinator: bool = True
    use_collectives: bool = True
    replaces: tuple[str, ...] = ()
    """The attempts that this save may replace, on the coordinator."""
    route: Route = "local"
    holds_back: bool = False
    """The shards wait for ``hand_over``: the caller tells every rank how the save ends."""
    is_kept: bool | None = None
    """Whether the checkpoint stays on the local tier; None where the caller keeps none."""
    has_direct_put_ranks: bool = False
    """Some rank's shards went straight to the shared tier."""
    epoch: str | None = None
    """Of a process that stands in for a rank that has ended: it commits only in this epoch."""
    notes: Mapping[str, str | int | bool] = dataclasses.field(default_factory=dict)
    """For the manifest."""
    trust_pickle: bool = False
    """The metadata may hold classes that only a reader with ``trust_pickle=True`` loads."""


class SaveSession:
    """One save in progress on this rank. One thread at a time.

    Attributes:
        entry: its journal entry, as last written.
        delivery: brings the shards to where they are to be.
        handoff: the agent's copy of a save that is DCP's to drive: it ends with this.
        outlives: the agent finishes it if this process ends, so what is durable is noted as soon as it is.
        is_open: until it is the drain's, or put away.
    """

    def __init__(
        self,
        client: Client,
        location: Location,
        role: SaveRole,
        entry: Entry,
        transforms: StorageWriterTransforms,
        *,
        sync_files: bool,
        lock: contextlib.ExitStack,
        lock_descriptor: int,
    ) -> None:
        self.client, self.settings = client, client.settings
        self.location, self.role, self.entry = location, role, entry
        self.directory = local_dir(self.settings.local_root, location)
        self.delivery = ShardDelivery(
            client, self.settings, location, entry, self.directory, role.rank, transforms, sync_files
        )
        self.lock_descriptor = lock_descriptor
        self.handoff: HandoffHandle | None = None
        self.outlives, self.is_open = False, True
        self._lock = lock
        self._journal = Journal(self.settings.local_root)

    @classmethod
    def open(
        cls,
        client: Client,
        location: Location,
        role: SaveRole,
        token: str,
        transforms: StorageWriterTransforms,
        *,
        sync_files: bool = True,
    ) -> SaveSession:
        """Open a journal entry and hold it: from now on every file of the save has a name there (J1).

        Raises CheckpointError when another process has an entry of this token.
        """
        settings = client.settings
        directory, journal = local_dir(settings.local_root, location), Journal(settings.local_root)
        with contextlib.ExitStack() as stack:
            # What stands there may be removed meanwhile, but not the directory that we are about to write to.
            stack.enter_context(read_lease.reading(settings.local_root, directory))
            make_dirs(directory)
            hold = stack.enter_context(journal.own(token))
            if not hold:
                raise CheckpointError(f"{location.uri}: another process is writing this rank's shards ({token})")
            branch = str(role.notes.get(branches.NOTE, ""))
            entry = journal.open(token, location, role.rank, int(settings.chunk_size_bytes), branch)
            if settings.peers is not None:
                marks.mark_origin(directory, token)
            lock = stack.pop_all()
        return cls(
            client, location, role, entry, transforms, sync_files=sync_files, lock=lock, lock_descriptor=hold.descriptor
        )

    @classmethod
    def take_over(
        cls,
        client: Client,
        location: Location,
        role: SaveRole,
        token: str,
        transforms: StorageWriterTransforms,
        lock: int | None,
    ) -> SaveSession | None:
        """Go on with the journal entry of a rank that has ended. None when the entry is settled, or another's.

        Args:
            lock: the rank's hold on the entry, if it was left to us; closed with the session.
        """
        journal = Journal(client.settings.local_root)
        with contextlib.ExitStack() as stack:
            hold = stack.enter_context(journal.own(token, lock))
            entry = journal.read(token)
            if not hold or entry is None:
                return None
            entry, held = dataclasses.replace(entry, manifest=None), stack.pop_all()
        return cls(
            client, location, role, entry, transforms, sync_files=True, lock=held, lock_descriptor=hold.descriptor
        )

    # --- shards -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, leases: Collection[Lease]) -> Iterator[None]:
        """Keep the staging memory of a save while its shards are written; after that another checkpoint may have it."""
        begun: list[Lease] = []
        written = False
        try:
            for lease in leases:
                lease.begin_flush()
                begun.append(lease)
            yield
            written = True
        except BaseException:
            # Before the staging memory may be used again the journal says that the shards are durable, or that there is
            # no such save: who inherits this one must never write them from what another has put there.
            self.abort()
            raise
        finally:
            for lease in begun:
                lease.end_flush(written=written)

    def note(self, files: tuple[FileEntry, ...]) -> None:
        """The shards are durable. Note that where a crash cannot take it, if anybody will ask."""
        is_held_back = (self.role.holds_back or self.outlives) and not self.role.is_coordinator and bool(files)
        state = AWAITING_COMMIT if is_held_back else self.entry.state
        self.entry = dataclasses.replace(self.entry, files=files, state=state)
        if is_held_back or self.outlives:
            self._journal.write(self.entry)

    def report(
        self, results: list[WriteResult], files: tuple[FileEntry, ...], parts: tuple[split.Part, ...]
    ) -> list[WriteResult]:
        """The shards are durable: return what the coordinator is told, and hand over what is not held back."""
        if not (self.role.is_coordinator or self.role.holds_back):
            try:
                if self.handoff is not None and self.handoff.hand_in_durable(files):
                    self.handoff = None  # it is the coordinator that ends it
                self.hand_over()
            except BaseException:
                self.abort()
                raise
        return told(results, files, parts)

    # --- the local commit ---------------------------------------------------------------------------------------

    def commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit on the local tier, and hand over. Raises AlreadyCommittedError when another save took the id."""
        try:
            with gc_paused():
                data = self._encode_metadata(metadata, results)
                manifest = self._manifest(data, results)
            metadata_bytes = {manifest.metadata[0].path: data}
            local_commit.write_attempt_metadata(self.directory, manifest, metadata_bytes)
            files, state = self.entry.files + manifest.metadata, self._state_when_committed
            self.entry = dataclasses.replace(self.entry, files=files, manifest=manifest, state=state)
            # Before the commit, so that a crash after it still finds the drain to do; a crash between the two leaves an
            # entry that the local manifest does not name, which the mover forgets.
            self._journal.write(self.entry)
            with self._fence():
                if self.entry.is_fragment:
                    local_commit.commit_local_fragment(self.directory, self.location, manifest)
                else:
                    local_commit.commit_local(self.directory, self.location, manifest, metadata_bytes)
        except BaseException:
            self.abort()
            raise
        if self.delivery.is_direct_put or self.role.has_direct_put_ranks:
            # What is committed here names shards that lie there: the checkpoint is one when that tier says so too.
            size_bytes = manifest.size_bytes
            log.info("%s (%d bytes) lies on the shared tier; it is committed there next", self.location.uri, size_bytes)
        else:
            COMMITS.emit(1, tier=Tier.LOCAL)
            log.info("committed %s on the local tier (%d bytes)", self.location.uri, manifest.size_bytes)
        self.hand_over()

    def _fence(self) -> contextlib.AbstractContextManager[None]:
        """What is finished for others is committed only while their job has not been started again."""
        if self.role.epoch is None:
            return contextlib.nullcontext()
        return epochs.committing(self.settings.local_root, self.location.parent, self.role.epoch)

    def _encode_metadata(self, metadata: Metadata, results: list[list[WriteResult]]) -> bytes:
        metadata.version = DCP_VERSION
        split.amend(metadata, _parts_of(results))
        every = list(chain.from_iterable(results))
        index, stored = operator.attrgetter("index"), operator.attrgetter("storage_data")
        metadata.storage_data = dict(zip(map(index, every), map(stored, every), strict=True))
        if self.role.epoch is not None:
            _require_whole(metadata, self.location.uri)
        metadata.storage_meta = StorageMeta(checkpoint_id=self.location.uri, save_id=self.role.save_id)
        data = encode(metadata)
        if self.role.trust_pickle:
            return data
        try:
            read_back(data, metadata, where=METADATA, partial=not self.role.use_collectives)
        except UnsafeCheckpointError as error:
            raise CheckpointError(
                f"{self.location.uri} is not committed, because its metadata could not be loaded: {error.message}",
                hint="The checkpoint before it stands. Use a planner whose metadata is plain data and torch "
                f"{CHECKED_VERSIONS[0]} to {CHECKED_VERSIONS[-1]}; metadata with classes of your own needs "
                "trust_pickle=True of TierStorageWriter and of TierStorageReader",
            ) from error
        return data

    def _manifest(self, data: bytes, results: list[list[WriteResult]]) -> Manifest:
        collected = {file.path: file for file in files_of(results)}
        if not {file.path for file in self.entry.files} <= collected.keys():
            raise CheckpointError(
                f"two saves used one TierStorageWriter at the same time (now at {self.location.uri})",
                hint="Wait for an async_save before starting the next with the same writer; this one was not committed",
            )
        token, chunk = self.entry.token, self.entry.chunk_size_bytes
        alone = not self.role.use_collectives
        attempt = token.rpartition("-")[0] if alone else token
        return Manifest(
            attempt=attempt,
            world_size=self.role.world_size if alone else max(len(results), 1),
            chunk_size_bytes=chunk,
            metadata=(_metadata_entry(data, chunk, self.role.rank, token if alone else attempt, alone),),
            files=tuple(collected[path] for path in sorted(collected)),
            replaces=self.role.replaces,
            created_unix_seconds=time.time(),
            notes=self.role.notes,
        )

    # --- the end ------------------------------------------------------------------------------------------------

    @property
    def _state_when_committed(self) -> str:
        return LOCAL_ONLY if self.role.is_kept and self.settings.drain else READY

    def hand_over(self) -> None:
        """Give the entry to the drain. Where links can, the shared commit is done before this returns. Idempotent.

        Nothing here fails a save that is durable on the local tier: the drain tries again, and ``wait`` says why not.
        """
        if not self.is_open:
            return
        entry = self.entry
        try:
            if not self.settings.drain:
                self._journal.remove(entry.token)
                return
            if entry.state != self._state_when_committed:
                entry = self._journal.write(dataclasses.replace(entry, state=self._state_when_committed))
        except (TierckptError, OSError) as error:
            # The commit names the shards, so they stay; recovering finds that and tries again.
            log.warning("%s: the journal cannot be written: %s", entry.uri, error)
            return
        finally:
            self.release()  # from here on the entry is the drain's, whatever happens
        if self.role.is_kept is not None and not self.delivery.is_direct_put:  # nothing newer stands on this SSD (K1)
            local_only.supersede_older(self.settings.local_root, self._journal, entry)
        if entry.state == LOCAL_ONLY:
            return
        try:
            is_local = not self.delivery.is_direct_put
            linked = is_local and self.client.run(self.client.mover.drains.send_linked(entry))
            is_coordinator = entry.manifest is not None and not entry.is_fragment
            if linked and is_coordinator and self.client.run(self.client.mover.drains.drain_now(entry.token)):
                return
        except (TierckptError, OSError) as error:
            log.warning("%s: the shared tier has to wait: %s", entry.uri, error)
        try:
            self.client.drain_in_background(entry.token)
        except TierckptError as error:  # this process ends: the journal has the entry, for the next one
            log.warning("%s: drained when a process next saves here: %s", entry.uri, error)

    def let_go(self) -> bool:
        """End a save whose outcome is not known here: what a commit may name stays, and all else is put away.

        The coordinator, or its store, has gone silent. Shards that a commit of this node names are handed over; if
        there is none yet the next process that recovers finds out. Returns False in that case.
        """
        if not self.is_open:
            return True
        manifest = local_commit.read_local_manifest(self.directory)
        if manifest is not None and self.entry.token in manifest.tokens:
            self.hand_over()
        elif self.entry.state == AWAITING_COMMIT:
            self.release()
            return False
        else:
            self.abort()
        return True

    def abort(self) -> None:
        """Put away a save that is not to be committed. One that is, whatever its error says, goes on to the drain.

        Called at the start of the next save, and from within a failing one. Idempotent.
        """
        if not self.is_open:
            return
        token = self.entry.token
        if self.entry.state != WRITING:
            # A crash in what follows must not leave an entry that says its files are there.
            self.entry = self._journal.write(dataclasses.replace(self.entry, state=WRITING))
        if self.entry.manifest is None:
            local_commit.remove_unfinished(self.directory, token)
        elif not self._discard_commit():
            # The error came after the commit, and it could not be taken back: it stands, and its files with it. The
            # drain takes it up, or forgets it if it is not what stands there (D0).
            uri = self.location.uri
            log.warning("%s: the save has failed, and its commit may stand on the local tier all the same", uri)
            self.hand_over()
            return
        if self.delivery.is_direct_put:
            self.delivery.discard([file.path for file in self.entry.files if file.path.endswith(SHARD_SUFFIX)])
        self._journal.remove(token)
        self.release()

    def _discard_commit(self) -> bool:
        """Remove a save that has tried to commit. False when the commit stands, or when nobody can know."""
        try:
            return local_commit.discard_attempt(self.directory, self.entry.token, self.entry.manifest)
        except TierckptError as error:
            log.warning("%s: cannot tell whether it is committed (%s); keeping its files", self.location.uri, error)
            return False

    def release(self) -> None:
        """Give up the hold on the journal entry, and take back what the agent has of the save. Idempotent."""
        self._lock.close()
        if self.handoff is not None:
            self.handoff.take_back()
        self.handoff, self.is_open = None, False


def require_files(client: Client, location: Location, files: Sequence[FileEntry]) -> bool:
    """Whether this node's SSD has these files. Raises CheckpointError when shared storage has not got the others."""
    directory = local_dir(client.settings.local_root, location)
    elsewhere = [file for file in files if file_size(directory / file.key) != file.size_bytes]
    for file in elsewhere:
        if not client.run(client.mover.holds(location, file)):
            raise CheckpointError(f"{file.key} of {location.uri} was durable and is gone", hint="Who removed it?")
    return not elsewhere


def _require_whole(metadata: Metadata, uri: str) -> None:
    """Raise CheckpointError when something that the metadata names has not been written: where all ranks are alive, DCP
    has seen to that."""
    for fqn, stored in metadata.state_dict_metadata.items():
        wanted = [MetadataIndex(fqn)]
        if isinstance(stored, TensorStorageMetadata):
            wanted = [MetadataIndex(fqn, chunk.offsets) for chunk in stored.chunks]
        if any(index not in metadata.storage_data for index in wanted):
            raise CheckpointError(f"{fqn} of {uri} was not written by any rank", hint="The checkpoint before it stands")


def _metadata_entry(data: bytes, chunk_size_bytes: int, rank: int, attempt: str, alone: bool) -> FileEntry:
    digests = digests_of(data, chunk_size_bytes)
    path = rank_metadata(rank) if alone else METADATA
    return FileEntry(path, len(data), digests, rank, attempt, source=attempt_metadata(attempt))
