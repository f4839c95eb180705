"""A job whose multi-step saves are redo logs, and which is killed.

``python -m tests.fault.redo_log_job RUN train|restore POINT [before|after] [BUG]``: ``train`` saves step 1 as a
checkpoint and step 4 as a redo log; ``restore`` restores the newest. It is killed before or after the first call of
POINT; "-" lets it end.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from tests.fault.gradient_log_job import Job
from tierckpt import Checkpointer, EveryStep
from tierckpt.dcp.reader import TierStorageReader
from tierckpt.dcp.save_session import SaveSession
from tierckpt.replay import redo
from tierckpt.replay.multi_step import MultiStepStager
from tierckpt.replay.tree import fill
from tierckpt.training import restore_state
from tierckpt.training.every_step import redo_log, window

POINTS: dict[str, tuple[Any, str]] = {
    "pack": (redo_log, "pack"),
    "write": (SaveSession, "write"),
    "commit": (SaveSession, "commit"),
    "drain": (SaveSession, "hand_over"),
    "read": (TierStorageReader, "read_alone"),
    "replay": (redo.Redo, "fold"),
    "save": (redo_log, "fold"),
    "load": (restore_state, "restore_into"),
}
PLAIN, WINDOW, STEPS = 1, 4, 3


class Deferring(MultiStepStager):
    """As on an accelerator."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options, defers=True)


def state_of(job: Job) -> dict[str, Any]:
    return {"model": job.model, "optimizer": job.optimizer, "schedule": job.schedule, "step": job.step}


def restored(run: str) -> Job:
    job = Job()
    state = state_of(job)
    with Checkpointer(run) as checkpointer:
        job.step = checkpointer.restore(state) or 0
    assert state["step"] == job.step
    return job


def train(run: str, after_plain: Any) -> None:
    job = Job()
    job.train()
    with Checkpointer(run) as plain:
        plain.save(job.step, state_of(job)).result(60)
    after_plain()
    window.MultiStepStager = Deferring  # type: ignore[misc]
    with Checkpointer(run, every_step=EveryStep(window_steps=STEPS)) as checkpointer:
        job.train()
        saved = checkpointer.save(job.step, state_of(job))
        while not saved.done():
            job.train()
            checkpointer.step(job.step, state_of(job))
        saved.result(60)


def kill_at(point: str, when: str) -> None:
    if point == "-":
        return
    owner, name = POINTS[point]
    real = getattr(owner, name)

    def killed(*given: Any, **options: Any) -> Any:
        if when == "after":
            real(*given, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, killed)


def with_bug(name: str) -> None:
    """Seeded: what a run must not have unseen."""
    if name == "a mixed version as a checkpoint":

        def stored(tree: Any, redos: Any) -> Any:
            copies = {(number, *key): one for number, log in redos.items() for key, one in log.tensors.items()}
            return fill(tree, copies), {}

        window.stored = stored
        window.WINDOWS_DIR = "."
    real = redo.to_json
    first: list[Any] = []

    def stale(value: Any) -> Any:
        if isinstance(value, dict) and "betas" in value:
            first.append(real(value))
            return first[0]
        return real(value)

    if name == "a stale hyperparameter":
        redo.to_json = stale
    packed = redo_log.pack

    def without_a_step(log: Any, names: Any) -> Any:
        del log.steps[0]
        return packed(log, names)

    if name == "a missing step":
        redo_log.pack = without_a_step


def main() -> None:
    run, what, point, *more = sys.argv[1:]
    when, bug = more + ["before", ""][len(more) :]
    with_bug(bug)
    if what == "train":
        train(run, lambda: kill_at(point, when))
    else:
        kill_at(point, when)
        restored(run)


if __name__ == "__main__":
    main()
