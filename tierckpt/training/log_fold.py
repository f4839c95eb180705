"""``python -m tierckpt.training.log_fold``: makes a checkpoint of a gradient log, while training goes on.

Started by the agent with its order as JSON on stdin: the fields of ``agent.log_folds.Fold``, ``settings``, and
``life``, a pipe with whose other end it ends. It forks a process for each other rank of the job, which save together
as the ranks do: what the state is made of knows how it is sharded.

Invariants:
    C1  What is committed is the state of ``step`` and no other: on every rank the frame is the one that was asked for,
        and the digest in it that of the parameters that replay has led to. Else no rank writes anything.
    C2  It is an ordinary save, fenced by the epoch of the run: a kill at any instruction leaves the checkpoint before
        and its log as they were; a job that was started again meanwhile is told nothing.
    C3  Segments go when the checkpoint is committed, and none that the checkpoint it was made of leads to.

Exit code 0: it is committed on the local tier. Anything else: it is not.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save

from ..agent.log_folds import FOLD_SECONDS_MAX, Fold
from ..arena import capacity
from ..checkpoint import epoch
from ..config import Settings
from ..dcp.handoff.finish import end_with
from ..dcp.reader import TierStorageReader
from ..dcp.writer import TierStorageWriter
from ..disk.priority import BACKGROUND_NICE, lower_this_thread
from ..errors import IntegrityError, StateMismatchError, TierckptError
from ..format.layout import GRADIENTS_DIR, local_dir, parse_uri, step_name
from ..process_start import begin_command
from ..replay.log import roll_forward
from ..replay.optimizers import optimizers_in
from ..replay.redo import Conditions
from ..save import log_segments
from ..telemetry import log_to, logger
from ..types import Json
from .codec import job_state as states
from .codec.attachment import Attached
from .codec.template import state_of
from .rank_exchange import is_distributed, same_outcome
from .restore_state import restore_into, unwrapped

log = logger("checkpointer")


def fold(settings: Settings, asked: Fold) -> str:
    """Make the checkpoint ``asked`` for, on all its ranks together. Returns its URI. It stays on the local tier, as
    what a job saves between two drains does. Memory: the state, twice; where each rank has all of it, for each.

    Raises:
        IntegrityError: the log does not lead there; it is damaged, or something changed parameters beside it.
        StateMismatchError: this process cannot make the steps with the bits of training.
        CapacityError: no memory, or no room on the SSD.
        AlreadyCommittedError, CommitAbandonedError: there is a checkpoint of that step, or the job was started again.
    """
    run, rank = parse_uri(asked.run), dist.get_rank() if is_distributed() else 0
    fence = epoch.stand_in(settings.local_root, run)
    directory = local_dir(settings.local_root, run) / GRADIENTS_DIR / f"rank-{rank}"
    template = same_outcome(lambda: _template(directory, asked, asked.digests[rank]))
    state = state_of(template)
    with unwrapped():
        called = restore_into(TierStorageReader(run.child(step_name(asked.base)).uri, settings=settings), state)
    steps = same_outcome(lambda: _replay(state, directory, called, asked, asked.digests[rank]))
    writer = TierStorageWriter(run.child(step_name(asked.step)).uri, settings=settings, overwrite=False)
    writer.annotate({
        log_segments.BASE_NOTE: log_segments.DIGESTS.join(asked.digests), "folded from": step_name(asked.base),
        "steps made again": steps,
    })  # fmt: skip
    writer.keep(True)
    writer.hold_back()  # what this rank has kept before goes when the coordinator has committed
    writer.fence(fence)
    with unwrapped():
        save(states.collect(state), storage_writer=writer, no_dist=not is_distributed())
    writer.hand_over()
    log_segments.remove_before(directory, asked.base)
    log.info("%s was made of %s and %d steps of the gradient log", writer.path, step_name(asked.base), steps)
    return writer.path


def _replay(state: dict[str, Any], directory: Path, called: str, asked: Fold, digest: str) -> int:
    """Bring ``state`` to the frame ``digest`` (C1). Returns how many steps were made."""
    attached = Attached(state)
    found = roll_forward(optimizers_in(state), directory, called, last_step=asked.step, attached=attached.take)
    if (found.step, found.digest, found.verified_step) != (asked.step, digest, asked.step):
        raise IntegrityError(
            f"the gradient log below {directory} leads to step {found.step}, verified up to {found.verified_step}, and "
            f"no checkpoint of step {asked.step} is made of it",
            hint="Nothing is lost: the checkpoint before it and the log stay as they are",
        )
    attached.finish()
    return found.steps


def _template(directory: Path, asked: Fold, digest: str) -> Json:
    """What a state like that of the job is made of."""
    for place in log_segments.walk(directory, asked.called):
        if isinstance(place, str) or place.digest == digest:
            break
    else:
        place = "it is not there"
    if isinstance(place, str):
        raise IntegrityError(
            f"the gradient log below {directory} does not lead to step {asked.step}: {place}",
            hint="The job has gone another way meanwhile, or it is damaged: a restore says which",
        )
    template: Json = place.segment.owner["state"]
    here, there = Conditions.here(torch.device("cpu"), ""), Conditions(*template["conditions"])
    if different := there.differences(here):
        raise StateMismatchError(
            f"the gradient log below {directory} is not folded: {different}",
            hint="Start the agent with the Python of the job, on its node",
        )
    copies = 1 if any(one[3:] for one in template["tensors"]) else len(asked.digests)
    capacity.require(copies * asked.size_bytes, asked_bytes=copies * asked.size_bytes)
    return template


def main() -> None:
    begin_command()
    log_to(sys.stderr, "text", "info")
    order = json.loads(sys.stdin.read())
    life, settings = order.pop("life"), Settings.received(order.pop("settings"))
    lower_this_thread(BACKGROUND_NICE)
    asked = Fold(**order)
    with tempfile.TemporaryFile() as meeting:
        others = _become_ranks(len(asked.digests), f"/proc/self/fd/{meeting.fileno()}", life)
        try:
            fold(settings, asked)
        except TierckptError as error:
            sys.exit(str(error))
    if any(os.waitpid(pid, 0)[1] for pid in others):
        sys.exit("the process of another rank has failed")


def _become_ranks(world_size: int, meeting: str, life: int) -> list[int]:
    """Have one process for each rank, in one group. Returns those that rank 0 is to wait for.

    Each ends with ``life``; and when one has failed, the collectives of the others do. The only thread so far is one of
    NumPy's (OpenBLAS), which sees to forks itself.
    """
    rank, others = 0, list[int]()
    for other in range(1, world_size):
        if not (pid := os.fork()):
            rank, others = other, []
            break
        others.append(pid)
    end_with(life)
    of_job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", **{name: str(value) for name, value in of_job.items()}}
    seconds = timedelta(seconds=FOLD_SECONDS_MAX)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world_size, timeout=seconds)
    return others


if __name__ == "__main__":
    main()
