"""Jobs laid out over ranks, for ``test_state_ranks.py``, and the state that a single process would have."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import lr_scheduler

from tests.compat import layouts
from tests.exact import check_same
from tests.fault.scenario_tools import of_each_rank
from tests.integration.state_compare import frozen
from tests.integration.state_objects import Loader
from tests.states import drawn
from tierckpt import Checkpointer
from tierckpt.errors import TierckptError

LAYOUTS = {1: ("plain",), 2: ("ddp", "fsdp", "tp", "pipeline"), 4: ("fsdp", "hsdp", "tp", "fsdp+tp", "pipeline")}
KINDS = ("one group", "SGD", "groups", "loose parameter")
SAVED = [f"{layout}-on-{world}" for world, found in LAYOUTS.items() for layout in found]
LEAVES = ("first.wide", "first.narrow", "first.norm", "second.wide", "second.narrow", "second.norm", "head")
STEPS = 2


@dataclass
class RankJob:
    state: dict[str, Any]
    loose: dict[str, nn.Parameter]
    """Parameters of no module, by a name that this test gives them."""
    loss: Callable[[torch.Tensor], torch.Tensor]

    def train(self, steps: range) -> RankJob:
        optimizer = self.state["optimizer"]
        for step in steps:
            optimizer.zero_grad()
            x = drawn(torch.Generator().manual_seed(step), 6, 13)
            loss = self.loss(x)
            for parameter in self.loose.values():
                loss = loss + (parameter - step).square()
            loss.backward()
            optimizer.step()
            self.state["scheduler"].step()
        return self

    def parameters(self) -> dict[str, nn.Parameter]:
        named = self.state["model"].named_parameters()
        return {name.removeprefix("module."): p for name, p in named} | self.loose

    def buffers(self) -> dict[str, torch.Tensor]:
        return {name.removeprefix("module."): one for name, one in self.state["model"].named_buffers()}


def build(layout: str, kind: str, seed: int) -> RankJob:
    if layout == "pipeline":
        model, loss = _stage(seed)
    else:
        model, _ = layouts.build(layout, seed)
        loss = lambda x: model(x).square().mean()  # noqa: E731
    loose = {"temperature": nn.Parameter(torch.tensor(float(seed)))} if kind == "loose parameter" else {}
    optimizer = _optimizer(kind, list(model.parameters()), [*loose.values()])
    scheduler = lr_scheduler.LinearLR(optimizer, total_iters=9)
    loader = Loader({"at": seed, None: [torch.full((2,), float(seed))]})
    return RankJob(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "epoch": seed} | loose,
        loose,
        loss,
    )


def _optimizer(kind: str, parameters: list[nn.Parameter], loose: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "SGD":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if kind == "one group":
        return torch.optim.AdamW(parameters, lr=0.05, amsgrad=True)
    wide = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": wide, "weight_decay": 0.3, "name": "wide"},
        {"params": [], "lr": 0.5, "betas": (0.5, 0.6)},
        {"params": rest, "lr": 0.02, "tags": [1, {"a": None}]},
    ]
    return torch.optim.AdamW([*groups, *([{"params": loose, "lr": 0.3}] if loose else [])], lr=0.05)


def _stage(seed: int) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """This rank's stage of a pipeline: the whole model without the layers of the others."""
    torch.manual_seed(seed)
    model = layouts.Model()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(seed)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [name for index, name in enumerate(LEAVES) if index * world // len(LEAVES) == rank]
    for name in set(LEAVES) - set(mine):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, None)
    layers: list[Any] = [model.get_submodule(name) for name in mine]

    def loss(x: torch.Tensor) -> torch.Tensor:
        parts = [layer(x.repeat(1, 2)[:, : layer.weight.shape[-1]]).square().mean() for layer in layers]
        return torch.stack(parts).sum()

    return model, loss


# --- the state of a single process ------------------------------------------------------------------------------------


def gathered(job: RankJob) -> dict[str, Any]:
    """The state as one process would have it. Collective."""
    optimizer, names = job.state["optimizer"], {p: name for name, p in job.parameters().items()}
    mine = {
        "parameters": {name: layouts.whole(p.detach()) for name, p in job.parameters().items()},
        "buffers": {name: layouts.whole(one) for name, one in job.buffers().items()},
        "state": {names[p]: layouts.whole(dict(one)) for p, one in optimizer.state.items()},
    }
    groups = [
        ({key: value for key, value in group.items() if key != "params"}, [names[p] for p in group["params"]])
        for group in optimizer.param_groups
    ]
    others = of_each_rank((mine, groups))
    whole: dict[str, Any] = {
        key: {name: one for other, _ in others for name, one in other[key].items()} for key in mine
    }
    whole["groups"] = [
        (options, sorted({name for _, their in others for name in their[index][1]}))
        for index, (options, _) in enumerate(groups)
    ]
    rest = {key: job.state[key].state_dict() for key in ("scheduler", "loader")}
    return whole | rest | {"epoch": job.state["epoch"]}


