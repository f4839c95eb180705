from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from ...telemetry import logger

log = logger("state")


class PerRank:
    """Wraps a Stateful with state that differs by rank (a data loader): each rank saves and restores its own.

    A rank that the checkpoint lacks keeps its state; this is logged. Raises the errors of the wrapped object.

    Args:
        stateful: any object with ``state_dict`` and ``load_state_dict``.

    Example:
        >>> loader = torch.nn.Linear(1, 1)  # stands for a data loader with a state
        >>> with tierckpt.Checkpointer("run") as checkpointer:
        ...     saved = checkpointer.save(1, {"loader": tierckpt.PerRank(loader)})
        ...     checkpointer.restore({"loader": tierckpt.PerRank(loader)})
        1
    """

    def __init__(self, stateful: Stateful) -> None:
        self.stateful = stateful

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"rank-N": state}`` of this rank alone."""
        return {rank_key(): self.stateful.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's entry of ``state``. Without one, logs a warning and changes nothing."""
        if rank_key() not in state:
            log.warning("the checkpoint has no state for %s, which keeps its current state", rank_key())
            return
        self.stateful.load_state_dict(state[rank_key()])


class _Rng:
    """The random number generators of this process, in types that need no trust to load."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": _listed(random.getstate())}
        name, keys, *rest = np.random.get_state()
        state["numpy"] = [name, [int(key) for key in keys], *rest]
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"].cpu())
        random.setstate(_as_tuples(state["python"]))
        if "numpy" in state:
            name, keys, *rest = state["numpy"]
            np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())


class RngState(PerRank):
    """The random number generators of every rank: torch (CPU and CUDA), Python, NumPy.

    Example:
        >>> with tierckpt.Checkpointer("run") as checkpointer:
        ...     saved = checkpointer.save(1, {"rng": tierckpt.RngState()})
        ...     before = torch.rand(2)
        ...     step = checkpointer.restore({"rng": tierckpt.RngState()})
        >>> torch.equal(before, torch.rand(2))
        True
    """

    def __init__(self) -> None:
        super().__init__(_Rng())


def rank_key() -> str:
    return f"rank-{dist.get_rank() if dist.is_initialized() else 0}"


def _listed(value: Any) -> Any:
    """Convert tuples to lists: DCP flattens lists and keeps tuples as objects, but either must restore exactly."""
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value
