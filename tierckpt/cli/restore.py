"""``tierckpt restore``: a checkpoint as a plain directory that stock PyTorch reads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ..format.uris import local_path
from ..types import Json
from .ui.output import Report, facts, human_bytes, human_seconds, progress_bar
from .ui.session import JsonOption, LocalRootOption, ProgressOption, UriArgument, location_of, open_client

To = Annotated[Path, typer.Option("--to", metavar="DIR", help="Directory to fill.")]


Latest = Annotated[bool, typer.Option("--latest", help="Of a run: the newest usable checkpoint, as without it.")]


def restore(
    uri: UriArgument,
    to: To,
    latest: Latest = False,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    local_root: LocalRootOption = None,
) -> Report:
    """Write a committed checkpoint to DIR, from this node's copies where they are good, else from shared storage.

    URI may be a run: then its newest usable checkpoint. DIR appears when every file is there, checked and durable.
    """
    location, target = location_of(uri), local_path(to, "--to")
    begun = time.monotonic()
    with progress_bar(as_json=as_json, progress=progress) as listener, open_client(local_root, listener) as client:
        result = client.run(client.mover.restore(location, target))
    seconds = time.monotonic() - begun
    document: Json = {**result.to_json(), "seconds": seconds}
    summary = {
        "checkpoint": result.location.uri,
        "directory": result.directory,
        "files": f"{result.files}, {human_bytes(result.size_bytes)}",
        "from this node": human_bytes(result.local_bytes),
        "from shared storage": human_bytes(result.shared_bytes),
        "took": human_seconds(seconds),
    }
    return Report(document, [facts(summary)])
