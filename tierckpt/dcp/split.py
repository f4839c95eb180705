"""Splits replicated tensors between their ranks: each rank writes some rows, and no row is written twice.

A part is an ordinary DCP chunk, so stock readers see a tensor saved in pieces. Pure functions over plans; no I/O, no
collectives.

    every rank      prepare_local_plan    keep_items: this rank's items, before the planner's dedup
    coordinator     prepare_global_plan   balance_replicated: assigns the parts
    every rank      write_data            keep_subclasses_whole, resolve: the tensor of an item or of a part
    coordinator     finish                amend: the metadata names the written parts
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem

from ..errors import CheckpointError
from ..torch_internals import cached_global_plans
from .items.item_format import QUANTIZED, is_plain

MiB = 1 << 20
PART_BYTES_MIN = 4 * MiB

ITEM_BYTES = 4096
"""Fixed cost of an item, for balancing."""

ROWS_PER_SHARE = 64

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Held:
    """``SavePlan.storage_data`` for the coordinator: a rank's items before the planner's dedup."""

    items: tuple[WriteItem, ...]


@dataclass(frozen=True)
class Part:
    fqn: str
    whole: Box
    box: Box


@dataclass(frozen=True, kw_only=True)
class PartItem(WriteItem):
    """Some rows of an item that several ranks hold; contiguous, because ``dim`` is its first dimension above 1.

    The planner knows only ``whole``: use ``resolve``.
    """

    whole: WriteItem
    dim: int
    start: int
    length: int

    @property
    def part(self) -> Part:
        return Part(self.index.fqn, _box(self.whole), _box(self))


def keep_items(plan: SavePlan) -> SavePlan:
    """Keep the items also in ``storage_data``, where dedup leaves them alone. No copy."""
    return dataclasses.replace(plan, storage_data=Held(tuple(plan.items)))


def balance_replicated(plans: list[SavePlan], part_bytes_min: int = PART_BYTES_MIN) -> list[SavePlan]:
    """Call ``spread_items``, except for plans of DCP's own cache, which may replace those of some ranks only."""
    held = [plan.storage_data.items if isinstance(plan.storage_data, Held) else () for plan in plans]
    ours = set(map(id, plans))
    if not any(id(plan) in ours for cached in cached_global_plans().values() for plan in cached):
        plans = spread_items(plans, held, part_bytes_min)
    return [
        dataclasses.replace(plan, storage_data=None) if isinstance(plan.storage_data, Held) else plan for plan in plans
    ]


def spread_items(
    plans: list[SavePlan], held: Sequence[Iterable[WriteItem]], part_bytes_min: int = PART_BYTES_MIN
) -> list[SavePlan]:
    """Level the bytes of ``plans`` over the ranks that hold them; every item is still written exactly once.

    Guarantee: a rank gets only parts of tensors that it holds, with the chunk and dtype of the planner's item. Items of
    other planners, in several plans or of a single rank are not moved. Equal plans give equal results, in any process.
    Two shares differ by at most one row per rank, or by ``part_bytes_min`` if they are smaller than that. Tensors below
    ``part_bytes_min`` and objects stay whole. ``plans`` and their ``storage_data`` are not modified.
    """
    if len(plans) < 2 or not all(plan.usable for plan in plans):
        return plans
    groups = _groups(plans, held)
    if not groups:
        return plans
    loads = [0] * len(plans)
    given: list[list[WriteItem]] = [[] for _ in plans]
    shared = {id(item) for items in groups.values() for item in items}
    for rank, plan in enumerate(plans):
        given[rank] = [item for item in plan.items if id(item) not in shared]
        loads[rank] = sum(map(_weight_of, given[rank]))
    # The fewest ranks first: then the balance within each group is optimal, if groups nest.
    for ranks, items in sorted(groups.items(), key=lambda group: len(group[0])):
        _assign_items(items, ranks, loads, given, max(part_bytes_min, 1))
    return [dataclasses.replace(plan, items=items) for plan, items in zip(plans, given, strict=True)]


def resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """Return the tensor of ``item``; for a part, its rows. No copy."""
    if isinstance(item, PartItem):
        whole = cast(torch.Tensor, planner.resolve_data(item.whole))
        return whole.narrow(item.dim, item.start, item.length)
    return cast(torch.Tensor, planner.resolve_data(item))


def keep_subclasses_whole(items: Sequence[WriteItem], planner: SavePlanner) -> Sequence[WriteItem]:
    """Put a whole tensor subclass in place of its first part, and drop the others: few of them can be cut."""
    if not any(isinstance(item, PartItem) for item in items):
        return items
    written = []
    for item in items:
        if not isinstance(item, PartItem) or is_plain(cast(torch.Tensor, planner.resolve_data(item.whole)).detach()):
            written.append(item)
        elif not item.start:
            written.append(item.whole)
    return written