def fill(job: RankJob, whole: dict[str, Any]) -> None:
    """Give each rank its part of the whole state, tensor by tensor: the reference of a restore."""
    optimizer = job.state["optimizer"]
    with torch.no_grad():
        for name, parameter in job.parameters().items():
            parameter.copy_(_part(whole["parameters"][name], parameter))
            optimizer.state[parameter] = {
                key: _part(value, parameter) if isinstance(value, torch.Tensor) and value.ndim else value
                for key, value in whole["state"].get(name, {}).items()
            }
        for name, buffer in job.buffers().items():
            buffer.copy_(whole["buffers"][name])
    for group, (options, _) in zip(optimizer.param_groups, whole["groups"], strict=True):
        for key in [key for key in group if key != "params"]:
            del group[key]
        group.update(options)
    for key in ("scheduler", "loader"):
        job.state[key].load_state_dict(whole[key])
    job.state["epoch"] = whole["epoch"]


def _part(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value.clone()


def layout_of(job: RankJob) -> dict[str, Any]:
    """How each tensor of parameters and optimizer is placed."""
    found = {}
    for name, parameter in job.parameters().items():
        for key, one in {"": parameter, **job.state["optimizer"].state[parameter]}.items():
            if isinstance(one, torch.Tensor):
                placed = (str(one.placements), tuple(one.to_local().shape)) if isinstance(one, DTensor) else None
                found[name, key] = (placed, tuple(one.shape), one.dtype, str(one.device))
    return found


# --- scenarios --------------------------------------------------------------------------------------------------------


def save_layouts(folder: str) -> dict[str, str]:
    """Save each kind in each layout of this world size, and the whole state with ``torch.save``."""
    world = dist.get_world_size()
    outcomes = {}
    for layout in LAYOUTS[world]:
        for kind in KINDS:
            name = f"{kind}, {layout}-on-{world}"
            job = build(layout, kind, 1).train(range(STEPS))
            was = gathered(job)
            try:
                with _quiet(), Checkpointer(str(Path(folder) / name), timeout_seconds=60) as checkpointer:
                    checkpointer.save(STEPS, job.state)
            except Exception as error:
                outcomes[name] = f"{type(error).__name__}: {str(error)[:300]}"
                continue
            outcomes[name] = _agreed(lambda was=was, job=job: check_same(frozen(was), frozen(gathered(job))))
            if dist.get_rank() == 0:
                torch.save(was, Path(folder) / f"{name}.pt")
    dist.barrier()
    return outcomes


def load_layouts(folder: str) -> dict[str, str]:
    """Restore each checkpoint into each layout of this world size, and train on. Returns the differences."""
    outcomes = {}
    for kind, name, layout in pairs(dist.get_world_size()):
        path = Path(folder) / f"{kind}, {name}.pt"
        if path.exists():
            whole = torch.load(path, weights_only=False)
            reference, ours = (build(layout, kind, seed) for seed in (3, 2))
            fill(reference, whole)
            outcomes[f"{path.stem} -> {layout}"] = _restored(str(path.with_suffix("")), ours, reference, whole)
    return outcomes


def pairs(world: int) -> list[tuple[str, str, str]]:
    """Kind, saved and restored layout: every pair of layouts once, with the kinds in turn."""
    return [
        (KINDS[(row + column + world) % len(KINDS)], name, layout)
        for row, name in enumerate(SAVED)
        for column, layout in enumerate(LAYOUTS[world])
    ]


def _restored(uri: str, ours: RankJob, reference: RankJob, whole: dict[str, Any]) -> str:
    ran: list[str] = []
    ours.state["optimizer"].register_step_pre_hook(lambda *_: ran.append("step"))
    try:
        with _quiet(), Checkpointer(uri, timeout_seconds=60) as checkpointer:
            found = checkpointer.restore(ours.state)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    hooks = list(ran)

    def compare() -> None:
        assert found == STEPS
        state = gathered(ours)
        check_same(frozen(whole), frozen(state))
        check_same(frozen(layout_of(reference)), frozen(layout_of(ours)))
        for job in (reference, ours):
            job.train(range(STEPS, STEPS + 2))
        expected, state = gathered(reference), gathered(ours)
        check_same(frozen(expected), frozen(state))
        assert hooks == [], "the restore ran step hooks"

    return _agreed(compare)


def _agreed(compare: Callable[[], None]) -> str:
    """``equal`` when no rank raises, else the first difference. ``compare`` ends its collectives before it checks."""
    try:
        compare()
        mine = "equal"
    except AssertionError as error:
        mine = f"differs: {str(error)[:300]}"
    others = of_each_rank(mine)
    return next((one for one in others if one != "equal"), "equal")


_quiet = functools.partial(warnings.catch_warnings, action="ignore")


# --- jobs that do not fit ---------------------------------------------------------------------------------------------


def refused(uri: str, layout: str, change: str) -> dict[str, str]:
    """Each rank's outcome of a restore into a job that differs, on all ranks or on one. The error names each change."""
    job = build(layout, "one group", 1).train(range(STEPS))
    with _quiet(), Checkpointer(uri, timeout_seconds=60) as checkpointer:
        checkpointer.save(STEPS, job.state)
        other = build(layout, "one group", 2)
        CHANGES[change](other)
        was = gathered(other)
        message = ""
        try:
            checkpointer.restore(other.state)
            mine = "restored"
        except TierckptError as error:
            mine, message = type(error).__name__, str(error)
    now = gathered(other)
    owners = {"parameters": "model", "buffers": "model", "state": "optimizer", "groups": "optimizer"}
    changed = {owners.get(key, key) for key in was if frozen(was[key]) != frozen(now[key])}
    if any(name not in message for name in changed):
        mine += f", and changed {sorted(changed)}"
    others = of_each_rank(mine)
    return {str(rank): one for rank, one in enumerate(others)}


def _add_entry_on_last_rank(job: RankJob) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        job.state["only_here"] = Loader({"x": 1})


def _raise_on_last_rank(job: RankJob) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("no such shard")

    job.state = {"loader": job.state.pop("loader"), **job.state}
    if dist.get_rank() == dist.get_world_size() - 1:
        job.state["loader"].load_state_dict = refuse


def _drop_head(job: RankJob) -> None:
    _inner(job).head = None
    left = set(job.parameters().values())
    for group in job.state["optimizer"].param_groups:
        group["params"] = [p for p in group["params"] if p in left]


def _add_layer(job: RankJob) -> None:
    _inner(job).more = nn.Linear(3, 3)


def _inner(job: RankJob) -> Any:
    return getattr(job.state["model"], "module", job.state["model"])


CHANGES: dict[str, Callable[[RankJob], None]] = {
    "a layer that the checkpoint lacks": _add_layer,
    "a layer that only the checkpoint has": _drop_head,
    "an entry on one rank alone": _add_entry_on_last_rank,
    "an object of one rank raises": _raise_on_last_rank,
}


def materialised(uri: str) -> str:
    """Save a ``fully_shard`` model, and restore one that is on meta."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    saved, _ = layouts.build("fsdp", 1)
    with torch.device("meta"):
        model: nn.Module = layouts.Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh)
    with _quiet(), Checkpointer(uri, timeout_seconds=60) as checkpointer:
        checkpointer.save(STEPS, {"model": saved})
        try:
            checkpointer.restore({"model": model})
        except TierckptError as error:
            return "refused" if "meta" in str(error) else str(error)
    left = [name for name, one in model.state_dict().items() if one.is_meta]
    if left:
        return f"still on meta: {left}"
    both = [{name: layouts.whole(one) for name, one in each.state_dict().items()} for each in (saved, model)]
    return _agreed(lambda: check_same(*map(frozen, both)))


def other_precision(uri: str, layout: str) -> str:
    """A float32 checkpoint in a bfloat16 model, as ``load_state_dict`` casts it."""
    job = build(layout, "one group", 1).train(range(STEPS))
    was = gathered(job)
    with _quiet(), Checkpointer(uri, timeout_seconds=60) as checkpointer:
        checkpointer.save(STEPS, {"model": job.state["model"]})
        model, _ = layouts.build(layout, 2)
        model.to(torch.bfloat16)
        checkpointer.restore({"model": model})
    found = {name.removeprefix("module."): layouts.whole(p.detach()) for name, p in model.named_parameters()}
    wanted = {name: one.to(torch.bfloat16) for name, one in was["parameters"].items()}
    return _agreed(lambda: check_same(frozen(wanted), frozen(found)))
