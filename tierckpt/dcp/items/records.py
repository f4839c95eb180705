"""The items of a plan as records of shards."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from ...arena import slots
from ...arena.slots import Lease
from ...errors import CheckpointError, StateMismatchError, UnsafeCheckpointError
from ...quantities import DISK_BLOCK_BYTES, round_up
from ...save.shard_plan import Image, ShardRecord
from ...telemetry import logger
from ...torch_internals import storage_address_of
from .. import split
from ..planner import saved_values
from ..sealed_unpickler import Objects
from ..stager import StagedItems, refuse_tensor
from ..staging import StagingLayout
from . import item_format
from . import shard_layout as image
from .item_format import resolve_object

log = logger("save")


@dataclass(slots=True)
class Sources:
    tensors: list[ShardRecord] = field(default_factory=list)
    objects: list[ShardRecord] = field(default_factory=list)
    others: list[WriteItem] = field(default_factory=list)
    layout: StagingLayout | None = None
    lease: Lease | None = None

    @property
    def leases(self) -> set[Lease]:
        if self.lease is not None:
            return {self.lease}
        return {record.lease for record in self.tensors if record.lease is not None}


def resolve(items: Iterable[WriteItem], planner: SavePlanner | StagedItems) -> Sources:
    """Look up each item's data. Copies nothing; data on a device stays there until it is written.

    Raises:
        StateMismatchError: a tensor that a checkpoint cannot restore, or staged memory that belongs to another
            checkpoint by now.
        CheckpointSkippedError: the same, and this checkpoint was dropped for the other one.
    """
    found = Sources()
    leases = slots.leases()
    lease: Lease | None = None
    frame: item_format.ItemFrame | None = None
    like: Any = None
    tensor_of = planner.tensor if isinstance(planner, StagedItems) else partial(split.resolve, planner)
    plain = saved_values(planner)
    readers = planner.readers if isinstance(planner, StagedItems) else {}
    objects = getattr(planner, "state_dict", {})
    repeated = planner.placed if isinstance(planner, StagedItems) and items is planner.items else None
    if repeated is not None and (placed := repeated.records()) is not None:
        items, found.tensors = repeated.repeated.objects, placed
        found.layout, found.lease = repeated.repeated.layout, repeated.lease
    for item in items:
        if item.type is WriteItemType.BYTE_IO:
            made = planner.resolve_data(item) if isinstance(planner, StagedItems) else resolve_object(planner, item)
            data = cast(Any, made).getbuffer()
            if item.index.fqn in objects:
                _warn_of_refusal(item.index.fqn, objects[item.index.fqn], data)
            found.objects.append(ShardRecord(0, data, item=item))
            continue
        tensor = plain.get(item.index.fqn)
        # A SHARD item, even of a plain tensor, is a part of a tensor looked up by name alone.
        if type(tensor) is not torch.Tensor or type(item) is not WriteItem or item.type is not WriteItemType.TENSOR:
            tensor = tensor_of(item)
        if type(tensor) is not torch.Tensor or tensor.requires_grad:
            tensor = tensor.detach()
        if not item_format.is_plain(tensor) or tensor.is_meta:
            refuse_tensor(item.index.fqn, tensor)
            found.others.append(item)
            continue
        dtype, shape = tensor.dtype, tensor.shape
        if frame is None or dtype is not like[0] or shape != like[1]:
            frame, like = item_format.frame(dtype, shape), (dtype, shape)
        fetch = readers.get(item.index)
        if fetch is None and not item_format.is_raw_on_host(tensor):
            fetch = _Gathered(tensor).fetch
        if fetch is not None and frame.size_bytes:
            found.tensors.append(ShardRecord(0, frame.head, frame, 0, tensor, fetch, item))
            continue
        address = tensor.data_ptr()
        if not address and frame.size_bytes:
            refuse_tensor(item.index.fqn, tensor)
        if leases and (lease is None or not lease.covers(address)):
            lease = next((lease for lease in leases if lease.covers(address)), None)
        if lease is not None and lease.storage and storage_address_of(tensor.untyped_storage()) != lease.storage:
            raise _reused_memory_error(item, lease)
        found.tensors.append(ShardRecord(0, frame.head, frame, address, tensor, None, item, lease))
    return found


def _reused_memory_error(item: WriteItem, lease: Lease) -> CheckpointError:
    if lease.replaced_other:
        return slots.slot_taken_error()
    return StateMismatchError(
        f"the staged copy of {item.index.fqn} is lost: its memory was given to a newer checkpoint",
        hint="Save a staged state dict once, before the next ones are staged",
        tensor=item.index.fqn,
    )


def plan_shards_of(
    sources: Sources, *, shard_bytes_max: int, chunk_size_bytes: int, one_file: bool = True
) -> list[tuple[list[ShardRecord], Image | None]]:
    """Assign every tensor and object a position in a shard. Return the records and the image of each shard.

    Staged tensors keep their order: the arena is the image of the complete files.
    """
    if not one_file:
        return [([record], None) for record in (*sources.tensors, *sources.objects)]
    tensors, layout = sources.tensors, sources.layout
    unit = image.unit_bytes(chunk_size_bytes)
    is_placed = layout is not None and layout.limits == (shard_bytes_max, unit)
    if layout is not None and is_placed:
        shards = [[tensors[index] for index, _ in shard] for shard in layout.shards]
    else:
        if any(record.lease is not None for record in tensors):
            tensors = sorted(tensors, key=lambda record: record.address if record.lease is not None else 1 << 64)
        shards = []
        for shard in image.assign_positions([one.frame for one in tensors], shard_bytes_max=shard_bytes_max, unit=unit):
            for index, offset in shard:
                tensors[index].offset = offset
            shards.append([tensors[index] for index, _ in shard])
    position = shards[-1][-1].end if shards else 0
    for record in sources.objects:
        if not shards or (position and position + record.total_bytes > shard_bytes_max):
            shards.append([])
            position = 0
        record.offset = round_up(position, item_format.ALIGNMENT_BYTES)
        shards[-1].append(record)
        position = record.end
    if layout is not None and is_placed and sources.lease is not None:
        images = [_image_at(sources.lease, *found) if found is not None else None for found in layout.images]
        if any(made is None for made, found in zip(images, layout.images, strict=True) if found is not None):
            images = []
    else:
        images = _images_in_place(shards)
    return list(zip_longest(shards, images))  # objects may have their own files


def _images_in_place(shards: Sequence[Sequence[ShardRecord]]) -> list[Image | None]:
    """Return the staged images to be written in place: all of them, or none.

    Heads, tails and padding are filled in between the data. So an image may hold no tensor of another shard or save.
    """
    written = Counter(record.lease for shard in shards for record in shard if record.lease is not None)
    if any(lease.tensors not in (None, count) for lease, count in written.items()):
        return []
    images = [_image(shard) for shard in shards]
    for shard, image_ in zip(shards, images, strict=True):
        if image_ is None and any(record.lease is not None for record in shard):
            return []
    return images


def _image(records: Sequence[ShardRecord]) -> Image | None:
    staged = [record for record in records if record.lease is not None]
    if not staged:
        return None
    lease = staged[0].lease
    address = staged[0].address - staged[0].data_offset
    for record in staged:
        if record.lease is not lease or (record.size_bytes and record.address - record.data_offset != address):
            return None
    return _image_at(lease, address - lease.memory.address, round_up(staged[-1].end))


def _image_at(lease: Lease, start: int, size_bytes: int) -> Image | None:
    """Return None if the image at byte ``start`` cannot be written in place.

    From 4 KiB pages a direct write takes longer than a copy into a slot of huge pages and a write.
    """
    address = lease.memory.address + start
    if not lease.memory.huge or address % DISK_BLOCK_BYTES:  # required by O_DIRECT
        return None
    if not lease.memory.address <= address or address + size_bytes > lease.memory.address + lease.size_bytes:
        return None
    ahead = lease.ahead.file(address, size_bytes) if lease.ahead is not None else None
    return Image(lease.memory, address, size_bytes, ahead)


class _Gathered:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._flat: torch.Tensor | None = None
        self._left = tensor.numel() * tensor.itemsize
        self._lock = threading.Lock()
        # The workers use other streams: the pending work on the tensor must finish first.
        self._written: Any = None
        if tensor.is_cuda:
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record(torch.cuda.current_stream(tensor.device))

    def fetch(self, target: int, start: int, count: int) -> None:
        """Meanwhile one contiguous copy of the tensor exists, on its own device."""
        with self._lock:
            if self._flat is None:
                if self._written is not None:
                    self._written.synchronize()
                self._flat = self._tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            flat = self._flat
        memory = (ctypes.c_char * count).from_address(target)
        torch.frombuffer(memory, dtype=torch.uint8).copy_(flat[start : start + count])
        with self._lock:
            self._left -= count
            if not self._left:
                self._flat = None


_PLAIN_TYPES = frozenset({type(None), bool, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})
_INTEGER_BITS_MAX = 8 * 255 - 1

_warned: set[str] = set()


def _warn_of_refusal(name: str, value: Any, data: bytes | memoryview) -> None:
    if name in _warned or _is_plain(value):
        return
    _warned.add(name)
    try:
        Objects().inert(bytes(data), name)
    except UnsafeCheckpointError as error:
        log.warning("%s is saved, but a restore will refuse it: %s", name, error)
    except Exception as error:
        log.debug("%s cannot be tried: %s", name, error)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is int:
        return bool(value.bit_length() <= _INTEGER_BITS_MAX)
    if kind is dict:
        return _is_plain([*value, *value.values()])
    if kind in (list, tuple, set):
        return all(type(item) in _PLAIN_TYPES or _is_plain(item) for item in value)
    return kind in _PLAIN_TYPES or isinstance(value, torch.Tensor)
