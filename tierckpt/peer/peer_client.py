"""Client for one peer: one request at a time per connection, chunks received directly into the caller's memory.

An answer is used only if it is proven to come from a member (auth.py) and has exactly the expected length, and a chunk
its digest. It follows no redirect, decompresses no data, and sends requests only to addresses of the member list. Every
wait has a deadline, and a malformed answer closes the connection.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass

from ..cache.partial_entry import same_digest
from ..config import Settings
from ..errors import IntegrityError, ObjectNotFoundError, PeerBusyError, PeerError, TierckptError
from ..format.manifest import digest_of
from ..stores import get_concurrency
from ..stores.http_client import Call, Connections, HttpError, Response, TlsError, TooSlow
from ..types import Json, Tier
from .auth import Signer, denied, read_secret, tls_context
from .membership import Member, is_plain_address
from .peer_http import (
    DIGEST,
    HELD,
    JSON_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    ME,
    TIME,
    ChunkReport,
    WireError,
    chunk_target,
    encode_head,
    held_target,
    host_and_port,
    hub_target,
    parse_json,
    parse_response,
)

CONNECT_SECONDS = 2.0
FIRST_BYTE_SECONDS = 5.0
IDLE_MAX = 8
CONNECTIONS_MAX = 256
CLOCKS_MAX = 8192


@dataclass(frozen=True, slots=True)
class ChunkAnswer:
    digest: str
    held: ChunkReport


class PeerClient:
    """Sends requests to peers in the name of ``me``. Use a client on one event loop only, and close it."""

    def __init__(self, settings: Settings, me: Member | str) -> None:
        """Raises ConfigError: the secret or the certificates cannot be used."""
        self.signer = Signer(read_secret(settings), me if isinstance(me, str) else me.name)
        self.tls = tls_context(settings, ssl.PROTOCOL_TLS_CLIENT)
        self._connections = Connections("peer", CONNECTIONS_MAX, IDLE_MAX)
        self._ahead: dict[str, float] = {}

    def learn_clock(self, address: str, ahead_seconds: float) -> None:
        if address not in self._ahead and len(self._ahead) >= CLOCKS_MAX:
            self._ahead.clear()
        self._ahead[address] = ahead_seconds

    def ahead_seconds(self, address: str) -> float:
        return self._ahead.get(address, 0.0)

    async def close(self) -> None:
        self._connections.abort()

    # --- requests ------------------------------------------------------------------------------------------------

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

        After this returns, raises or is cancelled, nothing writes to ``into``.

        Args:
            expected: digest from the manifest. '': the peer's digest is checked.
            after: the peer reports its list of chunks from this line.
            wait_seconds: maximum wait of the peer for the chunk to arrive, at most 10.

        Raises:
            ObjectNotFoundError: the peer does not have it. PeerBusyError: it has, and serves too many others.
            IntegrityError: wrong bytes, or a wrong number of bytes.
            PeerError: no answer, an invalid one, or a slow one.
            PermissionDeniedError: the peer does not accept us as a member.
        """
        target = chunk_target(version, chunk_size_bytes, ordinal, after, wait_seconds)
        patience, what = FIRST_BYTE_SECONDS + wait_seconds, f"chunk {ordinal} of {version}"
        digest, answer = await self._bytes(member, target, into, what, patience, expected=expected)
        try:
            return ChunkAnswer(digest, ChunkReport.of_header(answer.headers.get(HELD, "")))
        except WireError as error:
            raise _broken(member, str(error)) from None

    async def segment(self, member: Member, segment_id: str, start: int, into: memoryview) -> None:
        """Receive a range of a segment of a gradient log, with frames that have digests. Raises as ``chunk``."""
        target = f"/v1/segment/{segment_id}/{start}/{len(into)}"
        await self._bytes(member, target, into, target)

    async def hub_range(
        self,
        member: Member,
        uri: str,
        start: int,
        into: memoryview,
        patience_seconds: float = FIRST_BYTE_SECONDS,
        *,
        reads: bool = True,
    ) -> str:
        """Receive a range of a file of a Hub, which the peer fetches if ``reads``. Returns its digest.

        Raises as ``chunk``. PeerBusyError: the peer is fetching it.
        """
        target = hub_target(uri, start, len(into), reads)
        digest, _ = await self._bytes(member, target, into, target, patience_seconds)
        return digest

    async def _bytes(
        self,
        member: Member,
        target: str,
        into: memoryview,
        what: str,
        patience_seconds: float = FIRST_BYTE_SECONDS,
        *,
        expected: str = "",
    ) -> tuple[str, Response]:
        answer, _ = await self._ask(member, target, into=into, patience_seconds=patience_seconds)
        digest = await asyncio.to_thread(digest_of, into)
        if not same_digest(into, digest, expected or answer.headers.get(DIGEST, "")):
            raise _lies(member, f"{what} is not as {'saved' if expected else 'announced'}")
        return digest, answer

    async def chunk_report(
        self, member: Member, version: str, chunk_size_bytes: int, *, after: int = 0, interested: bool = False
    ) -> ChunkReport:
        """Return the peer's report for a version, from line ``after`` of its list. Raises as ``chunk``."""
        body = await self._json(member, held_target(version, chunk_size_bytes, after, interested))
        try:
            return ChunkReport.of_json(body)
        except WireError as error:
            raise _broken(member, str(error)) from None

    async def report_slow(self, member: Member, version: str) -> None:
        """Report to the peer that it serves a version far slower than others. Raises as ``chunk``."""
        await self._json(member, f"/v1/slow/{version}")

    async def members(self, member: Member | str, me: Json | None = None) -> Json:
        """Send the row ``me``; return the peer's members. Raises as ``chunk``."""
        about = json.dumps(me, separators=(",", ":")) if me is not None else ""
        return await self._json(member, "/v1/members", about_me=about)

    async def manifest(self, member: Member, uri: str) -> bytes:
        """Return the manifest committed at ``uri``, not decoded, perhaps outdated. Raises as ``chunk``."""
        return await self._body(member, f"/v1/manifest/{digest_of(uri.encode())}", MANIFEST_BYTES_MAX)

    async def steps(self, member: Member, uri: str) -> dict[str, str]:
        """Return names and attempts of the checkpoints committed below ``uri``."""
        body = await self._json(member, f"/v1/steps/{digest_of(uri.encode())}")
        steps = body.get("steps")
        if not isinstance(steps, dict) or not all(isinstance(one, str) for one in steps.values()):
            raise _broken(member, "an invalid list of steps")
        return steps

    async def status(self, member: Member) -> Json:
        return await self._json(member, "/v1/status")

    async def fresh(self, member: Member) -> Json:
        return await self._json(member, "/v1/fresh")

    async def drains(self, member: Member) -> Json:
        return await self._json(member, "/v1/drains")

    # --- transport -----------------------------------------------------------------------------------------------

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
    ) -> tuple[Response, memoryview]:
        address = member if isinstance(member, str) else member.address
        if not is_plain_address(address):
            raise PeerError(f"{address!r:.100} is not a valid peer address", tier=Tier.PEER)
        for is_last in (False, True):
            call = _PeerCall(self, member, address, target, into, most, about_me, patience_seconds)
            body = await self._connections.run(call)
            if call.answer.status == 200:
                return call.answer, body
            ahead = self.signer.ahead_seconds(call.answer.headers) if call.answer.status == 401 else None
            if ahead is None or is_last:
                raise _refusal(member, call.answer)
            self.learn_clock(address, ahead)
        raise AssertionError("unreachable")


