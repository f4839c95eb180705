"""The threads of one load: each has a buffer, and the first error ends all.

Used by every parallel read: pieces of checkpoints (``parallel_read``), shared reads of ranks (``shared_read``), tensors
of model files (``loading/fill.py``).
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
"""Maximum wait for the first buffer, which other loads of this process may hold."""


class Worker(NamedTuple):
    """The work of one thread, given its buffer of ``buffer_bytes`` (0: none)."""

    work: Callable[[Memory | None], None]
    name: str
    buffer_bytes: int = 0


class ReadThreads:
    """Runs ``workers`` in parallel, the first of them in the caller's thread."""

    def __init__(self, workers: Sequence[Worker], buffers: BounceBufferPool) -> None:
        self._workers, self._buffers = workers, buffers
        self._taking = threading.Lock()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run all workers to their end. Raises the first error of any, interrupts included.

        Raises:
            OperationTimeoutError, CapacityError: the first worker got no buffer; nothing was read.
        """
        # Workers reference this object, which references sources and targets: break the cycle to free that memory.
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
            except BaseException as error:  # interrupted: the caller closes sources and targets after this
                self.fail(error)
                for thread in started:
                    thread.join()
            if self.error is not None:
                raise self.error

    def iterate(self, jobs: Iterator[J]) -> Iterator[J]:
        """Yield the ``jobs`` that no other thread has taken, in order; none after an error of any thread."""
        while True:
            with self._taking:
                job = None if self.error is not None else next(jobs, None)
            if job is None:
                return
            yield job

    def fail(self, error: BaseException) -> None:
        """End all threads before their next job."""
        with self._taking:
            self.error = self.error or error

    def _run_helper(self, worker: Worker) -> None:
        """Work in addition to the first thread. Without another buffer, the load has one thread less.

        Each thread allocates its own, while earlier ones read: a new buffer costs 3 to 10 ms.
        """
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
