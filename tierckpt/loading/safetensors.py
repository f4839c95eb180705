"""Safetensors files to tensors: a directory with or without an index, one file, or a URI."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ..client import Client, prefetch
from ..config import Settings
from ..engine import Engine
from ..errors import CheckpointNotFoundError, IntegrityError
from ..layout import PRIVATE_DIR, Location, parse_uri
from ..manifest import is_safe_path
from ..mover.prefetch import Wanted
from ..mover.prefetch import prefetch as fetch_files
from ..stores.schemes import check_location
from ..telemetry import ignore_progress

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"


def load_safetensors(
    uri_or_dir: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    settings: Settings | None = None,
    **overrides: object,
) -> dict[str, Tensor]:
    """Return every tensor of a model, by name: all of them, or an error that says which is missing.

    A path is read where it is. A URI (``s3://...``, ``file:///...``) is prefetched into this node's local tier first,
    whole or not at all, and read from there, now and next time. With an index, exactly the files it names are read.

    Args:
        uri_or_dir: a directory of safetensors files, one such file, or the URI of either.
        device: where the tensors go.
        settings: a ``Settings``; ``overrides`` are single fields of it.

    Raises:
        IntegrityError: a file or tensor that the index names is missing, a file is damaged or cut short, or two files
            hold one name.
        CheckpointNotFoundError: no such place, or no safetensors file in it.
        ConfigError, StoreError, PartialTransferError, CapacityError: from the prefetch.
    Cost: files are mapped into memory, and read once, when a tensor is first used or moved to ``device``.
    """
    path = _local_path(uri_or_dir, Settings.load(settings, **overrides))
    if path.is_file():
        return _load_file(path, device)
    if not path.is_dir():
        raise CheckpointNotFoundError(f"{path} does not exist", hint="Give a directory, a .safetensors file or a URI")
    indexes = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if len(indexes) > 1:
        names = ", ".join(index.name for index in indexes)
        raise IntegrityError(f"{path} holds several indexes: {names}", hint="Give the file to load", file=names)
    return _load_indexed(indexes[0], device) if indexes else _load_all(path, device)


def _load_all(directory: Path, device: str | torch.device) -> dict[str, Tensor]:
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if not files:
        raise CheckpointNotFoundError(
            f"no safetensors files in {directory}",
            hint="`tierckpt export` makes them from a DCP checkpoint",
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _load_file(file, device).items():
            if name in tensors:
                raise IntegrityError(
                    f"{file} holds {name!r}, which another file of {directory} holds too",
                    hint="Give the file to load; only an index could say which one counts",
                    file=file.name,
                    tensor=name,
                )
            tensors[name] = tensor
    return tensors


def _load_indexed(index: Path, device: str | torch.device) -> dict[str, Tensor]:
    weight_map = _weight_map(index)
    missing = sorted({name for name in weight_map.values() if not (index.parent / name).is_file()})
    if missing:
        raise IntegrityError(
            f"{index} names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not there",
            hint="Fetch the model again, whole: `tierckpt prefetch`",
            file=", ".join(missing),
        )
    loaded = {name: _load_file(index.parent / name, device) for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in loaded[name]:
            raise IntegrityError(
                f"{index} says that {name} holds {tensor!r}, and it does not", file=name, tensor=tensor
            )
    return {tensor: loaded[name][tensor] for tensor, name in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{index} is not an index of safetensors files: {error}", file=index.name) from error
    if not all(is_safe_path(name) for name in names):
        raise IntegrityError(f"{index} names files outside its directory", file=index.name)
    return cast(dict[str, str], weight_map)


def _load_file(path: Path, device: str | torch.device) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path, device=str(device))
    except safetensors.SafetensorError as error:
        raise IntegrityError(
            f"{path} is not a whole safetensors file: {error}", hint="Fetch it again", file=path.name
        ) from error


def _local_path(uri_or_dir: str | os.PathLike[str], settings: Settings) -> Path:
    """Return where the files lie on this node, after a prefetch if they have to come from elsewhere."""
    if "://" not in os.fspath(uri_or_dir):
        return Path(uri_or_dir).absolute()
    location = check_location(parse_uri(uri_or_dir))
    if not location.name.endswith(SUFFIX):
        return prefetch(location.uri, settings=settings)
    client = Client(settings)
    try:
        return client.run(lambda engine: _prefetch_file(engine, location))
    finally:
        client.close()


async def _prefetch_file(engine: Engine, location: Location) -> Path:
    """Prefetch one file. It has a directory of its own, so that it never passes for the prefetch of its whole model."""
    store, name = engine.store(location.parent), location.name
    info = await store.head(name)
    target = engine.directory(location.parent) / PRIVATE_DIR / "files" / name
    await fetch_files(
        store,
        [Wanted(name, name, info.size_bytes, info.etag)],
        target,
        chunk_size_bytes=int(engine.settings.chunk_size_bytes),
        concurrency=engine.settings.concurrency,
        listener=ignore_progress,
    )
    return target / name
