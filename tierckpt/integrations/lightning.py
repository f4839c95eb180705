"""Lightning: ``CheckpointIO`` for single-file checkpoints (one device, DDP, full state).

    checkpoints = ModelCheckpoint(dirpath="tierckpt://s3/bucket/run", save_last=True)
    trainer = Trainer(plugins=[TierCheckpointIO()], callbacks=[checkpoints])
    trainer.fit(model, data, ckpt_path=newest(checkpoints.dirpath))

``ckpt_path="last"`` finds nothing there: Lightning drops the protocol of the names that it lists.
Sharded strategies ask no ``CheckpointIO``: adopt their directories, or save with ``TierStorageWriter``.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
from typing import Any

import fsspec
import torch

try:
    from lightning.fabric.plugins import CheckpointIO
except ModuleNotFoundError:
    from lightning_fabric.plugins import CheckpointIO

from ..errors import ConfigError, StoreError, UnsafeCheckpointError
from ..telemetry import logger

log = logger("save")


def newest(dirpath: str | os.PathLike[str]) -> str | None:
    """Return the URL of ``last.ckpt`` in ``dirpath``, else of the checkpoint of the highest step; None without one."""
    url = os.fspath(dirpath).rstrip("/")
    fs, name = fsspec.core.url_to_fs(url)
    names = [path.rpartition("/")[2] for path in fs.ls(name, detail=False)] if fs.exists(name) else []
    steps = {int(match[1]): one for one in names if (match := re.search(r"step=(\d+).*\.ckpt$", one))}
    found = "last.ckpt" if "last.ckpt" in names else steps[max(steps)] if steps else None
    return f"{url}/{found}" if found else None


class TierCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Writes checkpoints through ``tierckpt://``: durable on this node when saved, drained behind.

    A checkpoint that Lightning removes before newer ones are drained stays on shared storage until they are.
    Checkpoints are read with ``weights_only=True`` unless the caller says otherwise.
    """

    def __init__(self) -> None:
        self._doomed: list[str] = []
        self._lock = threading.Lock()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save to ``path``, a ``tierckpt://`` URL. Raises ConfigError: another place."""
        if storage_options is not None:
            raise ConfigError("storage_options are not taken", hint="Settings are TIERCKPT_* variables")
        fs, name = self._place(path)
        with fs.open(name, "wb") as file:
            torch.save(checkpoint, file)
        self._remove_what_may_go()

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load ``path``. Raises UnsafeCheckpointError: it holds more than tensors and plain values."""
        fs, name = self._place(path)
        with fs.open(name, "rb") as file:
            try:
                found: dict[str, Any] = torch.load(
                    file, map_location=map_location or "cpu", weights_only=weights_only is not False
                )
            except pickle.UnpicklingError as error:
                raise UnsafeCheckpointError(
                    f"{path} holds more than tensors and plain values: {str(error).splitlines()[0]}",
                    hint="torch.serialization.add_safe_globals names a class that is safe; trainer.fit(..., "
                    "weights_only=False) runs whatever the file says",
                ) from error
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove ``path``, or, if it is not drained yet, when it is: a node that is lost must not take all with it."""
        with self._lock:
            self._doomed.append(os.fspath(path))
        self._remove_what_may_go()

    def teardown(self) -> None:
        """Remove what may go by now."""
        self._remove_what_may_go()

    def _remove_what_may_go(self) -> None:
        """A store that fails keeps them for the next time, and fails no save."""
        with self._lock:
            for path in list(self._doomed):
                try:
                    fs, name = self._place(path)
                    if not fs.is_drained(name.rpartition("/")[0]):
                        log.warning("%s stays until it and what was saved after it are on shared storage", path)
                        continue
                    if fs.exists(name):
                        fs.rm(name, recursive=True)
                except StoreError as error:
                    log.warning("%s is removed later: %s", path, error)
                else:
                    self._doomed.remove(path)

    def _place(self, path: str | os.PathLike[str]) -> tuple[Any, str]:
        url = os.fspath(path)
        if not url.startswith("tierckpt:"):
            raise ConfigError(
                f"Lightning saves to {url}, which is not on shared storage",
                hint='Say ModelCheckpoint(dirpath="tierckpt://s3/bucket/run")',
            )
        fs, name = fsspec.core.url_to_fs(url)
        return fs, name
