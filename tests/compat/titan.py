"""A training script on torchtitan's CheckpointManager, saving through us. One process is one rank.

    python -m tests.compat.titan torchtitan RUN_URI STEPS LOG

torchtitan passes DCP no storage writer, so a subclass overrides its two DCP calls and the choice of the newest step.
Staging, waiting, step names, the saved state and the order of loading stay torchtitan's own.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager

import tierckpt
from tests.compat.drivers import SAVE_EVERY, adam, await_next, digest, mean_over_ranks, note


class TierCheckpointManager(CheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan requires one in every subclass."""

    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode, *_: Any, **__: Any
    ) -> Any:
        writer = tierckpt.TierStorageWriter(checkpoint_id)
        if async_mode is AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)
            return None
        return dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, *_: Any, **__: Any) -> None:
        dcp.load(state_dict, storage_reader=tierckpt.TierStorageReader(checkpoint_id))
        self.states["model"].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        """torchtitan takes a step for whole by its ``.metadata``, which is there before the commit is."""
        newest = [tierckpt.latest(folder or self.folder) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(newest)
        return -1 if newest[0] is None else int(newest[0].rpartition("-")[2])


class Optimizers:
    """torchtitan's container flattens the optimizer's state by parameter name; so does this."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, adam(model)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state)


class TrainState:
    """The trainer's own state: the step, and each rank's random state."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, f"random-{dist.get_rank()}": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        torch.set_rng_state(state[f"random-{dist.get_rank()}"])


def main(run_uri: str, steps: int, log: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 17), nn.ReLU(), nn.Dropout(0.3), nn.Linear(17, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(100 + dist.get_rank())
    optimizers, trained = Optimizers(model), TrainState()
    manager = TierCheckpointManager(
        TierCheckpointManager.Config(
            enable=True, folder=run_uri, interval=SAVE_EVERY, async_mode="async", keep_latest_k=0
        ),
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=torch.optim.lr_scheduler.ConstantLR(optimizers.optimizer),
        states={"train_state": trained},
        sd_adapter=None,
    )
    manager.load()
    note(log, resumed_from=trained.step)
    while trained.step < steps:
        begun = time.monotonic()
        loss = (model(torch.randn(4, 9)) - 1).square().mean()
        loss.backward()
        optimizers.optimizer.step()
        optimizers.optimizer.zero_grad()
        trained.step += 1
        note(log, step=trained.step, loss=mean_over_ranks(loss).hex())
        manager.save(trained.step)
        await_next(trained.step, begun)
    manager.maybe_wait_for_saving()
    note(log, digest=digest(model, optimizers.optimizer))
    manager.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
