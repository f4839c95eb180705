"""The one copy of a save into staging memory: its layout, and the shortcut for a save with the previous layout."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from .. import torch_internals
from ..arena.slots import Lease
from ..config import Settings
from ..disk.file_io import copy_small
from ..errors import OperationTimeoutError
from ..quantities import round_up
from ..resources import start_if_possible, start_thread
from ..save import write_ahead
from ..save.shard_plan import ShardRecord
from ..save.write_ahead import WriteAhead
from .items import item_format, shard_layout
from .items.item_format import ItemFrame, Texts

Pair = tuple[torch.Tensor, torch.Tensor]

MOVE_BYTES_MIN = 4 << 20
"""Each call may wait for the interpreter lock, so it copies at least this."""
MOVE_BYTES_MAX = 32 << 20


class Copies:
    """Pending copies: ``targets[i]`` from ``sources[i]``, same shape and dtype.

    The device's copy stream with the lower ``priority`` goes first.
    """

    def __init__(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        ahead: WriteAhead | None = None,
        *,
        priority: int = 0,
    ) -> None:
        self._priority = priority
        self._pairs: list[Pair] = list(zip(targets, sources, strict=True))
        self._ahead = ahead
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._events: list[Any] = []
        self._on_host = False

    def run(self) -> None:
        """Make all copies with all of torch's threads."""
        self.run_now(lambda tensor: True)
        self._done.set()
        if self._ahead is not None:
            self._ahead.start()

    def run_now(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        """Make the copies with a ``wanted`` source, complete on return; the others stay pending."""
        now = [pair for pair in self._pairs if wanted(pair[1])]
        self._pairs = [pair for pair in self._pairs if not wanted(pair[1])] if len(now) < len(self._pairs) else []
        on_device = [pair for pair in now if pair[1].is_cuda]
        events = _start_on_devices(on_device, self._priority)
        copy_tensors([pair for pair in now if not pair[1].is_cuda] if on_device else now)
        for event in events:
            event.synchronize()

    def run_in_background(self, done: Callable[[BaseException | None], None]) -> None:
        """Start the remaining copies; call ``done`` from another thread when they are complete or failed.

        Until then the sources must not change; ``wait`` is the fence.
        """
        on_device = [pair for pair in self._pairs if pair[1].is_cuda]
        on_host = [pair for pair in self._pairs if not pair[1].is_cuda]
        self._pairs = []
        self._on_host = bool(on_host)
        self._events = _start_on_devices(on_device, self._priority)

        def work() -> None:
            try:
                copy_in_background(on_host)
                for event in self._events:
                    event.synchronize()
            except BaseException as error:
                self._error = error
            self._done.set()
            done(self._error)

        start_thread(threading.Thread(target=work, name="tierckpt-stage", daemon=True))

    def wait(self, timeout_seconds: float) -> None:
        """Wait until the sources may change. Raises the error of a failed copy, which is then lost.

        For copies on a device, its current stream waits instead of this thread.
        """
        if self._events and not self._on_host:
            for event in self._events:
                torch.cuda.current_stream(event.device).wait_event(event)
            return
        try:
            self._done.wait(timeout_seconds)
        finally:
            if not self._done.is_set():
                # The caller may now change the sources: the copy must not become a checkpoint.
                self._error = OperationTimeoutError(
                    "the copies to staging memory have not ended",
                    hint="Look for a hung device; the checkpoint that was being staged is lost",
                    waited_seconds=timeout_seconds,
                )
        if self._error is not None:
            raise self._error


def copy_tensors(pairs: Sequence[Pair]) -> None:
    """Copy large tensors by memmove, which takes less CPU time, all others in one call of torch."""
    large: list[Pair] = []
    rest: list[Pair] = []
    for pair in pairs:
        (large if pair[1].nbytes >= MOVE_BYTES_MIN and _is_bytes(pair[1]) else rest).append(pair)
    if large:
        move_all(large, torch.get_num_threads())
    if rest:
        with torch.no_grad():
            torch_internals.foreach_copy([target for target, _ in rest], [source for _, source in rest])


def move_all(pairs: Sequence[Pair], count: int) -> None:
    pieces = deque(
        (target.data_ptr() + at, source.data_ptr() + at, min(MOVE_BYTES_MAX, source.nbytes - at))
        for target, source in pairs
        for at in range(0, source.nbytes, MOVE_BYTES_MAX)
    )

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                ctypes.memmove(*pieces.popleft())

    threads = [threading.Thread(target=work, name="tierckpt-stage") for _ in range(min(count, len(pieces)) - 1)]
    try:
        all(start_if_possible(thread) for thread in threads)  # the started ones copy all
        work()
    finally:  # after an interrupt, too: returned memory must not be written
        pieces.clear()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _is_bytes(source: torch.Tensor) -> bool:
    """A freed storage has no address."""
    is_plain = source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg()
    return is_plain and source.data_ptr() != 0


def copy_in_background(pairs: Sequence[Pair]) -> None:
    """Copy on one thread: torch's pool belongs to the training step."""
    for target, source in pairs:
        if _is_bytes(source):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            with torch.no_grad():
                target.copy_(source)


def _start_on_devices(pairs: Sequence[Pair], priority: int) -> list[Any]:
    by_device: dict[torch.device, list[Pair]] = {}
    for pair in pairs:
        by_device.setdefault(pair[1].device, []).append(pair)
    return [_start_on_device(device, group, priority) for device, group in by_device.items()]


def _start_on_device(device: torch.device, pairs: Sequence[Pair], priority: int) -> Any:
    """Queue copies on their own stream, after the current stream's pending work."""
    stream = _stream_of(device, priority)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.no_grad():
        targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
        torch_internals.foreach_copy(targets, sources, non_blocking=True)
        for _, source in pairs:
            source.record_stream(stream)  # freed while the copy runs, it must not be reused
        return stream.record_event()


streams: dict[tuple[torch.device, int], Any] = {}


def _stream_of(device: torch.device, priority: int) -> Any:
    if (device, priority) not in streams:
        streams[device, priority] = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    return streams[device, priority]


SMALL_BYTES_MAX = 64 << 10
"""Smaller tensors are copied by address: torch needs a view of each target, which takes 15 times as long."""

Facts = tuple[torch.dtype, torch.Size]


@dataclass(frozen=True)
class StagingLayout:
    """The position of each tensor in staging memory, as in the files. Holds no tensor."""

    facts: list[Facts]
    frames: list[ItemFrame]
    shards: list[list[shard_layout.Placed]]
    offsets: list[int]
    size_bytes: int
    places: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int]]
    """Dtype, shape, strides, and offset in elements."""
    key: int
    """Equal layouts have equal keys."""
    limits: tuple[int, int]

    @classmethod
    def of(cls, facts: list[Facts], settings: Settings) -> StagingLayout:
        frames = [item_format.frame(dtype, tuple(shape)) for dtype, shape in facts]
        size_max, unit = settings.shard_size_bytes_max, shard_layout.unit_bytes(settings.chunk_size_bytes)
        shards = shard_layout.assign_positions(frames, shard_bytes_max=size_max, unit=unit)
        offsets, size_bytes = _in_arena(frames, shards)
        places = [
            (dtype, shape, item_format.contiguous_strides(shape), offset // dtype.itemsize)
            for (dtype, shape), offset in zip(facts, offsets, strict=True)
        ]
        return cls(facts, frames, shards, offsets, size_bytes, places, hash((size_bytes, *offsets)), (size_max, unit))

    @cached_property
    def file_offsets(self) -> list[int]:
        found = [0] * len(self.frames)
        for shard in self.shards:
            for index, offset in shard:
                found[index] = offset
        return found

    @cached_property
    def tensors_with_data(self) -> int:
        return sum(frame.size_bytes > 0 for frame in self.frames)

    @cached_property
    def images(self) -> list[tuple[int, int] | None]:
        """Start and size of each image; None for a file without data."""
        found: list[tuple[int, int] | None] = []
        for shard in self.shards:
            staged = [(index, offset) for index, offset in shard if self.frames[index].size_bytes]
            if not staged:
                found.append(None)
                continue
            index, offset = staged[0]
            last, end = staged[-1]
            start = self.offsets[index] - offset - len(self.frames[index].head)
            found.append((start, round_up(end + self.frames[last].total_bytes)))
        return found

    def views(self, base: torch.Tensor, wanted: Sequence[int] | None = None) -> list[torch.Tensor]:
        whole = self.size_bytes
        typed = {
            dtype: base[: whole - whole % dtype.itemsize].view(dtype) for dtype in {dtype for dtype, _ in self.facts}
        }
        places = self.places if wanted is None else [self.places[index] for index in wanted]
        return [typed[dtype].as_strided(shape, strides, offset) for dtype, shape, strides, offset in places]

    def spans(self, address: int) -> list[write_ahead.Span]:
        """Return the memory of each future file and of its data."""
        spans = []
        for shard, image in zip(self.shards, self.images, strict=True):
            if image is not None:
                staged = [(self.frames[index], offset) for index, offset in shard if self.frames[index].size_bytes]
                heads = [(offset + len(frame.head), frame.size_bytes) for frame, offset in staged]
                data = [(start, start + length) for start, length in heads]
                spans.append(write_ahead.Span(address + image[0], image[1], data))
        return spans


def _in_arena(frames: Sequence[ItemFrame], shards: Sequence[Sequence[shard_layout.Placed]]) -> tuple[list[int], int]:
    offsets = [0] * len(frames)
    start = 0
    for shard in shards:
        end = start
        for index, offset in shard:
            offsets[index] = start + offset + len(frames[index].head)
            end = start + offset + frames[index].total_bytes
        start = round_up(end)
    return offsets, start


class RepeatedSave:
    """The planner has compared types, shapes and dtypes of plain tensors in host memory: only the addresses change."""

    def __init__(
        self, items: Sequence[WriteItem], tensors: Sequence[WriteItem], known: Mapping[str, Any], layout: StagingLayout
    ) -> None:
        self.items, self.layout = items, layout
        self.objects = [item for item in items if item.type is WriteItemType.BYTE_IO]
        self.texts: Texts = {}
        self.of_tensors = tensors
        numbers = {name: number for number, name in enumerate(
            name for name, value in known.items() if isinstance(value, torch.Tensor))}  # fmt: skip
        self._names = [item.index.fqn for item in tensors]
        self._order = [numbers[name] for name in self._names]
        sizes = [frame.size_bytes for frame in layout.frames]
        self._small = [number for number, size in enumerate(sizes) if 0 < size <= SMALL_BYTES_MAX]
        self._large = [number for number, size in enumerate(sizes) if size > SMALL_BYTES_MAX]
        self._complex = [number for number, (dtype, _) in enumerate(layout.facts) if dtype.is_complex]
        self._offsets = [layout.offsets[number] for number in self._small]
        self._sizes = [sizes[number] for number in self._small]

    @classmethod
    def of(
        cls,
        items: Sequence[WriteItem],
        found: Sequence[tuple[WriteItem, torch.Tensor]],
        known: Mapping[str, Any],
        layout: StagingLayout,
    ) -> RepeatedSave | None:
        """``found``: the tensors of ``items``, in the order of ``layout``. ``known``: the planner's state dict."""
        is_simple = all(
            type(item) is WriteItem and item.type is WriteItemType.TENSOR and known.get(item.index.fqn) is tensor
            for item, tensor in found
        )
        if not layout.size_bytes or not is_simple or not all(item_format.is_plain(tensor) for _, tensor in found):
            return None
        return cls(items, [item for item, _ in found], known, layout)

    def find(self, known: Mapping[str, Any], addresses: list[int] | None) -> list[int] | None:
        """Return the tensors' addresses; None if unknown, conjugated, or their storage was freed.

        ``addresses``: of the planner's tensors, in its order.
        """
        if addresses is None or any(known[self._names[number]].is_conj() for number in self._complex):
            return None
        ordered = list(map(addresses.__getitem__, self._order))
        is_freed = 0 in ordered and any(not ordered[number] for number in chain(self._small, self._large))
        return None if is_freed else ordered

    def copy_small(self, known: Mapping[str, Any], addresses: Sequence[int], base: torch.Tensor) -> list[Pair]:
        """Copy the small tensors into ``base``. Return the other pairs."""
        sources = map(addresses.__getitem__, self._small)
        deque(map(copy_small, map(base.data_ptr().__add__, self._offsets), sources, self._sizes), maxlen=0)
        large = [known[self._names[number]] for number in self._large]
        return list(zip(self.layout.views(base, self._large), large, strict=True))


@dataclass(frozen=True)
class Placed:
    repeated: RepeatedSave
    base: torch.Tensor
    lease: Lease

    def data(self) -> dict[MetadataIndex, torch.Tensor]:
        indexes = [item.index for item in self.repeated.of_tensors]
        return dict(zip(indexes, self.repeated.layout.views(self.base), strict=True))

    def records(self) -> list[ShardRecord] | None:
        """Return None if ``base`` is another mapping of the memory."""
        start, layout, base, lease = self.lease.memory.address, self.repeated.layout, self.base, self.lease
        if base.data_ptr() != start:
            return None
        return [
            ShardRecord(at, frame.head, frame, start + offset, base, None, item, lease)
            if frame.size_bytes
            else ShardRecord(at, frame.head, frame, 0, base, None, item)
            for item, frame, offset, at in zip(
                self.repeated.of_tensors, layout.frames, layout.offsets, layout.file_offsets, strict=True
            )
        ]
