"""Retention during training."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace

import torch.distributed as dist

from ..checkpoint.prune import PruneResult
from ..checkpoint.retention import NOTE, Policy, Rule
from ..client import get_client
from ..config import Settings
from ..mover import Mover
from ..resources import ThreadPool
from ..telemetry import logger
from .run_branch import RunBranch
from .run_log import RunLog
from .saves import SaveRecord

log = logger("checkpointer")


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
            is_known = getattr(error, "is_logged", False) or client.mover.drainer.is_away(self._location)
            is_known |= isinstance(error, futures.CancelledError)
            level, name = logging.DEBUG if is_known else logging.WARNING, type(error).__name__
            log.log(level, "retention under %s did not finish: %s: %s", self._location.uri, name, error)

    def close(self) -> None:
        self._pool.shutdown(wait=False)
