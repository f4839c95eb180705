"""Checks of URIs by spelling alone: no request, no package imported."""

from __future__ import annotations

from pathlib import Path

from ..disk.durable import check_names
from ..errors import ConfigError
from ..format.layout import Location, local_dir
from ..format.uris import UNPRINTABLE

OWN_SCHEMES = ("file", "s3", "az", "gs", "hf")
KEY_SIZE_MAX = 1024
"""Bytes for S3 and GCS, characters for Azure."""


def check_location(location: Location) -> Location:
    if location.scheme in OWN_SCHEMES:
        return location
    from fsspec.registry import known_implementations, registry

    if location.scheme in known_implementations or location.scheme in registry:
        return location
    hint = f"Use a path, {', '.join(f'{scheme}://' for scheme in OWN_SCHEMES)} or a scheme fsspec knows"
    raise ConfigError(f"unknown scheme {location.scheme!r} in {location.uri}", hint=hint, uri=location.uri)


def check_object_name(location: Location) -> None:
    if location.scheme not in ("s3", "gs", "az"):
        return
    if found := UNPRINTABLE.search(location.path):
        raise ConfigError(
            f"{location.uri!r} holds the control character {found[0]!r}, which no list of a bucket has",
            hint="Give it a name without",
        )
    key = location.path if location.scheme == "az" else location.path.encode()
    if len(key) > KEY_SIZE_MAX:
        raise ConfigError(
            f"{location.uri} is too long a name: its store takes {KEY_SIZE_MAX} "
            f"{'characters' if location.scheme == 'az' else 'bytes of UTF-8'}, and it has {len(key)}",
            hint="Shorten it",
        )


def check_target(location: Location, local_root: Path) -> None:
    """Raise ConfigError for a location that cannot be saved to: read-only, or inside the local root."""
    if location.scheme in ("http", "https", "hf"):
        raise ConfigError(
            f"{location.uri} can be read and not written: {'a Hub' if location.scheme == 'hf' else 'HTTP'} stores "
            "nothing",
            hint="Save to s3://BUCKET/KEY, az://CONTAINER/KEY, gs://BUCKET/KEY or a path",
        )
    try:
        location.uri.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{location.uri!r} is not UTF-8", hint="Save under a name that is text") from None
    check_object_name(location)
    if location.scheme not in OWN_SCHEMES:
        _check_fsspec_name(location)
    if location.scheme == "file" and Path(location.path).is_relative_to(local_root):
        hint = "Save to a directory outside it; local_root belongs to tierckpt"
        raise ConfigError(f"{location.path} is inside local_root {local_root}", hint=hint)
    if location.scheme == "file":
        check_names(Path(location.path))


def check_mirrored_target(location: Location, local_root: Path) -> None:
    """``check_target`` for a checkpoint: its name must also fit in the local tier."""
    check_target(location, local_root)
    check_names(local_dir(local_root, location))


def check_read_as(location: Location, path: str) -> None:
    if not path.rstrip("/").endswith(location.path):
        hint = "Give it a name without '?' and '::'"
        message = f"{location.uri}: fsspec takes it apart, and reads the path {path}"
        raise ConfigError(message, hint=hint, uri=location.uri)


def _check_fsspec_name(location: Location) -> None:
    from fsspec import get_filesystem_class

    try:
        kind = get_filesystem_class(location.scheme)
    except (ImportError, ValueError):
        return
    check_read_as(location, str(kind._strip_protocol(location.uri)))
