"""Object stores with one protocol (``base.Store``)."""

from __future__ import annotations

from pathlib import Path

from ..config import Settings
from ..format.layout import Location
from .base import Store
from .retry import Retries

REMOTE_SCHEMES = ("s3", "az", "gs")


def open_store(location: Location, settings: Settings, retries: Retries | None = None) -> Store:
    """Return the store of ``location``, without a request.

    Raises ConfigError: unknown scheme. MissingExtraError names the missing package.
    """
    if location.scheme == "file":
        from .local import LocalStore

        return LocalStore(Path(location.path))
    if location.scheme in REMOTE_SCHEMES:
        from .obstore_store import RemoteStore

        return RemoteStore(location, settings, retries)
    if location.scheme == "hf":
        from .hub.store import HubStore

        return HubStore(location, settings, retries)
    if location.scheme in ("http", "https"):
        from .http_store import HttpStore

        return HttpStore(location, settings, retries)
    from .fsspec_store import UniversalStore, open_filesystem

    return UniversalStore(*open_filesystem(location), location.uri)
