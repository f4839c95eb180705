"""The final save of a job: of an unsaved last step (``LastStep``), or of a preempted job (``FinalSave``).

Ranks see a signal at different moments, but a save is collective. So a thread on each rank posts a note in the
rendezvous store, promises a step, two after the current one, which the rank will not pass before the decision, and
waits for the decision of rank 0: the latest promised step, if a save fits by the measured times. Training waits at the
promised step only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..dcp.stager import storage_id
from ..poll import BRIEF, Poll
from ..rank_store import RankStore
from ..replay.optimizers import parameters_of
from ..resources import start_thread
from ..telemetry import logger
from ..torch_internals import tree_leaves
from .codec import job_state
from .rank_exchange import all_gather, is_distributed
from .saves import SaveRecord

log = logger("checkpointer")

LOOK_SECONDS = 0.25
STORE_SECONDS = 10.0
PATIENCE_SECONDS, PATIENCE_STEPS = 3.0, 10
"""Maximum wait for the loop to end a step."""
SAVES_JUDGED = 5
AHEAD_STEPS = 2


def seconds_to_local(records: Sequence[SaveRecord], unfinished: int) -> float | None:
    """Return the time of another save to the SSD, by the latest ones; None before the first."""
    known = [one.local_commit_seconds for one in records if one.local_commit_seconds is not None][-SAVES_JUDGED:]
    return max(known) * (1 + unfinished) if known else None


class FinalSave:
    """``end_step`` and ``done`` run on the caller's thread; ``request`` on any."""

    def __init__(self, job: str, cost: Callable[[], float | None]) -> None:
        self._key, self._cost = f"tierckpt/{job}/last", cost
        self._lock = threading.Lock()
        self._round = 0
        self._step = 0
        self._promise: int | None = None
        self._decision: dict[str, Any] | None = None
        self._decided = threading.Event()
        self._is_requested = False
        self._deadline = 0.0
        self._reason = ""
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self.decided = threading.Event()

    def request(self, deadline: float, reason: str) -> None:
        if self._is_requested:
            self._deadline = min(self._deadline, deadline)
            return
        self.decided.clear()
        self._deadline, self._reason = deadline, reason
        self._is_requested = True

    @property
    def is_done(self) -> bool:
        return self.decided.is_set()

    def wait(self, deadline: float, step_seconds: float | None) -> None:
        """Wait until ``deadline`` for the decision, unless the loop stalls."""
        patience = max(PATIENCE_SECONDS, PATIENCE_STEPS * (step_seconds or 0.0))
        if self._is_requested and not self.decided.wait(max(0.0, min(deadline - time.monotonic(), patience))):
            log.warning("no step ended within %.3g s: exiting with the saves made so far", patience)

    def end_step(self, step: int) -> bool:
        """Return whether to save ``step``, the final one. The same on every rank."""
        if not is_distributed():
            seconds = self._deadline - time.monotonic()
            return self._is_requested and self._settle(*fits_deadline(step, self._cost(), seconds))
        if self._thread is None:
            self._thread = start_thread(threading.Thread(target=self._watch, name="tierckpt-last-save", daemon=True))
        with self._lock:
            self._step = step
            must_wait = self._promise is not None and step >= self._promise and self._decision is None
        if must_wait and not self._decided.wait(max(0.0, self._deadline - time.monotonic())):
            log.warning("no final save: some ranks did not report in time")
            self.done()
            return False
        decision = self._decision
        if decision is None or step < decision["step"]:
            return False
        return self._settle(decision["fits"], decision["why"])

    def _settle(self, fits: bool, why: str) -> bool:
        if not is_distributed() or dist.get_rank() == 0:
            log.warning("%s: %s", self._reason, why)
        if not fits:
            self.done()
        return fits

    def done(self) -> None:
        with self._lock:
            self._is_requested, self._promise, self._decision = False, None, None
            self._decided.clear()
            self._round += 1
        self.decided.set()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        try:
            store, settled_round = RankStore(self._key, STORE_SECONDS), -1
            while not self._closed.wait(LOOK_SECONDS):
                current = self._round
                if current != settled_round and (self._is_requested or self._is_noted(store, current)):
                    self._agree(store, current)
                    settled_round = current
        except Exception as error:  # the store ends with rank 0, as does the job
            log.debug("the job's store does not answer: %s", error)

    def _is_noted(self, store: RankStore, current: int) -> bool:
        for note in store.peek([f"{current}/note"]) or ():
            self.request(time.monotonic() + float(note["seconds"]) - 2 * LOOK_SECONDS, str(note["reason"]))
            return True
        return False

    def _agree(self, store: RankStore, current: int) -> None:
        with self._lock:
            promise = self._promise = self._step + AHEAD_STEPS
        seconds = self._deadline - time.monotonic()
        store.put(f"{current}/note", {"seconds": seconds, "reason": self._reason})
        store.put(f"{current}/at/{store.rank}", [promise, seconds, self._cost()])
        for _ in Poll(self._deadline - time.monotonic(), BRIEF):
            if self._closed.is_set():
                return
            if store.rank == 0:
                _decide(store, current)
            if decisions := store.peek([f"{current}/decision"]):
                break
        else:
            return
        with self._lock:
            if self._round == current:
                self._decision = decisions[0]
                self._decided.set()


