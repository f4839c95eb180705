"""``tierckpt info``."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Collection

from ..cache.file_set import FileSpec
from ..cache.prefetch import from_listing
from ..checkpoint.branches import NOTE, run_of
from ..checkpoint.catalog import Checkpoint
from ..checkpoint.description import describe_committed, describe_run
from ..disk.durable import matching
from ..errors import CheckpointNotFoundError, ObjectNotFoundError, PermissionDeniedError, UncommittedCheckpointError
from ..format.layout import GRADIENTS_DIR, Location, local_dir, step_name, step_of
from ..format.manifest import Manifest
from ..mover import Mover
from ..save import log_segments
from ..types import Json
from .ui.output import Report, day, facts, human_bytes, table
from .ui.session import Session, UriArgument, location_of


def info(session: Session, uri: UriArgument) -> Report:
    """Show one checkpoint: save, tiers, files and sizes, and the later steps in this node's gradient logs.
    Also shows the logs of a run, and the files of a plain directory of model files."""
    location = location_of(uri)
    with session.client() as client:
        return client.run(_inspect(client.mover, location))


async def _inspect(mover: Mover, location: Location) -> Report:
    try:
        checkpoint = await mover.selector.find(location)
    except (CheckpointNotFoundError, UncommittedCheckpointError) as error:
        return await _inspect_plain(mover, location, error)
    if checkpoint.manifest is None:
        return _plain("stock", location, await from_listing(checkpoint.store, strict=False))
    is_abandoned = False
    with contextlib.suppress(PermissionDeniedError):  # a user may have access to one checkpoint only
        branch = await mover.selector.branch(run_of(location), [(checkpoint.branch, checkpoint.step)])
        is_abandoned = branch is not None and not branch.holds(checkpoint.branch, checkpoint.step)
    logs = await asyncio.to_thread(_logs, mover, location.parent) if checkpoint.step is not None else []
    behind = [one for one in logs if one["base_step"] <= checkpoint.step <= (one["newest_step"] or one["base_step"])]
    return await asyncio.to_thread(_committed, checkpoint, checkpoint.manifest, behind, is_abandoned)


async def _inspect_plain(
    mover: Mover, location: Location, error: CheckpointNotFoundError | UncommittedCheckpointError
) -> Report:
    logs = await asyncio.to_thread(_logs, mover, location)
    try:
        rows = await describe_run(mover.selector, location)
    except CheckpointNotFoundError:
        if logs:
            return _run(location, (), logs)
        try:
            return _plain("files", location, await from_listing(mover.store(location), strict=False))
        except ObjectNotFoundError:
            raise error from None
    if rows[0].location == location:
        raise error
    if logs:
        return _run(location, {row.step for row in rows if row.step is not None}, logs)
    raise CheckpointNotFoundError(
        f"{location.uri} is a run with {len(rows)} checkpoints, not a checkpoint",
        hint=f"`tierckpt ls {location.uri}` lists them; `tierckpt info {rows[-1].location.uri}` shows the last",
    )


def _logs(mover: Mover, run: Location) -> list[Json]:
    directory = local_dir(mover.settings.local_root, run) / GRADIENTS_DIR
    logs = sorted((step_of(path.name) or 0, path) for path in matching(directory, "rank-*"))
    found = [(rank, one) for rank, path in logs for one in log_segments.list_chains(path)]
    return [{"rank": rank, **dataclasses.asdict(one)} for rank, one in found]


LOGS = (
    ">rank >behind_step=base_step >newest_step:none >steps >size=size_bytes:bytes "
    ">parameters_verified_at=verified_step:none state=ended:whole"
)


def _run(location: Location, steps: Collection[int], logs: list[Json]) -> Report:
    for item in logs:
        if item["base_step"] not in steps:
            missing = f"step-{item['base_step']} is missing: the log leads on from a later checkpoint, or from none"
            item["ended"] = "; ".join(filter(None, (item["ended"], missing)))
    document: Json = {"uri": location.uri, "kind": "run", "checkpoints": len(steps), "gradient_logs": logs}
    summary = {"run": location.uri, "checkpoints": f"{len(steps)} (`tierckpt ls {location.uri}` lists them)"}
    return Report(document, [facts(summary), table(LOGS, logs)])


def _committed(checkpoint: Checkpoint, manifest: Manifest, logs: list[Json], is_abandoned: bool) -> Report:
    document = {**describe_committed(checkpoint, manifest, is_abandoned=is_abandoned), "gradient_logs": logs}
    files, base = document["files"], document["went_back_to_step"]
    summary = {
        "checkpoint": checkpoint.location.uri,
        "step": checkpoint.step,
        "created": f"{day(manifest.created_unix_seconds)} UTC",
        "attempt": manifest.attempt,
        "ranks": manifest.world_size,
        "committed on": ", ".join(document["tiers"]),
        "size": f"{human_bytes(manifest.size_bytes)} in {len(files)} files",
        "for other tools": ", ".join(document["adopted_in"]),
        **{name: note for name, note in manifest.notes.items() if name != NOTE},
        "went back to": "" if base is None else step_name(base),
        "abandoned": "the job went back to an older step later" if is_abandoned else "",
    }
    columns = "file=path >rank >size=size_bytes:bytes on_this_node:yes"
    return Report(document, [facts(summary), table(columns, files), table(LOGS, logs)])


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
    return Report(document, [facts(summary), table("file=path >size=size_bytes:bytes", found)])
