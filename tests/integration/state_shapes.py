"""The table of training states: modules x optimizers x wrappers x changes between save and restore."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from tests.integration import state_objects as objects
from tests.integration.state_compare import Job, Shape
from tests.integration.state_modules import Sparse
from tests.integration.state_objects import job, loss_of, mlp

ADAMW = functools.partial(optim.AdamW, lr=0.1)
PLAIN_SGD = functools.partial(optim.SGD, lr=0.1)

# --- every optimizer of torch.optim, with its options -----------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "ASGD": functools.partial(optim.ASGD, t0=2),
    "Adadelta": optim.Adadelta,
    "Adafactor": getattr(optim, "Adafactor", optim.SGD),
    "Adagrad": functools.partial(optim.Adagrad, initial_accumulator_value=0.5),
    "Adam": functools.partial(optim.Adam, weight_decay=0.1),
    "AdamW": optim.AdamW,
    "Adamax": optim.Adamax,
    "LBFGS": functools.partial(optim.LBFGS, history_size=3, max_iter=4),
    "Muon": getattr(optim, "Muon", optim.SGD),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": functools.partial(optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": optim.Rprop,
    "SGD": functools.partial(optim.SGD, lr=0.1, momentum=0.9),
    "SparseAdam": optim.SparseAdam,
}
VARIANTS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD without momentum": PLAIN_SGD,
    "SGD nesterov, fused": functools.partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "AdamW amsgrad": functools.partial(ADAMW, amsgrad=True),
    "AdamW maximize": functools.partial(ADAMW, maximize=True),
    "AdamW fused": functools.partial(ADAMW, fused=True),
    "AdamW foreach": functools.partial(ADAMW, foreach=True),
    "AdamW for-loop": functools.partial(ADAMW, foreach=False),
    "AdamW with tensor lr": lambda params: ADAMW(params, lr=torch.tensor(0.05), foreach=False),
    "AdamW with float64 lr": lambda params: ADAMW(params, lr=torch.tensor(0.05, dtype=torch.float64), foreach=False),
    "AdamW with tensor betas": lambda params: ADAMW(
        params, betas=(torch.tensor(0.8), torch.tensor(0.99)), foreach=False
    ),
    "Adagrad fused": functools.partial(optim.Adagrad, fused=True),
    "Rprop foreach": functools.partial(optim.Rprop, foreach=True),
    "schedule-free": objects.ScheduleFree,
    "moments of a tensor subclass": objects.LowBit,
    "Python values in the state": functools.partial(objects.Strange, lr=0.1, momentum=0.9),
    "state beside the groups": functools.partial(objects.GlobalState, lr=0.1, momentum=0.9),
    "wrapped, as Accelerate does": lambda params: objects.Wrapper(ADAMW(params)),
    "wrapped twice": lambda params: objects.Wrapper(objects.Wrapper(ADAMW(params))),
    "held by an object that is no optimizer": lambda params: objects.Holder(ADAMW(params)),  # type: ignore[dict-item]
}


def optimized(make: Callable[[Any], Any], model: Callable[[int], nn.Module] = mlp, **more: Any) -> Callable[[int], Job]:
    def build(seed: int) -> Job:
        torch.manual_seed(seed)
        module = model(seed)
        return job(model=module, optimizer=make(module.parameters()), **more)

    return build


def _model_for(name: str) -> Callable[[int], nn.Module]:
    if name == "SparseAdam":
        return lambda _: Sparse()
    return functools.partial(mlp, bias=False) if name == "Muon" else mlp


def optimizer_shapes() -> list[Shape]:
    shapes = [Shape(name, optimized(make, _model_for(name)), needs=name) for name, make in OPTIMIZERS.items()]
    shapes += [Shape(name, optimized(make)) for name, make in VARIANTS.items()]
    stepped = "{} into one that has made a step"
    trained = [
        Shape(stepped.format(name), optimized(OPTIMIZERS[name], _model_for(name)), change=train_one_step)
        for name in ("AdamW", "LBFGS", "SGD", "SparseAdam", "NAdam")
    ]
    narrow = functools.partial(mlp, dtype=torch.bfloat16)
    low_precision = [
        Shape(f"{name} of bfloat16 parameters", optimized(make, narrow), expect="exact")
        for name, make in OPTIMIZERS.items()
        if name not in ("LBFGS", "Muon", "SparseAdam")
    ]
    nadam, wide = functools.partial(optim.NAdam, foreach=False), functools.partial(mlp, dtype=torch.float64)
    return [
        *shapes,
        *trained,
        *low_precision,
        Shape("NAdam of bfloat16 parameters into a cast one", optimized(nadam, narrow), change=cast, expect="exact"),
        Shape("NAdam of float64 parameters", optimized(nadam, wide), expect="exact"),
    ]


def cast(one: Job) -> None:
    """Cast the state of each parameter to its dtype, as ``load_state_dict`` does."""
    one.step(9)
    optimizer = one.state["optimizer"]
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert optimizer.state_dict()["state"][0]["mu_product"].dtype is torch.bfloat16


# --- parameter groups -------------------------------------------------------------------------------------------------


def grouped(*groups: Callable[[nn.Module], Any], make: Any = ADAMW, layers: int = 2) -> Callable[[int], Job]:
    """Groups are dicts of options with a function that selects their parameters."""

    def build(seed: int) -> Job:
        model = mlp(seed, layers=layers)
        return job(model=model, optimizer=make([group(model) for group in groups]))

    return build


def group(*layers: int, **options: Any) -> Callable[[Any], Any]:
    return lambda model: {"params": [p for index in layers for p in model[index].parameters()], **options}


def set_options(**options: Any) -> Callable[[Job], None]:
    return lambda one: one.state["optimizer"].param_groups[0].update(options)


def add_group(one: Job) -> None:
    extra = nn.Linear(4, 4)
    one.state["model"].append(extra)
    one.state["optimizer"].add_param_group({"params": list(extra.parameters()), "lr": 0.5})


def freeze(index: int) -> Callable[[Job], None]:
    return lambda one: one.state["model"][index].requires_grad_(False)  # type: ignore[no-any-return]


def scheduled(make: Callable[[Any], Any] | None, **more: Any) -> Callable[[int], Job]:
    def build(seed: int) -> Job:
        model = mlp(seed)
        optimizer = optim.SGD(model.parameters(), lr=0.1 * seed, momentum=0.9)
        return job(model=model, optimizer=optimizer, **({"scheduler": make(optimizer)} if make else {}), **more)

    return build


def without_scheduler(make: Callable[[Any], Any]) -> Callable[[int], Job]:
    """Use the scheduler without saving it."""

    def build(seed: int) -> Job:
        one = scheduled(make)(seed)
        del one.state["scheduler"]
        return one

    return build


def filtered(seed: int) -> Job:
    model = mlp(seed)
    model[0].requires_grad_(False)
    return job(model=model, optimizer=ADAMW([p for p in model.parameters() if p.requires_grad]))


def named(seed: int) -> Job:
    model = mlp(seed)
    return job(model=model, optimizer=ADAMW(model.named_parameters()))


def add_parameter(one: Job) -> None:
    one.state["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def drop_group(one: Job) -> None:
    one.state["optimizer"].param_groups.pop()


def drop_options(*names: str) -> Callable[[Job], None]:
    def drop(one: Job) -> None:
        for found, name in itertools.product(one.state["optimizer"].param_groups, names):
            del found[name]

    return drop


def drop_one_state(one: Job) -> None:
    one.state["optimizer"].state.popitem()


def add_state(one: Job) -> None:
    one.state["optimizer"].state.update(shared={"count": 3, "mean": torch.ones(2)})


def train_one_step(one: Job) -> None:
    one.step(5)


EMPTY = group(lr=0.02, betas=(0.5, 0.6))
COSINE = functools.partial(lr_scheduler.CosineAnnealingLR, T_max=10)
ONE, TWO, FOR_LOOP = grouped(group(0, 1)), grouped(group(0), group(1)), grouped(group(0, 1, foreach=False))
NEWER_OPTIONS = ("foreach", "fused", "maximize", "capturable", "differentiable")
GROUPS = [
    Shape("two groups with options of their own", grouped(group(0, lr=0.3, name="a"), group(1, betas=(0.5, 0.9)))),
    Shape("an empty group first", grouped(EMPTY, group(0, 1)), before=set_options(lr=0.7)),
    Shape("an empty group second", grouped(group(0, 1), EMPTY)),
    Shape("only empty groups", grouped(EMPTY, EMPTY), after=0),
    Shape("options that were changed", ONE, before=set_options(lr=0.7, betas=[0.5, 0.6], eps=1e-3)),
    Shape("own keys of a group", ONE, before=set_options(name="x", lr_scale=0.5, tags={"a": [1, None]})),
    Shape("own keys that are tensors", ONE, before=set_options(scale=torch.ones(3), pair=(torch.ones(()), 1))),
    Shape("own keys of the restored job alone", ONE, change=set_options(name="x", lr_scale=0.5)),
    Shape("a tensor lr into a number", FOR_LOOP, before=set_options(lr=torch.tensor(0.2))),
    Shape("a number lr into a tensor", FOR_LOOP, change=set_options(lr=torch.tensor(0.2))),
    Shape("initial_lr without the scheduler", without_scheduler(COSINE), scheduled(None)),
    Shape("a scheduler made before the restore, not saved", scheduled(None), without_scheduler(COSINE)),
    Shape("an option newer than the checkpoint", ONE, before=drop_options("decoupled_weight_decay")),
    Shape("several options newer than the checkpoint", ONE, before=drop_options(*NEWER_OPTIONS)),
    Shape("an option that this torch no longer has", ONE, before=set_options(legacy=True)),
    Shape("capturable turned on before the save", ONE, before=set_options(capturable=True), after=0),
    Shape("capturable in the restored job", ONE, change=set_options(capturable=True)),
    Shape("a group added to both", ONE, before=add_group, change=add_group, after=0),
    Shape("a group added after the save", ONE, change=add_parameter, expect="error"),
    Shape("a group removed after the save", TWO, change=drop_group, expect="error"),
    Shape("one group where there were two", TWO, ONE, expect="error"),
    Shape("fewer parameters in a group", ONE, grouped(group(0)), expect="error"),
    Shape("more parameters in a group", grouped(group(0)), ONE, expect="error"),
    Shape("frozen parameters", ONE, before=freeze(0), change=freeze(0)),
    Shape("parameters frozen from the first step", TWO, change=freeze(1)),
    Shape("frozen parameters outside the optimizer", filtered),
    Shape("all parameters where there were the trainable ones", filtered, optimized(ADAMW), expect="error"),
    Shape("saved before the first step", ONE, train=0),
    Shape("saved before the first step, into a trained job", ONE, change=train_one_step, train=0),
    Shape("a state with part of the parameters", ONE, before=drop_one_state),
    Shape("a state with part of the parameters, into a trained job", ONE, before=drop_one_state, change=train_one_step),
    Shape("names of parameters in the groups", named),
    Shape("names of parameters in the saved groups", named, optimized(ADAMW)),
    Shape("names of parameters in the restored groups", optimized(ADAMW), named),
    Shape("momentum of one group", grouped(group(0, momentum=0.9), group(1), make=PLAIN_SGD)),
    Shape("momentum from the save on", grouped(group(0, 1), make=PLAIN_SGD), before=set_options(momentum=0.9)),
    Shape("a state under a string", ONE, before=add_state),
    Shape("Adam into AdamW", optimized(optim.Adam), optimized(optim.AdamW)),
    Shape("AdamW into amsgrad", optimized(ADAMW), optimized(VARIANTS["AdamW amsgrad"])),
    Shape("amsgrad into AdamW", optimized(VARIANTS["AdamW amsgrad"]), optimized(ADAMW)),
    Shape("SGD without momentum into SGD with it", optimized(PLAIN_SGD), optimized(OPTIMIZERS["SGD"])),
    Shape("AdamW into fused AdamW", optimized(ADAMW), optimized(VARIANTS["AdamW fused"])),
    Shape("fused AdamW into AdamW", optimized(VARIANTS["AdamW fused"]), optimized(ADAMW)),
]


# --- which parameters an optimizer has --------------------------------------------------------------------------------


def one_over_two(seed: int, saved: tuple[str, ...] = ("model", "critic")) -> Job:
    models = {"model": mlp(seed), "critic": mlp(seed + 1)}
    optimizer = ADAMW([p for model in models.values() for p in model.parameters()])
    first, second = map(loss_of, models.values())
    return job(lambda n: first(n) + second(n), **{name: models[name] for name in saved}, optimizer=optimizer)


def two_over_one(seed: int, same: bool = False) -> Job:
    model = mlp(seed)
    others = model.parameters() if same else model[1].parameters()
    first = model.parameters() if same else model[0].parameters()
    return job(model=model, first=ADAMW(first), second=OPTIMIZERS["SGD"](others))


def temperature(seed: int) -> Job:
    model, scale = mlp(seed), nn.Parameter(torch.tensor(float(seed)))
    loss = loss_of(model)
    return job(lambda n: loss(n) * scale, model=model, optimizer=ADAMW([scale, *model.parameters()]))


def only_loose(seed: int) -> Job:
    scale = nn.Parameter(torch.tensor(float(seed)))
    return job(lambda n: (scale - n) ** 2, scale=objects.Loader({"x": seed}), optimizer=ADAMW([scale]))


def optimizer_first(seed: int) -> Job:
    model = mlp(seed)
    return job(loss_of(model), optimizer=ADAMW(model.parameters()), model=model)


def optimizer_alone(seed: int) -> Job:
    model = mlp(seed)
    return job(loss_of(model), optimizer=ADAMW(model.parameters()))


def other_order(seed: int) -> Job:
    """Groups list their parameters in another order than the module."""
    model = mlp(seed, layers=3)
    first, second, third = (list(layer.parameters()) for layer in model)
    return job(model=model, optimizer=ADAMW([{"params": one} for one in (third, first[::-1], second)]))


def twice(seed: int) -> Job:
    model = mlp(seed)
    return job(model=model, same=model, optimizer=ADAMW(model.parameters()))


def shared_layer(seed: int) -> Job:
    model: Any = mlp(seed)
    critic = nn.Sequential(model[0], nn.Linear(4, 4))
    first, second = loss_of(model), loss_of(critic)
    optimizers = {"optimizer": ADAMW(model.parameters()), "second": ADAMW(critic.parameters())}
    return job(lambda n: first(n) + second(n), model=model, critic=critic, **optimizers)


OWNERS = [
    Shape("one optimizer over two modules", one_over_two),
    Shape("two optimizers over one module", two_over_one),
    Shape("two optimizers over the same parameters", functools.partial(two_over_one, same=True)),
    Shape("a parameter of no module", temperature),
    Shape("only a parameter of no module", only_loose),
    Shape("a module outside the state", functools.partial(one_over_two, saved=("model",))),
    Shape("an optimizer alone", optimizer_alone),
    Shape("an optimizer before its module", optimizer_first),
    Shape("groups in another order than the module", other_order),
    Shape("a module twice in the state", twice),
    Shape("two modules that share a layer", shared_layer),
]


# --- schedulers, and other objects ------------------------------------------------------------------------------------


def _sequential(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.95**step),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, objects.Decay()),
    "LambdaLR of a partial": lambda o: lr_scheduler.LambdaLR(o, functools.partial(max, 0.5)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, objects.Decay()),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 7, 7, 9], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=8),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=8),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": _sequential,
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 12, 2.0),
    "CosineAnnealingLR": COSINE,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(o, 2), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, 3, mode="exp_range", gamma=0.9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=7),
}


def with_objects(**values: Callable[[int], Any]) -> Callable[[int], Job]:
    """A model, its optimizer and these objects."""

    def build(seed: int) -> Job:
        model = mlp(seed)
        objects_by_name = {name: make(seed) for name, make in values.items()}
        return job(model=model, optimizer=ADAMW(model.parameters()), **objects_by_name)

    return build


def _scaler(seed: int) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed, growth_interval=seed)
    scaler.scale(torch.ones(1))
    scaler.update(2.0 ** (seed + 3))
    return scaler


def _odd(name: str, seed: int) -> Any:
    return objects.Loader(dict(objects.odd_values(seed))[name])


def _notes(seed: int) -> dict[Any, Any]:
    return {"a": [seed, (1, None)], 2: {"b": torch.full((2,), seed)}}


def object_shapes() -> list[Shape]:
    shapes = [Shape(f"scheduler {name}", scheduled(make), train=6, after=8) for name, make in SCHEDULERS.items()]
    shapes += [
        Shape(f"loader with {name}", with_objects(loader=functools.partial(_odd, name)), after=0, expect=expect)
        for name, _ in objects.odd_values(1)
        for expect in ["same or refused" if name in ("a dataclass", "a generator") else "same"]
    ]
    return [
        *shapes,
        Shape("GradScaler", with_objects(scaler=_scaler)),
        Shape("GradScaler that is off", with_objects(scaler=lambda _: torch.amp.GradScaler("cpu", enabled=False))),
        Shape("plain values", with_objects(epoch=lambda seed: seed, notes=_notes), after=0),
    ]


SHAPES = [*optimizer_shapes(), *GROUPS, *OWNERS, *object_shapes()]
