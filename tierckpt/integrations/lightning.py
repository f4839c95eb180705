"""Lightning: ``CheckpointIO`` for single-file checkpoints (one device, DDP, full state).

    checkpoints = ModelCheckpoint(dirpath="tierckpt://s3/bucket/run", save_last=True)
    trainer = Trainer(plugins=[TierCheckpointIO()], callbacks=[checkpoints])
    trainer.fit(model, data, ckpt_path=newest(checkpoints.dirpath))

Lightning does not find ``ckpt_path="last"`` there. Sharded strategies: ``lightning_sharded``.
"""

from __future__ import annotations

import atexit
import os
import pickle
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import fsspec
import torch

try:
    from lightning.fabric import __version__ as VERSION
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
except ModuleNotFoundError:
    from lightning_fabric import __version__ as VERSION
    from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO

from ..errors import CheckpointError, ConfigError, OperationTimeoutError, TierckptError, UnsafeCheckpointError
from ..poll import SHARED, Poll
from ..telemetry import logger
from .directories import RESTORE_SECONDS, rank_0_finds

log = logger("save")

NEWEST = "newest"
"""Placeholder in a ``ckpt_path``, until the ranks can agree on the newest checkpoint."""
_OWN = re.compile(r"(\..+|hpc_ckpt_\d+)\.ckpt$")
"""Weights of a spawned process, a tuner's state, Slurm's requeue state."""
RAY_NAME = "checkpoint.ckpt"
"""RayTrainReportCallback and TuneReportCheckpointCallback write it to a temporary directory."""
_lock = threading.Lock()  # not of the object, which spawning strategies pickle
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def newest(dirpath: str | os.PathLike[str]) -> str:
    """Return the ``ckpt_path`` of the newest checkpoint in ``dirpath``: ``last.ckpt``, else the highest step.

    All ranks load rank 0's result. Without a checkpoint, training starts from the beginning.
    """
    return f"{os.fspath(dirpath).rstrip('/')}/{NEWEST}"


class TierCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Writes checkpoints through ``tierckpt://``: durable on this node when saved, drained in the background.

    A checkpoint removed by Lightning stays on shared storage until later ones are there.
    """

    def __init__(self) -> None:
        self._pending_removals: set[str] = set()
        """The removal failed, or the SSD had no room for its entry."""
        self._saver: int | None = None
        """If another thread removes (``AsyncCheckpointIO``), the save may be pending."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save to a ``tierckpt://`` URL. Raises ConfigError: another location."""
        if not _is_ours(path) and is_of_host(path):
            TorchCheckpointIO().save_checkpoint(checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise ConfigError("storage_options are not taken", hint="Settings are TIERCKPT_* variables")
        fs, name = _place(path)
        with _lock:
            self._saver, doomed, self._pending_removals = threading.get_ident(), self._pending_removals, set()
        doomed.discard(os.fspath(path))
        try:
            with fs.open(name, "wb") as file:
                torch.save(checkpoint, file)
        except BaseException:
            with _lock:
                self._pending_removals |= doomed
            raise
        self._remove(doomed)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load ``path``; ``newest`` is alike on every rank of a job.

        Raises:
            UnsafeCheckpointError: it holds more than tensors and plain values.
            CheckpointError: this node has an undrained step newer than rank 0's.
            OperationTimeoutError: rank 0's checkpoint is not visible on this node within 600 s.
        """
        fs, name = fsspec.core.url_to_fs(os.fspath(path))
        above, _, last = name.rpartition("/")
        if last != NEWEST:
            return _load(fs, name, map_location, weights_only)
        _place(path)
        found = rank_0_finds(name, lambda: _newest_in(fs, above) or "")
        if not found:
            return nothing_to_restore(fs.unstrip_protocol(above))
        return _load_as_rank_0(fs, found, map_location, weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove ``path`` after it and later saves are drained: a lost node must not take all of them."""
        if not _is_ours(path):
            TorchCheckpointIO().remove_checkpoint(path)
            return
        with _lock:
            doomed = self._pending_removals | {os.fspath(path)}
            is_later = self._saver != threading.get_ident()
            self._pending_removals = doomed if is_later else set()
        if not is_later:
            self._remove(doomed)
            return
        atexit.unregister(self.teardown)  # AsyncCheckpointIO does not call teardown
        atexit.register(self.teardown)

    def teardown(self) -> None:
        with _lock:
            doomed, self._pending_removals = self._pending_removals, set()
        self._remove(doomed)

    def _remove(self, doomed: set[str]) -> None:
        """Journal the removals after the saves so far: they survive a kill, without a store request."""
        for path in sorted(doomed):
            fs, name = _place(path)
            try:
                if not fs.is_drained(name):
                    log.warning("%s was removed and is not drained yet: it stays until it is", path)
                fs.rm_behind(name)
            except (TierckptError, OSError) as error:
                log.warning("%s is removed later: %s", path, error)
                with _lock:
                    self._pending_removals.add(path)


class _Nothing(dict[str, Any]):
    def __bool__(self) -> bool:
        return False


def nothing_to_restore(location: str) -> dict[str, Any]:
    log.warning("%s has no checkpoint yet: training starts from the beginning", location)
    return _Nothing({"pytorch-lightning_version": VERSION})


def is_of_host(path: str | os.PathLike[str]) -> bool:
    location = Path(path)
    is_for_ray = location.name == RAY_NAME and location.is_relative_to(tempfile.gettempdir())
    return is_for_ray or _OWN.fullmatch(location.name) is not None


def _is_ours(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).startswith("tierckpt:")


def _place(path: str | os.PathLike[str]) -> tuple[Any, str]:
    if not _is_ours(path):
        raise ConfigError(
            f"Lightning saves to {os.fspath(path)}, which is not on shared storage",
            hint='Say ModelCheckpoint(dirpath="tierckpt://s3/bucket/run")',
        )
    fs, name = fsspec.core.url_to_fs(os.fspath(path))
    return fs, name


def _newest_in(fs: Any, directory: str) -> str | None:
    names = [path.rpartition("/")[2] for path in fs.ls(directory, detail=False)] if fs.exists(directory) else []
    named = [(match, one) for one in names if (match := re.search(r"(^last|step=(\d+).*?)(-v(\d+))?\.ckpt$", one))]
    if not named:
        if any(one.endswith(".ckpt") for one in names):
            raise ConfigError(
                f"which checkpoint of {fs.unstrip_protocol(directory)} is the newest, their names do not say",
                hint='Say save_last=True, or filename="{epoch}-{step}", to ModelCheckpoint; or name one in ckpt_path',
            )
        return None
    last = [one for one in named if one[0][2] is None]
    _, found = max(last or named, key=lambda one: (int(one[0][2] or 0), int(one[0][4] or 0)))
    return f"{directory}/{found}"


def _load(fs: Any, name: str, map_location: Any | None, weights_only: bool | None) -> dict[str, Any]:
    with fs.open(name, "rb") as file:
        try:
            found: dict[str, Any] = torch.load(
                file, map_location=map_location or "cpu", weights_only=weights_only is not False
            )
        except pickle.UnpicklingError as error:
            raise UnsafeCheckpointError(
                f"{fs.unstrip_protocol(name)} holds more than tensors and plain values: {str(error).splitlines()[0]}",
                hint="torch.serialization.add_safe_globals names a class that is safe; trainer.fit(..., "
                "weights_only=False) runs whatever the file says",
            ) from error
    return found


def _load_as_rank_0(fs: Any, name: str, *how: Any) -> dict[str, Any]:
    """Its node may have an undrained version."""
    found, version = _loaded_anew(fs, name, None, *how)
    step = int(rank_0_finds(f"{name} step", lambda: str((found or {}).get("global_step", 0))))
    for _ in Poll(RESTORE_SECONDS, SHARED):
        if found is None:
            found, version = _loaded_anew(fs, name, version, *how)
        if found is None:
            continue
        local_step = found.get("global_step", 0)
        if local_step == step:
            return found
        if local_step > step:
            url = fs.unstrip_protocol(name)
            raise CheckpointError(
                f"{url}: this node has step {local_step}, which is newer than rank 0's, step {step}",
                hint="`tierckpt drain --wait` on this node; then start the job again",
            )
        found = None
    raise OperationTimeoutError(
        f"{fs.unstrip_protocol(name)}: step {step}, which rank 0 has found, is not to be seen here",
        hint="The node that wrote it drains it: `tierckpt status` there",
        waited_seconds=RESTORE_SECONDS,
    )


def _loaded_anew(fs: Any, name: str, version: Any, *how: Any) -> tuple[dict[str, Any] | None, Any]:
    """Return no content if missing or of ``version``."""
    try:
        info = fs.info(name)
        return (None if info == version else _load(fs, name, *how)), info
    except FileNotFoundError:
        return None, version
