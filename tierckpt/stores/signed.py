"""A conditional DELETE by a signed URL: obstore has conditions for puts and gets, and none for deletes."""

from __future__ import annotations

import urllib.error
import urllib.request

from ..errors import PermissionDeniedError, PreconditionFailedError, StoreError, StoreUnavailableError
from ..types import Tier


def delete_if(url: str, etag: str, target: str, timeout_seconds: float) -> None:
    """Delete the object behind ``url`` while its version is ``etag``; no error when it is gone. Blocking.

    Args:
        target: its name for messages; the URL holds a signature.

    Raises:
        PreconditionFailedError: another version is there.
        PermissionDeniedError, StoreUnavailableError, StoreError.
    """
    request = urllib.request.Request(url, method="DELETE", headers={"If-Match": etag})  # signed by us
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds):
            return
    except urllib.error.HTTPError as error:
        with error:
            status = error.code
    except OSError as error:  # URLError, timeouts and resets are
        raise StoreUnavailableError(
            f"{target} cannot be reached: {type(error).__name__}", hint="Try again later", tier=Tier.SHARED
        ) from None
    if status == 404:
        return
    if status == 412:
        raise PreconditionFailedError(f"{target} has changed", tier=Tier.SHARED)
    if status in {401, 403}:
        raise PermissionDeniedError(f"access to {target} was refused", status=status, tier=Tier.SHARED)
    kind = StoreUnavailableError if status >= 500 or status in {408, 409, 429} else StoreError
    raise kind(f"{target} cannot be deleted: HTTP {status}", status=status, tier=Tier.SHARED)
