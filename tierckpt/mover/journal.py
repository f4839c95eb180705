"""The journal: what a mover still has to drain, one small file per rank and save, on the SSD it drains.

Invariants (tests cite them):
    J1  An entry exists on disk, fsynced, before the first shard byte of its save is written: whatever a crash leaves
        behind has a name in the journal.
    J2  One mover works on an entry at a time. Ownership is a flock held by a process, so it ends with the process;
        there is no lock file to clean up after a crash.
    J3  An entry is removed only when its files are committed on the shared tier, or were deleted because no
        commit can name them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import manifest as manifests
from ..errors import ManifestError
from ..layout import Location, journal_dir, parse_uri
from ..manifest import FileEntry, Manifest
from ..stores.local import durable_write, make_dirs
from ..telemetry import logger
from .lock import try_lock

log = logger("journal")

WRITING = "writing"
READY = "ready"


@dataclass(frozen=True, slots=True)
class Entry:
    """What one rank of one save has to drain.

    ``files`` are durable on the local tier once ``state`` is READY. ``manifest`` is the whole checkpoint's on the
    coordinator, this rank's fragment after a save without collectives, None on every other rank.
    """

    token: str
    uri: str
    rank: int
    state: str = WRITING
    created_unix_seconds: float = 0.0
    chunk_size_bytes: int = 0
    files: tuple[FileEntry, ...] = ()
    manifest: Manifest | None = None
    error: str = ""

    @property
    def location(self) -> Location:
        return parse_uri(self.uri)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    @property
    def is_fragment(self) -> bool:
        """True after a save without collectives: the manifest covers this rank only."""
        return (
            self.manifest is not None
            and self.manifest.world_size > 1
            and len(self.manifest.metadata) == 1
            and (self.manifest.metadata[0].path.startswith("__"))
        )


class Journal:
    """The entries under one local root. Blocking, small files; call from a thread."""

    def __init__(self, local_root: Path) -> None:
        self.directory = journal_dir(local_root)

    def write(self, entry: Entry) -> Entry:
        """Make ``entry`` durable (J1), replacing an older state of it. Returns it."""
        make_dirs(self.directory)
        durable_write(self._path(entry.token), _encode(entry))
        return entry

    def open(self, token: str, location: Location, rank: int, chunk_size_bytes: int) -> Entry:
        return self.write(
            Entry(token, location.uri, rank, created_unix_seconds=time.time(), chunk_size_bytes=chunk_size_bytes)
        )

    def read(self, token: str) -> Entry | None:
        try:
            return _decode(self._path(token).read_bytes())
        except FileNotFoundError:
            return None

    def entries(self) -> list[Entry]:
        """Every readable entry, newest first. An unreadable one is reported and left for a person to look at."""
        found = []
        for path in self.directory.glob("*.json") if self.directory.is_dir() else ():
            try:
                found.append(_decode(path.read_bytes()))
            except FileNotFoundError:
                continue  # finished meanwhile
            except (ManifestError, ValueError, KeyError, TypeError) as error:
                log.warning("unreadable journal entry %s: %s", path.name, error)
        return sorted(found, key=lambda entry: entry.created_unix_seconds, reverse=True)

    def remove(self, token: str) -> None:
        self._path(token).unlink(missing_ok=True)
        self._lock_path(token).unlink(missing_ok=True)

    def fail(self, token: str, error: str) -> None:
        """Remember why the last try failed; the entry stays."""
        entry = self.read(token)
        if entry is not None and entry.error != error:
            self.write(replace(entry, error=error))

    @contextmanager
    def own(self, token: str) -> Iterator[bool]:
        """Hold the entry (J2). Yields False at once when another live process (or task) holds it."""
        make_dirs(self.directory)
        path = self._lock_path(token)
        with try_lock(path) as held:
            yield held
            if held and not self._path(token).exists():
                path.unlink(missing_ok=True)  # the entry is done; a late owner finds no entry and leaves

    def _path(self, token: str) -> Path:
        return self.directory / f"{token}.json"

    def _lock_path(self, token: str) -> Path:
        return self.directory / f"{token}.lock"


def _encode(entry: Entry) -> bytes:
    body: dict[str, Any] = {
        "token": entry.token,
        "uri": entry.uri,
        "rank": entry.rank,
        "state": entry.state,
        "created_unix_seconds": entry.created_unix_seconds,
        "chunk_size_bytes": entry.chunk_size_bytes,
        "files": [manifests.encode_entry(item) for item in entry.files],
        "manifest": entry.manifest.encode().decode() if entry.manifest else None,
        "error": entry.error,
    }
    return json.dumps(body).encode()


def _decode(data: bytes) -> Entry:
    body = json.loads(data)
    chunk = body["chunk_size_bytes"]
    return Entry(
        token=body["token"],
        uri=body["uri"],
        rank=body["rank"],
        state=body["state"],
        created_unix_seconds=body["created_unix_seconds"],
        chunk_size_bytes=chunk,
        files=manifests.decode_entries(body["files"], chunk, where="journal entry"),
        manifest=manifests.decode(body["manifest"].encode(), where="journal entry") if body["manifest"] else None,
        error=body["error"],
    )
