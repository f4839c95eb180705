"""Jobs, optimizers and other objects of training loops, for the table of training states."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from tests.integration.state_compare import Job
from tests.states import drawn

# --- jobs -------------------------------------------------------------------------------------------------------------

Loss = Callable[[int], torch.Tensor]


def inputs(number: int, width: int = 4) -> torch.Tensor:
    return drawn(torch.Generator().manual_seed(number), 6, width)


def loss_of(model: Any, width: int = 4) -> Loss:
    like = [p for p in model.parameters() if not isinstance(p, nn.parameter.UninitializedParameter)]
    dtype = like[0].dtype if like else torch.float32

    def loss(number: int) -> torch.Tensor:
        out = model(inputs(number, width).to(dtype))
        return (out.abs() if out.is_complex() else out.float()).square().mean()

    return loss


def job(loss: Loss | None = None, **state: Any) -> Job:
    """Return a job of these objects: each optimizer trains ``model``, and each scheduler steps."""
    loss = loss or loss_of(state["model"])
    steppers = [value for value in state.values() if hasattr(value, "zero_grad") and hasattr(value, "param_groups")]
    schedulers = [value for value in state.values() if isinstance(value, torch.optim.lr_scheduler.LRScheduler)]

    def step(number: int) -> None:
        for optimizer in steppers:
            optimizer.zero_grad()
        with torch.set_grad_enabled(bool(steppers)):
            value = loss(number)
        if steppers:
            value.backward()
        for optimizer in steppers:
            _step(optimizer, loss, number)
        for scheduler in schedulers:
            is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([1.0 + number % 3] if is_plateau else []))
        if isinstance(state.get("ema"), nn.Module):
            state["ema"].update_parameters(state["model"])

    return Job(state, step)


def _step(optimizer: Any, loss: Loss, number: int) -> None:
    if not isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step()
        return

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(number)
        value.backward()
        return value

    optimizer.step(closure)


def mlp(seed: int, width: int = 4, layers: int = 2, bias: bool = True, dtype: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width, bias=bias, dtype=dtype) for _ in range(layers)))


# --- optimizers -------------------------------------------------------------------------------------------------------


class Int8State(torch.Tensor):
    """Appears as float32; holds one byte per element and a scale, as low-bit optimizers store moments."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, value: torch.Tensor) -> Int8State:
        scale = value.abs().max().clamp(min=1e-12) / 127
        return cls((value / scale).round().to(torch.int8), scale.reshape(1))

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scale"])

    def whole(self) -> torch.Tensor:
        return self.codes.float() * self.scale

    def __repr__(self, **_: Any) -> str:
        return f"Int8State{tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("detach", "clone", "alias", "_to_copy", "empty_like"):
            device = (kwargs or {}).get("device")
            parts = [args[0].codes, args[0].scale]
            parts = [part.detach() if name in ("detach", "alias") else part.to(device, copy=True) for part in parts]
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(*parts))
        if name == "copy_":
            source = args[1] if isinstance(args[1], Int8State) else cls.of(args[1])
            args[0].codes.copy_(source.codes)
            args[0].scale.copy_(source.scale)
            return args[0]
        if name == "is_pinned":
            return False
        raise NotImplementedError(name)


torch.serialization.add_safe_globals([Int8State])


class LowBit(torch.optim.Optimizer):
    """SGD with momentum whose moments are ``Int8State``."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["moment"] = torch.zeros(()), Int8State.of(torch.zeros_like(p))
                state["step"] += 1
                moment = state["moment"].whole().mul_(group["momentum"]).add_(p.grad)
                state["moment"].copy_(moment)
                p.sub_(moment, alpha=group["lr"])


class ScheduleFree(torch.optim.Optimizer):
    """Keeps counters in the groups, and a second point of each parameter in its state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": True, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr_max"] = max(group["lr"], group["lr_max"])
            group["weight_sum"] += group["lr_max"] ** 2
            share = group["lr_max"] ** 2 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, share).add_(p.grad, alpha=-group["lr"] * (1 - group["beta"]))
                    z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


