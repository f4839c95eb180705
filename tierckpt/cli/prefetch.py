"""``tierckpt prefetch``: fill a directory of this node before anything needs it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ..types import Json
from .output import Report, facts, human_bytes, human_seconds, progress_bar
from .session import JsonOption, LocalRootOption, UriArgument, location_of, open_client

To = Annotated[
    Path | None, typer.Option("--to", metavar="DIR", help="Directory to fill. Default: this node's local tier.")
]


def prefetch(
    uri: UriArgument, to: To = None, as_json: JsonOption = False, local_root: LocalRootOption = None
) -> Report:
    """Fetch a checkpoint, or any directory of model files, to this node: whole or not at all.

    DIR appears when every file is there, checked and durable. A prefetch that was killed goes on where it stopped.
    """
    location, target = location_of(uri), to.absolute() if to else None
    begun = time.monotonic()
    with progress_bar(as_json=as_json) as listener, open_client(local_root, listener) as client:
        result = client.run(lambda engine: engine.prefetch(location, target))
    document: Json = {
        "uri": location.uri,
        "directory": str(result.directory),
        "files": result.files,
        "size_bytes": result.size_bytes,
        "fetched_bytes": result.fetched_bytes,
        "seconds": time.monotonic() - begun,
    }
    summary = {
        "directory": result.directory,
        "files": f"{result.files}, {human_bytes(result.size_bytes)}",
        "fetched now": f"{human_bytes(result.fetched_bytes)} in {human_seconds(document['seconds'])}",
    }
    return Report(document, [facts(summary)])