def amend(metadata: Metadata, parts: Iterable[Part]) -> None:
    """Put the chunks of the written ``parts`` in place of those that they cover. Idempotent, and in any order.

    Entries are replaced, not modified. Raises CheckpointError if parts leave a gap or overlap; nothing changes then.
    """
    tiles: dict[str, dict[Box, set[Box]]] = defaultdict(lambda: defaultdict(set))
    for part in parts:
        tiles[part.fqn][part.whole].add(part.box)
    amended = {fqn: _merge_parts(metadata, fqn, wholes) for fqn, wholes in tiles.items()}
    metadata.state_dict_metadata.update(amended)


# --- the ranks of each item -------------------------------------------------------------------------------------------


def _groups(plans: list[SavePlan], held: Sequence[Iterable[WriteItem]]) -> dict[tuple[int, ...], list[WriteItem]]:
    """Return the items that several ranks hold, by these ranks, without those that several plans write."""
    # Plain lists and integers, which the garbage collector does not scan.
    items: list[WriteItem] = []
    holders: list[int] = []
    owners: list[int] = []
    places: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            place = places.setdefault(item.index, len(items))
            again = place < len(items)
            if not again:
                items.append(item)
                holders.append(0)
                owners.append(rank)
            if again or isinstance(item, PartItem):
                owners[place] = len(plans)
    for rank, of_rank in enumerate(held):
        for item in of_rank:
            known = places.get(item.index)
            if known is not None and _is_same_data(items[known], item):
                holders[known] |= 1 << rank
    groups: dict[int, list[WriteItem]] = defaultdict(list)
    for item, ranks, owner in zip(items, holders, owners, strict=True):
        if ranks.bit_count() > 1 and ranks >> owner & 1:
            groups[ranks].append(item)
    return {
        tuple(rank for rank in range(ranks.bit_length()) if ranks >> rank & 1): group for ranks, group in groups.items()
    }


def _is_same_data(item: WriteItem, other: WriteItem) -> bool:
    """The index is not enough: ranks may differ in dtype or size."""
    if item.type != other.type:
        return False
    data, others = item.tensor_data, other.tensor_data
    if data is None or others is None:
        return data is others
    return (
        data.chunk.sizes == others.chunk.sizes
        and data.properties.dtype == others.properties.dtype
        and data.size == others.size
    )


# --- assignment -------------------------------------------------------------------------------------------------------


@dataclass
class _Cut:
    item: WriteItem
    rows: int
    row_bytes: int
    dim: int

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes

    def rows_of(self, start: int, length: int) -> WriteItem:
        if length == self.rows:
            return self.item
        data = cast(TensorWriteData, self.item.tensor_data)
        offsets, sizes = list(data.chunk.offsets), list(data.chunk.sizes)
        offsets[self.dim] += start
        sizes[self.dim] = length
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        return PartItem(
            index=MetadataIndex(self.item.index.fqn, chunk.offsets),
            type=self.item.type,
            tensor_data=TensorWriteData(chunk=chunk, properties=data.properties, size=data.size),
            whole=self.item,
            dim=self.dim,
            start=start,
            length=length,
        )


