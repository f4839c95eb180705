"""``tierckpt export``. Imports torch when it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from typer import Option

from ..errors import ConfigError, MissingExtraError
from ..format.uris import local_path
from ..process_start import leave_removed_directory
from ..types import Json
from .ui.output import Report, facts
from .ui.session import ProgressSession, UriArgument, closing_clients, location_of, size_of


def export(
    session: ProgressSession,
    uri: UriArgument,
    to: Annotated[Path, Option(metavar="DIR", help="New or empty directory.")],
    dtype: Annotated[
        str | None, Option(metavar="DTYPE", help="Convert floating-point tensors: bf16, fp16 or fp32.")
    ] = None,
    max_shard_size: Annotated[str, Option(metavar="SIZE", help="Largest file, like 5GiB.")] = "5GiB",
    only: Annotated[
        str, Option(metavar="PREFIX", help="Export only keys below PREFIX (model: model.*), and strip it.")
    ] = "",
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
    with session.progress_bar() as listener, closing_clients():
        result = export_safetensors(
            location.uri,
            target,
            dtype=dtype,
            shard_size_bytes_max=shard_size_bytes_max,
            only=only,
            settings=session.settings(),
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
