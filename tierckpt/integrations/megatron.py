"""Megatron-core and NeMo: an asynchronous save is adopted when all ranks have finished it.

run = MegatronRun("s3://bucket/run")
request.add_finalize_fn(run.finalize("out/iter_0001000"))
load_dir = run.restore("out")
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import Settings
from ..disk.durable import durable_write
from ..format.layout import step_of
from .directories import Directories

TRACKER = "latest_checkpointed_iteration.txt"


class MegatronRun:
    def __init__(self, uri: str | os.PathLike[str], settings: Settings | None = None, **overrides: Any) -> None:
        self.run = Directories(uri, settings, **overrides)

    def finalize(self, directory: str | os.PathLike[str]) -> Callable[[], None]:
        """Return the function that adopts ``directory``: Megatron calls it on every rank, after its own."""

        def adopt() -> None:
            self.run.save(directory, is_written_once=False)  # --ckpt-step goes back and later steps are saved again

        return adopt

    def restore(self, into: str | os.PathLike[str]) -> str | None:
        """Restore the newest usable checkpoint, with Megatron's tracker; return ``into``, or None."""
        found = self.run.restore(into)
        if found is None:
            return None
        durable_write(Path(into, TRACKER), str(step_of(found.name)).encode())  # other ranks read it already
        return os.fspath(into)