def _assign_items(
    items: list[WriteItem], ranks: tuple[int, ...], loads: list[int], given: list[list[WriteItem]], part_bytes_min: int
) -> None:
    cuts = [_cut_of(item, part_bytes_min) for item in items]
    share_bytes = sum(cut.size_bytes for cut in cuts) // len(ranks)
    coarse_bytes = max(part_bytes_min, share_bytes // ROWS_PER_SHARE)
    fine = [cut for cut in cuts if cut.rows > 1 and cut.row_bytes <= coarse_bytes]
    coarse = [cut for cut in cuts if cut.rows == 1 or cut.row_bytes > coarse_bytes]
    coarse.sort(key=lambda cut: -cut.row_bytes)
    _assign_rows(coarse, ranks, loads, given)
    _cut_evenly(fine, ranks, loads, given, part_bytes_min)


def _assign_rows(cuts: list[_Cut], ranks: tuple[int, ...], loads: list[int], given: list[list[WriteItem]]) -> None:
    heap = [(loads[rank], rank) for rank in ranks]
    heapq.heapify(heap)
    for cut in cuts:
        rows: dict[int, int] = defaultdict(int)
        for _ in range(cut.rows):
            load, rank = heap[0]
            rows[rank] += 1
            loads[rank] = load + cut.row_bytes
            heapq.heapreplace(heap, (loads[rank], rank))
        start = 0
        for rank in sorted(rows):
            given[rank].append(cut.rows_of(start, rows[rank]))
            start += rows[rank]


def _cut_evenly(
    cuts: list[_Cut], ranks: tuple[int, ...], loads: list[int], given: list[list[WriteItem]], part_bytes_min: int
) -> None:
    """Lay the items end to end and cut at the row nearest to the end of each share (McNaughton, 1959).

    A border is computed from the start, so rounding does not add up.
    """
    shares = _share_ends(sum(cut.size_bytes for cut in cuts), ranks, loads, part_bytes_min)
    taker, position = 0, 0
    for cut in cuts:
        start = 0
        while start < cut.rows:
            rank, border = shares[taker]
            nearest = (2 * (border - position) + cut.row_bytes) // (2 * cut.row_bytes)
            end = min(max(nearest, start), cut.rows)
            if taker == len(shares) - 1:
                end = cut.rows
            if end > start:
                given[rank].append(cut.rows_of(start, end - start))
                loads[rank] += (end - start) * cut.row_bytes
            if end < cut.rows:
                taker += 1
            start = end
        position += cut.size_bytes


def _share_ends(
    total_bytes: int, ranks: tuple[int, ...], loads: list[int], part_bytes_min: int
) -> list[tuple[int, int]]:
    """Return the ranks with a share, in order, and the end of each share of ``total_bytes``.

    The least loaded ranks are filled to one level. Another rank joins while its share is worth a part.
    """
    order = sorted(ranks, key=lambda rank: (loads[rank], rank))
    count, filled = 1, total_bytes + loads[order[0]]
    while count < len(order):
        load = loads[order[count]]
        if (filled + load) // (count + 1) - load < part_bytes_min:
            break
        count, filled = count + 1, filled + load
    shares, below = [], 0
    for number, rank in enumerate(sorted(order[:count]), start=1):
        below += loads[rank]
        shares.append((rank, filled * number // count - below))
    return shares


def _cut_of(item: WriteItem, part_bytes_min: int) -> _Cut:
    """``part_bytes_min``: at least 1, so a tensor without data is not cut."""
    data = item.tensor_data
    if data is not None and size_bytes_of(data) >= part_bytes_min and _can_narrow(data):
        for dim, rows in enumerate(data.chunk.sizes):
            if rows > 1:
                return _Cut(item, rows, size_bytes_of(data) // rows, dim)
    return _Cut(item, 1, _weight_of(item), 0)


def _can_narrow(data: TensorWriteData) -> bool:
    return data.properties.layout == torch.strided and data.properties.dtype not in QUANTIZED


def _weight_of(item: WriteItem) -> int:
    """An object's size is unknown, and at least the fixed cost."""
    return ITEM_BYTES if item.tensor_data is None else max(size_bytes_of(item.tensor_data), ITEM_BYTES)


def size_bytes_of(data: TensorWriteData) -> int:
    """DCP's ``tensor_storage_size`` counts the global tensor for every shard."""
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


# --- metadata -----------------------------------------------------------------------------------------------------


def _merge_parts(metadata: Metadata, fqn: str, wholes: dict[Box, set[Box]]) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata.get(fqn)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(f"parts of {fqn} were written, but the metadata has no such tensor", tensor=fqn)
    for whole, boxes in wholes.items():
        if not _tiles(boxes, whole):
            raise CheckpointError(
                f"the parts of {fqn} that were written do not make up its chunk at {whole[0]}",
                hint="The ranks have used plans of different saves; this one was not committed",
                tensor=fqn,
            )
    fresh = set(itertools.chain.from_iterable(wholes.values()))
    kept = {
        box
        for box in ((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
        if box not in wholes and box not in fresh and not any(_is_inside(box, whole) for whole in wholes)
    }
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in sorted(kept | fresh)]
    return dataclasses.replace(entry, chunks=chunks)


def _tiles(boxes: set[Box], whole: Box) -> bool:
    """Return True if ``boxes`` are adjacent along one dimension and fill ``whole``."""
    dim = next((dim for dim, size in enumerate(whole[1]) if any(sizes[dim] != size for _, sizes in boxes)), None)
    if dim is None:
        return boxes == {whole}
    expected = whole[0][dim]
    for offsets, sizes in sorted(boxes):
        across = [(offsets[i], sizes[i]) == (whole[0][i], whole[1][i]) for i in range(len(sizes)) if i != dim]
        if offsets[dim] != expected or not all(across):
            return False
        expected += sizes[dim]
    return expected == whole[0][dim] + whole[1][dim]


def _is_inside(box: Box, whole: Box) -> bool:
    return all(
        start <= offset and offset + size <= start + length
        for offset, size, start, length in zip(*box, *whole, strict=True)
    )


def _box(item: WriteItem) -> Box:
    chunk = cast(TensorWriteData, item.tensor_data).chunk
    return tuple(chunk.offsets), tuple(chunk.sizes)
