"""``tierckpt restore``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from typer import Option

from ..format.uris import local_path
from ..restore.restore import restore as restore_newest
from .ui.output import Report, facts
from .ui.session import ProgressSession, UriArgument, location_of


def restore(
    session: ProgressSession,
    uri: UriArgument,
    to: Annotated[Path, Option(metavar="DIR", help="Directory to fill.")],
    latest: Annotated[bool, Option(help="Of a run: the newest usable checkpoint. The default.")] = False,
) -> Report:
    """Write a committed checkpoint to DIR, from this node's good copies, else from shared storage.

    If URI is a run, restores its newest usable checkpoint. DIR appears after every file is verified and durable.
    """
    location, target = location_of(uri), local_path(to, "--to")
    begun = time.monotonic()
    with session.progress_bar() as listener, session.client(listener) as client:
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
