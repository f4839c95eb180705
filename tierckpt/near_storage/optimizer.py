"""``NearStorageOptimizer``: what a training loop steps, with the state in another process and on the SSD."""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan

from ..dcp.planner import TierSavePlanner
from ..dcp.stager import StagedItems, TierStager
from ..errors import CheckpointError, ConfigError, StateMismatchError, TierckptError
from ..replay.capture import Step, hyperparameters_of
from ..replay.frame import Frame, encode
from ..replay.optimizers import base_of, check_replayable, local, parameters_of, writes_of
from .blocks import MASTER, Layout, layout_of
from .mapped_state import Hold, MappedState
from .members import build_optimizer, check_gradients, check_parameter, members_of
from .state_file import Tensors
from .states import directory_lock
from .step_channel import StepChannel

PERSIST_EVERY = 8
"""Steps: a state of 12 bytes a parameter is written once in so many, and the log of 2 is at most so long."""
STEPS = "near_storage_steps"


class NearStorageOptimizer(torch.optim.Optimizer):
    """An optimizer whose state lies in files on the SSD of this node and is stepped there, by a process of its own.

    ``params`` are bfloat16 (or float16); they and their gradients are all that the trainer has. The process has float32
    master parameters and the optimizer's state, steps them with the same class of ``torch.optim`` from the gradients in
    float32, and ``step`` returns with the new parameters, rounded. Steps have the bits of that optimizer over float32
    masters in the trainer. Gradients are clipped by whoever calls ``step``, schedules change ``param_groups``, a
    ``GradScaler`` may skip steps. A step is on the SSD when ``step`` returns, and ``resume`` continues at the newest.

    In the state of a ``Checkpointer`` a save is written from these files, the shards of all ranks into one checkpoint:
    nothing of it crosses the link between accelerator and host.

    Args:
        params: parameters or groups, as ``torch.optim`` takes them; names of ``named_parameters`` are kept.
        kind: a class of ``torch.optim`` that works element by element; ``options`` are its.
        directory: on this node's SSD, of one trainer at a time; a rank of several has its own below it. It takes 24
            bytes a parameter (Adam).
        workers: threads of the process, which is the CPU time it may take. A parameter is one thread's.
        persist_every: steps after which a block is written to the SSD again; in between its gradients are.
        timeout_seconds: how long a step waits for a process that does nothing.
        numa_nodes: where the memory shared with the process lies.

    Raises:
        ConfigError: the optimizer is not elementwise, parameters are on the meta device or of another precision.
        PreconditionFailedError: another trainer has ``directory``.
        StateMismatchError: ``directory`` has another optimizer's state.
        UpdaterLostError: from ``step``, when the process has ended twice in it. Nothing is lost: call it again.
    Cost: of the trainer, 4 bytes a parameter and its gradient (16 for AdamW over masters). Of each step, 2 bytes a
        parameter up and down.
    Source: SK hynix's checkpoint-offloading SSD; Smart-Infinity.

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
        if (mode := options.pop("mode", "offload")) != "offload":  # scripts give it
            raise ConfigError(
                f"mode={mode!r}: an optimizer near storage has no mode but offload",
                hint="To have each step of an optimizer in the trainer on the SSD, use EveryStep(gradient_log=True)",
            )
        if not (isinstance(workers, int) and isinstance(persist_every, int) and min(workers, persist_every) > 0):
            raise ConfigError(
                f"workers={workers!r} and persist_every={persist_every!r} are to be whole numbers above 0"
            )
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
        self._layout: Layout = layout_of(self._kind, self._members, self._hyperparameters())
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
        self._written = writes_of(self)
        self._files = MappedState(self.directory, self._layout, self._tensors)
        self._is_open = True
        with directory_lock(self.directory, os.getpid()):  # another trainer's is told from one of another optimizer
            self._must_resume = self._files.exists()
        if not self._must_resume:
            self._files.begin(self._values(built.state), 0)
        self._process.start()

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """Nothing of each parameter: what there is lies in files.

        It is never empty: ``get_optimizer_state_dict`` makes a step of an optimizer that has no state.
        """
        if self._is_open and self._files.view is not None:
            return defaultdict(dict, self._files.view)
        return defaultdict(dict, {one.tensor: {} for one in parameters_of(self)})

    @state.setter
    def state(self, _: object) -> None:  # torch sets it when it is made, and when groups are loaded
        pass

    # --- training ---------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step. It returns with the new parameters, and the gradients are in a file by then.

        A process that has ended is begun again, once, and the step is made from the gradients that it had.

        Raises:
            UpdaterLostError: the process has ended again. Call ``step`` again: it makes the same step, from the same
                gradients, and then training goes on, with the same bits.
            ConfigError: ``directory`` has steps already: ``resume`` is to be called first.
            StateMismatchError: something else has written to a parameter since the first step.
            CapacityError, OperationTimeoutError, ...: what the process met. The same holds.
        """
        if self._must_resume:
            raise ConfigError(
                f"{self.directory} has the state of step {self._process.step}",
                hint="Call resume(), which continues there, or give an empty directory",
            )
        self._files.discard()  # of a restore that has failed
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
        self._written = writes_of(self)
        return loss

    @property
    def steps(self) -> int:
        """How many steps the state has made, those before ``resume`` included."""
        return self._steps

    @property
    def process_id(self) -> int:
        """Of the process that has the state."""
        return self._process.pid

    @property
    def moved_bytes(self) -> int:
        """Between the trainer's tensors and the memory that it shares with the process, so far."""
        return self._channel.moved_bytes

    def _check_parameters(self) -> None:
        """The masters have nothing of what is written to parameters beside the optimizer: a step would undo it."""
        if writes_of(self) == self._written:
            return
        if not self._steps:  # weights were loaded
            self._replace({})
        elif changed := self._channel.others():
            name = next(one.name for one in self._members if one.key == changed[0])
            raise StateMismatchError(
                f"parameter {name} was changed by something beside the optimizer, and its float32 values in "
                f"{self.directory} were not",
                hint="Call resume() to have those back, or restore a checkpoint with the optimizer in its state",
            )

    def _check_groups(self) -> None:
        """Whatever has put groups of another step here has not put the state of that step here."""
        steps = self.param_groups[0].get(STEPS, self._steps)
        if steps != self._steps:
            raise StateMismatchError(
                f"what was loaded has no state of the optimizer, which was at step {steps} then; {self.directory} is "
                f"at step {self._steps}",
                hint="Restore a checkpoint that has the state too, or call resume() to go on at the newest step",
            )
        self._forget_steps()

    def _forget_steps(self) -> None:
        for group in self.param_groups:
            group.pop(STEPS, None)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def resume(self, last_step: int | None = None) -> int:
        """Bring the trainer to the newest step that ``directory`` has, and return that. 0: there was none.

        Ranks that were killed may be a step apart: all but the first then go back to ``last_step``, the least of what
        they returned.

        Parameters are replaced. ``param_groups`` are as they were built: schedules are resumed by whoever has them.

        Raises:
            IntegrityError: the state is damaged, or has been at later steps for too long to go back.
            UpdaterLostError: the process has ended.
        """
        if self._process.is_alive and last_step is not None and last_step < self._process.step:
            self._process.close()
        if not self._process.is_alive:
            self._process.start(last_step)
        answer = self._process.call({"op": "settle"})
        self._steps, self._must_resume = answer["step"], False
        self._files.look(answer["versions"])
        self._forget_steps()
        self._channel.forget()
        self._channel.take_parameters()
        self._written = writes_of(self)
        return self._steps

    def _replace(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Begin another state at this step, and the process again over it."""
        self._process.close()
        self._files.begin(self._values(state), self._steps)
        self._start_anew()

    def _start_anew(self) -> None:
        """The process over another state than before."""
        self._channel.forget()
        self._process.start()
        self._steps, self._must_resume, self._written = self._process.step, False, writes_of(self)

    # --- in a Checkpointer ------------------------------------------------------------------------------------------

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """Within, ``state_dict`` has what is to be saved: tensors in the files, and float32 parameters as "master".

        Raises:
            CheckpointError: the state is not that of the trainer.
        """
        if self._must_resume or self._channel.is_interrupted:
            raise CheckpointError("the state is not that of the trainer", hint="Call resume(), or step() again, before")
        with self._files.to_save(parameters_of(self)):
            yield

    def lies_in_files(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is one that ``mapped`` has given last."""
        return self._files.saved is not None and self._files.saved.owns(tensor)

    def hold(self) -> Hold:
        """Have the state that ``mapped`` has given last be kept for a save, as it is now. Cost: a message."""
        assert self._files.saved is not None
        return Hold(self._files.saved, self._process, self._channel.ask({"op": "hold"}, self._steps))

    @contextmanager
    def mapped_anew(self) -> Iterator[None]:
        """Within, ``state_dict`` has what is to be loaded: tensors of a new state, for ``put_back``."""
        self._process.close()
        with self._files.to_load(parameters_of(self)):
            yield

    def put_back(self, loaded: Mapping[str, Any]) -> int:
        """Make the tensors of ``mapped_anew`` the state, and take it: ``loaded`` has those that were filled.

        Masters that were not become what the parameters are.
        """
        groups = loaded["param_groups"]
        self._files.commit(loaded.get("state", {}), int(groups[0].get(STEPS, 0)))
        for group, found in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in found.items() if name not in ("params", STEPS)})
        self._start_anew()
        return self.resume()

    def state_dict(self) -> dict[str, Any]:
        """``param_groups`` alone, which say at which step they are: the state stays where it is, and a directory at
        another step refuses them.

        Raises nothing.
        """
        made = super().state_dict()
        for group in made["param_groups"]:  # where each way to save an optimizer keeps it
            group[STEPS] = self._steps
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave, or the state of the same class of ``torch.optim`` over the same parameters.

        Such a state replaces that of ``directory``, with masters that are the parameters of now; without one the steps
        must be those that ``directory`` has made.

        Raises:
            StateMismatchError: they are not. ``step`` raises it too, where something has loaded groups past this.
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
        """Refused: raises ConfigError."""
        raise ConfigError(
            "an optimizer near storage has a process and files of its own, and cannot be copied or pickled",
            hint="Save it with a Checkpointer, or build another over a directory of its own",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the state is laid out. Raises ConfigError."""
        if self._is_open:
            raise ConfigError(
                "parameters cannot be added to an optimizer near storage",
                hint="Build it with all its groups; one that is frozen has no gradient, and is left as it is",
            )
        super().add_param_group(param_group)

    def close(self) -> None:
        """End the process when it has done what it was given. Raises nothing; idempotent."""
        self._files.discard()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what it is made of -----------------------------------------------------------------------------------------

    def _values(self, state: Mapping[Any, Mapping[str, Any]]) -> Tensors:
        return {
            key: {MASTER: local(tensor.detach())}
            | {name: local(one) for name, one in state.get(tensor, {}).items() if isinstance(one, torch.Tensor)}
            for key, tensor in self._tensors.items()
        }

    def _hyperparameters(self) -> list[dict[str, Any]]:
        """Of each group, as the process can use them."""
        groups = [hyperparameters_of(self, group) for group in self.param_groups]
        return [group | ({"capturable": False} if "capturable" in group else {}) for group in groups]

    def _head(self, step: int) -> bytes:
        return encode(Frame(step, {"": Step(step, self._hyperparameters(), {})}, {"": ""}))[0]


def stage(stager: TierStager, plan: SavePlan, planner: TierSavePlanner, state: Mapping[str, Any]) -> StagedItems:
    """Stage the items of ``plan``. State of optimizers near storage is held in its files, and not copied."""
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
    if os.getpid() == owner:  # a forked child ends, and nothing here is its
        channel.close()
