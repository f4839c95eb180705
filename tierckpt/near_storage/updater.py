"""The process that owns an optimizer's state.

The threads of a step:
    main        queues each block when its gradients are in shared memory
    workers     bring a block to the step, in the version that is not current (N2); a block has one worker
    log         when all gradients have arrived: writes the frame to its file, then syncs it
    finisher    when the frame is in its file and the blocks are at the step: has the workers write the new parameters
                over the gradients (N4), and reports the step
    checker     when a save has read the blocks: compares them with their digests, and releases them (N7)
    workers     every ``persist_every`` steps, other blocks each step: record the block after the frame's sync (N3)

Any error ends the process; its successor starts from the files (crash only).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..arena.memory import Kind, Memory
from ..disk.durable import fsync_file, translated
from ..errors import IntegrityError, ObjectNotFoundError, OperationTimeoutError, StateMismatchError
from ..process_start import begin_command
from ..replay.apply import Replay
from ..replay.capture import Step
from ..replay.frame import Frame, decode, encode
from ..replay.optimizers import CLASS_BY_NAME
from ..resources import ThreadPool
from ..save import log_segments
from ..save.log_segments import FramePosition, SegmentFile
from ..telemetry import log_to, logger
from .state_file import (
    END_SECONDS,
    MASTER,
    BlockLayout,
    StateBlock,
    StateFile,
    Tensors,
    TrainerParameter,
    current_state,
    directory_lock,
    layout_of,
    shared_tensors,
)
from .updater_process import receive, send, to_message


def read_frames(directory: Path, layout: str, step: int) -> Iterator[Frame]:
    """Yield the frames after ``step``, up to the first damaged one."""
    if (paths := log_segments.paths_in(directory)) and log_segments.step_of_path(paths[0]) > step:
        log.warning("the gradients of step %d are missing: ignoring %s and later files", step + 1, paths[0])
    for position in _places(directory, step):
        where, number = position.file_text, position.number
        if position.layouts != {"": layout} or number > step + 1:
            log.warning("ignoring the frame of step %d in %s: it does not follow step %d", number, where, step)
            return
        if number == step + 1:
            try:
                yield decode(position.read, where=where)
            except IntegrityError as error:
                log.warning("%s", error.message)
                return
            step = number


def _places(directory: Path, step: int) -> Iterator[FramePosition]:
    found, ended = log_segments.segments_in(directory)
    first = next((one for one in reversed(found) if one.step <= step), None)
    for position in log_segments.walk_from(found, first, ended):
        if isinstance(position, FramePosition):
            yield position
        elif position:
            log.warning("%s", position)


class GradientFiles:
    """The gradient log, in segments that are removed when obsolete (N3). Removes segments after ``step``.

    No file is truncated: an earlier step begins a new segment (S2 of ``save.log_segments``).
    """

    def __init__(self, directory: Path, step: int) -> None:
        self._directory = directory
        self._file: SegmentFile | None = None
        self._previous = next((one.digest for one in _places(directory, step - 1) if one.number == step), "")
        log_segments.remove_from(directory, step)
        with translated(directory):
            for path in log_segments.paths_in(directory):
                fsync_file(path)  # a previous process may have died before its fsync (N3)
        self.begin(step)

    def begin(self, step: int) -> None:
        self.close()
        fields = {"bases": [], "previous": self._previous, "owner": {}}
        self._file = SegmentFile(self._directory, step, fields, is_cached=True)
        self._previous = self._file.digest

    def append(self, frame: Frame) -> None:
        """It survives this process, and after ``sync`` a power cut."""
        assert self._file is not None
        head, views, self._previous = encode(frame, self._previous)
        with translated(self._directory):
            self._file.append([memoryview(head), *views])

    def sync(self) -> None:
        assert self._file is not None
        with translated(self._directory):
            self._file.sync()

    def trim(self, step: int) -> None:
        log_segments.remove_before(self._directory, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


log = logger("replay")

WAIT_SECONDS = 600.0


class LiveBlock:
    """Only its ``worker`` uses it."""

    def __init__(
        self, file: StateFile, block: StateBlock, kind: type[torch.optim.Optimizer], worker: ThreadPool
    ) -> None:
        self.block, self.worker = block, worker
        self._file, self._kind = file, kind
        self.counts, self.recorded, self._recorded_digest = file.newest(block)
        self._digest = self._recorded_digest
        """Of the version that the next step is applied to (N7)."""
        self.recorded_before = self.recorded
        self._at, self._room = -1, Tensors()
        self._replay: Replay | None = None
        self.reader: Future[None] | None = None
        """Done when a save has read the current version."""

    @property
    def step(self) -> int:
        return self.recorded if self._replay is None else self._replay.version

    def apply(self, step: Step) -> None:
        """Bring the block from the previous step to ``step`` (N2)."""
        if self._replay is None:
            self.check()  # before the other version, which may be needed, is overwritten
            self._at = self._file.copy(self.block, self.counts)
            self._room = self._file.tensors(self.block, self._at, all_of_them=True)
            self._replay = self._built(self.recorded)
        self._file.check(self.block, self._at, self._digest)
        self._replay.apply(step)
        self._place_new(self._replay)
        self._digest = self._file.digest(self.block, self._at)

    def record(self) -> None:
        if self._replay is not None:
            self._file.record(self.block, self._at, self.step, self._digest)
            self._recorded_digest = self._digest
            self.recorded_before, self.recorded = self.recorded, self.step
            self.counts, self._replay = self._at, None

    def check(self) -> None:
        self._file.check(self.block, self.counts, self._recorded_digest)

    def masters(self) -> dict[str, torch.Tensor]:
        if self._replay is not None:
            return self._replay.parameters
        return {key: found[MASTER] for key, found in self._file.tensors(self.block, self.counts).items()}

    def _built(self, step: int) -> Replay:
        tensors = self._file.tensors(self.block, self._at)
        masters = {key: found.pop(MASTER) for key, found in tensors.items()}
        return Replay(self._kind, masters, tensors, step)

    def _place_new(self, replay: Replay) -> None:
        state, room, is_new = replay.state, self._room, False
        for key, tensors in state.items():
            for name, tensor in tensors.items():
                if not isinstance(tensor, torch.Tensor):
                    continue
                if name not in room[key] or room[key][name].shape != tensor.shape:
                    raise StateMismatchError(
                        f"a step of {self._kind.__name__} keeps {name!r} of parameter {key}, which the file lacks",
                        hint="Options that decide which state is kept (momentum, amsgrad) cannot change in a directory",
                    )
                if room[key][name].data_ptr() != tensor.data_ptr():
                    room[key][name].copy_(tensor)
                    is_new = True
        if is_new:
            present = {key: {MASTER, *(n for n, t in found.items() if t is not None)} for key, found in state.items()}
            self._file.mark(self.block, self._at, present)
            self._replay = self._built(replay.version)


class Updater:
    def __init__(self, order: Mapping[str, Any], connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._persist_every = max(1, int(order["persist_every"]))
        members = [TrainerParameter(one[0], one[1], tuple(one[2]), one[3]) for one in order["members"]]
        self._kind = CLASS_BY_NAME[order["kind"]]
        groups = _decoded(bytes.fromhex(order["groups"])).hyperparameters
        layout = layout_of(self._kind, members, groups)
        descriptor, kind = order["memory"]
        self._memory = Memory.from_fd(descriptor, Kind(kind))
        self._shared = shared_tensors(members, self._memory.view)
        count = max(1, int(order["workers"]))
        self._workers = [ThreadPool(1, f"tierckpt-update-{number}") for number in range(count)]
        self._logger = ThreadPool(1, "tierckpt-log")
        self._finisher = ThreadPool(1, "tierckpt-finish")
        self._writer = ThreadPool(1, "tierckpt-checkpoint")
        self._checker = ThreadPool(1, "tierckpt-check")  # one thread: recording for the next save queues after it
        self._open(Path(order["directory"]), layout, order["last_step"])
        self._begun: Step | None = None
        self._gradients: dict[str, torch.Tensor] = {}
        self._work: list[Future[None]] = []
        self._holds: dict[int, Future[None]] = {}

    def _open(self, directory: Path, layout: BlockLayout, last_step: int | None) -> None:
        found = current_state(directory, layout)
        if found is None:
            raise ObjectNotFoundError(f"{directory} has no optimizer state", path=directory)
        self._layout, self._digest = layout, layout.digest
        self._file = StateFile(found, layout)
        if last_step is not None:
            self._go_back(found, last_step)
        total, opened = [0] * len(self._workers), dict[int, Future[LiveBlock]]()
        for block in sorted(layout.blocks, key=lambda one: -one.size_bytes):
            number = total.index(min(total))
            total[number] += block.size_bytes
            worker = self._workers[number]
            opened[block.index] = worker.submit(LiveBlock, self._file, block, self._kind, worker)
        self._blocks = [opened[block.index].result() for block in layout.blocks]
        self._block_of = {key: live for live in self._blocks for key in live.block.keys}
        self.step = self._roll_forward(found)
        self._durable_step, self._synced = self.step, threading.Condition()
        self._files = GradientFiles(found, self.step)

    def _go_back(self, directory: Path, last_step: int) -> None:
        """Drop all later steps, if ``last_step`` can be reached; safe to repeat."""
        oldest = min(self._file.newest(block, last_step)[1] for block in self._layout.blocks)
        reached = max((frame.number for frame in read_frames(directory, self._digest, oldest)), default=oldest)
        if reached < last_step:
            raise IntegrityError(
                f"the gradients in {directory} cover steps {oldest} to {reached}, not {last_step}",
                hint="Restore the newest checkpoint that all ranks have",
                path=directory,
            )
        self._file.forget_after(last_step)
        GradientFiles(directory, last_step).close()

    def _roll_forward(self, directory: Path) -> int:
        newest = min(live.step for live in self._blocks)
        for frame in read_frames(directory, self._digest, newest):
            step = frame.steps[""]
            waiting = [live.worker.submit(live.apply, step) for live in self._blocks if live.step == frame.number - 1]
            for one in waiting:
                one.result()
            newest = frame.number
        late = [live for live in self._blocks if live.step != newest]
        if late:
            raise IntegrityError(
                f"block {late[0].block.index} of the optimizer's state in {directory} is at step {late[0].step}, but "
                f"the gradient log ends at step {newest}",
                hint="The gradient log is damaged. Use an empty directory, and restore a checkpoint",
                path=directory,
            )
        return newest

    def take(self, keys: Sequence[str]) -> None:
        assert self._begun is not None
        found, live = {key: self._shared[key] for key in keys}, self._block_of[keys[0]]
        self._gradients |= found
        self._work.append(self._do(live.worker, live.apply, replace(self._begun, gradients=found)))

    def end_step(self) -> None:
        """Blocks without gradients are at the step too."""
        assert self._begun is not None
        whole, self._begun = replace(self._begun, gradients=self._gradients), None
        self.step = whole.version
        without = [live for live in self._blocks if self._gradients.keys().isdisjoint(live.block.keys)]
        self._work += [self._do(live.worker, live.apply, whole) for live in without]
        self._do(self._logger, self._log, Frame(self.step, {"": whole}, {"": self._digest}), self._work)

    def _log(self, frame: Frame, work: list[Future[None]]) -> None:
        self._files.append(frame)
        self._do(self._finisher, self._finish, frame.number, work)
        self._files.sync()
        with self._synced:
            self._durable_step = frame.number
            self._synced.notify_all()
        if frame.number % self._persist_every == 0:
            self._files.begin(frame.number)
            self._files.trim(min(live.recorded_before for live in self._blocks))

    def _finish(self, step: int, work: list[Future[None]]) -> None:
        _wait(work)
        self._give_parameters()
        for live in self._blocks:  # before the report: the next step queues after it
            if step % self._persist_every == live.block.index % self._persist_every:
                self._do(live.worker, self._record_unread, live)
        self.tell({"done": step})

    def _give_parameters(self) -> None:
        def give(live: LiveBlock) -> None:
            for key, master in live.masters().items():
                self._shared[key].copy_(master)

        _wait(self._on_blocks(give))

    def _record(self, live: LiveBlock) -> None:
        """Record a block (N3) after a save that reads it."""
        if live.reader is not None:
            live.reader.result(WAIT_SECONDS)
        with self._synced:
            if not self._synced.wait_for(lambda: self._durable_step >= live.step, WAIT_SECONDS):
                raise OperationTimeoutError(
                    f"the gradients of step {live.step} were not on the disk after {WAIT_SECONDS:g} s",
                    hint="Check whether the disk hangs",
                )
        live.record()

    def _record_unread(self, live: LiveBlock) -> None:
        if live.reader is None or live.reader.done():
            self._record(live)

    def hold(self, number: int) -> None:
        """Record every block, answer with the versions, and keep them until ``release``."""
        released = self._holds[number] = Future()

        def record(live: LiveBlock) -> None:
            self._record(live)
            live.reader = released

        self._do(self._writer, self._answer_with_versions, number, self.step, self._on_blocks(record))

    def _answer_with_versions(self, number: int, step: int, recorded: list[Future[None]]) -> None:
        _wait(recorded)
        versions = [live.counts for live in self._blocks]
        self.tell({"number": number, "step": step, "pid": os.getpid(), "versions": versions})

    def release(self, number: int, hold: int) -> None:
        """Check a held state after a save has read it, and allow its replacement.

        Ignores holds of an earlier process.
        """
        released = self._holds.pop(hold, None)

        def answer_when_checked() -> None:
            if released is not None:
                for live in self._blocks:
                    live.check()
                released.set_result(None)
            self.tell({"number": number, "pid": os.getpid()})

        self._do(self._checker, answer_when_checked)

    def serve(self, trainer: int) -> None:
        self.tell({"done": self.step})
        verbs: dict[str, Callable[..., None]] = {
            "take": self.take, "end_step": self.end_step, "settle": self._settle, "hold": self.hold,
            "release": self.release,
        }  # fmt: skip
        with suppress(EOFError, ConnectionError):
            while self._connection.poll(1.0) or os.getppid() == trainer:
                if not self._connection.poll(0):
                    continue
                message, payload = receive(self._connection)
                verb = message.pop("op")
                if verb == "close":
                    break
                if verb == "begin_step":
                    self._begun, self._gradients, self._work = _decoded(payload), {}, []
                else:
                    verbs[verb](**message)
        self._end()

    def _settle(self, number: int) -> None:
        step, recorded = self.step, self._on_blocks(self._record)

        def end() -> None:
            _wait(recorded)
            self._give_parameters()
            self._answer_with_versions(number, step, [])

        self._do(self._finisher, end)

    def _end(self) -> None:
        timer = threading.Timer(END_SECONDS, os._exit, [1])
        timer.daemon = True
        timer.start()
        for pool in (self._logger, self._finisher, *self._workers, self._writer, self._checker):
            pool.shutdown(wait=True)
        self._files.close()
        self._shared = {}
        self._memory.close()

    def tell(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError), self._sending:  # ``serve`` detects the dead trainer
            send(self._connection, message)

    def _on_blocks(self, call: Callable[[LiveBlock], None]) -> list[Future[None]]:
        return [self._do(live.worker, call, live) for live in self._blocks]

    def _do(self, pool: ThreadPool, call: Callable[..., None], *arguments: Any) -> Future[None]:
        def run() -> None:
            try:
                call(*arguments)
            except BaseException as error:
                log.exception("the optimizer process ends with an error")
                self.tell({"failed": to_message(error)})
                os._exit(1)

        return pool.submit(run)


def _wait(work: Sequence[Future[None]]) -> None:
    for one in work:
        one.result(WAIT_SECONDS)


def _decoded(data: bytes) -> Step:
    view = memoryview(data)
    return decode(lambda offset, size: view[offset : offset + size], where="from the trainer").steps[""]


def main() -> None:
    begin_command()
    log_to(sys.stderr, "text", "warning")
    torch.set_num_threads(1)
    order = json.loads(sys.stdin.read())
    connection = Connection(order["connection"])
    try:
        with directory_lock(Path(order["directory"]), order["trainer"]):
            Updater(order, connection).serve(order["trainer"])
    except Exception as error:
        log.exception("the optimizer process ends with an error")
        with suppress(OSError):
            send(connection, {"failed": to_message(error)})
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
