"""Copies a training state to host memory over several steps, and brings it to one version.

    step n          n+1              n+2                    n+K-1
    part 0 ->       part 1 ->        part 2 ->       ...    part K-1 ->, everything that is no optimizer's
                    gradients of 0   gradients of 0-1       gradients of 0 to K-2

Each part is copied while the next forward and backward passes run. The gradients of parts that were copied follow, and
the optimizer's own implementation makes the missing steps again on the copies. All parts are then what training had
after step n+K-1, bit for bit.

Invariants:
    W1  A part is whole before the update that would write over it: the step waits for its copy, no longer, and not for
        a link that hangs: that ends the window (W3).
    W2  Everything else (buffers, schedules, random state, data order) is copied in the call that ends the window, by
        the thread that trains, between two steps: it is of the version that the parts are brought to.
    W3  Never a mixed version. The fingerprints of each parameter and its state, taken at the last version, decide:
        what something beside the optimizer changed, gradients that were written over before they were copied, a change
        of groups, ``load_state_dict`` and a lack of memory end the window, and the state is copied whole instead, at
        the next end of a step.

Source: GoCkpt.
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

from ..errors import CapacityError, CheckpointError, ConfigError
from ..planning.transfer_times import Traffic, split_parts, weights_of
from ..poll import wait_while
from ..resources import ThreadPool
from ..telemetry import logger
from .apply import Key, Replay
from .capture import Capture, Step
from .checksum import Fingerprint
from .link import (
    COPY_TIMEOUT_SECONDS,
    GRADIENTS,
    PARTS,
    CopiedGradients,
    Copy,
    Link,
    OverwrittenError,
    halves_without_loss,
    host_memory,
)
from .optimizers import Parameter, base_of, check_replayable, layout_digest, local, parameters_of
from .redo import Conditions, Exact, Redo, checked_exact
from .snapshot import Snapshot, SnapshotFuture, put
from .tree import detach

log = logger("replay")

STEPS_MEASURED = 9
OUT_OF_MEMORY = "host memory ran out"
HANGS = "copies to host memory, or the steps made again on them, hang"
Take = Callable[[], Any]


@dataclass
class _Part:
    keys: list[str]
    version: int = -1
    copy: Copy | None = None
    replay: Replay | None = None


@dataclass
class _Window:
    take: Take
    parts: list[_Part]
    steps_left: int
    falls_back: bool
    result: SnapshotFuture
    blocked_seconds: float = 0.0
    waited_bytes: int = 0
    copies: list[Copy] = field(default_factory=list)
    work: list[Future[None]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """Whose gradients are all in host memory, to be made again where the window is used."""
    fingerprints: Future[dict[Key, Fingerprint]] | None = None
    """Of the last version, taken before the step that would write over it."""
    failure: str = ""
    sealed: int = -1

    def expect(self, has_come: bool) -> None:
        """What does not come is not waited for again, and the step that follows may write over what it was made of."""
        if not has_come:
            self.failure = self.failure or HANGS

    def snapshot(self, state: Any, version: int, more_bytes: int = 0, **more: Any) -> Snapshot:
        """Return what the window comes to: ``state`` after ``version`` steps; ``more_bytes`` more were moved for it."""
        moved_bytes = sum(copy.size_bytes for copy in self.copies) + more_bytes
        return Snapshot(state, version, moved_bytes, self.blocked_seconds, waited_bytes=self.waited_bytes, **more)


class _Follower(Capture):
    """Records the steps of a window, with the gradients of parts that are copied. ``waits``: a step waits for these."""

    def __init__(self, optimizer: torch.optim.Optimizer, window: _Window, link: Link, *, waits: bool) -> None:
        super().__init__(optimizer)
        self._window, self._link, self._waits = window, link, waits

    def copy(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        window, begun = self._window, time.perf_counter()
        if window.sealed >= 0 or window.failure or window.result.done():
            return None
        copied = self._link.logged[id(self.optimizer)]
        if copied is None:
            keys = [key for part in window.parts if part.version >= 0 for key in part.keys if key in gradients]
            try:
                copied = CopiedGradients(self._link.copy([gradients[key] for key in keys], GRADIENTS), keys)
            except MemoryError:
                window.failure = OUT_OF_MEMORY
                return None
            window.copies.append(copied.copy)
        if self._waits:
            window.expect(self._link.wait(copied.copy))
        self._link.update_begins()
        window.blocked_seconds += time.perf_counter() - begun
        return copied

    def step_ends(self) -> None:
        self._link.update_ends()


class MultiStepStager:
    """Copies the state of one optimizer, and what else belongs to a checkpoint, over ``window_steps`` steps.

    Call ``begin`` between two steps, and ``end_of_step`` after every step from then on, when the schedule and all else
    have been stepped too; ``begin`` returns a future, to be waited for between two steps. One window at a time.

    Args:
        optimizer: an elementwise one of ``torch.optim`` that has made a step.
        window_steps: at least 1; "auto" chooses by the sizes of state and gradients.
        link: shared by several optimizers of a process; None makes one.
        exact: for parameters on an accelerator, whose steps have other last bits on the CPU. "required": they are kept,
            as ``Snapshot.redo``, and made again where they were made. "approximate": made again on the CPU, accepted
            within ``redo.tolerance``; ``Snapshot.inexact`` says so. Parameters in host memory are always exact.
        defers: keep the steps of parameters in host memory too. For tests.

    Raises:
        ConfigError: the optimizer cannot be replayed, or an argument is none of these.
    Cost: host memory for a copy of the state and for the gradients of two steps, of all steps when they are kept;
        1 + r (K - 1) / 2 times the bytes of the state over the link, with r the bytes of gradient for a byte of state.
    Source: GoCkpt.

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
        """0: to be chosen."""
        self.exact = checked_exact(exact)
        self._defers = defers or any(local(one.tensor).device.type != "cpu" for one in parameters_of(optimizer))
        self.optimizer = optimizer
        self.link = link or Link()
        self._owns_link = link is None
        self._fences = [  # first: gradients would overtake the part
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._capture: _Follower | None = None
        """Of the newest window."""
        self._clocks: list[int] = []
        """Of the processor time of the threads that work beside training."""
        self._replays = ThreadPool(1, "tierckpt-replay", self._note_clock)
        self._hashes = ThreadPool(1, "tierckpt-fingerprint", self._note_clock)
        self._window: _Window | None = None
        self.link.logged[id(optimizer)] = None
        self.waited_seconds = 0.0
        """How long steps have waited for parts so far, in all windows."""
        self._stepped_at = 0.0
        self._hidden_seconds: deque[float] = deque(maxlen=STEPS_MEASURED)
        """From the end of a step to the beginning of the next: what a copy can hide behind."""
        self._waits_for_gradients = isinstance(optimizer, torch.optim.SGD)
        """Something writes over gradients before they are copied (Nesterov, ``zero_grad`` in place): a step waits."""

    def __enter__(self) -> MultiStepStager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note_clock(self) -> None:
        self._clocks.append(time.pthread_getcpuclockid(threading.get_ident()))

    @property
    def is_open(self) -> bool:
        """True while a window is open, and ``end_of_step`` is to be called."""
        return self._window is not None

    @property
    def steps(self) -> int:
        """How many steps the optimizer has made since the window was opened."""
        return self._capture.version if self._capture is not None else 0

    @property
    def failure(self) -> str:
        """Why an open window cannot be brought to one version. '' while it can."""
        window = self._window
        return window.failure if window is not None else ""

    def traffic(self) -> Traffic:
        """Return what a window would move now, and what one step hides of it, as measured so far."""
        return self._traffic(sum(map(self._size, parameters_of(self.optimizer))))

    def _traffic(self, state_bytes: int) -> Traffic:
        seconds = statistics.median(self._hidden_seconds) if self._hidden_seconds else 0.0
        return Traffic(state_bytes, self.gradient_bytes(), self.link.measured_rate, seconds)

    def begin(self, take: Take, window_steps: int = 0, *, falls_back: bool = True) -> Future[Snapshot]:
        """Open a window: begin to copy the first part.

        Args:
            take: returns all that the checkpoint is to have: dicts and lists of tensors and plain values. It is called
                at the end of the window's last step. Tensors of the optimizer in it are replaced by their copies,
                others are copied then.
            window_steps: of this window; 0: as the stager was told.
            falls_back: False: what ends the window early is raised by the future, and nothing is copied whole.

        Raises:
            CheckpointError: a window is open.
        """
        if self._window is not None:
            raise CheckpointError(
                "a multi-step checkpoint is still being copied, and a second one cannot begin",
                hint="Save less often than window_steps, or wait for the first one's result",
            )
        if self._capture is not None:
            self._capture.close()  # what broke it is over; and its hooks are to come behind those of a log
        sizes = {one.key: self._size(one) for one in parameters_of(self.optimizer)}
        traffic = self._traffic(sum(sizes.values()))
        steps = (checked_steps(window_steps) if window_steps else self.window_steps) or traffic.best_steps()
        parts = [_Part(keys) for keys in split_parts(sizes, weights_of(traffic.falling_share(steps), steps))]
        window = self._window = _Window(take, parts, steps, falls_back, SnapshotFuture(self.end_of_step))
        self._capture = _Follower(self.optimizer, window, self.link, waits=self._waits_for_gradients)
        self.end_of_step()
        return window.result

    def end_of_step(self) -> None:
        """Begin to copy the next part; with the last one, take what is no optimizer's, and end the window.

        Call it after every step, when all that belongs to the step is done. Does nothing when no window is open.
        """
        window, capture = self._window, self._capture
        if window is None or capture is None:
            return
        begun = time.perf_counter()
        try:
            window.failure = window.failure or capture.look()
            for step in capture.take():
                self._follow(window, step)
            if window.steps_left and not window.failure:
                window.steps_left -= 1
                following = next((part for part in window.parts if part.version < 0), None)
                if following is not None:
                    self._begin_part(window, following, capture.version)
                if not window.steps_left:
                    self._seal(window, capture)
        except MemoryError:
            window.failure = OUT_OF_MEMORY
        if window.failure and window.falls_back:
            self._copy_whole_or_fail(window)
        elif window.failure:
            self.abandon(window.failure)
        window.blocked_seconds += time.perf_counter() - begun

    def abandon(self, reason: str) -> None:
        """Give up an open window: its future raises ``CheckpointError(reason)``. Does nothing when none is open."""
        window, self._window = self._window, None
        if window is not None and not window.result.done():
            window.result.set_exception(CheckpointError(reason))

    def wait(self, work: Sequence[Future[Any]]) -> bool:
        """Wait until ``work`` of this stager is done, as long as it gets on: bytes move, steps are made again, or
        processors work at that. False when it hangs; a device that is asked for copies is taken at its word."""
        self.link.update_ends()
        window = self._window
        copies = window.copies if window is not None else []
        if any(one.on_device is not None and not one.done.done() for one in copies):
            return not futures.wait(work, COPY_TIMEOUT_SECONDS).not_done
        return wait_while(work, self._progress)

    def _progress(self) -> tuple[object, int, float]:
        window = self._window  # its end, on another thread, lets go of it
        done = sum(one.done() for one in window.work) if window is not None else 0
        return self.link.progress(), done, sum(map(time.clock_gettime, self._clocks))

    def close(self) -> None:
        """Give up an open window, and remove the hooks."""
        if self._capture is not None:
            self._capture.close()
        self.link.logged.pop(id(self.optimizer), None)
        for fence in self._fences:
            fence.remove()
        self.abandon("the multi-step stager was closed before its window ended")
        self._replays.shutdown(cancel_futures=True)
        self._hashes.shutdown()
        if self._owns_link:
            self.link.close()

    def gradient_bytes(self) -> int:
        """What the gradients of a step, of this rank's shards, are on the link: as those there, else float32."""
        total = 0
        is_narrow: bool | None = None
        for one in parameters_of(self.optimizer):
            size_bytes = local(one.tensor.detach()).nbytes
            if is_narrow is None and one.tensor.grad is not None and not one.tensor.is_cuda:
                is_narrow = halves_without_loss(local(one.tensor.grad)) is not None
            total += size_bytes // 2 if is_narrow else size_bytes
        return total

    def _size(self, parameter: Parameter) -> int:
        return sum(one.nbytes for one in self._tensors(parameter))

    def _tensors(self, parameter: Parameter) -> list[torch.Tensor]:
        state = self.optimizer.state.get(parameter.tensor, {})
        found = [parameter.tensor.detach(), *(one for one in state.values() if isinstance(one, torch.Tensor))]
        return [local(one) for one in found]

    def _begin_part(self, window: _Window, part: _Part, version: int) -> None:
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
            if copy.was_changed:
                raise CheckpointError("a part was changed by something beside the optimizer while it was copied")
            tensors = map(_with_strides, copy.result, strides)
            copied = {}
            for key, state in states.items():
                copied[key] = next(tensors)
                states[key] = {n: next(tensors) if isinstance(v, torch.Tensor) else v for n, v in state.items()}
            part.replay = Replay(kind, copied, states, version)

        window.work.append(self._replays.submit(build))

    def _state(self, parameter: Parameter) -> dict[str, Any]:
        return dict(self.optimizer.state.get(parameter.tensor, {}))

    def _before_step(self, *_: Any) -> None:
        """W1."""
        begun = time.perf_counter()
        if self._stepped_at:
            self._hidden_seconds.append(begun - self._stepped_at)
        window = self._window
        if window is None:
            return
        for part in window.parts:
            if part.copy is not None and not part.copy.done.done() and not window.failure:
                window.waited_bytes += part.copy.left_bytes if part.copy.on_device is None else 0
                at = time.perf_counter()
                window.expect(self.link.wait(part.copy))
                self.waited_seconds += time.perf_counter() - at
            if part.copy is not None and part.copy.has_no_memory:
                window.failure = window.failure or OUT_OF_MEMORY
        if window.fingerprints is not None:  # one of what this step writes fits no copy
            window.expect(self.wait([window.fingerprints]))
        window.blocked_seconds += time.perf_counter() - begun

    def _after_step(self, *_: Any) -> None:
        self._stepped_at = time.perf_counter()
        self.link.logged[id(self.optimizer)] = None

    def _follow(self, window: _Window, step: Step) -> None:
        """Have ``step`` made again on the parts that were copied before it; or keep it."""
        behind = [part for part in window.parts if 0 <= part.version < step.version]

        def replay() -> None:
            try:
                next(iter(step.gradients.values()), None)  # waits for all of them
            except OverwrittenError:
                self._waits_for_gradients = True
                raise
            if self._defers:
                window.steps.append(step)
                return
            for part in behind:
                self.link.give_way()
                if part.replay is not None:
                    part.replay.apply(step)

        window.work.append(self._replays.submit(replay))

    def _seal(self, window: _Window, capture: Capture) -> None:
        """W2, W3. The last part is copied from now on."""
        window.sealed = capture.version
        held, tree, rest = self._detach(window)
        window.work += rest
        live = {place: local(one.detach()) for place, one in held.items()}
        members = parameters_of(self.optimizer)
        implementation = ", ".join(sorted(set(capture.implementations)))
        redo = Redo(
            base_of(type(self.optimizer)),
            window.sealed,
            Conditions.here(local(members[0].tensor).device, implementation),
            layout_digest(self.optimizer) if self._defers else "",
            devices={place: one.device.type for place, one in live.items()},
            sharded=frozenset(one.key for one in members if isinstance(one.tensor, DTensor)),
        )
        if self._defers:
            redo.wanted = {place: Fingerprint.of(one) for place, one in live.items()}
        else:
            window.fingerprints = self._hashes.submit(lambda: {place: Fingerprint.of(live[place]) for place in live})

        def finish() -> Snapshot:
            for one in window.work:
                one.result()
            wanted = window.fingerprints.result() if window.fingerprints is not None else redo.wanted
            redo.wanted = {place: one.on_host() for place, one in wanted.items()}  # not where training would wait
            for part in window.parts:
                if part.replay is None:
                    raise CheckpointError("a part of the window was not copied")
                redo.parts.append(part.replay)
            for step in window.steps:
                keys = {key for part in window.parts if part.version < step.version for key in part.keys}
                gradients = {key: one for key, one in step.gradients.items() if key in keys}
                found = step.found_inf.cpu() if step.found_inf is not None else None
                redo.steps.append(Step(step.version, step.hyperparameters, gradients, found))
            conditions = redo.conditions
            if self._defers and self.exact == "required":
                return window.snapshot(None, window.sealed, conditions=conditions, redo=redo, tree=tree, held=held)
            redo.devices = dict.fromkeys(redo.devices, "cpu")  # where the steps are made again
            inexact = redo.fold(self.exact)
            state = put(tree, held, redo.tensors)
            return window.snapshot(state, window.sealed, conditions=conditions, inexact=inexact)

        def end() -> None:
            try:
                self._settle(window, finish())
            except BaseException as error:  # copied whole at the end of the next step, or by ``result``
                window.failure = OUT_OF_MEMORY if isinstance(error, MemoryError) else str(error) or repr(error)
                if not window.falls_back and not window.result.done():
                    window.result.set_exception(CheckpointError(window.failure))

        window.result.sealed = self._replays.submit(end)

    def _settle(self, window: _Window, snapshot: Snapshot) -> None:
        if self._window is window:
            self._window = None
        if not window.result.done():
            window.result.set_result(snapshot)

    def _copy_whole_or_fail(self, window: _Window) -> None:
        try:
            self._copy_whole(window)
        except MemoryError as error:
            self._window = None
            failure = CapacityError(
                "host memory ran out, for the parts of a multi-step checkpoint and for a whole copy too",
                hint='Give the job the memory of one copy of its state, or save with mode="sync"',
            )
            failure.__cause__ = error
            window.result.set_exception(failure)

    def _copy_whole(self, window: _Window) -> None:
        log.warning("a multi-step checkpoint is copied whole: %s", window.failure)
        held, tree, rest = self._detach(window)
        begun = time.perf_counter()
        copies = dict(zip(held, host_memory([local(one) for one in held.values()]), strict=True))
        for place, copied in copies.items():
            copied.copy_(local(held[place].detach()))
        for one in rest:
            one.result(COPY_TIMEOUT_SECONDS)
        window.blocked_seconds += time.perf_counter() - begun
        state, size_bytes = put(tree, held, copies), sum(one.nbytes for one in copies.values())
        self._settle(window, window.snapshot(state, self.steps, size_bytes, fallback=window.failure))

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return each parameter (as "") and the tensors of its state, by parameter key: the live ones."""
        return {
            one.key: {"": one.tensor} | {n: v for n, v in self._state(one).items() if isinstance(v, torch.Tensor)}
            for one in parameters_of(self.optimizer)
        }

    def _detach(self, window: _Window) -> tuple[dict[Key, torch.Tensor], Any, list[Future[None]]]:
        """Replace the optimizer's tensors in what the window takes by their names, and begin to copy all others."""
        held = {(key, name): one for key, named in self.tensors().items() for name, one in named.items()}
        tree, copy = detach(window.take(), held, self.link)
        return held, tree, [copy.done] if copy is not None else []


def checked_steps(asked: int | Literal["auto"]) -> int:
    """Return how many steps a window is to have, 0 for "auto". Raises ConfigError."""
    if asked == "auto":
        return 0
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise ConfigError(f"window_steps is {asked!r}: 'auto', or a whole number of steps of at least 1")
    return asked


def _with_strides(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return ``tensor`` as the one that it was copied from lies (A2 of ``apply``)."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
