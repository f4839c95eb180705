"""Accelerate: ``save_state`` and ``load_state`` with a URI. Usage:

run = TierState(accelerator, "s3://bucket/run")
run.load()
run.save(f"step-{step}")
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..adoption import Adoption
from ..config import Settings
from ..disk.durable import remove_tree
from ..disk.processes import companion_path
from ..errors import ConfigError
from ..format.layout import step_of
from .directories import Directories


class TierState:
    """The states of one ``Accelerator``, saved as ``uri/NAME``. Every rank makes the same calls.

    ``directory``: Accelerate's output (default: its ``project_dir``, else ``./checkpoints``). Adopted files are removed
    there, except those of ``automatic_checkpoint_naming``, which ``total_limit`` removes.
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
        self._configuration = accelerator.project_configuration
        self._names = bool(self._configuration.automatic_checkpoint_naming)
        if self._names:
            directory = Path(accelerator.project_dir or ".", "checkpoints")
        self.directory = Path(directory or accelerator.project_dir or "checkpoints")
        self.run = Directories(uri, settings, **overrides)

    def save(self, name: str | None = None, **options: Any) -> Adoption:
        """Adopt ``accelerator.save_state`` to ``name``, which ends in the step; omit it if Accelerate names it.

        Raises ConfigError for a wrong ``name``, and as ``tierckpt.adopt``.
        """
        if (name is None) != self._names:
            raise ConfigError(
                "Accelerate names its checkpoints itself" if name else "a checkpoint of Accelerate has no name",
                hint="save(name), or automatic_checkpoint_naming=True of ProjectConfiguration and save()",
            )
        if name is not None and (step_of(name) is None or Path(name).name != name):
            raise ConfigError(f"{name!r} is not a checkpoint name", hint="Say save(f'step-{step}'): no path, a step")
        directory = self.directory / (name or f"checkpoint_{self._configuration.iteration}")
        started_mark = companion_path(self.directory.parent / directory.name, "-begun")
        if self.accelerator.is_local_main_process:
            if not self._names or started_mark.exists():
                remove_tree(directory, ignore_errors=True)  # of an interrupted save
            elif not directory.exists():  # else Accelerate refuses: it is of no save of ours
                started_mark.parent.mkdir(parents=True, exist_ok=True)
                started_mark.touch()
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(None if self._names else str(directory), **options)
        self.accelerator.wait_for_everyone()
        adopted = self.run.save(directory)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process:
            if self._names:
                started_mark.unlink(missing_ok=True)
            else:
                remove_tree(directory, ignore_errors=True)
        return adopted

    def load(self, **options: Any) -> int | None:
        """Load the newest usable checkpoint; return its step, or None."""
        found = self.run.restore(self.directory)
        if found is None:
            return None
        self.accelerator.load_state(str(found), **options)
        step = step_of(found.name)
        if self._names and step is not None:
            self._configuration.iteration = step + 1
        return step