class Strange(torch.optim.SGD):
    """Decays weights and counts in ``step``; keeps Python values in a parameter's state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                p.mul_(0.99)
                state = self.state[p]
                state["flag"], state["none"] = True, None
                state["history"] = [*state.get("history", []), torch.full((2,), float(group["calls"]))]
                state["pair"] = (group["calls"], 0.5)
        return super().step(closure)


class GlobalState(torch.optim.SGD):
    """Has optimizer-level state besides the states of parameters, as Shampoo and SAM do."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def state_dict(self) -> Any:
        return super().state_dict() | {"steps": self.steps, "mean": torch.full((3,), float(self.steps))}

    def load_state_dict(self, state_dict: Any) -> None:
        self.steps = state_dict["steps"]
        assert state_dict["mean"].tolist() == [float(self.steps)] * 3
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as Accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.accelerate_step_called = False

    state: Any = property(operator.attrgetter("optimizer.state"))
    param_groups: Any = property(operator.attrgetter("optimizer.param_groups"))
    defaults: Any = property(operator.attrgetter("optimizer.defaults"))

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.accelerate_step_called = True
        self.optimizer.step(closure)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)


class Holder:
    """Holds an optimizer without being one, as the wrappers of DeepSpeed and apex."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.scale = optimizer, 1.0
        self.param_groups, self.zero_grad, self.step = optimizer.param_groups, optimizer.zero_grad, self._step

    def _step(self) -> None:
        self.scale *= 1.5
        self.optimizer.step()

    def state_dict(self) -> Any:
        return {"optimizer_state_dict": self.optimizer.state_dict(), "scale": self.scale}

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        self.scale = state["scale"]


# --- other objects ----------------------------------------------------------------------------------------------------


class Loader:
    """Returns a state of any form, as users' data loaders do."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@dataclasses.dataclass
class Cursor:
    shard: int
    offsets: list[int]
    table: torch.Tensor


class Decay:
    """A callable with state, as ``LambdaLR`` saves it."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def __call__(self, step: int) -> float:
        self.seen[step] = 0.9**step
        return self.seen[step]


def odd_values(seed: int) -> Iterator[tuple[str, Any]]:
    """Yield forms of ``state_dict()`` of objects other than modules."""
    ones = torch.full((3,), float(seed))
    yield "None", None if seed == 1 else {"x": 1}
    yield "an int", seed
    yield "keys that are None", {None: seed, "a": {None: ones}}
    yield "ints as keys", {0: {1: ones, -1: seed}, 10: "x"}
    yield "tuples as keys", {(0, "a"): ones, (seed, None): []}
    yield "keys with dots and slashes", {"a.b": {"c": ones}, "a": {"b.c": ones * 2}, "a/b": seed, "": 1, " ": 2}
    yield "tuples", ("x", (seed, [ones, (None,)]), ())
    yield "numpy scalars", {"a": np.float32(seed), "b": np.int64(seed), "c": np.bool_(seed == 1)}
    yield "numpy arrays", {"a": np.arange(seed * 3.0), "b": np.zeros((0, 2)), "c": np.array(["x", "yy"])}
    yield "sets", {"a": {seed, 2}, "b": frozenset({"x"}), "c": set()}
    yield "a dataclass", {"cursor": Cursor(seed, [1, seed], ones)}
    yield "the state of a generator", {"rng": torch.Generator().manual_seed(seed).get_state()}
    yield "a generator", {"rng": torch.Generator().manual_seed(seed)}
    yield "nested lists of tensors", [[ones, [ones * 2, []]], [torch.zeros(seed, 2)]]
    yield "a list whose length changes", [ones] * seed + [torch.arange(seed)]
    yield "bytes", {"a": b"\x00" * seed, "b": bytearray(b"x")}
    yield "floats", {"a": float("nan"), "b": float("-inf"), "c": -0.0, "d": 1e-320, "e": 10**40, "f": 1j}
    yield "tensors of Python numbers' place", {"a": torch.tensor(seed), "b": torch.tensor(True), "c": seed == 1}
    yield "a tensor where a number is now", {"a": ones if seed == 1 else 0}
    yield "a number where a tensor is now", {"a": 7 if seed == 1 else ones}
    yield "a dict where a tensor is now", {"a": {"b": ones} if seed == 1 else ones}
    yield "a tensor of another shape and dtype", {"a": torch.arange(4) if seed == 1 else torch.zeros(2, 2)}
