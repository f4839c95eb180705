"""Which checkpoints to remove from a tier, and removing them: the manifest first, then the files it names.

A crash in the middle leaves a checkpoint whole or invisible, never half. Only files that a manifest of ours names are
deleted; what other people keep in the directory stays.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import CapacityError, ManifestError
from ..layout import CLAIM, MANIFEST, PARTS_DIR, PENDING_DIR, PRIVATE_DIR
from ..manifest import Manifest
from ..stores.base import Store
from ..telemetry import logger
from ..types import Tier
from . import commit

log = logger("retention")

FREE_FRACTION_MARGIN = 0.01
FREE_BYTES_MARGIN_MAX = 64 << 20
"""Room left beside a save for manifests, the journal and everybody else's small files."""


def steps_to_remove(steps: Sequence[int], keep_last: int) -> list[int]:
    """Return the steps beyond the newest ``keep_last``, oldest first. ``keep_last`` below 1 keeps everything."""
    return sorted(steps)[:-keep_last] if keep_last >= 1 else []


async def remove_shared(store: Store, manifest: Manifest) -> None:
    """Remove a committed checkpoint from the shared tier: manifest, stock metadata, files, then the claim."""
    await store.delete(MANIFEST)
    for entry in manifest.metadata:
        await store.delete(entry.path)
    for entry in manifest.entries:
        await store.delete(entry.key)
    for prefix in (PARTS_DIR, PENDING_DIR):
        await store.delete_dir(prefix)
    await store.delete(CLAIM)
    await store.delete_dir(PRIVATE_DIR)


def local_checkpoints(local_root: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield every committed checkpoint of the local tier; damaged manifests are reported and passed over."""
    root = Path(local_root, "checkpoints")
    for path in root.rglob(MANIFEST) if root.is_dir() else ():
        directory = path.parent.parent
        try:
            manifest = commit.read_local_manifest(directory)
        except ManifestError as error:
            log.warning("%s", error)
            continue
        if manifest is not None:
            yield directory, manifest


def make_room(local_root: Path, needed_bytes: int, keep: Path) -> None:
    """Evict local copies that the shared tier has committed, oldest first, until ``needed_bytes`` fit.

    Never evicts ``keep`` or a checkpoint that is not drained: those are the only copies.

    Raises:
        CapacityError: the disk still has less room than that; says needed and free bytes.
    """
    needed = needed_bytes + _margin_bytes(local_root)
    if _free_bytes(local_root) >= needed:
        return
    drained = [
        (directory, manifest)
        for directory, manifest in local_checkpoints(local_root)
        if directory != keep and commit.is_drained(directory, manifest.attempt) and not _is_linked(directory, manifest)
    ]
    for directory, _ in sorted(drained, key=lambda item: item[1].created_unix_seconds):
        commit.remove_local(directory)
        log.warning("evicted %s from the local tier: %d bytes were needed", directory, needed_bytes)
        if _free_bytes(local_root) >= needed:
            return
    free = _free_bytes(local_root)
    if free < needed:
        raise CapacityError(
            f"the local tier has no room for this save: {needed} bytes are needed, {free} are free",
            hint="Drain and remove older checkpoints, or point local_root at a larger disk. Nothing was written and "
            "older checkpoints are whole",
            tier=Tier.LOCAL,
            local_root=local_root,
            needed_bytes=needed_bytes,
            free_bytes=free,
        )


def _is_linked(directory: Path, manifest: Manifest) -> bool:
    """True when the shared tier holds the same files by hard links: removing ours would free nothing."""
    return any(
        (directory / entry.key).exists() and (directory / entry.key).stat().st_nlink > 1 for entry in manifest.files
    )


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(nearest_existing(path)).free


def _margin_bytes(path: Path) -> int:
    return min(FREE_BYTES_MARGIN_MAX, int(shutil.disk_usage(nearest_existing(path)).total * FREE_FRACTION_MARGIN))


def nearest_existing(path: Path) -> Path:
    """Return ``path``, or its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return path
