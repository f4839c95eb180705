"""A replayed step has the same bits, for each optimizer, implementation and schedule."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierckpt.errors import ConfigError, IntegrityError, StateMismatchError
from tierckpt.replay.apply import Replay
from tierckpt.replay.capture import Capture, Step
from tierckpt.replay.checksum import checksum
from tierckpt.replay.frame import Frame, decode, encode
from tierckpt.replay.optimizers import layout_digest, parameters_of
from tierckpt.save import log_segments

STEPS = 7
Make = Callable[..., torch.optim.Optimizer]

KINDS: dict[str, Make] = {
    "AdamW": torch.optim.AdamW,
    "Adam with decay": functools.partial(torch.optim.Adam, weight_decay=0.1),
    "Adam": torch.optim.Adam,
    "amsgrad": functools.partial(torch.optim.AdamW, amsgrad=True),
    "maximize": functools.partial(torch.optim.AdamW, maximize=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "RMSprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
}
FUSED = ("AdamW", "Adam with decay", "Adam", "amsgrad", "maximize", "SGD", "SGD with momentum", "Nesterov", "Adagrad")
IMPLEMENTATIONS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 33), nn.Tanh(), nn.Linear(33, 5)).to(dtype)


def backward(model: nn.Module, number: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(number)
    like = next(model.parameters())
    inputs = torch.randn(8, 13, generator=generator, device="cpu").to(like)
    (model(inputs).float().square().mean() * scale).backward()


class Run:
    """Trains, and records the inputs of a replay: the first state and each step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.capture = Capture(optimizer)
        self.steps = self.capture.steps
        self.base = state_of(optimizer)

    def again(self, keys: set[str] | None = None, steps: list[Step] | None = None) -> Replay:
        parameters, state = self.base
        kept = {key: tensor.clone() for key, tensor in parameters.items() if keys is None or key in keys}
        replay = Replay(type(self.optimizer), kept, {key: cloned(state.get(key, {})) for key in kept}, version=0)
        for step in self.steps if steps is None else steps:
            replay.apply(step)
        return replay

    def check(self, replay: Replay) -> None:
        parameters, state = state_of(self.optimizer)
        for key, tensor in replay.parameters.items():
            assert torch.equal(tensor, parameters[key]), key
            assert checksum(tensor).item() == checksum(parameters[key]).item()
            found, wanted = replay.state[key], state.get(key, {})
            assert found.keys() == wanted.keys(), key
            for name, value in wanted.items():
                same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
                assert same, (key, name)


def cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def state_of(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    parameters = {one.key: one.tensor.detach().clone() for one in parameters_of(optimizer)}
    state = {one.key: cloned(optimizer.state[one.tensor]) for one in parameters_of(optimizer)
             if one.tensor in optimizer.state}  # fmt: skip
    return parameters, state


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    weights = [one for one in model.parameters() if one.ndim > 1]
    return [{"params": weights}, {"params": [one for one in model.parameters() if one.ndim == 1], "weight_decay": 0.0}]


def matrix() -> Iterator[Any]:
    """Each optimizer in each implementation, from the first or the third step. One of the two is slow, alternately."""
    cases = [case for case in itertools.product(KINDS, IMPLEMENTATIONS) if case[1] != "fused" or case[0] in FUSED]
    for number, (kind, implementation) in enumerate(cases):
        for begun in (0, 2):
            marks = [pytest.mark.slow] if begun == 2 * (number % 2) else []
            yield pytest.param(kind, implementation, begun, marks=marks)


@pytest.mark.parametrize(("kind", "implementation", "begun"), list(matrix()))
def test_every_optimizer_comes_back_bit_for_bit(kind: str, implementation: str, begun: int) -> None:
    """With clipping, a cosine schedule, a separate group without weight decay, and parts stepped separately."""
    model = model_of()
    optimizer = KINDS[kind](groups_of(model), **IMPLEMENTATIONS[implementation])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS + begun)

    def train(number: int) -> None:
        optimizer.zero_grad()
        backward(model, number)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()

    for number in range(begun):
        train(number)
    run = Run(optimizer)
    for number in range(begun, begun + STEPS):
        train(number)
    run.check(run.again())
    keys = [one.key for one in parameters_of(optimizer)]
    random.Random(kind).shuffle(keys)
    for part in (set(keys[:2]), set(keys[2:])):
        run.check(run.again(part))


