"""``tierckpt verify``."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

from typer import Option

from ..checkpoint import local_commit, shared_commit
from ..checkpoint.catalog import Checkpoint
from ..checkpoint.description import describe_run
from ..checkpoint.verify import VerifyReport, record_check
from ..checkpoint.verify import verify as verify_checkpoint
from ..errors import CheckpointError, CheckpointNotFoundError, IntegrityError, ManifestError
from ..format.layout import MANIFEST, Location
from ..mover import Mover
from ..types import Json, Tier
from .ui.output import Report, facts, table
from .ui.session import ProgressSession, UriArgument, location_of

Problem = tuple[Tier, str]


def verify(
    session: ProgressSession,
    uri: UriArgument,
    read_data: Annotated[bool, Option(help="Read and check every byte; else presence and sizes.")] = False,
) -> Report:
    """Check every file on each tier that has a copy. Exit 5 if any copy is damaged.

    If URI is a run, checks its newest checkpoint committed on any tier; a damaged one is not skipped.

    A file missing on this node or its peers is no damage if another tier has a good copy: every node keeps the shards
    of its own ranks.
    """
    location = location_of(uri)
    with session.progress_bar() as listener, session.client(listener) as client:
        checkpoint, report, damaged = client.run(_verify(client.mover, location, read_data))
        absent = _absent(checkpoint, report)
    problems = {**damaged, **{key: text for key, text in report.problems.items() if key not in absent}}
    rows = [_row(checkpoint, report, tier, path, text) for (tier, path), text in problems.items()]
    document: Json = {
        **report.to_json(),
        "uri": checkpoint.location.uri,
        "tiers": sorted(str(tier) for tier in checkpoint.tiers),
        "good": not rows,
        "problems": rows,
        "absent_on_this_node": sorted(path for tier, path in absent if tier is Tier.LOCAL),
    }
    record_check(client.settings.local_root, "verify", document)
    summary = {
        "checkpoint": "{uri}",
        "committed on": "{tiers:list}",
        "checked": "{checked_files} copies of files, {checked_bytes:bytes}, "
        + ("every byte read" if read_data else "sizes only (--read-data reads every byte)"),
        "not on this node": "{absent} files; other tiers have them" if document["absent_on_this_node"] else "",
        "result": f"{len(rows)} bad copies" if rows else "good",
    }
    view = [
        facts(summary, document, absent=len(document["absent_on_this_node"])),
        table("file tier good_copy_on:lost problem", rows),
    ]
    return Report(document, view, IntegrityError.exit_code if rows else 0)


async def _verify(
    mover: Mover, location: Location, read_data: bool
) -> tuple[Checkpoint, VerifyReport, dict[Problem, str]]:
    damaged = await _damaged_manifests(mover, location)
    if not damaged:
        with contextlib.suppress(CheckpointNotFoundError):
            rows = await describe_run(mover.selector, location)
            committed = [row for row in rows if {row.local, row.shared} & {"committed", "stock"}]
            location = (committed or rows)[-1].location
            damaged = await _damaged_manifests(mover, location)
    checkpoint, report = await verify_checkpoint(mover.selector, location, read_data=read_data, listener=mover.listener)
    if checkpoint.manifest is None:
        raise CheckpointError(
            f"{location.uri} was written by stock PyTorch and has no digests to check it against",
            hint="Load it instead; only checkpoints saved through tierckpt can be verified",
        )
    return checkpoint, report, damaged


async def _damaged_manifests(mover: Mover, location: Location) -> dict[Problem, str]:
    """An unreachable shared tier is an error: it may hold damage."""
    damaged: dict[Problem, str] = {}
    try:
        await asyncio.to_thread(local_commit.read_local_manifest, mover.directory(location))
    except ManifestError as error:
        damaged[(Tier.LOCAL, MANIFEST)] = str(error)
    try:
        await shared_commit.read_shared_manifest(mover.store(location))
    except ManifestError as error:
        damaged[(Tier.SHARED, MANIFEST)] = str(error)
    return damaged


def _absent(checkpoint: Checkpoint, report: VerifyReport) -> set[Problem]:
    """Return files without a copy on this node or other nodes, and with a good one on another tier."""
    entries = {entry.path: entry for entry in checkpoint.manifest.entries} if checkpoint.manifest else {}

    def is_absent(tier: Tier, path: str) -> bool:
        if tier is Tier.LOCAL:
            return not (checkpoint.directory / entries[path].key).exists()
        peers = checkpoint.elsewhere if tier is Tier.PEER else None
        return peers is not None and not peers.holders(entries[path])

    return {(tier, path) for tier, path in report.problems if path not in report.lost and is_absent(tier, path)}


def _row(checkpoint: Checkpoint, report: VerifyReport, tier: Tier, path: str, text: str) -> Json:
    others = [
        str(other)
        for other in sorted(checkpoint.tiers - {tier})
        if path not in report.lost and (other, path) not in report.problems
    ]
    return {"tier": str(tier), "file": path, "problem": text, "good_copy_on": others}
