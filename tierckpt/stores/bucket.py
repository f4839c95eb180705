"""A bucket's clients, connections and credentials, shared by all stores of a mover."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ..errors import ConfigError, PermissionDeniedError, TierckptError
from ..redaction import printable
from ..telemetry import logger
from .access import Access, azure_access, drop_empty, gcs_access
from .aws import fetch_region, regions, s3_access
from .base import to_completion
from .obstore_errors import error_code, first_line, http_status, still_refused
from .obstore_module import Module
from .proxies import UNREACHABLE_PROXY, client_options, is_this_machine, proxy_for
from .signed_requests import Ranges

if TYPE_CHECKING:
    import obstore
    from obstore import exceptions as obstore_errors
    from obstore.store import AzureStore, GCSStore, S3Store

    Client: TypeAlias = S3Store | AzureStore | GCSStore
else:
    obstore, obstore_errors = Module(), Module("exceptions")
    Client = Any

log = logger("stores.bucket")

CONNECT_TIMEOUT_SECONDS = 5.0
RENEWAL_SECONDS_MIN: Final = 10.0
"""A key without delete permission causes no credential lookup per delete."""

_OF_REGIONS: Final = {"", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "SignatureDoesNotMatch"}
_ACCESS = {"s3": s3_access, "az": azure_access, "gs": gcs_access}
_CLASSES = {"s3": "S3Store", "az": "AzureStore", "gs": "GCSStore"}
_classes = Module("_store")


class Bucket:
    """One event loop at a time. Credentials are read off the loop, for the first client and by ``renew``."""

    def __init__(self, scheme: str, authority: str, counts: Counter[str]) -> None:
        self._counts = counts
        self.scheme = scheme
        self.authority = authority
        self.name = f"{scheme}://{authority}"
        self.endpoint = ""
        self.exists = False
        self.ranges = Ranges()
        self.generation = 0
        """Number of credentials so far: the first of many refused requests renews them."""
        self.is_proven = False
        """Only once the server has accepted the credentials can a refusal mean expiry."""
        self._renewed_at = -RENEWAL_SECONDS_MIN
        self._has_asked_region = False
        self._lock = asyncio.Lock()
        self._access: Access | None = None
        self._clients: dict[tuple[int, float], Client] = {}

    async def client(self, part_retries: int, timeout_seconds: float) -> Client:
        key = (part_retries, timeout_seconds)
        if key not in self._clients:
            async with self._lock:
                if key not in self._clients:
                    self._clients[key] = await to_completion(asyncio.to_thread(self._open, *key))
        return self._clients[key]

    def _open(self, part_retries: int, timeout_seconds: float) -> Client:
        if self._access is None:
            self._access = self._look_up()
            self.ranges.trust(self._access.trusted)
        self.endpoint = self._access.endpoint
        timeout = timedelta(seconds=timeout_seconds)
        try:
            client: Client = getattr(_classes, _CLASSES[self.scheme])(
                self.authority,
                config=self._access.options,
                client_options={
                    "allow_http": self.endpoint.startswith("http://"),
                    "timeout": timeout,
                    "connect_timeout": min(timeout, timedelta(seconds=CONNECT_TIMEOUT_SECONDS)),
                    **redirect_bounds(self._access),
                    **({"root_certificate": self._access.trusted} if self._access.trusted else {}),
                },
                retry_config={"max_retries": part_retries, "retry_timeout": timeout},
                credential_provider=self._access.provider,
            )
        except (obstore_errors.BaseError, ValueError) as error:
            raise ConfigError(
                f"cannot open {self.name}: {first_line(error)}", hint="Check the environment variables of this cloud"
            ) from printable(error)
        return client

    def _look_up(self) -> Access:
        drop_empty()
        return _ACCESS[self.scheme](self.authority)

    @property
    def sources(self) -> Mapping[str, str]:
        """Each setting of the credentials, and its source. No secret."""
        return self._access.sources if self._access is not None else {}

    async def follow_region(self, generation: int, error: Exception) -> bool:
        """Look up the bucket's region, once, if ``error`` may mean a wrong one."""
        if self.scheme != "s3" or not _may_be_elsewhere(error):
            return False
        async with self._lock:
            if generation != self.generation:
                return True
            if self._has_asked_region or self._access is None:
                return False
            self._has_asked_region = True
            region = await to_completion(asyncio.to_thread(fetch_region, self.authority, self._access))
            if region in ("", self._access.options["region"]):
                return False
            regions[self._access.endpoint, self.authority] = region
            self._access = None
            self.generation += 1
            self._clients.clear()
        log.info("%s is in region %s: set AWS_REGION to save a request", self.name, region)
        return True

    async def renew(self, generation: int, refusal: PermissionDeniedError) -> bool:
        """Replace refused credentials of ``generation``. True if newer ones exist."""
        async with self._lock:
            if generation != self.generation:
                return True
            if not self.is_proven or self._access is None:
                return False
            if time.monotonic() < self._renewed_at + RENEWAL_SECONDS_MIN:
                return False
            self._renewed_at = time.monotonic()
            try:
                newer = await to_completion(asyncio.to_thread(self._look_up))
            except TierckptError as error:
                raise still_refused(refusal) from error
            if newer.keys and newer.keys == self._access.keys:  # requests would be refused again
                if refusal.context.get("code") != "AccessDenied":  # which a server gives to keys that it knows
                    raise still_refused(refusal) from refusal
                return False
            self._access, self.is_proven = newer, False
            self.ranges.trust(newer.trusted)
            self.generation += 1
            self._clients.clear()
        self._counts["credentials_renewed"] += 1
        log.warning("%s no longer takes our credentials: going on with newer ones", self.name)
        return True

    def note_accepted(self, generation: int) -> None:
        self.is_proven |= generation == self.generation

    def reconnect(self) -> None:
        """Running requests keep their client."""
        self._clients.clear()
        self.ranges.connections.close()

    def close(self) -> None:
        self.reconnect()
        self._access = None


def redirect_bounds(access: Access) -> dict[str, str]:
    """Client options for the proxy, if any, that also restrict redirects to the store's hosts.

    The object-store library always follows redirects, and would leak S3's session token or a signed URL (``Referer``).
    But it can send all except some hosts to a proxy, here one that does not answer; on this machine, where each port is
    another server, to the endpoint. A site's proxy (HTTPS_PROXY) must restrict hosts itself.
    """
    if not access.hosts or proxy_for(access.endpoint or f"https://{access.hosts[0]}") is not None:
        return client_options(access.endpoint)
    if access.endpoint.startswith("http://") and is_this_machine(access.hosts[0]):
        return {"proxy_url": access.endpoint}
    return {"proxy_url": UNREACHABLE_PROXY, "proxy_excludes": ",".join(access.hosts)}


def _may_be_elsewhere(error: Exception) -> bool:
    """True for S3 errors of a bucket in another region; a HEAD response has no code."""
    if "without LOCATION" in first_line(error) or http_status(error) in {301, 302, 307, 308}:
        return True
    return http_status(error) in {400, 403} and error_code(error) in _OF_REGIONS
