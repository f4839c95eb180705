"""Asking one peer: one request at a time on a connection, the bytes of a chunk straight into memory of the caller's.

What comes back is believed as far as it can be checked: it is proven to be of a member (auth.py), it has exactly the
length that it must have, and a chunk has its digest. No redirect is followed, nothing is decompressed, nothing is sent
anywhere but to an address of the list of members. Every wait has an end, and what is not as it should be costs the
connection.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import deque
from dataclasses import dataclass

from ..cache.partial_entry import same_digest
from ..config import Settings
from ..errors import IntegrityError, ObjectNotFoundError, PeerBusyError, PeerError, TierckptError
from ..format.manifest import digest_of
from ..stores import congestion
from ..types import Json, Tier
from .auth import Signer, client_tls, denied, read_secret
from .connection import Link, Stale
from .members import Member, is_plain_address
from .messages import (
    DIGEST,
    HELD,
    JSON_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    ME,
    TIME,
    Answer,
    ChunkReport,
    WireError,
    chunk_target,
    encode_head,
    held_target,
    host_and_port,
    parse_json,
)

CONNECT_SECONDS = 2.0
FIRST_BYTE_SECONDS = 5.0
IDLE_SECONDS_MAX = 15.0
"""Half of what a server keeps an idle connection for."""
IDLE_MAX = 8
"""Idle connections to one peer."""
CONNECTIONS_MAX = 256
CLOCKS_MAX = 8192


@dataclass(frozen=True, slots=True)
class ChunkAnswer:
    """A chunk that has arrived: its digest, as computed here, and what else the peer has."""

    digest: str
    held: ChunkReport


class PeerClient:
    """Asks peers in the name of ``me``. Runs on one event loop; close it."""

    def __init__(self, settings: Settings, me: Member | str) -> None:
        """Raises ConfigError: the secret or the certificates cannot be used."""
        self._settings = settings
        self._signer = Signer(read_secret(settings), me if isinstance(me, str) else me.name)
        self._tls = client_tls(settings)
        self._idle: dict[str, deque[tuple[float, Link]]] = {}
        self._links: set[Link] = set()
        self._gate = asyncio.Semaphore(CONNECTIONS_MAX)
        self._ahead: dict[str, float] = {}
        """By how many seconds the clocks of peers are ahead of ours, of those that have told."""

    def learn_clock(self, address: str, ahead_seconds: float) -> None:
        if address not in self._ahead and len(self._ahead) >= CLOCKS_MAX:
            self._ahead.clear()  # they tell it again
        self._ahead[address] = ahead_seconds

    def ahead_seconds(self, address: str) -> float:
        return self._ahead.get(address, 0.0)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self._idle.clear()
        for link in list(self._links):
            link.abort()
        self._links.clear()
        await asyncio.sleep(0)

    # --- what can be asked ---------------------------------------------------------------------------------------

    async def chunk(
        self,
        member: Member,
        version: str,
        chunk_size_bytes: int,
        ordinal: int,
        into: memoryview,
        *,
        expected: str = "",
        after: int = 0,
        wait_seconds: float = 0.0,
    ) -> ChunkAnswer:
        """Receive one chunk, all of ``into``, and verify it.

        Args:
            expected: its digest, where the manifest knows it: that decides. '': what the peer says it landed with.
            after: how many lines of the peer's list are known already.
            wait_seconds: how long the peer may wait for it to land, at most 10.

        When this returns or raises, cancelled too, nothing writes to ``into`` any more.

        Raises:
            ObjectNotFoundError: it is not there. PeerBusyError: it is, and the peer serves enough others.
            IntegrityError: these are not its bytes, or not as many.
            PeerError: no answer, a broken one, or one that came too slowly.
            PermissionDeniedError: the peer does not take us for a member.
        """
        target = chunk_target(version, chunk_size_bytes, ordinal, after, wait_seconds)
        answer, _ = await self._ask(member, target, into=into, patience_seconds=FIRST_BYTE_SECONDS + wait_seconds)
        digest = await asyncio.to_thread(digest_of, into)
        claimed = answer.headers.get(DIGEST, "")
        if not same_digest(into, digest, expected or claimed):
            raise _lies(member, f"chunk {ordinal} of {version} is not what {'was saved' if expected else 'it says'}")
        try:
            return ChunkAnswer(digest, ChunkReport.of_header(answer.headers.get(HELD, "")))
        except WireError as error:
            raise _broken(member, str(error)) from None

    async def held(
        self, member: Member, version: str, chunk_size_bytes: int, *, after: int = 0, interested: bool = False
    ) -> ChunkReport:
        """What the peer has of a version, from line ``after`` of its list. Raises as ``chunk``."""
        body = await self._json(member, held_target(version, chunk_size_bytes, after, interested))
        try:
            return ChunkReport.of_json(body)
        except WireError as error:
            raise _broken(member, str(error)) from None

    async def tell_slow(self, member: Member, version: str) -> None:
        """Tell the peer that it takes far longer than others to give chunks of a version. Raises as ``chunk``."""
        await self._json(member, f"/v1/slow/{version}")

    async def members(self, member: Member | str, me: Json | None = None) -> Json:
        """Whom the peer knows. ``member`` may be an address; ``me`` is told to it. Raises as ``chunk``."""
        about = json.dumps(me, separators=(",", ":")) if me is not None else ""
        return await self._json(member, "/v1/members", about_me=about)

    async def manifest(self, member: Member, uri: str) -> bytes:
        """The manifest of the checkpoint at ``uri`` that is committed on the peer's node, not yet decoded.

        Raises as ``chunk``. Whoever decodes it decides whether to believe it: a peer can be wrong about what is newest.
        """
        return await self._body(member, f"/v1/manifest/{digest_of(uri.encode())}", MANIFEST_BYTES_MAX)

    async def steps(self, member: Member, uri: str) -> dict[str, str]:
        """Names and attempts of the checkpoints below ``uri`` that are committed on the peer's node."""
        body = await self._json(member, f"/v1/steps/{digest_of(uri.encode())}")
        steps = body.get("steps")
        if not isinstance(steps, dict) or not all(isinstance(one, str) for one in steps.values()):
            raise _broken(member, "steps that cannot be")
        return steps

    async def status(self, member: Member) -> Json:
        """What the peer serves and fetches now. Raises as ``chunk``."""
        return await self._json(member, "/v1/status")

    async def fresh(self, member: Member) -> Json:
        """What was saved last on the peer's node (peer/replica_policy.py). Raises as ``chunk``."""
        return await self._json(member, "/v1/fresh")

    # --- asking --------------------------------------------------------------------------------------------------

    async def _json(self, member: Member | str, target: str, *, about_me: str = "") -> Json:
        body = await self._body(member, target, JSON_BYTES_MAX, about_me=about_me)
        try:
            return parse_json(body)
        except WireError as error:
            raise _broken(member, str(error)) from None

    async def _body(self, member: Member | str, target: str, most: int, *, about_me: str = "") -> bytes:
        _, body = await self._ask(member, target, most=most, about_me=about_me)
        return bytes(body)

    async def _ask(
        self,
        member: Member | str,
        target: str,
        *,
        into: memoryview | None = None,
        most: int = 0,
        about_me: str = "",
        patience_seconds: float = FIRST_BYTE_SECONDS,
    ) -> tuple[Answer, memoryview]:
        address = member if isinstance(member, str) else member.address
        if not is_plain_address(address):
            raise PeerError(f"{address!r:.100} is no address that a peer can have", tier=Tier.PEER)
        exchange = _Exchange(self, member, target, into, most, about_me, patience_seconds)
        async with self._gate:
            link = self._take(address)
            if link is not None:
                try:
                    return await exchange.on(link)
                except (Stale, _OtherClock):
                    pass  # the peer had closed it before we asked: that is no failure
            for is_last in (False, True):
                try:
                    return await exchange.on(await self._open(member, address), learns_clock=not is_last)
                except _OtherClock:
                    pass  # now it is known
                except Stale as error:
                    raise _broken(member, str(error)) from None
        raise AssertionError("unreachable")

    def _take(self, address: str) -> Link | None:
        idle = self._idle.get(address)
        while idle:
            since, link = idle.pop()
            if time.monotonic() - since < IDLE_SECONDS_MAX and link.is_usable():
                return link
            self.drop(link)
        return None

    def keep(self, address: str, link: Link) -> None:
        """Have a connection for the next request to the same peer."""
        idle = self._idle.setdefault(address, deque())
        if len(idle) >= IDLE_MAX or sum(map(len, self._idle.values())) >= CONNECTIONS_MAX:
            self.drop(idle.popleft()[1] if idle else link)
        if link in self._links:
            idle.append((time.monotonic(), link))

    def drop(self, link: Link) -> None:
        link.abort()
        self._links.discard(link)

    async def _open(self, member: Member | str, address: str) -> Link:
        loop, (host, port) = asyncio.get_running_loop(), host_and_port(address)
        name = host if self._tls is not None else None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, link = await loop.create_connection(Link, host, port, ssl=self._tls, server_hostname=name)
        except ssl.SSLError as error:
            raise denied(f"TLS: {error.reason or error}", _name(member)) from None
        except (OSError, TimeoutError) as error:
            raise _broken(
                member, f"{type(error).__name__}: {getattr(error, 'strerror', None) or 'no connection'}"
            ) from None
        self._links.add(link)
        return link


