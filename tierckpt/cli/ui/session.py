"""Options that all verbs share, and their client."""

from __future__ import annotations

import contextlib
import os
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


def complete_uri(incomplete: str) -> list[str]:
    """The shell completes plain paths itself."""
    scheme, separator, path = incomplete.partition("://")
    if scheme not in {"file", "local"} or not path.startswith("/"):
        return []
    found = _entries(path)
    if len(found) == 1 and found[0].endswith("/"):
        found += _entries(found[0])  # a shell appends a space to a single candidate
    return [scheme + separator + one for one in found]


def _entries(path: str) -> list[str]:
    parent, _, name = path.rpartition("/")
    with contextlib.suppress(OSError), os.scandir(f"{parent}/") as entries:
        names = ((entry.name, "/" if entry.is_dir() else "") for entry in entries if entry.name.startswith(name))
        return sorted(f"{parent}/{one}{end}" for one, end in names if name or not one.startswith("."))
    return []


UriArgument = Annotated[
    str,
    typer.Argument(
        metavar="URI",
        help="s3://bucket/key, az://container/key, gs://bucket/key, file:///path or a path.",
        autocompletion=complete_uri,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document; errors as JSON on stderr.")]
ProgressOption = Annotated[
    Progressing,
    typer.Option("--progress", help="json: one object per line on stderr; none. Default: a bar on a terminal."),
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
    """Raise ConfigError; PermissionDeniedError: an unsafe local root."""
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
    return closing(Client(load_settings(local_root, **overrides), listener))


@contextmanager
def closing_clients() -> Iterator[None]:
    try:
        yield
    finally:
        close_all()
