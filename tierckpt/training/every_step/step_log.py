"""The gradient log of a Checkpointer: each step between two checkpoints, recoverable (``replay.log``).

    <run>/.tierckpt-gradients/rank-N/    on the local tier, and of its bytes; one log for each rank. The agents of other
                                         nodes copy it (``replication.log_copies``), and nobody waits for them

Invariants:
    G1  A step that is durable on every rank is not lost. A checkpoint is a place in the log, noted when its state is
        taken, with a multi-step save at the last step of its window: frames follow it whether it is committed or not,
        and until it is, the one before leads to all of them.
        Segments go when the two newest committed checkpoints need them no more.
    G2  All ranks go to the same step, of the same history. A segment names the job that wrote it, by another name
        behind each restore, and its branch (checkpoint/branches.py); ranks compare what they have from the checkpoint
        on, job by job, and stop where they differ, or where the run has gone back to an older step since. A rank that
        falls short of that step (damage, other parameters than training had) takes all back to the checkpoint, and
        from there to the step that it reaches.
    G3  Of a step everything is given back, or nothing: parameters and optimizer state by replay, the rest as the step
        left it (``codec.attachment``).
    G5  Another writer of the run (a second Checkpointer, ``dcp.save``, ``adopt``) hides no step: where the newest
        checkpoint is none that the log leads on from, and older than the log's end, the log counts from its own base.
        Retention keeps that (``checkpoint/prune``).
    G4  What a restore of a certain step gave up goes with the first frame behind it. Copies on other nodes go when
        these hear of that; one that does not, and outlives all others, leads on from the checkpoint that was gone back
        to, and from none that is saved afterwards: so the first step saves.
    G6  A log that has ended, unless its disk is to blame, is followed by a checkpoint of the next step, which begins
        another. Where logs end as soon as they begin (a loop that edits weights in each step), after 2, 4, 8, ...
        steps. With several ranks by the next checkpoint of the interval: a save is collective, and only one rank may
        know.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...cache.space import has_room, room_bytes
from ...checkpoint.branches import NOTE, Branch
from ...checkpoint.branches import parse as parse_branch
from ...client import get_client
from ...config import Settings
from ...errors import CapacityError, ConfigError, IntegrityError, TierckptError
from ...format.layout import GRADIENTS_DIR, Location, local_dir, step_of
from ...format.manifest import BASE_NOTE
from ...quantities import human_bytes
from ...replay.link import Link
from ...replay.log import GradientLog, Recovered, layouts_of, roll_forward
from ...replay.optimizers import check_replayable, optimizers_in
from ...replication.log_copies import bring_log, copies_of
from ...resources import exhausted
from ...save import log_segments
from ...telemetry import logger
from ..codec.attachment import Attached, Attachments, Place
from ..rank_exchange import all_gather, is_distributed
from ..saves import Notes, SaveRecord

log = logger("checkpointer")

BASES_KEPT = 2
"""Checkpoints that lead to the newest step: should the newest be damaged, the one before does."""
PATIENCE_STEPS_MAX = 64
_ASKED = re.compile(r"(\d+) (steps?|ms)")

Span = tuple[str, int, int]
"""What a segment holds: the job that wrote it, the step that it begins after, its last step."""


def parse(asked: bool | str) -> tuple[int, float] | None:
    """Return how many steps, or seconds, are made durable together; None when nothing is logged. Raises ConfigError."""
    if isinstance(asked, bool):
        return (1, 0.0) if asked else None
    match = _ASKED.fullmatch(asked) if isinstance(asked, str) else None
    if match is None or int(match[1]) < 1:
        raise ConfigError(
            f"gradient_log is {asked!r}", hint='Write True (each step is durable), "10 steps" or "500 ms", or False'
        )
    return (1, int(match[1]) / 1e3) if match[2] == "ms" else (int(match[1]), 0.0)


@dataclass(frozen=True, slots=True)
class _Chain:
    """What a rank has behind a checkpoint."""

    spans: Sequence[Span] = ()
    ended: str = ""

    def last(self, step: int) -> int:
        """The newest step; ``step``, that of the checkpoint, where there is none."""
        return self.spans[-1][2] if self.spans else step


def agreed_step(chains: Sequence[Sequence[Span]]) -> int | None:
    """Return the newest step that all ranks have in one history, None for none (G2)."""
    newest = None
    for spans in zip(*chains, strict=False):
        if len({(job, begin) for job, begin, _ in spans}) > 1:
            break
        newest = min(last for _, _, last in spans)
        if len({last for _, _, last in spans}) > 1:
            break
    return newest


class StepLog:
    """Logs the steps of one rank, and goes through them on a restore. Without ``asked`` it does nothing.

    Args:
        asked: as ``Checkpointer(gradient_log=...)``.
        job: the same on all ranks, and of no other job.

    Raises:
        ConfigError: ``asked`` says nothing that can be done.
    """

    def __init__(self, asked: bool | str, location: Location, settings: Settings, job: str) -> None:
        every = parse(asked)
        self.is_on = every is not None
        self._every_steps, self._every_seconds = every or (1, 0.0)
        self._settings = settings
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
        self._owner: dict[str, Any] = {"job": job, "rank": rank, "world_size": world_size}
        self._share = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / world_size
        self._run, self._rank = location, rank
        self._directory = local_dir(settings.local_root, location) / GRADIENTS_DIR / f"rank-{rank}"
        self._bases: deque[int] = deque(maxlen=BASES_KEPT)
        self._checkpoint_bytes = 0
        self._log: GradientLog | None = None
        self._untraced: set[Place] = set()
        self._attachments = Attachments({}, self._untraced)
        self._named = 0
        self._branch: Branch | None = None
        self._based_at, self._patience, self._has_ended = 0, 1, False
        self._has_base = self.has_gone_back = False
        """True from when a restore went back until the next save. What is logged before that is committed could not be
        restored: a restart would take what was given up (branches.py, B1)."""
        self._beside = -1
        """The newest checkpoint, where that is none of the log's; -1 where it is."""

    @functools.cached_property
    def link(self) -> Link:
        """What copies gradients, and parts of windows."""
        return Link()

    def new_base(self) -> str:
        """Return what the log is to call the checkpoint of now; '' without a log. On all ranks together."""
        self._named += 1
        return f"{self._owner['job']}-{self._named}" if self.is_on else ""

    def notes(self, record: SaveRecord, branch: Branch, *, is_of_now: bool) -> Notes:
        """Return what the manifest of ``record`` says. ``is_of_now``: its state is that of now."""
        self._owner[NOTE] = branch.encode()
        if is_of_now:
            record.base = self.new_base()
        return {NOTE: branch.encode(), **record.notes, **({BASE_NOTE: record.base} if record.base else {})}

    @property
    def needs_base(self) -> bool:
        """True until a first checkpoint: nothing can be logged before. And from when a restore went back until the next
        one: a copy of what was given up, on a node that was cut off, leads on from none of a new name (G4). And, in a
        job of one rank, when the log has ended (G6). The same on all ranks."""
        return self.is_on and (not self._has_base or self.has_gone_back or self._has_ended)

    def stepped(self, step: int, state: Mapping[str, Any]) -> None:
        """Log ``step``, once all that belongs to it is done. What cannot be logged ends the log.

        Raises:
            ConfigError: before the first checkpoint: the state has an optimizer that cannot be replayed, or none.
        """
        if self.is_on and self._log is None:
            _check(optimizers_in(state))
        if self._log is None:
            return
        if not _are_same(self._log.optimizers, optimizers_in(state)):
            self._log.fail("the optimizers of the state are others than at the last checkpoint")
        try:
            self._log.end_of_step(step, lambda: self._attachments.encode(state))
        except Exception as error:
            self._log.fail(f"what belongs to the step cannot be logged: {error}")
        self._has_ended = not is_distributed() and self._log.needs_base and self._is_patient(step)

    def _is_patient(self, step: int) -> bool:
        """True when a checkpoint is to be made for another log: at once, unless logs end as soon as they begin."""
        steps = step - self._based_at
        if steps < self._patience:
            return False
        self._patience = min(2 * self._patience, PATIENCE_STEPS_MAX) if steps < 2 * self._patience else 1
        return True

    def based(self, base: str, step: int, state: Mapping[str, Any], failure: BaseException | None = None) -> None:
        """The state of now, that of ``step``, is on its way to a checkpoint, which is called ``base``; or it failed."""
        if not self.is_on or failure is not None:
            return
        self._has_base, self.has_gone_back, self._has_ended = True, False, False
        self._based_at = step
        if self._log is None or self._log.failure or not _are_same(self._log.optimizers, optimizers_in(state)):
            self._begin(state, base, step=step)
            return
        self._attachments.rebase(state)
        with self._ends_at(step):
            self._log.begin(base, step=step)

    def committed(self, step: int, size_bytes: int) -> None:
        """The checkpoint of ``step``, of ``size_bytes`` on all nodes, is on the local tier. Any thread."""
        if not self.is_on:
            return
        self._checkpoint_bytes = int(size_bytes * self._share)
        self._bases.append(step)
        try:
            log_segments.remove_before(self._directory, self._bases[0])
        except OSError as error:
            log.warning("the gradient log below %s is not shortened: %s", self._directory, error)

    def base_of_newest(
        self, state: Mapping[str, Any], newest_base: Callable[[], tuple[int, Branch | None, str, int] | None]
    ) -> int | None:
        """Return the step of the checkpoint to restore where that is not the newest: another writer has saved that,
        and the log leads further, from this one (G5). On all ranks together."""
        self._beside = -1
        if not self.is_on or (found := newest_base()) is None:
            return None
        newest, self._branch, base, step = found
        if step == newest:
            return None
        chains: list[_Chain] = all_gather(self._longest_chain(base, step, optimizers_in(state)))
        last = agreed_step([one.spans for one in chains])
        if last is None or last <= newest:
            return None
        log.info("step %d was saved beside the gradient log, which leads from step %d to %d", newest, step, last)
        self._beside = newest
        return step

    def recover(
        self,
        base: str,
        step: int,
        state: dict[str, Any],
        restore: Callable[[int | None], tuple[str, str] | None],
        *,
        branch: Branch,
        is_newest: bool,
    ) -> tuple[int, int]:
        """Bring ``state``, which is that of the checkpoint ``base``, to the newest step that all ranks have, and go on
        logging there. Returns that step, and how many steps were made again. On all ranks together.

        Args:
            restore: restores the checkpoint of a step, the newest for None, and says which.
            branch: the branch that this process continues, or begins.
            is_newest: False: this very checkpoint is wanted. What the log has behind it is given up.

        Raises:
            ConfigError: the state has an optimizer that cannot be replayed, or none.
        """
        if not self.is_on:
            return step, 0
        self._branch = branch
        self._owner[NOTE] = branch.encode()
        self._owner["job"] = self.new_base()  # what was logged in this life behind ``step`` is another history (G2)
        with self._ends_at(step):
            self._log_of(state)
        self._has_base = True
        self.has_gone_back = not is_newest
        found = Recovered(-1, 0)
        if is_newest:
            found = self._newest_of_all(base, step, state, functools.partial(restore, step))
            if (found.step if found.steps else step) < self._beside:  # it is damaged where it led further
                try:
                    newest = restore(None)
                    if newest is not None and (at := step_of(newest[0])) is not None:
                        base, step, found = newest[1], at, Recovered(-1, 0)
                except TierckptError as error:
                    log.warning("step %d, saved beside the gradient log, cannot be restored: %s", self._beside, error)
                    restore(step)
                    found = self._newest_of_all(base, step, state, functools.partial(restore, step))
        self._bases.append(step)
        self._based_at = found.step if found.steps else step
        self._begin(state, base, found, step=None if found.steps else step)
        return (found.step if found.steps else step), found.steps

    def _newest_of_all(self, base: str, step: int, state: dict[str, Any], restore: Callable[[], object]) -> Recovered:
        chains: list[_Chain] = all_gather(self._longest_chain(base, step, optimizers_in(state)))
        last = agreed_step([one.spans for one in chains])
        ended = {rank: one.ended for rank, one in enumerate(chains) if one.ended}
        found = Recovered(-1, 0)
        while last is not None:
            found = self._roll_forward(base, state, last)
            reached: list[tuple[int, str]] = all_gather((found.step, found.ended))
            if all(at == last for at, _ in reached):
                break
            ended |= {rank: why for rank, (at, why) in enumerate(reached) if at < last}
            lowest = min(at for at, _ in reached)
            last, found = lowest if lowest >= 0 else None, Recovered(-1, 0)
            restore()
        why = "; ".join(f"rank {rank}: {reason}" for rank, reason in ended.items())
        log.log(
            WARNING if ended else INFO,
            "step %d is the checkpoint of step %d and %d steps of the gradient log%s%s",
            found.step if found.steps else step, step, found.steps,
            f", parameters verified at step {found.verified_step}" if found.verified_step >= 0 else "",
            f", which ends there: {why}" if why else "",
        )  # fmt: skip
        return found

    def close(self) -> None:
        """Make durable what was logged, and log no more."""
        self._end_log()
        if "link" in vars(self):
            self.link.close()

    def _end_log(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = None

    @contextlib.contextmanager
    def _ends_at(self, step: int) -> Iterator[None]:
        """Have no log until the next checkpoint where the system gives none its thread, memory or files."""
        try:
            yield
        except (CapacityError, MemoryError, OSError) as error:
            log.warning("no step after %d is logged, until the next checkpoint: %s", step, exhausted(error) or error)
            with contextlib.suppress(CapacityError, MemoryError, OSError):
                self._end_log()
            self._log = None

    def _begin(
        self, state: Mapping[str, Any], base: str, found: Recovered | None = None, *, step: int | None = None
    ) -> None:
        with self._ends_at(step if step is not None else found.step if found is not None else -1):
            begun = self._log_of(state)
            begun.begin(base, found, step=step, check=self._attachments.check(state))

    def _log_of(self, state: Mapping[str, Any]) -> GradientLog:
        optimizers = optimizers_in(state)
        _check(optimizers)
        if self._log is None or not _are_same(self._log.optimizers, optimizers):
            self._end_log()
            self._log = GradientLog(
                optimizers, self._directory, every_steps=self._every_steps, every_seconds=self._every_seconds,
                link=self.link, reserve=self._reserve,
            )  # fmt: skip
        self._log.owner = dict(self._owner)
        self._attachments = Attachments(state, self._untraced)
        return self._log

    def _reserve(self, size_bytes: int) -> None:
        """Leave room for the next checkpoint, which makes the log shorter (P7)."""
        needed = size_bytes + self._checkpoint_bytes
        if room_bytes(self._settings) < needed and not has_room(self._settings, needed, self._directory):
            raise CapacityError(
                f"the local tier has no room for a frame of {human_bytes(size_bytes)} beside the next checkpoint",
                hint="Save more often, or give local_root a larger disk",
            )

    def _longest_chain(self, base: str, step: int, optimizers: Mapping[str, torch.optim.Optimizer]) -> _Chain:
        """What this rank has behind ``base``, the checkpoint of ``step``. Where a copy of its log, here or on another
        node, leads further than its own, it is its own from now on."""
        own, client = self._chain(self._directory, base, optimizers), get_client(self._settings)
        try:
            if client.mover.cluster is not None:
                at = own.last(step)
                client.run(bring_log(self._settings, client.mover.cluster, self._run, self._rank, base, at))
        except (TierckptError, OSError, TimeoutError) as error:
            log.warning("the gradient log of rank %d on other nodes cannot be had: %s", self._rank, error)
        copies = [(self._chain(copy, base, optimizers), copy) for copy in copies_of(self._directory)]
        best, copy = max(copies, key=lambda found: found[0].last(step), default=(own, self._directory))
        if best.last(step) <= own.last(step):
            return own
        try:
            log_segments.adopt(copy, self._directory)
        except (TierckptError, OSError) as error:
            log.warning("the copy of a gradient log at %s cannot be used: %s", copy, error)
        return self._chain(self._directory, base, optimizers)

    def _chain(self, directory: Path, base: str, optimizers: Mapping[str, torch.optim.Optimizer]) -> _Chain:
        spans, layouts = list[Span](), layouts_of(optimizers)
        try:
            for place in log_segments.walk(directory, base):
                if isinstance(place, str):
                    return _Chain(spans, place)
                owner, segment = place.segment.owner, place.segment
                if owner["world_size"] != self._owner["world_size"]:
                    return _Chain((), f"a job of {owner['world_size']} ranks has written it")
                written = parse_branch(owner.get(NOTE))
                if self._branch and written and not self._branch.holds(written, place.number):
                    return _Chain(spans, "the job has gone back to an older step since")
                if not place.layouts.items() <= layouts.items():
                    return _Chain((), "it was written with other optimizers, parameters or shards")
                if spans and spans[-1][:2] == (owner["job"], segment.step):
                    spans.pop()
                spans.append((owner["job"], segment.step, place.number))
        except (TierckptError, OSError) as error:
            return _Chain(spans, str(error))
        except (KeyError, TypeError) as error:  # other nodes give what they like
            return _Chain(spans, f"a header is none that tierckpt writes: {error!r}")
        return _Chain(spans)

    def _roll_forward(self, base: str, state: dict[str, Any], last: int) -> Recovered:
        attached = Attached(state)
        try:
            found = roll_forward(optimizers_in(state), self._directory, base, last_step=last, attached=attached.take)
            attached.finish()
        except Exception as error:  # the ranks go back together
            verified = error.context.get("verified_step", -1) if isinstance(error, IntegrityError) else -1
            return Recovered(verified, 0, ended=f"{type(error).__name__}: {error}")
        return found


def _check(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    if not optimizers:
        raise ConfigError("gradient_log is given, and the state has no optimizer", hint="Pass it beside its module")
    for optimizer in optimizers.values():
        check_replayable(optimizer)


def _are_same(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)
