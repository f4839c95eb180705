"""Saves of a Checkpointer: from staging memory to the local tier, until retention removes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ..arena import slots
from ..checkpoint.prune import PruneResult
from ..checkpoint.retention import NOTE, Policy, Rule
from ..client import get_client
from ..config import Settings
from ..dcp.bulk_objects import gc_paused
from ..dcp.planner import TierSavePlanner
from ..dcp.save_session import SaveSession, decode_results, encode_results, files_of
from ..dcp.stager import StagedItems, TierStager
from ..disk.illness import HINT, ill_disk, requests
from ..errors import CheckpointSkippedError, OperationTimeoutError, TierckptError
from ..format.layout import DRAINED, Location, local_dir, parse_uri, step_name
from ..mover import Mover
from ..near_storage import optimizer as near_storage
from ..poll import Pauses, Poll
from ..replay.optimizers import optimizers_in
from ..resources import ThreadPool, exhausted
from ..telemetry import log_failure, logger
from ..torch_internals import DistWrapper
from ..tracebacks import short_traceback
from ..types import Tier
from .rank_exchange import Exchange, all_gather, is_distributed
from .run_branch import RunBranch
from .run_log import RunLog

log = logger("checkpointer")

EXTRA_SECONDS = 60.0
PROMPT_SECONDS = 0.02
ROUND_SECONDS = 0.1
FINAL_SAVE_ATTEMPTS = 10
LAST_PAUSE_SECONDS = 1.0

Notes = dict[str, str | int | bool]


@dataclass
class SaveRecord:
    """Outcome of one save. Seconds count from the call of ``save``; None if unknown (on this rank)."""

    step: int
    uri: str
    size_bytes: int = 0
    blocked_seconds: float = 0.0
    local_commit_seconds: float | None = None
    shared_commit_seconds: float | None = None
    error: str = ""
    is_sent: bool = True
    is_direct_put: bool = False
    """All or part of it bypasses the SSD; its local and shared commits are one."""
    window_steps: int = 0
    """Steps of a multi-step save."""
    moved_bytes: int = 0
    """Bytes copied to host memory by a multi-step save."""
    waited_bytes: int = 0
    """The part of ``moved_bytes`` that training waited for."""
    fallback: str = ""
    """Why a multi-step save was copied whole."""
    notes: Notes = field(default_factory=dict)
    base: str = ""
    """Its name in gradient logs."""
    begun_at: float = field(default_factory=time.monotonic, repr=False)

    def name(self, run: Location, step: int) -> None:
        self.step, self.uri = step, run.child(step_name(step)).uri

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.begun_at

    @property
    def drain_seconds(self) -> float | None:
        if self.shared_commit_seconds is None or self.local_commit_seconds is None:
            return None
        return max(0.0, self.shared_commit_seconds - self.local_commit_seconds)


@dataclass
class StagedSave:
    session: SaveSession
    plan: SavePlan
    staged: StagedItems
    metadata: Metadata | None
    record: SaveRecord
    exchange: Exchange
    prepared: Future[None] | None = None

    def prepare(self) -> None:
        """Have the agent finish this save if this process ends first."""
        self.staged.wait(slots.SLOT_SECONDS)
        self.session.prepare(self.plan, self.staged, self.metadata)

    @short_traceback
    def write(self, wait_shared: Callable[[], None]) -> None:
        """Write this rank's shards and have the coordinator commit. Sets the record's size and route, or its error."""
        record, session = self.record, self.session

        def write() -> tuple[Any, bool]:
            if self.prepared is not None:
                self.prepared.result()
            self.staged.wait(slots.SLOT_SECONDS)
            results = session.write(self.plan, self.staged)
            self.staged.release()
            return encode_results(results) if is_distributed() else results, session.is_direct_put

        def commit(outcomes: list[tuple[Any, bool]]) -> tuple[int, bool]:
            if self.metadata is None:
                raise RuntimeError("only the coordinator commits")
            results, is_direct_put = [one for one, _ in outcomes], any(is_direct for _, is_direct in outcomes)
            if is_distributed():
                chunk_size_bytes = int(session.settings.chunk_size_bytes)
                results = [decode_results(one, chunk_size_bytes, where="results of a rank") for one in results]
            session.commit(self.metadata, results, has_direct_put_ranks=is_direct_put)
            return sum(file.size_bytes for file in files_of(results)), is_direct_put

        try:
            record.size_bytes, record.is_direct_put = self.exchange.gather_then(write, commit)
            record.is_sent |= record.is_direct_put
            session.hand_over(has_direct_put_ranks=record.is_direct_put)
            if record.is_direct_put:
                wait_shared()
        except BaseException as caught:
            error = exhausted(caught) or caught
            record.error = f"{type(error).__name__}: {error}"
            if isinstance(error, TierckptError):
                error.context.setdefault("checkpoint", record.uri)
            session.report_outcome(error)
            if self.prepared is not None:
                futures.wait([self.prepared])  # another thread uses the session
            if self.exchange.may_be_done:
                session.settle()
            else:
                session.abort()
            raise error from (caught if error is not caught else caught.__cause__)
        finally:
            # The caller may keep the future of this save.
            with contextlib.suppress(TierckptError):
                self.staged.release()
            self.staged = StagedItems()
            self.metadata = None


def left_out(record: SaveRecord, why: CheckpointSkippedError) -> Future[None]:
    """Record a skipped save. Returns its future, which raises the error. Only the rank that the error names logs it."""
    context = {"rank": 0, **why.context, "checkpoint": record.uri}
    error = CheckpointSkippedError(f"step {record.step} was left out: {why.message}", hint=why.hint, **context)
    is_owner = context["rank"] == (dist.get_rank() if is_distributed() else 0)
    log.log(logging.WARNING if is_owner else logging.DEBUG, "%s", error)
    record.error = f"{type(error).__name__}: {error}"
    skipped: Future[None] = Future()
    skipped.set_exception(error)
    return skipped


def retry_final_save(save: Callable[[], Future[None]], records: list[SaveRecord]) -> None:
    """Call ``save`` up to ``FINAL_SAVE_ATTEMPTS`` times if a hanging disk skips it.

    ``records`` gets only the last try's record.
    """
    pauses = Poll(pauses=Pauses(LAST_PAUSE_SECONDS, LAST_PAUSE_SECONDS))
    for _ in range(FINAL_SAVE_ATTEMPTS - 1):
        future = save()
        if not future.done() or not isinstance(future.exception(), CheckpointSkippedError):
            return
        records.pop()
        pauses.pause()
    save()


def kept_records(records: Sequence[SaveRecord], rule: Rule) -> list[SaveRecord]:
    sent = [record for record in records if not record.error and record.is_sent]
    newest = {record.step: record for record in sent}
    kept = {*rule.kept(newest), *rule.kept_of([record.step for record in sent])}
    return [record for step, record in newest.items() if step in kept or step == max(newest)]


def note_commits(records: Sequence[SaveRecord], settings: Settings, committed_at: Mapping[str, float]) -> None:
    for record in records:
        if record.shared_commit_seconds is None and record.is_sent and not record.error:
            seconds = _drained_after(record, settings, committed_at)
            if seconds is not None and seconds > 0:
                record.shared_commit_seconds = seconds


def _drained_after(record: SaveRecord, settings: Settings, committed_at: Mapping[str, float]) -> float | None:
    seen = committed_at.get(record.uri)
    if seen is not None:
        return seen - record.begun_at
    try:
        drained_at = (local_dir(settings.local_root, parse_uri(record.uri)) / DRAINED).stat().st_mtime
    except OSError:
        return None
    return drained_at - time.time() + record.age_seconds


def stage(
    stager: TierStager, plan: SavePlan, planner: TierSavePlanner, state: Mapping[str, Any], *, is_copied: bool = False
) -> tuple[StagedItems, BaseException | None]:
    """Stage this rank's part of the plan. Returns an error, as all ranks must receive it."""
    try:
        if is_copied:
            return stager.stage_items(plan.items, planner, in_background=True), None
        stager.watch(optimizers_in(state).values())
        return near_storage.stage(stager, plan, planner, state), None
    except BaseException as error:
        staged = StagedItems()
        staged.copied.set_exception(error)
        return staged, error


