"""Items whose bytes only torch can make, one after another: tensor subclasses, and DCP's stream extensions."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ... import torch_internals
from ...save.shard_plan import Record
from ...torch_internals import StorageWriterTransforms
from .. import split
from ..stager import StagedItems

STREAMED_BYTES = 256 << 20
"""A shard of them is closed when it has so many: it is in memory until it is written."""


def streamed_shards(
    transforms: StorageWriterTransforms,
    names: Iterator[str],
    items: Sequence[WriteItem],
    planner: SavePlanner | StagedItems,
) -> Iterator[tuple[str, Record, list[WriteResult]]]:
    """Yield shards of ``items``: their names, bytes, and what DCP is told of the items in them. Each item goes through
    ``torch.save`` and the extensions of ``transforms``.

    Cost: what stock DCP costs; one shard of ``STREAMED_BYTES`` and one item is in memory.
    """
    name, stream, results = next(names), io.BytesIO(), list[WriteResult]()
    for item in items:
        data = _data(item, planner)
        results.append(torch_internals.write_item(transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE))
        if stream.tell() >= STREAMED_BYTES:
            yield name, Record(0, stream.getbuffer()), results
            name, stream, results = next(names), io.BytesIO(), []
    if results:
        yield name, Record(0, stream.getbuffer()), results


def _data(item: WriteItem, planner: SavePlanner | StagedItems) -> Any:
    if item.type is WriteItemType.BYTE_IO:
        return planner.resolve_data(item)
    tensor = planner.tensor(item) if isinstance(planner, StagedItems) else split.resolve(planner, item)
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return tensor.cpu()
    # torch.save writes the whole storage of a view.
    whole = tensor.untyped_storage().size() == tensor.nbytes
    return tensor if whole else tensor.clone()
