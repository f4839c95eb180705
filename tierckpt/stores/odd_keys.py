"""Objects of a bucket with keys that are no paths (``a//b``, ``../a``, control characters), through fsspec.

obstore ends a listing at such a key, and cannot name it. Only keys that were listed are read or deleted so: a key from
outside stays refused (S5 of ``base``).
"""

from __future__ import annotations

import builtins
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import TierckptError
from ..format.layout import Location
from ..types import ObjectInfo
from .base import OddKeyError
from .common import has_odd_parts

if TYPE_CHECKING:
    from .fsspec_store import UniversalStore


class OddKeys:
    """The listed keys of one store that are no paths. Makes no request before a listing."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._known: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._known

    @cached_property
    def store(self) -> UniversalStore:
        """Reads and deletes them. fsspec would give a cached client, which may have another environment's endpoint."""
        from .fsspec_store import UniversalStore, open_filesystem  # only a bucket with such keys pays for it

        filesystem, root = open_filesystem(self._location, skip_instance_cache=True)
        return UniversalStore(filesystem, root, self._location.uri, any_key=True)

    async def list(self, prefix: str, error: OddKeyError) -> builtins.list[ObjectInfo]:
        """Return all objects under ``prefix`` after its listing failed with ``error``. Raises it if fsspec has none."""
        try:
            found = [info async for info in self.store.list(prefix) if info.key]
        except TierckptError as reason:
            error.hint = f"Rename or remove that object: fsspec, which lists such keys, cannot here ({reason.message})"
            raise error from None
        if not found:
            error.hint = "Rename or remove that object: fsspec, which lists such keys, sees nothing there"
            raise error
        self._known |= {info.key for info in found if _is_odd(info.key)}
        return found

    async def level(self, directory: str, error: OddKeyError) -> tuple[builtins.list[ObjectInfo], builtins.list[str]]:
        """Return the objects, and the names of the folders, in a folder, without the odd ones.

        Cost: a listing of all that is below it.
        """
        start = len(directory) + 1 if directory else 0
        rest = [(info, info.key[start:]) for info in await self.list(directory, error)]
        paths = [(info, key) for info, key in rest if not _is_odd(key)]
        names = {key.partition("/")[0] for _, key in paths if "/" in key}
        return [info for info, key in paths if "/" not in key], sorted(names)


def _is_odd(key: str) -> bool:
    return has_odd_parts(key) or not key.isprintable()
