"""The last hop over the job's own process group: what every rank wants is read by one of them and broadcast.

Only where asked for (``share_reads_over_group``): the group's links are often faster than storage and than the other
network of the nodes, but a collective needs every rank, and one that has ended holds up the others for as long as the
timeout of the group says. What not every rank wants is read by each for itself. The group is the default one; a load
by another is not divided.

Planning carries the question and the answer, as it does for ranks of one node (``dcp/read_sharing.py``): each rank
says which
files its node has (``Offer``), the coordinator gives each item that all want to one rank, one that has the file
where there is any, in runs of the file so that reads stay long (``divide``). Each rank then reads its own part, and all
of them send and receive in one order (``exchange``).

Invariants (tests cite them):
    B1  Before the first broadcast all ranks agree that every part was read and that their targets are alike. If not,
        nobody broadcasts anything: each rank reads for itself what it lacks, and an error is that of the rank that had
        it.
    B2  What is broadcast has passed its digests on the rank that read it, and takes no way but the group's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ..telemetry import logger

log = logger("restore")

BUCKET_BYTES = 32 << 20
"""Small tensors are sent together, up to this: more than that is as fast by itself."""


@dataclass(frozen=True)
class Offer:
    """Which of the files that a rank wants are on its node."""

    files: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Shares:
    """Who reads which of the items that all ranks want, in the order in which they are sent."""

    me: int
    of_rank: Sequence[Sequence[ReadItem]] = field(default_factory=list)

    @property
    def others(self) -> list[ReadItem]:
        return [item for rank, items in enumerate(self.of_rank) if rank != self.me for item in items]


def divide(plans: list[LoadPlan], info_of: Callable[[ReadItem], _StorageInfo], ranks: int) -> list[LoadPlan]:
    """Give each tensor item that is in every plan to one rank. Returns the plans with what each rank is to read.

    Plans that are not those of all ``ranks``, or that carry no ``Offer`` (a planner may drop what it does not know),
    come back as they are.
    """
    offers = [plan.storage_data for plan in plans if isinstance(plan.storage_data, Offer)]
    if not len(plans) == len(offers) == ranks:
        return plans
    common = set.intersection(*(set(map(_key, plan.items)) for plan in plans))
    wanted = [item for item in plans[0].items if _key(item) in common and item.type == LoadItemType.TENSOR]
    of_rank = _assigned(wanted, offers, info_of)
    shared = {_key(item) for item in wanted}
    return [
        replace(
            plan,
            items=[item for item in plan.items if _key(item) not in shared] + of_rank[rank],
            storage_data=Shares(rank, of_rank),
        )
        for rank, plan in enumerate(plans)
    ]


def _key(item: ReadItem) -> tuple[Any, ...]:
    """Equal for items that read the same and put it in the same place."""
    stored, wanted = item.storage_index, item.dest_index
    return (
        *(item.type, stored.fqn, stored.offset, wanted.fqn, wanted.offset),
        *(tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths)),
    )


def _assigned(
    items: Sequence[ReadItem], offers: Sequence[Offer], info_of: Callable[[ReadItem], _StorageInfo]
) -> list[list[ReadItem]]:
    """The items of each rank: of each set of ranks that have a file, every one takes runs of about as many bytes."""
    groups: dict[tuple[int, ...], list[tuple[str, int, int, ReadItem]]] = {}
    for item in items:
        info = info_of(item)
        having = tuple(rank for rank, offer in enumerate(offers) if info.relative_path in offer.files)
        group = groups.setdefault(having or tuple(range(len(offers))), [])
        group.append((info.relative_path, info.offset, info.length, item))
    of_rank: list[list[ReadItem]] = [[] for _ in offers]
    for ranks, group in groups.items():
        total = sum(length for _, _, length, _ in group) or 1
        done = 0
        for _, _, length, item in sorted(group, key=lambda entry: entry[:2]):
            of_rank[ranks[min(done * len(ranks) // total, len(ranks) - 1)]].append(item)
            done += length
    return of_rank


def exchange(
    shares: Shares,
    planner: LoadPlanner,
    failure: BaseException | None,
) -> list[ReadItem]:
    """Send what this rank has read, and receive what others have. Every rank calls it, whatever happened.

    Returns the items this rank still lacks, for it to read by itself (B1): none when all went well.

    Args:
        failure: what kept this rank from reading its part; the others are told.
    """
    targets = _targets(shares, planner) if failure is None else {}
    mine = (
        None if failure is not None else [_shape_of(targets[_key(item)]) for items in shares.of_rank for item in items]
    )
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, mine)
    if any(one is None or one != seen[0] for one in seen):
        log.warning("nothing is broadcast: some rank could not read its part; each reads for itself what it lacks")
        return shares.others
    device = _device_of_group()
    for rank, items in enumerate(shares.of_rank):
        for bucket in _buckets(items, targets):
            _broadcast(bucket, rank, device, is_mine=rank == shares.me)
            if rank != shares.me:
                for item, target in bucket:
                    planner.commit_tensor(item, target)
    return []


def _targets(shares: Shares, planner: LoadPlanner) -> Mapping[tuple[Any, ...], torch.Tensor]:
    return {_key(item): planner.resolve_tensor(item).detach() for items in shares.of_rank for item in items}


def _shape_of(target: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return str(target.dtype), tuple(target.shape)


def _device_of_group() -> torch.device | None:
    """Where the group's collectives want their tensors; None: on the host or on a device, as they come."""
    kinds = {device.type for device in dist.distributed_c10d._get_default_group()._device_types}
    if "cpu" in kinds:
        return None if len(kinds) > 1 else torch.device("cpu")
    kind = next(iter(kinds))
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _buckets(
    items: Sequence[ReadItem], targets: Mapping[tuple[Any, ...], torch.Tensor]
) -> Iterator[list[tuple[ReadItem, torch.Tensor]]]:
    """Runs of items of one device that are sent together; the same on every rank, whose targets are alike."""
    bucket: list[tuple[ReadItem, torch.Tensor]] = []
    size_bytes = 0
    for item in items:
        target = targets[_key(item)]
        if bucket and size_bytes + target.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size_bytes = [], 0
        if target.nbytes:
            bucket.append((item, target))
            size_bytes += target.nbytes
    if bucket:
        yield bucket


def _broadcast(
    bucket: Sequence[tuple[ReadItem, torch.Tensor]],
    source: int,
    device: torch.device | None,
    *,
    is_mine: bool,
) -> None:
    """One tensor that lies in one piece where the group wants it is sent from and to where it is; others are packed."""
    first = bucket[0][1]
    place = device or first.device
    if len(bucket) == 1 and first.is_contiguous() and first.device == place and not (first.is_conj() or first.is_neg()):
        dist.broadcast(_bytes(first), source)
        return
    packed = torch.empty(sum(target.nbytes for _, target in bucket), dtype=torch.uint8, device=place)
    if is_mine:
        torch.cat([_bytes(target).to(place) for _, target in bucket], out=packed)
    dist.broadcast(packed, source)
    start = 0
    for _, target in bucket if not is_mine else ():
        part = packed[start : start + target.nbytes]
        # A copy, aligned for its dtype: in the bucket it lies after whatever came before it.
        target.copy_(part.clone().view(target.dtype).view(target.shape))
        start += target.nbytes


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
