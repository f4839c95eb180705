"""Checks a fetched file against the content digest in its version (Hugging Face Hub).

``sha256:HEX`` digests the bytes (LFS). ``git:HEX``, the SHA-1 of a git blob, detects damage but not forgery.
"""

from __future__ import annotations

import hashlib
import os

from ..errors import IntegrityError
from ..types import Tier
from .file_set import FileSpec

READ_BYTES = 1 << 20


def check_content(file: int, item: FileSpec, where: str) -> None:
    """Raise IntegrityError if ``file`` differs from a digest in the etag of ``item``. Cost: one read."""
    kind, _, expected = (item.etag or "").partition(":")
    if kind == "sha256":
        digest = hashlib.sha256()
    elif kind == "git":
        digest = hashlib.sha1(b"blob %d\0" % item.size_bytes, usedforsecurity=False)
    else:
        return
    into, offset = bytearray(READ_BYTES), 0
    while count := os.preadv(file, [into], offset):
        digest.update(memoryview(into)[:count])
        offset += count
    if digest.hexdigest() != expected:
        raise IntegrityError(
            f"{item.path} of {where} has not the {kind} that its repository lists",
            hint="It was damaged in transit or on the disk: run the command again to fetch it again",
            file=item.path,
            tier=Tier.SHARED,
        )
