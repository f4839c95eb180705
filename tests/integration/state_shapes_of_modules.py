"""Rows of the table of training states: forms of modules, and another model at the restore."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.integration import state_modules as modules
from tests.integration.state_compare import Job, Shape
from tests.integration.state_modules import EXTRA_STATES
from tests.integration.state_objects import job, mlp
from tests.integration.state_shapes import ADAMW, OPTIMIZERS, optimized

# --- modules ----------------------------------------------------------------------------------------------------------


def module(make: Callable[[], nn.Module], optimizer: Any = ADAMW, **more: Any) -> Callable[[int], Job]:
    def build(seed: int) -> Job:
        torch.manual_seed(seed)
        model = make()
        return job(model=model, **({"optimizer": optimizer(model.parameters())} if optimizer else {}), **more)

    return build


def bare(make: Callable[[], nn.Module]) -> Callable[[int], Job]:
    """A job without an optimizer."""
    return module(make, None)


def sequential(*parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(part() for part in parts))


LINEAR = functools.partial(nn.Linear, 4, 4)
NORM = functools.partial(nn.BatchNorm1d, 4)
WITH_EXTRA = functools.partial(modules.WithExtra, 4, 4)
BUFFERS = dict.fromkeys(modules.BUFFERS, "same") | {
    "expanded": "error",
    "sparse": "same or refused",
    "quantized": "same or refused",
}
"""What is expected of a buffer of each kind."""


def quantized_linear() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(LINEAR()), {nn.Linear})  # type: ignore[no-any-return]


def hooked(make: Callable[[int], Job]) -> Callable[[int], Job]:
    """Hooks change the optimizer's state dict on save and load."""

    def build(seed: int) -> Job:
        one = make(seed)
        optimizer = one.state["optimizer"]
        optimizer.register_state_dict_post_hook(lambda _, state: state | {"added": [1, torch.ones(2)]})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: {key: value for key, value in state.items() if key != "added"}
        )
        optimizer.register_load_state_dict_post_hook(lambda found: found.param_groups[0].update(lr=0.25))
        return one

    return build


