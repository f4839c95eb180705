"""Checkpointer: saves and restores the state of a training loop."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import torch.distributed as dist

from ..checkpoint import in_flight
from ..checkpoint.retention import Policy
from ..client import Client, get_client
from ..config import Settings
from ..dcp.handoff.offer import Handoff
from ..dcp.save_planning import SaveDescription
from ..dcp.save_session import SaveSession
from ..dcp.stager import Mode, TierStager, outlives_process
from ..disk.illness import Errands
from ..errors import (
    CheckpointError,
    CheckpointSkippedError,
    ConfigError,
    EndpointError,
    OperationTimeoutError,
    PermissionDeniedError,
    StoreUnavailableError,
    TierckptError,
)
from ..format.layout import Location, parse_uri, step_name, step_of
from ..poll import announced
from ..resources import ThreadPool
from ..stores.schemes import check_location, check_mirrored_target
from ..telemetry import BLOCKED_SECONDS, logger
from ..tracebacks import short_traceback
from ..types import Tier
from . import preemption, rank_exchange
from .codec import job_state as states
from .drain_decider import DrainDecider, SaveDirective
from .every_step.redo_log import make_checkpoint
from .every_step.step_log import StepLog
from .every_step.window import EveryStep, SaveWindow
from .final_save import FinalSave, LastStep, seconds_to_local
from .interval import Interval, IntervalController, Phase
from .preemption import Notices
from .rank_exchange import Exchange, agree_on_name, is_distributed
from .restore_state import Restored, Restoring, agreed_latest, newest_base, restore_from, restore_newest, unwrapped
from .run_branch import RunBranch
from .run_log import RunLog
from .saves import (
    BackgroundPruning,
    RunningSaves,
    SaveRecord,
    StagedSave,
    describe_wait,
    kept_records,
    left_out,
    note_commits,
    plan_save,
    retry_final_save,
    stage,
)

log = logger("checkpointer")

RECORDS_USED = 64
STATS_MAX = 4096
LOOK_SECONDS = 0.1
RETENTION_SECONDS = 2.0


class Checkpointer:
    """Saves and restores the state of a training job under ``uri``, as ``uri/step-N``.

    ``save`` blocks only while the state is copied to host memory. The next ``save``, ``wait`` or ``close`` raises the
    error of a failed save. All ranks must make the same calls in the same order.

    Args:
        uri: directory or key prefix of the run.
        keep_last: checkpoints to keep; an int, or by tier: ``{"local": 2, "shared": 10}``. None keeps all. Never
            removed: the newest, a local copy not yet on the shared tier, one being restored.
        keep_every: also keep the steps that this number divides; an int or ``{"shared": 1000}``.
        overwrite: False refuses to save an existing step.
        mode: "async", or "sync": ``save`` returns after the local commit.
        staging: "eager", or "lazy": copies overlap the next forward and backward pass; ``step`` of an optimizer in
            ``state`` waits for them, and nothing else may change these tensors.
        interval: steps between two saves by ``step``, or "auto": from measured times (see ``AutoInterval``). Leaving
            the ``with`` block without an error then saves the last step too.
        every_step: logs every step, or copies a large state over several steps.
        timeout_seconds: a save that waits longer for other ranks fails on all of them. "sync" waits 60 s longer for a
            disk that hangs (OperationTimeoutError), and 10 s, once a minute, for a silent store.
        settings: a ``Settings``; ``overrides`` are single fields of it (``drain=False``).

    Attributes:
        stats: one SaveRecord for each of the latest 4096 saves of this object.
        restore_seconds: duration of the last ``restore``.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        >>> with tierckpt.Checkpointer("run", keep_last=2, interval=10) as checkpointer:
        ...     start = checkpointer.restore(state) or 0
        ...     for step in range(start + 1, 26):
        ...         committed = checkpointer.step(step, state)
        >>> with tierckpt.Checkpointer("run") as checkpointer:
        ...     checkpointer.latest_step()
        25
    """

    @short_traceback
    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        keep_last: int | Mapping[str, int] | None = None,
        keep_every: int | Mapping[str, int] | None = None,
        overwrite: bool = True,
        mode: Literal["async", "sync"] = "async",
        staging: Mode = "eager",
        interval: Interval = None,
        every_step: EveryStep | None = None,
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
        self._interval = IntervalController(interval, DrainDecider(self.settings))
        check_mirrored_target(self.location, self.settings.local_root)
        self._every_step = every_step or EveryStep()
        self._is_sync = mode == "sync"
        if mode not in ("async", "sync") or (self._is_sync and self._every_step.window_steps is not None):
            hint = "Write 'async' or 'sync'; with EveryStep(window_steps=...), 'async'"
            raise ConfigError(f"mode is {mode!r}", hint=hint)
        self._job = agree_on_name(self.location.uri)
        self._step_log = StepLog(self._every_step.gradient_log, self.location, self.settings, self._job)
        longest = self._interval.interval if isinstance(self._interval.interval, int) else None
        self._window = SaveWindow(self.location, self._every_step, longest, self._save_record, self._step_log)
        self._stager = TierStager(mode=staging, settings=self.settings)
        self._pool = ThreadPool(1, thread_name_prefix="tierckpt-save")
        self._handoffs = (
            ThreadPool(1, thread_name_prefix="tierckpt-handoff") if outlives_process(self.settings) else None
        )
        self._running = RunningSaves(self.settings, timeout_seconds, is_sync=self._is_sync)
        self._disk_worker = Errands(self.settings.local_root)
        self._saves, self._closed = 0, False
        self._is_blind = False
        self._is_first_rank = not is_distributed() or dist.get_rank() == 0
        self._run_log = RunLog(
            self.location, self.settings, is_on=self._is_first_rank, has_gradient_log=self._step_log.is_on
        )
        self._branch = RunBranch(self.location, self._job, self.settings)
        self._pruning = BackgroundPruning(self._keep, self._branch, self._run_log, self.stats, self.settings)
        self._looked_at = 0.0
        self.grace_seconds = self.settings.grace_seconds
        self._final_save = FinalSave(
            self._job, lambda: seconds_to_local(self.stats[-RECORDS_USED:], len(self._running.unfinished()))
        )
        self._steps_seen = 0
        self._last_step = LastStep(is_on=interval is not None)
        self._is_throttled = False
        self._notices = Notices(self.settings, self._on_notice)
        preemption.watch(self, self.settings.preempt_signals)
        rank_exchange.exchange_addresses(self.settings)

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a Checkpointer cannot be copied or pickled", hint="Create one in each rank's process")

    @short_traceback
    def step(self, step: int, state: Mapping[str, Any]) -> Future[None] | None:
        """Save ``state`` if ``interval`` says so. Call it at the end of each training step, on every rank.

        Returns and raises as ``save``; None without a save, at a cost of microseconds. With an ``interval``, ``state``
        is referenced until a save or the end of the ``with`` block.
        """
        self._check_open()
        step, started_at = states.check_step(step), time.monotonic()
        self._interval.stepped(self._phase(started_at), started_at)
        self._run_log.stepped(step)
        self._step_log.stepped(step, state)
        self._last_step.ended(step, state)
        try:
            is_last = self._final_save.end_step(step)
            if is_last:
                future = self._window.copy_whole(step, state, "the job is preempted")
                future = future or self._save(step, state, is_asked=True)
                self._final_save.done()
                return future
            self._window.end_of_step(step, state)
            needs_base = self._step_log.needs_base
            is_due = (needs_base or self._interval.is_due(step)) and not self._window.is_moving
            return self._begin(step, state, is_asked=needs_base) if is_due else None
        finally:
            self._steps_seen += 1
            self._resume(started_at)

    @property
    def preempted(self) -> bool:
        """True once a preempted job's final save is decided: leave the loop."""
        return self._final_save.is_done

    def _on_notice(self, seconds: float, reason: str) -> None:
        log.warning("%s: the next step is saved", reason)
        self._final_save.request(time.monotonic() + seconds, reason)

    def request_final_save(self, deadline: float, reason: str) -> None:
        """Save at the loop's next step, after a signal, if the save fits."""
        if self._steps_seen:
            self._final_save.request(deadline, reason)

    def _resume(self, started_at: float) -> None:
        now = time.monotonic()
        self._interval.resumed(now - started_at, now)
        self._run_log.resumed(now - started_at)

    def _phase(self, now: float) -> Phase:
        if self._running.is_last_under_way or self._window.is_open:
            return "flushing"
        if not any(record.is_sent and record.shared_commit_seconds is None for record in self.stats[-RECORDS_USED:]):
            return "plain"
        if now - self._looked_at > LOOK_SECONDS:
            self._looked_at = now
            self._disk_worker.run_checked(self._note_commits)
        return "draining" if self.settings.drain else "plain"

    @short_traceback
    def save(self, step: int, state: Mapping[str, Any]) -> Future[None]:
        """Save ``state`` as ``step``. Returns when it is copied; the future resolves at the local commit.

        With ``checkpoints_in_flight_max`` saves unwritten, ``staging_policy`` decides: wait for the oldest, skip this
        save (the record's ``error`` and the future report it), or drop the oldest that has not begun. The save is also
        skipped if the disk hangs for 0.4 s. If shared storage later reports an existing checkpoint, the future raises
        the error.

        Raises TierckptError: an earlier save failed, or this one cannot start (StateMismatchError, ...).
        Cost: one copy of this rank's share of the state, and planning if the structure has changed.
        """
        self._check_open()
        step, started_at = states.check_step(step), time.monotonic()
        self._run_log.stepped(step, is_save=True)
        self._step_log.stepped(step, state)
        try:
            return self._begin(step, state, is_asked=True)
        finally:
            self._resume(started_at)

    def _begin(self, step: int, state: Mapping[str, Any], *, is_asked: bool) -> Future[None]:
        if self._window.is_on:
            return self._window.open(step, state, is_asked=is_asked)
        is_sync = self._is_sync or self._step_log.has_branched
        future = self._save(step, state, is_asked=is_asked)
        is_left_out = future.done() and isinstance(future.exception(), CheckpointSkippedError)
        if is_sync and not is_left_out:
            self._running.finish()
            self.stats[-1].blocked_seconds = self.stats[-1].age_seconds
        return future

    def _save(self, step: int, state: Mapping[str, Any], *, is_asked: bool) -> Future[None]:
        record = SaveRecord(step, self.location.child(step_name(step)).uri)
        return self._save_record(record, state, None, is_asked=is_asked)

    def _save_record(
        self, record: SaveRecord, state: Mapping[str, Any], collected: dict[str, Any] | None, *, is_asked: bool
    ) -> Future[None]:
        started_at, step = time.monotonic(), record.step
        if (refused := self._running.refuses(record.uri)) is not None:
            self._note(record)
            return left_out(record, refused)
        skip_error = self._disk_worker.run_checked(self._probe_disk)
        order = self._interval.before_save(step, self.stats[-RECORDS_USED:], is_asked=is_asked)
        record.is_sent, record.is_direct_put = order.is_sent, order.is_direct_put
        is_new_here = all(other.error or other.uri != record.uri for other in self.stats)
        overwrite = self._overwrite and not (self._is_blind and is_new_here)
        self._throttle_node(order)
        number, name, is_adaptive = self._saves + 1, f"tierckpt/{self._job}", self._interval.is_adaptive
        exchange = Exchange(f"{name}/{number}", f"{name}/{number - 1}" if number > 1 else "", self.timeout_seconds)
        notes = self._step_log.notes(record, self._branch.of_save(), is_of_now=collected is None)
        description = SaveDescription(
            rank=dist.get_rank() if is_distributed() else 0,
            world_size=dist.get_world_size() if is_distributed() else 1,
            is_coordinator=self._is_first_rank,
            name=exchange.key,
            overwrite=overwrite,
            route="local" if not is_adaptive else "direct put" if order.is_direct_put else "local if it fits",
            is_sent=record.is_sent or not self._interval.keeps_some,
            keeps_some=self._interval.keeps_some,
            awaits_verdict=True,
            disk=self._disk_worker,
            is_first=number == 1,
            notes={**notes, **self._pruning.note()},
        )
        location, listener = parse_uri(record.uri), Handoff() if self._handoffs is not None else None
        check_mirrored_target(location, self.settings.local_root)
        session = SaveSession(self.settings, location, description, listener)
        try:
            with unwrapped():
                plan, planner, metadata = plan_save(
                    lambda: states.collect(state) if collected is None else collected,
                    *(session, self._running, lambda: self._raise_failures(skip_error)),
                    with_addresses=self._stager.needs_addresses and collected is None,
                )
        except CheckpointSkippedError as error:
            self._note(record)
            return left_out(record, error)
        staged, failure = stage(self._stager, plan, planner, state, is_copied=collected is not None)
        # torch releases the interpreter lock per freed tensor: 13,000 tensors took 0.5 s.
        planner.state_dict = {}
        if collected is None:
            self._last_step.saved()
            self._step_log.based(record.base, step, state, failure)
        self._note(record)
        self._run_log.saved(step, record.age_seconds, is_sent=record.is_sent)
        self._saves = number
        save = StagedSave(session, plan, staged, metadata, record, exchange)
        if self._handoffs is not None and failure is None:
            save.prepared = self._handoffs.submit(save.prepare)
        future = self._pool.submit(self._write, save)
        in_flight.running(future)
        self._running.add(record, future)
        if failure is not None and not isinstance(failure, CheckpointSkippedError):
            self._running.note_reported({record.uri})
            raise failure
        record.blocked_seconds += time.monotonic() - started_at
        BLOCKED_SECONDS.emit(record.blocked_seconds)
        return future

    def _throttle_node(self, order: SaveDirective) -> None:
        if not self._interval.is_adaptive or int(os.environ.get("LOCAL_RANK", 0)) > 0:
            return
        if order.bytes_per_second is not None or self._is_throttled:
            self._is_throttled = order.bytes_per_second is not None
            self._client.throttle(order.throttle_of_node(), order.throttle_seconds)

    def _note(self, record: SaveRecord) -> None:
        self.stats.append(record)
        del self.stats[:-STATS_MAX]

    def _write(self, save: StagedSave) -> None:
        record = save.record
        save.write(lambda: self._wait_shared(record, self.timeout_seconds))
        record.local_commit_seconds = record.age_seconds
        self._run_log.durable(
            record.step, record.local_commit_seconds, record.size_bytes, is_direct_put=record.is_direct_put
        )
        self._step_log.committed(record.step, record.size_bytes)
        self._pruning.start()
        self._pruning.wait(RETENTION_SECONDS)

    @short_traceback
    def wait(self, tier: str = "shared", timeout_seconds: float | None = None) -> None:
        """Wait until every save of this object that retention keeps is committed on ``tier``.

        ``"shared"`` covers drained saves. Raises the error of a failed save or drain, and OperationTimeoutError.
        """
        self._window.conclude()
        self._running.finish()
        self._note_commits()
        if tier == Tier.SHARED.value:
            self._wait_for_drains(
                time.monotonic() + (self.timeout_seconds if timeout_seconds is None else timeout_seconds)
            )

    def _wait_for_drains(self, deadline: float) -> None:
        if self.settings.drain:
            for record in kept_records(self.stats, self._keep.shared):
                if record.shared_commit_seconds is None:
                    self._wait_shared(record, max(0.0, deadline - time.monotonic()))
        self._pruning.wait(max(0.0, deadline - time.monotonic()))
        if self.settings.drain:
            self._pruning.prune(deadline)

    def _wait_shared(self, record: SaveRecord, timeout_seconds: float) -> None:
        location = parse_uri(record.uri)
        self._client.wait(location, Tier.SHARED, timeout_seconds)
        seen = self._client.mover.drains.committed_at.get(record.uri, time.monotonic())
        record.shared_commit_seconds = seen - record.begun_at

    def _note_commits(self) -> None:
        note_commits(self.stats[-RECORDS_USED:], self.settings, self._client.mover.drains.committed_at)

    def _probe_disk(self) -> None:
        self._note_commits()
        self._branch.read_local()

    def _raise_failures(self, skip_error: CheckpointSkippedError | None) -> None:
        self._running.raise_ended()
        if skip_error is not None:
            raise skip_error
        self._running.raise_failed_drains(self.location, self.stats)

    @short_traceback
    def restore(
        self,
        state: dict[str, Any],
        step: int | None = None,
        *,
        only: str | Collection[str] | None = None,
        strict: bool = True,
        trust_pickle: bool = False,
    ) -> int | None:
        """Load the newest usable checkpoint (or ``step``) into ``state``, in place. Returns its step.

        None means that shared storage was listed and has no checkpoint. If it does not answer, all ranks wait up to
        ``store_wait_seconds``, unless the newest step on every rank's node was saved there and is not drained: that
        step is restored. A ``step`` that is complete on this node needs no store.

        All ranks agree on the step before any changes anything. A damaged copy of a file is quarantined, and another
        one read. Without ``step``, all ranks skip a checkpoint without a good copy of a file, or a redo log that cannot
        be replayed here. With an older ``step``, the job branches: its next save abandons the newer checkpoints
        (docs/guide/cleaning-up.md).

        Args:
            only: names of entries of ``state`` to load; no other byte is read.
            strict: a key that only the checkpoint or only an entry has raises StateMismatchError. False loads the rest;
                the returned step has ``missing_keys``, ``unexpected_keys``, and both as ``skipped_keys``.
            trust_pickle: as in ``TierStorageReader``.

        Raises:
            StoreUnavailableError, PermissionDeniedError: checkpoints could not be listed. Nothing was changed. Until a
                restore succeeds, saves of this object replace only checkpoints that it saved itself.
            CheckpointNotFoundError: some ranks see checkpoints, but no step is visible to all.
            StateMismatchError: the state does not fit. Nothing was changed.
            IntegrityError: no good copy of a file, and no older step. ``state`` may be partly loaded.
        """
        self._check_open()
        options = Restoring(states.check_names(state, only), strict, trust_pickle)
        self._window.conclude()
        self._running.finish()
        self._client.recover()
        self._client.enter(self.location, trains=False)
        started_at, write = time.monotonic(), partial(self._save_record, is_asked=True)
        fold = partial(make_checkpoint, exact=self._every_step.exact, write=write)
        restore = partial(restore_newest, self._client, self.location, state, options, fold)
        find_newest = partial(newest_base, self._client, self.location)
        with self._listing():
            base_step = (
                self._step_log.base_of_newest(state, find_newest) if step is None and options.only is None else None
            )
            found = restore_from(base_step, restore) if step is None else restore(step)
        if found is None:
            return None
        reached, replayed, (uri, base) = step_of(found[0]), 0, found
        if options.only is None and reached is not None:
            branch = self._branch.restored(uri, is_asked_for=step is not None)
            recover = partial(self._step_log.recover, base, reached, state, restore, branch=branch)
            reached, replayed = recover(is_newest=step is None)
        self.restore_seconds = time.monotonic() - started_at
        self._run_log.restored(reached, self.restore_seconds, replayed)
        self._interval.resumed()
        log.info("restored %s in %.2f s", uri, self.restore_seconds)
        if strict or reached is None:
            return reached
        found_step = Restored(reached)
        found_step.missing_keys, found_step.unexpected_keys = options.missing_keys, options.unexpected_keys
        return found_step

    @short_traceback
    def latest_step(self) -> int | None:
        """Return the newest step that every rank can load. Collective under torchrun. Raises as ``restore``."""
        with self._listing():
            uri = agreed_latest(self._client, self.location, windows=True)
        return step_of(uri) if uri is not None else None

    @contextmanager
    def _listing(self) -> Iterator[None]:
        try:
            yield
        except (StoreUnavailableError, PermissionDeniedError, EndpointError):
            self._is_blind = True
            raise
        self._is_blind = False

    @short_traceback
    def close(self) -> None:
        """Wait until all saves are committed on the shared tier (or locally with ``drain=False``). Idempotent.

        Raises OperationTimeoutError after ``exit_timeout_seconds``. Unfinished saves stay on this node and in the
        journal.
        """
        if self._closed:
            return
        deadline = time.monotonic() + self.settings.exit_timeout_seconds
        try:
            with announced(
                log,
                lambda: describe_wait(self.location, self.settings, self._running, tuple(self.stats), deadline),
                min(1.0, self.settings.exit_timeout_seconds / 4),
            ):
                if not self._final_save.is_done:
                    self._window.conclude()
                self._running.finish(deadline)
                self._send_newest()
                self._note_commits()
                self._wait_for_drains(deadline)
            if self._interval.keeps_some:
                self._client.run(self._client.mover.drains.drop_superseded(self.location))
        except (OperationTimeoutError, KeyboardInterrupt):
            self._client.run(self._client.mover.drains.ignore_running())
            raise
        finally:
            reason = "preempted" if preemption.is_ending() else "closed"
            self._run_log.ended(reason, wait_seconds=max(0.1, deadline - time.monotonic()))
            self._closed = True
            self._release()
            preemption.await_end(self.grace_seconds)

    def _send_newest(self) -> None:
        """Drain the newest save even if the policy kept it on the SSD: no newer one follows."""
        good = [record for record in self.stats[-RECORDS_USED:] if not record.error]
        if not (good and self.settings.drain) or good[-1].is_sent:
            return
        good[-1].is_sent = True
        for entry in self._client.run(self._client.mover.drains.promote_newest(self.location)):
            self._client.drain_in_background(entry.token)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._save_last()
            finally:
                self.close()
            return
        try:
            self._running.finish(time.monotonic() + self.settings.exit_timeout_seconds)
        except TierckptError as failure:
            log.error("the last save failed too: %s", failure)
        self._run_log.ended("failed")
        self._closed = True
        self._release()

    def _save_last(self) -> None:
        """Save the last step if the interval left it out.

        Not after an error, which other ranks may lack: a save is collective.
        """
        if self._closed or self._final_save.is_done:
            return
        self._window.conclude()
        if (last := self._last_step.take()) is not None:
            self._running.wait(self.timeout_seconds)
            retry_final_save(partial(self._save, *last, is_asked=True), self.stats)

    def flush_before_exit(self, deadline: float) -> list[str]:
        """Finish saves and drains until ``deadline``, after SIGTERM. Returns a line per unsafe save."""
        self._client.run(self._client.mover.drains.prefer_newest())
        self._final_save.wait(deadline, self._interval.step_seconds)
        self._running.wait(max(0.0, deadline - time.monotonic()))
        self._send_newest()
        left = ["a multi-step save was not copied in time"] if self._window.is_open else []
        left += [f"{record.uri} did not reach the local tier in time" for record, _ in self._running.unfinished()]
        entries = self._client.run(self._client.mover.drains.idle(max(0.0, deadline - time.monotonic())))
        left += [f"{entry.uri} is on the local tier only; `tierckpt drain --wait` finishes it" for entry in entries]
        self._run_log.ended("preempted", wait_seconds=deadline - time.monotonic())
        return left

    def _release(self) -> None:
        preemption.forget(self)
        self._last_step.close()
        self._notices.close()
        self._final_save.close()
        self._window.close()
        self._run_log.close()
        self._step_log.close()
        self._pool.shutdown(wait=False)
        self._pruning.close()
        if self._handoffs is not None:
            self._handoffs.shutdown(wait=False)
        self._stager.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"the Checkpointer of {self.location.uri} is closed")

    @property
    def _client(self) -> Client:
        return get_client(self.settings)
