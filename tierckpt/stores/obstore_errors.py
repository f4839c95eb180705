"""Maps obstore's errors (HTTP status, error code) to ours: a 408, 429 or 5xx is ``StoreUnavailableError`` (retry.py).

It raises one wide type for most failures and keeps the status in its text.

This is the one place that reads that text, and only what a machine wrote there: the HTTP status, and the error code of
the server's answer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..errors import (
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
from .obstore_module import Module

if TYPE_CHECKING:
    from obstore import exceptions as obstore_errors
else:
    obstore_errors = Module("exceptions")

ENDPOINT_VARIABLES = {"s3": "AWS_ENDPOINT_URL", "az": "AZURE_STORAGE_ENDPOINT", "gs": "GOOGLE_BASE_URL"}

EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
"""What S3 says, with status 400, of credentials whose time is over."""
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")


def translate(error: Exception, location: Location, key: str | None, endpoint: str) -> TierckptError:
    """Return the error of ours for ``error``. ``key`` None: the request was about the bucket itself."""
    target = location.uri if key is None else f"{location.uri}/{key}"
    status, code = http_status(error), error_code(error)
    context: dict[str, Any] = {"uri": location.uri, "key": key, "endpoint": endpoint or None, "tier": Tier.SHARED}
    if code == "NoSuchUpload":  # it was completed or aborted by a request whose answer was lost: a HEAD will tell
        return StoreUnavailableError(f"the transfer of {target} is gone", hint="Try again", status=404, **context)
    if is_missing(error):
        return ObjectNotFoundError(f"{target} does not exist", **context)
    if isinstance(error, obstore_errors.AlreadyExistsError):
        if status == 409 and location.scheme == "s3":
            # Not "exists" but "another write to it is under way", which may fail yet. (For Azure 409 is "exists".)
            return StoreUnavailableError(
                f"{target} is being written by somebody else", hint="Try again", status=409, **context
            )
        return PreconditionFailedError(f"{target} exists", **context)
    if isinstance(error, obstore_errors.PreconditionError | obstore_errors.NotModifiedError):
        return PreconditionFailedError(f"{target} has changed", **context)
    denied = obstore_errors.PermissionDeniedError | obstore_errors.UnauthenticatedError
    if isinstance(error, denied) or status in {401, 403} or code in EXPIRED_CODES:
        return refused(location, key, endpoint, code)
    if isinstance(error, ValueError | obstore_errors.InvalidPathError | obstore_errors.NotSupportedError):
        is_listed = "object with invalid path" in str(error)
        hint = "Rename or remove that object: no URI names it" if is_listed else ""
        return StoreError(f"{target}: {first_line(error)}", hint=hint, **context)
    if status == 416:
        return IntegrityError(f"{target} is shorter than what was asked for", **context)
    if status is not None and 400 <= status < 500 and status not in {408, 425, 429}:
        return StoreError(f"{target}: HTTP {status}: {first_line(error)}", status=status, **context)
    reason = f"HTTP {status}" if status else first_line(error) or type(error).__name__
    return StoreUnavailableError(
        f"{target} cannot be reached: {reason}", hint=f"{_where_set(location, endpoint)}Try again later", **context
    )


def _where_set(location: Location, endpoint: str) -> str:
    """Which variable names the endpoint that does not answer: more often it is wrong than the store is down."""
    variable = ENDPOINT_VARIABLES.get(location.scheme)
    return f"Is {variable}={endpoint} right, and does it answer from this node? " if variable and endpoint else ""


_REFUSALS = {
    "InvalidAccessKeyId": "{endpoint} does not know the access key: check AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL",
    "SignatureDoesNotMatch": "The secret is not that of the access key: check AWS_SECRET_ACCESS_KEY",
}


def refused(location: Location, key: str | None, endpoint: str, code: str) -> PermissionDeniedError:
    target = location.uri if key is None else f"{location.uri}/{key}"
    return PermissionDeniedError(
        f"access to {target} was refused",
        hint=_REFUSALS.get(code, "").format(endpoint=endpoint or location.scheme)
        or f"Check the credentials for {endpoint or location.scheme} and their rights on {location.authority!r}",
        code=code or None,
        uri=location.uri,
        key=key,
        endpoint=endpoint or None,
        tier=Tier.SHARED,
    )


def is_expiry(refusal: PermissionDeniedError) -> bool:
    """True unless the server said that it knows us and does not let us."""
    return refusal.context.get("code") != "AccessDenied"


def still_refused(refusal: PermissionDeniedError) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"{refusal.message}: the credentials were accepted before, and no newer ones that are were found",
        hint="They have expired or were revoked: renew them where they come from (environment, profile, identity). "
        "Local copies are kept, and `tierckpt drain` goes on with what is not drained",
        **refusal.context,
    )


def renewed_meanwhile(refusal: PermissionDeniedError) -> StoreUnavailableError:
    """The transfer is broken off, but it is worth beginning it again: there are newer credentials."""
    return StoreUnavailableError(
        f"{refusal.message}: the credentials expired during the transfer",
        hint="They were looked up again; try again",
        **{**refusal.context, "status": 403},
    )


def in_another_region(location: Location, key: str | None) -> StoreUnavailableError:
    """The request has failed, and is worth making again: its bucket is known to be in another region now."""
    context: dict[str, Any] = {"uri": location.uri, "key": key, "status": 409, "tier": Tier.SHARED}
    return StoreUnavailableError(f"{location.uri} is in another region", hint="Try again", **context)


def is_missing(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError) or http_status(error) == 404


def http_status(error: Exception) -> int | None:
    """Return the HTTP status behind ``error``, None when there was no answer (refused, timeout, cut off).

    Only the first line is read: what follows repeats the server's own words. The name of the client's own refusal of
    a range past the end stands for the 416 that Azurite does not send.
    """
    if isinstance(error, obstore_errors.GenericError) and "source: InvalidRangeRequest" in str(error):
        return 416
    match = _STATUS.search(first_line(error))
    return int(match[1]) if match else None


def error_code(error: Exception) -> str:
    """Return the code in the server's answer ("ExpiredToken"), '' when there is none (a HEAD has no body)."""
    match = _CODE.search(str(error).partition("\n\nDebug source")[0])
    return match[1] if match else ""


def first_line(error: Exception) -> str:
    return redact(str(error).partition("\n")[0])[:300]  # in this order: half a secret does not look like one
