"""Maps obstore's errors (HTTP status, error code) to tierckpt's: 408, 429 and 5xx are ``StoreUnavailableError``.

Only this module reads the text of obstore's wide error type, and only its machine-written parts. A failure that no
retry can fix is ``EndpointError`` (docs/guide/errors.md); an unresolved name of a proven store is an outage.
"""

from __future__ import annotations

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
from .base import OddKeyError, no_such_name, proxy_refused, untrusted
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


def refusal_of_proxy(proxy: Proxy, url: str) -> int:
    """Return the status with which a proxy refuses a tunnel. Blocking."""
    parts, server = urlsplit(url), urlsplit(proxy.url)
    connection_type = http.client.HTTPSConnection if server.scheme == "https" else http.client.HTTPConnection
    connection = connection_type(server.hostname or "", server.port, timeout=PROBE_SECONDS_MAX)
    headers = {"Proxy-Authorization": proxy.authorization} if proxy.authorization else {}
    try:
        connection.request("CONNECT", f"{parts.hostname}:{parts.port or 443}", headers=headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 503
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


def _about(location: Location, key: str | None, endpoint: str) -> tuple[str, dict[str, Any]]:
    """Return the text that names the object or bucket, and the context of its errors."""
    target = location.uri if key is None else f"{location.uri}/{key}"
    return target, {"uri": location.uri, "key": key, "endpoint": endpoint or None, "tier": Tier.SHARED}


def translate(error: Exception, location: Location, key: str | None, endpoint: str, was_proven: bool) -> TierckptError:
    """``key`` None: about the bucket itself. ``was_proven``: the store has answered this process before."""
    target, context = _about(location, key, endpoint)
    status, code = http_status(error), error_code(error)
    server = endpoint or CLOUD_URLS[location.scheme]

    def made(kind: type[TierckptError], message: str, hint: str = "", **more: object) -> TierckptError:
        return kind(message, hint=hint, **more, **context)

    if code == "NoSuchUpload":  # completed or aborted by a request with a lost response: a HEAD will tell
        return made(StoreUnavailableError, f"the upload of {target} no longer exists", "Try again", status=404)
    if is_missing(error):
        return made(ObjectNotFoundError, f"{target} does not exist")
    if isinstance(error, obstore_errors.AlreadyExistsError):
        if status == 409 and location.scheme == "s3":
            # Another write is running, which may still fail. (For Azure 409 is "exists".)
            return made(StoreUnavailableError, f"another client is writing {target}", "Try again", status=409)
        return made(PreconditionFailedError, f"{target} exists")
    if isinstance(error, obstore_errors.PreconditionError | obstore_errors.NotModifiedError):
        return made(PreconditionFailedError, f"{target} has changed")
    if code == "InvalidObjectState":
        hint = "Restore it (`aws s3api restore-object`), wait until that is done, and try again"
        return made(StoreError, f"{target} is archived, and cannot be read", hint, status=status)
    if status == 507 or "Quota" in code:
        hint = f"Free space at {endpoint or location.scheme}, or raise the quota of {location.authority!r}"
        return made(CapacityError, f"{target}: the store is full ({code or f'HTTP {status}'})", hint)
    if code in _AWS_REGION_CODES or "Received redirect without LOCATION" in first_line(error):
        hint = "Set AWS_REGION to the region of the bucket, and AWS_ENDPOINT_URL to its endpoint or to nothing"
        return made(EndpointError, f"{target} is in another region than requests are sent to", hint, code=code or None)
    if status == 407:
        return proxy_refused(target, server, 407, **context)
    failure = _client_failure(error)  # of a request without a response
    if (found := _TLS.search(failure)) is not None and found[1] != "InvalidMessage":
        return untrusted(target, server, " ".join(filter(None, found.groups())), location.scheme, **context)
    if _NO_SUCH_NAME.search(failure) and not was_proven:
        return no_such_name(target, server, ENDPOINT_VARIABLES[location.scheme], **context)
    denied = obstore_errors.PermissionDeniedError | obstore_errors.UnauthenticatedError
    if isinstance(error, denied) or status in {401, 403} or code in EXPIRED_CODES:
        return refused(location, key, endpoint, code)
    if isinstance(error, ValueError | obstore_errors.InvalidPathError | obstore_errors.NotSupportedError):
        is_odd = "object with invalid path" in str(error)
        return made(OddKeyError if is_odd else StoreError, f"{target}: {first_line(error)}")
    if status == 416:
        return made(IntegrityError, f"{target} is shorter than requested")
    if "source: NotPartial" in str(error):
        return made(StoreError, f"{target}: the store sends the whole object for a range")
    if status in _FINAL_5XX or (status is not None and 400 <= status < 500 and status not in {408, 425, 429}):
        hint = f"Is {endpoint} a store of this kind, and does it support this request?" if endpoint else ""
        message = f"{target}: the store refuses the request: HTTP {status}{_words(error, code)}"
        return made(StoreError, message, hint, status=status)
    if is_no_xml(error) and not was_proven:
        return wrong_protocol_error(location, key, endpoint, "it sends no XML")
    reason = f"HTTP {status}" if status else _client_reason(error) or first_line(error) or type(error).__name__
    proxy, message = proxy_for(server), f"{target} cannot be reached: {reason}"
    if status is None and proxy is not None:
        hint = f"Does {proxy.name} answer from this node? NO_PROXY names hosts that need none. Try again later"
        return made(StoreUnavailableError, message, hint)
    where = f"Is {ENDPOINT_VARIABLES[location.scheme]}={endpoint} right, and does it answer from this node? "
    return made(StoreUnavailableError, message, f"{where if endpoint else ''}Try again later")


def wrong_protocol_error(location: Location, key: str | None, endpoint: str, what: str) -> EndpointError:
    name = {"s3": "S3", "az": "Azure Blob Storage", "gs": "Google Cloud Storage"}[location.scheme]
    target, context = _about(location, key, endpoint)
    hint = f"Set {ENDPOINT_VARIABLES[location.scheme]} to the address of the store's API (not of its console)"
    message = f"{target} cannot be read: {endpoint} does not answer as {name} does: {what}"
    return EndpointError(message, hint=hint, **context)


def tunnel_refused(location: Location, key: str | None, endpoint: str) -> TierckptError:
    url = endpoint or CLOUD_URLS[location.scheme]
    proxy = proxy_for(url)
    status = refusal_of_proxy(proxy, url) if proxy is not None else 503
    target, context = _about(location, key, endpoint)
    return proxy_refused(target, url, status if status >= 300 else 503, **context)


def foreign_protocol(error: Exception, endpoint: str) -> str:
    """Return what another protocol than HTTP, TLS or XML shows; '' for other errors. Blocking."""
    failure = _client_failure(error)
    is_dropped = "ConnectionReset" in failure or "IncompleteMessage" in failure
    if is_dropped and endpoint.startswith("http://") and proxy_for(endpoint) is None and _speaks_tls(endpoint):
        return "it speaks TLS: write https://"
    if "InvalidMessage" in failure:
        return "it does not speak TLS: is it http://?"
    if "UnexpectedMessage" in failure or "Parse(" in failure:
        return "it does not speak HTTP"
    return "it sends no XML" if is_no_xml(error) else ""


def _speaks_tls(endpoint: str) -> bool:
    """Some servers answer HTTP on a port of TLS by a reset, as a server that is down does."""
    parts, context = urlsplit(endpoint), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    address = parts.hostname or "", parts.port or 80
    try:
        with socket.create_connection(address, PROBE_SECONDS_MAX) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False


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
    "RequestTimeTooSkewed": "The clock of this node differs from the clock of {endpoint}: set it (`date -u`, NTP)",
    "RequestExpired": "The clock of this node differs from the clock of {endpoint}: set it (`date -u`, NTP)",
    "AccessDenied": "{endpoint} accepts the credentials, but they do not permit this on {bucket!r}: check the policy "
    "of the bucket and of the user or role",
    "AuthenticationFailed": "Check AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN (is it of this account, has it "
    "expired?), and the clock of this node",
    "AuthorizationPermissionMismatch": "The identity needs the role Storage Blob Data Reader (to save: Contributor) on "
    "{bucket!r}; of a SAS token, the permission",
}
_EXPIRED = (
    "The session has expired: renew the credentials where they come from (AWS_SESSION_TOKEN, profile, `aws sso login`)"
)
_REFUSALS = dict.fromkeys(EXPIRED_CODES, _EXPIRED) | _REFUSALS


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


def still_refused(refusal: PermissionDeniedError) -> PermissionDeniedError:
    hint = (
        "They have expired or were revoked: renew them at their source (environment, profile, identity). "
        "Local copies are kept, and `tierckpt drain` sends the rest"
    )
    message = f"{refusal.message}: the credentials were accepted before, and no newer ones that are were found"
    return PermissionDeniedError(message, hint=hint, **refusal.context)


def renewed_meanwhile(refusal: PermissionDeniedError) -> StoreUnavailableError:
    message = f"{refusal.message}: the credentials expired during the transfer, and have been renewed"
    return StoreUnavailableError(message, hint="Try again", **{**refusal.context, "status": 403})


def in_another_region(location: Location, key: str | None) -> StoreUnavailableError:
    message = f"{location.uri} was in another region than the request, which is corrected"
    return StoreUnavailableError(message, hint="Try again", status=409, **_about(location, key, "")[1])


def is_missing(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError) or http_status(error) == 404


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
