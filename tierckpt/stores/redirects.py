"""Where a redirect may lead: nowhere but to the hosts of the store, when requests carry what others could use.

The object-store library follows redirects, and has no option not to. On its way to another host it leaves out the
Authorization header, and no more: S3's session token goes along (``x-amz-security-token``), and so does a URL that is
signed (``Referer``). But it can send all but some hosts to a proxy, and nothing answers at that one.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final

from .credentials import Access
from .http_range import is_behind_proxy

NOWHERE: Final = "http://127.0.0.1:0"
"""No port of TCP: to connect to it fails at once."""


def bounds(access: Access) -> dict[str, str]:
    """Options for the library's client. {}: it may follow where it is led, as nothing of use to others goes along.

    On this machine each port is another server: there the endpoint itself is the proxy, so that it alone is ever asked.
    Behind a proxy of the site's (HTTPS_PROXY) nothing can be said: that one has to know where requests may go.
    """
    if not access.hosts or is_behind_proxy(access.endpoint or f"https://{access.hosts[0]}"):
        return {}
    if access.endpoint.startswith("http://") and is_this_machine(access.hosts[0]):
        return {"proxy_url": access.endpoint}
    return {"proxy_url": NOWHERE, "proxy_excludes": ",".join(access.hosts)}


def is_this_machine(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
