"""What every verb shares: the options all of them take, and an open client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from ...client import Client, close_all
from ...config import Settings
from ...disk.local_root import use_local_root
from ...errors import ConfigError
from ...format.layout import Location, parse_uri
from ...stores.schemes import check_location
from ...telemetry import ignore_progress
from ...types import ProgressListener
from .output import Progressing

SETTLE_SECONDS = 10.0

UriArgument = Annotated[
    str,
    typer.Argument(metavar="URI", help="s3://bucket/key, az://container/key, gs://bucket/key, file:///path or a path."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document; errors as JSON on stderr.")]
ProgressOption = Annotated[
    Progressing,
    typer.Option("--progress", help="json: an object a line on stderr; none. Default: a bar on a terminal."),
]
LocalRootOption = Annotated[
    Path | None,
    typer.Option(
        "--local-root",
        metavar="PATH",
        help="Local tier and journal. Default: TIERCKPT_LOCAL_ROOT, else a cache directory.",
    ),
]


def load_settings(local_root: Path | None, **overrides: Any) -> Settings:
    """Return the settings of this command line. Raises ConfigError; PermissionDeniedError: an unsafe local root."""
    if local_root is not None:
        overrides["local_root"] = local_root
    settings = Settings.load(**overrides)
    use_local_root(settings)
    return settings


def rate_of(option: str, text: str | None, hint: str = "Write it like 200MiB/s") -> int | None:
    """Read ``200MiB/s``. Raises ConfigError."""
    if text is None:
        return None
    try:
        return int(TypeAdapter(ByteSize).validate_python(text.removesuffix("/s")))
    except ValidationError:
        raise ConfigError(f"{option} is {text!r}", hint=hint) from None


def size_of(option: str, text: str | None) -> int | None:
    """Read ``100GiB``. Raises ConfigError."""
    return rate_of(option, text, "Write it like 100GiB")


def location_of(uri: str) -> Location:
    return check_location(parse_uri(uri))


def open_client(
    local_root: Path | None, listener: ProgressListener = ignore_progress, **overrides: Any
) -> closing[Client]:
    """Return a client of its own for one command, which ``with`` closes whatever happens."""
    return closing(Client(load_settings(local_root, **overrides), listener))


@contextmanager
def closing_clients() -> Iterator[None]:
    """Close the clients that the library opened for this command."""
    try:
        yield
    finally:
        close_all()
