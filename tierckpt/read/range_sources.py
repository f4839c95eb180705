"""Async sources of ranges of a checkpoint's files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ..checkpoint.peer_copies import Member, PeerCopies
from ..errors import IntegrityError, ObjectNotFoundError, StoreUnavailableError, TierckptError
from ..stores.base import Recoverable, Store
from ..stores.verified_read import again, available
from ..telemetry import logger
from ..types import Buffer, ByteRange, Tier

log = logger("restore")

T = TypeVar("T")

PEERS_TRIED_MAX = 3


class PeerSource:
    """Whole chunks of a checkpoint's files from other nodes, verified on arrival.

    A peer that fails is not used again; one that returns wrong bytes is reported. ``spend`` is awaited with the size of
    each chunk before its request.
    """

    tier = Tier.PEER

    def __init__(
        self,
        copies: PeerCopies,
        members: Sequence[Member] | None = None,
        spend: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self.uri = f"peers {', '.join(member.name for member in members)}" if members is not None else "peers"
        self.size_bytes = 0
        self._copies, self._members, self._spend = copies, members, spend
        self._entries = {entry.key: entry for entry in copies.manifest.entries}
        self._given_up: dict[str, TierckptError] = {}

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        entry = self._entries.get(key)
        if entry is None or not entry.digests:
            raise ObjectNotFoundError(f"peers do not serve {key}", key=key)
        if self._spend is not None:
            await self._spend(byte_range.size_bytes)
        index = byte_range.start // self._copies.manifest.chunk_size_bytes
        holders = self._members if self._members is not None else self._copies.holders(entry)
        nobody: TierckptError = ObjectNotFoundError(f"no peer has {entry.path}", key=key)
        last = next((self._given_up[one.name] for one in holders if one.name in self._given_up), nobody)
        candidates = [one for one in holders if one.name not in self._given_up]
        for member in candidates if self._members is not None else candidates[:PEERS_TRIED_MAX]:
            try:
                data = await self._copies.chunk(member, entry, index)
                self.size_bytes += byte_range.size_bytes
                return data
            except ObjectNotFoundError as error:
                log.info("%s: %s", key, error)
                last = error
            except (TierckptError, OSError, TimeoutError) as error:
                if isinstance(error, IntegrityError):
                    self._copies.report_damage(member)
                last = error if isinstance(error, TierckptError) else StoreUnavailableError(f"{member.name}: {error}")
                self._given_up[member.name] = last
                log.warning("not using peer %s any more: %s", member.name, error)
        raise last


class NearestSource:
    """Files of one checkpoint: verified chunks from peers, else unverified ranges."""

    def __init__(self, store: Store, elsewhere: PeerCopies | None) -> None:
        self.uri = store.uri
        self._store, self._peers = store, PeerSource(elsewhere) if elsewhere is not None else None

    @property
    def peer_bytes(self) -> int:
        return self._peers.size_bytes if self._peers is not None else 0

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        """Return one chunk, or any range, which only the store has. Raises the store's errors."""
        if self._peers is not None:
            try:
                return await self._peers.get_range(key, byte_range)
            except TierckptError as error:
                log.debug("%s: %s", self.uri, error)
        return await self._store.get_range(key, byte_range, if_match=if_match)

    def again(self, work: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        return again(self._store, work)

    async def reconnect(self, damage: TierckptError) -> None:
        """Handle damage, which comes from the store: chunks of peers are verified on arrival."""
        if not isinstance(self._store, Recoverable):
            raise damage
        await self._store.reconnect(damage)

    async def available(self) -> bool:
        return await available(self._store)

    def probe_soon(self) -> None:
        if isinstance(self._store, Recoverable):
            self._store.probe_soon()
