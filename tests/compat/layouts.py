"""One small model and its AdamW, laid out over the ranks in each way PyTorch has.

13 does not divide by 2, 3 or 4, so FSDP shards are uneven and some ranks hold none; only what tensor parallelism splits
(24) must divide, because its forward pass needs it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

LAYOUTS = {
    1: ("plain",),
    2: ("ddp", "fsdp", "tp", "hsdp"),
    3: ("fsdp", "tp"),
    4: ("ddp", "fsdp", "tp", "hsdp", "fsdp+tp"),
}
"""World size to the layouts that are tried at it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(13, 24)
        self.narrow = nn.Linear(24, 13)
        self.norm = nn.LayerNorm(13)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.narrow(torch.relu(self.wide(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.head = nn.Linear(13, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def build(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model in ``layout`` with weights drawn from ``seed`` (the same on every rank), and its optimizer."""
    torch.manual_seed(seed)
    model: nn.Module = Model()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(seed)
    if layout == "ddp":
        model = DistributedDataParallel(model)
    if "tp" in layout:
        _tensor_parallel(model, _mesh(layout)["tp"])
    if layout in {"fsdp", "hsdp", "fsdp+tp"}:
        mesh = _mesh(layout)
        data = mesh["data"] if layout == "fsdp+tp" else mesh
        for block in (model.first, model.second, model):
            fully_shard(block, mesh=data)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _mesh(layout: str) -> DeviceMesh:
    world = dist.get_world_size()
    if layout == "hsdp":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    if layout == "fsdp+tp":
        return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tp"))
    return init_device_mesh("cpu", (world,), mesh_dim_names=("tp" if layout == "tp" else "data",))


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in (model.first, model.second):
        parallelize_module(block, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.rand(6, 13)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def put_back(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def whole(value: Any) -> Any:
    """The same structure with every sharded tensor gathered. All ranks must call it alike."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value
