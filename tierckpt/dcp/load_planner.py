"""TargetPlanner: reads items of a checkpoint into tensors that have their names, whatever the state dict is."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from .frozen import index_of, read_whole
from .gc_pause import gc_paused


class TargetPlanner(DefaultLoadPlanner):
    """Reads into ``target``, and needs no state dict: call ``dcp.load({}, planner=...)``.

    Guarantee: items are those of ``DefaultLoadPlanner`` for the same names and tensors. Objects replace the values of
    their names in ``target``.

    Cost: one object for a tensor that is read whole; DCP compares the chunks of each, and asks what each value is.

    Args:
        target: tensors and placeholders of objects, by name in the checkpoint.
    """

    def __init__(self, target: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.target = target

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the metadata. DCP calls this first, on every rank."""
        self.state_dict, self.metadata, self.is_coordinator = self.target, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads. Raises what DCP's planner raises for tensors that do not fit."""
        assert self.metadata is not None
        with gc_paused():
            whole = dict(self._whole(self.metadata))
            rest = {name: value for name, value in self.target.items() if name not in whole}
            plan = create_default_local_load_plan(rest, self.metadata)
            return LoadPlan([*whole.values(), *plan.items])

    def _whole(self, metadata: Metadata) -> Iterator[tuple[str, ReadItem]]:
        """Yield the tensors that were saved in one piece and are read whole."""
        stored = metadata.state_dict_metadata
        for name, value in self.target.items():
            found = stored.get(name)
            if type(value) is not torch.Tensor or type(found) is not TensorStorageMetadata or len(found.chunks) != 1:
                continue
            [chunk], size = found.chunks, found.size
            if size == value.size() == chunk.sizes and 0 not in size:  # DCP reads nothing of an empty one
                yield name, read_whole(index_of(name, chunk.offsets, 0), chunk.offsets, size)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put the object in ``value``, which the reader has proven to be data, in its place."""
        self.target[read_item.dest_index.fqn] = torch.load(value, weights_only=False)
