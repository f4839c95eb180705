"""The proxy of a request, by ``HTTP_PROXY``, ``HTTPS_PROXY``, ``ALL_PROXY`` and ``NO_PROXY``, read once.

The variables work as in curl (docs/guide/errors.md). In a CGI script, ``HTTP_PROXY`` is a header of its client, and not
read (RFC 3875, 4.1.18). Link-local addresses, the clouds' metadata services, are never reached by a proxy.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import ssl
import urllib.request
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPResponse
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from ..errors import ConfigError

METADATA: Final = ("169.254.0.0/16", "fe80::/10", "fd00:ec2::/32", "metadata.google.internal")
UNREACHABLE_PROXY: Final = "http://127.0.0.1:0"
"""Not a TCP port: connecting fails at once."""
NO_PROXY_ALL: Final = "*,0.0.0.0/0,::/0"
"""obstore's ``*`` matches names but no addresses."""
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Proxy:
    url: str
    variable: str

    @property
    def address(self) -> str:
        return urlsplit(self.url).netloc.rpartition("@")[2]

    @property
    def name(self) -> str:
        return f"the proxy {self.address} ({self.variable})"

    @property
    def authorization(self) -> str:
        parts = urlsplit(self.url)
        if not parts.username:
            return ""
        plain = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return f"Basic {base64.b64encode(plain.encode()).decode()}"


def proxy_for(url: str) -> Proxy | None:
    """Raises ConfigError: not an HTTP proxy."""
    parts = urlsplit(url)
    found = _configured(parts.scheme)
    host, port = parts.hostname or "", _port(parts)
    if found is None or any(_matches(entry, host, port) for entry in (*METADATA, *_excluded())):
        return None
    return _checked(*found)


def client_options(endpoint: str) -> dict[str, str]:
    """Options that make an obstore client use these proxies, and read no variable itself."""
    scheme = endpoint.partition("://")[0] or "https"
    found = _configured(scheme) or _configured("https")
    is_excluded = bool(endpoint) and proxy_for(endpoint) is None
    names = [name for name, port in map(_entry, _excluded()) if port is None]
    if found is None or "*" in names:
        return {"proxy_url": UNREACHABLE_PROXY, "proxy_excludes": NO_PROXY_ALL}
    host = urlsplit(endpoint).hostname or ""
    excluded = [*METADATA, *names, *([host] if is_excluded else [])]
    if not is_this_machine(host):
        excluded += ["localhost", "127.0.0.0/8", "::1"]
    return {"proxy_url": _checked(*found).url, "proxy_excludes": ",".join(excluded)}


def is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def routed(request: urllib.request.Request) -> urllib.request.Request:
    proxy = proxy_for(request.full_url)
    if proxy is None:
        return request
    if not proxy.url.startswith("http://"):
        raise ConfigError(
            f"{proxy.name} takes TLS, and these requests are sent to a proxy in plain HTTP only",
            hint=f"Set {proxy.variable} to http://HOST:PORT",
        )
    if proxy.authorization:
        request.add_unredirected_header("Proxy-authorization", proxy.authorization)
    request.set_proxy(proxy.address, "http")
    return request


class AnyStatus(urllib.request.HTTPErrorProcessor):
    """Returns every response. The caller follows redirects, and knows which hosts may get a token."""

    def http_response(self, request: urllib.request.Request, response: HTTPResponse) -> HTTPResponse:
        return response

    https_response = http_response


@lru_cache(maxsize=8)
def direct_opener(tls: ssl.SSLContext) -> urllib.request.OpenerDirector:
    """Return one opener per context: openers form reference cycles."""
    direct = urllib.request.ProxyHandler({})
    return urllib.request.build_opener(direct, urllib.request.HTTPSHandler(context=tls), AnyStatus)


def _configured(scheme: str) -> tuple[str, str] | None:
    for name in (f"{scheme}_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            value = os.environ.get(variable, "").strip()
            if value and not (variable == "HTTP_PROXY" and "REQUEST_METHOD" in os.environ):
                return variable, value
    return None


def _checked(variable: str, value: str) -> Proxy:
    url = value if "://" in value else f"http://{value}"
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_http = False
    if not is_http:
        kind = url.partition("://")[0]
        raise ConfigError(
            f"{variable} names no HTTP proxy" + (f": {kind}:// is not supported" if kind not in _PORTS else ""),
            hint=f"Set {variable} to http://HOST:PORT, or name the host of the request in NO_PROXY",
        )
    return Proxy(url.rstrip("/"), variable)


def _excluded() -> list[str]:
    text = next((value for name in ("no_proxy", "NO_PROXY") if (value := os.environ.get(name, "").strip())), "")
    return text.replace(",", " ").split()


def _entry(text: str) -> tuple[str, int | None]:
    name, port = text.lower(), ""
    if name.startswith("["):
        name, _, port = name[1:].partition("]")
        port = port.lstrip(":")
    elif name.count(":") == 1:
        name, _, port = name.partition(":")
    if name != "*":
        name = name.removeprefix("*").strip(".")
    return name, int(port) if port.isdecimal() else None


def _matches(entry: str, host: str, port: int | None) -> bool:
    name, only_port = _entry(entry)
    host = host.lower().rstrip(".")
    if not name or (only_port is not None and only_port != port):
        return False
    if name == "*" or host == name or host.endswith(f".{name}"):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False)
    except ValueError:
        return False


def _port(parts: SplitResult) -> int | None:
    try:
        return parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None
