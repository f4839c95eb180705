"""``NearStorageOptimizer``: an optimizer with its state on the SSD, and that state as file-backed tensors for saves."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan

from ..dcp.planner import TierSavePlanner
from ..dcp.stager import StagedItems, TierStager
from ..errors import (
    CheckpointError,
    ConfigError,
    OperationTimeoutError,
    StateMismatchError,
    TierckptError,
    UpdaterLostError,
)
from ..replay.capture import Step, hyperparameters_of
from ..replay.frame import Frame, dtype_name, encode
from ..replay.optimizers import (
    Parameter,
    base_of,
    check_replayable,
    local_shard,
    parameters_of,
    shard_like,
    write_counters_of,
)
from ..save.shard_plan import Fetch
from .state_file import (
    END_SECONDS,
    MASTER,
    BlockLayout,
    NewState,
    StateFile,
    Tensors,
    TrainerParameter,
    begin_state,
    current_state,
    directory_lock,
    layout_of,
)
from .updater_process import StepChannel, UpdaterProcess

LOW_PRECISION = (torch.bfloat16, torch.float16)


def build_optimizer(
    params: Any, kind: type[torch.optim.Optimizer] | None, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    if isinstance(params, torch.optim.Optimizer):
        raise ConfigError(
            "an existing optimizer keeps its state in the trainer",
            hint="Pass parameters and the optimizer class, or keep it and use EveryStep(gradient_log=True)",
        )
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(f"not an optimizer class: {kind!r}; pass a class of torch.optim after the parameters")
    made = cast(Any, kind)(params, **options)
    if made.state:  # Adagrad creates it at once: with one value, in the parameter's precision
        one = torch.zeros(1, device="cpu")
        initial_state = cast(Any, kind)([one], **options).state[one]
        for parameter in parameters_of(made):
            shape = local_shard(parameter.tensor).shape
            made.state[parameter.tensor] = {k: v.expand(shape) if v.ndim else v for k, v in initial_state.items()}
    return cast(torch.optim.Optimizer, made)


def check_parameter(member: TrainerParameter, tensor: torch.Tensor) -> None:
    if tensor.dtype not in LOW_PRECISION or hasattr(tensor, "main_grad"):
        raise ConfigError(
            f"parameter {member.name} is {member.dtype}, or has float32 gradients; the trainer's parameters and "
            "gradients must be 16-bit, as the float32 masters are in the updater process",
            hint="Use model.to(torch.bfloat16) without autocast and GradScaler (bfloat16 needs no scaling), or "
            "EveryStep(gradient_log=True), which keeps your optimizer and its precision",
        )


def check_gradients(optimizer: torch.optim.Optimizer) -> None:
    for one in parameters_of(optimizer):
        gradient = one.tensor.grad
        if gradient is not None and (gradient.dtype != one.tensor.dtype or gradient.layout is not torch.strided):
            raise ConfigError(
                f"the gradient of parameter {one.name} is {gradient.dtype} ({gradient.layout}), and the parameter "
                f"{one.tensor.dtype}",
                hint="Use dense gradients of the parameter's precision, and accumulate in that precision",
            )


def members_of(optimizer: torch.optim.Optimizer) -> list[TrainerParameter]:
    has_names = all(group.get("param_names") for group in optimizer.param_groups)
    return [
        TrainerParameter(
            one.key,
            one.name if has_names else str(number),
            tuple(local_shard(one.tensor).shape),
            dtype_name(one.tensor.dtype),
        )
        for number, one in enumerate(parameters_of(optimizer))
    ]


SAVED_MASTER = "master"

State = dict[torch.Tensor, dict[str, torch.Tensor]]


class MappedState:
    def __init__(self, directory: Path, layout: BlockLayout, tensors: Mapping[str, torch.Tensor]) -> None:
        self.stepped: set[str] = set()
        self.view: State | None = None
        """State by parameter and name, sharded like the parameter."""
        self.saved: StateFile | None = None
        self._directory, self._layout, self._tensors = directory, layout, tensors
        self._new: NewState | None = None

    def exists(self) -> bool:
        return current_state(self._directory, self._layout) is not None

    def begin(self, values: Tensors, step: int) -> None:
        with directory_lock(self._directory, os.getpid()):
            begin_state(self._directory, self._layout, values, step)
        self.update_stepped([0] * len(self._layout.blocks))

    def update_stepped(self, versions: Sequence[int]) -> None:
        file = self._opened()
        found = [file.present(block, version) for block, version in zip(self._layout.blocks, versions, strict=True)]
        self.stepped = {key for block in found for key, names in block.items() if names - {MASTER}}

    @contextmanager
    def to_save(self, parameters: Iterable[Parameter]) -> Iterator[None]:
        self.saved = self._opened()
        with self._viewed(self.saved, parameters, lambda key, name: name == MASTER or key in self.stepped):
            yield

    @contextmanager
    def to_load(self, parameters: Iterable[Parameter]) -> Iterator[None]:
        """Give ``view`` a new state's tensors; ``commit`` makes it current."""
        self.discard()
        self._new = NewState(self._directory, self._layout)
        with self._viewed(self._new.file, parameters, lambda *_: True):
            yield

    @contextmanager
    def _viewed(
        self, file: StateFile, parameters: Iterable[Parameter], is_wanted: Callable[[str, str], bool]
    ) -> Iterator[None]:
        tensors, self.view = file.all_tensors(), {}
        for one in parameters:
            self.view[one.tensor] = {
                name or SAVED_MASTER: shard_like(tensor, one.tensor)
                for name, tensor in tensors[one.key].items()
                if is_wanted(one.key, name)
            }
        try:
            yield
        finally:
            self.view = None

    @torch.no_grad()
    def commit(self, loaded: Mapping[str, Mapping[str, Any]], step: int) -> None:
        """Make the loaded state current. Missing masters are copied from the parameters."""
        assert self._new is not None
        new, self._new = self._new, None
        filled = {local_shard(one).data_ptr() for state in loaded.values() for one in state.values()}
        present = {}
        for key, tensors in new.file.all_tensors().items():
            present[key] = {name for name, tensor in tensors.items() if tensor.data_ptr() in filled} | {MASTER}
            if tensors[MASTER].data_ptr() not in filled:
                tensors[MASTER].copy_(local_shard(self._tensors[key].detach()))
        try:
            with directory_lock(self._directory, os.getpid()):
                new.commit(present, step)
        except BaseException:
            new.discard()
            raise
        self.update_stepped([0] * len(self._layout.blocks))

    def discard(self) -> None:
        if self._new is not None:
            self._new.discard()
        self._new = None

    def _opened(self) -> StateFile:
        found = current_state(self._directory, self._layout)
        assert found is not None
        return StateFile(found, self._layout)