class _OtherClock(Exception):
    """The peer's clock is another than was thought, and is known by now: the request can be made again."""


class _Exchange:
    """One request and its answer."""

    def __init__(
        self,
        client: PeerClient,
        member: Member | str,
        target: str,
        into: memoryview | None,
        most: int,
        about_me: str,
        patience_seconds: float,
    ) -> None:
        self._client, self._member, self._target = client, member, target
        self._into, self._most, self._about_me = into, most, about_me
        self._patience_seconds = patience_seconds
        self._address = member if isinstance(member, str) else member.address
        self._nonce = ""

    async def on(self, link: Link, *, learns_clock: bool = True) -> tuple[Answer, memoryview]:
        """Raises Stale: the connection was closed before anything came, so another one may be tried. _OtherClock: it
        may be tried again, where the caller ``learns_clock``."""
        is_good = False
        try:
            link.ask(self._request(), self._into, self._judge)
            await self._wait(link)
            answer, body = link.result()
            self._check_proof(answer, body)
            if learns_clock:
                self._learn_clock(answer)
            is_good = answer.keeps
            self._check_status(answer)
            return answer, body
        except WireError as error:
            raise _broken(self._member, str(error)) from None
        finally:
            if is_good:
                link.rest()
                self._client.keep(self._address, link)
            else:
                self._client.drop(link)

    def _request(self) -> bytes:
        to = "" if isinstance(self._member, str) else self._member.name
        signer = self._client._signer
        authorization, self._nonce = signer.sign(
            "GET", self._target, to, self._about_me, ahead_seconds=self._client.ahead_seconds(self._address)
        )
        headers = {"Host": self._address, "Authorization": authorization}
        if self._about_me:
            headers[ME] = self._about_me
        return encode_head(f"GET {self._target} HTTP/1.1", headers)

    def _judge(self, answer: Answer) -> int:
        """How long the body may be, before a byte of it is received or memory is taken for it. Raises WireError."""
        if answer.status != 200:
            most = 0
        elif self._into is not None:
            if answer.length != len(self._into):
                raise _lies(self._member, f"{answer.length} bytes of a chunk of {len(self._into)}")
            most = answer.length
        else:
            most = self._most
        if answer.length > most:
            raise WireError(f"a body of {answer.length} bytes, {most} may be")
        return answer.length

    async def _wait(self, link: Link) -> None:
        """Wait for the answer: its first byte, then no window of time in which too little comes."""
        window = congestion.WINDOW_SECONDS
        enough = max(1, int(window * congestion.BYTES_PER_SECOND_MIN))
        patience, had = self._patience_seconds, -1
        while not link.is_done():
            await link.changed(patience)
            if link.is_done():
                return
            if not link.has_head or (had >= 0 and link.done_bytes - had < enough):
                what = "too little of its answer comes" if link.has_head else "it does not answer"
                raise _broken(self._member, f"{what} in {patience:g} s", too_slow=True)
            patience, had = window, link.done_bytes

    def _check_proof(self, answer: Answer, body: memoryview) -> None:
        if answer.status in (400, 401, 405) and TIME not in answer.headers:
            return
        said = None if self._into is not None and answer.status == 200 else body
        if not self._client._signer.is_proven(self._nonce, answer.status, answer.headers, said):
            raise denied("its answer is not proven to be of a member", _name(self._member))

    def _learn_clock(self, answer: Answer) -> None:
        ahead = self._client._signer.ahead_seconds(answer.headers) if answer.status == 401 else None
        if ahead is not None:
            self._client.learn_clock(self._address, ahead)
            raise _OtherClock

    def _check_status(self, answer: Answer) -> None:
        if answer.status == 200:
            return
        name = _name(self._member)
        if answer.status == 404:
            raise ObjectNotFoundError(f"peer {name} does not have it", tier=Tier.PEER, peer=name)
        if answer.status == 503:
            after = answer.headers.get("retry-after", "1")
            seconds = min(60.0, float(after)) if after.isdecimal() else 1.0
            raise PeerBusyError(
                f"peer {name} serves as much as it may", tier=Tier.PEER, peer=name, retry_after_seconds=seconds
            )
        if answer.status == 401:
            raise denied("it refuses the request", name)
        raise _broken(self._member, f"HTTP {answer.status}")


def _name(member: Member | str) -> str:
    return member if isinstance(member, str) else member.name


def _broken(member: Member | str, reason: str, **context: object) -> PeerError:
    name = _name(member)
    return PeerError(
        f"peer {name}: {reason}", hint="Another holder, or the store, has it too", tier=Tier.PEER, peer=name, **context
    )


def _lies(member: Member | str, what: str) -> TierckptError:
    name = _name(member)
    return IntegrityError(
        f"peer {name} gives other bytes: {what}",
        hint="They are not used. `tierckpt verify --read-data` on that node says what is damaged there",
        tier=Tier.PEER,
        peer=name,
    )
