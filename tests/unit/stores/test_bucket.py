"""A bucket's credentials, shared by all its stores."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tierckpt.errors import PermissionDeniedError
from tierckpt.stores.bucket import Bucket
from tierckpt.stores.signed_requests import NotThisWay


def test_renewed_credentials_reset_the_use_of_direct_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of the new credentials may give ranges where the old one did not."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "old")

    async def renew() -> Bucket:
        bucket = Bucket("s3", "models", Counter())
        await bucket.client(0, 1.0)
        bucket.note_accepted(bucket.generation)
        bucket.ranges.count_unused(NotThisWay("no ranges", for_good=True))
        assert not bucket.ranges.is_usable
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
        assert await bucket.renew(bucket.generation, PermissionDeniedError("refused", status=403))
        return bucket

    assert asyncio.run(renew()).ranges.is_usable
