"""Paths under a checkpoint URI and under the local root. Pure functions over strings.

docs/internals/layout.md lists all files. A shard's name has a token, new for every rank and save (P3).
``manifest.json``, written last, is the commit.
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
"""Local only: all holders have this attempt."""
INCOMING_DIR = ".tierckpt/incoming"
SUPERSEDED = ".tierckpt/superseded.json"
"""Local only: this attempt was not drained and this node has newer ones: the copy may be evicted."""
DRAINED = ".tierckpt/drained.json"
"""Local only: the shared tier has this attempt: the copy may be evicted."""

GRADIENTS_DIR = ".tierckpt-gradients"
"""Of a run, local: one directory per rank."""
HISTORY_DIR = ".tierckpt-history"
"""Of a run: time records, a file per process start, and commit times on other tiers, a file per node."""
COMMITS_SUFFIX = ".commits"

BRANCHES_DIR = ".tierckpt-branches"

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
    """Marks that a rank of this node makes this save. Losing it costs a copy on peers."""
    return f"{ORIGIN_DIR}/{token}"


def private_files(token: str) -> tuple[str, ...]:
    return attempt_metadata(token), blocks_file(token), origin_file(token)


def adopted_dir(token: str) -> str:
    return f"files-{token}"


def pending(attempt: str) -> str:
    return f"{PENDING_DIR}/{attempt}.json"


def part(token: str) -> str:
    return f"{PARTS_DIR}/{token}.json"


def rank_metadata(rank: int) -> str:
    """DCP's name in a save without collectives."""
    return f"__{rank}{METADATA}"


def shard_name(prefix: str, index: int, token: str) -> str:
    """``prefix``: DCP's, of the rank (``__3_``)."""
    return f"{prefix}{index}-{token}{SHARD_SUFFIX}"


def step_of(name: str) -> int | None:
    """``step-100`` -> 100."""
    match = _STEP.search(name.rstrip("/"))
    return int(match[1]) if match else None


def step_name(step: int) -> str:
    return f"step-{step}"


REMOVED_DIR = f"{PRIVATE_DIR}/removed"


def removal_note(attempt: str) -> str:
    return f"{REMOVED_DIR}/{attempt}.json"
