"""``python -m tierckpt.training.log_fold``: makes a checkpoint of a gradient log, while training goes on.

Started by the agent with its order as JSON on stdin: the fields of ``agent.log_folds.Fold``, ``settings``, and
``life``, a pipe with whose other end it ends.

Invariants:
    C1  What is committed is the state of ``step`` and no other: the frame is the one that was asked for, and the digest
        in it that of the parameters that replay has led to.
    C2  It is an ordinary save, fenced by the epoch of the run: a kill at any instruction leaves the checkpoint before
        and its log as they were; a job that was started again meanwhile is told nothing.
    C3  Segments go when the checkpoint is committed, and none that the checkpoint it was made of leads to.

Exit code 0: it is committed on the local tier. Anything else: it is not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from ..agent.log_folds import Fold
from ..arena import capacity
from ..checkpoint import epoch
from ..config import Settings
from ..dcp.handoff.finish import end_with
from ..dcp.reader import TierStorageReader
from ..dcp.writer import TierStorageWriter
from ..disk.priority import BACKGROUND_NICE, lower_this_thread
from ..errors import IntegrityError, StateMismatchError, TierckptError
from ..format.layout import GRADIENTS_DIR, local_dir, parse_uri, step_name
from ..replay.log import roll_forward
from ..replay.redo import Conditions
from ..save import segments
from ..telemetry import log_to, logger
from .codec import state as states
from .codec.attachment import Attached
from .codec.template import state_of
from .restore import restore_into, unwrapped

log = logger("checkpointer")


def fold(settings: Settings, asked: Fold) -> str:
    """Make the checkpoint ``asked`` for. Returns its URI. It stays on the local tier, as what a job saves between two
    drains does. Memory: the state, twice.

    Raises:
        IntegrityError: the log does not lead there; it is damaged, or something changed parameters beside it.
        StateMismatchError: this process cannot make the steps with the bits of training.
        CapacityError: no memory, or no room on the SSD.
        AlreadyCommittedError, CommitAbandonedError: there is a checkpoint of that step, or the job was started again.
    """
    run = parse_uri(asked.run)
    fence = epoch.stand_in(settings.local_root, run)
    directory = local_dir(settings.local_root, run) / GRADIENTS_DIR / "rank-0"
    capacity.require(asked.size_bytes, asked_bytes=asked.size_bytes)
    state = _state(directory, asked)
    with unwrapped():
        called = restore_into(TierStorageReader(run.child(step_name(asked.base)).uri, settings=settings), state)
    attached = Attached(state)
    optimizers = {name: one for name, one in state.items() if isinstance(one, torch.optim.Optimizer)}
    found = roll_forward(optimizers, directory, called, last_step=asked.step, attached=attached.take)
    if (found.step, found.digest, found.verified_step) != (asked.step, asked.digest, asked.step):
        raise IntegrityError(
            f"the gradient log below {directory} leads to step {found.step}, verified up to {found.verified_step}, and "
            f"no checkpoint of step {asked.step} is made of it",
            hint="Nothing is lost: the checkpoint before it and the log stay as they are",
        )
    attached.finish()
    writer = TierStorageWriter(run.child(step_name(asked.step)).uri, settings=settings, overwrite=False)
    writer.annotate({
        segments.BASE_NOTE: asked.digest, "folded from": step_name(asked.base), "steps made again": found.steps,
    })  # fmt: skip
    writer.keep(True)
    writer.fence(fence)
    with unwrapped():
        save(states.collect(state), storage_writer=writer, no_dist=True)
    segments.remove_before(directory, asked.base)
    log.info("%s was made of %s and %d steps of the gradient log", writer.path, step_name(asked.base), found.steps)
    return writer.path


def _state(directory: Path, asked: Fold) -> dict[str, Any]:
    """A state like that of the job, to be filled."""
    for place in segments.walk(directory, asked.called):
        if isinstance(place, str) or place.digest == asked.digest:
            break
    else:
        place = "it is not there"
    if isinstance(place, str):
        raise IntegrityError(
            f"the gradient log below {directory} does not lead to step {asked.step}: {place}",
            hint="The job has gone another way meanwhile, or it is damaged: a restore says which",
        )
    template = place.segment.owner["state"]
    here, there = Conditions.here(torch.device("cpu"), ""), Conditions(*template["conditions"])
    if different := there.differences(here):
        raise StateMismatchError(
            f"the gradient log below {directory} is not folded: {different}",
            hint="Start the agent with the Python of the job, on its node",
        )
    return state_of(template)


def main() -> None:
    log_to(sys.stderr, "text", "info")
    order = json.loads(sys.stdin.read())
    end_with(order.pop("life"))
    lower_this_thread(BACKGROUND_NICE)
    settings = Settings.received(order.pop("settings"))
    try:
        fold(settings, Fold(**order))
    except TierckptError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