def compiled(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: torch.compile(make(), backend="eager")  # type: ignore[return-value]


def compiled_in_place() -> nn.Module:
    model = TWO()
    model.compile(backend="eager")
    return model


def twice() -> nn.Module:
    layer = LINEAR()
    return nn.Sequential(layer, nn.Tanh(), layer)


def old_name() -> nn.Module:
    """As ``modules.Renaming``, before its layer got a new name."""
    return nn.Sequential(OrderedDict(proj=LINEAR()))


def inner() -> nn.Module:
    """Children with the names that wrappers use."""
    return nn.Sequential(OrderedDict(module=LINEAR(), _orig_mod=nn.Sequential(LINEAR()), _fsdp_wrapped_module=LINEAR()))


def ddp(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.parallel.DistributedDataParallel(make())


def averaged(seed: int) -> Job:
    model = mlp(seed)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    return job(model=model, optimizer=ADAMW(model.parameters()), ema=ema)


def zero_redundancy(seed: int) -> Job:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = mlp(seed)
    return job(model=model, optimizer=ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.1))


def _strip(prefix: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def translate(saved: dict[str, Any]) -> dict[str, Any]:
        return saved | {"model": {key.removeprefix(prefix): value for key, value in saved["model"].items()}}

    return translate


def _add(prefix: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda saved: saved | {"model": {f"{prefix}{key}": value for key, value in saved["model"].items()}}


TWO, THREE = sequential(LINEAR, LINEAR), sequential(LINEAR, LINEAR, LINEAR)
CONV = sequential(
    functools.partial(nn.Unflatten, 1, (1, 2, 2)),
    functools.partial(nn.Conv2d, 1, 3, 2),
    nn.Flatten,
    functools.partial(nn.Linear, 3, 2),
)


def channels_last() -> nn.Module:
    return CONV().to(memory_format=torch.channels_last)


def consolidate(one: Job) -> None:
    one.state["optimizer"].consolidate_state_dict()


def train_both(one: Job) -> None:
    for number in range(9, 15):
        one.step(number)


def add_gradients(one: Job) -> None:
    for parameter in one.state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)


in_group = functools.partial(Shape, needs="process group")


def module_shapes() -> list[Shape]:
    many = functools.partial
    return [
        *(Shape(f"extra state: {one}", module(sequential(LINEAR, many(modules.Extra, one)))) for one in EXTRA_STATES),
        *(Shape(f"a buffer: {n}", module(many(modules.Buffers, [n])), expect=expect) for n, expect in BUFFERS.items()),
        Shape("buffers that share storage", module(many(modules.Buffers, ["whole", "rows", "column"]))),
        Shape("a buffer that is not persistent", module(many(modules.Buffers, ["bool"], False)), after=0),
        Shape("BatchNorm", module(sequential(LINEAR, NORM, LINEAR))),
        Shape("BatchNorm in eval mode", module(sequential(LINEAR, NORM)), change=lambda one: one.state["model"].eval()),
        Shape("tied weights", module(modules.Tied)),
        Shape("tied weights into untied ones", bare(modules.Tied), bare(many(modules.Tied, False))),
        Shape("untied weights into tied ones", bare(many(modules.Tied, False)), bare(modules.Tied)),
        Shape("a branch that trains later", module(modules.Branches), after=4),
        Shape("a branch that trains later, into a trained job", module(modules.Branches), change=train_both, after=4),
        Shape("dynamic quantization", bare(quantized_linear), train=0, after=0, expect="same or refused"),
        Shape("a nested state dict of a module", module(modules.Nested)),
        Shape("an LSTM", module(modules.Recurrent)),
        Shape("pruned weights", module(sequential(lambda: prune.random_unstructured(LINEAR(), "weight", 0.5), LINEAR))),
        Shape("the older weight_norm", module(sequential(lambda: nn.utils.weight_norm(LINEAR()), LINEAR))),
        Shape("a layer twice in a model", module(twice)),
        Shape("ParameterList, ParameterDict, ModuleDict", module(modules.ListsAndDicts)),
        Shape("weight_norm", module(sequential(lambda: parametrizations.weight_norm(LINEAR()), LINEAR))),
        Shape("spectral_norm", module(sequential(lambda: parametrizations.spectral_norm(LINEAR()), LINEAR))),
        Shape("orthogonal", module(sequential(lambda: parametrizations.orthogonal(LINEAR()), LINEAR))),
        Shape("state dict hooks", module(modules.Mixed)),
        Shape("hooks of the optimizer", hooked(optimized(ADAMW))),
        Shape("a module that renames its keys, no optimizer", bare(old_name), bare(modules.Renaming)),
        Shape("a module that renames its keys", module(old_name), module(modules.Renaming)),
        Shape("a module that looks at its version", module(sequential(LINEAR, modules.Versioned))),
        Shape("a buffer that the module resizes", module(sequential(LINEAR, modules.Queue))),
        Shape("a module that saves a part of itself", module(modules.Adapter)),
        Shape("lazy modules", module(many(nn.LazyLinear, 4), OPTIMIZERS["SGD"])),
        Shape("a lazy module from a plain one", module(LINEAR), module(many(nn.LazyLinear, 4))),
        Shape("lazy modules, no optimizer", bare(sequential(LINEAR, many(nn.LazyLinear, 4)))),
        Shape("a lazy module never called", bare(many(nn.LazyLinear, 4)), train=0, after=0, expect="same or refused"),
        Shape("torch.compile", module(compiled(TWO))),
        Shape("torch.compile into a plain module", module(compiled(TWO)), module(TWO), translate=_strip("_orig_mod.")),
        Shape("a plain module into torch.compile", module(TWO), module(compiled(TWO)), translate=_add("_orig_mod.")),
        Shape("torch.compile in place", module(compiled_in_place)),
        Shape("a compiled layer", module(sequential(LINEAR, compiled(LINEAR)))),
        in_group("DDP", module(ddp(TWO))),
        in_group("DDP into a plain module", module(ddp(TWO)), module(TWO), translate=_strip("module.")),
        in_group("a plain module into DDP", module(TWO), module(ddp(TWO)), translate=_add("module.")),
        in_group("DDP of a compiled module", module(ddp(compiled(TWO)))),
        Shape("a plain module whose child is called module", module(inner)),
        Shape("AveragedModel", averaged),
        in_group("ZeroRedundancyOptimizer, whole", zero_redundancy, before=consolidate, expect="same or refused"),
        Shape("convolutions and linear layers", module(CONV)),
        Shape("channels_last", module(channels_last)),
        Shape("channels_last from contiguous", module(CONV), module(channels_last)),
        Shape("complex parameters", module(many(nn.Linear, 4, 4, dtype=torch.complex64))),
        Shape("parameters without elements", module(many(modules.OneParameter, 0, 3))),
        Shape("0-dim parameters", module(many(modules.OneParameter))),
        Shape("float64 parameters", module(many(modules.OneParameter, 2, dtype=torch.float64))),
        Shape("parameters without gradients", bare(lambda: TWO().requires_grad_(False)), after=0),
        Shape("gradients that are there", module(TWO), change=add_gradients, after=0),
        Shape("a module without parameters", bare(nn.Identity), train=0, after=0),
    ]


# --- another model at restore -----------------------------------------------------------------------------------------


def _dtype(dtype: torch.dtype) -> Callable[[int], Job]:
    return optimized(ADAMW, functools.partial(mlp, dtype=dtype))


def prefixed() -> nn.Module:
    return nn.ModuleDict({"a": LINEAR(), "a_b": LINEAR()})


def _counter(dtype: torch.dtype) -> Callable[[int], Job]:
    def make() -> nn.Module:
        found = LINEAR()
        found.register_buffer("count", torch.arange(5).to(dtype))
        return found

    return bare(make)


NO_DIMENSION, ONE_ELEMENT = bare(modules.OneParameter), bare(functools.partial(modules.OneParameter, 1))
BIG, SMALL = optimized(ADAMW, functools.partial(mlp, layers=4)), optimized(ADAMW)
OTHER_MODELS = [
    Shape("float32 into bfloat16", SMALL, _dtype(torch.bfloat16)),
    Shape("bfloat16 into float32", _dtype(torch.bfloat16), SMALL),
    Shape("float32 into float64", SMALL, _dtype(torch.float64)),
    Shape("float64 into float16", _dtype(torch.float64), _dtype(torch.float16), after=0),
    Shape("an int buffer into a float one", _counter(torch.int64), _counter(torch.float32), after=0),
    Shape("one element into a 0-dim parameter", ONE_ELEMENT, NO_DIMENSION),
    Shape("a name that is a prefix of another", bare(prefixed), train=0, after=0),
]

NO_STATISTICS = functools.partial(NORM, track_running_stats=False)
WIDE = sequential(functools.partial(nn.Linear, 4, 8), functools.partial(nn.Linear, 8, 4))
MISMATCHES: dict[str, tuple[Callable[[int], Job], Callable[[int], Job]]] = {
    "BatchNorm without statistics into one with": (module(NO_STATISTICS), module(NORM)),
    "BatchNorm with statistics into one without": (module(NORM), module(NO_STATISTICS)),
    "tied weights into untied ones, optimizer": (module(modules.Tied), module(functools.partial(modules.Tied, False))),
    "more layers than the checkpoint": (SMALL, BIG),
    "fewer layers than the checkpoint": (BIG, SMALL),
    "more layers, no optimizer": (bare(TWO), bare(THREE)),
    "fewer layers, no optimizer": (bare(THREE), bare(TWO)),
    "a wider model": (SMALL, module(WIDE)),
    "a layer of another shape and equal size": (
        module(functools.partial(nn.Linear, 4, 2)),
        bare(functools.partial(nn.Linear, 2, 4)),
    ),
    "without biases": (bare(TWO), bare(functools.partial(mlp, 1, bias=False))),
    "a convolution where a linear layer was": (module(sequential(nn.Flatten, LINEAR)), module(CONV)),
    "a 0-dim parameter into one of one element": (NO_DIMENSION, ONE_ELEMENT),
    "without extra state": (bare(LINEAR), bare(WITH_EXTRA)),
    "extra state that the model has not": (bare(WITH_EXTRA), bare(LINEAR)),
}
"""A saved job, and another one into which it cannot be loaded."""


SHAPES = [
    *module_shapes(),
    *OTHER_MODELS,
    *(Shape(name, saved, other, expect="error") for name, (saved, other) in MISMATCHES.items()),
]
