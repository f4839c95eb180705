"""SaveSession: one rank's save to one id, from its plan to the drain.

begin, plan_local, plan_global   the plan, and the attempts that the save replaces
prepare                          the positions of shards; the journal entry, and its lock (J1)
write                            the shards are durable
commit (coordinator)             metadata and manifest: the checkpoint is committed on the local tier
hand_over                        the drain owns the entry
abort, settle                    the end of a save that is not committed, or has an unknown outcome
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import secrets
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ..arena.slots import Lease
from ..checkpoint import branches, in_flight, local_commit, retention, shared_commit
from ..checkpoint import epoch as epochs
from ..checkpoint.catalog import file_size
from ..checkpoint.journal import AWAITING_COMMIT, LOCAL_ONLY, READY, WRITING, Journal, JournalEntry
from ..client import Client, get_client
from ..config import Settings
from ..disk import read_lease
from ..disk.durable import make_dirs
from ..errors import CheckpointError, ManifestError, TierckptError, UnsafeCheckpointError
from ..format import manifest as manifests
from ..format.layout import METADATA, SHARD_SUFFIX, Location, attempt_metadata, local_dir, rank_metadata
from ..format.manifest import FileEntry, Manifest, digests_of
from ..telemetry import COMMITS, logger
from ..torch_internals import CHECKED_VERSIONS, StorageInfo
from ..types import Tier
from . import split
from .bulk_objects import gc_paused
from .metadata_encoder import encode
from .save_planning import ItemSource, PlannedShards, RankAssignment, SaveDescription, TargetLookup, plan_shards
from .sealed_unpickler import read_back
from .shard_delivery import ShardDelivery

if TYPE_CHECKING:
    from .handoff.offer import Handoff

log = logger("save")

DCP_VERSION = "1.0.0"
Token: TypeAlias = Callable[[], str]


def new_token() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True)
class TierWriteResult(WriteResult):
    """The first result of each rank also carries its shards to the coordinator."""

    files: tuple[FileEntry, ...] = ()
    parts: tuple[split.Part, ...] = ()
    """Parts of items that other ranks also hold."""


def attach_files(
    results: list[WriteResult], files: tuple[FileEntry, ...], parts: tuple[split.Part, ...]
) -> list[WriteResult]:
    if results:
        first = results[0]
        results[0] = TierWriteResult(first.index, first.size_in_bytes, first.storage_data, files, parts)
    return results


def encode_results(results: list[WriteResult]) -> dict[str, Any]:
    first = results[0] if results else None
    return {
        "results": [_encode_result(result) for result in results],
        "files": [manifests.encode_entry(file) for file in getattr(first, "files", ())],
        "parts": [[part.fqn, part.whole, part.box] for part in getattr(first, "parts", ())],
    }


def decode_results(body: Mapping[str, Any], chunk_size_bytes: int, *, where: str) -> list[WriteResult]:
    """Raises ManifestError if ``body`` is invalid."""
    with gc_paused():
        try:
            results = [_decode_result(*item) for item in body["results"]]
            parts = tuple(split.Part(str(fqn), _region(whole), _region(box)) for fqn, whole, box in body["parts"])
            items = body["files"]
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"{where}: {error}", hint="The record is damaged; nothing is committed") from error
        return attach_files(results, manifests.decode_entries(items, chunk_size_bytes, where=where), parts)


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


def _region(value: list[list[int]]) -> split.Box:
    offsets, sizes = value
    return tuple(map(int, offsets)), tuple(map(int, sizes))


def files_of(results: list[list[WriteResult]]) -> list[FileEntry]:
    return [file for rank in results for file in getattr(rank[0] if rank else None, "files", ())]


def _parts_of(results: list[list[WriteResult]]) -> list[split.Part]:
    return [part for rank in results for part in getattr(rank[0] if rank else None, "parts", ())]


class SaveSession:
    """One rank's save to one id. One thread at a time.

    Args:
        listener: is notified of each step before the next begins.
        save_id: DCP's name for the save, until ``plan_global`` makes another.

    Attributes:
        entry: the journal entry as last written, like ``delivery`` from ``open`` or ``adopt_entry`` on.
        is_open: the save owns a journal entry; not before ``prepare``, nor after ``hand_over`` or ``abort``.
    """

    entry: JournalEntry
    delivery: ShardDelivery
    is_open = False

    def __init__(
        self,
        settings: Settings,
        location: Location,
        description: SaveDescription,
        listener: Handoff | None = None,
        *,
        save_id: str = "",
        replaces: tuple[str, ...] = (),
    ) -> None:
        self.settings, self.location, self.description = settings, location, description
        self.directory = local_dir(self.settings.local_root, location)
        self.save_id = save_id or str(uuid.uuid4())
        self.lookup = TargetLookup(settings, location, description, replaces)
        self._listener = listener
        self._shards: PlannedShards | None = None
        self._is_prepared = self._outlives = self._has_direct_put_ranks = False
        self._lock = contextlib.ExitStack()
        self._journal = Journal(self.settings.local_root)
        self._outcome: in_flight.Begun | None = None

    @property
    def client(self) -> Client:
        return get_client(self.settings)

    # --- the plan -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        root, is_of_thread = self.settings.local_root, not self.description.awaits_verdict
        self._outcome = in_flight.begin(root, self.location.uri, self, is_of_thread=is_of_thread)

    def plan_local(self, plan: SavePlan) -> SavePlan:
        with self._reporting():
            self.lookup.start()
        if not self.description.use_collectives:
            return dataclasses.replace(plan, storage_data=RankAssignment(f"__{self.description.rank}_"))
        return split.keep_items(plan) if self.description.world_size > 1 else plan

    def plan_global(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, save = split.balance_replicated(plans), new_token()
        self.save_id = save
        return [
            dataclasses.replace(plan, storage_data=RankAssignment(f"__{rank}_", save, len(plans), self.location.uri))
            if plan.storage_data is None
            else plan
            for rank, plan in enumerate(plans)
        ]

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.location.uri, save_id=self.save_id)

    def prepare(
        self, plan: SavePlan, source: ItemSource, metadata: Metadata | None = None, token: Token = new_token
    ) -> None:
        """Assign the shards their positions, and open the journal entry.

        Raises:
            ConfigError: the ranks have different targets, or the local root may not be used.
            CheckpointError: the session writes already.
        """
        self.lookup.await_local()  # before anything is written or offered
        if isinstance(plan.storage_data, RankAssignment):
            plan.storage_data.check(self.location.uri, self.description.rank)
        if self.is_open:
            self.abort()
            raise _concurrent_save_error(self.location.uri)
        if plan.items or self.description.is_coordinator:
            self._shards = plan_shards(self.description, self.settings, self.directory, token(), plan, source)
        try:
            # The journal write may take long, and the staged state could be lost with this process.
            if self._listener is not None:
                self._listener.prepared(self, self._shards, plan, source, metadata)
            if self._shards is not None:
                self.client.recover()
                descriptor = self.open(self._shards.token)
                self._outlives = self._listener is not None and self._listener.opened(descriptor)
        except BaseException:
            self._end_listener()
            raise
        self._is_prepared = True

    def open(self, token: str) -> int:
        """Open a journal entry and hold it: from now on it names every file of the save (J1).

        Returns the descriptor of the lock. Raises CheckpointError if another process has an entry of this token.
        """
        with contextlib.ExitStack() as stack:
            # An older checkpoint in the directory may be removed meanwhile, but not the directory itself.
            stack.enter_context(read_lease.reading(self.settings.local_root, self.directory))
            make_dirs(self.directory)
            hold = stack.enter_context(self._journal.own(token))
            if not hold:
                raise CheckpointError(f"{self.location.uri}: another process is writing this rank's shards ({token})")
            branch, chunk = str(self.description.notes.get(branches.NOTE, "")), int(self.settings.chunk_size_bytes)
            entry = self._journal.open(token, self.location, self.description.rank, chunk, branch)
            if self.settings.peers is not None:
                local_commit.mark_origin(self.directory, token)
            self._register_entry(entry, stack)
        return hold.descriptor

    def adopt_entry(self, token: str, lock: int | None) -> bool:
        """Continue the journal entry of an ended rank. False if the entry is settled, or has another owner.

        ``lock``: the rank's inherited lock on the entry.
        """
        with contextlib.ExitStack() as stack:
            hold = stack.enter_context(self._journal.own(token, lock))
            entry = self._journal.read(token)
            if not hold or entry is None:
                return False
            self._register_entry(dataclasses.replace(entry, manifest=None), stack)
        return True

    def _register_entry(self, entry: JournalEntry, stack: contextlib.ExitStack) -> None:
        self.entry, self._lock, self.is_open = entry, stack.pop_all(), True
        self.delivery = ShardDelivery(
            self.client, self.settings, self.location, entry, self.directory, self.description
        )

    # --- shards -------------------------------------------------------------------------------------------------

    @property
    def is_direct_put(self) -> bool:
        return self.is_open and self.delivery.is_direct_put

    def write(self, plan: SavePlan, source: ItemSource, token: Token = new_token) -> list[WriteResult]:
        """Write this rank's shards, durably, and return its results.

        Raises the errors of ``prepare``; CapacityError: the SSD is full, and eviction cannot make room.
        """
        with self._reporting():
            if not self._is_prepared:
                self.prepare(plan, source, token=token)
            shards, self._shards, self._is_prepared = self._shards, None, False
            results: list[WriteResult] = []
            files: tuple[FileEntry, ...] = ()
            if shards is not None:
                with self._writing(shards.leases):
                    results, files = self.delivery.write(shards, source)
                    self.note(files)
                results = attach_files(results, files, shards.parts)
            if not (self.description.is_coordinator or self.description.awaits_verdict):
                try:
                    if self._listener is not None:
                        self._listener.durable(files)
                    self.hand_over()
                except BaseException:
                    self.abort()
                    raise
        return results

    @contextlib.contextmanager
    def _writing(self, leases: Collection[Lease]) -> Iterator[None]:
        begun: list[Lease] = []
        written = False
        try:
            for lease in leases:
                lease.begin_flush()
                begun.append(lease)
            yield
            written = True
        except BaseException:
            # Before the memory is used again: a process that inherits this save must never write the bytes of another.
            self.abort()
            raise
        finally:
            for lease in begun:
                lease.end_flush(written=written)

    def note(self, files: tuple[FileEntry, ...]) -> None:
        """Note durable shards; in the journal too, if another process may need it."""
        is_held_back = (
            (self.description.awaits_verdict or self._outlives) and not self.description.is_coordinator and bool(files)
        )
        state = AWAITING_COMMIT if is_held_back else self.entry.state
        self.entry = dataclasses.replace(self.entry, files=files, state=state)
        if is_held_back or self._outlives:
            self._journal.write(self.entry)

    # --- the local commit ---------------------------------------------------------------------------------------

    def commit(
        self, metadata: Metadata, results: list[list[WriteResult]], *, has_direct_put_ranks: bool = False
    ) -> None:
        """Commit on the local tier, and hand over. Raises AlreadyCommittedError if another save took the id.

        ``has_direct_put_ranks``: some rank's shards went straight to the shared tier.
        """
        with self._reporting():
            self._commit(metadata, results, has_direct_put_ranks)
        self.report_outcome()

    def _commit(self, metadata: Metadata, results: list[list[WriteResult]], has_direct_put_ranks: bool) -> None:
        self.lookup.await_shared()
        if not self.is_open:
            raise RuntimeError("finish() was called without write_data(): a StorageWriter is driven by dcp.save")
        self._has_direct_put_ranks |= has_direct_put_ranks
        try:
            with gc_paused():
                data = self._encode_metadata(metadata, results)
                manifest = self._manifest(data, results)
            metadata_bytes = {manifest.metadata[0].path: data}
            local_commit.write_attempt_metadata(self.directory, manifest, metadata_bytes)
            files, state = self.entry.files + manifest.metadata, self._state_when_committed
            self.entry = dataclasses.replace(self.entry, files=files, manifest=manifest, state=state)
            # Before the commit, so that a crash after it leaves the drain to do. The mover forgets an entry that the
            # local manifest does not name.
            self._journal.write(self.entry)
            with self._fence():
                if self.entry.is_fragment:
                    local_commit.commit_local_fragment(self.directory, self.location, manifest)
                else:
                    local_commit.commit_local(self.directory, self.location, manifest, metadata_bytes)
        except BaseException:
            self.abort()
            raise
        if self.delivery.is_direct_put or self._has_direct_put_ranks:
            # The commit on the shared tier completes the checkpoint.
            size_bytes = manifest.size_bytes
            log.info("%s (%d bytes) is on the shared tier; it is committed there next", self.location.uri, size_bytes)
        else:
            COMMITS.emit(1, tier=Tier.LOCAL)
            log.info("committed %s on the local tier (%d bytes)", self.location.uri, manifest.size_bytes)
        self.hand_over()

    def _fence(self) -> contextlib.AbstractContextManager[None]:
        if self.description.epoch is None:
            return contextlib.nullcontext()
        return epochs.committing(self.settings.local_root, self.location.parent, self.description.epoch)

    def _encode_metadata(self, metadata: Metadata, results: list[list[WriteResult]]) -> bytes:
        metadata.version = DCP_VERSION
        split.amend(metadata, _parts_of(results))
        every = list(chain.from_iterable(results))
        index, stored = operator.attrgetter("index"), operator.attrgetter("storage_data")
        metadata.storage_data = dict(zip(map(index, every), map(stored, every), strict=True))
        if self.description.epoch is not None:
            _require_whole(metadata, self.location.uri)
        metadata.storage_meta = self.storage_meta()
        data = encode(metadata)
        if self.description.trust_pickle:
            return data
        try:
            read_back(data, metadata, where=METADATA, partial=not self.description.use_collectives)
        except UnsafeCheckpointError as error:
            raise CheckpointError(
                f"{self.location.uri} is not committed, because its metadata could not be loaded: {error.message}",
                hint="The previous checkpoint is unchanged. Use a planner whose metadata is plain data and torch "
                f"{CHECKED_VERSIONS[0]} to {CHECKED_VERSIONS[-1]}; metadata with classes of your own needs "
                "trust_pickle=True of TierStorageWriter and of TierStorageReader",
            ) from error
        return data

    def _manifest(self, data: bytes, results: list[list[WriteResult]]) -> Manifest:
        collected = {file.path: file for file in files_of(results)}
        if not {file.path for file in self.entry.files} <= collected.keys():
            raise _concurrent_save_error(self.location.uri)
        token, chunk = self.entry.token, self.entry.chunk_size_bytes
        alone = not self.description.use_collectives
        attempt = token.rpartition("-")[0] if alone else token
        return Manifest(
            attempt=attempt,
            world_size=self.description.world_size if alone else max(len(results), 1),
            chunk_size_bytes=chunk,
            metadata=(_metadata_entry(data, chunk, self.description.rank, token if alone else attempt, alone),),
            files=tuple(collected[path] for path in sorted(collected)),
            replaces=self.lookup.attempts,
            created_unix_seconds=time.time(),
            notes=self.description.notes,
        )

    # --- the end ------------------------------------------------------------------------------------------------

    @property
    def _state_when_committed(self) -> str:
        is_sent = self.description.is_sent or self._has_direct_put_ranks
        return READY if is_sent or not self.settings.drain else LOCAL_ONLY

    def hand_over(self, *, has_direct_put_ranks: bool = False) -> None:
        """Pass the entry to the drain. If links suffice, the shared commit is done on return. Idempotent.

        Never fails a save that is durable on the local tier: the drain retries, and ``wait`` raises the cause.
        """
        self._has_direct_put_ranks |= has_direct_put_ranks
        if self.is_open:
            self._submit_drain()
        self._end_listener()
        self.report_outcome()

    def _submit_drain(self) -> None:
        entry = self.entry
        try:
            if not self.settings.drain:
                self._journal.remove(entry.token)
                return
            if entry.state != self._state_when_committed:
                entry = self._journal.write(dataclasses.replace(entry, state=self._state_when_committed))
        except (TierckptError, OSError) as error:
            # The commit names the shards, so they stay; recovery retries.
            log.warning("%s: the journal cannot be written: %s", entry.uri, error)
            return
        finally:
            self.release()  # the drain owns the entry now
        if self.description.keeps_some and not self.delivery.is_direct_put:  # the newest on this SSD (K1)
            retention.supersede_older(self.settings.local_root, self._journal, entry)
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
        except TierckptError as error:
            log.warning("%s: drained when a process next saves here: %s", entry.uri, error)

    def settle(self) -> bool:
        """End a save with unknown outcome: hand over the shards that a commit of this node names.

        Returns False without such a commit: shards and handoff stay for the next recovery.
        """
        if not self.is_open:
            self._end_listener()
            return True
        manifest = local_commit.read_local_manifest(self.directory)
        if manifest is not None and self.entry.token in manifest.tokens:
            self.hand_over()
        elif self.entry.state == AWAITING_COMMIT:
            self._lock.close()
            self.is_open = False
            return False
        else:
            self.abort()
        return True

    def abort(self) -> None:
        """Remove an uncommitted save; pass a committed one to the drain. Idempotent."""
        self._shards, self._is_prepared = None, False
        if not self.is_open:
            self._end_listener()
            return
        token = self.entry.token
        if self.entry.state != WRITING:
            # A crash after this line must not leave an entry without its files.
            self.entry = self._journal.write(dataclasses.replace(self.entry, state=WRITING))
        if self.entry.manifest is None:
            local_commit.remove_unfinished(self.directory, token)
        elif not self._discard_commit():
            # The error came after the commit. The drain sends it, or forgets it if another is the local one (D0).
            uri = self.location.uri
            log.warning("%s: the save has failed, but its commit may be on the local tier", uri)
            self._submit_drain()
            return
        if self.delivery.is_direct_put:
            self.delivery.discard([file.path for file in self.entry.files if file.path.endswith(SHARD_SUFFIX)])
        self._journal.remove(token)
        self.release()

    def _discard_commit(self) -> bool:
        """Return False if the commit may be in place."""
        try:
            return local_commit.discard_attempt(self.directory, self.entry.token, self.entry.manifest)
        except TierckptError as error:
            log.warning("%s: cannot tell whether it is committed (%s); keeping its files", self.location.uri, error)
            return False

    def release(self) -> None:
        """Release the lock and end the listener. Idempotent."""
        self._lock.close()
        self.is_open = False
        self._end_listener()

    def _end_listener(self) -> None:
        if self._listener is not None:
            self._listener.ended()

    def abandon(self) -> None:
        """``abort``; ``tierckpt.wait`` raises that the save failed."""
        self.abort()
        if self._outcome is not None:
            self._outcome.abandon()

    def report_outcome(self, error: BaseException | None = None) -> None:
        """Report the local commit or failure to ``tierckpt.wait``. The first outcome counts."""
        if self._outcome is not None:
            self._outcome.ended(error)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.report_outcome(error)
            raise


def _concurrent_save_error(uri: str) -> CheckpointError:
    return CheckpointError(
        f"two saves used one TierStorageWriter at the same time (now at {uri})",
        hint="Wait for an async_save before starting the next with the same writer; this one was not committed",
    )


def require_files(client: Client, location: Location, files: Sequence[FileEntry]) -> bool:
    """Whether this node's SSD has these files. Raises CheckpointError if shared storage lacks the others."""
    directory = local_dir(client.settings.local_root, location)
    elsewhere = [file for file in files if file_size(directory / file.key) != file.size_bytes]
    for file in elsewhere:
        if not client.run(shared_commit.has_file(client.mover.store(location), file)):
            raise CheckpointError(
                f"{file.key} of {location.uri} was durable and is gone", hint="Another program removed it"
            )
    return not elsewhere


def _require_whole(metadata: Metadata, uri: str) -> None:
    for fqn, stored in metadata.state_dict_metadata.items():
        wanted = [MetadataIndex(fqn)]
        if isinstance(stored, TensorStorageMetadata):
            wanted = [MetadataIndex(fqn, chunk.offsets) for chunk in stored.chunks]
        if any(index not in metadata.storage_data for index in wanted):
            raise CheckpointError(
                f"{fqn} of {uri} was not written by any rank", hint="The previous checkpoint is unchanged"
            )


def _metadata_entry(data: bytes, chunk_size_bytes: int, rank: int, attempt: str, alone: bool) -> FileEntry:
    digests = digests_of(data, chunk_size_bytes)
    path = rank_metadata(rank) if alone else METADATA
    return FileEntry(path, len(data), digests, rank, attempt, source=attempt_metadata(attempt))