class StateHold:
    """The state of a step, kept unchanged by the updater until ``release``. A ``dcp.stager.Source``."""

    def __init__(self, file: StateFile, process: UpdaterProcess, answer: Future[dict[str, Any]]) -> None:
        self._file, self._process, self._answer = file, process, answer
        self._lock = threading.Lock()
        self._is_released = False
        self._timeout_seconds = END_SECONDS

    def is_current(self, tensor: torch.Tensor) -> bool:
        return self._file.owns(tensor)

    def wait(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._result(self._answer, "recorded")

    def reader(self, tensor: torch.Tensor) -> Fetch:
        return self._file.reader(tensor, self._answer.result(0)["versions"])

    def release(self) -> None:
        """Raises UpdaterLostError: the state does not match its record, or may have been overwritten."""
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
        if not self._answer.done():
            self._answer.add_done_callback(self._give_up)
        elif self._answer.exception() is None:
            hold = self._answer.result()
            answer = self._process.ask({"op": "release", "hold": hold["number"]})
            if self._result(answer, "checked")["pid"] != hold["pid"]:
                raise UpdaterLostError(
                    f"the process of the optimizer in {self._file.directory} ended while its state was saved",
                    hint="The process was restarted. Save again",
                    directory=str(self._file.directory),
                )

    def _result(self, answer: Future[dict[str, Any]], what: str) -> dict[str, Any]:
        try:
            return answer.result(self._timeout_seconds)
        except TimeoutError as error:
            if isinstance(error, TierckptError):
                raise
            raise OperationTimeoutError(
                f"the state in {self._file.directory} was not {what}",
                hint="Check whether its disk hangs",
                waited_seconds=self._timeout_seconds,
            ) from None

    def _give_up(self, answer: Future[dict[str, Any]]) -> None:
        with contextlib.suppress(TierckptError):  # the hold ended with the process
            self._process.ask({"op": "release", "hold": answer.result()["number"]})


PERSIST_EVERY = 8
"""Steps between writes of a block; bounds the log (2 bytes a parameter and step)."""
STEPS = "near_storage_steps"


class NearStorageOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is in files on this node's SSD, stepped by a separate process.

    The trainer holds only ``params``, in bfloat16 or float16, and their gradients. The results are bitwise equal to
    that optimizer over float32 masters. When ``step`` returns, the step is on the SSD, and ``resume`` continues there.

    Args:
        params: parameters or groups, as for ``torch.optim``; names of ``named_parameters`` are kept.
        kind: an elementwise class of ``torch.optim``; ``options`` are passed to it.
        directory: on this node's SSD, for one trainer (rank). Takes 24 bytes a parameter (Adam).
        workers: threads of the process.
        persist_every: steps between writes of a block; the gradients cover the steps in between.
        timeout_seconds: maximum wait of a step for an idle process.
        numa_nodes: NUMA nodes of the memory shared with the process.

    Raises:
        ConfigError: the optimizer is not elementwise, or parameters are on the meta device or of another precision.
        PreconditionFailedError: another trainer uses ``directory``.
        StateMismatchError: ``directory`` has another optimizer's state.

    Cost: in the trainer, 4 bytes for a parameter and its gradient; each step transfers 2 bytes a parameter both ways.

    Example:
        >>> model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        >>> optimizer = NearStorageOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1, directory="near")
        >>> model(torch.ones(4, 8, dtype=torch.bfloat16)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.steps
        1
        >>> optimizer.close()
    """

    def __init__(
        self,
        params: Any,
        kind: type[torch.optim.Optimizer] | None = None,
        *,
        directory: str | os.PathLike[str],
        workers: int = 2,
        persist_every: int = PERSIST_EVERY,
        timeout_seconds: float = 600.0,
        numa_nodes: tuple[int, ...] = (),
        **options: Any,
    ) -> None:
        if (mode := options.pop("mode", "offload")) != "offload":
            raise ConfigError(
                f'mode={mode!r}: an optimizer near storage supports only mode="offload"',
                hint="To log each step of an optimizer in the trainer to the SSD, use EveryStep(gradient_log=True)",
            )
        if not (isinstance(workers, int) and isinstance(persist_every, int) and min(workers, persist_every) > 0):
            raise ConfigError(f"workers={workers!r} and persist_every={persist_every!r} must be whole numbers above 0")
        built = build_optimizer(params, kind, options)
        check_replayable(built)
        self._is_open = False
        super().__init__(built.param_groups, built.defaults)
        self.param_groups = built.param_groups
        self._tensors = {one.key: one.tensor for one in parameters_of(built)}
        self._members = members_of(built)
        for one in self._members:
            check_parameter(one, self._tensors[one.key])
        self._kind = base_of(type(built))
        self._layout: BlockLayout = layout_of(self._kind, self._members, self._hyperparameters())
        is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.directory = Path(directory).absolute() / (f"rank-{dist.get_rank()}" if is_distributed else "")
        order = {
            "directory": str(self.directory),
            "kind": self._kind.__name__,
            "groups": self._head(0).hex(),
            "workers": workers,
            "persist_every": persist_every,
        }
        self._channel = StepChannel(
            self._members, self._layout, self._tensors, order, numa_nodes=numa_nodes, timeout_seconds=timeout_seconds
        )
        self._close = weakref.finalize(self, _close, os.getpid(), self._channel)
        self._process = self._channel.process
        self._steps = 0
        self._written = write_counters_of(self)
        self._files = MappedState(self.directory, self._layout, self._tensors)
        self._is_open = True
        with directory_lock(self.directory, os.getpid()):  # another trainer is reported first
            self._must_resume = self._files.exists()
        if not self._must_resume:
            self._files.begin(self._values(built.state), 0)
        self._process.start()

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """Never empty: ``get_optimizer_state_dict`` would make a step."""
        if self._is_open and self._files.view is not None:
            return defaultdict(dict, self._files.view)
        return defaultdict(dict, {one.tensor: {} for one in parameters_of(self)})

    @state.setter
    def state(self, _: object) -> None:  # torch sets it in __init__
        pass

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step. On return the parameters are new, and the gradients are in a file.

        A dead process is restarted once. After any error of the process call ``step`` again: it makes the same step
        from the same gradients, with the same bits.

        Raises:
            UpdaterLostError: the process ended twice.
            ConfigError: ``directory`` has steps already: call ``resume`` first.
            StateMismatchError: a parameter was written outside the optimizer since the first step.
        """
        if self._must_resume:
            raise ConfigError(
                f"{self.directory} has the state of step {self._process.step}",
                hint="Call resume() to continue there, or use an empty directory",
            )
        self._files.discard()  # of a failed restore
        self._check_groups()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._channel.is_interrupted:
            check_gradients(self)
            self._check_parameters()
        self._files.stepped |= self._channel.make(self._steps + 1, self._head(self._steps + 1))
        self._steps += 1
        self._written = write_counters_of(self)
        return loss

    @property
    def steps(self) -> int:
        """Steps of the state, including those before ``resume``."""
        return self._steps

    @property
    def process_id(self) -> int:
        """Id of the process that owns the state."""
        return self._process.pid

    @property
    def moved_bytes(self) -> int:
        """Bytes copied so far between the trainer and the shared memory."""
        return self._channel.moved_bytes

    def _check_parameters(self) -> None:
        if write_counters_of(self) == self._written:
            return
        if not self._steps:
            self._replace({})
        elif changed := self._channel.others():
            name = next(one.name for one in self._members if one.key == changed[0])
            raise StateMismatchError(
                f"parameter {name} was changed outside the optimizer, but its float32 values in {self.directory} "
                "were not",
                hint="Call resume() to take those values, or restore a checkpoint with the optimizer in its state",
            )

    def _check_groups(self) -> None:
        steps = self.param_groups[0].get(STEPS, self._steps)
        if steps != self._steps:
            raise StateMismatchError(
                f"the loaded param_groups are of step {steps} and came without the optimizer's state; "
                f"{self.directory} is at step {self._steps}",
                hint="Restore a checkpoint that includes the state, or call resume() to continue at the newest step",
            )
        self._forget_steps()

    def _forget_steps(self) -> None:
        for group in self.param_groups:
            group.pop(STEPS, None)

    def resume(self, last_step: int | None = None) -> int:
        """Bring the trainer to the newest step in ``directory``, and return it; 0 if there is none.

        Killed ranks may be a step apart: those ahead call it again with ``last_step``, the minimum of the returned
        steps. ``param_groups`` stay as built.

        Raises IntegrityError: the state is damaged, or ``last_step`` is too old. UpdaterLostError: the process ended.
        """
        if self._process.is_alive and last_step is not None and last_step < self._process.step:
            self._process.close()
        if not self._process.is_alive:
            self._process.start(last_step)
        answer = self._process.call({"op": "settle"})
        self._steps, self._must_resume = answer["step"], False
        self._files.update_stepped(answer["versions"])
        self._forget_steps()
        self._channel.forget()
        self._channel.take_parameters()
        self._written = write_counters_of(self)
        return self._steps

    def _replace(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        self._process.close()
        self._files.begin(self._values(state), self._steps)
        self._reset_state()

    def _reset_state(self) -> None:
        self._channel.forget()
        self._process.start()
        self._steps, self._must_resume, self._written = self._process.step, False, write_counters_of(self)

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """Give ``state_dict`` the tensors to save. Raises CheckpointError: not at the trainer's step."""
        if self._must_resume or self._channel.is_interrupted:
            raise CheckpointError(
                "the state is not at the trainer's step", hint="Call resume() or step() before saving"
            )
        with self._files.to_save(parameters_of(self)):
            yield

    def lies_in_files(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` comes from the last ``mapped`` call."""
        return self._files.saved is not None and self._files.saved.owns(tensor)

    def hold(self) -> StateHold:
        """Hold the state of the last ``mapped`` call for a save."""
        assert self._files.saved is not None
        return StateHold(self._files.saved, self._process, self._channel.ask({"op": "hold"}, self._steps))

    @contextmanager
    def mapped_anew(self) -> Iterator[None]:
        """Give ``state_dict`` a new state's tensors, to fill and pass to ``put_back``."""
        self._process.close()
        with self._files.to_load(parameters_of(self)):
            yield

    def put_back(self, loaded: Mapping[str, Any]) -> int:
        """Make the tensors of ``mapped_anew`` current; masters not in ``loaded`` are copied from the parameters."""
        groups = loaded["param_groups"]
        self._files.commit(loaded.get("state", {}), int(groups[0].get(STEPS, 0)))
        for group, found in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in found.items() if name not in ("params", STEPS)})
        self._reset_state()
        return self.resume()

    def state_dict(self) -> dict[str, Any]:
        """Return ``param_groups`` with their step, without the state in files."""
        made = super().state_dict()
        for group in made["param_groups"]:  # every method of saving an optimizer keeps these
            group[STEPS] = self._steps
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of ``state_dict``, or the state of the same ``torch.optim`` class over the same parameters.

        Such a state replaces the one in ``directory``. Without a state the step must equal that in ``directory``, else
        StateMismatchError.
        """
        found = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        if not any(found.values()):
            self._check_groups()
        else:
            self._forget_steps()
            order = [one.tensor for one in parameters_of(self)]
            state = {tensor: found.get(number, {}) for number, tensor in enumerate(order)}
            self._replace(state)

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "an optimizer near storage owns a process and files, and cannot be copied or pickled",
            hint="Save it with a Checkpointer, or build another one over its own directory",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ConfigError once the state is laid out."""
        if self._is_open:
            raise ConfigError(
                "parameters cannot be added to an optimizer near storage",
                hint="Build it with all its groups; a frozen parameter has no gradient and is left unchanged",
            )
        super().add_param_group(param_group)

    def close(self) -> None:
        """End the process after its pending work. Raises nothing; idempotent."""
        self._files.discard()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _values(self, state: Mapping[Any, Mapping[str, Any]]) -> Tensors:
        return {
            key: {MASTER: local_shard(tensor.detach())}
            | {name: local_shard(one) for name, one in state.get(tensor, {}).items() if isinstance(one, torch.Tensor)}
            for key, tensor in self._tensors.items()
        }

    def _hyperparameters(self) -> list[dict[str, Any]]:
        groups = [hyperparameters_of(self, group) for group in self.param_groups]
        return [group | ({"capturable": False} if "capturable" in group else {}) for group in groups]

    def _head(self, step: int) -> bytes:
        return encode(Frame(step, {"": Step(step, self._hyperparameters(), {})}, {"": ""}))[0]


def stage(stager: TierStager, plan: SavePlan, planner: TierSavePlanner, state: Mapping[str, Any]) -> StagedItems:
    """State near storage is not copied."""
    near = [value for value in state.values() if isinstance(value, NearStorageOptimizer)]

    def lies_in_files(tensor: torch.Tensor) -> bool:
        return any(one.lies_in_files(tensor) for one in near)

    staged = stager.stage_items(plan.items, planner, lies_in_files=lies_in_files if near else None)
    try:
        for one in near:
            staged.sources.append(one.hold())
    except TierckptError:
        staged.release()
        raise
    return staged


def _close(owner: int, channel: StepChannel) -> None:
    if os.getpid() == owner:  # a forked child does not own them
        channel.close()
