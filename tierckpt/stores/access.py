"""Access: how a bucket is reached, resolved once and passed to the client explicitly.

Missing credentials are found before the first request: left to itself a client asks the instance metadata service,
which on a machine that has none costs minutes and ends in a timeout that names nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigError, PermissionDeniedError
from .environment import Found, variable

METADATA_TIMEOUT_SECONDS = 1.0
METADATA_ADDRESSES = {
    "s3": ("169.254.169.254", 80),
    "az": ("169.254.169.254", 80),
    "gs": ("metadata.google.internal", 80),
}
"""Where each cloud's machines find their own role."""

_ROLE_PATH = "/latest/meta-data/iam/security-credentials/"


@dataclass(frozen=True, slots=True)
class Access:
    """``options`` and ``provider`` go to the client as they are; ``endpoint`` is '' for the cloud's own.

    ``keys`` tells plain keys from newer ones (a digest of them); '' when a service issues the credentials, so that
    asking again may always bring newer ones.
    """

    endpoint: str
    options: dict[str, Any] = field(repr=False)
    provider: Callable[[], dict[str, Any]] | None = None
    keys: str = ""
    hosts: tuple[str, ...] = ()
    """Hosts (with their subdomains) that requests may reach, because they carry credentials. (): the client drops all
    credentials by itself when it follows a redirect."""
    trusted: str = field(default="", repr=False)
    """PEM certificates that are trusted in addition to the system's."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """For people: each setting with its source. No secret."""

    def is_newer_than(self, other: Access) -> bool:
        """True when requests that ``other`` was refused may pass with this one."""
        return not self.keys or self.keys != other.keys


def host_of(url: str) -> str:
    return urlsplit(url).hostname or ""


def digest(*values: str) -> str:
    return hashlib.sha256("\0".join(values).encode()).hexdigest() if any(values) else ""


def check_endpoint(endpoint: Found) -> str:
    try:
        is_url = endpoint.startswith(("http://", "https://")) and bool(host_of(endpoint)) and endpoint.isascii()
        _ = urlsplit(endpoint).port  # raises when it is no number
    except ValueError:
        is_url = False
    if not is_url or " " in endpoint:
        raise ConfigError(
            f"{endpoint.source}={str(endpoint)!r} is not a URL", hint="Write http://HOST:PORT or https://HOST"
        )
    return endpoint.rstrip("/")


def no_credentials(uri: str, endpoint: str, hint: str) -> PermissionDeniedError:
    return PermissionDeniedError(f"no credentials found for {uri}", hint=hint, uri=uri, endpoint=endpoint or None)


def metadata_service_answers(scheme: str) -> bool:
    """Return True on a cloud machine with a role. Elsewhere that address does not answer.

    The role itself is requested of AWS: on a machine without one the client takes the service's 404 for the bucket's.
    """
    if variable("AWS_EC2_METADATA_DISABLED").is_true:
        return False
    host, port = METADATA_ADDRESSES[scheme]
    connection = HTTPConnection(host, port, timeout=METADATA_TIMEOUT_SECONDS)
    try:
        connection.connect()
        if scheme != "s3":
            return True
        connection.request("PUT", "/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        answer = connection.getresponse()
        token = answer.read().decode("latin-1").strip()
        headers = {"X-aws-ec2-metadata-token": token} if answer.status == 200 else {}
        connection.request("GET", _ROLE_PATH, headers=headers)
        return connection.getresponse().status == 200
    except (OSError, HTTPException, ValueError):
        return False
    finally:
        connection.close()
