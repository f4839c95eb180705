"""TierStorageWriter: DCP's StorageWriter that lands on the local tier and drains in the background.

Order of one save (DCP calls, on every rank unless noted):
    set_up_storage_writer   note rank and role; put away what a failed earlier save left open
    prepare_local_plan      coordinator: which attempts stand under this id now, and may we replace them?
    write_data              journal entry, shards, fsync; ranks other than the coordinator start to drain here
    finish (coordinator)    metadata and manifest: the local commit; then its own drain starts
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import secrets
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _OverlappingCpuLoader,
    _SerialCpuLoader,
    _split_by_size_and_type,
    _StorageInfo,
    _StoragePrefix,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..config import Settings
from ..errors import CheckpointError, ConfigError, OperationTimeoutError, StateMismatchError, TierckptError
from ..layout import METADATA, SHARD_SUFFIX, Location, attempt_metadata, local_dir, rank_metadata, shard_name
from ..manifest import FileEntry, Manifest, chunk_count, digest_of
from ..mover import commit, retention
from ..mover.disk import check_local_root
from ..mover.journal import READY, WRITING, Entry, Journal
from ..stores.local import fsync_dir, make_dirs
from ..telemetry import logger
from .mount import Mount
from .shard import ShardWriter

log = logger("save")

DCP_VERSION = "1.0.0"
ATTEMPT_TIMEOUT_SECONDS = 120.0

_saves_without_collectives: dict[str, int] = {}


@dataclass(frozen=True)
class TierWriteResult(WriteResult):
    """DCP's result for one item; the first of each rank also carries that rank's shards to the coordinator."""

    files: tuple[FileEntry, ...] = ()


@dataclass
class _Save:
    """One save in progress on this rank: its journal entry, and the lock that says we are alive."""

    entry: Entry
    directory: Path
    lock: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class TierStorageWriter(Mount, StorageWriter, BlockingAsyncStager):
    """Saves DCP checkpoints to node-local SSD and drains them to ``uri`` in the background.

    When ``dcp.save`` returns the checkpoint is committed on the local tier: files and directories are fsynced, digests
    taken, the manifest in place. The shared tier follows (``tierckpt.wait``); where ``uri`` lies on the same file
    system as ``local_root`` it is committed there by hard links before the call returns. An existing checkpoint under
    the same id stays whole until the new one is committed.

    Args:
        uri: ``s3://bucket/key``, ``az://container/key``, ``gs://bucket/key``, a path, or any fsspec URL.
        settings: a ``Settings``; ``overrides`` are single fields of it (``local_root=...``, ``drain=False``).
        single_file_per_rank: False writes one shard per item.
        sync_files: False skips fsync of shards: faster, and a power cut may lose the checkpoint on the local tier.
        thread_count: threads writing shards; an error in any of them fails the save.
        per_thread_copy_ahead: bytes copied from the device ahead of writing (one thread only, as in DCP).
        cache_staged_state_dict: keep the staging buffers of ``async_save`` for the next save.
        overwrite: False refuses an id that holds a checkpoint already.
        serialization_format: only TORCH_SAVE; for safetensors use ``tierckpt export``.

    Raises (inside DCP's CheckpointException, by rank):
        AlreadyCommittedError, CapacityError, PermissionDeniedError, ConfigError, StateMismatchError (meta tensors).
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        path: str | os.PathLike[str] | None = None,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> None:
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        if serialization_format != SerializationFormat.TORCH_SAVE:
            raise ConfigError(
                "serialization_format must be TORCH_SAVE: DCP's own reader cannot load a safetensors checkpoint",
                hint="Save as usual, then `tierckpt export URI --to DIR` writes safetensors",
            )
        if thread_count < 1:
            raise ConfigError(f"thread_count is {thread_count}, it must be at least 1")
        self.settings = Settings.load(settings, **overrides)
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.overwrite = overwrite
        self.transforms = _StorageWriterTransforms(_extensions)
        self.save_id = str(uuid.uuid4())
        self.rank = 0
        self.is_coordinator = True
        self.use_collectives = True
        self._replaces: tuple[str, ...] = ()
        self._save: _Save | None = None
        self._holds_back = False
        self._busy = threading.Lock()
        self._point_to(uri if uri is not None else path)

    # --- contract of StorageWriter ------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Get ready for a new save, to ``checkpoint_id`` if one is given.

        Raises CheckpointError while another thread still writes with this object.
        """
        with self._working():
            self._abort()
        if checkpoint_id is not None:
            self._point_to(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        with self._working():
            self._abort()
        rank = kwargs.get("rank")
        self.rank = rank if rank is not None else (dist.get_rank() if dist.is_initialized() else 0)
        self.use_collectives = kwargs.get("use_collectives", True)
        self.is_coordinator = is_coordinator or not self.use_collectives

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        check_local_root(self.settings)
        if self.is_coordinator:
            location, overwrite = self.location, self.overwrite
            self._replaces = self._client.run(lambda e: e.attempts_to_replace(location, overwrite=overwrite))
        if not self.use_collectives:
            plan = dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self.rank}_"))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_")) if plan.storage_data is None else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with self._working():
            return self._write_data(plan, planner)

    def _write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        if not plan.items and not self.is_coordinator:
            future.set_result([])
            return future
        save = self._begin(self._token())
        try:
            results, files = self._write_shards(plan, planner, save)
        except BaseException:
            self._abort()
            raise
        save.entry = dataclasses.replace(save.entry, files=files)
        if not self.is_coordinator and not self._holds_back:
            self._hand_over(save)
        if results:
            first = results[0]
            results[0] = TierWriteResult(first.index, first.size_in_bytes, first.storage_data, files)
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit on the local tier. Raises AlreadyCommittedError when another save took this id meanwhile."""
        with self._working():
            self._finish(metadata, results)

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save = self._save
        if save is None:
            raise RuntimeError("finish() was called without write_data(): a StorageWriter is driven by dcp.save")
        try:
            data = self._encode_metadata(metadata, results)
            manifest = self._manifest(save, data, results)
            metadata_bytes = {manifest.metadata[0].path: data}
            commit.keep_metadata(save.directory, manifest, metadata_bytes)
            save.entry = dataclasses.replace(
                save.entry, files=save.entry.files + manifest.metadata, manifest=manifest, state=READY
            )
            # Before the commit, so that a crash after it still finds the drain to do; a crash between the two leaves an
            # entry that the local manifest does not name, which the mover forgets.
            self._journal.write(save.entry)
            if save.entry.is_fragment:
                commit.commit_local_fragment(save.directory, self.location, manifest, metadata_bytes)
            else:
                commit.commit_local(save.directory, self.location, manifest, metadata_bytes)
        except BaseException:
            self._abort()
            raise
        log.info("committed %s on the local tier (%d bytes)", self.path, manifest.size_bytes)
        self._hand_over(save)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    # --- staging ------------------------------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        refuse_meta_tensors(state_dict)
        if self.cache_staged_state_dict and self.state_dict_cache is None and not torch.cuda.is_available():
            self.state_dict_cache = _create_cpu_state_dict(state_dict)  # DCP would pin it, which needs a device
        return BlockingAsyncStager.stage(self, state_dict)

    # --- one save -----------------------------------------------------------------------------------------------

    def _begin(self, token: str) -> _Save:
        """Open the journal entry of this rank's save and hold it: from now on every file has a name there (J1)."""
        self._client.recover()
        directory = local_dir(self.settings.local_root, self.location)
        make_dirs(directory)
        lock = contextlib.ExitStack()
        lock.enter_context(self._journal.own(token))
        entry = self._journal.open(token, self.location, self.rank, int(self.settings.chunk_size_bytes))
        self._save = _Save(entry, directory, lock)
        return self._save

    def _write_shards(
        self, plan: SavePlan, planner: SavePlanner, save: _Save
    ) -> tuple[list[WriteResult], tuple[FileEntry, ...]]:
        prefix = plan.storage_data.prefix if plan.storage_data is not None else f"__{self.rank}_"
        retention.make_room(self.settings.local_root, sum(map(_item_bytes, plan.items)), save.directory)
        jobs = [
            (save.directory / shard_name(prefix, index, save.entry.token), items)
            for index, items in enumerate(self._split(plan.items))
        ]
        if len(jobs) > 1 and self.thread_count > 1:
            with ThreadPoolExecutor(self.thread_count, thread_name_prefix="tierckpt-flush") as pool:
                futures = [
                    pool.submit(self._write_shard, shard, items, planner, save.entry.token) for shard, items in jobs
                ]
                done = [future.result() for future in futures]  # the error of any thread is the error of the save
        else:
            done = [self._write_shard(shard, items, planner, save.entry.token) for shard, items in jobs]
        if self.sync_files:
            fsync_dir(save.directory)
        return [result for results, _ in done for result in results], tuple(entry for _, entry in done)

    def _split(self, items: list[WriteItem]) -> list[list[WriteItem]]:
        """Items of each shard: by thread as DCP does, then cut where a shard would pass its cap."""
        if not self.single_file_per_rank:
            return [[item] for item in items]
        shards: list[list[WriteItem]] = []
        for bucket in _split_by_size_and_type(self.thread_count, list(items)):
            size_bytes = 0
            shard: list[WriteItem] = []
            for item in bucket:
                if shard and size_bytes + _item_bytes(item) > self.settings.shard_size_bytes_max:
                    shards.append(shard)
                    size_bytes, shard = 0, []
                shard.append(item)
                size_bytes += _item_bytes(item)
            if shard:
                shards.append(shard)
        return shards

    def _write_shard(
        self, path: Path, items: list[WriteItem], planner: SavePlanner, token: str
    ) -> tuple[list[WriteResult], FileEntry]:
        with ShardWriter(path, int(self.settings.chunk_size_bytes)) as stream:
            try:
                results = self._write_items(stream, items, planner)
                return results, stream.entry(self.rank, token, durable=self.sync_files)
            except BaseException as error:
                if stream.error is not None and stream.error is not error:
                    raise stream.error from error
                raise

    def _write_items(self, stream: ShardWriter, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = []
        loader = self._loader(planner)
        for item in items:
            if item.type == WriteItemType.BYTE_IO:
                results.append(self._write_item(stream, planner.resolve_data(item), item))
            else:
                loader.add(_item_bytes(item), item)
        loader.start_loading()
        results += [self._write_item(stream, tensor, item) for tensor, item in loader.values()]
        return results

    def _write_item(self, stream: ShardWriter, data: Any, item: Any) -> WriteResult:
        return _write_item(self.transforms, stream, data, item, stream.path.name, SerializationFormat.TORCH_SAVE)

    def _loader(self, planner: SavePlanner) -> Any:
        def resolve(item: WriteItem) -> torch.Tensor:
            tensor = cast(torch.Tensor, planner.resolve_data(item))
            if tensor.is_meta:
                raise _meta_tensor(item.index.fqn)
            return tensor

        if self.thread_count == 1 and self.per_thread_copy_ahead > 0 and torch.cuda.is_available():
            return _OverlappingCpuLoader(resolve, inflight_threshhold=self.per_thread_copy_ahead)
        return _SerialCpuLoader(resolve)

    def _encode_metadata(self, metadata: Metadata, results: list[list[WriteResult]]) -> bytes:
        metadata.version = DCP_VERSION
        metadata.storage_data = {
            result.index: _StorageInfo(**vars(result.storage_data)) for rank in results for result in rank
        }
        metadata.storage_meta = self.storage_meta()
        return pickle.dumps(metadata)

    def _manifest(self, save: _Save, data: bytes, results: list[list[WriteResult]]) -> Manifest:
        collected = {file.path: file for rank in results for result in rank for file in getattr(result, "files", ())}
        if not {file.path for file in save.entry.files} <= collected.keys():
            raise CheckpointError(
                f"two saves used one TierStorageWriter at the same time (now at {self.path})",
                hint="Wait for an async_save before starting the next with the same writer; this one was not committed",
            )
        token, chunk = save.entry.token, save.entry.chunk_size_bytes
        alone = not self.use_collectives
        attempt = token.rpartition("-")[0] if alone else token
        return Manifest(
            attempt=attempt,
            world_size=_world_size() if alone else max(len(results), 1),
            chunk_size_bytes=chunk,
            metadata=(_metadata_entry(data, chunk, self.rank, token if alone else attempt, alone),),
            files=tuple(collected[path] for path in sorted(collected)),
            replaces=self._replaces,
            created_unix_seconds=time.time(),
        )

    def hold_back(self) -> None:
        """Keep this rank's shards from the mover until ``hand_over``: for callers that tell every rank the outcome."""
        self._holds_back = True

    def hand_over(self) -> None:
        """Give the shards held back to the mover: the coordinator has committed."""
        if self._save is not None:
            self._hand_over(self._save)

    def _hand_over(self, save: _Save) -> None:
        """Give the entry to the mover. Where links can, the shared commit is done before this returns.

        Nothing here fails a save that is durable on the local tier: the mover tries again, and ``wait`` says why not.
        """
        entry = save.entry
        if not self.settings.drain:
            self._journal.remove(entry.token)
            self._release()
            return
        if entry.state != READY:
            entry = self._journal.write(dataclasses.replace(entry, state=READY))
        self._release()  # from here on the entry is the mover's, whatever happens
        try:
            linked = self._client.run(lambda engine: engine.send_linked(entry))
            if linked and entry.manifest is not None and not entry.is_fragment:
                self._client.run(lambda engine: engine.drain_now(entry.token))
                return
        except TierckptError as error:
            log.warning("%s: the shared tier has to wait: %s", entry.uri, error)
        self._client.submit(entry.token)

    def _abort(self) -> None:
        """Put away a save that will never be committed: its files have names that nothing refers to.

        Called at the start of the next save, and from within a failing one.
        """
        if self._save is None:
            return
        save, token = self._save, self._save.entry.token
        if save.entry.state == READY:
            # A crash in what follows must not leave an entry that says its files are there.
            self._journal.write(dataclasses.replace(save.entry, state=WRITING))
        for file in (*save.directory.glob(f"*-{token}{SHARD_SUFFIX}"), save.directory / attempt_metadata(token)):
            file.unlink(missing_ok=True)
        self._journal.remove(token)
        self._release()

    def _release(self) -> None:
        if self._save is not None:
            self._save.lock.close()
            self._save = None

    def _token(self) -> str:
        """A name no save has used. Without collectives all ranks of a save share its first part, through the
        rendezvous store: one small key, no collective."""
        if self.use_collectives:
            return secrets.token_hex(8)
        return f"{self._agreed_attempt()}-{self.rank}"

    def _agreed_attempt(self) -> str:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return secrets.token_hex(8)
        count = _saves_without_collectives[self.path] = _saves_without_collectives.get(self.path, 0) + 1
        store = dist.distributed_c10d._get_default_store()
        key = f"tierckpt/attempt/{self.path}/{count}"
        if dist.get_rank() == 0:
            store.set(key, secrets.token_hex(8))
        try:
            store.wait([key], timedelta(seconds=ATTEMPT_TIMEOUT_SECONDS))
        except Exception as error:
            raise OperationTimeoutError(
                f"rank 0 has not begun to save {self.path}",
                hint="Every rank must save, in the same order",
                rank=self.rank,
                waited_seconds=ATTEMPT_TIMEOUT_SECONDS,
            ) from error
        return str(store.get(key).decode())

    # --- odds and ends ------------------------------------------------------------------------------------------

    def _point_to(self, uri: str | os.PathLike[str] | None) -> None:
        super()._point_to(uri)
        refuse_overlap(self.location, self.settings.local_root)

    @property
    def _journal(self) -> Journal:
        return Journal(self.settings.local_root)

    def __getstate__(self) -> dict[str, Any]:
        """Pickles for process-based async saves: everything but a save in progress."""
        return {key: value for key, value in self.__dict__.items() if key not in {"_save", "_busy"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _save=None, _busy=threading.Lock())

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """One thread at a time: a second save must not put away the shards of the first while they are written."""
        if not self._busy.acquire(blocking=False):
            raise CheckpointError(
                f"this TierStorageWriter is still saving to {self.path} in another thread",
                hint="Wait for the async_save before starting the next, or use another writer",
            )
        try:
            yield
        finally:
            self._busy.release()


def refuse_overlap(location: Location, local_root: Path) -> None:
    """Raise ConfigError when the target lies inside the local root, where the local tier would shadow it."""
    if location.scheme == "file" and Path(location.path).is_relative_to(local_root):
        raise ConfigError(
            f"{location.path} lies inside local_root {local_root}",
            hint="Save to a directory outside it; local_root belongs to tierckpt",
        )


def refuse_meta_tensors(state_dict: dict[str, Any], prefix: str = "") -> None:
    """Raise StateMismatchError for the first tensor on the meta device: it has no bytes to save."""
    for key, value in state_dict.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise _meta_tensor(f"{prefix}{key}")
        if isinstance(value, dict):
            refuse_meta_tensors(value, f"{prefix}{key}.")


def _meta_tensor(name: str) -> StateMismatchError:
    return StateMismatchError(
        f"{name} is on the meta device and has no bytes to save",
        hint="Materialise the module first (to_empty and initialise, or load a checkpoint)",
        tensor=name,
    )


def _metadata_entry(data: bytes, chunk_size_bytes: int, rank: int, attempt: str, alone: bool) -> FileEntry:
    digests = tuple(
        digest_of(memoryview(data)[index * chunk_size_bytes : (index + 1) * chunk_size_bytes])
        for index in range(chunk_count(len(data), chunk_size_bytes))
    )
    path = rank_metadata(rank) if alone else METADATA
    return FileEntry(path, len(data), digests, rank, attempt, source=attempt_metadata(attempt))


def _item_bytes(item: WriteItem) -> int:
    """Bytes of one plan item (its own chunk of the tensor), 1 for an object whose size nobody knows yet."""
    if item.tensor_data is None:
        return 1
    count = 1
    for size in item.tensor_data.chunk.sizes:
        count *= size
    return count * item.tensor_data.properties.dtype.itemsize


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
