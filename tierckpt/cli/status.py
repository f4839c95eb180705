"""``tierckpt status``: what this node still has to drain, and what its local tier holds. Asks no store."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType

from ..layout import MANIFEST, Location
from ..mover import commit
from ..mover.catalog import file_size
from ..mover.journal import Entry, Journal
from ..mover.prefetch import RECEIPT
from ..mover.retention import local_checkpoints, nearest_existing
from ..types import Json
from .output import Report, facts, human_bytes, human_seconds, table
from .session import JsonOption, LocalRootOption, load_settings


def status(as_json: JsonOption = False, local_root: LocalRootOption = None) -> Report:
    """Show the journal (what is not on shared storage yet, and why), the local tier, and free space."""
    root = load_settings(local_root).local_root
    journal = [_entry(entry) for entry in Journal(root).entries()]
    local = sorted([*_checkpoints(root), *_prefetched(root)], key=lambda item: item["uri"])
    disk = shutil.disk_usage(nearest_existing(root))
    document: Json = {
        "local_root": str(root),
        "journal": journal,
        "journal_bytes": sum(item["size_bytes"] for item in journal),
        "local": local,
        "local_bytes": sum(item["size_bytes"] for item in local),
        "free_bytes": disk.free,
        "total_bytes": disk.total,
    }
    return Report(document, _view(document))


def _entry(entry: Entry) -> Json:
    return {
        "uri": entry.uri,
        "rank": entry.rank,
        "state": entry.state,
        "size_bytes": entry.size_bytes,
        "age_seconds": max(0.0, time.time() - entry.created_unix_seconds),
        "last_error": entry.error,
    }


def _checkpoints(root: Path) -> Iterator[Json]:
    for directory, manifest in local_checkpoints(root):
        here = [entry for entry in manifest.entries if file_size(directory / entry.key) == entry.size_bytes]
        yield {
            "uri": _location(root, directory).uri,
            "kind": "checkpoint",
            "files": len(here),
            "files_of_checkpoint": len(manifest.entries),
            "size_bytes": sum(entry.size_bytes for entry in here),
            "drained": commit.is_drained(directory, manifest.attempt),
        }


def _prefetched(root: Path) -> Iterator[Json]:
    base = root / "checkpoints"
    for receipt in base.rglob(RECEIPT) if base.is_dir() else ():
        directory = receipt.parent.parent
        if (directory / MANIFEST).exists():
            continue  # listed as a checkpoint
        sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file() and path != receipt]
        yield {
            "uri": _location(root, directory).uri,
            "kind": "prefetched",
            "files": len(sizes),
            "size_bytes": sum(sizes),
            "drained": True,
        }


def _location(root: Path, directory: Path) -> Location:
    """The inverse of ``layout.local_dir``."""
    scheme, authority, *path = directory.relative_to(root / "checkpoints").parts
    leading = "/" if scheme == "file" else ""
    return Location(scheme, "" if authority == "_" else authority, leading + "/".join(path))


def _view(document: Json) -> list[RenderableType]:
    summary = {
        "local root": document["local_root"],
        "free": f"{human_bytes(document['free_bytes'])} of {human_bytes(document['total_bytes'])}",
        "to drain": f"{human_bytes(document['journal_bytes'])} in {len(document['journal'])} entries",
        "local tier": f"{human_bytes(document['local_bytes'])} in {len(document['local'])} directories",
    }
    waiting = [
        (
            item["uri"],
            item["rank"],
            item["state"],
            human_bytes(item["size_bytes"]),
            human_seconds(item["age_seconds"]),
            item["last_error"],
        )
        for item in document["journal"]
    ]
    here = [
        (item["uri"], item["kind"], item["files"], human_bytes(item["size_bytes"]), "yes" if item["drained"] else "no")
        for item in document["local"]
    ]
    view: list[RenderableType] = [facts(summary)]
    if waiting:
        view.append(table("to_drain >rank state >size >age last_error", waiting))
    if here:
        view.append(table("on_this_node kind >files >size on_shared_tier", here))
    return view
