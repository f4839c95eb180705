"""The journal of saves still to be drained: one small file per rank and save, on the SSD.

J1  An entry is fsynced before the first shard byte of its save: an entry names every file of an unfinished save.
J2  One mover works on an entry at a time. A flock, which ends with its process, is the ownership.
J3  An entry is removed only when its files are committed on the shared tier, were deleted durably because no commit
    names them, are superseded by newer checkpoints on the SSD, or were released by `drain --forget`.
J4  An entry carries its own digest. A damaged one is reported, and no file is sent or deleted because of it.
J5  Tokens order the entries of files and removals: each sorts after all earlier ones, even if the clock steps.
J6  An entry whose drain failed for too long (drain/drainer.py) is set aside until `tierckpt drain --retry`.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..disk.durable import durable_write, fsync_dir, make_dirs, matching, read_whole, translated
from ..disk.file_lock import LockAttempt, try_lock
from ..errors import CommitAbandonedError, ManifestError, ObjectNotFoundError, StoreError
from ..format import manifest as manifests
from ..format.layout import BLOCKS_DIR, METADATA_DIR, Location, journal_dir, local_dir, parse_uri, written_file
from ..format.manifest import FileEntry, Manifest
from ..telemetry import logger
from ..types import Json

log = logger("journal")

WRITING = "writing"
AWAITING_COMMIT = "awaiting commit"
"""The files are durable; this rank does not know whether their save was committed. drain/recovery.py finds out."""
READY = "ready"
LOCAL_ONLY = "local-only"
"""Committed on the local tier and drained only on request."""
FILE = "file"
"""A single file at ``uri``. Without ``files`` it was removed, and the drain removes it."""
SET_ASIDE = "set aside"
"""The drain failed too long: no mover retries by itself, and nothing evicts the files."""
FILE_SET_ASIDE = "file set aside"
DRAIN_STATES = (READY, FILE)
SET_ASIDE_STATES = (SET_ASIDE, FILE_SET_ASIDE)
ENTRY_BYTES_MAX = 2 * manifests.MANIFEST_BYTES_MAX
"""Room for a manifest and, on the coordinator, the entries of its own files once more."""
_FILE_TOKEN = re.compile(r"file-[0-9a-f]+-([0-9]{20})-[0-9a-f]{8}")
FIELDS = frozenset(
    ("token", "uri", "rank", "state", "created_unix_seconds", "chunk_size_bytes", "files", "manifest", "error")
)
NEWER_FIELDS = frozenset(("failing_since_unix_seconds", "after_uri", "branch"))
"""Written only with a value."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """The files of one rank of one save, durable once ``state`` is READY or LOCAL_ONLY.

    ``manifest``: the whole checkpoint's on the coordinator, this rank's fragment after a save without collectives.
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
    failing_since_unix_seconds: float = 0.0
    """First failure of the current type, kept over restarts of the mover. 0: no failure."""
    after_uri: str = ""
    """The file was removed with this directory: drained after all that this node had closed under it."""
    branch: str = ""

    @property
    def location(self) -> Location:
        return parse_uri(self.uri)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    @property
    def is_fragment(self) -> bool:
        manifest = self.manifest
        return manifest is not None and manifest.world_size > 1 and self.token == f"{manifest.attempt}-{self.rank}"


