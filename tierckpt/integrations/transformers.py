"""transformers and TRL: what ``Trainer`` saves is adopted, and it resumes from a URI.

    callback = TierCallback("s3://bucket/run")
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(args.output_dir))

Each trial of ``hyperparameter_search`` is a run of its own, ``uri/run-N``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..config import Settings
from ..errors import ConfigError
from ..format.layout import step_of
from .directories import Directories, make_way

STATE = "trainer_state.json"


class TierCallback(TrainerCallback):  # type: ignore[misc]
    """Adopts ``Trainer``'s ``checkpoint-N`` as ``uri/checkpoint-N``, on every rank.

    Raises (in ``on_save``) as ``tierckpt.adopt``. Cost: ``save`` blocks for one read of the files.
    """

    def __init__(self, uri: str | os.PathLike[str], settings: Settings | None = None, **overrides: Any) -> None:
        self.run = Directories(uri, settings, **overrides)
        self._trials: dict[str, Directories] = {}
        self._earlier: dict[int | None, Path] = {}
        """Of an earlier training in ``output_dir``, by step: this one may write there in place."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        directories = Path(args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        self._earlier = {step_of(directory.name): directory for directory in directories}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A barrier within the step, so that no rank writes yet.
        if (directory := self._earlier.pop(state.global_step + 1, None)) is not None:
            make_way(directory)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_hyper_param_search:
            directory = _of_trial(Path(args.output_dir), name, state)
            # The next search may write to these directories, in place.
            self._run_of(directory.parent.name).save(directory, is_written_once=False)
            return
        # On SIGTERM it may save this step again.
        directory = Path(args.output_dir, name)
        self.run.save(directory, is_written_once=not getattr(args, "enable_jit_checkpoint", False))

    def _run_of(self, trial: str) -> Directories:
        if trial not in self._trials:
            self._trials[trial] = Directories(self.run.location.child(trial).uri, self.run.settings)
        return self._trials[trial]

    def resume(self, output_dir: str | os.PathLike[str]) -> str | None:
        """Restore the newest usable checkpoint, and the best one; return it for ``resume_from_checkpoint``, or None."""
        found = self.run.restore(output_dir)
        if found is None:
            return None
        state = found / STATE
        best = json.loads(state.read_text()).get("best_model_checkpoint") if state.exists() else None
        if best is not None and (name := Path(best).name) != found.name:
            self.run.restore_named(name, output_dir)
        return str(found)


def _of_trial(output_dir: Path, name: str, state: Any) -> Path:
    """Return ``name`` of the current trial of a search, found by its ``trainer_state.json``. Raises ConfigError."""
    for directory in sorted(output_dir.glob(f"*/{name}")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if _identity(json.loads((directory / STATE).read_text())) == _identity(vars(state)):
                return directory
    raise ConfigError(
        f"no {name} of this trial is below {output_dir}",
        hint="hyperparameter_search writes to output_dir/run-N, which every rank that saves must see",
    )


def _identity(state: Mapping[str, Any]) -> str:
    """As text: a loss may be NaN."""
    return json.dumps([state["global_step"], state["trial_params"], state["log_history"]], sort_keys=True, default=str)
