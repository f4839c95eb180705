"""A save with optimizers near storage: their state is written from the files that have it, and nobody copies it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan

from ...dcp.planner import TierSavePlanner
from ...dcp.stager import StagedItems, TierStager
from ...errors import TierckptError
from ...near_storage.optimizer import NearStorageOptimizer


def stage(stager: TierStager, plan: SavePlan, planner: TierSavePlanner, state: Mapping[str, Any]) -> StagedItems:
    """Stage what the plan wants of this rank, but for what optimizers near storage have: they are told to keep it."""
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
