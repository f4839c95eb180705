"""Marks: small files that record the state of an attempt on the local tier. A damaged mark means unknown."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..disk.durable import durable_write, make_dirs, read_whole
from ..errors import ManifestError, ObjectNotFoundError, StoreError, TierckptError
from ..format import manifest as manifests
from ..format.layout import DRAINED, ORIGIN_DIR, PRIVATE_DIR, REPLICATED, SUPERSEDED, origin_file
from ..telemetry import logger

log = logger("commit")
MARK_TRIES = 5

DRAINED_FIELDS = frozenset({"attempt"})


def mark_origin(directory: Path, token: str) -> None:
    """Note that a rank of this node makes the save ``token``, for peers. Not durable: losing the note costs a copy."""
    for _ in range(MARK_TRIES):
        with suppress(OSError, TierckptError):
            make_dirs(directory / ORIGIN_DIR)
            (directory / origin_file(token)).touch()
            return  # a concurrent commit removed the empty directory
    log.warning("%s: peers will not learn that this node saves it", directory)


def origins(directory: Path) -> frozenset[str]:
    with suppress(OSError):
        return frozenset(os.listdir(directory / ORIGIN_DIR))  # noqa: PTH208
    return frozenset()


def mark_drained(directory: Path, attempt: str) -> None:
    """A lost mark costs one GET."""
    _note(directory, DRAINED, attempt)


def is_drained(directory: Path, attempt: str) -> bool:
    return _read_mark(directory / DRAINED) == attempt


def mark_superseded(directory: Path, attempt: str) -> None:
    _note(directory, SUPERSEDED, attempt)


def mark_replicated(directory: Path, attempt: str) -> None:
    """All known copies of ``attempt`` are whole: older ones are no longer needed."""
    _note(directory, REPLICATED, attempt)


def is_replicated(directory: Path, attempt: str) -> bool:
    return _read_mark(directory / REPLICATED) == attempt


def is_evictable(directory: Path, attempt: str) -> bool:
    return is_drained(directory, attempt) or _read_mark(directory / SUPERSEDED) == attempt


def read_drained(directory: Path) -> str | None:
    """Raises ManifestError if damaged."""
    return _read(directory / DRAINED)


def _note(directory: Path, name: str, attempt: str) -> None:
    if (directory / PRIVATE_DIR).is_dir():
        durable_write(directory / name, manifests.seal({"attempt": attempt}))


def _read_mark(path: Path) -> str | None:
    try:
        return _read(path)
    except (ManifestError, StoreError) as error:
        log.warning("%s", error)
        return None


def _read(path: Path) -> str | None:
    try:
        data = read_whole(path, manifests.RECORD_BYTES_MAX)
    except ObjectNotFoundError:
        return None
    return str(manifests.unseal(data, DRAINED_FIELDS, where=str(path))["attempt"])
