"""The items of a plan as the records of shards: what each is, where its bytes are, and where they go."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from ..arena import slots
from ..arena.slots import Lease
from ..errors import StateMismatchError
from ..mover.flush import BLOCK_BYTES, Fetch, Image, Record, round_up
from . import image, split, wire
from .stager import StagedItems, meta_tensor


@dataclass(slots=True, eq=False)
class Source:
    """One item of the plan, resolved. ``frame`` is None for bytes that are complete as they are."""

    item: WriteItem
    frame: wire.Frame | None = None
    data: Any = b""
    address: int = 0
    lease: Lease | None = None
    owner: Any = None
    fetch: Fetch | None = None


@dataclass(slots=True)
class Sources:
    """What a plan asks this rank to write."""

    tensors: list[Source] = field(default_factory=list)
    objects: list[Source] = field(default_factory=list)
    others: list[WriteItem] = field(default_factory=list)
    """Tensors whose raw bytes do not say everything: torch.save must write them."""

    @property
    def leases(self) -> set[Lease]:
        return {source.lease for source in self.tensors if source.lease is not None}


def resolve(items: Iterable[WriteItem], planner: SavePlanner | StagedItems) -> Sources:
    """Ask the planner for each item's data. Copies nothing; data on a device stays there until it is written.

    Raises:
        StateMismatchError: a tensor on the meta device, or a staged copy whose memory another checkpoint has by now.
    """
    found = Sources()
    lease: Lease | None = None
    for item in items:
        if item.type is WriteItemType.BYTE_IO:
            found.objects.append(Source(item, data=cast(Any, planner.resolve_data(item)).getbuffer()))
            continue
        tensor = _tensor(item, planner)
        if not wire.is_plain(tensor):
            found.others.append(item)
            continue
        frame = wire.frame(tensor.dtype, tuple(tensor.shape))
        if frame.size_bytes and not _lies_ready(tensor):
            found.tensors.append(Source(item, frame, fetch=_Gathered(tensor).fetch, owner=tensor))
            continue
        address = tensor.data_ptr()
        if lease is None or not lease.covers(address):
            lease = slots.find(address)
        if lease is not None and lease.storage and tensor.untyped_storage()._cdata != lease.storage:
            raise StateMismatchError(
                f"the staged copy of {item.index.fqn} is gone: its memory was given to a newer checkpoint",
                hint="Save a staged state dict once, before the next ones are staged",
                tensor=item.index.fqn,
            )
        found.tensors.append(Source(item, frame, address=address, lease=lease, owner=tensor))
    return found


def _tensor(item: WriteItem, planner: SavePlanner | StagedItems) -> torch.Tensor:
    tensor = planner.tensor(item) if isinstance(planner, StagedItems) else split.resolve(planner, item)
    tensor = tensor.detach()
    if tensor.is_meta:
        raise meta_tensor(item.index.fqn)
    return tensor


def _lies_ready(tensor: torch.Tensor) -> bool:
    """True when the bytes to write are in host memory in one piece."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


@dataclass(slots=True)
class ShardPlan:
    """One file to be: its items with their records, in file order."""

    sources: list[Source]
    records: list[Record]
    image: Image | None = None


def lay_out(sources: Sources, *, shard_bytes_max: int, chunk_size_bytes: int, one_file: bool = True) -> list[ShardPlan]:
    """Give every tensor and object its place in a shard. Staged tensors come in the order they were staged in, so that
    where nothing was left out the arena already is the image of the files."""
    tensors = sorted(sources.tensors, key=lambda source: source.address if source.lease is not None else 1 << 64)
    if not one_file:
        return [_shard([(source, 0)]) for source in (*tensors, *sources.objects)]  # the arena has them close together
    frames = [cast(wire.Frame, source.frame) for source in tensors]
    unit = image.unit_bytes(chunk_size_bytes)
    placed = [
        [(tensors[index], offset) for index, offset in shard]
        for shard in image.arrange(frames, shard_bytes_max=shard_bytes_max, unit=unit)
    ]
    position = _end(placed[-1]) if placed else 0
    for source in sources.objects:
        if not placed or (position and position + len(source.data) > shard_bytes_max):
            placed.append([])
            position = 0
        offset = round_up(position, wire.ALIGNMENT_BYTES)
        placed[-1].append((source, offset))
        position = offset + len(source.data)
    plans = [_shard(shard) for shard in placed]
    _write_in_place(plans)
    return plans


def _end(shard: Sequence[tuple[Source, int]]) -> int:
    source, offset = shard[-1]
    return offset + (source.frame.total_bytes if source.frame is not None else len(source.data))


def _shard(placed: Sequence[tuple[Source, int]]) -> ShardPlan:
    records = [
        Record(offset, source.frame.head, source.frame, source.address, source.owner, source.fetch)
        if source.frame is not None
        else Record(offset, source.data)
        for source, offset in placed
    ]
    return ShardPlan([source for source, _ in placed], records)


def _write_in_place(plans: Sequence[ShardPlan]) -> None:
    """Note which staged images can be written from where they lie: all of them, or none.

    Heads, tails and padding are filled in between the data of an image. Nothing else may lie there: neither a tensor
    that another shard still has to read, nor one that was staged and is not part of this save.
    """
    written = Counter(source.lease for plan in plans for source in plan.sources if source.lease is not None)
    if any(lease.tensors not in (None, count) for lease, count in written.items()):
        return
    images = [_image(plan.sources, plan.records) for plan in plans]
    for plan, image_ in zip(plans, images, strict=True):
        if image_ is None and any(source.lease is not None for source in plan.sources):
            return
    for plan, image_ in zip(plans, images, strict=True):
        plan.image = image_


def _image(sources: Sequence[Source], records: Sequence[Record]) -> Image | None:
    """The staged image of this shard, if its tensors lie in the arena as they will lie in the file.

    Only where the arena has huge pages: from 4 KiB pages a direct write takes 2 to 3 times as long, and a copy into a
    slot of huge pages is the cheaper way.
    """
    staged = [(source, record) for source, record in zip(sources, records, strict=True) if source.lease is not None]
    if not staged or not (lease := staged[0][0].lease) or not lease.memory.huge:
        return None
    address = staged[0][1].address - staged[0][1].data_offset
    size_bytes = round_up(staged[-1][1].end)
    for source, record in staged:
        if source.lease is not lease or (record.size_bytes and record.address - record.data_offset != address):
            return None
    if address % BLOCK_BYTES:  # O_DIRECT takes no other
        return None
    if not lease.memory.address <= address or address + size_bytes > lease.memory.address + lease.size_bytes:
        return None
    return Image(lease.memory, address, size_bytes)


class _Gathered:
    """The data of a tensor that does not lie in host memory in one piece."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._flat: torch.Tensor | None = None
        self._left = tensor.numel() * tensor.itemsize
        self._lock = threading.Lock()

    def fetch(self, target: int, start: int, count: int) -> None:
        """Put ``count`` bytes from ``start`` on at ``target``.

        One piece of the tensor's size exists while its parts are asked for, on its own device, and goes with the last.
        """
        with self._lock:
            if self._flat is None:
                self._flat = self._tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            flat = self._flat
        memory = (ctypes.c_char * count).from_address(target)
        torch.frombuffer(memory, dtype=torch.uint8).copy_(flat[start : start + count])
        with self._lock:
            self._left -= count
            if not self._left:
                self._flat = None
