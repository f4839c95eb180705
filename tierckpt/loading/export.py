"""Export: a DCP checkpoint as safetensors files, which every inference engine opens.

A file is written in bounded memory, by overlapping windows: DCP reads the blocks of a window straight into the memory
that O_DIRECT writes. A *block* is a contiguous stretch of a tensor.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..arena.memory import Memory
from ..checkpoint.catalog import read_newest
from ..client import latest
from ..config import GiB, MiB, Settings
from ..dcp.reader import TierStorageReader
from ..disk import read_lease
from ..disk.durable import (
    check_names,
    durable_write,
    fsync_dir,
    make_dirs,
    matching,
    publish,
    remove_tree,
    require_room,
    translated,
)
from ..disk.file_io import DirectFile
from ..disk.file_lock import try_lock
from ..disk.processes import companion_path, is_abandoned, stem_of, temporary_of_this_process
from ..errors import ConfigError, IntegrityError, OperationTimeoutError, StateMismatchError, StoreError
from ..format.layout import local_dir, parse_uri
from ..format.uris import local_path
from ..quantities import DISK_BLOCK_BYTES, round_up
from ..read.parallel_read import batches
from ..resources import ThreadPool
from ..telemetry import ProgressCounter, ignore_progress, logger
from ..types import Json, ProgressListener
from .header import name_of, shape_in_file

WINDOW_BYTES = 128 * MiB
"""Includes conversion buffers. Two windows are in memory."""


@dataclass(frozen=True, slots=True)
class Item:
    key: str
    name: str
    stored: TensorStorageMetadata
    written: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.properties.dtype

    @property
    def size_bytes(self) -> int:
        return self.stored.size.numel() * self.written.itemsize


@dataclass(frozen=True, slots=True)
class TensorSlice:
    item: Item
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.item.written.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.size_bytes

    @property
    def memory_bytes(self) -> int:
        converted_bytes = self.numel * self.item.dtype.itemsize if self.item.dtype != self.item.written else 0
        return self.size_bytes + converted_bytes


def in_file_order(items: Sequence[Item]) -> list[Item]:
    """Align every tensor to its own dtype."""
    return sorted(items, key=lambda item: -item.written.itemsize)


def header_of(items: Sequence[Item]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for item in items:
        fields[item.name] = {
            "dtype": name_of(item.written),
            "shape": shape_in_file(item.written, tuple(item.stored.size)),
            "data_offsets": [position, position + item.size_bytes],
        }
        position += item.size_bytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(round_up(8 + len(text)) - 8)
    return len(text).to_bytes(8, "little") + text


def write_file(
    path: Path,
    items: Sequence[Item],
    reader: TierStorageReader,
    on_bytes: Callable[[int], None],
    window_bytes: int = WINDOW_BYTES,
) -> None:
    """Write the new file ``path``, durably. Raises OSError, and the reader's errors.

    Reads a part saved in columns by whole rows.
    """
    header = header_of(items)
    memory_bytes = min(window_bytes, sum(item.size_bytes for item in items)) + 2 * DISK_BLOCK_BYTES
    ordered = batches(blocks(items, len(header), window_bytes), lambda block: block.memory_bytes, window_bytes)
    with contextlib.closing(DirectFile()) as file, ThreadPool(1, "tierckpt-export") as writer:
        file.create(path)
        with contextlib.closing(Memory.allocate(len(header))) as memory:
            memory.view[: len(header)] = header
            file.write(memory.view[: len(header)], 0)
        writing: Future[None] | None = None
        end = len(header)
        memories: list[Memory] = []
        rest = b""
        for number, window in enumerate(ordered):
            if len(memories) < 2:
                memories.append(Memory.allocate(memory_bytes))
            view = memories[number % 2].view
            begin = window[0].start - len(rest)  # the last window's incomplete block
            view[: len(rest)] = rest
            _read(reader, window, view, begin)
            for block in window:
                on_bytes(block.size_bytes)
            end = window[-1].stop
            tail = (end - begin) % DISK_BLOCK_BYTES
            rest = bytes(view[end - begin - tail : end - begin])
            if writing is not None:
                writing.result()
            writing = writer.submit(file.write, view[: round_up(end - begin)], begin)
        if writing is not None:
            writing.result()
        file.cut(end, durable=True)


def blocks(items: Sequence[Item], start: int, size_bytes_max: int) -> Iterator[TensorSlice]:
    for item in items:
        unit = item.written.itemsize + (item.dtype.itemsize if item.dtype != item.written else 0)
        shape = tuple(item.stored.size)
        position = start
        for offsets, sizes in _stretches(shape, max(1, size_bytes_max // unit)):
            block = TensorSlice(item, offsets, sizes, position)
            position = block.stop
            if block.numel:
                yield block
        start += item.size_bytes


def _stretches(shape: tuple[int, ...], numel_max: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    row = math.prod(shape[1:])
    if math.prod(shape) <= numel_max:
        yield (0,) * len(shape), shape
    elif row <= numel_max:
        step = numel_max // row
        for first in range(0, shape[0], step):
            yield (first, *(0,) * (len(shape) - 1)), (min(step, shape[0] - first), *shape[1:])
    else:
        for index in range(shape[0]):
            for offsets, sizes in _stretches(shape[1:], numel_max):
                yield (index, *offsets), (1, *sizes)


def _read(reader: TierStorageReader, window: list[TensorSlice], view: memoryview, begin: int) -> None:
    placed: list[Tensor] = []
    targets: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    plan: list[ReadItem] = []
    for block in window:
        item = block.item
        raw = torch.frombuffer(view, dtype=item.written, count=block.numel, offset=block.start - begin)
        block_view = raw.view(block.sizes)
        target = block_view if item.dtype == item.written else torch.empty(block.sizes, dtype=item.dtype, device="cpu")
        placed.append(block_view)
        targets[item.key, block.offsets] = target
        plan += _reads(block)
    reader.read_data(LoadPlan(plan), _Into(targets))  # type: ignore[arg-type]
    for block, block_view in zip(window, placed, strict=True):
        target = targets.pop((block.item.key, block.offsets))
        if target is not block_view:
            block_view.copy_(target)


def _reads(block: TensorSlice) -> list[ReadItem]:
    chunk = ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.sizes))
    found = create_read_items_for_chunk_list(block.item.key, block.item.stored, [chunk])
    if sum(math.prod(item.lengths) for item in found) != block.numel:  # memory of an earlier window
        raise IntegrityError(
            f"the shards of {block.item.key} do not cover it, each element once", tensor=block.item.key
        )
    return found


class _Into:
    def __init__(self, targets: dict[tuple[str, tuple[int, ...]], Tensor]) -> None:
        self._targets = targets

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        target = self._targets[item.dest_index.fqn, tuple(item.dest_index.offset or ())]
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None: ...


log = logger("export")

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES_MAX = 5 * GiB
_SPARE_BYTES = 16 << 20

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class ExportResult:
    """``skipped`` counts entries that were not selected or are no tensors."""

    uri: str
    directory: Path
    files: tuple[str, ...]
    tensors: int
    size_bytes: int
    skipped: int

    def to_json(self) -> Json:
        return {**asdict(self), "directory": str(self.directory), "files": list(self.files)}


def export_safetensors(
    uri: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    shard_size_bytes_max: int = SHARD_BYTES_MAX,
    only: str = "",
    trust_pickle: bool = False,
    settings: Settings | None = None,
    listener: ProgressListener = ignore_progress,
    **overrides: object,
) -> ExportResult:
    """Write the tensors of a checkpoint to the directory ``to`` as safetensors, bit for bit. All of it, or nothing.

    Writes ``model.safetensors`` if everything fits in one file, else ``model-00001-of-0000N.safetensors`` and an index.
    Reads checkpoints of tierckpt and stock DCP, for any number of ranks.

    Args:
        uri: a checkpoint, or a run: then its newest usable checkpoint.
        to: a directory that does not exist or is empty.
        dtype: convert floating-point tensors to ``bf16``, ``fp16`` or ``fp32``.
        shard_size_bytes_max: maximum size of a file; a larger tensor gets its own.
        only: export the tensors under this name (``"model"``: ``model.*``), and drop it from their names.
        trust_pickle: see ``TierStorageReader``.

    Raises:
        ConfigError: ``to`` is not empty, an unknown dtype, or nothing below ``only``.
        StateMismatchError: a tensor of a dtype that safetensors cannot hold.
        CapacityError: no room; nothing was written.
        CheckpointNotFoundError, UncommittedCheckpointError, IntegrityError, StoreError: from the reader.
    Cost: memory for two windows of 128 MiB.
    """
    settings = Settings.load(settings, **overrides)
    target = local_path(to, "to")
    _check_target(target)

    def export_from(found: str) -> ExportResult:
        reader = TierStorageReader(found, trust_pickle=trust_pickle, settings=settings)
        metadata = reader.read_metadata()
        items = _select(metadata, only, _dtype(dtype), reader.path)
        shards = [in_file_order(shard) for shard in _cut(items, shard_size_bytes_max)]
        size_bytes = sum(item.size_bytes for item in items)
        progress = ProgressCounter(listener, f"export {reader.path}", size_bytes)
        progress.add(0)
        reader.set_up_storage_reader(metadata, True)
        # The reader releases the checkpoint after each window.
        lease = read_lease.reading(settings.local_root, local_dir(settings.local_root, reader.location))
        with _appearing(target, size_bytes) as directory, lease:
            names = _names(len(shards))
            for name, shard in zip(names, shards, strict=True):
                written_bytes = sum(item.size_bytes for item in shard)
                with translated(directory / name), progress.moving(name, written_bytes) as on_file_bytes:
                    write_file(directory / name, shard, reader, on_file_bytes)
            if len(names) > 1:
                durable_write(directory / INDEX, _index(names, shards, size_bytes))
        skipped = len(metadata.state_dict_metadata) - len(items)
        return ExportResult(reader.path, target, tuple(names), len(items), size_bytes, skipped)

    return read_newest(parse_uri(uri), lambda: latest(uri, settings=settings), export_from)


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype.lower() not in _DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}", hint=f"Use one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype.lower()]


def _select(metadata: Metadata, only: str, dtype: torch.dtype | None, where: str) -> list[Item]:
    prefix = f"{only.rstrip('.')}." if only else ""
    found = {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and key.startswith(prefix)
    }
    if not found:
        known = sorted({key.partition(".")[0] for key in metadata.state_dict_metadata})
        below = f" below {only!r}" if only else ""
        raise ConfigError(f"{where} holds no tensors{below}", hint=f"At its top are: {', '.join(known)}", uri=where)
    items = []
    for key, entry in found.items():
        written = dtype if dtype is not None and entry.properties.dtype.is_floating_point else entry.properties.dtype
        if name_of(written) is None:
            hint = "Export a part with --only"
            raise StateMismatchError(f"safetensors cannot hold {key} of {written}", hint=hint, tensor=key)
        items.append(Item(key, key.removeprefix(prefix), entry, written))
    return items


def _cut(items: list[Item], shard_size_bytes_max: int) -> list[list[Item]]:
    shards: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        if shards[-1] and filled + item.size_bytes > shard_size_bytes_max:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item.size_bytes
    return shards


def _names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]


def _index(names: list[str], shards: list[list[Item]], size_bytes: int) -> bytes:
    weight_map = {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard}
    return json.dumps({"metadata": {"total_size": size_bytes}, "weight_map": weight_map}, indent=2).encode()


def _check_target(target: Path) -> None:
    check_names(target)
    with translated(target):
        is_taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if is_taken:
        raise ConfigError(f"{target} exists and is not an empty directory", hint="Give a new directory", path=target)
    if target.is_mount():
        raise ConfigError(
            f"{target} is a mount point, and cannot appear atomically",
            hint="Give a new directory below it",
            path=target,
        )


@contextlib.contextmanager
def _appearing(target: Path, size_bytes: int) -> Iterator[Path]:
    """Yield a temporary directory; rename it to ``target`` on success, remove it on failure.

    At most one process of a node exports to a target at a time. It removes what killed processes left.
    """
    stem = f"{target.name}.exporting"
    directory = target.with_name(temporary_of_this_process(stem))
    with translated(target):
        make_dirs(target.parent)
        hint = "Free some space or give another directory; nothing was written"
        require_room(target.parent, size_bytes, "the export", hint, more_bytes=_SPARE_BYTES)
        with _held_where_locks_are(companion_path(target, ".exporting.lock")) as is_held:
            if not is_held:
                raise OperationTimeoutError(f"another process is exporting to {target}", hint="Wait for it, or stop it")
            for left in matching(target.parent, f".{glob.escape(stem_of(stem))}.*.tmp"):
                if is_abandoned(left.name):
                    remove_tree(left, ignore_errors=True)
            directory.mkdir()
            try:
                yield directory
                fsync_dir(directory)
                publish(directory, target)  # also over an empty directory; refused if it was filled meanwhile
            except BaseException:
                remove_tree(directory, ignore_errors=True)
                raise


@contextlib.contextmanager
def _held_where_locks_are(path: Path) -> Iterator[bool]:
    with contextlib.ExitStack() as stack:
        try:
            is_held = bool(stack.enter_context(try_lock(path, remove=True)))
        except StoreError as error:
            log.info("%s", error.message)
            path.unlink(missing_ok=True)
            is_held = True
        yield is_held
