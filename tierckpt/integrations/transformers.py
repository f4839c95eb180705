"""transformers and TRL: what ``Trainer`` saves is adopted, and it resumes from a URI.

    callback = TierCallback("s3://bucket/run")
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(args.output_dir))

``output_dir`` on the file system of ``local_root`` costs no copy. ``save_total_limit`` goes on removing directories
there: what is not drained stays on the local tier. On shared storage nothing is removed: ``tierckpt prune`` does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..config import Settings
from ..format.layout import step_of
from .directories import Directories, make_way

STATE = "trainer_state.json"


class TierCallback(TrainerCallback):  # type: ignore[misc]
    """Adopts each ``checkpoint-N`` that ``Trainer`` writes as ``uri/checkpoint-N``, on every rank of the job.

    Raises (in ``on_save``): as ``tierckpt.adopt``. Cost: ``save`` is blocked for one read of what was written.
    """

    def __init__(self, uri: str | os.PathLike[str], settings: Settings | None = None, **overrides: Any) -> None:
        self.run = Directories(uri, settings, **overrides)
        self._left: dict[int | None, Path] = {}
        """What an earlier training has left in ``output_dir``, by step: this one may write there again, in place."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        places = Path(args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        self._left = {step_of(place.name): place for place in places}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Ranks meet within the step, so that none of them writes yet.
        if (place := self._left.pop(state.global_step + 1, None)) is not None:
            make_way(place)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        place = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        # On SIGTERM it may save this step again.
        self.run.save(place, is_written_once=not getattr(args, "enable_jit_checkpoint", False))

    def resume(self, output_dir: str | os.PathLike[str]) -> str | None:
        """Restore the newest usable checkpoint to ``output_dir``; return it for ``resume_from_checkpoint``, or None.

        With it comes the best one that its state names, for ``load_best_model_at_end``: without its directory
        ``Trainer`` would end with the last model.
        """
        found = self.run.restore(output_dir)
        if found is None:
            return None
        state = found / STATE
        best = json.loads(state.read_text()).get("best_model_checkpoint") if state.exists() else None
        if best is not None and (name := Path(best).name) != found.name:
            self.run.restore_named(name, output_dir)
        return str(found)
