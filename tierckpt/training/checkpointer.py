"""Checkpointer: the whole of tierckpt for a training loop in ten lines.

One save, with several ranks:
    on the caller's thread   plan (collectives; next to nothing when the structure is as before), stage what the plan
                             wants of this rank (copy to host memory), then return
    in the background        write shards; exchange results through the rendezvous store (no collective);
                             the coordinator commits on the local tier; every rank learns the outcome
    in the mover             drain, shared commit, retention
Saves are written one after another; up to ``checkpoints_in_flight_max`` of them are staged and not yet written.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.utils import _DistWrapper

from ..client import Client, get_client
from ..config import Settings
from ..dcp.planner import TierSavePlanner
from ..dcp.reader import TierStorageReader
from ..dcp.stager import Mode, StagedItems, TierStager
from ..dcp.writer import TierStorageWriter, refuse_overlap
from ..errors import (
    CheckpointError,
    CheckpointSkippedError,
    IntegrityError,
    ObjectNotFoundError,
    OperationTimeoutError,
    TierckptError,
)
from ..layout import Location, parse_uri, step_name, step_of
from ..mover.retention import Policy, Rule
from ..stores.schemes import check_location
from ..telemetry import BLOCKED_SECONDS, logger
from ..types import Tier
from . import preemption, testament
from . import state as states
from .exchange import Exchange, agree_on_name, all_gather, is_distributed
from .restoring import restore_into, unwrapped
from .testament import Testament

log = logger("checkpointer")

T = TypeVar("T")

PROMPT_SECONDS = 0.02
EXTRA_SECONDS = 60.0
"""What a save may take beyond its own deadline for the other ranks."""


@dataclass
class SaveRecord:
    """How one save went. Seconds count from the call of ``save``; None until known (or not known on this rank)."""

    step: int
    uri: str
    size_bytes: int = 0
    blocked_seconds: float = 0.0
    local_commit_seconds: float | None = None
    shared_commit_seconds: float | None = None
    error: str = ""


class Checkpointer:
    """Saves and restores the state of a training job under ``uri``, as ``uri/step-N``.

    ``save`` blocks only while the state is copied to host memory (with ``staging="lazy"`` not even that long); an error
    of a save is raised by the next ``save``, ``wait`` or ``close``. Works in one process without torch.distributed, and
    on every rank of a job under torchrun: all ranks must then make the same calls in the same order.

    Args:
        uri: directory or key prefix of the run.
        keep_last: checkpoints to keep; an int for both tiers, or ``{"local": 2, "shared": 10}``. None keeps all.
            The newest is never removed, nor a local copy that is not on the shared tier yet, nor one being restored.
        keep_every: keep also the steps that this number divides; an int or ``{"shared": 1000}``. Alone: those, and the
            newest.
        overwrite: a step that exists already is replaced (default), or refused.
        staging: "eager" copies the state before ``save`` returns. "lazy" lets the copies of parameters and optimizer
            state overlap the next forward and backward pass; ``step`` of an optimizer in ``state`` waits for them.
            Nothing else may change these tensors before that step.
        timeout_seconds: how long a save waits for the other ranks before it fails on all of them.
        settings: a ``Settings``; ``overrides`` are single fields of it (``local_root=...``, ``drain=False``).

    Attributes:
        stats: one SaveRecord for each save of this object.
        restore_seconds: time of the last ``restore``, None before.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        keep_last: int | Mapping[str, int] | None = None,
        keep_every: int | Mapping[str, int] | None = None,
        overwrite: bool = True,
        staging: Mode = "eager",
        timeout_seconds: float = 600.0,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> None:
        self.settings = Settings.load(settings, **overrides)
        self.location: Location = check_location(parse_uri(uri))
        self.timeout_seconds = timeout_seconds
        self.stats: list[SaveRecord] = []
        self.restore_seconds: float | None = None
        self._keep = Policy.of(keep_last, keep_every)
        self._overwrite = overwrite
        refuse_overlap(self.location, self.settings.local_root)
        self._outlives = testament.is_wanted(self.settings)
        self._stager = TierStager(mode=staging, outlives=self._outlives, settings=self.settings)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tierckpt-save")
        self._wills = ThreadPoolExecutor(1, thread_name_prefix="tierckpt-will") if self._outlives else None
        self._running: deque[tuple[SaveRecord, Future[None]]] = deque()
        self._reported: set[str] = set()
        self._started: dict[str, float] = {}
        self._job = agree_on_name()
        self._saves = 0
        self._closed = False
        self.grace_seconds = self.settings.grace_seconds
        preemption.watch(self)

    # --- saving -------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any]) -> Future[None]:
        """Save ``state`` as ``step``. Returns when it is copied; the future is done when it is committed locally.

        When ``checkpoints_in_flight_max`` saves are not yet written, ``staging_policy`` decides: wait for the oldest,
        skip this one (on all ranks; the record's ``error`` and the future say so), or drop the oldest not begun.

        Raises:
            TierckptError: an earlier save failed, or this one cannot start (StateMismatchError, ...).
        Cost: one copy of the state that this rank writes; planning, when the structure has changed.
        """
        self._check_open()
        begun = time.monotonic()
        record = SaveRecord(step, self.location.child(step_name(step)).uri)
        if self._has_no_room(record.uri):
            return self._skip(record)
        writer = TierStorageWriter(record.uri, settings=self.settings, overwrite=self._overwrite)
        writer.hold_back()
        with unwrapped():
            plan, planner, metadata = self._plan(states.collect(state), writer)
        staged, failure = self._stage(plan, planner, state)
        self.stats.append(record)
        self._started[record.uri] = begun
        self._saves += 1
        name = f"tierckpt/{self._job}"
        exchange = Exchange(
            f"{name}/{self._saves}", f"{name}/{self._saves - 1}" if self._saves > 1 else "", self.timeout_seconds
        )
        job = _Job(writer, plan, staged, metadata, record, exchange, begun)
        if self._wills is not None and failure is None:
            job.testament = self._wills.submit(self._hand_in_will, job)
        future = self._pool.submit(self._write, job)
        self._running.append((record, future))
        if failure is not None:
            self._reported.add(record.uri)
            raise failure
        record.blocked_seconds = time.monotonic() - begun
        BLOCKED_SECONDS.emit(record.blocked_seconds)
        return future

    def _stage(
        self, plan: SavePlan, planner: TierSavePlanner, state: Mapping[str, Any]
    ) -> tuple[StagedItems, BaseException | None]:
        """Stage what the plan wants of this rank. An error goes the way of the save too: every rank must hear it."""
        try:
            self._stager.watch(value for value in state.values() if isinstance(value, torch.optim.Optimizer))
            return self._stager.stage_items(plan.items, planner), None
        except BaseException as error:
            staged = StagedItems()
            staged.copied.set_exception(error)
            return staged, error

    def _has_no_room(self, uri: str) -> bool:
        """Wait until this save may begin; True when the policy is to leave it out. The same answer on every rank.

        Errors of earlier saves are raised while planning, where all ranks meet, and not here, where they do not.
        """
        if self._running:
            # A save that fails at once (a full disk) is told now, and not one checkpoint later.
            futures.wait([self._running[-1][1]], PROMPT_SECONDS)
        if any(record.uri == uri for record, _ in self._running):
            self._wait_until_fewer_than(1)  # what it replaces must be known when it is planned
        if self.settings.staging_policy == "skip":
            return any(all_gather(len(self._unfinished()) >= self.settings.checkpoints_in_flight_max))
        if self.settings.staging_policy == "wait":
            self._wait_until_fewer_than(self.settings.checkpoints_in_flight_max)
        return False

    def _unfinished(self) -> list[tuple[SaveRecord, Future[None]]]:
        return [(record, future) for record, future in self._running if not future.done()]

    def _wait_until_fewer_than(self, count: int) -> None:
        while len(unfinished := self._unfinished()) >= count:
            record, oldest = unfinished[0]
            if not futures.wait([oldest], self.timeout_seconds + EXTRA_SECONDS).done:
                raise self._not_ended(record)

    def _skip(self, record: SaveRecord) -> Future[None]:
        error = CheckpointSkippedError(
            f"step {record.step} was left out: {self.settings.checkpoints_in_flight_max} saves are still being written",
            hint="Expected now and then with the staging_policy 'skip'; save less often if it is frequent",
            checkpoint=record.uri,
        )
        log.warning("%s", error)
        record.error = f"{type(error).__name__}: {error}"
        self.stats.append(record)
        skipped: Future[None] = Future()
        skipped.set_exception(error)
        return skipped

    def _plan(
        self, state: dict[str, Any], writer: TierStorageWriter
    ) -> tuple[SavePlan, TierSavePlanner, Metadata | None]:
        """DCP's planning, on the caller's thread: the only collectives of a save."""
        planner = TierSavePlanner()
        ranks = _DistWrapper(None, is_distributed(), 0)
        metadata: Metadata | None = None

        def local_step() -> SavePlan:
            self._raise_failures()  # here, so that all ranks raise it and none is left in the collective
            planner.set_up_planner(state, writer.storage_meta(), ranks.is_coordinator)
            writer.set_up_storage_writer(ranks.is_coordinator, rank=ranks.rank, use_collectives=True)
            return writer.prepare_local_plan(planner.create_local_plan())

        def global_step(plans: list[SavePlan]) -> list[SavePlan]:
            nonlocal metadata
            plans, metadata = planner.create_global_plan(plans)
            return writer.prepare_global_plan(plans)

        try:
            plan = ranks.reduce_scatter("plan", local_step, global_step)
        except CheckpointException as error:
            self._note_reported(error)
            raise
        return planner.finish_plan(plan), planner, metadata

    def _hand_in_will(self, job: _Job) -> Testament | None:
        """Have the agent see to this save if this process ends before it is on the SSD."""
        job.staged.wait(self.settings.staging_timeout_seconds)
        prepared = job.writer.prepare(job.plan, job.staged)
        return testament.hand_in(job.writer, prepared, job.metadata, job.exchange.key)

    def _write(self, job: _Job) -> None:
        record, is_settled = job.record, True

        def write() -> list[Any]:
            job.will()
            job.staged.wait(self.settings.staging_timeout_seconds)
            future = job.writer.write_data(job.plan, job.staged)
            future.wait()
            return future.value()

        def commit(results: list[list[Any]]) -> int:
            if job.metadata is None:
                raise RuntimeError("only the coordinator commits")
            job.writer.finish(job.metadata, results)
            return sum(file.size_bytes for rank in results for item in rank for file in getattr(item, "files", ()))

        try:
            record.size_bytes = job.exchange.gather_then(write, commit)
            job.writer.hand_over()
        except BaseException as error:
            record.error = f"{type(error).__name__}: {error}"
            if isinstance(error, TierckptError):
                error.context.setdefault("checkpoint", record.uri)
            is_settled = job.give_up()
            raise
        finally:
            if is_settled:
                job.take_back_will()
            job.let_go()
        record.local_commit_seconds = time.monotonic() - job.begun
        self._prune()

    def wait(self, tier: str = "shared", timeout_seconds: float | None = None) -> None:
        """Return when every save of this object that retention keeps is committed on ``tier``.

        Raises the error of a save or drain that failed, OperationTimeoutError when the time is up.
        """
        self._finish_running()
        self._note_commits()
        if tier == Tier.SHARED.value and self.settings.drain:
            deadline = time.monotonic() + (self.timeout_seconds if timeout_seconds is None else timeout_seconds)
            for record in self._kept_records():
                if record.shared_commit_seconds is None:
                    self._wait_shared(record, max(0.0, deadline - time.monotonic()))
            self._prune()

    def _kept_records(self) -> list[SaveRecord]:
        """The newest save of each step, without those that retention has removed or is about to."""
        newest = {record.step: record for record in self.stats if not record.error}
        kept = self._keep.shared.kept(newest)
        return [record for step, record in newest.items() if step in kept or step == max(newest)]

    def _wait_shared(self, record: SaveRecord, timeout_seconds: float) -> None:
        location = parse_uri(record.uri)
        self._client.run(lambda engine: engine.wait(location, Tier.SHARED, timeout_seconds))
        seen = self._client.engine.committed_at.get(record.uri, time.monotonic())
        record.shared_commit_seconds = seen - self._started[record.uri]

    def _note_commits(self) -> None:
        for record in self.stats:
            seen = self._client.engine.committed_at.get(record.uri)
            if record.shared_commit_seconds is None and seen is not None and seen > self._started[record.uri]:
                record.shared_commit_seconds = seen - self._started[record.uri]

    def _finish_running(self) -> None:
        """Wait for every save that is under way. Raises the first error among them; the others are logged."""
        first: BaseException | None = None
        while self._running:
            unfinished = len(self._running)
            try:
                self._finish_oldest()
            except BaseException as error:
                if first is not None:
                    log.error("another save failed too: %s", error)
                first = first or error
                if len(self._running) == unfinished:
                    break  # it hangs, and those behind it wait for it: once is long enough to wait
        if first is not None:
            raise first

    def _finish_oldest(self) -> None:
        record, running = self._running[0]
        try:
            running.result(timeout=self.timeout_seconds + EXTRA_SECONDS)
        except CheckpointSkippedError as error:
            log.warning("%s", error)  # the declared policy, not a failure
        except TimeoutError as error:
            if isinstance(error, TierckptError):
                self._raise_once(record, error)
                return
            raise self._not_ended(record) from error
        except BaseException as error:
            self._raise_once(record, error)
        finally:
            if running.done():
                self._running.popleft()

    def _not_ended(self, record: SaveRecord) -> OperationTimeoutError:
        return OperationTimeoutError(
            f"the save to {record.uri} has not ended",
            hint="Look for a hung disk",
            waited_seconds=self.timeout_seconds,
        )

    def _raise_once(self, record: SaveRecord, error: BaseException) -> None:
        """Raise the error of a save, unless another rank's knowledge of it has already made a call here raise it."""
        if record.uri in self._reported:
            self._reported.discard(record.uri)
            return
        raise error

    def _raise_failures(self) -> None:
        """Raise what has gone wrong since the last call, in saves that have ended and in drains."""
        while self._running and self._running[0][1].done():
            self._finish_oldest()
        uris = {record.uri for record in self.stats}
        for failure in self._client.engine.take_failures(uris):
            raise failure

    def _note_reported(self, error: CheckpointException) -> None:
        """Remember which saves in flight here an error of any rank was about: it is raised once on each rank."""
        told = {getattr(cause, "context", {}).get("checkpoint") for cause, _ in error.failures.values()}
        self._reported |= {record.uri for record, _ in self._running} & told

    def _prune(self) -> None:
        """Retention, on the coordinator (shared tier) and one rank of each node (local tier). Never fails a save."""
        policy = self._keep
        if dist.is_initialized() and dist.get_rank() != 0:
            policy = replace(policy, shared=Rule())
        if not policy or int(os.environ.get("LOCAL_RANK", 0)) != 0:
            return
        try:
            self._client.run(lambda engine: engine.prune(self.location, policy))
        except TierckptError as error:
            log.warning("retention under %s did not finish: %s", self.location.uri, error)

    # --- restoring ----------------------------------------------------------------------------------------------

    def restore(
        self, state: dict[str, Any], step: int | None = None, *, only: str | Collection[str] | None = None
    ) -> int | None:
        """Load the newest usable checkpoint (or ``step``) into ``state``, in place. Returns its step, None without one.

        With ``only="model"``, or several names, those entries of ``state`` are loaded and no other byte is read.

        All ranks agree on the step before any of them changes anything. Each file is read from whichever copy is good:
        a bad one is set aside and the next one tried. Without ``step``, a checkpoint with a file that has no good copy
        left is passed over for the one before it, on all ranks, and the log says so.

        Raises:
            StateMismatchError: the state does not fit; names what. Nothing was changed.
            IntegrityError: no good copy of some file, and no older step to go back to; names tensor, file and tiers.
                ``state`` may then hold part of what could be read.
        """
        self._check_open()
        names = states.check_names(state, only)
        self._finish_running()
        self._client.recover()
        begun = time.monotonic()
        passed_over: list[tuple[str, BaseException]] = []
        while True:
            uri = self._uri_to_restore(step, passed_over)
            if uri is None:
                if passed_over:
                    raise passed_over[0][1]
                return None
            try:
                restore_into(TierStorageReader(uri, settings=self.settings), state, names)
                break
            except (IntegrityError, ObjectNotFoundError) as error:
                if step is not None:
                    raise
                passed_over.append((uri, error))
        self.restore_seconds = time.monotonic() - begun
        log.info("restored %s in %.2f s", uri, self.restore_seconds)
        if passed_over:
            told = "; ".join(f"{passed} has no good copy left: {error}" for passed, error in passed_over)
            log.warning("restored %s, because %s", uri, told)
        return step_of(uri)

    def _uri_to_restore(self, step: int | None, passed_over: Sequence[tuple[str, BaseException]]) -> str | None:
        if step is not None:
            return self.location.child(step_name(step)).uri
        steps = [step_of(uri) for uri, _ in passed_over]
        below = min((found for found in steps if found is not None), default=None)
        return self._agreed_latest(below - 1 if below is not None else None)

    def latest_step(self) -> int | None:
        """Return the newest step that every rank can load, None when there is none. Collective under torchrun."""
        uri = self._agreed_latest()
        return step_of(uri) if uri is not None else None

    def _agreed_latest(self, step_max: int | None = None) -> str | None:
        """Lower everybody's newest step to the lowest, until all can load it: never a mix of steps."""
        while True:
            limit = step_max
            found = self._client.run(lambda engine: engine.latest(self.location, limit))  # noqa: B023
            attempt = found.manifest.attempt if found is not None and found.manifest is not None else ""
            seen = all_gather((found.step, attempt) if found is not None else None)
            if any(item is None for item in seen):
                return None
            if len(set(seen)) == 1:
                return found.location.uri if found is not None else None
            steps = {step for step, _ in seen}
            # Ranks that see different saves under one step must not mix them: look below it.
            step_max = min(steps) if len(steps) > 1 else min(steps) - 1

    # --- life ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until all saves are committed on the shared tier (or locally with ``drain=False``). Idempotent."""
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The loop failed: let a save that is under way reach the SSD, but do not hide the loop's own error.
        try:
            self.wait(Tier.LOCAL.value)
        except TierckptError as failure:
            log.error("the last save failed too: %s", failure)
        self._closed = True
        self._let_go()

    def bring_to_safety(self, deadline: float) -> list[str]:
        """After SIGTERM: wait, until ``deadline``, for what is under way. Returns what is not safe, in words.

        Raises nothing that waiting could not mend. What the agent drains it goes on to drain after this process.
        """
        self._client.run(lambda engine: engine.hurry())
        futures.wait([future for _, future in self._running], max(0.0, deadline - time.monotonic()))
        left = [f"{record.uri} did not reach the local tier in time" for record, _ in self._unfinished()]
        entries = self._client.run(lambda engine: engine.idle(max(0.0, deadline - time.monotonic())))
        left += [f"{entry.uri} is on the local tier only; `tierckpt drain --wait` finishes it" for entry in entries]
        return left

    def _let_go(self) -> None:
        preemption.forget(self)
        self._pool.shutdown(wait=False)
        if self._wills is not None:
            self._wills.shutdown(wait=False)
        self._stager.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"the Checkpointer of {self.location.uri} is closed")

    @property
    def _client(self) -> Client:
        return get_client(self.settings)


@dataclass
class _Job:
    """One save on its way from staging memory to the local tier."""

    writer: TierStorageWriter
    plan: SavePlan
    staged: StagedItems
    metadata: Metadata | None
    record: SaveRecord
    exchange: Exchange
    begun: float
    testament: Future[Testament | None] | None = None

    def will(self) -> Testament | None:
        """What the agent has, once it has it. Raises what went wrong while the save was prepared for that."""
        return self.testament.result() if self.testament is not None else None

    def take_back_will(self) -> None:
        with contextlib.suppress(Exception):  # it was raised where the save needed it
            will = self.will()
            if will is not None:
                will.take_back()

    def give_up(self) -> bool:
        """End a save that failed here. False when nobody here knows whether it failed as a whole.

        Then all this rank had to do is done, and the shards and the will stay: should the rest of the job be killed,
        what every rank had staged is still a checkpoint.
        """
        with contextlib.suppress(Exception):
            self.will()  # until then another thread has the writer
        if self.exchange.may_be_done:
            return self.writer.let_go()
        self.writer.reset()
        return True

    def let_go(self) -> None:
        """Drop the staged copies: their memory is free for the next checkpoint, whoever keeps the future of this."""
        self.staged = StagedItems()
        self.metadata = None
