"""Sizes of a checkpoint by component, from its metadata alone."""

from __future__ import annotations

import math
import os

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..client import latest
from ..config import Settings
from ..planning.training_state import Model, Tensor, TrainingState, take_stock
from .reader import TierStorageReader


def component_sizes_of(uri: str | os.PathLike[str], settings: Settings) -> tuple[Model, TrainingState]:
    """Return the model and state at ``uri``; for a run, of its newest usable checkpoint.

    Raises ConfigError without weights, and the errors of the reader.
    """
    reader = TierStorageReader(latest(uri, settings=settings) or uri, settings=settings)
    tensors = []
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            count, dtype = math.prod(entry.size), entry.properties.dtype
            tensors.append(Tensor(name, count, count * dtype.itemsize, dtype.is_floating_point))
    return take_stock(tensors, str(reader.path))
