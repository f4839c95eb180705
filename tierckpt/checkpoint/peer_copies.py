"""Protocols by which checkpoints are found on other nodes: ``peer/peer_catalog.py`` implements them."""

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
    """Unique in the cluster, and the same for as long as its local root lives."""
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
        """What ``member`` gave was not what was saved: no bytes are asked of it for a while."""

    async def chunk(self, member: Member, entry: FileEntry, index: int) -> Buffer:
        """Chunk ``index`` of ``entry`` from ``member``, verified."""


class PeerLookup(Protocol):
    """What the other nodes have."""

    async def at(self, location: Location, known: Iterable[Manifest | None] = ()) -> Mapping[str, PeerCopies]:
        """The copies of the checkpoint at ``location``, by attempt."""

    async def committed(
        self, parent: Location, *, is_fresh: bool = False
    ) -> Mapping[str, Mapping[str, Sequence[Member]]]:
        """The checkpoints below ``parent``: by name, by attempt, who has it. ``is_fresh``: not from memory."""

    async def silent(self, parent: Location) -> list[str]:
        """The nodes that were to say what they have below ``parent``, and did not, asked anew.

        Raises PermissionDeniedError: a node does not take this one for a member.
        """
