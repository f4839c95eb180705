"""The JSON document of a committed checkpoint, for ``tierckpt info`` and the agent's page. Reads no data."""

from __future__ import annotations

from ..format.layout import adopted_dir
from ..format.manifest import Manifest
from ..types import Json
from .catalog import Checkpoint


def describe_committed(checkpoint: Checkpoint, manifest: Manifest, *, is_abandoned: bool) -> Json:
    """Return save, tiers, branch and files of ``checkpoint``. Blocking: one stat for each file."""
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
