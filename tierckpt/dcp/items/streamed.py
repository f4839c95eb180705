"""Items whose bytes only torch can make, one after another: tensor subclasses, and DCP's stream extensions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms, _write_item
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ...config import Settings
from ...format.shard import Flushed
from .. import split
from ..stager import StagedItems
from .stream_writer import ShardWriter


def write_streamed(
    transforms: _StorageWriterTransforms,
    path: Path,
    items: Sequence[WriteItem],
    planner: SavePlanner | StagedItems,
    settings: Settings,
    *,
    durable: bool,
) -> tuple[list[WriteResult], Flushed]:
    """Write ``items`` to a shard of their own, each through ``torch.save`` and the extensions of ``transforms``.

    Cost: what stock DCP costs; one item at a time is in memory, and one chunk of the shard.
    """
    with ShardWriter(path, int(settings.chunk_size_bytes)) as stream:
        try:
            results = [
                _write_item(transforms, stream, _data(item, planner), item, path.name, SerializationFormat.TORCH_SAVE)
                for item in items
            ]
            flushed = stream.finish(durable=durable)
        except BaseException as error:
            if stream.error is not None and stream.error is not error:
                raise stream.error from error
            raise
    return results, flushed


def _data(item: WriteItem, planner: SavePlanner | StagedItems) -> Any:
    if item.type is WriteItemType.BYTE_IO:
        return planner.resolve_data(item)
    tensor = planner.tensor(item) if isinstance(planner, StagedItems) else split.resolve(planner, item)
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return tensor.cpu()
    # torch.save writes the whole storage of a view.
    whole = tensor.storage().size() == tensor.numel()  # type: ignore[no-untyped-call]
    return tensor if whole else tensor.clone()
