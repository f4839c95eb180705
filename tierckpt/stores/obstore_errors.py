"""Maps obstore's errors (HTTP status, error code) to tierckpt's: 408, 429 and 5xx are ``StoreUnavailableError``.

Only this module reads the text of obstore's wide error type, and only its machine-written parts. A failure that no
retry can fix is ``EndpointError`` (docs/guide/errors.md); an unresolved name of a proven store is an outage.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from ..errors import (
    CapacityError,
    EndpointError,
    IntegrityError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
)
from ..format.layout import Location
from ..redaction import redact
from ..types import Tier
from .base import OddKeyError
from .obstore_module import Module
from .proxies import Proxy, proxy_for

if TYPE_CHECKING:
    from obstore import exceptions as obstore_errors
else:
    obstore_errors = Module("exceptions")


PROBE_SECONDS_MAX: Final = 3.0
SHOWN_MAX: Final = 60
_TITLE = re.compile(r"<title[^>]*>\s*([^<]{1,200}?)\s*</title>", re.IGNORECASE)
_HTML = re.compile(r"\s*(<!--.*?-->\s*)*<(!doctype\s+html|html|head|body)", re.IGNORECASE | re.DOTALL)


def describe_endpoint(endpoint: str) -> str:
    """Return what ``endpoint`` serves instead of a store; '' if unknown. Blocking. Sends no secret."""
    parts = urlsplit(endpoint)
    host, is_tls = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    try:
        if proxy_for(endpoint) is not None:
            return ""
        if is_tls:
            return _without_tls(host, port)
        request = f"GET / HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
        first = _exchange(host, port, request.encode())
        if not first.startswith(b"HTTP/"):
            return _first_line_shown(first) or ("it speaks TLS: write https://" if _speaks_tls(host, port) else "")
        return body_kind(first.partition(b"\r\n\r\n")[2].decode("utf-8", "replace"))
    except (OSError, UnicodeError):
        return ""


def refusal_of_proxy(proxy: Proxy, url: str) -> int | None:
    """Return the status of a proxy that refuses a tunnel, else None. Blocking. Raises OSError."""
    parts, proxy_url = urlsplit(url), urlsplit(proxy.url)
    target = f"{parts.hostname}:{parts.port or 443}"
    connection_type = http.client.HTTPSConnection if proxy_url.scheme == "https" else http.client.HTTPConnection
    connection = connection_type(
        proxy_url.hostname or "", proxy_url.port or (443 if proxy_url.scheme == "https" else 80), timeout=3.0
    )
    try:
        headers = {"Proxy-Authorization": proxy.authorization} if proxy.authorization else {}
        connection.request("CONNECT", target, headers=headers)
        status = connection.getresponse().status
        return None if status < 300 else status
    except http.client.HTTPException as error:
        raise OSError(type(error).__name__) from None
    finally:
        connection.close()


def body_kind(body: str) -> str:
    text = body.strip()
    if _HTML.match(text):
        title = _TITLE.search(text)
        return "it sends an HTML page" + (f" ({title[1][:SHOWN_MAX]!r})" if title else "")
    if text.startswith(("{", "[")):
        return f"it sends JSON ({text[:SHOWN_MAX]})"
    return f"it sends text ({text[:SHOWN_MAX]!r})" if text and not text.startswith("<") else ""


def _without_tls(host: str, port: int) -> str:
    if _speaks_tls(host, port):
        return ""
    first = _exchange(host, port, b"GET / HTTP/1.0\r\n\r\n")
    return "it speaks HTTP without TLS: write http://" if first.startswith(b"HTTP/") else _first_line_shown(first)


def _first_line_shown(first: bytes) -> str:
    line = first.partition(b"\n")[0].decode("latin-1").strip()
    return f"it says {line[:SHOWN_MAX]!r}" if line.isprintable() and line else ""


def _exchange(host: str, port: int, request: bytes) -> bytes:
    with socket.create_connection((host, port), PROBE_SECONDS_MAX) as connection:
        connection.sendall(request)
        found = b""
        with contextlib.suppress(OSError):
            while len(found) < 4096 and (more := connection.recv(4096)):
                found += more
                if not found.startswith(b"HTTP/"):
                    break
        return found


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # sends no data
    try:
        with (
            socket.create_connection((host, port), PROBE_SECONDS_MAX) as connection,
            context.wrap_socket(connection, server_hostname=host),
        ):
            return True
    except OSError:
        return False


ENDPOINT_VARIABLES = {"s3": "AWS_ENDPOINT_URL", "az": "AZURE_STORAGE_ENDPOINT", "gs": "GOOGLE_BASE_URL"}

EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,200})")
_BODY = re.compile(r"non-2xx status code: \d{3}[^:\n]*: (.*)", re.DOTALL)
_TLS = re.compile(
    r"\b(InvalidCertificate|AlertReceived|PeerIncompatible|PeerMisbehaved|InvalidMessage|NoApplicationProtocol|"
    r"NoCertificatesPresented)\b\(?\s*(\w*)"
)
_NO_SUCH_NAME = re.compile(
    r"lookup address information: (Name or service not known|No address associated|Name does not resolve|nodename nor)"
)
_REASON = re.compile(r'(?:message: "|address information: )([\w ]{1,60})"')
_FOREIGN = ("UnexpectedMessage", "InvalidMessage", "IncompleteMessage", "ConnectionReset", "Parse(")
"""Errors from a server with another protocol. A failing store causes some, too."""
_AWS_REGION_CODES = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
}
_FINAL_5XX = {501, 505, 511}
CLOUD_URLS = {
    "s3": "https://s3.amazonaws.com",
    "az": "https://blob.core.windows.net",
    "gs": "https://storage.googleapis.com",
}
AUTHORITY_VARIABLES = {"s3": "AWS_CA_BUNDLE, or SSL_CERT_FILE,", "az": "SSL_CERT_FILE", "gs": "SSL_CERT_FILE"}


def _about(location: Location, key: str | None, endpoint: str) -> tuple[str, dict[str, Any]]:
    """Return the text that names the object or bucket, and the context of its errors."""
    target = location.uri if key is None else f"{location.uri}/{key}"
    return target, {"uri": location.uri, "key": key, "endpoint": endpoint or None, "tier": Tier.SHARED}


def translate(error: Exception, location: Location, key: str | None, endpoint: str, was_proven: bool) -> TierckptError:
    """``key`` None: about the bucket itself. ``was_proven``: the store has answered this process before."""
    target, context = _about(location, key, endpoint)
    status, code = http_status(error), error_code(error)
    if code == "NoSuchUpload":  # completed or aborted by a request with a lost response: a HEAD will tell
        return StoreUnavailableError(
            f"the upload of {target} no longer exists", hint="Try again", status=404, **context
        )
    if is_missing(error):
        return ObjectNotFoundError(f"{target} does not exist", **context)
    if isinstance(error, obstore_errors.AlreadyExistsError):
        if status == 409 and location.scheme == "s3":
            # Another write is running, which may still fail. (For Azure 409 is "exists".)
            return StoreUnavailableError(f"another client is writing {target}", hint="Try again", status=409, **context)
        return PreconditionFailedError(f"{target} exists", **context)
    if isinstance(error, obstore_errors.PreconditionError | obstore_errors.NotModifiedError):
        return PreconditionFailedError(f"{target} has changed", **context)
    if code == "InvalidObjectState":
        return StoreError(
            f"{target} is archived, and cannot be read before it is restored",
            hint="Restore it (`aws s3api restore-object`), wait until that is done, and try again",
            status=status,
            **context,
        )
    if status == 507 or "Quota" in code:
        return CapacityError(
            f"{target} cannot be written: the store is full ({code or f'HTTP {status}'})",
            hint=f"Free space at {endpoint or location.scheme}, or raise the quota of {location.authority!r}",
            **context,
        )
    if code in _AWS_REGION_CODES or "Received redirect without LOCATION" in first_line(error):
        return EndpointError(
            f"{location.scheme}://{location.authority} is in another region than requests are sent to",
            hint="Set AWS_REGION to the region of the bucket, and AWS_ENDPOINT_URL to its endpoint or to nothing",
            code=code or None,
            **context,
        )
    if status == 407:
        return proxy_refused(location, key, endpoint, 407)
    if status is None and (wrong := wrong_endpoint(error, location, key, endpoint, was_proven)) is not None:
        return wrong
    denied = obstore_errors.PermissionDeniedError | obstore_errors.UnauthenticatedError
    if isinstance(error, denied) or status in {401, 403} or code in EXPIRED_CODES:
        return refused(location, key, endpoint, code)
    if isinstance(error, ValueError | obstore_errors.InvalidPathError | obstore_errors.NotSupportedError):
        if "object with invalid path" in str(error):
            return OddKeyError(f"{target}: {first_line(error)}", hint="Rename or remove that object", **context)
        return StoreError(f"{target}: {first_line(error)}", **context)
    if status == 416:
        return IntegrityError(f"{target} is shorter than requested", **context)
    if status in _FINAL_5XX or (status is not None and 400 <= status < 500 and status not in {408, 425, 429}):
        return StoreError(
            f"{target}: the store refuses the request: HTTP {status}{_words(error, code)}",
            hint=f"Is {endpoint} a store of this kind, and does it support this request?" if endpoint else "",
            status=status,
            **context,
        )
    if is_no_xml(error) and not was_proven:
        return wrong_protocol_error(location, key, endpoint, "it sends no XML")
    reason = f"HTTP {status}" if status else _client_reason(error) or first_line(error) or type(error).__name__
    proxy = proxy_for(endpoint or CLOUD_URLS[location.scheme])
    if status is None and proxy is not None:
        hint = f"Does {proxy.name} answer from this node? NO_PROXY names hosts that need none. Try again later"
        return StoreUnavailableError(f"{target} cannot be reached by {proxy.name}: {reason}", hint=hint, **context)
    where = f"Is {ENDPOINT_VARIABLES[location.scheme]}={endpoint} right, and does it answer from this node? "
    hint = f"{where if endpoint else ''}Try again later"
    return StoreUnavailableError(f"{target} cannot be reached: {reason}", hint=hint, **context)


def wrong_endpoint(
    error: Exception, location: Location, key: str | None, endpoint: str, was_proven: bool
) -> EndpointError | None:
    """Return the error for a request without response if a retry would fail as well."""
    failure = _client_failure(error)
    server = endpoint or CLOUD_URLS[location.scheme]
    target, context = _about(location, key, endpoint)
    proxy = proxy_for(server)
    if (found := _TLS.search(failure)) is not None and found[1] != "InvalidMessage":
        return untrusted_error(f"{target} cannot be reached", location.scheme, server, found[1], found[2], **context)
    if _NO_SUCH_NAME.search(failure) and not was_proven:
        if proxy is not None:
            return EndpointError(
                f"{target} cannot be reached: the name of {proxy.name} does not exist",
                hint=f"Correct {proxy.variable}, or name the host of the store in NO_PROXY",
                **context,
            )
        return EndpointError(
            f"{target} cannot be reached: the name of {server} does not exist",
            hint=f"Check {ENDPOINT_VARIABLES[location.scheme]}, and the DNS of this node",
            **context,
        )
    if "unsupported scheme" in failure and proxy is not None:
        return EndpointError(f"{proxy.name} is of a kind that is not supported", hint="Use http://HOST:PORT", **context)
    return None


def untrusted_error(message: str, scheme: str, server: str, kind: str, detail: str, **context: Any) -> EndpointError:
    if kind != "InvalidCertificate":
        return EndpointError(
            f"{message}: no TLS connection to {server} ({kind}{f' {detail}' if detail else ''})",
            hint="The server refuses the protocol, or wants a client certificate, which is not supported",
            **context,
        )
    if "Expired" in detail or "NotValidYet" in detail:
        reason = "has expired" if "Expired" in detail else "is not valid yet"
        hint = "Renew it on the server; check the clock of this node (`date -u`)"
    elif "NotValidForName" in detail:
        reason = "is for another name"
        hint = f"Write a name that it is for in {ENDPOINT_VARIABLES[scheme]}, or correct the certificate"
    elif detail == "Revoked":
        reason, hint = "is revoked", "Renew it on the server"
    else:
        reason = "is signed by no authority that is trusted here"
        hint = f"Set {AUTHORITY_VARIABLES[scheme]} to a PEM file with the certificate of its authority"
    return EndpointError(f"{message}: the certificate of {server} {reason} (TLS: {detail})", hint=hint, **context)


def wrong_protocol_error(location: Location, key: str | None, endpoint: str, what: str) -> EndpointError:
    name = {"s3": "S3", "az": "Azure Blob Storage", "gs": "Google Cloud Storage"}[location.scheme]
    target, context = _about(location, key, endpoint)
    return EndpointError(
        f"{target} cannot be read: {endpoint} does not answer as {name} does: {what}",
        hint=f"Set {ENDPOINT_VARIABLES[location.scheme]} to the address of the store's API (not of its console)",
        **context,
    )


def proxy_refused(location: Location, key: str | None, endpoint: str, status: int) -> TierckptError:
    proxy = proxy_for(endpoint or CLOUD_URLS[location.scheme])
    name, variable = (proxy.name, proxy.variable) if proxy is not None else ("a proxy", "HTTPS_PROXY")
    target, context = _about(location, key, endpoint)
    if status >= 500:
        return StoreUnavailableError(
            f"{target} cannot be reached by {name}: HTTP {status}", hint="Try again later", status=status, **context
        )
    what = "wants a user and a password" if status == 407 else f"refuses to connect to it (HTTP {status})"
    return EndpointError(
        f"{target} cannot be reached: {name} {what}",
        hint=f"Write them as {variable}=http://USER:PASSWORD@HOST:PORT"
        if status == 407
        else "Have it allow the host of the store, or name that host in NO_PROXY",
        status=status,
        **context,
    )


def tunnel_refused(location: Location, key: str | None, endpoint: str) -> TierckptError:
    url = endpoint or CLOUD_URLS[location.scheme]
    proxy = proxy_for(url)
    status = None
    if proxy is not None:
        with contextlib.suppress(OSError):
            status = refusal_of_proxy(proxy, url)
    return proxy_refused(location, key, endpoint, status or 503)


def may_be_wrong_protocol(error: Exception) -> bool:
    failure = _client_failure(error)
    return is_no_xml(error) or any(name in failure for name in _FOREIGN)


def is_no_xml(error: Exception) -> bool:
    return isinstance(error, obstore_errors.GenericError) and "Got invalid" in first_line(error)


def is_tunnel_refused(error: Exception) -> bool:
    failure = _client_failure(error)
    return "TunnelUnsuccessful" in failure or "ProxyAuth" in failure


def foreign_body(error: Exception, endpoint: str) -> str:
    status = http_status(error)
    if status is None or status >= 500 or error_code(error) or urlsplit(endpoint).netloc not in first_line(error):
        return ""
    found = _BODY.search(str(error).partition("\n\nDebug source")[0])
    return body_kind(found[1]) if found else ""


def _client_failure(error: Exception) -> str:
    debug = str(error).partition("\n\nDebug source")[2]
    return debug.partition("inner: Http(")[2] if http_status(error) is None else ""


def _words(error: Exception, code: str) -> str:
    found = _MESSAGE.search(str(error).partition("\n\nDebug source")[0])
    said = ": ".join(word for word in (code, redact(found[1].strip()) if found else "") if word)
    return f" ({said})" if said else ""


def _client_reason(error: Exception) -> str:
    failure = _client_failure(error)
    found = _REASON.search(failure)
    if found is not None:
        return found[1].strip()
    return "no answer in time" if "TimedOut" in failure or "Timeout" in failure else ""


_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_PROFILE",
    "az": "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}
_REFUSALS = {
    "InvalidAccessKeyId": "{endpoint} does not know the access key: check AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL",
    "SignatureDoesNotMatch": "The secret does not belong to the access key: check AWS_SECRET_ACCESS_KEY",
    "InvalidToken": "The session token is malformed: check AWS_SESSION_TOKEN, and unset it for long-term keys",
    "RequestTimeTooSkewed": "The clock of this node differs from the clock of {endpoint}: set it (`date -u`, NTP)",
    "RequestExpired": "The clock of this node differs from the clock of {endpoint}: set it (`date -u`, NTP)",
    "AccessDenied": "{endpoint} accepts the credentials, but they do not permit this on {bucket!r}: check the policy "
    "of the bucket and of the user or role",
    "AllAccessDisabled": "The bucket is disabled: ask its owner",
    "AccountProblem": "The account of the bucket is suspended: ask its owner",
    "AuthenticationFailed": "Check AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN (is it of this account, has it "
    "expired?), and the clock of this node",
    "AuthorizationPermissionMismatch": "The identity needs the role Storage Blob Data Reader (to save: Contributor) on "
    "{bucket!r}; of a SAS token, the permission",
    "AuthorizationFailure": "The account's network rules, or its settings, do not let this node in",
    "AuthorizationProtocolMismatch": "The SAS token is for another protocol: use https://",
    "AuthorizationSourceIPMismatch": "The SAS token is for other addresses than this node's",
    "KeyBasedAuthenticationNotPermitted": "The account takes no keys: use an identity (AZURE_CLIENT_ID)",
    "PublicAccessNotPermitted": "The account has no public access: set its credentials",
    "NoAuthenticationInformation": "The container is not public: set AZURE_STORAGE_ACCOUNT_KEY, or another credential",
    "AccountIsDisabled": "The storage account is disabled: ask its owner",
}
_REFUSALS |= dict.fromkeys(
    ["ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"],
    "The session has expired: renew the credentials where they come from (AWS_SESSION_TOKEN, profile, `aws sso login`)",
)


def refused(location: Location, key: str | None, endpoint: str, code: str) -> PermissionDeniedError:
    target, context = _about(location, key, endpoint)
    where = endpoint or location.scheme
    return PermissionDeniedError(
        f"access to {target} was refused{f' ({code})' if code else ''}",
        hint=_REFUSALS.get(code, "").format(endpoint=where, bucket=location.authority)
        or f"Check the credentials for {where} ({_CREDENTIALS[location.scheme]}) and their rights on "
        f"{location.authority!r}",
        code=code or None,
        **context,
    )


def is_expiry(refusal: PermissionDeniedError) -> bool:
    """True unless the server knows these credentials and denies access."""
    return refusal.context.get("code") != "AccessDenied"


def still_refused(refusal: PermissionDeniedError) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"{refusal.message}: the credentials were accepted before, and no newer ones that are were found",
        hint="They have expired or were revoked: renew them at their source (environment, profile, identity). "
        "Local copies are kept, and `tierckpt drain` sends the rest",
        **refusal.context,
    )


def renewed_meanwhile(refusal: PermissionDeniedError) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"{refusal.message}: the credentials expired during the transfer",
        hint="They have been renewed; try again",
        **{**refusal.context, "status": 403},
    )


def in_another_region(location: Location, key: str | None) -> StoreUnavailableError:
    _, context = _about(location, key, "")
    return StoreUnavailableError(
        f"{location.uri} is in another region than the request",
        hint="The region is corrected: try again",
        status=409,
        **context,
    )


def is_missing(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError) or http_status(error) == 404


def ignores_ranges(error: Exception) -> bool:
    return isinstance(error, obstore_errors.GenericError) and "source: NotPartial" in str(error)


def http_status(error: Exception) -> int | None:
    """Return the HTTP status of ``error``, None without a response.

    Reads the first line only: others repeat the server's text. A range past the end is 416, also from Azurite.
    """
    if isinstance(error, obstore_errors.GenericError) and "source: InvalidRangeRequest" in str(error):
        return 416
    match = _STATUS.search(first_line(error))
    return int(match[1]) if match else None


def error_code(error: Exception) -> str:
    match = _CODE.search(str(error).partition("\n\nDebug source")[0])
    return match[1] if match else ""


def first_line(error: Exception) -> str:
    return redact(str(error).partition("\n")[0])[:300]  # first: half a secret would not be recognized
