"""The trainer's end of the updater process, and the shared memory with its steps, also for a new process (N4)."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

from ..arena.memory import Memory
from ..errors import CheckpointError, IntegrityError, OperationTimeoutError, TierckptError, UpdaterLostError, from_json
from ..process_start import start_python
from ..replay.optimizers import local_shard
from ..resources import start_thread
from ..telemetry import logger
from .state_file import DMESG, END_SECONDS, LOST, BlockLayout, TrainerParameter, shared_bytes, shared_tensors

log = logger("replay")

LOOK_SECONDS = 0.1
IDLE_SECONDS = 5.0
"""An idle process is reported after this wait."""
END_OF_PROCESS_SECONDS = 1.0
KILL_SECONDS = 20.0
"""Maximum wait for a killed process, unless the kernel blocks it on a disk."""


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
                    "tierckpt.near_storage.updater",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,  # readers of the trainer's stdout must not wait for it
                    pass_fds=(child_end.fileno(), *self._descriptors),
                    start_new_session=True,  # signals to the job's group must not end it in a step
                )
            except OSError as error:
                own_end.close()
                raise self.lost(f"cannot be started: {error}") from error
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as file:  # the closed connection reports it
            file.write(json.dumps(order).encode())
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
        seen, since, is_said = self._progress()[:2], time.monotonic(), False
        with self.changed:
            while not is_done():
                if self._failure is not None:
                    raise self._failure
                if seen != (now := self._progress()[:2]):
                    seen, since = now, time.monotonic()
                seconds = time.monotonic() - since
                if seconds >= self._timeout_seconds:
                    break
                if seconds >= IDLE_SECONDS and not is_said:
                    is_said = True
                    log.warning("training waits: %s", self._idle_reason())
                self.changed.wait(min(LOOK_SECONDS, self._timeout_seconds))
            else:
                return
        raise self._timeout_error(self._idle_reason())

    def _progress(self) -> tuple[int, int, str]:
        """Return its steps, CPU time and state: a slow process makes steps or uses CPU time, a hanging one does not."""
        try:
            state, *fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return self.step, 0, ""
        return self.step, int(fields[10]) + int(fields[11]), state

    def _idle_reason(self) -> str:
        what = "is stopped" if self._progress()[2] in ("T", "t") else "makes no progress (does its disk hang?)"
        return f"process {self.pid} of the optimizer near storage {what}"

    def _timeout_error(self, reason: str) -> OperationTimeoutError:
        self.stop()
        return OperationTimeoutError(
            f"{reason}; it was killed after {self._timeout_seconds:g} s",
            hint="Check whether the disk of its directory hangs. Its state is safe; step() starts it again",
            waited_seconds=self._timeout_seconds,
        )

    def close(self) -> None:
        with contextlib.suppress(TierckptError, subprocess.TimeoutExpired):
            if self.is_alive:
                self.send({"op": "close"})
                if self._process is not None:
                    self._process.wait(END_SECONDS)
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
        with contextlib.suppress(EOFError, OSError):
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


@dataclass(slots=True)
class Sent:
    step: int
    head: bytes
    gradients: list[list[str]] = field(default_factory=list)
    is_whole: bool = False


class StepChannel:
    def __init__(
        self,
        members: Sequence[TrainerParameter],
        layout: BlockLayout,
        tensors: Mapping[str, torch.Tensor],
        order: Mapping[str, Any],
        *,
        numa_nodes: tuple[int, ...],
        timeout_seconds: float,
    ) -> None:
        self.moved_bytes = 0
        self._layout, self._tensors = layout, tensors
        self._memory = Memory.allocate(shared_bytes(members), shared=True, numa_nodes=numa_nodes)
        self._shared = shared_tensors(members, self._memory.view)
        descriptor = cast(int, self._memory.fd)
        shared_order = {
            "members": [[one.key, one.name, one.shape, one.dtype] for one in members],
            "memory": [descriptor, str(self._memory.kind)],
        }
        self.process = UpdaterProcess({**order, **shared_order}, (descriptor,), timeout_seconds)
        self._begun: Sent | None = None

    def close(self) -> None:
        self.process.close()
        self.process.is_closed = True
        self._shared = {}
        self._memory.close()

    @property
    def is_interrupted(self) -> bool:
        return self._begun is not None

    def forget(self) -> None:
        self._begun = None

    def check_step(self, step: int) -> None:
        if self.process.step != step:
            raise IntegrityError(
                f"the optimizer's state in {self.process.order['directory']} is of step {self.process.step}, but "
                f"training is at step {step}",
                hint="The gradient log is damaged. Call resume() to continue at that step, or restore a checkpoint",
            )

    def ask(self, message: Mapping[str, Any], step: int) -> Future[dict[str, Any]]:
        if not self.process.is_alive:
            self.process.start()
            self.check_step(step)
        return self.process.ask(message)

    def make(self, step: int, head: bytes) -> set[str]:
        """Make a step and take its parameters. Returns keys with a gradient. Repeats an interrupted step unchanged."""
        sent = self._begun = self._begun or Sent(step, head)
        process = self.process
        for attempt in (0, 1):
            try:
                if not process.is_alive:
                    process.start()
                if process.step < step:
                    self.check_step(step - 1)
                    self._send(sent)
                    process.await_step(step)
                else:  # all gradients were in the file
                    process.call({"op": "settle"})
                break
            except UpdaterLostError:
                if attempt:
                    raise
            except BaseException:  # its files have all of the step, or nothing
                process.stop()
                raise
        self.take_parameters()
        self._begun = None
        return {key for keys in sent.gradients for key in keys}

    def others(self) -> list[str]:
        bits = {key: local_shard(one.detach()).view(torch.int16) for key, one in self._tensors.items()}
        return [key for key, one in self._shared.items() if not torch.equal(one.view(torch.int16), bits[key])]

    @torch.no_grad()
    def take_parameters(self) -> None:
        for key, found in self._shared.items():
            local_shard(self._tensors[key].detach()).copy_(found)
            self.moved_bytes += found.nbytes

    def _send(self, sent: Sent) -> None:
        self.process.send({"op": "begin_step"}, sent.head)
        for keys in sent.gradients if sent.is_whole else self._copied(sent):
            self.process.send({"op": "take", "keys": keys})
        self.process.send({"op": "end_step"})

    @torch.no_grad()
    def _copied(self, sent: Sent) -> Iterator[list[str]]:
        """Yield blocks as they are copied: each is stepped during the next copy. Copies stay (N4)."""
        sent.gradients.clear()
        for block in self._layout.blocks:
            found = {key: local_shard(one) for key in block.keys if (one := self._tensors[key].grad) is not None}
            for key, gradient in found.items():
                self._shared[key].copy_(gradient)
                self.moved_bytes += gradient.nbytes
            if found:
                sent.gradients.append(list(found))
                yield sent.gradients[-1]
        sent.is_whole = True
