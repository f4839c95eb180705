"""The threads of one load: each reads job after job into a buffer of its own, and the first error ends all of them.

Used by every parallel read: pieces of checkpoints (``parallel_read``), what ranks of a node read together
(``shared_read``), tensors of model files (``loading/fill.py``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from ..arena.memory import Memory
from ..arena.slots import BounceBufferPool
from ..errors import CapacityError, OperationTimeoutError
from ..resources import start_thread
from ..telemetry import logger

log = logger("restore")

J = TypeVar("J")

BUFFER_SECONDS = 600.0
"""How long to wait for the first buffer, which other loads of this process may have."""


class Worker(NamedTuple):
    """What one thread does, given its buffer of ``buffer_bytes`` (0: it needs none)."""

    work: Callable[[Memory | None], None]
    name: str
    buffer_bytes: int = 0


class ReadThreads:
    """Runs ``workers`` side by side, the first of them in the thread of the caller."""

    def __init__(self, workers: Sequence[Worker], buffers: BounceBufferPool) -> None:
        self._workers, self._buffers = workers, buffers
        self._taking = threading.Lock()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Return when all have ended. Raises the first error of any, interrupts included.

        Raises:
            OperationTimeoutError, CapacityError: not even the first has a buffer; nothing was read.
        """
        # They hold this object, which holds what is read and where to: in a cycle, that memory waits for the collector.
        workers, self._workers = self._workers, ()
        if not workers:
            return
        with self._buffer(workers[0], BUFFER_SECONDS) as buffer:
            started: list[threading.Thread] = []
            try:
                for worker in workers[1:]:
                    thread = threading.Thread(target=self._help, args=(worker,), name=worker.name)
                    start_thread(thread)
                    started.append(thread)
                workers[0].work(buffer)
            except BaseException as error:
                self.fail(error)
            try:
                for thread in started:
                    thread.join()
            except BaseException as error:  # interrupted: what they read, and where to, is closed after this
                self.fail(error)
                for thread in started:
                    thread.join()
            if self.error is not None:
                raise self.error

    def each(self, jobs: Iterator[J]) -> Iterator[J]:
        """Yield those of ``jobs`` that no other thread takes, in order; after an error of any thread, no more."""
        while True:
            with self._taking:
                job = None if self.error is not None else next(jobs, None)
            if job is None:
                return
            yield job

    def fail(self, error: BaseException) -> None:
        """End all threads at their next job."""
        with self._taking:
            self.error = self.error or error

    def _help(self, worker: Worker) -> None:
        """Work beside the first thread, which has a buffer already: where there is no other, it does without help.

        Each thread has its own made, while those before it read: a new one costs 3 to 10 ms.
        """
        with contextlib.ExitStack() as stack:
            try:
                buffer = stack.enter_context(self._buffer(worker, 0.0))
            except (OperationTimeoutError, CapacityError) as error:
                log.info("a load reads with a thread less: %s", error)
                return
            except BaseException as error:
                self.fail(error)
                return
            try:
                worker.work(buffer)
            except BaseException as error:
                self.fail(error)

    @contextlib.contextmanager
    def _buffer(self, worker: Worker, timeout_seconds: float) -> Iterator[Memory | None]:
        if not worker.buffer_bytes:
            yield None
            return
        with self._buffers.take(1, worker.buffer_bytes, timeout_seconds) as [memory]:
            yield memory