def _decide(store: RankStore, current: int) -> None:
    announced = store.peek([f"{current}/at/{rank}" for rank in range(store.world_size)])
    if announced is None:
        return
    steps, seconds, costs = zip(*announced, strict=True)
    fits, why = fits_deadline(max(steps), max((one for one in costs if one is not None), default=None), min(seconds))
    store.put(f"{current}/decision", {"step": max(steps), "fits": fits, "why": why})


def fits_deadline(step: int, cost_seconds: float | None, seconds: float) -> tuple[bool, str]:
    """Return whether a save of ``step`` reaches the SSD within ``seconds``, and why."""
    fits = seconds > (cost_seconds or 0.0)
    cost = "nothing was measured yet" if cost_seconds is None else f"a save takes {cost_seconds:.3g} s to the SSD"
    return fits, f"step {step} is {'' if fits else 'not '}saved: {cost}, and {max(0.0, seconds):.3g} s are left"


class LastStep:
    """The last ended step and its state, until a save begins: leaving the ``with`` block saves it.

    After ``optimizer.step()`` without ``Checkpointer.step()``, the state has changed and is not saved.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._last: tuple[int, Mapping[str, Any]] | None = None
        updated = self._updated = WeakSet[torch.optim.Optimizer]()
        self._hook = register_optimizer_step_post_hook(lambda one, *_: updated.add(one)) if is_on else None

    def ended(self, step: int, state: Mapping[str, Any]) -> None:
        if self._hook is not None:
            self._last = (step, state)
            self._updated.clear()

    def saved(self) -> None:
        self._last = None

    def take(self) -> tuple[int, Mapping[str, Any]] | None:
        """Return the unsaved step and state; None if changed on some rank. Collective."""
        last, self._last = self._last, None
        if last is None or not any(all_gather(self._has_changed(last[1]))):
            return last
        log.warning(
            "step %d is not saved: an optimizer has stepped since and changed its state. Leave the loop after "
            "Checkpointer.step(), or before optimizer.step()",
            last[0],
        )
        return None

    def close(self) -> None:
        self._last = None
        if self._hook is not None:
            self._hook.remove()

    def _has_changed(self, state: Mapping[str, Any]) -> bool:
        updated = {storage_id(one.tensor) for optimizer in self._updated for one in parameters_of(optimizer)}
        if not updated:
            return False
        try:
            found = tree_leaves(job_state.collect(state))
        except Exception:
            return False
        return any(isinstance(one, torch.Tensor) and storage_id(one) in updated for one in found)
