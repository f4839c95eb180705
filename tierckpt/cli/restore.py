"""``tierckpt restore``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ..format.uris import local_path
from ..restore.restore import restore as restore_newest
from .ui.output import Report, facts, progress_bar
from .ui.session import JsonOption, LocalRootOption, ProgressOption, UriArgument, location_of, open_client

To = Annotated[Path, typer.Option("--to", metavar="DIR", help="Directory to fill.")]
Latest = Annotated[bool, typer.Option("--latest", help="Of a run: the newest usable checkpoint. The default.")]


def restore(
    uri: UriArgument,
    to: To,
    latest: Latest = False,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    local_root: LocalRootOption = None,
) -> Report:
    """Write a committed checkpoint to DIR, from this node's good copies, else from shared storage.

    If URI is a run, restores its newest usable checkpoint. DIR appears after every file is verified and durable.
    """
    location, target = location_of(uri), local_path(to, "--to")
    begun = time.monotonic()
    with progress_bar(as_json=as_json, progress=progress) as listener, open_client(local_root, listener) as client:
        result = client.run(restore_newest(client.mover, location, target))
    summary = {
        "checkpoint": "{location.uri}",
        "directory": "{directory}",
        "files": "{files}, {size_bytes:bytes}",
        "from this node": "{local_bytes:bytes}",
        "from shared storage": "{shared_bytes:bytes}",
        "took": "{seconds:seconds}",
    }
    seconds = time.monotonic() - begun
    return Report({**result.to_json(), "seconds": seconds}, [facts(summary, result, seconds=seconds)])
