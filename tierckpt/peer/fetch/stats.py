"""Counts the bytes of a fill by source, and the reasons for fallbacks. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ...types import Json


@dataclass(slots=True)
class Sources:
    """Where the bytes of a fill came from."""

    peer_bytes: Counter[str] = field(default_factory=Counter)
    peer_seconds: Counter[str] = field(default_factory=Counter)
    shared_bytes: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Chunks that came from shared storage for another reason than that they were ours to fetch."""
    banned: set[str] = field(default_factory=set)
    slowest: tuple[float, str, str] = (0.0, "", "")

    def peers(self) -> list[Json]:
        return [
            {
                "name": name,
                "bytes": size,
                "bytes_per_second": size / seconds if (seconds := self.peer_seconds[name]) > 0 else 0.0,
                "banned": name in self.banned,
            }
            for name, size in sorted(self.peer_bytes.items(), key=lambda item: -item[1])
        ]

    def report(self) -> Json:
        """What the agent is told, for people to see."""
        seconds, what, source = self.slowest
        return {
            "by_source": {"peer": sum(self.peer_bytes.values()), "shared": self.shared_bytes},
            "by_peer": dict(self.peer_bytes),
            "slowest": {"what": what, "seconds": seconds, "from": source} if what else None,
        }