class RunningSaves:
    """Staged saves, oldest first, until their outcome is raised or logged."""

    def __init__(self, settings: Settings, timeout_seconds: float, *, is_sync: bool = False) -> None:
        self._settings, self._timeout_seconds = settings, timeout_seconds
        self._saves_max = 1 if is_sync else settings.checkpoints_in_flight_max
        self._saves: deque[tuple[SaveRecord, Future[None]]] = deque()
        self._reported: set[str] = set()
        """Saves whose error was raised here, as another rank reported it first."""

    @property
    def uris(self) -> set[str]:
        return {record.uri for record, _ in self._saves}

    @property
    def is_last_under_way(self) -> bool:
        return bool(self._saves) and not self._saves[-1][1].done()

    def add(self, record: SaveRecord, future: Future[None]) -> None:
        self._saves.append((record, future))

    def unfinished(self) -> list[tuple[SaveRecord, Future[None]]]:
        return [(record, future) for record, future in self._saves if not future.done()]

    def note_reported(self, uris: Collection[str]) -> None:
        self._reported |= self.uris & set(uris)

    def wait(self, seconds: float) -> None:
        futures.wait([future for _, future in list(self._saves)], seconds)

    def refuses(self, uri: str) -> CheckpointSkippedError | None:
        """Wait until a save to ``uri`` may begin. Returns the reason if it is skipped. Collective.

        Does not raise errors of earlier saves: planning does, on all ranks.
        """
        # Report a save that fails at once (a full disk) now.
        if not requests.is_ill:
            futures.wait([future for _, future in list(self._saves)[-1:]], PROMPT_SECONDS)
        policy = self._settings.staging_policy
        deadline = time.monotonic() + self._timeout_seconds + EXTRA_SECONDS
        # Planning must know the checkpoint that this save replaces.
        count = 1 if uri in self.uris else self._saves_max if policy == "wait" else math.inf
        while True:
            outcomes = all_gather(self._has_capacity(count, deadline))
            if (
                refused := next((one for one in outcomes if isinstance(one, CheckpointSkippedError)), None)
            ) is not None:
                return refused
            if all(outcomes):
                return None

    def _has_capacity(self, count: float, deadline: float) -> CheckpointSkippedError | bool:
        if len(unfinished := self.unfinished()) >= count:
            record, oldest = unfinished[0]
            futures.wait([oldest], min(ROUND_SECONDS, requests.seconds_left()))
            if len(self.unfinished()) >= count:
                get_client(self._settings).stop_probing()
                if requests.is_ill:
                    return ill_disk(self._settings.local_root, rank=dist.get_rank() if is_distributed() else 0)
                if time.monotonic() < deadline:
                    return False
                hung_error = self._not_ended(record)
                return CheckpointSkippedError(hung_error.message, hint=hung_error.hint, **hung_error.context)
        if self._settings.staging_policy == "skip" and len(self.unfinished()) >= self._saves_max:
            return CheckpointSkippedError(
                f"{self._saves_max} saves are still being written",
                hint="Normal now and then with the staging_policy 'skip'; if it is frequent, save less often",
            )
        return True

    def raise_ended(self) -> None:
        while self._saves and self._saves[0][1].done():
            self._finish_oldest()

    def raise_failed_drains(self, run: Location, records: Sequence[SaveRecord]) -> None:
        client = get_client(self._settings)
        drains = client.mover.drains
        for token, (uri, failure) in drains.take_failures({record.uri for record in records}).items():
            if not drains.is_transient(run, failure):
                raise failure
            text = "%s stays on this node for now; its drain is retried: %s"
            log_failure(log, failure, text, uri, failure, level=logging.WARNING)
            client.drain_in_background(token)

    def finish(self, deadline: float | None = None) -> None:
        """Wait for every running save. Raises the first error; logs the others.

        After ``deadline``, waits only for saves not yet on the local tier.
        """
        first: BaseException | None = None
        while self._saves:
            unfinished = len(self._saves)
            try:
                self._finish_oldest(deadline)
            except BaseException as error:
                if first is not None:
                    log.error("another save also failed: %s", error)
                first = first or error
                if len(self._saves) == unfinished:
                    break  # wait only once: the later ones hang too
        if first is not None:
            raise first

    def _finish_oldest(self, deadline: float | None = None) -> None:
        record, running = self._saves[0]
        seconds = self._timeout_seconds + EXTRA_SECONDS
        if deadline is not None and record.is_direct_put:
            seconds = min(seconds, max(0.0, deadline - time.monotonic()))
        futures.wait([running], seconds)
        try:
            running.result(timeout=0)
        except CheckpointSkippedError as error:
            log.warning("%s", error)
        except TimeoutError as error:
            if isinstance(error, TierckptError):
                self._raise_once(record, error)
                return
            raise self._not_ended(record) from error
        except BaseException as error:
            self._raise_once(record, error)
        finally:
            if running.done():
                self._saves.popleft()

    def _not_ended(self, record: SaveRecord) -> OperationTimeoutError:
        if record.is_direct_put:
            tier, hint = Tier.SHARED, "Check the shared tier (`tierckpt doctor`)"
        else:
            tier, hint = Tier.LOCAL, f"Below {self._settings.local_root} {HINT}"
        return OperationTimeoutError(
            f"the save to {record.uri} has not finished",
            hint=f"{hint}. Earlier checkpoints are intact",
            checkpoint=record.uri,
            rank=dist.get_rank() if is_distributed() else 0,
            tier=tier,
            waited_seconds=self._timeout_seconds + EXTRA_SECONDS,
        )

    def _raise_once(self, record: SaveRecord, error: BaseException) -> None:
        if record.uri in self._reported:
            self._reported.discard(record.uri)
            return
        raise error