class Journal:
    """The entries under one local root. Blocking."""

    def __init__(self, local_root: Path) -> None:
        self.directory = journal_dir(local_root)

    def write(self, entry: JournalEntry) -> JournalEntry:
        """Write ``entry`` durably (J1)."""
        make_dirs(self.directory)
        durable_write(self.path(entry.token), encode(entry))
        return entry

    def open(self, token: str, location: Location, rank: int, chunk_size_bytes: int, branch: str = "") -> JournalEntry:
        opened = JournalEntry(token, location.uri, rank, WRITING, time.time(), chunk_size_bytes, branch=branch)
        return self.write(opened)

    def read(self, token: str) -> JournalEntry | None:
        """Raises ManifestError if the entry is damaged (J4)."""
        try:
            return read_entry(self.path(token))
        except ObjectNotFoundError:
            return None

    def entries(self) -> list[JournalEntry]:
        """Newest first. Unreadable ones are logged and kept."""
        return sorted(self._read("*"), key=lambda entry: entry.created_unix_seconds, reverse=True)

    def _read(self, pattern: str, before: float = math.inf) -> Iterator[JournalEntry]:
        with translated(self.directory, is_above=True):
            paths = matching(self.directory, f"{pattern}.json")
        for path in paths:
            if before < math.inf and _order_of(path.stem) >= before:
                continue
            try:
                yield read_entry(path)
            except ObjectNotFoundError:
                continue
            except (ManifestError, StoreError) as error:
                log.warning("unreadable journal entry %s: %s", path.name, error)

    def next_file_token(self, uri: str) -> tuple[str, list[str]]:
        """Return a token that sorts last (J5), and the tokens that ``uri`` has."""
        with translated(self.directory, is_above=True):
            tokens = [path.stem for path in matching(self.directory, f"{_files_of(None)}.json")]
        order = max(map(_order_of, tokens), default=0) + 1
        token = f"file-{_name_of(uri)}-{max(time.time_ns(), order):020d}-{secrets.token_hex(4)}"
        return token, [one for one in tokens if fnmatchcase(one, _files_of(uri))]

    def files(self, uri: str | None = None, *, before: str | None = None) -> list[JournalEntry]:
        """Return the files to drain, oldest first, up to the token ``before``. A missing file was never complete."""
        found = [
            entry
            for entry in self._read(_files_of(uri), math.inf if before is None else _order_of(before))
            # The name is not enough: an adoption may have such a name.
            if entry.state in (FILE, FILE_SET_ASIDE)
            and (not entry.files or written_file(self.directory.parent, entry.token).exists())
        ]
        return sorted(found, key=lambda entry: (_order_of(entry.token), entry.token))

    def remove(self, token: str) -> None:
        """Remove an entry (J3). Cost: two fsyncs if the save never finished, else nothing durable."""
        self.settle_removal(token)
        with translated(self.path(token), is_above=True):
            self.path(token).unlink(missing_ok=True)
            self._lock_path(token).unlink(missing_ok=True)

    def settle_removal(self, token: str) -> None:
        """Make the removal of an unfinished save's files durable: a power cut must not restore them."""
        try:
            entry = self.read(token)
        except (ManifestError, StoreError):
            return
        if entry is not None and entry.state not in (LOCAL_ONLY, *DRAIN_STATES, *SET_ASIDE_STATES):
            directory = local_dir(self.directory.parent, entry.location)
            for changed in (directory, directory / METADATA_DIR, directory / BLOCKS_DIR):
                if changed.is_dir():
                    with suppress(ObjectNotFoundError):
                        fsync_dir(changed)

    def fail(
        self, token: str, error: str, *, patience_seconds: float = math.inf, is_passing: bool = False
    ) -> JournalEntry | None:
        """Record a failed or (``is_passing``, ``error`` '') waiting drain.

        It is set aside after ``patience_seconds`` of failures of one type.
        """
        entry, now = self.read(token), time.time()
        if entry is None or entry.state in SET_ASIDE_STATES:
            return entry
        if entry.state not in DRAIN_STATES:
            return entry if entry.error == error else self.write(replace(entry, error=error))
        is_same = is_passing if not entry.error else entry.error.partition(":")[0] == error.partition(":")[0]
        since = entry.failing_since_unix_seconds or now
        since = min(since, now) if is_same else now  # a clock that went back restarts it
        state = SET_ASIDE_STATES[DRAIN_STATES.index(entry.state)] if now - since > patience_seconds else entry.state
        changed = replace(entry, error=error or entry.error, failing_since_unix_seconds=since, state=state)
        return changed if changed == entry else self.write(changed)

    def put_back(self, uri: str | None = None) -> list[JournalEntry]:
        """Schedule set-aside entries (of ``uri``; None: all) for draining again."""

        def put_back(entry: JournalEntry) -> None:
            state = DRAIN_STATES[SET_ASIDE_STATES.index(entry.state)]
            self.write(replace(entry, state=state, error="", failing_since_unix_seconds=0.0))

        return self._change_set_aside(uri, put_back)

    def forget(self, uri: str) -> list[JournalEntry]:
        """Remove the set-aside entries of ``uri`` (J3). Their files stay, except single files."""
        return self._change_set_aside(uri, self.drop)

    def drop(self, entry: JournalEntry) -> None:
        """Remove an entry and its single file. After a kill in between, the file was never complete."""
        if entry.state in (FILE, FILE_SET_ASIDE):
            with translated(self.directory, is_above=True):
                written_file(self.directory.parent, entry.token).unlink(missing_ok=True)
        self.remove(entry.token)

    def _change_set_aside(self, uri: str | None, change: Callable[[JournalEntry], object]) -> list[JournalEntry]:
        changed = []
        for entry in self.entries():
            if entry.state in SET_ASIDE_STATES and uri in (None, entry.uri):
                with self.own(entry.token) as free:
                    if free:
                        change(entry)
                        changed.append(entry)
        return changed

    @contextmanager
    def own(self, token: str, inherited: int | None = None) -> Iterator[LockAttempt]:
        """Hold the entry (J2). Yields a false hold at once if another live process or task holds it.

        ``inherited``: the locked descriptor that an ended holder passed on.
        """
        make_dirs(self.directory)
        path = self._lock_path(token)
        with translated(path, is_above=True), try_lock(path, inherited=inherited) as descriptor:
            yield descriptor
            if descriptor and not self.path(token).exists():
                path.unlink(missing_ok=True)  # a late owner finds no entry and leaves

    def path(self, token: str) -> Path:
        return self.directory / f"{token}.json"

    def _lock_path(self, token: str) -> Path:
        return self.directory / f"{token}.lock"


