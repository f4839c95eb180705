"""Accelerate: ``save_state`` and ``load_state`` with a URI.

run = TierState(accelerator, "s3://bucket/run")
run.load()
run.save(f"step-{step}")
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from ..adoption import Adoption
from ..config import Settings
from ..format.layout import step_of
from .directories import Directories


class TierState:
    """The states of one ``Accelerator``, saved as ``uri/NAME``. Every rank makes the same calls.

    Args:
        directory: where Accelerate writes; on the file system of ``local_root`` it costs no copy. Default: its
            ``project_dir``, else ``./checkpoints``. What was adopted is removed there.
    """

    def __init__(
        self,
        accelerator: Any,
        uri: str | os.PathLike[str],
        directory: str | os.PathLike[str] | None = None,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> None:
        self.accelerator = accelerator
        self.directory = Path(directory or accelerator.project_dir or "checkpoints")
        self.run = Directories(uri, settings, **overrides)

    def save(self, name: str, **options: Any) -> Adoption:
        """``accelerator.save_state`` to ``name``, adopted. ``name`` ends in the step. Raises as ``tierckpt.adopt``."""
        place = self.directory / name
        if self.accelerator.is_local_main_process:
            shutil.rmtree(place, ignore_errors=True)  # of a save that was cut short
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(place), **options)
        self.accelerator.wait_for_everyone()
        adopted = self.run.save(place)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process:
            shutil.rmtree(place, ignore_errors=True)
        return adopted

    def load(self, **options: Any) -> int | None:
        """``accelerator.load_state`` of the newest usable checkpoint; return its step, None when there is none."""
        found = self.run.restore(self.directory)
        if found is None:
            return None
        self.accelerator.load_state(str(found), **options)
        return step_of(found.name)
