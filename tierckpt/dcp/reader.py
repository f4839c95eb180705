"""TierStorageReader: DCP's StorageReader over the nearest good copy of each file, every byte verified."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..arena.slots import read_buffers
from ..checkpoint import catalog
from ..checkpoint.catalog import Checkpoint
from ..client import Client
from ..config import Settings
from ..disk import read_lease
from ..disk.io_tuner import read_tuner_for
from ..errors import CheckpointNotFoundError, IntegrityError, StateMismatchError, TierckptError, UnsafeCheckpointError
from ..format.layout import METADATA, Location, rank_metadata
from ..format.manifest import FileEntry
from ..peer.membership import Member
from ..read import replicated_file
from ..read.parallel_read import Piece, Pull, batches, pull
from ..read.replicated_file import PEERS_TRIED_MAX, FileCopy, LocalCopy, RemoteCopy, ReplicatedFile, VerifiedFile
from ..read.shared_read import SharedRead
from ..restore.restore import fetch_missing
from ..telemetry import logger
from ..torch_internals import StorageInfo, StorageReaderTransforms
from ..tracebacks import short_traceback
from ..types import ByteRange, Tier
from .bulk_objects import gc_paused
from .planner import TargetPlanner, loaded_values
from .read_plan import (
    WINDOW_BYTES,
    DeviceCopies,
    GroupRead,
    RawRead,
    Read,
    RowBufferPool,
    Shapes,
    SmallTensorGrouper,
    WholeRead,
    frame_of,
    has_same_scale,
    is_framed,
    pieces_by_file,
)
from .sealed_unpickler import Objects, load_metadata, load_tensor
from .shared_read_planning import ReadSharing, spans
from .target import Mount

ATTEMPTS_MAX = 5


class CheckpointFiles:
    """Holds the checkpoint against removal on this node until ``close``."""

    def __init__(self, client: Client, settings: Settings, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._client, self._settings = client, settings
        self._lease = contextlib.ExitStack()
        self._lease.enter_context(read_lease.reading(settings.local_root, checkpoint.directory))
        manifest = checkpoint.manifest
        self.chunk_size_bytes = int(manifest.chunk_size_bytes if manifest is not None else settings.chunk_size_bytes)
        self._entries = {entry.path: entry for entry in manifest.entries} if manifest is not None else None
        self._blocks = replicated_file.digest_locations(manifest) if manifest is not None else {}

    @classmethod
    def find(cls, client: Client, settings: Settings, location: Location) -> CheckpointFiles:
        """Find the checkpoint at ``location`` and hold it. Raises the errors of ``Selector.found``."""
        for _ in range(ATTEMPTS_MAX):
            files = cls(client, settings, client.run(client.mover.selector.found(location)))
            with contextlib.ExitStack() as stack:
                stack.callback(files.close)
                if client.run(catalog.is_still_committed(files.checkpoint)):
                    stack.pop_all()
                    return files  # else it was removed or replaced meanwhile
        raise CheckpointNotFoundError(
            f"{location.uri} is replaced as fast as it can be found",
            hint="Another job saves to this id; give each job a place of its own",
        )

    def close(self) -> None:
        self._lease.close()

    def entry(self, name: str) -> FileEntry:
        """Entries of stock checkpoints have no digests."""
        if self._entries is None:
            return FileEntry(name, self._client.run(self.checkpoint.store.head(name)).size_bytes, ())
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointNotFoundError(
                f"{name} is not part of the checkpoint {self.checkpoint.location.uri}",
                hint="Its metadata refers to a file that its manifest does not know",
                file=name,
            ) from None

    def open(self, entry: FileEntry) -> ReplicatedFile:
        known = None
        if entry.path in self._blocks:
            kept, start = self._blocks[entry.path]
            known = replicated_file.ShardBlockDigests(entry, self.chunk_size_bytes, start, self._copies(kept))
        return ReplicatedFile(entry, self.chunk_size_bytes, self._copies(entry), known)

    def _copies(self, entry: FileEntry) -> list[FileCopy]:
        """The nearest copy is first."""
        checkpoint, location, tuner = self.checkpoint, self.checkpoint.location, read_tuner_for(self._settings)
        local = checkpoint.local_path(entry) if checkpoint.manifest is not None else None
        copies: list[FileCopy] = [LocalCopy(local, tuner=tuner)] if local is not None else self._on_peers(entry)
        if location.scheme == "file":
            return [*copies, LocalCopy(Path(location.path, entry.key), Tier.SHARED, tuner)]

        def get_range(byte_range: ByteRange) -> Any:
            return self._client.run(checkpoint.store.get_range(entry.key, byte_range))

        return [*copies, RemoteCopy(f"{location.uri}/{entry.key}", get_range)]

    def _on_peers(self, entry: FileEntry) -> list[FileCopy]:
        elsewhere, chunk = self.checkpoint.elsewhere, self.chunk_size_bytes
        if elsewhere is None:
            return []

        def copy(member: Member) -> FileCopy:
            return RemoteCopy(
                f"{member.name} ({member.address})",
                lambda at: self._client.run(elsewhere.chunk(member, entry, at.start // chunk)),
                Tier.PEER,
                chunk_size_bytes=chunk,
                report=lambda: elsewhere.report_damage(member),
            )

        return [copy(member) for member in elsewhere.holders(entry)[:PEERS_TRIED_MAX]]


log = logger("restore")

_RANDOM = random.SystemRandom()

UNPACKED_BYTES_MIN = 1 << 20
UNPACKED_RATIO_MAX = 1024
"""Limit for an object with a stream extension. Metadata and frame bound a tensor's."""

