"""Checks a fetched file against its version, where that is a digest of its content (Hugging Face Hub).

``sha256:HEX`` is that of the bytes (LFS of a Hugging Face Hub); ``git:HEX`` is the SHA-1 of a git blob, which is what a
Hub knows of small files: it finds damage, and is no proof against forgery.
"""

from __future__ import annotations

import hashlib
import os

from ..errors import IntegrityError
from ..types import Tier
from .file_set import FileSpec

READ_BYTES = 1 << 20


def check_content(file: int, item: FileSpec, where: str) -> None:
    """Raise IntegrityError unless the open ``file`` holds what the etag of ``item`` says, where it says that.

    Cost: one read of the file, digested at some 1.5 GB/s without the interpreter lock.
    """
    kind, _, expected = (item.etag or "").partition(":")
    if kind == "sha256":
        digest = hashlib.sha256()
    elif kind == "git":
        digest = hashlib.sha1(b"blob %d\0" % item.size_bytes, usedforsecurity=False)
    else:
        return
    into, at = bytearray(READ_BYTES), 0
    while count := os.preadv(file, [into], at):
        digest.update(memoryview(into)[:count])
        at += count
    if digest.hexdigest() != expected:
        raise IntegrityError(
            f"{item.path} of {where} has not the {kind} that its repository lists",
            hint="It was damaged on its way, or where it lies: run it again, and it is fetched anew",
            file=item.path,
            tier=Tier.SHARED,
        )
