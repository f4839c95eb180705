"""DeepSpeed: a checkpoint engine whose commit adopts what every rank has written.

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
from .directories import Directories


class TierCheckpointEngine(TorchCheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's own files, adopted as ``uri/TAG`` when all ranks have written theirs. Its loading is DeepSpeed's."""

    def __init__(self, uri: str | os.PathLike[str], settings: Settings | None = None, **overrides: Any) -> None:
        super().__init__()
        self.run = Directories(uri, settings, **overrides)

    def commit(self, info: Any) -> bool:
        """Adopt the directory of the tag. DeepSpeed calls this on every rank. Raises as ``tierckpt.adopt``."""
        self.run.save(Path(info.save_dir, info.tag))
        return True

    def restore(self, save_dir: str | os.PathLike[str]) -> str | None:
        """Restore the newest usable checkpoint to ``save_dir``; return its tag, None when there is none."""
        found = self.run.restore(save_dir)
        return found.name if found is not None else None
