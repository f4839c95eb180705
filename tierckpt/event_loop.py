"""An event loop on its own thread, for blocking callers on other threads; its fork and exit.

Timeouts are applied inside the loop, so they cancel the work itself. A forked child rejects calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import concurrent.futures.thread  # imported first, so that its exit hook runs after this module's
import ctypes
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .disk.durable import translate_os_error
from .errors import TierckptError
from .resources import UNCANCELLED, ThreadPool, start_thread
from .tracebacks import short_traceback
from .types import Tier

T = TypeVar("T")

CLOSE_TIMEOUT_SECONDS = 10.0
CLOSE_SECONDS_MIN = 1.0

_loops: weakref.WeakSet[LoopThread] = weakref.WeakSet()


class LoopThread:
    def __init__(self, root: Path) -> None:
        """Errors of the operating system that name no path name ``root``."""
        self._root = root
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._is_closed, self._entering = False, threading.Lock()
        self._pid = os.getpid()
        # Made on its thread: Ctrl-C interrupts the main thread only, and a half-made loop complains when it is freed.
        loop: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._thread = threading.Thread(target=_run_loop, args=(loop,), name="tierckpt", daemon=True)
        try:
            start_thread(self._thread)
            self._loop = loop.result()
        except BaseException:
            loop.add_done_callback(_stop)
            raise
        _loops.add(self)

    @property
    def is_ours(self) -> bool:
        return self._pid == os.getpid()

    @property
    def patience(self) -> float:
        return CLOSE_TIMEOUT_SECONDS

    @short_traceback
    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Never call this from the loop itself."""
        tasks: list[asyncio.Task[Any]] = []
        is_abandoned = threading.Event()

        async def call() -> T:
            tasks.extend(filter(None, [asyncio.current_task()]))
            if is_abandoned.is_set():
                work.close()
                raise asyncio.CancelledError
            return await work

        try:
            self._check_caller()
        except BaseException:
            work.close()
            raise
        future = None
        try:
            future = self._begin(call)
            return future.result()
        except OSError as error:
            if isinstance(error, TierckptError) or error.errno is None:
                raise
            path = Path(os.fsdecode(error.filename)) if error.filename else self._root
            raise translate_os_error(error, path, Tier.LOCAL) from error
        except BaseException:
            is_abandoned.set()
            # Interrupted, perhaps in ``_begin`` when the work has begun: the caller closes its files next.
            if (future is None and not self._is_closed) or (future is not None and not future.done()):
                asyncio.run_coroutine_threadsafe(_end(tasks), self._loop).result(CLOSE_TIMEOUT_SECONDS)
            raise
        finally:
            if future is not None:
                self._calls.discard(future)
            del future  # breaks a reference cycle through the traceback
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        try:
            future = self._begin(lambda: work)
        except BaseException:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:  # else ``close`` ends it
                work.close()
            raise
        future.add_done_callback(self._calls.discard)
        return future

    def _begin(self, call: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        with self._entering:  # a call registers before ``close``, which ends it, or is rejected
            self._check_open()
            future = asyncio.run_coroutine_threadsafe(call(), self._loop)
            self._calls.add(future)
        return future

    def _check_caller(self) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking tierckpt call was made on tierckpt's own event loop")
        if not self.is_ours:
            raise TierckptError(
                "an object was used in a forked child of its process", hint="Open it again in the child"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierckptError("tierckpt is closed in this process, or the process is exiting", hint="Open it again")

    def call_soon(self, call: Callable[..., object], *arguments: Any) -> None:
        """Raise TierckptError if the loop is closed."""
        with self._entering:
            self._check_open()
            self._loop.call_soon_threadsafe(call, *arguments)

    def close(self) -> None:
        """Cancel all calls, and end the thread. Idempotent."""
        if self._is_closed or not self.is_ours:
            return
        self.run(self._stop())
        with self._entering:
            self._is_closed = True
        for call in tuple(self._calls):
            call.cancel()  # else the thread that waits for it blocks the process's exit
        self._loop.call_soon_threadsafe(self._stop_loop)
        self._thread.join(timeout=10.0)

    def _stop_loop(self, turns: int = 3) -> None:
        if turns:
            self._loop.call_soon(self._stop_loop, turns - 1)
        else:
            self._loop.stop()

    async def _stop(self) -> None:
        """Wait until cancelled tasks have closed their files."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            if task not in UNCANCELLED:
                task.cancel()
        if left:
            _, hung = await asyncio.wait(
                left, timeout=min(CLOSE_TIMEOUT_SECONDS, max(CLOSE_SECONDS_MIN, self.patience))
            )
            for task in hung:
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # it ends with the process


def _run_loop(made: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
    try:
        loop = asyncio.new_event_loop()
    except BaseException as error:
        made.set_exception(error)
        return
    loop.set_default_executor(ThreadPool(thread_name_prefix="tierckpt-loop"))
    made.set_result(loop)
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # raised by a listener
            continue
        loop.close()
        return


def _stop(made: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
    if made.exception() is None:
        made.result().call_soon_threadsafe(made.result().stop)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks``, and wait for their end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_SECONDS / 2)


def at_exit(call: Callable[[], None]) -> None:
    """Run ``call`` at exit while thread pools still run: without them the loop cannot do file I/O."""
    threading._register_atexit(call)  # type: ignore[attr-defined]


def _keep_parents() -> None:
    """In a forked child, keep the objects of the parent's loops: native code would wait for threads of the parent."""
    parents = [(one, asyncio.all_tasks(one._loop)) for one in list(_loops)]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(parents))
    _loops.clear()


os.register_at_fork(after_in_child=_keep_parents)
