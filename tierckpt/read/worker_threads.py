"""Runs the threads of one load to their end; ``parallel_read.py`` decides how many. The first error ends all."""

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
"""Other loads may hold all buffers."""


class Worker(NamedTuple):
    """A thread's work, and the size of its buffer (0: none)."""

    work: Callable[[Memory | None], None]
    name: str
    buffer_bytes: int = 0


class WorkerThreads:
    """Runs ``workers`` in parallel, the first of them in the caller's thread."""

    def __init__(self, workers: Sequence[Worker], buffers: BounceBufferPool) -> None:
        self._workers, self._buffers = workers, buffers
        self._taking = threading.Lock()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run all workers to their end. Raises the first error of any, interrupts included.

        Raises OperationTimeoutError, CapacityError: no buffer for the first worker; nothing was read.
        """
        # Break the cycle from workers to this object, to free sources and targets.
        workers, self._workers = self._workers, ()
        if not workers:
            return
        with self._buffer(workers[0], BUFFER_SECONDS) as buffer:
            started: list[threading.Thread] = []
            try:
                for worker in workers[1:]:
                    thread = threading.Thread(target=self._run_helper, args=(worker,), name=worker.name)
                    start_thread(thread)
                    started.append(thread)
                workers[0].work(buffer)
            except BaseException as error:
                self.fail(error)
            try:
                for thread in started:
                    thread.join()
            except BaseException as error:  # the caller then closes sources and targets
                self.fail(error)
                for thread in started:
                    thread.join()
            if self.error is not None:
                raise self.error

    def iterate(self, jobs: Iterator[J]) -> Iterator[J]:
        """Yield the ``jobs`` that no other thread has taken, in order; none after an error."""
        while True:
            with self._taking:
                job = None if self.error is not None else next(jobs, None)
            if job is None:
                return
            yield job

    def fail(self, error: BaseException) -> None:
        with self._taking:
            self.error = self.error or error

    def _run_helper(self, worker: Worker) -> None:
        """Run an additional thread. Without another buffer, the load has one less."""
        with contextlib.ExitStack() as stack:
            try:
                buffer = stack.enter_context(self._buffer(worker, 0.0))
            except (OperationTimeoutError, CapacityError) as error:
                log.info("a load reads with one thread less: %s", error)
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
