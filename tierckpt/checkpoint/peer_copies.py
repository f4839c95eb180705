"""Protocols to find checkpoints on other nodes, implemented by ``peer/peer_catalog.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..format.layout import Location
from ..format.manifest import FileEntry, Manifest
from ..types import Buffer, Json


@dataclass(frozen=True, slots=True)
class Member:
    """One node's agent, as it tells of itself."""

    name: str
    """Unique in the cluster, and constant for the lifetime of its local root."""
    address: str
    """``host:port`` of its peer server."""
    weight: float = 1.0
    """Bytes per second of its network; only the ratio to others counts."""
    domain: str = ""
    """Its failure domain: a rack, a power feed."""

    def to_json(self) -> Json:
        return {"name": self.name, "address": self.address, "weight": self.weight, "domain": self.domain}


class PeerCopies(Protocol):
    """The copies that other nodes have of one checkpoint, all of one attempt."""

    manifest: Manifest

    @property
    def attempt(self) -> str: ...

    async def look(self) -> PeerCopies:
        """Ask which files each has, once. Returns itself."""

    def holders(self, entry: FileEntry) -> Sequence[Member]:
        """Who had the whole of ``entry`` at the last ``look``."""

    def lacks(self, entries: Iterable[FileEntry]) -> list[FileEntry]: ...

    def report(self, member: Member) -> None:
        """Report wrong bytes from ``member``: it is not used for a while."""

    async def chunk(self, member: Member, entry: FileEntry, index: int) -> Buffer:
        """Chunk ``index`` of ``entry`` from ``member``, verified."""


class PeerLookup(Protocol):
    """Lookup of checkpoints on other nodes."""

    async def at(self, location: Location, known: Iterable[Manifest | None] = ()) -> Mapping[str, PeerCopies]:
        """The copies of the checkpoint at ``location``, by attempt."""

    async def committed(
        self, parent: Location, *, is_fresh: bool = False
    ) -> Mapping[str, Mapping[str, Sequence[Member]]]:
        """Return the checkpoints under ``parent``: holders by name and attempt. ``is_fresh``: without the cache."""

    async def silent(self, parent: Location) -> list[str]:
        """Return the configured nodes that do not answer about ``parent``, after a new request to each.

        Raises PermissionDeniedError: a node does not take this one for a member.
        """
