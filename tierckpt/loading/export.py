"""Export: a DCP checkpoint as safetensors files, which every inference engine opens."""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..checkpoint.catalog import read_newest
from ..client import latest
from ..config import GiB, Settings
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
    space_of,
    translated,
)
from ..disk.file_lock import try_lock
from ..disk.processes import companion_path, is_abandoned, stem_of, temporary_of_this_process
from ..errors import CapacityError, ConfigError, OperationTimeoutError, StateMismatchError, StoreError
from ..format.layout import local_dir, parse_uri
from ..format.uris import local_path
from ..quantities import human_bytes
from ..telemetry import FilesInFlight, ignore_progress, logger
from ..types import Json, Progress, ProgressListener
from .export_file import Item, in_file_order, write_file
from .header import name_of

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
        return {
            "uri": self.uri,
            "directory": str(self.directory),
            "files": list(self.files),
            "tensors": self.tensors,
            "size_bytes": self.size_bytes,
            "skipped": self.skipped,
        }


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
        return _export(reader, target, only, _dtype(dtype), shard_size_bytes_max, listener)

    return read_newest(parse_uri(uri), lambda: latest(uri, settings=settings), export_from)


def _export(
    reader: TierStorageReader,
    target: Path,
    only: str,
    dtype: torch.dtype | None,
    shard_size_bytes_max: int,
    listener: ProgressListener,
) -> ExportResult:
    metadata = reader.read_metadata()
    items = _select(metadata, only, dtype, reader.path)
    _check_dtypes(items)
    shards = [in_file_order(shard) for shard in _cut(items, shard_size_bytes_max)]
    size_bytes = sum(item.size_bytes for item in items)
    done_bytes = 0

    def on_bytes(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        listener(Progress(f"export {reader.path}", done_bytes, size_bytes, files=files.now()))

    files = FilesInFlight()
    on_bytes(0)
    reader.set_up_storage_reader(metadata, True)
    with _appearing(target, size_bytes) as directory, _release_windows(reader):
        names = _names(len(shards))
        for name, shard in zip(names, shards, strict=True):
            written_bytes = sum(item.size_bytes for item in shard)
            with translated(directory / name), files.moving(name, written_bytes, on_bytes) as on_file_bytes:
                write_file(directory / name, shard, reader, on_file_bytes)
        if len(names) > 1:
            durable_write(directory / INDEX, _index(names, shards, size_bytes))
    skipped = len(metadata.state_dict_metadata) - len(items)
    return ExportResult(reader.path, target, tuple(names), len(items), size_bytes, skipped)


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
    return [
        Item(
            key,
            key.removeprefix(prefix),
            entry,
            dtype if dtype is not None and entry.properties.dtype.is_floating_point else entry.properties.dtype,
        )
        for key, entry in found.items()
    ]


def _check_dtypes(items: list[Item]) -> None:
    for item in items:
        if name_of(item.written) is None:
            raise StateMismatchError(
                f"safetensors cannot hold {item.key} of {item.written}",
                hint="Export a part with --only",
                tensor=item.key,
            )


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


@contextlib.contextmanager
def _release_windows(reader: TierStorageReader) -> Iterator[None]:
    """The reader releases the checkpoint after each window."""
    settings = reader.settings
    with read_lease.reading(settings.local_root, local_dir(settings.local_root, reader.location)):
        yield


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
        check_room(target.parent, size_bytes)
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


def check_room(parent: Path, size_bytes: int) -> None:
    free = space_of(parent).free_bytes
    if free < size_bytes + _SPARE_BYTES:
        raise CapacityError(
            f"the export has {human_bytes(size_bytes)}, {human_bytes(free)} are free for {parent}",
            hint="Free some space or give another directory; nothing was written",
            needed_bytes=size_bytes,
            free_bytes=free,
        )