def set_aside_error(entry: JournalEntry) -> CommitAbandonedError:
    return CommitAbandonedError(
        f"{entry.uri} is on this node only: its drain was set aside ({entry.error})",
        hint="`tierckpt drain --retry` tries again, when the reason is mended",
        rank=entry.rank,
    )


def _name_of(uri: str) -> str:
    return manifests.digest_of(uri.encode())[:16]


def _files_of(uri: str | None) -> str:
    return f"file-{_name_of(uri) if uri is not None else '*'}-*"


def _order_of(token: str) -> int:
    found = _FILE_TOKEN.fullmatch(token)
    return int(found[1]) if found else 0


def encode(entry: JournalEntry) -> bytes:
    body: dict[str, Any] = {name: getattr(entry, name) for name in FIELDS}
    body["files"] = [manifests.encode_entry(item) for item in entry.files]
    body["manifest"] = entry.manifest.encode().decode() if entry.manifest else None
    return manifests.seal(body | {name: value for name in NEWER_FIELDS if (value := getattr(entry, name))})


def read_entry(path: Path) -> JournalEntry:
    entry = decode(read_whole(path, ENTRY_BYTES_MAX), where=str(path))
    if f"{entry.token}.json" != path.name:
        raise ManifestError(f"{path}: it is the entry of {entry.token}", hint="It was put under a wrong name")
    return entry


def decode(data: bytes, *, where: str) -> JournalEntry:
    """Decode and validate (J4). Raises ManifestError."""
    body = manifests.unseal(data, FIELDS, where=where, newer=NEWER_FIELDS, size_bytes_max=ENTRY_BYTES_MAX)
    problem = _problem(body)
    if problem:
        raise ManifestError(f"{where}: {problem} is not possible", hint="The entry is damaged; it is not acted upon")
    body["files"] = manifests.decode_entries(body["files"], body["chunk_size_bytes"], where=where)
    if body["manifest"] is not None:
        body["manifest"] = manifests.decode(body["manifest"].encode(), where=where)
    return JournalEntry(**body)


def _problem(body: Json) -> str:
    checks = {
        "token": manifests.is_token(body["token"]),
        "uri": is_uri(body["uri"]),
        "rank": manifests.is_int(body["rank"]) and 0 <= body["rank"] < manifests.RANKS_MAX,
        "state": body["state"] in (WRITING, AWAITING_COMMIT, LOCAL_ONLY, *DRAIN_STATES, *SET_ASIDE_STATES),
        "created_unix_seconds": manifests.is_unix_seconds(body["created_unix_seconds"]),
        "chunk_size_bytes": manifests.is_int(body["chunk_size_bytes"])
        and 4096 <= body["chunk_size_bytes"] <= manifests.SIZE_BYTES_MAX,
        "manifest": body["manifest"] is None or (isinstance(body["manifest"], str) and body["manifest"].isascii()),
        "error": isinstance(body["error"], str),
        "failing_since_unix_seconds": manifests.is_unix_seconds(body.get("failing_since_unix_seconds", 0.0)),
        "after_uri": "after_uri" not in body or is_uri(body["after_uri"]),
        "branch": isinstance(body.get("branch", ""), str),
    }
    return next((name for name, is_good in checks.items() if not is_good), "")


def is_uri(value: Any) -> bool:
    """Whether it has the form of ``Location.uri``, with its directory under the local root."""
    try:
        if not isinstance(value, str) or parse_uri(value).uri != value or "\0" in value:
            return False
        value.encode()
        below = os.path.normpath(local_dir(Path("/root"), parse_uri(value)))
        return below.startswith("/root/checkpoints/")
    except ValueError:
        return False
