"""``tierckpt info``: what is under a URI, without reading its data."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from ..cache.prefetch import FileSpec, from_listing
from ..checkpoint.catalog import Checkpoint
from ..engine import Engine
from ..errors import CheckpointNotFoundError, ObjectNotFoundError, UncommittedCheckpointError
from ..format.layout import Location
from ..format.manifest import Manifest
from ..types import Json
from .ui.output import Report, facts, human_bytes, table
from .ui.session import JsonOption, LocalRootOption, UriArgument, location_of, open_client


def info(uri: UriArgument, as_json: JsonOption = False, local_root: LocalRootOption = None) -> Report:
    """Show one checkpoint: save, tiers, files and sizes. Shows the files of a plain directory of model files too."""
    location = location_of(uri)
    with open_client(local_root) as client:
        return client.run(_inspect(client.engine, location))


async def _inspect(engine: Engine, location: Location) -> Report:
    try:
        checkpoint = await engine.find(location)
    except (CheckpointNotFoundError, UncommittedCheckpointError) as error:
        return await _inspect_plain(engine, location, error)
    if checkpoint.manifest is None:
        return _plain("stock", location, await from_listing(checkpoint.store))
    return await asyncio.to_thread(_committed, checkpoint, checkpoint.manifest)


async def _inspect_plain(
    engine: Engine, location: Location, error: CheckpointNotFoundError | UncommittedCheckpointError
) -> Report:
    """No commit is here: a run with checkpoints below, plain files, an unfinished save, or nothing."""
    try:
        rows = await engine.list(location)
    except CheckpointNotFoundError:
        try:
            return _plain("files", location, await from_listing(engine.store(location)))
        except ObjectNotFoundError:
            raise error from None
    if rows[0].location == location:
        raise error
    raise CheckpointNotFoundError(
        f"{location.uri} is a run with {len(rows)} checkpoints, not a checkpoint",
        hint=f"`tierckpt ls {location.uri}` lists them; `tierckpt info {rows[-1].location.uri}` shows the last",
    )


def _committed(checkpoint: Checkpoint, manifest: Manifest) -> Report:
    files: list[Json] = [
        {
            "path": entry.path,
            "size_bytes": entry.size_bytes,
            "rank": entry.rank,
            "on_this_node": checkpoint.local_path(entry) is not None,
        }
        for entry in manifest.entries
    ]
    document: Json = {
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
        "size_bytes": manifest.size_bytes,
        "notes": dict(manifest.notes),
        "files": files,
    }
    summary = {
        "checkpoint": checkpoint.location.uri,
        "step": checkpoint.step,
        "created": datetime.fromtimestamp(manifest.created_unix_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "attempt": manifest.attempt,
        "ranks": manifest.world_size,
        "committed on": ", ".join(document["tiers"]),
        "size": f"{human_bytes(manifest.size_bytes)} in {len(files)} files",
        **manifest.notes,
    }
    lines = [
        (item["path"], item["rank"], human_bytes(item["size_bytes"]), "yes" if item["on_this_node"] else "no")
        for item in files
    ]
    return Report(document, [facts(summary), table("file >rank >size on_this_node", lines)])


def _plain(kind: str, location: Location, found: list[FileSpec]) -> Report:
    size_bytes = sum(item.size_bytes for item in found)
    document: Json = {
        "uri": location.uri,
        "kind": kind,
        "size_bytes": size_bytes,
        "files": [{"path": item.path, "size_bytes": item.size_bytes} for item in found],
    }
    what = "checkpoint of stock PyTorch (no digests)" if kind == "stock" else "plain files, not a checkpoint"
    summary = {what: location.uri, "size": f"{human_bytes(size_bytes)} in {len(found)} files"}
    return Report(
        document, [facts(summary), table("file >size", [(item.path, human_bytes(item.size_bytes)) for item in found])]
    )
