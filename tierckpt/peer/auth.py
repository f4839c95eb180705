"""Authenticates requests between peers, and their answers.

With a secret, each request carries an HMAC-SHA256 (RFC 2104) over its target, sender, receiver, expiry and a nonce;
each answer carries one over that nonce and its content. Only TLS hides the bytes from an attacker on the network
path. A request with the wrong time gets a proven answer with the node's time, and the client repeats it with that.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..config import Settings
from ..errors import ConfigError, PermissionDeniedError
from ..types import Buffer, Tier
from .membership import is_loopback
from .peer_http import DIGEST, HELD, ME, PROOF, TIME, host_and_port

LIFETIME_SECONDS = 30.0
EXPIRY_SECONDS_MAX = 60.0
NONCES_MAX = 1 << 18
"""Limit per minute, so that each replay can be detected."""
SECRET_BYTES_MIN = 16

_SCHEME = "Tierckpt"
_FIELDS = re.compile(
    r"Tierckpt name=(?P<name>[A-Za-z0-9._:-]{1,128}); to=(?P<to>[A-Za-z0-9._:-]{0,128}); "
    r"expires=(?P<expires>\d{1,12}); nonce=(?P<nonce>[0-9a-f]{32}); mac=(?P<mac>[0-9a-f]{64})"
)


class RejectedRequest(Exception):
    """A request that gets no answer. The reason is for our own log, never for the sender."""


class OtherTime(RejectedRequest):
    """A member's request with another time than ``now``."""

    def __init__(self, nonce: str, now: float) -> None:
        super().__init__("a proof of another time")
        self.nonce, self.now = nonce, now


class Crowded(Exception):  # not an error: the sender is a member
    """There are too many requests in this minute."""

    def __init__(self, nonce: str) -> None:
        super().__init__("too many requests to tell replays")
        self.nonce = nonce


def read_secret(settings: Settings) -> bytes | None:
    """Return the secret. Raises ConfigError: too short, missing, or in a file that others can read."""
    if settings.peer_secret_file is None:
        return None
    secret = _read_private(settings.peer_secret_file)
    if len(secret) < SECRET_BYTES_MIN:
        raise ConfigError(
            f"the peers' secret is shorter than {SECRET_BYTES_MIN} bytes",
            hint="`openssl rand -hex 32` makes a good one",
        )
    return secret


def _read_private(path: Path) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"peer_secret_file {path} cannot be read: {error.strerror}") from None
    with os.fdopen(file, "rb") as stream:
        status = os.fstat(stream.fileno())
        # A Kubernetes secret belongs to root; a pod's user reads it by its fsGroup (mode 0440).
        others = 0o037 if status.st_uid == 0 and os.geteuid() != 0 else 0o077
        if status.st_mode & others or status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"peer_secret_file {path} is not its owner's alone",
                hint=f"chmod 600 {path}, and own it",
                path=str(path),
            )
        return stream.read(4096).strip()


def check_listen(settings: Settings) -> tuple[str, int]:
    """Raises ConfigError: beyond loopback without authentication."""
    host, port = host_and_port(settings.peer_listen)
    is_alone = is_loopback(host) or host == "localhost"
    if not (is_alone or read_secret(settings) is not None or settings.peer_tls_dir is not None):
        raise ConfigError(
            f"peers on {host} would be served without authentication",
            hint="Set peer_secret_file (the same on all nodes) or peer_tls_dir, or listen on 127.0.0.1",
        )
    return host, port


