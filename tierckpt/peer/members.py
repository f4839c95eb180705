"""Who the other nodes are. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..types import Json


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
