"""DeepSpeed: a checkpoint engine whose commit adopts the files of every rank.

engine.checkpoint_engine = TierCheckpointEngine("s3://bucket/run")
engine.load_checkpoint("out", tag=engine.checkpoint_engine.restore("out"))
engine.save_checkpoint("out")
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ..config import Settings
from ..errors import ConfigError
from .directories import Directories


class TierCheckpointEngine(TorchCheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's own files, adopted as ``uri/TAG`` when all ranks have written theirs."""

    def __init__(self, uri: str | os.PathLike[str], settings: Settings | None = None, **overrides: Any) -> None:
        super().__init__()
        self.run = Directories(uri, settings, **overrides)

    def save(self, state_dict: Any, path: str) -> None:
        """Replace a file: writing into it would change an earlier checkpoint that links to it."""
        Path(path).unlink(missing_ok=True)
        super().save(state_dict, path)

    def commit(self, info: Any) -> bool:
        """Adopt the tag's directory. Raises as ``tierckpt.adopt``."""
        directory = Path(info.save_dir, info.tag)
        try:
            self.run.save(directory)
        except ConfigError:
            if directory.exists():
                raise  # else no rank has one: the file of save_16bit_model is no checkpoint
        return True

    def restore(self, save_dir: str | os.PathLike[str]) -> str | None:
        """Restore the newest usable checkpoint; return its tag, or None."""
        found = self.run.restore(save_dir)
        return found.name if found is not None else None
