"""Paths under a checkpoint URI and under the local root. Pure functions over strings.

A checkpoint directory has the same layout on every tier::

    <checkpoint>/.metadata                          DCP's own metadata: stock PyTorch reads the checkpoint through it
    <checkpoint>/__0_0-<token>.distcp               shards; the token is new for every rank and save (P3)
    <checkpoint>/files-<token>/...                  an adopted directory, as another program wrote it
    <checkpoint>/.tierckpt/manifest.json            the commit: written last, names every file with size and digests
    <checkpoint>/.tierckpt/claim.json               which attempt owns this id (shared tier only)
    <checkpoint>/.tierckpt/metadata/<attempt>       the metadata bytes of the manifest's attempt
    <checkpoint>/.tierckpt/blocks/<token>           digests of the blocks of one rank's shards
    <checkpoint>/.tierckpt/pending/<attempt>.json   the future manifest, until every rank has drained (shared tier only)
    <checkpoint>/.tierckpt/parts/<token>.json       one rank has drained its shards (shared tier only)
    <checkpoint>/.tierckpt/handoff/<save>-<rank>.json the shards that a dead rank had written (shared tier only)
    <checkpoint>/.tierckpt/removed/<attempt>.json   an unfinished removal, with the files still to delete
    <checkpoint>/.tierckpt/origin/<token>           a rank of this node makes this save (local tier, with peers)
    <checkpoint>/.tierckpt/replica.json             saves of other nodes that are copied here (local tier, with peers)
    <checkpoint>/.tierckpt/incoming/                files being received from peers (local tier)
    <checkpoint>/.tierckpt/superseded.json          local-only, and this node has newer checkpoints (local tier)

A run, the directory of its checkpoints, has ``<run>/.tierckpt-history/*.jsonl`` and ``*.commits``, read by `tierckpt
report`, and ``<run>/.tierckpt-windows/step-<n>``: a redo log (docs/internals/redo-log.md), with the layout and commit
of a checkpoint. It becomes the checkpoint of step n by replay, and is not listed as one before. A run with a job that
went back to an older step has ``<run>/.tierckpt-branches/<order>-<id>.json`` for each branch (checkpoint/branches.py).
The local tier also has ``<run>/.tierckpt-gradients/rank-<n>/*.gradients``: the steps after its checkpoints
(save/log_segments.py).

The local root holds::

    <local_root>/checkpoints/<scheme>/<authority>/<path>/...     the local tier, mirroring the URI
    <local_root>/journal/<token>.json                            files still to be drained
    <local_root>/written/<token>                                 a single file that is still to be drained
    <local_root>/retention/<token>.json                          a run to prune, after a drain into it
    <local_root>/control.json                                    rate limit and pause for this node's movers
    <local_root>/read-modes.json                                 the fastest read mode of each device
    <local_root>/model-read-modes.json                            the same for model files
    <local_root>/flush.mark                                      locked (shared) during the flush of a checkpoint
    <local_root>/cache/                                          the node cache: models and data files (cache/pool.py)
    <local_root>/leases/                                         flocks of the readers of a checkpoint
    <local_root>/epochs/                                         the start of each run's job that may commit
    <local_root>/quarantine/                                     files of an unexpected kind
    <local_root>/agent/                                          the agent's socket, lock and log
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from .uris import Location as Location
from .uris import parse_uri as parse_uri

METADATA = ".metadata"
PRIVATE_DIR = ".tierckpt"
MANIFEST = ".tierckpt/manifest.json"
CLAIM = ".tierckpt/claim.json"
PENDING_DIR = ".tierckpt/pending"
PARTS_DIR = ".tierckpt/parts"
METADATA_DIR = ".tierckpt/metadata"
BLOCKS_DIR = ".tierckpt/blocks"
HANDOFF_DIR = ".tierckpt/handoff"
ORIGIN_DIR = ".tierckpt/origin"
REPLICA = ".tierckpt/replica.json"
REPLICATED = ".tierckpt/replicated.json"
"""Local only: this node's saves of this attempt, and its copies of others', are on all their holders."""
INCOMING_DIR = ".tierckpt/incoming"
SUPERSEDED = ".tierckpt/superseded.json"
"""Local only: this attempt was not drained and this node has newer ones: the copy may be evicted."""
DRAINED = ".tierckpt/drained.json"
"""Local only: the shared tier has committed this attempt: the copy may be evicted."""

GRADIENTS_DIR = ".tierckpt-gradients"
"""Of a run, local: the steps after its checkpoints, one directory per rank (training/every_step)."""
HISTORY_DIR = ".tierckpt-history"
"""Of a run: time records of its processes, one small file per start; and commit times on other tiers, one
``COMMITS_SUFFIX`` file per node."""
COMMITS_SUFFIX = ".commits"

BRANCHES_DIR = ".tierckpt-branches"
"""Of a run: the steps abandoned when a job restored an older one (checkpoint/branches.py)."""

WINDOWS_DIR = ".tierckpt-windows"
"""Of a run: redo logs by step, which become checkpoints by replay."""

SHARD_SUFFIX = ".distcp"

_STEP = re.compile(r"(\d+)$")


def local_dir(local_root: Path, location: Location) -> Path:
    return Path(local_root, "checkpoints", location.scheme, location.authority or "_", location.path.strip("/"))


def location_at(local_root: Path, directory: Path) -> Location | None:
    try:
        scheme, authority, *path = directory.relative_to(Path(local_root, "checkpoints")).parts
    except ValueError:
        return None
    below = "/".join(path)
    found = Location(scheme, "" if authority == "_" else authority, f"/{below}" if scheme == "file" else below)
    return found if local_dir(local_root, found) == directory else None


def journal_dir(local_root: Path) -> Path:
    return Path(local_root, "journal")


RETENTION_DIR = "retention"


def written_file(local_root: Path, token: str) -> Path:
    return Path(local_root, "written", token)


def agent_dir(local_root: Path) -> Path:
    return Path(local_root, "agent")


def epoch_file(local_root: Path, run: Location) -> Path:
    return Path(local_root, "epochs", hashlib.sha256(run.uri.encode()).hexdigest()[:32])


def control_file(local_root: Path) -> Path:
    return Path(local_root, "control.json")


def checks_file(local_root: Path) -> Path:
    return Path(local_root, "checks.json")


def flush_mark(local_root: Path) -> Path:
    return Path(local_root, "flush.mark")


def read_modes(local_root: Path) -> Path:
    return Path(local_root, "read-modes.json")


def model_read_modes(local_root: Path) -> Path:
    return Path(local_root, "model-read-modes.json")


def attempt_metadata(attempt: str) -> str:
    return f"{METADATA_DIR}/{attempt}"


def blocks_file(token: str) -> str:
    return f"{BLOCKS_DIR}/{token}"


def origin_file(token: str) -> str:
    """Mark that a rank of this node makes this save. Empty; losing it costs a copy on peers."""
    return f"{ORIGIN_DIR}/{token}"


def private_files(token: str) -> tuple[str, ...]:
    return attempt_metadata(token), blocks_file(token), origin_file(token)


def adopted_dir(token: str) -> str:
    """Directory of the files that one rank has adopted, under their original names."""
    return f"files-{token}"


def pending(attempt: str) -> str:
    return f"{PENDING_DIR}/{attempt}.json"


def part(token: str) -> str:
    return f"{PARTS_DIR}/{token}.json"


def rank_metadata(rank: int) -> str:
    """Metadata of one rank in a save without collectives (DCP's own name)."""
    return f"__{rank}{METADATA}"


def shard_name(prefix: str, index: int, token: str) -> str:
    """``prefix`` is DCP's per-rank prefix (``__3_``); the token makes the name new for every save."""
    return f"{prefix}{index}-{token}{SHARD_SUFFIX}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint URI's last part (``step-100`` -> 100), or None."""
    match = _STEP.search(name.rstrip("/"))
    return int(match[1]) if match else None


def step_name(step: int) -> str:
    return f"step-{step}"


REMOVED_DIR = f"{PRIVATE_DIR}/removed"


def removal_note(attempt: str) -> str:
    return f"{REMOVED_DIR}/{attempt}.json"
