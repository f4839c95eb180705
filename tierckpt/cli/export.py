"""``tierckpt export``: a DCP checkpoint as safetensors files. The one verb that needs torch, imported when it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from ..errors import ConfigError, MissingExtraError
from ..format.uris import local_path
from ..process_start import leave_removed_directory
from ..types import Json
from .ui.output import Report, facts, human_bytes, human_seconds, progress_bar
from .ui.session import (
    JsonOption,
    LocalRootOption,
    ProgressOption,
    UriArgument,
    closing_clients,
    load_settings,
    location_of,
)

To = Annotated[Path, typer.Option("--to", metavar="DIR", help="New or empty directory.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="Convert floating-point tensors: bf16, fp16 or fp32.")
]
MaxShardSize = Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest file, like 5GiB.")]
Only = Annotated[
    str, typer.Option("--only", metavar="PREFIX", help="Export what is below PREFIX (model: model.*), without it.")
]


def export(
    uri: UriArgument,
    to: To,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = "5GiB",
    only: Only = "",
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    local_root: LocalRootOption = None,
) -> Report:
    """Write a checkpoint's tensors to DIR as safetensors. URI may be a run: then its newest usable checkpoint.

    DIR appears when all of it is written and durable.
    """
    shard_size_bytes_max = _size(max_shard_size)
    location, target = location_of(uri), local_path(to, "--to")
    leave_removed_directory()
    try:
        from ..loading.export import export_safetensors
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"export needs {error.name}", hint="pip install 'tierckpt[torch]'") from error

    begun = time.monotonic()
    with progress_bar(as_json=as_json, progress=progress) as listener, closing_clients():
        result = export_safetensors(
            location.uri,
            target,
            dtype=dtype,
            shard_size_bytes_max=shard_size_bytes_max,
            only=only,
            settings=load_settings(local_root),
            listener=listener,
        )
    seconds = time.monotonic() - begun
    document: Json = {**result.to_json(), "seconds": seconds}
    summary = {
        "checkpoint": result.uri,
        "directory": result.directory,
        "tensors": f"{result.tensors}, {human_bytes(result.size_bytes)} in {len(result.files)} files",
        "left out": f"{result.skipped} entries that are no tensors or not below {only!r}"
        if only
        else f"{result.skipped} entries that are no tensors",
        "took": human_seconds(seconds),
    }
    return Report(document, [facts(summary)])


def _size(text: str) -> int:
    try:
        size = TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        size = ByteSize(0)
    if size <= 0:
        raise ConfigError(f"--max-shard-size {text!r} is no size", hint="Write it like 5GiB")
    return int(size)
