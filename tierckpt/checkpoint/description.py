"""Describes the checkpoints of a run, and one committed checkpoint as JSON. Reads no data."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

from ..errors import CheckpointNotFoundError, PermissionDeniedError
from ..format.layout import Location, adopted_dir, step_of
from ..format.manifest import Manifest
from ..telemetry import logger
from ..types import Json
from . import catalog
from .catalog import Checkpoint, retry_listing
from .select import SEARCHED_DIRECTORIES_MAX, Selector, age_of

log = logger("mover")


def describe_committed(checkpoint: Checkpoint, manifest: Manifest, *, is_abandoned: bool) -> Json:
    branch = checkpoint.branch
    files = [
        {
            "path": entry.path,
            "size_bytes": entry.size_bytes,
            "rank": entry.rank,
            "on_this_node": checkpoint.local_path(entry) is not None,
        }
        for entry in manifest.entries
    ]
    here = {entry.key.partition("/")[0] for entry in manifest.entries}
    folders = [checkpoint.location.child(name).uri for name in sorted(here & set(map(adopted_dir, manifest.tokens)))]
    return {
        "uri": checkpoint.location.uri,
        "kind": "checkpoint",
        "step": checkpoint.step,
        "attempt": manifest.attempt,
        "replaces": list(manifest.replaces),
        "created_unix_seconds": manifest.created_unix_seconds,
        "world_size": manifest.world_size,
        "chunk_size_bytes": manifest.chunk_size_bytes,
        "tiers": sorted(str(tier) for tier in checkpoint.tiers),
        "local_directory": str(checkpoint.directory),
        "adopted_in": folders,
        "size_bytes": manifest.size_bytes,
        "notes": dict(manifest.notes),
        "branch": branch.id,
        "went_back_to_step": branch.base,
        "abandoned": is_abandoned,
        "files": files,
    }


async def describe_run(selector: Selector, location: Location) -> list[catalog.CheckpointRow]:
    """Raises CheckpointNotFoundError without any."""
    own = await _describe(selector, location)
    if own is not None:
        return [own]

    async def names() -> list[str]:
        return [*await selector.names(location), *await selector.windows(location)]

    async def describe(names: Collection[str]) -> tuple[list[catalog.CheckpointRow], set[str]]:
        ordered, found = sorted(names, key=age_of, reverse=True), dict[str, catalog.CheckpointRow]()
        for first in range(0, len(ordered), SEARCHED_DIRECTORIES_MAX):
            part = ordered[first:][:SEARCHED_DIRECTORIES_MAX]
            rows = await asyncio.gather(*(_describe(selector, location.child(name)) for name in part))
            found |= {name: row for name, row in zip(part, rows, strict=True) if row is not None}
            if not found:
                break
        return [*found.values()], {name for name in names if step_of(name) is not None} - found.keys()

    found = await retry_listing(location, names, describe)
    if not found:
        raise CheckpointNotFoundError(
            f"no checkpoint at or under {location.uri}",
            hint="Name a run or a checkpoint; check the URI, the endpoint and local_root",
        )
    branch = await selector.branch(location, [(row.branch, row.step) for row in found])
    if branch is not None:
        found = [replace(row, is_abandoned=not branch.holds(row.branch, row.step)) for row in found]
    return sorted(found, key=lambda row: (row.step is not None, row.step or 0, row.location.name))


async def _describe(selector: Selector, location: Location) -> catalog.CheckpointRow | None:
    try:
        return await catalog.describe(location, selector.directory_of(location), selector.store_at(location))
    except PermissionDeniedError as error:
        if location.scheme != "file":
            raise  # credentials hold for all locations
        log.warning("%s is passed over: %s", location.uri, error)  # "lost+found", another user's
        return None