@dataclass(eq=False)
class _PeerCall(Call):
    connect_seconds = CONNECT_SECONDS
    _client: PeerClient
    _member: Member | str
    _address: str
    _target: str
    _into: memoryview | None
    _most: int
    _about_me: str
    head_seconds: float

    def __post_init__(self) -> None:
        super().__init__()
        self.host, self.port = host_and_port(self._address)
        self.tls = self._client.tls
        self.window_seconds = get_concurrency.WINDOW_SECONDS
        self.enough_bytes = max(1, int(get_concurrency.WINDOW_SECONDS * get_concurrency.BYTES_PER_SECOND_MIN))
        self._nonce = ""

    def head(self) -> bytes:
        to = "" if isinstance(self._member, str) else self._member.name
        ahead_seconds = self._client.ahead_seconds(self._address)
        signer = self._client.signer
        authorization, self._nonce = signer.sign("GET", self._target, to, self._about_me, ahead_seconds=ahead_seconds)
        headers = {"Host": self._address, "Authorization": authorization}
        if self._about_me:
            headers[ME] = self._about_me
        return encode_head(f"GET {self._target} HTTP/1.1", headers)

    def parse(self, head: bytes) -> Response:
        return parse_response(head)

    def judge(self, answer: Response) -> memoryview:
        if answer.status == 200 and self._into is not None:
            if answer.length != len(self._into):
                raise _lies(self._member, f"{answer.length} bytes of a chunk of {len(self._into)}")
            return self._into
        most = self._most if answer.status == 200 else 0
        if answer.length > most:
            raise WireError(f"a body of {answer.length} bytes, {most} may be")
        return memoryview(bytearray(answer.length))

    def check(self, answer: Response, body: memoryview) -> None:
        if answer.status in (400, 401, 405) and TIME not in answer.headers:
            return
        said = None if self._into is not None and answer.status == 200 else body
        if not self._client.signer.is_proven(self._nonce, answer.status, answer.headers, said):
            raise denied("its answer is not proven to be of a member", _name(self._member))

    def failure(self, error: HttpError) -> Exception:
        if isinstance(error, TlsError):
            return denied(str(error), _name(self._member))
        return _broken(self._member, str(error), **({"too_slow": True} if isinstance(error, TooSlow) else {}))


def _refusal(member: Member | str, answer: Response) -> TierckptError:
    name = _name(member)
    if answer.status == 404:
        return ObjectNotFoundError(f"peer {name} does not have it", tier=Tier.PEER, peer=name)
    if answer.status == 503:
        after = answer.headers.get("retry-after", "1")
        seconds = min(60.0, float(after)) if after.isdecimal() else 1.0
        return PeerBusyError(f"peer {name} is busy", tier=Tier.PEER, peer=name, retry_after_seconds=seconds)
    if answer.status == 401:
        return denied("it refuses the request", name)
    return _broken(member, f"HTTP {answer.status}")


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
        f"peer {name} sent wrong bytes: {what}",
        hint="They are not used. `tierckpt verify --read-data` on that node names the damaged files",
        tier=Tier.PEER,
        peer=name,
    )