FETCH_SHARE = 0.5
"""A load that needs more than this share of a missing file caches it whole."""


class TierStorageReader(Mount, StorageReader):
    """Loads DCP checkpoints saved by tierckpt or by stock DCP.

    Each file is read from the local tier if its copy is good, else from peers, else from the shared tier: whole, and
    cached on the local tier, if most of it is needed; else only the needed ranges. Every byte is verified before a
    tensor gets it; a bad copy is renamed, and the next one used. Checkpoints of stock DCP have no digests and are read
    unverified.

    Args:
        uri: a checkpoint URI (``tierckpt.latest(run_uri)`` finds the newest).
        _extension_registry: DCP's registry of stream extensions.
        trust_pickle: load items that only an unrestricted unpickler can read. It runs whatever code the checkpoint
            names: use True only for your own checkpoints.
        settings: ``overrides`` replace single fields of it.

    Raises (inside DCP's CheckpointException, by rank):
        CheckpointNotFoundError, UncommittedCheckpointError, IntegrityError (names tensor, file and tiers), StoreError.
        StoreUnavailableError after ``store_wait_seconds``, when files are neither on this node nor its peers.
        UnsafeCheckpointError: metadata or an object refers to code, or metadata has impossible values.
    Cost: each byte that this rank needs is read once, from the nearest copy.

    Example:
        >>> metadata = dcp.save({"weight": torch.ones(4)}, storage_writer=TierStorageWriter("run/step-1"))
        >>> state = {"weight": torch.empty(4)}
        >>> dcp.load(state, storage_reader=tierckpt.TierStorageReader("run/step-1"))
        >>> state["weight"].sum().item()
        4.0
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        _extension_registry: Any = None,
        *,
        path: str | os.PathLike[str] | None = None,
        trust_pickle: bool = False,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> None:
        super().__init__()
        self.settings = Settings.load(settings, **overrides)
        self.trust_pickle = trust_pickle
        self.transforms = StorageReaderTransforms(_extension_registry)
        self.storage_data: dict[Any, Any] = {}
        self._shapes = Shapes(Metadata(state_dict_metadata={}))
        self.load_id = str(uuid.uuid4())
        self._files: CheckpointFiles | None = None
        self._infos: dict[int, StorageInfo] = {}
        self._error: TierckptError | None = None
        self._metadata: tuple[tuple[str, FileEntry], Metadata] | None = None
        self._sharing = ReadSharing(self.settings)
        self._point_to(uri if uri is not None else path)

    # --- contract of StorageReader ------------------------------------------------------------------------------

    @short_traceback
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, of ``checkpoint_id`` if given. Raises ConfigError for an invalid URI."""
        self.storage_data = {}
        self._release()
        self._error = None
        if checkpoint_id is not None:
            self._point_to(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    @short_traceback
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, verified.

        ``dcp.load`` calls again with ``rank=`` after an error, and turns a second error into an AssertionError. So
        ``set_up_storage_reader`` raises that one, typed.
        """
        rank = kwargs.get("rank")
        try:
            return self._read_metadata(METADATA if rank is None else rank_metadata(rank))
        except TierckptError as error:
            if rank is None:
                self._error = error
                raise
            self._error = self._error or error
            return Metadata(state_dict_metadata={}, storage_data={}, storage_meta=StorageMeta())

    def _read_metadata(self, name: str) -> Metadata:
        files = self._open_files()
        entry = files.entry(name)
        if self._metadata is not None and entry.digests and self._metadata[0] == (self.path, entry):
            return self._metadata[1]
        with VerifiedFile(files.open(entry)) as stream:
            data = stream.read()
        where = f"{self.path}/{name}"
        with gc_paused():
            if self.trust_pickle:
                metadata = _trusting_load(data, where)
            else:
                metadata = load_metadata(data, where=where, partial=name != METADATA)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        self._metadata = (self.path, entry), metadata
        self._error = None
        return metadata

    def notes(self) -> Mapping[str, str | int | bool]:
        """Return the manifest's notes. The checkpoint stays in use for a load."""
        manifest = self._open_files().checkpoint.manifest
        return manifest.notes if manifest is not None else {}

    @short_traceback
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Use ``metadata`` for the plan. Raises the error of ``read_metadata``, typed."""
        if self._error is not None:
            raise self._error
        if metadata.storage_data is None:
            raise IntegrityError(f"the metadata of {self.path} says nothing about where its data is", file=METADATA)
        self.storage_data = metadata.storage_data
        self._shapes = Shapes(metadata)

    def read_objects(self, metadata: Metadata, names: Sequence[str]) -> dict[str, Any]:
        """Return objects, read by this rank alone. The checkpoint stays in use for a load."""
        target: dict[str, Any] = dict.fromkeys(names, "")
        self.read_alone(metadata, target)
        return target

    def read_alone(self, metadata: Metadata, target: dict[str, Any]) -> None:
        """Fill ``target`` in place, without other ranks. The checkpoint stays in use for a load."""
        if target:
            planner = TargetPlanner(target)
            planner.set_up_planner(target, metadata, is_coordinator=False)
            self.set_up_storage_reader(metadata, False)
            self._read(planner.create_local_plan(), planner)

    @short_traceback
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return ``plan`` with the byte ranges of this rank."""
        checkpoint = self._open_files().checkpoint
        return self._sharing.add_interest(plan, self._spans, checkpoint)

    @short_traceback
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return each rank's plan with the byte ranges that it shares on its node."""
        return self._sharing.assign_shared_plans(plans)

    @short_traceback
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of ``plan`` with verified bytes. The returned future is done."""
        try:
            self._read(plan, planner)
        finally:
            self._metadata = None
            self._release()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        with gc_paused():
            self._infos = {id(item): self._info(item) for item in plan.items}
        with contextlib.ExitStack() as stack:
            stack.callback(self._infos.clear)
            shared = stack.enter_context(self._sharing.open_shared_read(plan, self._spans))
            found = self._open_files()
            with gc_paused():
                entries = self._entries(found, plan)
                missing = self._files_to_cache(found.checkpoint, entries, plan)
                items = shared.order(plan.items) if shared is not None else sorted(plan.items, key=self._place)
            if missing:  # in random order: ranks of a node wait for a file that another one fetches
                shuffled = _RANDOM.sample(missing, len(missing))
                self._client.run(fetch_missing(self._client.mover, found.checkpoint, shuffled))
            work = _Load(planner, loaded_values(planner), Objects(), shared)
            files = {
                name: stack.enter_context(contextlib.closing(found.open(entry))) for name, entry in entries.items()
            }
            reads = self._reads(items, work, files, found.chunk_size_bytes)
            prepared = batches(reads, lambda read: read.extra_bytes, WINDOW_BYTES)
            done = 0
            while done < len(items):
                with gc_paused():
                    window = next(prepared)
                done += sum(read.count for read in window)
                self._read_window(window, work, files, then=items[done] if done < len(items) else None)
            work.copies.wait()

    def _entries(self, found: CheckpointFiles, plan: LoadPlan) -> dict[str, FileEntry]:
        """Return the files that ``plan`` reads. Raises if an item does not lie inside its file."""
        entries: dict[str, FileEntry] = {}
        infos = self._infos
        for item in plan.items:
            info = infos[id(item)]
            entry = entries.get(info.relative_path)
            if entry is None:
                entry = entries[info.relative_path] = found.entry(info.relative_path)
            self.check_inside(item, info.offset + info.length, entry.size_bytes)
        return entries

    def check_inside(self, item: ReadItem, end: int, size_bytes: int) -> None:
        """Raise unless ``item`` ends within the file."""
        if end > size_bytes:
            raise self._mismatch_error(item, f"should end at byte {end} of {size_bytes}")

    def _files_to_cache(
        self, checkpoint: Checkpoint, entries: Mapping[str, FileEntry], plan: LoadPlan
    ) -> list[FileEntry]:
        if checkpoint.manifest is None:
            return []
        missing = {name: entry for name, entry in entries.items() if checkpoint.local_path(entry) is None}
        wanted = dict.fromkeys(missing, 0)
        for item in plan.items if missing else ():
            name, ranges = self._spans(item)
            if name in wanted:
                wanted[name] += sum(stop - start for start, stop in ranges)
        return [entry for name, entry in missing.items() if wanted[name] > FETCH_SHARE * entry.size_bytes]

    def _place(self, item: ReadItem) -> tuple[str, int, torch.Size]:
        info = self._infos[id(item)]
        return info.relative_path, info.offset, item.storage_offsets

    def _spans(self, item: ReadItem) -> tuple[str, list[tuple[int, int]]]:
        info = self._info(item)
        return info.relative_path, spans(item, info, self._shapes.of(item))

    def _reads(
        self, items: Sequence[ReadItem], work: _Load, files: Mapping[str, ReplicatedFile], chunk_size_bytes: int
    ) -> Iterator[Read]:
        group: GroupRead | None = None
        small = SmallTensorGrouper(work.plain, self._shapes, chunk_size_bytes)
        infos = self._infos
        for item in items:
            joined = small.group(group, item, infos[id(item)])
            if joined is not group:
                if group is not None:
                    yield group
                group = joined
            if joined is None:
                yield self._prepare(item, work, files)
        if group is not None:
            yield group

    def _prepare(self, item: ReadItem, work: _Load, files: Mapping[str, ReplicatedFile]) -> Read:
        info = self._info(item)
        if is_framed(item, info):
            stored = self._shapes.of(item)
            if stored is not None and (frame := frame_of(*stored, info.length)) is not None:
                self._check_part(item, stored[1])
                target = self._target(item, work)
                return RawRead(item, info.relative_path, info.offset, frame, *stored, target, work.rows)

        def take(item: ReadItem, stream: io.BytesIO) -> None:
            self._load_item(item, stream, work, files[info.relative_path])

        return WholeRead(item, info.relative_path, info.offset, info.length, take)

    def _read_window(
        self, window: list[Read], work: _Load, files: Mapping[str, ReplicatedFile], then: ReadItem | None
    ) -> None:
        with gc_paused():
            owned = pieces_by_file(window)

        def name(error: TierckptError, copies: ReplicatedFile, piece: Piece) -> None:
            item = next(read.item for known, read in owned[copies.entry.path] if known is piece)
            error.context |= {"tensor": item.storage_index.fqn, "checkpoint": self.path}

        pull_window: Pull = work.shared.pull_before(then) if work.shared is not None else pull
        wanted = [(files[path], [piece for piece, _ in pieces]) for path, pieces in owned.items()]
        pull_window(wanted, read_buffers(), name)
        work.copies.wait()
        for read in window:
            for item, target in read.finish():
                if target is not None:
                    work.planner.commit_tensor(item, target)
                    continue
                info = self._info(item)
                with VerifiedFile(files[info.relative_path]) as stream:
                    stream.seek(info.offset)
                    self._load_item(item, io.BytesIO(stream.read(info.length)), work, files[info.relative_path])
        work.copies.register(window)

    # --- one item -----------------------------------------------------------------------------------------------

    def _load_item(self, item: ReadItem, stream: io.BytesIO, work: _Load, copies: ReplicatedFile) -> None:
        with self._error_context(item, copies):
            source = self._source(item, stream)
            if item.type == LoadItemType.BYTE_IO:
                data = source.read(-1)
                content: Any = data if self.trust_pickle else work.objects.inert(data, item.storage_index.fqn)
            else:
                content = self._part(item, load_tensor(source, item.storage_index.fqn, trusted=self.trust_pickle))
        if item.type == LoadItemType.BYTE_IO:
            work.planner.load_bytes(item, io.BytesIO(content))
            return
        target = self._target(item, work)
        if content.is_quantized and not has_same_scale(content, target):
            raise StateMismatchError(
                f"{item.storage_index.fqn} is quantized, and its destination is not, or has another scale",
                hint="Load it into a tensor with the scale and zero point that it was saved with",
                tensor=item.storage_index.fqn,
                checkpoint=self.path,
            )
        target.copy_(content)
        work.planner.commit_tensor(item, target)

    def _target(self, item: ReadItem, work: _Load) -> torch.Tensor:
        known = work.plain.get(item.dest_index.fqn)
        if type(known) is torch.Tensor and known.size() == item.lengths:
            return known.detach()
        target = work.planner.resolve_tensor(item).detach()
        if target.size() != torch.Size(item.lengths):
            raise self._mismatch_error(item, f"has shape {tuple(item.lengths)}, {tuple(target.size())} was planned")
        return target

    def _source(self, item: ReadItem, stream: io.BytesIO) -> io.BytesIO:
        """Raises UnsafeCheckpointError if an extension unpacks too much."""
        info = self._info(item)
        descriptors = getattr(info, "transform_descriptors", None) or ()
        if not descriptors:
            return stream
        source = self.transforms.transform_load_stream(item, descriptors, cast(Any, stream))
        stored = self._shapes.of(item) if item.type != LoadItemType.BYTE_IO else None
        size_bytes_max = max(UNPACKED_BYTES_MIN, UNPACKED_RATIO_MAX * info.length)
        if stored is not None:
            size_bytes_max = UNPACKED_BYTES_MIN + stored[0].itemsize * stored[1].numel()
        unpacked = bytearray()
        while more := source.read(min(UNPACKED_BYTES_MIN, size_bytes_max + 1 - len(unpacked))):
            unpacked += more
            if len(unpacked) > size_bytes_max:
                raise UnsafeCheckpointError(
                    f"{item.storage_index.fqn} is refused: more than {size_bytes_max} bytes would come of its"
                    f" {info.length} bytes",
                    hint="It is damaged, or made to fill the memory: use another copy or an older step",
                )
        return io.BytesIO(unpacked)

    def _part(self, item: ReadItem, stored: torch.Tensor) -> torch.Tensor:
        self._check_part(item, stored.size())
        return _narrow(stored, item.storage_offsets, item.lengths)

    def _check_part(self, item: ReadItem, stored: torch.Size) -> None:
        if item.lengths == stored and not any(item.storage_offsets):
            return
        wanted = zip(item.storage_offsets, item.lengths, stored, strict=False)
        if len(item.lengths) != len(stored) or any(at + count > size for at, count, size in wanted):
            raise self._mismatch_error(item, f"has shape {tuple(stored)}, less than its metadata says")

    def _info(self, item: ReadItem) -> StorageInfo:
        if (known := self._infos.get(id(item))) is not None:
            return known
        try:
            return cast(StorageInfo, self.storage_data[item.storage_index])
        except KeyError:
            raise IntegrityError(
                f"the metadata of {self.path} says nothing about where {item.storage_index.fqn} is",
                hint="Restore an older step",
                tensor=item.storage_index.fqn,
            ) from None

    def _mismatch_error(self, item: ReadItem, what: str) -> IntegrityError:
        return IntegrityError(
            f"{item.storage_index.fqn} {what}", file=self._info(item).relative_path, tensor=item.storage_index.fqn
        )

    @contextlib.contextmanager
    def _error_context(self, item: ReadItem, copies: ReplicatedFile) -> Iterator[None]:
        try:
            yield
        except TierckptError as error:
            error.context |= {"tensor": item.storage_index.fqn, "checkpoint": self.path}
            if isinstance(error, UnsafeCheckpointError):
                error.context |= {"file": self._info(item).relative_path, "tier": copies.tier}
            raise

    def _open_files(self) -> CheckpointFiles:
        """Hold the files against removal until the data is read or the reader is reset."""
        if self._files is None:
            self._files = CheckpointFiles.find(self._client, self.settings, self.location)
        return self._files

    def _release(self) -> None:
        if self._files is not None:
            self._files.close()
        self._files = None


@dataclass(frozen=True, slots=True)
class _Load:
    planner: LoadPlanner
    plain: Mapping[str, Any]
    objects: Objects
    shared: SharedRead | None
    copies: DeviceCopies = field(default_factory=DeviceCopies)
    rows: RowBufferPool = field(default_factory=RowBufferPool)


def _trusting_load(data: bytes, where: str) -> Metadata:
    _warn_of_trust(where)
    try:
        return cast(Metadata, pickle.loads(data))
    except Exception as error:
        raise IntegrityError(f"{where} cannot be unpickled ({type(error).__name__}: {error})", file=where) from error


@lru_cache(maxsize=1024)
def _warn_of_trust(where: str) -> None:
    log.warning("%s is read with trust_pickle=True: whatever code the checkpoint names runs in this process", where)


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length < tensor.size(dim):
            tensor = tensor.narrow(dim, offset, length)
    return tensor
