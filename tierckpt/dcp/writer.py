"""TierStorageWriter: DCP's StorageWriter that saves to the local tier and drains in the background.

Order of one save (on every rank unless noted); ``SaveSession`` does the work:
    set_up_storage_writer   a new session; an unfinished earlier one is removed
    prepare_local_plan      coordinator: which attempts have this id now, and may this save replace them?
    write_data              journal entry, shards, fsync; other ranks start to drain here
    finish (coordinator)    metadata and manifest: the local commit; then its own drain starts
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..config import Settings
from ..errors import CheckpointError, ConfigError
from ..rank_store import RankStore
from ..stores.schemes import check_mirrored_target
from ..torch_internals import StorageWriterTransforms
from ..tracebacks import short_traceback
from .handoff.offer import Handoff
from .save_planning import SaveDescription
from .save_session import SaveSession
from .stager import StagedItems, TierStager
from .target import Mount

ATTEMPT_TIMEOUT_SECONDS = 120.0

_PROCESS_FIELDS = {"_session", "_busy", "_stager"}


class TierStorageWriter(Mount, StorageWriter):
    """Saves DCP checkpoints to node-local SSD and drains them to ``uri`` in the background.

    When ``dcp.save`` returns, the checkpoint is committed on the local tier: files and directories are fsynced, digests
    taken, the manifest in place. The shared tier follows (``tierckpt.wait``); if ``uri`` is on the same file system as
    ``local_root``, the call commits there by hard links. An existing checkpoint under the same id stays whole until the
    new one is committed.

    Args:
        uri: ``s3://bucket/key``, ``az://container/key``, ``gs://bucket/key``, a path, or any fsspec URL.
        settings: ``overrides`` replace single fields of it (``local_root=...``, ``drain=False``).
        single_file_per_rank: False writes one shard per item.
        sync_files: False skips fsync of shards: a power cut may lose the checkpoint on the local tier.
        thread_count, per_thread_copy_ahead, cache_staged_state_dict: of DCP's writer; ignored.
        overwrite: False refuses an id that already holds a checkpoint.
        serialization_format: only TORCH_SAVE; for safetensors use ``tierckpt export``.
        trust_pickle: accept a planner that puts its own classes into the metadata (Megatron's does). Only
            ``TierStorageReader(uri, trust_pickle=True)`` loads such a checkpoint; without it the save fails.

    Raises (inside DCP's CheckpointException, by rank):
        AlreadyCommittedError, CapacityError, PermissionDeniedError, ConfigError, StateMismatchError (meta tensors).
    Cost: one copy of the state to staging memory, one write of it to the SSD.

    Example:
        >>> state = {"weight": torch.ones(4)}
        >>> metadata = dcp.save(state, storage_writer=TierStorageWriter("run/step-1"))
        >>> future = dcp.async_save(state, storage_writer=TierStorageWriter("run/step-2"))  # returns when copied
        >>> metadata = future.result()  # committed on the local tier
        >>> tierckpt.wait("run/step-2", tier="shared")
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
        trust_pickle: bool = False,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> None:
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
        self.cache_staged_state_dict = cache_staged_state_dict
        self.overwrite = overwrite
        self.transforms = StorageWriterTransforms(_extensions)
        self._trust_pickle = trust_pickle
        self._save_id = str(uuid.uuid4())
        self._session: SaveSession | None = None
        self._busy = threading.Lock()
        self._stager: TierStager | None = None
        self._point_to(uri if uri is not None else path)

    # --- contract of StorageWriter ------------------------------------------------------------------------------

    @short_traceback
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare a new save. Raises CheckpointError while another thread still writes with this object."""
        self._abandon()
        if checkpoint_id is not None:
            self._point_to(checkpoint_id)
        self._save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save. An unfinished earlier save of this object is removed."""
        self._abandon()
        use_collectives = kwargs.get("use_collectives", True)
        rank = kwargs.get("rank")
        description = SaveDescription(
            rank=rank if rank is not None else (dist.get_rank() if dist.is_initialized() else 0),
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            is_coordinator=is_coordinator or not use_collectives,
            use_collectives=use_collectives,
            overwrite=self.overwrite,
            trust_pickle=self._trust_pickle,
            one_file=self.single_file_per_rank,
            sync_files=self.sync_files,
            transforms=self.transforms,
        )
        self._session = SaveSession(self.settings, self.location, description, Handoff(), save_id=self._save_id)
        self._session.begin()

    @short_traceback
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check ``local_root`` and the target, and return ``plan``."""
        return self._save.plan_local(plan)

    @short_traceback
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans, with replicated items spread evenly over ranks."""
        return self._save.plan_global(plans)

    @short_traceback
    def write_data(self, plan: SavePlan, planner: SavePlanner | StagedItems) -> Future[list[WriteResult]]:
        """Write this rank's shards to the SSD, durably. The returned future is done."""
        future: Future[list[WriteResult]] = Future()
        with self._working():
            future.set_result(self._save.write(plan, planner, self._token))
        return future

    @short_traceback
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit on the local tier. Raises AlreadyCommittedError if another save took this id meanwhile."""
        with self._working():
            self._save.commit(metadata, results)

    def storage_meta(self) -> StorageMeta:
        """Return the id and the name of the save."""
        save_id = self._session.save_id if self._session is not None else self._save_id
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=save_id)

    # --- staging ------------------------------------------------------------------------------------------------

    should_synchronize_after_execute = _synchronize_after_execute = False
    """``stage`` is complete when it returns."""

    @short_traceback
    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Copy ``state_dict`` to the process's arena, for ``dcp.async_save``."""
        if self._stager is None:
            self._stager = TierStager(settings=self.settings)
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: ``stage`` returns when the copy is complete."""

    def close(self) -> None:
        """Do nothing: staging memory belongs to the process."""

    # --- one save -----------------------------------------------------------------------------------------------

    @property
    def _save(self) -> SaveSession:
        if self._session is None:
            raise RuntimeError("set_up_storage_writer() was not called: a StorageWriter is driven by dcp.save")
        return self._session

    def _abandon(self) -> None:
        with self._working():
            if self._session is not None:
                self._session.abandon()
        self._session = None

    def _token(self) -> str:
        """Without collectives all ranks share its first part."""
        attempt = secrets.token_hex(8)
        if self._save.description.use_collectives:
            return attempt
        if dist.is_initialized() and dist.get_world_size() > 1:
            store = RankStore.numbered(f"tierckpt/attempt/{self.path}", ATTEMPT_TIMEOUT_SECONDS)
            late = f"rank 0 has not begun to save {self.path}"
            attempt = store.broadcast("name", lambda: attempt, late, "Every rank must save, in the same order")
        return f"{attempt}-{self._save.description.rank}"

    # --- odds and ends ------------------------------------------------------------------------------------------

    def _point_to(self, uri: str | os.PathLike[str] | None) -> None:
        super()._point_to(uri)
        check_mirrored_target(self.location, self.settings.local_root)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _PROCESS_FIELDS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _session=None, _busy=threading.Lock(), _stager=None)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """A second thread's save would remove the shards of the first."""
        if not self._busy.acquire(blocking=False):
            raise CheckpointError(
                f"this TierStorageWriter is still saving to {self.path} in another thread",
                hint="Wait for the async_save before starting the next, or use another writer",
            )
        try:
            yield
        finally:
            self._busy.release()