def plan_save(
    collect: Callable[[], dict[str, Any]],
    session: SaveSession,
    running: RunningSaves,
    raise_failures: Callable[[], None],
    *,
    with_addresses: bool = False,
) -> tuple[SavePlan, TierSavePlanner, Metadata | None]:
    """Run DCP's planning, the only collectives of a save, on the caller's thread."""
    planner = TierSavePlanner()
    planner.with_addresses = with_addresses
    ranks = DistWrapper(None, is_distributed(), 0)
    metadata: Metadata | None = None

    def local_step() -> SavePlan:
        raise_failures()  # so that all ranks raise it and none waits in the collective
        with gc_paused():
            collected = collect()
            planner.set_up_planner(collected, session.storage_meta(), ranks.is_coordinator)
        session.begin()
        return session.plan_local(planner.create_local_plan())

    def global_step(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return session.plan_global(plans)

    try:
        plan = ranks.reduce_scatter("plan", local_step, global_step)
    except CheckpointException as error:
        contexts = [getattr(cause, "context", {}) for cause, _ in error.failures.values()]
        running.note_reported({str(context.get("checkpoint")) for context in contexts})
        session.report_outcome(error)
        raise
    return planner.finish_plan(plan), planner, metadata


def describe_wait(
    location: Location, settings: Settings, running: RunningSaves, stats: Sequence[SaveRecord], deadline: float
) -> str:
    saving = sum(record.local_commit_seconds is None for record, _ in running.unfinished())
    draining = sum(one.is_sent and not one.error and one.shared_commit_seconds is None for one in stats)
    return (
        f"closing: waiting for {saving} save(s) to reach the SSD, {draining} to reach {location.uri}, and retention; "
        f"{max(0.0, deadline - time.monotonic()):.0f} of {settings.exit_timeout_seconds:g} s left "
        "(exit_timeout_seconds). Ctrl-C stops: the rest stays on this node, `tierckpt drain --wait` finishes it"
    )


class BackgroundPruning:
    """Removes checkpoints that ``policy`` does not keep, after each save, on its own thread. Errors are logged."""

    def __init__(
        self, policy: Policy, branch: RunBranch, run_log: RunLog, saves: Sequence[SaveRecord], settings: Settings
    ) -> None:
        self._settings, self._location, self._policy, self._run_log = settings, branch.location, policy, run_log
        self._branch, self._saves = branch, saves
        self._pool = ThreadPool(1, thread_name_prefix="tierckpt-retention")
        self._last: Future[None] = Future()
        self._last.set_result(None)

    def note(self) -> dict[str, str]:
        """Return the note in manifests that lets movers prune after this process (N9)."""
        return {NOTE: self._policy.encode()} if self._policy and self._run_log.is_alone(0.0) else {}

    def start(self) -> None:
        if self._last.done() or self._last.running():
            self._last = self._pool.submit(self.prune)

    def wait(self, seconds: float) -> None:
        futures.wait([self._last], seconds)

    def prune(self, deadline: float | None = None) -> None:
        """Prune until ``deadline`` (monotonic); not if another job saves to the run."""
        policy = self._policy
        if dist.is_initialized() and dist.get_rank() != 0:
            policy = replace(policy, shared=Rule())
        if not policy or int(os.environ.get("LOCAL_RANK", 0)) != 0:
            return
        if not self._run_log.is_alone():
            return  # this job's old checkpoints may be another job's newest

        own = [one.step for one in list(self._saves) if one.local_commit_seconds is not None and not one.error]

        async def within(mover: Mover) -> PruneResult:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return await mover.pruner.prune(self._location, policy, branch=self._branch.now, own=own)

        client = get_client(self._settings)
        try:
            client.run(within(client.mover))
        except Exception as error:  # the save is committed anyway
            is_known = isinstance(error, futures.CancelledError) or client.mover.drainer.is_away(self._location)
            level, name = logging.DEBUG if is_known else logging.WARNING, type(error).__name__
            text = "retention under %s did not finish: %s: %s"
            log_failure(log, error, text, self._location.uri, name, error, level=level)

    def close(self) -> None:
        self._pool.shutdown(wait=False)
