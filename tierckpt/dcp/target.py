"""The target of a reader or writer: URI, settings and client."""

from __future__ import annotations

import os

from ..client import Client, get_client
from ..config import Settings
from ..disk.local_root import use_local_root
from ..errors import ConfigError
from ..format.layout import Location, parse_uri
from ..ownership import roots
from ..stores.schemes import check_location


class Mount:
    """An object that DCP points to one checkpoint after another. Subclasses set ``settings`` first."""

    settings: Settings
    location: Location
    path: str
    """The URI, under the name that DCP uses."""

    def _point_to(self, uri: str | os.PathLike[str] | None) -> None:
        if uri is None:
            raise ConfigError("no URI", hint=f"{type(self).__name__}('s3://bucket/run/step-100')")
        if self.settings.local_root not in roots:  # later, paths in it are checked at their use
            use_local_root(self.settings)
        self.location = check_location(parse_uri(uri))
        self.path = self.location.uri

    @property
    def checkpoint_id(self) -> str:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Check the spelling only."""
        try:
            check_location(parse_uri(checkpoint_id))
        except ConfigError:
            return False
        return True

    @property
    def _client(self) -> Client:
        return get_client(self.settings)
