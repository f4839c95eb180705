"""Training scripts as users of Accelerate and Lightning Fabric write them, saving through us. One process is one rank.

    python -m tests.compat.drivers FRAMEWORK RUN_URI STEPS LOG

Saves asynchronously every ``SAVE_EVERY`` steps, resumes from the newest checkpoint it finds, and logs each step's loss
in full precision. The model has dropout and the data is shuffled, so a resume that loses a random state shows.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, TensorDataset

import tierckpt

SAVE_EVERY = 4
STEP_SECONDS_MIN = 0.15
"""Steps take at least so long, so that a kill comes in the middle of something."""
HOLD_AT = int(os.environ.get("TIERCKPT_TEST_HOLD_AT", "0"))
"""The step after which a run waits to be killed."""


Prepared: TypeAlias = tuple[nn.Module, torch.optim.Optimizer, Iterable[Any]]


class Framework(Protocol):
    """Framework-specific parts of the script: preparing models and loaders, and its backward."""

    def prepare(self, model: nn.Module, loader: DataLoader[Any]) -> Prepared: ...

    def backward(self, loss: torch.Tensor) -> None: ...


class Accelerate:
    def __init__(self) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)

    def prepare(self, model: nn.Module, loader: DataLoader[Any]) -> Prepared:
        model, optimizer, loader = self.accelerator.prepare(model, adam(model), loader)
        return model, optimizer, loader

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)


class Fabric:
    """Fabric with FSDP2, which it calls the model-parallel strategy."""

    def __init__(self) -> None:
        from lightning.fabric import Fabric as LightningFabric
        from lightning.fabric.strategies import ModelParallelStrategy

        ranks = int(os.environ["WORLD_SIZE"])
        # By default Fabric takes the ranks of a node for tensor parallelism, and FSDP would shard over one.
        strategy = ModelParallelStrategy(self._shard, data_parallel_size=ranks, tensor_parallel_size=1)
        self.fabric = LightningFabric(accelerator="cpu", devices=ranks, strategy=strategy)
        self.fabric.launch()

    @staticmethod
    def _shard(model: nn.Module, mesh: Any) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    def prepare(self, model: nn.Module, loader: DataLoader[Any]) -> Prepared:
        model = self.fabric.setup_module(model)
        optimizer = self.fabric.setup_optimizers(adam(model))
        return model, optimizer, self.fabric.setup_dataloaders(loader)

    def backward(self, loss: torch.Tensor) -> None:
        self.fabric.backward(loss)


FRAMEWORKS: dict[str, type[Framework]] = {"accelerate": Accelerate, "fabric": Fabric}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def main(framework: str, run_uri: str, steps: int, log: Path) -> None:
    runner = FRAMEWORKS[framework]()
    run(runner, run_uri, steps, log)
    del runner
    gc.collect()  # DDP's reducer must not outlive the group: freeing it last can deadlock on the interpreter lock
    dist.barrier()
    dist.destroy_process_group()


def run(runner: Framework, run_uri: str, steps: int, log: Path) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 9), torch.randn(64, 1))
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    net = nn.Sequential(nn.Linear(9, 17), nn.ReLU(), nn.Dropout(0.3), nn.Linear(17, 1))
    model, optimizer, batches = runner.prepare(net, loader)
    bare = unwrapped(model)
    torch.manual_seed(100 + dist.get_rank())  # each rank has its own dropout
    start, random = restore(run_uri, bare, optimizer)
    note(log, resumed_from=start)
    writer, pending = tierckpt.TierStorageWriter(f"{run_uri}/step-0"), None
    group = dist.new_group(backend="gloo")  # its own: DCP plans in a thread, while training uses the default group
    for step, (inputs, wanted) in enumerate(forever(batches), start=1):
        if step <= start:
            continue  # seen before the kill
        if step > steps:
            break
        if step == start + 1 and random is not None:
            torch.set_rng_state(random)  # not earlier: to skip batches, the loader draws from the same generator
        begun = time.monotonic()
        loss = (model(inputs) - wanted).square().mean()
        runner.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        note(log, step=step, loss=mean_over_ranks(loss).hex())
        if step % SAVE_EVERY == 0:
            if pending is not None:
                pending.result()
            state = state_of(bare, optimizer, step)
            uri = f"{run_uri}/step-{step}"
            pending = dcp.async_save(state, storage_writer=writer, checkpoint_id=uri, process_group=group)
        await_next(step, begun)
    if pending is not None:
        pending.result()
    note(log, digest=digest(bare, optimizer))


def await_next(step: int, begun: float) -> None:
    time.sleep(max(0.0, STEP_SECONDS_MIN - (time.monotonic() - begun)))
    while step == HOLD_AT:
        time.sleep(1)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside the framework's wrappers, as their guides say to save it."""
    while hasattr(model, "module"):
        model = model.module
    return model


def forever(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, inner(optimizer))
    random = {f"rank-{dist.get_rank()}": torch.get_rng_state()}
    return {"model": model_state, "optimizer": optimizer_state, "random": random, "step": step}


def inner(optimizer: Any) -> torch.optim.Optimizer:
    return optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer


def restore(run_uri: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, torch.Tensor | None]:
    """Load the newest checkpoint, the same one on every rank. Returns its step (0: there is none) and random state."""
    newest = [tierckpt.latest(run_uri) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(newest)
    if newest[0] is None:
        return 0, None
    state = state_of(model, optimizer, 0)
    dcp.load(state, storage_reader=tierckpt.TierStorageReader(newest[0]))
    set_state_dict(model, inner(optimizer), model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"]), state["random"][f"rank-{dist.get_rank()}"]


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().double()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over the bits of this rank's parameters, Adam moments and random state, joined over ranks."""
    state = state_of(model, optimizer, 0)
    moments = [value for slot in state["optimizer"]["state"].values() for value in slot.values()]
    found = hashlib.sha256()
    for tensor in [*state["model"].values(), *moments, *state["random"].values()]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found.hexdigest())
    return "-".join(every)


def note(log: Path, **facts: Any) -> None:
    if dist.get_rank() == 0:
        with log.open("a") as stream:
            stream.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
