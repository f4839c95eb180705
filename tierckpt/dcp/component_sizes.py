"""Sizes of a checkpoint by component, from its metadata alone."""

from __future__ import annotations

import math
import os

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..client import latest
from ..config import Settings
from ..planning.training_state import Model, Tensor, TrainingState, take_stock
from .reader import TierStorageReader


def component_sizes_of(uri: str | os.PathLike[str], settings: Settings) -> tuple[Model, TrainingState]:
    """Return the model and state at ``uri``; for a run, of its newest usable checkpoint.

    Raises ConfigError without weights, and the errors of the reader.
    """
    reader = TierStorageReader(latest(uri, settings=settings) or uri, settings=settings)
    return take_stock(tensors_of(reader.read_metadata()), str(reader.path))


def tensors_of(metadata: Metadata) -> list[Tensor]:
    return [
        Tensor(
            name,
            math.prod(entry.size),
            math.prod(entry.size) * entry.properties.dtype.itemsize,
            entry.properties.dtype.is_floating_point,
        )
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    ]
