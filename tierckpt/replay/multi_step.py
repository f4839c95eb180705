"""Copies a training state to host memory over several steps, and brings it to one version.

    step n          n+1              n+2                    n+K-1
    part 0 ->       part 1 ->        part 2 ->       ...    part K-1 ->, state outside the optimizers
                    gradients of 0   gradients of 0-1       gradients of 0 to K-2

Invariants:
    W1  A step waits for the copy of each part that its update would overwrite. A hung link ends the window (W3).
    W2  Everything else (buffers, schedules, random state, data order) is copied in the call that ends the window: at
        the version that the parts reach.
    W3  No mixed version is returned: fingerprints verify the copies. Anything that a replay cannot repeat, or a lack of
        memory, ends the window with an error. The caller then copies the state whole.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError, ConfigError
from ..planning.transfer_times import Traffic, split_parts, weights_of
from ..poll import wait_while
from ..resources import ThreadPool
from .apply import Key, Replay
from .capture import Capture, Step
from .checksum import Fingerprint
from .link import (
    COPY_TIMEOUT_SECONDS,
    GRADIENTS,
    PARTS,
    CopiedGradients,
    Link,
    OverwrittenError,
    TensorCopy,
    lossless_upper_halves,
)
from .optimizers import (
    Parameter,
    base_of,
    check_replayable,
    layout_digest,
    local_shard,
    may_overwrite_gradients,
    parameters_of,
)
from .redo import Conditions, Exact, Redo, Snapshot, SnapshotFuture, checked_exact, fill_tensors
from .tree import detach

MEASURED_STEPS = 9
OUT_OF_MEMORY = "host memory ran out"
COPY_HANGS = "copies to host memory, or the replay of steps on them, hang"
Take = Callable[[], Any]


@dataclass
class _Part:
    keys: list[str]
    version: int = -1
    copy: TensorCopy | None = None
    replay: Replay | None = None


@dataclass
class _OpenWindow:
    take: Take
    parts: list[_Part]
    remaining_steps: int
    result: SnapshotFuture
    blocked_seconds: float = 0.0
    waited_bytes: int = 0
    copies: list[TensorCopy] = field(default_factory=list)
    pending_work: list[Future[None]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """Gradients are in host memory."""
    fingerprints: Future[dict[Key, Fingerprint]] | None = None
    """The next step waits for them."""
    failure: str = ""
    sealed_version: int = -1

    def fail_unless(self, is_done: bool) -> None:
        """The next step may overwrite the sources of the copies."""
        if not is_done:
            self.failure = self.failure or COPY_HANGS

    def snapshot(self, state: Any, **more: Any) -> Snapshot:
        moved_bytes = sum(copy.size_bytes for copy in self.copies)
        return Snapshot(
            state, self.sealed_version, moved_bytes, self.blocked_seconds, waited_bytes=self.waited_bytes, **more
        )


class _Follower(Capture):
    """Has no reference to a window: that would keep the copied state in host memory until the next window."""

    def __init__(self, stager: MultiStepStager) -> None:
        super().__init__(stager.optimizer)
        self._stager, self._link = stager, stager.link

    def copy(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        window, started_at = self._stager._window, time.perf_counter()
        if window is None or window.sealed_version >= 0 or window.failure or window.result.done():
            return None
        copied_gradients = self._link.logged_gradients[id(self.optimizer)]
        if copied_gradients is None:
            keys = [key for part in window.parts if part.version >= 0 for key in part.keys if key in gradients]
            try:
                copied_gradients = CopiedGradients(self._link.copy([gradients[key] for key in keys], GRADIENTS), keys)
            except MemoryError:
                window.failure = OUT_OF_MEMORY
                return None
            window.copies.append(copied_gradients.copy)
        if self._stager._waits_for_gradients:
            window.fail_unless(self._link.wait(copied_gradients.copy))
        self._link.update_begins()
        window.blocked_seconds += time.perf_counter() - started_at
        return copied_gradients

    def on_step_end(self) -> None:
        self._link.update_ends()


class MultiStepStager:
    """Copies the state of an optimizer, and the rest of a checkpoint, over ``window_steps`` steps.

    Call ``begin`` between two steps, then ``end_of_step`` last in every step, after the schedule. Wait for the future
    of ``begin`` between two steps. One window at a time.

    Args:
        optimizer: one of ``optimizers.ELEMENTWISE``, after its first step.
        window_steps: at least 1. "auto": by the sizes of state and gradients.
        link: shared by the optimizers of a process.
        exact: for parameters on an accelerator. "required": keeps the steps in ``Snapshot.redo``, to be replayed there.
            "approximate": replays them on the CPU, within ``redo.tolerance``, and sets ``Snapshot.inexact``.
        defers: keep the steps of parameters in host memory too. For tests.

    Raises:
        ConfigError: the optimizer cannot be replayed, or an argument is invalid.
    Cost: host memory for a copy of the state and the gradients of two steps, or of all steps if they are kept. On the
        link 1 + r (K - 1) / 2 times the bytes of the state, with r bytes of gradient for each byte of state.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> def train():
        ...     model(torch.ones(2)).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> train()
        >>> with MultiStepStager(optimizer, window_steps=2) as stager:
        ...     copied = stager.begin(lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        ...     train()
        ...     stager.end_of_step()
        ...     snapshot = copied.result()
        >>> torch.equal(snapshot.state["model"]["weight"], model.weight), snapshot.steps
        (True, 1)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        window_steps: int | Literal["auto"] = "auto",
        *,
        link: Link | None = None,
        exact: Exact = "required",
        defers: bool = False,
    ) -> None:
        check_replayable(optimizer)
        self.window_steps = checked_steps(window_steps)
        """0 if it is chosen for each window."""
        self.exact = checked_exact(exact)
        shards = [local_shard(one.tensor) for one in parameters_of(optimizer)]
        self._keeps_steps = defers or any(shard.device.type != "cpu" for shard in shards)
        self.optimizer = optimizer
        self.link = link or Link()
        self._owns_link = link is None
        self._step_hooks = [  # before the hooks of ``_Follower``: otherwise gradients are copied before the part
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._capture: _Follower | None = None
        self._thread_clocks: list[int] = []
        self._replay_pool = ThreadPool(1, "tierckpt-replay", self._add_thread_clock)
        self._fingerprint_pool = ThreadPool(1, "tierckpt-fingerprint", self._add_thread_clock)
        self._window: _OpenWindow | None = None
        self.link.logged_gradients[id(optimizer)] = None
        self.waited_seconds = 0.0
        self._last_step_at = 0.0
        self._gap_seconds: deque[float] = deque(maxlen=MEASURED_STEPS)
        """Time from the end of a step to the next step, which hides copies."""
        self._waits_for_gradients = may_overwrite_gradients(optimizer)
        """Gradients are overwritten early (Nesterov, ``zero_grad`` in place)."""

    def __enter__(self) -> MultiStepStager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add_thread_clock(self) -> None:
        self._thread_clocks.append(time.pthread_getcpuclockid(threading.get_ident()))

    @property
    def is_open(self) -> bool:
        """True while ``end_of_step`` must be called."""
        return self._window is not None

    @property
    def steps(self) -> int:
        """Steps since the beginning of the window."""
        return self._capture.version if self._capture is not None else 0

    @property
    def failure(self) -> str:
        """Reason why the open window failed; '' before."""
        window = self._window
        return window.failure if window is not None else ""

    def traffic(self) -> Traffic:
        """Bytes of a window now, measured rate, and measured time of a step."""
        state_bytes = sum(map(self._size, parameters_of(self.optimizer)))
        seconds = statistics.median(self._gap_seconds) if self._gap_seconds else 0.0
        return Traffic(state_bytes, self.gradient_bytes(), self.link.measured_bytes_per_second, seconds)

    def begin(self, take: Take, window_steps: int = 0) -> Future[Snapshot]:
        """Open a window, and begin to copy the first part. Raises CheckpointError if one is open.

        Args:
            take: returns the checkpoint's content: dicts and lists of tensors and plain values. Called at the end of
                the window's last step.
            window_steps: 0: the default of the stager.

        The future raises CheckpointError if the window fails: copy the state whole then.
        """
        if self._window is not None:
            raise CheckpointError(
                "a multi-step checkpoint is still being copied; a second one cannot begin",
                hint="Save less often than window_steps, or wait for the result of the first one",
            )
        if self._capture is not None:
            self._capture.close()  # drops its failure, and moves its hooks behind the hooks of a log
        sizes = {one.key: self._size(one) for one in parameters_of(self.optimizer)}
        traffic = self.traffic()
        steps = (checked_steps(window_steps) if window_steps else self.window_steps) or traffic.best_steps()
        parts = [_Part(keys) for keys in split_parts(sizes, weights_of(traffic.falling_share(steps), steps))]
        window = self._window = _OpenWindow(take, parts, steps, SnapshotFuture())
        self._capture = _Follower(self)
        self.end_of_step()
        return window.result

    def end_of_step(self) -> None:
        """Copy the next part; with the last part, also the rest of the state. Call it last in every step."""
        window, capture = self._window, self._capture
        if window is None or capture is None:
            return
        started_at = time.perf_counter()
        try:
            window.failure = window.failure or capture.check()
            is_copying = window.remaining_steps > 0 and not window.failure
            work = [self._replay_of(window, step) for step in capture.take_steps()]
            if is_copying:
                window.remaining_steps -= 1
                next_part = next((part for part in window.parts if part.version < 0), None)
                if next_part is not None:
                    work.append(self._begin_part(window, next_part, capture.version))
            # Not before the copy: a replay takes the interpreter lock from this thread.
            window.pending_work += map(self._replay_pool.submit, work)
            if is_copying and not window.remaining_steps:
                self._seal(window, capture)
        except MemoryError:
            window.failure = OUT_OF_MEMORY
        if window.failure:
            self.abandon(window.failure)
        window.blocked_seconds += time.perf_counter() - started_at

    def abandon(self, reason: str) -> None:
        """End an open window: its future raises ``CheckpointError(reason)``."""
        window, self._window = self._window, None
        if window is not None and not window.result.done():
            window.result.set_exception(CheckpointError(reason))

    def wait(self, work: Sequence[Future[Any]]) -> bool:
        """Wait for ``work`` while it makes progress. False if it hangs. Copies from a device have a timeout instead."""
        self.link.update_ends()
        window = self._window
        copies = window.copies if window is not None else []
        if any(one.on_device is not None and not one.done.done() for one in copies):
            return not futures.wait(work, COPY_TIMEOUT_SECONDS).not_done
        return wait_while(work, self._progress)

    def _progress(self) -> tuple[object, int, float]:
        window = self._window  # a background thread may end it
        done = sum(one.done() for one in window.pending_work) if window is not None else 0
        return self.link.progress(), done, sum(map(time.clock_gettime, self._thread_clocks))

    def close(self) -> None:
        """Cancel an open window, and remove the hooks."""
        if self._capture is not None:
            self._capture.close()
        self.link.logged_gradients.pop(id(self.optimizer), None)
        for fence in self._step_hooks:
            fence.remove()
        self.abandon("the multi-step stager was closed before its window ended")
        self._replay_pool.shutdown(cancel_futures=True)
        self._fingerprint_pool.shutdown()
        if self._owns_link:
            self.link.close()

    def gradient_bytes(self) -> int:
        """Bytes of one step's gradients on this rank: from the current ones, else float32."""
        total = 0
        is_narrow: bool | None = None
        for one in parameters_of(self.optimizer):
            size_bytes = local_shard(one.tensor.detach()).nbytes
            if is_narrow is None and one.tensor.grad is not None and not one.tensor.is_cuda:
                is_narrow = lossless_upper_halves(local_shard(one.tensor.grad)) is not None
            total += size_bytes // 2 if is_narrow else size_bytes
        return total

    def _size(self, parameter: Parameter) -> int:
        return sum(one.nbytes for one in self._tensors(parameter))

    def _tensors(self, parameter: Parameter) -> list[torch.Tensor]:
        state = self.optimizer.state.get(parameter.tensor, {})
        tensors = [parameter.tensor.detach(), *(one for one in state.values() if isinstance(one, torch.Tensor))]
        return [local_shard(one) for one in tensors]

    def _begin_part(self, window: _OpenWindow, part: _Part, version: int) -> Callable[[], None]:
        """Begin to copy ``part``. Returns the work that follows the copy."""
        keys = set(part.keys)
        parameters = [one for one in parameters_of(self.optimizer) if one.key in keys]
        part.version = version
        sources = [one for parameter in parameters for one in self._tensors(parameter)]
        strides = [one.stride() for one in sources]
        part.copy = self.link.copy(sources, PARTS)
        window.copies.append(part.copy)
        kind, copy = type(self.optimizer), part.copy
        states = {one.key: self._state(one) for one in parameters}

        def build() -> None:
            copy.done.result(COPY_TIMEOUT_SECONDS)
            if copy.was_overwritten:
                raise CheckpointError("a part was changed outside the optimizer while it was being copied")
            tensors = map(_with_strides, copy.result, strides)
            parameter_copies = {}
            for key, state in states.items():
                parameter_copies[key] = next(tensors)
                states[key] = {n: next(tensors) if isinstance(v, torch.Tensor) else v for n, v in state.items()}
            part.replay = Replay(kind, parameter_copies, states, version)

        return build

    def _state(self, parameter: Parameter) -> dict[str, Any]:
        return dict(self.optimizer.state.get(parameter.tensor, {}))

    def _before_step(self, *_: Any) -> None:
        """Wait for the copies of parts that the step would overwrite (W1)."""
        started_at = time.perf_counter()
        if self._last_step_at:
            self._gap_seconds.append(started_at - self._last_step_at)
        window = self._window
        if window is None:
            return
        for part in window.parts:
            if part.copy is not None and not part.copy.done.done() and not window.failure:
                window.waited_bytes += part.copy.remaining_bytes if part.copy.on_device is None else 0
                wait_started_at = time.perf_counter()
                window.fail_unless(self.link.wait(part.copy))
                self.waited_seconds += time.perf_counter() - wait_started_at
            if part.copy is not None and part.copy.is_out_of_memory:
                window.failure = window.failure or OUT_OF_MEMORY
        if window.fingerprints is not None:  # they read the tensors that this step overwrites
            window.fail_unless(self.wait([window.fingerprints]))
        window.blocked_seconds += time.perf_counter() - started_at

    def _after_step(self, *_: Any) -> None:
        self._last_step_at = time.perf_counter()
        self.link.logged_gradients[id(self.optimizer)] = None

    def _replay_of(self, window: _OpenWindow, step: Step) -> Callable[[], None]:
        older_parts = [part for part in window.parts if 0 <= part.version < step.version]

        def replay() -> None:
            try:
                next(iter(step.gradients.values()), None)  # waits for all of them
            except OverwrittenError:
                self._waits_for_gradients = True
                raise
            if self._keeps_steps:
                window.steps.append(step)
                return
            for part in older_parts:
                self.link.wait_for_update()
                if part.replay is not None:
                    part.replay.apply(step)

        return replay

    def _seal(self, window: _OpenWindow, capture: Capture) -> None:
        """End the window (W2, W3)."""
        window.sealed_version = capture.version
        optimizer_tensors = {(key, name): one for key, named in self.tensors().items() for name, one in named.items()}
        tree, other_copy = detach(window.take(), optimizer_tensors, self.link)
        if other_copy is not None:
            window.pending_work.append(other_copy.done)
        current_tensors = {tensor_key: local_shard(one.detach()) for tensor_key, one in optimizer_tensors.items()}
        parameters = parameters_of(self.optimizer)
        implementation = ", ".join(sorted(set(capture.implementations)))
        redo = Redo(
            base_of(type(self.optimizer)),
            window.sealed_version,
            Conditions.current(local_shard(parameters[0].tensor).device, implementation),
            layout_digest(self.optimizer) if self._keeps_steps else "",
            devices={tensor_key: one.device.type for tensor_key, one in current_tensors.items()},
            sharded=frozenset(one.key for one in parameters if isinstance(one.tensor, DTensor)),
        )

        def fingerprints_now() -> dict[Key, Fingerprint]:
            return {tensor_key: Fingerprint.of_tensor(one) for tensor_key, one in current_tensors.items()}

        if self._keeps_steps:
            redo.fingerprints = fingerprints_now()
        else:
            window.fingerprints = self._fingerprint_pool.submit(fingerprints_now)

        def finish() -> Snapshot:
            for one in window.pending_work:
                one.result()
            fingerprints = window.fingerprints.result() if window.fingerprints is not None else redo.fingerprints
            redo.fingerprints = {
                tensor_key: one.to_host() for tensor_key, one in fingerprints.items()
            }  # waits for the device
            for part in window.parts:
                if part.replay is None:
                    raise CheckpointError("a part of the window was not copied")
                redo.parts.append(part.replay)
            for step in window.steps:
                keys = {key for part in window.parts if part.version < step.version for key in part.keys}
                gradients = {key: one for key, one in step.gradients.items() if key in keys}
                found_inf = step.found_inf.cpu() if step.found_inf is not None else None
                redo.steps.append(Step(step.version, step.hyperparameters, gradients, found_inf))
            conditions = redo.conditions
            if self._keeps_steps and self.exact == "required":
                parts = {"redo": redo, "tree": tree, "optimizer_tensors": optimizer_tensors}
                return window.snapshot(None, conditions=conditions, **parts)
            redo.devices = dict.fromkeys(redo.devices, "cpu")
            inexact = redo.fold(self.exact)
            state = fill_tensors(tree, optimizer_tensors, redo.tensors)
            return window.snapshot(state, conditions=conditions, inexact=inexact)

        def end() -> None:
            try:
                snapshot = finish()
            except BaseException as error:
                window.failure = OUT_OF_MEMORY if isinstance(error, MemoryError) else str(error) or repr(error)
            if self._window is window:
                self._window = None
            if window.result.done():
                return
            if window.failure:
                window.result.set_exception(CheckpointError(window.failure))
            else:
                window.result.set_result(snapshot)

        window.result.is_sealed = True
        self._replay_pool.submit(end)

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """By parameter key: the parameter as "", and its state by name."""
        return {
            one.key: {"": one.tensor} | {n: v for n, v in self._state(one).items() if isinstance(v, torch.Tensor)}
            for one in parameters_of(self.optimizer)
        }


def checked_steps(window_steps: int | Literal["auto"]) -> int:
    """Raise ConfigError; return 0 for "auto"."""
    if window_steps == "auto":
        return 0
    if isinstance(window_steps, bool) or not isinstance(window_steps, int) or window_steps < 1:
        raise ConfigError(f"window_steps is {window_steps!r}: use 'auto' or a whole number of steps, at least 1")
    return window_steps


def _with_strides(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return ``tensor`` with the strides of its source (A2)."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
