"""``tierckpt adopt``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ..adoption import adopt as adopt_directory
from ..errors import ConfigError
from ..types import Json
from .ui.output import Report, facts
from .ui.session import ProgressSession, UriArgument, closing_clients


def adopt(
    session: ProgressSession,
    directory: Annotated[Path, Argument(metavar="DIRECTORY", help="Directory to adopt. Its files are closed.")],
    uri: UriArgument,
    overwrite: Annotated[bool, Option(help="Replace the checkpoint at URI.")] = False,
    links: Annotated[bool, Option(help="Hard-link the files. They must not be written in place later.")] = False,
    ranks: Annotated[str | None, Option(metavar="R/N", help="This node is R (from 0) of N nodes.")] = None,
    attempt: Annotated[str | None, Option(metavar="NAME", help="Name shared by all of --ranks.")] = None,
    wait: Annotated[float, Option(metavar="SECONDS", help="Wait at most this long for the drain.")] = 0.0,
) -> Report:
    """Make a checkpoint of DIRECTORY: committed on this node on return, then drained to URI in the background.

    DIRECTORY may be deleted afterwards. Without an agent the drain ends with this command: give --wait.
    """
    begun = time.monotonic()
    with closing_clients():
        settings = session.settings()
        with session.progress_bar() as listener:
            handle = adopt_directory(
                directory,
                uri,
                overwrite=overwrite,
                links=links,
                ranks=_ranks(ranks),
                attempt=attempt,
                settings=settings,
                listener=listener,
            )
        adopted_seconds = time.monotonic() - begun
        if wait:
            handle.wait(timeout_seconds=wait)
    document: Json = {
        "uri": handle.uri,
        "files": handle.files,
        "size_bytes": handle.size_bytes,
        "tier": "shared" if wait else "local",
        "seconds": adopted_seconds,
    }
    summary = {
        "checkpoint": "{uri}",
        "files": "{files}, {size_bytes:bytes}",
        "committed on": "shared storage" if wait else "this node; `tierckpt status` shows the drain",
        "took": "{seconds:seconds}",
    }
    return Report(document, [facts(summary, document)])


def _ranks(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    rank, _, count = text.partition("/")
    if not (rank.isdigit() and count.isdigit()):
        raise ConfigError(f"--ranks is {text!r}", hint="Write it like 0/2")
    return int(rank), int(count)
