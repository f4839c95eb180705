"""``tierckpt export``. Imports torch when it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError, MissingExtraError
from ..format.uris import local_path
from ..process_start import leave_removed_directory
from ..types import Json
from .ui.output import Report, facts, progress_bar
from .ui.session import (
    JsonOption,
    LocalRootOption,
    ProgressOption,
    UriArgument,
    closing_clients,
    load_settings,
    location_of,
    size_of,
)

To = Annotated[Path, typer.Option("--to", metavar="DIR", help="New or empty directory.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="Convert floating-point tensors: bf16, fp16 or fp32.")
]
MaxShardSize = Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest file, like 5GiB.")]
Only = Annotated[
    str, typer.Option("--only", metavar="PREFIX", help="Export only keys below PREFIX (model: model.*), and strip it.")
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
    shard_size_bytes_max = size_of("--max-shard-size", max_shard_size)
    if not shard_size_bytes_max:
        raise ConfigError(f"--max-shard-size is {max_shard_size!r}", hint="Write it like 5GiB")
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
    document: Json = {**result.to_json(), "seconds": time.monotonic() - begun}
    summary = {
        "checkpoint": "{uri}",
        "directory": "{directory}",
        "tensors": "{tensors}, {size_bytes:bytes} in {count} files",
        "left out": "{skipped} entries that are no tensors{unasked}",
        "took": "{seconds:seconds}",
    }
    unasked = f" or not below {only!r}" if only else ""
    return Report(document, [facts(summary, document, count=len(result.files), unasked=unasked)])
