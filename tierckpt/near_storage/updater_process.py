"""The trainer's end of the updater process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, IntegrityError, OperationTimeoutError, TierckptError, UpdaterLostError, from_json
from ..ipc.child_process import start_python
from ..resources import start_thread
from ..telemetry import logger
from .state_file import DMESG, END_SECONDS, LOST

log = logger("replay")

LOOK_SECONDS = 0.1
IDLE_SECONDS = 5.0
"""An idle process is reported after this wait."""
END_OF_PROCESS_SECONDS = 1.0
KILL_SECONDS = 20.0
"""Maximum wait for a killed process, unless the kernel blocks it on a disk."""


class Idleness:
    """Distinguishes a slow process (it makes steps or uses CPU time) from a hanging one."""

    def __init__(self, process: UpdaterProcess) -> None:
        self._process = process
        self._seen, self._since = self._read_counters()[:2], time.monotonic()

    def seconds(self) -> float:
        seen = self._read_counters()[:2]
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since

    def reason(self) -> str:
        what = "is stopped" if self._read_counters()[2] in ("T", "t") else "makes no progress (does its disk hang?)"
        return f"process {self._process.pid} of the optimizer near storage {what}"

    def _read_counters(self) -> tuple[int, int, str]:
        try:
            state, *fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return self._process.step, 0, ""
        return self._process.step, int(fields[10]) + int(fields[11]), state


class UpdaterProcess:
    """``descriptors``: of shared memory, which outlives the process. ``timeout_seconds``: without progress while an
    answer is pending."""

    def __init__(self, order: Mapping[str, Any], descriptors: tuple[int, ...], timeout_seconds: float) -> None:
        self.order = dict(order)
        self.step = -1
        self.pid = -1
        self.is_closed = False
        self._descriptors = descriptors
        self._timeout_seconds = timeout_seconds
        self.changed = threading.Condition()
        self._sending = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._failure: TierckptError | None = None
        self._answers: dict[int, Future[dict[str, Any]]] = {}
        self._count = 0

    @property
    def is_alive(self) -> bool:
        return self._connection is not None and self._failure is None

    def start(self, last_step: int | None = None) -> None:
        """Start the process, and return when it has brought the state to its newest step, or to ``last_step``.

        Raises the error of the process; OperationTimeoutError.
        """
        self.stop()
        if self.is_closed:
            raise CheckpointError("the optimizer near storage is closed", hint="Build it again, and call resume()")
        own_end, child_end = socket.socketpair()
        with child_end:
            order = self.order | {"connection": child_end.fileno(), "trainer": os.getpid(), "last_step": last_step}
            try:
                self._process = start_python(
                    "tierckpt.near_storage",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,  # readers of the trainer's stdout must not wait for it
                    pass_fds=(child_end.fileno(), *self._descriptors),
                    start_new_session=True,  # signals to the job's group must not end it in a step
                )
            except OSError as error:
                own_end.close()
                raise self.lost(f"cannot be started: {error}") from error
        assert self._process.stdin is not None
        try:
            with self._process.stdin as file:
                file.write(json.dumps(order).encode())
        except BrokenPipeError:
            pass  # the closed connection reports it
        own_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(self._timeout_seconds) + 1, 0))
        with self.changed:
            self._connection, self._failure, self.step = Connection(own_end.detach()), None, -1
        self.pid = self._process.pid
        hearing = threading.Thread(target=self._receive, args=(self._connection,), name="tierckpt-updater", daemon=True)
        start_thread(hearing)
        self.await_step(0)

    def send(self, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Raises UpdaterLostError or the error of the process, OperationTimeoutError if it hangs."""
        try:
            if self._connection is None:
                raise self.lost()
            with self._sending:  # threads that write a checkpoint also send
                send(self._connection, message, payload)
        except BlockingIOError:
            raise self._timeout_error("it reads no messages") from None
        except OSError:
            with self.changed:  # it may have reported its error
                self.changed.wait_for(lambda: self._failure is not None, 1.0)
            raise self._failure or self.lost() from None

    def ask(self, message: Mapping[str, Any]) -> Future[dict[str, Any]]:
        with self.changed:
            self._count += 1
            number = self._count
            answer: Future[dict[str, Any]] = Future()
            self._answers[number] = answer
        self.send({**message, "number": number})
        return answer

    def call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        answer = self.ask(message)
        self._await(answer.done)
        return answer.result()

    def await_step(self, step: int) -> None:
        """Wait until the process has made ``step``, while it makes progress.

        Raises UpdaterLostError; OperationTimeoutError: it was killed; the error of the process.
        """
        self._await(lambda: self.step >= step)

    def _await(self, is_done: Callable[[], bool]) -> None:
        idle, is_said = Idleness(self), False
        with self.changed:
            while not is_done():
                if self._failure is not None:
                    raise self._failure
                seconds = idle.seconds()
                if seconds >= self._timeout_seconds:
                    break
                if seconds >= IDLE_SECONDS and not is_said:
                    is_said = True
                    log.warning("training waits: %s", idle.reason())
                self.changed.wait(min(LOOK_SECONDS, self._timeout_seconds))
            else:
                return
        raise self._timeout_error(idle.reason())

    def _timeout_error(self, reason: str) -> OperationTimeoutError:
        self.stop()
        return OperationTimeoutError(
            f"{reason}; it was killed after {self._timeout_seconds:g} s",
            hint="Check whether the disk of its directory hangs. Its state is safe; step() starts it again",
            waited_seconds=self._timeout_seconds,
        )

    def close(self) -> None:
        try:
            if self.is_alive:
                self.send({"op": "close"})
                if self._process is not None:
                    self._process.wait(END_SECONDS)
        except (TierckptError, subprocess.TimeoutExpired):
            pass
        self.stop()

    def stop(self) -> None:
        """Kill it. Its files are then as after a crash."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            try:
                process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                self._process = process
                raise OperationTimeoutError(
                    f"process {process.pid} of the optimizer near storage was killed but does not end",
                    hint=f"The kernel blocks it on the disk of {self.order['directory']}",
                    waited_seconds=KILL_SECONDS,
                ) from None
        connection, self._connection = self._connection, None
        if connection is not None:
            with self.changed:
                self.changed.wait_for(lambda: self._failure is not None, 5.0)
            connection.close()

    def _receive(self, connection: Connection) -> None:
        failure: TierckptError = self.lost()
        try:
            while True:
                message, _ = receive(connection)
                with self.changed:
                    if "done" in message:
                        self.step = message["done"]
                    elif "failed" in message:
                        failure = from_json(message["failed"])
                    else:
                        self._answers.pop(message["number"]).set_result(message)
                    self.changed.notify_all()
        except (EOFError, OSError):
            pass
        if self._has_met_bad_disk():
            failure = IntegrityError(
                f"the optimizer's state in {self.order['directory']} cannot be read: its process died of SIGBUS",
                hint=f"{DMESG}. {LOST}",
                path=self.order["directory"],
            )
        with self.changed:
            self._failure = failure
            waiting, self._answers = self._answers, {}
            self.changed.notify_all()
        for answer in waiting.values():
            answer.set_exception(failure)

    def _has_met_bad_disk(self) -> bool:
        """Whether the process died on an unreadable page (N6)."""
        process = self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process is not None and process.wait(END_OF_PROCESS_SECONDS) == -signal.SIGBUS
        return False

    def lost(self, what: str = "ended unexpectedly") -> UpdaterLostError:
        return UpdaterLostError(
            f"the process of the optimizer near storage (its state is in {self.order['directory']}) {what}",
            hint="No step is lost. Call step() again: it restarts the process and repeats the current step",
            directory=self.order["directory"],
        )


def send(connection: Connection, message: Mapping[str, Any], payload: bytes = b"") -> None:
    connection.send_bytes(json.dumps(message, default=str).encode() + b"\n" + payload)


def receive(connection: Connection) -> tuple[dict[str, Any], bytes]:
    head, _, payload = connection.recv_bytes().partition(b"\n")
    return json.loads(head), payload


def to_message(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, TierckptError):
        error = CheckpointError(f"{type(error).__name__}: {error}")
    return error.to_json()
