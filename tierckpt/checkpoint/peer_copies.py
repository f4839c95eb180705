"""Checkpoints on other nodes: protocols that ``peer/peer_catalog.py`` implements, and the wait for silent nodes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import PermissionDeniedError
from ..format.layout import Location
from ..format.manifest import FileEntry, Manifest
from ..poll import Pauses, Poll, announced
from ..telemetry import logger
from ..types import Buffer, Json


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    """Unique in the cluster, and constant for the lifetime of its local root."""
    address: str
    """``host:port`` of its peer server."""
    weight: float = 1.0
    """Network bytes per second; only ratios count."""
    domain: str = ""
    """A rack, a power feed."""

    def to_json(self) -> Json:
        return {"name": self.name, "address": self.address, "weight": self.weight, "domain": self.domain}


class PeerCopies(Protocol):
    """The copies of one attempt on other nodes."""

    manifest: Manifest

    @property
    def attempt(self) -> str: ...

    async def query_files(self) -> PeerCopies:
        """Query each member once."""

    def holders(self, entry: FileEntry) -> Sequence[Member]:
        """As of the last query."""

    def missing(self, entries: Iterable[FileEntry]) -> list[FileEntry]: ...

    def report_damage(self, member: Member) -> None:
        """Avoid ``member`` for a while."""

    async def chunk(self, member: Member, entry: FileEntry, index: int) -> Buffer:
        """Return a verified chunk."""


class PeerLookup(Protocol):
    async def replicas_at(self, location: Location, known: Iterable[Manifest | None] = ()) -> Mapping[str, PeerCopies]:
        """Return the copies by attempt."""

    async def committed(
        self, parent: Location, *, is_fresh: bool = False
    ) -> Mapping[str, Mapping[str, Sequence[Member]]]:
        """Return holders by name and attempt."""

    async def silent(self, parent: Location) -> list[str]:
        """Return the configured nodes that do not answer a new request. Raises PermissionDeniedError: one refuses."""


log = logger("select")

DENIED_SECONDS = 5.0
"""A longer refusal is permanent: credentials are renewed within moments, and nodes receive a new secret."""
FIRST_REPORT_SECONDS = 2.0
HOW_LONG = "Ctrl-C stops; store_wait_seconds (TIERCKPT_STORE_WAIT_SECONDS) says how long to wait"
PAUSES = Pauses(0.2, 1.0)


class Refusal:
    def __init__(self) -> None:
        self._since: float | None = None

    def is_permanent(self, is_denied: bool) -> bool:
        """Note an answer: whether it was a refusal, and all answers were for ``DENIED_SECONDS``."""
        if not is_denied:
            self._since = None
            return False
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since >= DENIED_SECONDS


class SilentPeers:
    """Waits once for each silent node, and again for one that has answered since."""

    def __init__(self, cluster: PeerLookup | None, wait_seconds: float) -> None:
        self._cluster, self._seconds = cluster, wait_seconds
        self._given_up: set[str] = set()

    async def wait(self, run: Location) -> list[str]:
        """Return the nodes that have not reported their checkpoints of ``run``. Raises PermissionDeniedError."""
        if self._cluster is None:
            return []
        begun, refusal = time.monotonic(), Refusal()
        silent: list[str] = []
        denial: PermissionDeniedError | None = None

        def describe() -> str:
            text = f"waiting for {', '.join(silent)} to say which checkpoints of {run.uri} they have"
            return f"{text}, {time.monotonic() - begun:.0f} of {self._seconds:.0f} s. {HOW_LONG}" if silent else ""

        with announced(log, describe, FIRST_REPORT_SECONDS):
            async for _ in Poll(self._seconds, PAUSES):
                try:
                    silent, denial = await self._cluster.silent(run), None
                except PermissionDeniedError as error:
                    denial = error
                if refusal.is_permanent(denial is not None):
                    break
                if denial is None:
                    self._given_up &= {*silent}
                    if self._given_up >= {*silent}:
                        return silent
        if denial is not None:
            raise denial
        self._given_up |= {*silent}
        return silent
