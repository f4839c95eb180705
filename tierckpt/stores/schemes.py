"""Which URIs some store can open, judged by spelling alone: no request, no package imported."""

from __future__ import annotations

from ..errors import ConfigError
from ..format.layout import Location

OWN_SCHEMES = ("file", "s3", "az", "gs")


def check_location(location: Location) -> Location:
    """Return ``location`` when a store exists for its scheme.

    Raises:
        ConfigError: no store knows the scheme; the message names those that are known.
    """
    if location.scheme in OWN_SCHEMES or location.scheme in fsspec_schemes():
        return location
    raise ConfigError(
        f"unknown scheme {location.scheme!r} in {location.uri}",
        hint=f"Use a path, {', '.join(f'{scheme}://' for scheme in OWN_SCHEMES)} or a scheme fsspec knows",
        uri=location.uri,
    )


def fsspec_schemes() -> set[str]:
    from fsspec.registry import known_implementations, registry

    return {*known_implementations, *registry}
