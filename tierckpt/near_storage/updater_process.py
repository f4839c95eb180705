"""The trainer's end of the process that owns an optimizer's state (``updater``): starts it, and hears what it says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from ..errors import CheckpointError, OperationTimeoutError, TierckptError, UpdaterLostError
from ..ipc.child_process import start_python
from ..telemetry import logger
from .messages import receive, send, to_error
from .states import END_SECONDS

log = logger("replay")


class UpdaterProcess:
    """One process after another: ``start`` begins the next when one has ended.

    Args:
        order: what it is to do, without the connection.
        descriptors: of shared memory. They are the trainer's, and outlive the process.
        timeout_seconds: how long any answer may take.
    """

    def __init__(self, order: Mapping[str, Any], descriptors: tuple[int, ...], timeout_seconds: float) -> None:
        self.order = dict(order)
        self.step = -1
        """The newest step that it has made, by what it said."""
        self.pid = -1
        self.starts = 0
        self.is_closed = False
        self._descriptors = descriptors
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._failure: TierckptError | None = None
        self._answers: dict[int, Future[dict[str, Any]]] = {}
        self._count = 0

    @property
    def is_alive(self) -> bool:
        return self._connection is not None and self._failure is None

    def start(self, last_step: int | None = None) -> None:
        """Begin the process, and return when it has brought the state to its newest step: ``step``.

        Args:
            last_step: go back to it, if there are newer ones.

        Raises:
            IntegrityError, CapacityError, ...: what it found. OperationTimeoutError: it said nothing in time.
        Cost: what a Python process with torch takes, a pass over the state, and the steps since blocks were recorded.
        """
        self.stop()
        if self.is_closed:
            raise CheckpointError("the optimizer near storage is closed", hint="Build it again, and call resume()")
        ours, theirs = socket.socketpair()
        with theirs:
            order = self.order | {"connection": theirs.fileno(), "trainer": os.getpid(), "last_step": last_step}
            try:
                self._process = start_python(
                    "tierckpt.near_storage",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,  # whoever reads the trainer's to its end does not wait for this one
                    pass_fds=(theirs.fileno(), *self._descriptors),
                    start_new_session=True,  # what ends a job's process group must not end a step in the middle
                )
            except OSError as error:
                ours.close()
                raise self._lost(f"cannot be started: {error}") from error
        assert self._process.stdin is not None
        try:
            with self._process.stdin as file:
                file.write(json.dumps(order).encode())
        except BrokenPipeError:
            pass  # it has ended: its end of the connection says so
        self._connection, self._failure, self.step = Connection(ours.detach()), None, -1
        self.pid, self.starts = self._process.pid, self.starts + 1
        threading.Thread(target=self._hear, args=(self._connection,), name="tierckpt-updater", daemon=True).start()
        self.await_step(0)

    def send(self, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Raises UpdaterLostError, or what it failed of."""
        try:
            assert self._connection is not None
            send(self._connection, message, payload)
        except OSError:
            with self._changed:  # why, it may have said
                self._changed.wait_for(lambda: self._failure is not None, 1.0)
            raise self._failure or self._lost() from None

    def ask(self, message: Mapping[str, Any], payload: bytes = b"") -> Future[dict[str, Any]]:
        """Send ``message``; the future is its answer, or why there is none."""
        with self._changed:
            self._count += 1
            number = self._count
            answer: Future[dict[str, Any]] = Future()
            self._answers[number] = answer
        self.send({**message, "number": number}, payload)
        return answer

    def call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to ``message``. Raises as ``await_step``."""
        try:
            return self.ask(message).result(self._timeout_seconds)
        except TimeoutError as error:
            if isinstance(error, TierckptError):
                raise
            raise self._late(self._timeout_seconds) from None

    def await_step(self, step: int, timeout_seconds: float | None = None) -> None:
        """Return when it has made ``step``.

        Raises:
            UpdaterLostError: it has ended. OperationTimeoutError: it says nothing, and was ended. Or what it failed of.
        """
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + seconds
        with self._changed:
            while self.step < step and self._failure is None:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    break
            if self.step >= step:
                return
        if self._failure is not None:
            raise self._failure
        raise self._late(seconds)

    def _late(self, seconds: float) -> OperationTimeoutError:
        self.stop()
        return OperationTimeoutError(
            f"the process of the optimizer near storage has not answered for {seconds:g} s",
            hint="Look for a disk that hangs below its directory. Its state is safe; step() begins it again",
            waited_seconds=seconds,
        )

    def close(self) -> None:
        """Let it finish what it was given, then end it."""
        try:
            if self.is_alive:
                self.send({"op": "close"})
                if self._process is not None:
                    self._process.wait(END_SECONDS)
        except (TierckptError, subprocess.TimeoutExpired):
            pass
        self.stop()

    def stop(self) -> None:
        """End it, whatever it does. Its files are as good as after a crash: the next one begins there."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        connection, self._connection = self._connection, None
        if connection is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None, 5.0)  # its end is heard
            connection.close()

    def _hear(self, connection: Connection) -> None:
        failure: TierckptError = self._lost()
        try:
            while True:
                message, _ = receive(connection)
                with self._changed:
                    if "ready" in message or "done" in message:
                        self.step = message["ready"] if "ready" in message else message["done"]
                        self._changed.notify_all()
                    elif "failed" in message:
                        failure = to_error(message["failed"])
                    else:
                        self._answer(message)
        except (EOFError, OSError):
            pass
        with self._changed:
            self._failure = failure
            waiting, self._answers = self._answers, {}
            self._changed.notify_all()
        for answer in waiting.values():
            answer.set_exception(failure)

    def _answer(self, message: dict[str, Any]) -> None:
        answer = self._answers.pop(message["number"])
        if "error" in message:
            answer.set_exception(to_error(message))
        else:
            answer.set_result(message)

    def _lost(self, what: str = "has ended") -> UpdaterLostError:
        return UpdaterLostError(
            f"the process of the optimizer near storage (its state is in {self.order['directory']}) {what}",
            hint="Nothing is lost. Call step() again: it begins the process again, and makes the step it was at",
            directory=self.order["directory"],
        )
