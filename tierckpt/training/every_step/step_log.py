"""The gradient log of a Checkpointer: makes each step between two checkpoints recoverable.

G1  A step that is durable on every rank is not lost. A checkpoint becomes a base of the log when its state is captured;
    until it is committed, the previous base leads to the same frames. The two newest committed checkpoints keep their
    segments.
G2  All ranks restore the same step of the same history. A segment names its job, new after each restore, and its
    branch: ranks stop at a difference, or at a later return to an older step. If a rank fails to reach the agreed step,
    all restore the checkpoint, and replay to the step it reached.
G3  A step is restored completely or not at all: parameters and optimizer state by replay, the rest from the attachment.
G4  Steps abandoned by a restore are removed with the next frame. A copy on another node may survive: so the first step
    saves.
G5  Other writers hide no step: if their newest checkpoint is not a base of the log, and older than its end, the log is
    applied to its own base, which retention keeps.
G6  After the end of a log, unless its disk failed, the next step is saved and begins another; if logs end immediately,
    after 2, 4, 8, ... steps. With several ranks the next checkpoint does.
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
from ..codec.attachment import Attached, Attachments, TensorKey
from ..rank_exchange import all_gather, is_distributed
from ..saves import Notes, SaveRecord

log = logger("checkpointer")

BASES_KEPT = 2
RESTART_STEPS_MAX = 64
_ASKED = re.compile(r"(\d+) (steps?|ms)")

Span = tuple[str, int, int]
"""A segment: its job, the step before its first frame, its last step."""


def parse(gradient_log: bool | str) -> tuple[int, float] | None:
    """Return the steps, or seconds, per fdatasync. Raises ConfigError."""
    if isinstance(gradient_log, bool):
        return (1, 0.0) if gradient_log else None
    match = _ASKED.fullmatch(gradient_log) if isinstance(gradient_log, str) else None
    if match is None or int(match[1]) < 1:
        raise ConfigError(
            f"gradient_log is {gradient_log!r}",
            hint='Write True (each step is durable), "10 steps" or "500 ms", or False',
        )
    return (1, int(match[1]) / 1e3) if match[2] == "ms" else (int(match[1]), 0.0)


@dataclass(frozen=True, slots=True)
class _Chain:
    spans: Sequence[Span] = ()
    ended: str = ""

    def last(self, step: int) -> int:
        return self.spans[-1][2] if self.spans else step


def agreed_step(chains: Sequence[Sequence[Span]]) -> int | None:
    """Return the newest step that all ranks have in one history (G2)."""
    newest = None
    for spans in zip(*chains, strict=False):
        if len({(job, begin) for job, begin, _ in spans}) > 1:
            break
        newest = min(last for _, _, last in spans)
        if len({last for _, _, last in spans}) > 1:
            break
    return newest


class StepLog:
    """Logs the steps of one rank, and applies them on a restore. Without ``gradient_log`` does nothing.

    ``job``: a unique name, the same on all ranks.
    """

    def __init__(self, gradient_log: bool | str, location: Location, settings: Settings, job: str) -> None:
        every = parse(gradient_log)
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
        self._untraced: set[TensorKey] = set()
        self._attachments = Attachments({}, self._untraced)
        self._named = 0
        self._branch: Branch | None = None
        self._based_at, self._restart_steps, self._has_ended = 0, 1, False
        self._has_base = self.has_branched = False
        """Frames logged after the restore of an older step wait for a committed save: a restart would replay the
        abandoned steps (branches.py, B1)."""
        self._foreign_step = -1

    @functools.cached_property
    def link(self) -> Link:
        return Link()

    def new_base(self) -> str:
        """Return a new name for the current state; '' without a log. Collective."""
        self._named += 1
        return f"{self._owner['job']}-{self._named}" if self.is_on else ""

    def notes(self, record: SaveRecord, branch: Branch, *, is_of_now: bool) -> Notes:
        self._owner[NOTE] = branch.encode()
        if is_of_now:
            record.base = self.new_base()
        return {NOTE: branch.encode(), **record.notes, **({BASE_NOTE: record.base} if record.base else {})}

    @property
    def needs_base(self) -> bool:
        """True if the next step must be saved, the same on all ranks (G4, G6)."""
        return self.is_on and (not self._has_base or self.has_branched or self._has_ended)

    def stepped(self, step: int, state: Mapping[str, Any]) -> None:
        """Log ``step``, at its end. Any failure to log ends the log.

        Raises ConfigError before the first checkpoint: no optimizer, or one that cannot be replayed.
        """
        if self.is_on and self._log is None:
            _check(optimizers_in(state))
        if self._log is None:
            return
        if not _are_same(self._log.optimizers, optimizers_in(state)):
            self._log.fail("the state has other optimizers than at the last checkpoint")
        try:
            self._log.end_of_step(step, lambda: self._attachments.encode(state))
        except Exception as error:
            self._log.fail(f"the data of the step cannot be logged: {error}")
        self._has_ended = not is_distributed() and self._log.needs_base and self._may_restart(step)

    def _may_restart(self, step: int) -> bool:
        steps = step - self._based_at
        if steps < self._restart_steps:
            return False
        self._restart_steps = min(2 * self._restart_steps, RESTART_STEPS_MAX) if steps < 2 * self._restart_steps else 1
        return True

    def based(self, base: str, step: int, state: Mapping[str, Any], failure: BaseException | None = None) -> None:
        """Make the current state a base of the log: the checkpoint ``base``, unless that failed."""
        if not self.is_on or failure is not None:
            return
        self._has_base, self.has_branched, self._has_ended = True, False, False
        self._based_at = step
        if self._log is None or self._log.failure or not _are_same(self._log.optimizers, optimizers_in(state)):
            self._begin(state, base, step=step)
            return
        self._attachments.rebase(state)
        with self._ends_at(step):
            self._log.begin(base, step=step)

    def committed(self, step: int, size_bytes: int) -> None:
        """Remove segments after the commit of ``step`` (``size_bytes`` on all nodes). Any thread."""
        if not self.is_on:
            return
        self._checkpoint_bytes = int(size_bytes * self._share)
        self._bases.append(step)
        try:
            log_segments.remove_before(self._directory, self._bases[0])
        except OSError as error:
            log.warning("the gradient log under %s is not shortened: %s", self._directory, error)

    def base_of_newest(
        self, state: Mapping[str, Any], newest_base: Callable[[], tuple[int, Branch | None, str, int] | None]
    ) -> int | None:
        """Return the step of the log's base if the log reaches beyond another writer's checkpoint (G5). Collective."""
        self._foreign_step = -1
        if not self.is_on or (found := newest_base()) is None:
            return None
        newest, self._branch, base, step = found
        if step == newest:
            return None
        chains: list[_Chain] = all_gather(self._longest_chain(base, step, optimizers_in(state)))
        last = agreed_step([one.spans for one in chains])
        if last is None or last <= newest:
            return None
        log.info("step %d was saved outside the gradient log, which leads from step %d to %d", newest, step, last)
        self._foreign_step = newest
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
        """Bring ``state``, of the checkpoint ``base``, to the newest step that all ranks have, and continue the log.

        Returns that step, and the number of steps applied. Collective.

        Args:
            restore: restores a step, the newest for None, and returns URI and base.
            is_newest: False: abandon the steps after this checkpoint.

        Raises ConfigError as ``stepped``.
        """
        if not self.is_on:
            return step, 0
        self._branch = branch
        self._owner[NOTE] = branch.encode()
        self._owner["job"] = self.new_base()  # another history (G2)
        with self._ends_at(step):
            self._log_of(state)
        self._has_base = True
        self.has_branched = not is_newest
        found = Recovered(-1, 0)
        if is_newest:
            found = self._newest_of_all(base, step, state, functools.partial(restore, step))
            if (found.step if found.steps else step) < self._foreign_step:
                try:
                    newest = restore(None)
                    if newest is not None and (end_step := step_of(newest[0])) is not None:
                        base, step, found = newest[1], end_step, Recovered(-1, 0)
                except TierckptError as error:
                    log.warning(
                        "step %d, saved outside the gradient log, cannot be restored: %s", self._foreign_step, error
                    )
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
            reached: list[tuple[int, str]] = all_gather((found.step, found.end_reason))
            if all(end_step == last for end_step, _ in reached):
                break
            ended |= {rank: why for rank, (end_step, why) in enumerate(reached) if end_step < last}
            lowest = min(end_step for end_step, _ in reached)
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
        self._end_log()
        if "link" in vars(self):
            self.link.close()

    def _end_log(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = None

    @contextlib.contextmanager
    def _ends_at(self, step: int) -> Iterator[None]:
        try:
            yield
        except (CapacityError, MemoryError, OSError) as error:
            log.warning("no step after %d is logged until the next checkpoint: %s", step, exhausted(error) or error)
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
        """Keep room on the local tier for the next checkpoint (P7)."""
        needed = size_bytes + self._checkpoint_bytes
        if room_bytes(self._settings) < needed and not has_room(self._settings, needed, self._directory):
            raise CapacityError(
                f"the local tier has no room for a frame of {human_bytes(size_bytes)} and the next checkpoint",
                hint="Save more often, or use a larger disk for local_root",
            )

    def _longest_chain(self, base: str, step: int, optimizers: Mapping[str, torch.optim.Optimizer]) -> _Chain:
        """Return this rank's log, or a copy on any node that reaches further."""
        own, client = self._chain(self._directory, base, optimizers), get_client(self._settings)
        try:
            if client.mover.peers is not None:
                end_step = own.last(step)
                client.run(bring_log(self._settings, client.mover.peers, self._run, self._rank, base, end_step))
        except (TierckptError, OSError, TimeoutError) as error:
            log.warning("cannot fetch the gradient log of rank %d from other nodes: %s", self._rank, error)
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
            for position in log_segments.iterate_frames(directory, base):
                if isinstance(position, str):
                    return _Chain(spans, position)
                owner, segment = position.segment.owner, position.segment
                if owner["world_size"] != self._owner["world_size"]:
                    return _Chain((), f"it was written by a job of {owner['world_size']} ranks")
                written = parse_branch(owner.get(NOTE))
                if self._branch and written and not self._branch.holds(written, position.number):
                    return _Chain(spans, "the job returned to an older step later")
                if not position.layouts.items() <= layouts.items():
                    return _Chain((), "it was written with other optimizers, parameters or shards")
                if spans and spans[-1][:2] == (owner["job"], segment.step):
                    spans.pop()
                spans.append((owner["job"], segment.step, position.number))
        except (TierckptError, OSError) as error:
            return _Chain(spans, str(error))
        except (KeyError, TypeError) as error:  # a copy may have any fields
            return _Chain(spans, f"it has an invalid header: {error!r}")
        return _Chain(spans)

    def _roll_forward(self, base: str, state: dict[str, Any], last: int) -> Recovered:
        attached = Attached(state)
        try:
            found = roll_forward(
                optimizers_in(state), self._directory, base, last_step=last, on_attachment=attached.take
            )
            attached.finish()
        except Exception as error:  # all ranks restore the checkpoint again
            verified = error.context.get("verified_step", -1) if isinstance(error, IntegrityError) else -1
            return Recovered(verified, 0, end_reason=f"{type(error).__name__}: {error}")
        return found


def _check(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    if not optimizers:
        raise ConfigError("gradient_log is set, but the state has no optimizer", hint="Pass it next to its module")
    for optimizer in optimizers.values():
        check_replayable(optimizer)


def _are_same(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)