def tls_context(settings: Settings, side: int) -> ssl.SSLContext | None:
    """Return a context that requires the authority's certificate, of a client also for the address; None without."""
    directory = settings.peer_tls_dir
    if directory is None:
        return None
    context = ssl.SSLContext(side)  # both sides require a certificate
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    try:
        context.load_verify_locations(cafile=str(directory / "ca.crt"))
        context.load_cert_chain(str(directory / "tls.crt"), str(directory / "tls.key"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the peers' certificates in {directory} cannot be used: {type(error).__name__}: {error}",
            hint="peer_tls_dir has tls.crt, tls.key (of this node) and ca.crt (of all)",
        ) from None
    return context


def steady_clock() -> Callable[[], float]:
    begun = time.time() - boot_seconds()
    return lambda: begun + boot_seconds()


def boot_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Signer:
    def __init__(self, secret: bytes | None, name: str) -> None:
        self._secret, self.name = secret, name
        self.clock = steady_clock()

    def sign(
        self, method: str, target: str, to: str, about_me: str = "", *, ahead_seconds: float = 0.0
    ) -> tuple[str, str]:
        nonce = secrets.token_hex(16)
        expires = str(max(0, int(self.clock() + ahead_seconds + LIFETIME_SECONDS)))
        mac = _mac(self._secret, "request", method, target, "", about_me, self.name, to, expires, nonce)
        return f"{_SCHEME} name={self.name}; to={to}; expires={expires}; nonce={nonce}; mac={mac}", nonce

    def is_proven(self, nonce: str, status: int, headers: Mapping[str, str], body: Buffer | None) -> bool:
        """True if the sender has the secret. A chunk has a digest instead of ``body``."""
        if self._secret is None:
            return True
        return hmac.compare_digest(
            headers.get(PROOF, "").encode(), response_proof(self._secret, nonce, status, headers, body).encode()
        )

    def ahead_seconds(self, headers: Mapping[str, str]) -> float | None:
        time_text = headers.get(TIME, "")
        return (
            int(time_text) - self.clock() if re.fullmatch(r"\d{1,12}", time_text) and self._secret is not None else None
        )


class Verifier:
    """Decides whether a request is a member's, for this node, current, and no replay."""

    def __init__(self, secret: bytes | None, name: str) -> None:
        self._secret, self._name, self.clock = secret, name, steady_clock()
        self._nonces: dict[bytes, int] = {}
        """Nonces of requests, until these expire."""
        self._forget_at = self.clock()

    def check(self, method: str, target: str, headers: Mapping[str, str]) -> tuple[str, str]:
        """Return the sender's name and the nonce of the request. Raises RejectedRequest; Crowded.

        Only a request for the list of members may lack the receiver's name.
        """
        match = _FIELDS.fullmatch(headers.get("authorization", ""))
        if match is None:
            raise RejectedRequest("no proof")
        name, to, expires, nonce = match["name"], match["to"], match["expires"], match["nonce"]
        if self._secret is None:
            return name, nonce
        signed = (method, target, headers.get("range", ""), headers.get(ME, ""), name, to, expires, nonce)
        expected = _mac(self._secret, "request", *signed)
        if not hmac.compare_digest(expected, match["mac"]):
            raise RejectedRequest("a wrong proof")
        if to != self._name and (to or target != "/v1/members"):
            raise RejectedRequest("a proof for another node")
        now = self.clock()
        if not now < int(expires) <= now + EXPIRY_SECONDS_MAX:
            raise OtherTime(nonce, now)
        self._once(bytes.fromhex(nonce), int(expires), now)
        return name, nonce

    def _once(self, nonce: bytes, expires: int, now: float) -> None:
        """Record a nonce while its proof is valid. The clock never goes back, so a forgotten one stays expired."""
        if now >= self._forget_at:
            self._nonces = {known: until for known, until in self._nonces.items() if until > now}
            self._forget_at = now + LIFETIME_SECONDS
        if nonce in self._nonces:
            raise RejectedRequest("a proof that was used before")
        if len(self._nonces) >= NONCES_MAX:
            raise Crowded(nonce.hex())
        self._nonces[nonce] = expires

    def prove(self, nonce: str, status: int, headers: Mapping[str, str], body: Buffer | None) -> dict[str, str]:
        return {} if self._secret is None else {PROOF: response_proof(self._secret, nonce, status, headers, body)}


def response_proof(secret: bytes, nonce: str, status: int, headers: Mapping[str, str], body: Buffer | None) -> str:
    found = hashlib.sha256(body).hexdigest() if body is not None else ""
    lower = {name.lower(): value for name, value in headers.items()}
    said = (lower.get(DIGEST, ""), lower.get(HELD, ""), lower.get("content-length", ""))
    time_header = (lower[TIME],) if TIME in lower else ()
    return _mac(secret, "answer", nonce, str(status), *said, found, *time_header)


def denied(reason: str, name: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"peer {name} does not take this node for a member: {reason}",
        hint="All nodes need the same secret (peer_secret_file), or certificates of one authority",
        tier=Tier.PEER,
        peer=name,
    )


def _mac(secret: bytes | None, *fields: str) -> str:
    """Fields hold no line feed: each comes from a parsed head, or is our own."""
    if secret is None:
        return "0" * 64
    return hmac.new(secret, "\n".join(("tierckpt-peer-1", *fields)).encode(), hashlib.sha256).hexdigest()