def test_a_stale_learning_rate_is_seen() -> None:
    """Seeded: the check of the matrix above can fail."""
    run = trained(torch.optim.AdamW)
    stale = [Step(one.version, run.steps[0].hyperparameters, one.gradients) for one in run.steps]
    with pytest.raises(AssertionError):
        run.check(run.again(steps=stale))


def test_another_implementation_is_seen() -> None:
    """Seeded: fused and foreach differ in bits."""
    run = trained(torch.optim.AdamW, foreach=True)
    others = [
        Step(one.version, [{**group, "foreach": False, "fused": True} for group in one.hyperparameters], one.gradients)
        for one in run.steps
    ]
    with pytest.raises(AssertionError):
        run.check(run.again(steps=others))


def test_gradients_of_another_type_are_refused() -> None:
    run = trained(torch.optim.AdamW)
    wide = [Step(1, run.steps[0].hyperparameters, {k: g.double() for k, g in run.steps[0].gradients.items()})]
    with pytest.raises(StateMismatchError, match=r"float64.*float32"):
        run.again(steps=wide)


def test_narrow_gradients_are_those_that_they_stand_for() -> None:
    run = trained(torch.optim.AdamW, steps=1)
    narrow = {key: one.bfloat16() for key, one in run.steps[0].gradients.items()}
    wide = {key: one.float() for key, one in narrow.items()}
    made, wanted = ([Step(1, run.steps[0].hyperparameters, one)] for one in (narrow, wide))
    found = run.again(steps=made).parameters
    assert all(torch.equal(found[key], one) for key, one in run.again(steps=wanted).parameters.items())


def trained(kind: Make, steps: int = STEPS, **options: Any) -> Run:
    model = model_of()
    optimizer = kind(groups_of(model), **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    run = Run(optimizer)
    for number in range(steps):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()
        schedule.step()
    return run


def test_tied_weights_and_gradients_that_accumulate() -> None:
    model = nn.Sequential(nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 13))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    run = Run(optimizer)
    for number in range(6):
        backward(model, number)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert len(run.steps) == 3
    run.check(run.again())


def test_a_learning_rate_that_is_a_tensor_is_taken_when_the_step_is() -> None:
    model = model_of()
    rate = torch.tensor(0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    run = Run(optimizer)
    for number in range(4):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()
        rate.mul_(0.5)
    run.check(run.again())


@pytest.mark.parametrize("kind", ["AdamW", "Nesterov"])
def test_gradients_that_a_closure_computes(kind: str) -> None:
    """Lightning passes a closure to every step. Foreach Nesterov overwrites the gradients before the step returns."""
    model = model_of()
    optimizer = KINDS[kind](model.parameters(), foreach=True)
    run = Run(optimizer)
    for number in range(4):

        def closure(number: int = number) -> float:
            optimizer.zero_grad()
            backward(model, number)
            return 1.0

        assert (optimizer.step(closure) if number % 2 else optimizer.step(closure=closure)) == 1.0
    run.check(run.again())


class Fitted(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (torch.optim.LBFGS, "LBFGS cannot be replayed"),
        (lambda parameters: torch.optim.Muon([one for one in parameters if one.ndim == 2]), "Muon cannot be replayed"),
        (torch.optim.Adafactor, "Adafactor cannot be replayed"),
        (torch.optim.Rprop, "Rprop cannot be replayed"),
        (Fitted, "it replaces the step of AdamW"),
        (functools.partial(torch.optim.AdamW, differentiable=True), "differentiable"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_a_sentence(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Capture(make(list(model_of().parameters())))


def test_parameters_on_meta_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="meta device"):
        Capture(torch.optim.AdamW(model.parameters()))


def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    optimizer.param_groups[0]["params"][0].grad.mul_(0.5)


@pytest.mark.slow
def test_a_compiled_step_is_not_recorded() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    capture = Capture(optimizer)
    weight.grad = torch.ones(3)
    torch.compile(lambda: optimizer.step(), backend="eager")()
    assert "compiled" in capture.failure and not capture.steps


class Derived(torch.optim.AdamW):
    def __init__(self, weights: list[nn.Parameter], rate: float) -> None:
        super().__init__(weights, lr=rate)


def test_other_arguments_and_hooks_for_all_optimizers_change_nothing() -> None:
    weight = nn.Parameter(torch.ones(3))
    copied = weight.detach().clone()
    optimizer = Derived([weight], 0.1)
    capture = Capture(optimizer)
    halving = register_optimizer_step_pre_hook(halve)
    with contextlib.ExitStack() as stack:
        stack.callback(halving.remove)
        for _ in range(2):
            weight.grad = torch.tensor([1.0, 2.0, 3.0])
            optimizer.step()
        replay = Replay(Derived, {"0.0": copied}, {}, version=0)
        for step in capture.take_steps():
            replay.apply(step)
    assert not capture.failure and torch.equal(copied, weight)


def reader(data: bytes | bytearray | memoryview) -> Callable[[int, int], memoryview]:
    return lambda offset, size_bytes: memoryview(data)[offset : offset + size_bytes]


def framed(run: Run) -> list[bytes]:
    written, previous, layout = [], "", layout_digest(run.optimizer)
    for step in run.steps:
        head, views, previous = encode(Frame(step.version, {"": step}, {"": layout}), previous)
        written.append(head + b"".join(views))
    return written


@pytest.mark.parametrize("kind", ["AdamW", "Nesterov", "Adagrad"])
def test_a_frame_gives_back_the_step_bit_for_bit(kind: str) -> None:
    run = trained(KINDS[kind])
    read, previous = [], ""
    for data in framed(run):
        fields, digest, _ = log_segments.unpack(reader(data), log_segments.FRAME, where="here")
        frame = decode(reader(data), where="here")
        assert fields["previous"] == previous and frame.layouts == {"": layout_digest(run.optimizer)}
        previous = digest
        read.append(frame.steps[""])
    run.check(run.again(steps=read))


def test_damage_to_any_byte_of_a_frame_is_found() -> None:
    run = trained(torch.optim.AdamW, steps=1)
    data = framed(run)[0]
    chosen = random.Random(3)
    for place in [*range(64), *(chosen.randrange(len(data)) for _ in range(400))]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << chosen.randrange(8)
        with pytest.raises(IntegrityError, match="gradient log here cannot be used"):
            decode(reader(damaged), where="here")
    for size in (0, 5, 31, 40, len(data) // 2, len(data) - 1):
        with pytest.raises(IntegrityError, match="cut short"):
            decode(reader(data[:size]), where="here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_checksums_tell_elements_that_changed_or_changed_places(dtype: torch.dtype) -> None:
    tensor = torch.randn(5000).to(dtype) if dtype.is_floating_point else torch.arange(5000).remainder(2).to(dtype)
    before = checksum(tensor).item()
    assert checksum(tensor.clone()).item() == before
    swapped = tensor.clone()
    swapped[0], swapped[1] = tensor[1], tensor[0]
    assert checksum(swapped).item() != before
    changed = tensor.clone()
    changed[4321] = not changed[4321] if dtype is torch.bool else changed[4321] + 1
    assert checksum(changed).item() != before
    assert checksum(torch.empty(0, dtype=dtype)).item() == 0
