"""The inventory of this node, by version: whole and partial entries of the cache, checkpoints of the local tier.

J1  Only complete chunks are reported and served: those with a line in a progress file (cache/partial_entry.py G1),
    a receipt (G4), or a committed manifest and a file of the right size.
J2  A chunk is digested before it is served for the first time, unless its line is of this boot: its writer verified
    it then. Receivers find later damage.
J3  No file is reached through a symbolic link, and none outside its directory.
J4  Repeated requests are cheap: a refresh costs one fstat while nothing arrives, and a scan for new directories
    runs at most once in ``SCAN_SECONDS``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from ..cache.partial_entry import SUFFIX, incoming_next_to, incoming_of
from ..cache.receipt import RECEIPT
from ..disk.file_io import open_beneath
from ..errors import ManifestError, TierckptError
from ..format.layout import BRANCHES_DIR, MANIFEST, PRIVATE_DIR, location_at
from ..format.manifest import digest_of
from ..telemetry import QUARANTINES, logger
from ..types import ByteRange, Json, Tier
from .chunk_files import (
    ChunkIndex,
    ChunkSource,
    Committed,
    Incoming,
    Whole,
    bring_in,
    digest_at,
    is_resident,
    read_beneath,
)
from .peer_http import CHUNK_BYTES_MAX, CHUNKS_MAX, LINES_IN_HEAD_MAX, LINES_MAX, ChunkReport

log = logger("peer")

SCAN_SECONDS = 0.5
DEPTH_MAX = 32


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    source: ChunkSource
    index: int
    chunk: int
    path: str

    @property
    def directory(self) -> Path:
        return self.source.directory

    @property
    def byte_range(self) -> ByteRange:
        return self.source.frozen.chunk_range(self.index, self.chunk)


@dataclass(frozen=True, slots=True)
class Opened:
    """An open file, and the range of a chunk in it. The caller closes it."""

    file: int
    byte_range: ByteRange
    digest: str

    def close(self) -> None:
        os.close(self.file)


def open_range(path: Path, at: ByteRange, digest: str = "") -> Opened | None:
    """Open a range, after reading it into the page cache. Return None if the file was renamed or is too short."""
    try:
        file = open_beneath(path.parent, path.name)
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, file)
        if os.fstat(file).st_size < at.stop:
            return None
        bring_in(file, at)
        opened = Opened(file, at, digest or digest_at(file, at))
        stack.pop_all()
        return opened


@dataclass(frozen=True, slots=True)
class Answers:
    """What other parts of the agent answer to peers; None: nothing.

    ``hub`` fetches a range of a file of a Hub, or only looks it up; it returns the file with the range, and its digest.
    """

    fresh: Callable[[], Json | None] | None = None
    segment: Callable[[str, ByteRange], Opened | None] | None = None
    hub: Callable[[str, ByteRange, bool], Future[tuple[Path, str]] | None] | None = None
    drains: Callable[[], Awaitable[Json]] | None = None


class Holdings:
    """Files of this node below ``local_root`` and in the directories of ``add``. Blocking; any thread."""

    def __init__(self, local_root: Path) -> None:
        self._root = local_root
        self._lock = threading.RLock()
        self._named = Counter[tuple[str, Path]]()
        self._sources: dict[Path, ChunkSource] = {}
        self.by_version: dict[str, list[ChunkSource]] = {}
        self._views: dict[tuple[str, int], ChunkIndex] = {}
        """By version and chunk size."""
        self._manifests: dict[str, Path] = {}
        self._steps: dict[str, dict[str, str]] = {}
        self._scanned_at = float("-inf")
        self.bad = 0

    # --- directories named by processes --------------------------------------------------------------------------

    def add(self, version: str, directory: Path) -> None:
        """Add a directory that has ``version``, or is being filled with it. Each ``add`` needs one ``remove``."""
        with self._lock:
            self._named[version, directory.absolute()] += 1
            self._scanned_at = float("-inf")

    def remove(self, version: str, directory: Path) -> None:
        with self._lock:
            self._named -= Counter([(version, directory.absolute())])  # without those at zero
            self._scanned_at = float("-inf")

    # --- queries -------------------------------------------------------------------------------------------------

    def report(self, version: str, chunk_size_bytes: int, after: int = 0, most: int = LINES_MAX) -> ChunkReport:
        with self._lock:
            # Claims first: a chunk that arrives between the two reads is then in both, never in neither.
            claims = {source: list(source.claimed()) for source in self._known(version, chunk_size_bytes)}
            view = self._view(version, chunk_size_bytes)
            if view is None:
                return ChunkReport()
            sources = self._known(version, chunk_size_bytes)
            for source in sources:
                if source not in claims:
                    claims[source] = list(source.claimed())
            fetching = frozenset(view.ordinal(*chunk) for source in sources for chunk in claims[source])
            return replace(_list(view, sources, after, most), fetching=fetching)

    def locate(self, version: str, chunk_size_bytes: int, ordinal: int) -> ChunkPlace | None:
        with self._lock:
            view = self._view(version, chunk_size_bytes)
            return self._place(view, self._known(version, chunk_size_bytes), ordinal)

    def has_seen(self, version: str, chunk_size_bytes: int, ordinal: int) -> bool:
        """True if a chunk was here at the last refresh. Never waits, neither for a disk nor for a lock."""
        view, sources = self._views.get((version, chunk_size_bytes)), self._known(version, chunk_size_bytes)
        return self._place(view, sources, ordinal) is not None

    def _place(self, view: ChunkIndex | None, sources: list[ChunkSource], ordinal: int) -> ChunkPlace | None:
        if view is None or not 0 <= ordinal < view.total:
            return None
        index, chunk = view.chunk_at(ordinal)
        source = next((source for source in sources if source.covers(index, chunk)), None)
        return ChunkPlace(source, index, chunk, source.path(index)) if source is not None else None

    def open(self, version: str, chunk_size_bytes: int, ordinal: int) -> Opened | None:
        """Open a chunk: verified (J2), and in the page cache. None if it is not here.

        Cost: a digest on the first request for a chunk of an earlier boot, otherwise two or three system calls.
        """
        for _ in range(2):
            place = self.locate(version, chunk_size_bytes, ordinal)
            if place is None:
                return None
            try:
                return self._open(place)
            except OSError:
                with self._lock:  # renamed or evicted before the open
                    self._scanned_at = float("-inf")
                    self._scan()
        return None

    def _open(self, place: ChunkPlace) -> Opened | None:
        with contextlib.ExitStack() as stack:
            file = open_beneath(place.directory, place.path)
            stack.callback(os.close, file)
            if os.fstat(file).st_size < place.byte_range.stop:
                raise OSError("shorter than it should be")
            digest = place.source.verify(file, place.index, place.chunk)
            if digest is None:
                self._found_bad(place)
                return None
            bring_in(file, place.byte_range)
            stack.pop_all()
            return Opened(file, place.byte_range, digest)

    def _found_bad(self, place: ChunkPlace) -> None:
        with self._lock:
            self.bad += 1
        QUARANTINES.emit(1, tier=Tier.LOCAL)
        log.error(
            "%s: bytes %d-%d of %s are not what landed: no peer gets them. `tierckpt cache check --read-data` or "
            "`tierckpt verify --read-data` says what else is damaged",
            place.directory,
            place.byte_range.start,
            place.byte_range.stop,
            place.path,
        )

    def open_now(
        self, version: str, chunk_size_bytes: int, ordinal: int, after: int
    ) -> tuple[Opened, ChunkReport] | None:
        """``open``, and a report from line ``after``, without waiting, so that an event loop may call it.

        None: missing, never verified, not in the page cache, or locked. ``open`` finds out which.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            view, sources = self._views.get((version, chunk_size_bytes)), self._known(version, chunk_size_bytes)
            for source in sources:
                if not source.is_whole:
                    source.refresh()
            place = self._place(view, sources, ordinal)
            digest = place.source.verified(place.index, place.chunk) if place is not None else ""
            if view is None or place is None or not digest:
                return None
            file = open_beneath(place.directory, place.path)
            if os.fstat(file).st_size < place.byte_range.stop or not is_resident(file, place.byte_range):
                os.close(file)
                return None
            return Opened(file, place.byte_range, digest), _list(view, sources, after, LINES_IN_HEAD_MAX)
        except OSError:
            return None
        finally:
            self._lock.release()

    def is_fetching(self, version: str) -> bool:
        with self._lock:
            self._find(version)
            return any(source.is_filled_now() for source in self.by_version.get(version, []))

    def manifest(self, uri_digest: str) -> bytes | None:
        """Return the manifest committed here at the URI with this digest."""
        with self._lock:
            self._scan()
            directory = self._manifests.get(uri_digest)
        if directory is None:
            return None
        try:
            return read_beneath(directory, MANIFEST)
        except (OSError, TierckptError):
            return None

    def steps(self, parent_digest: str) -> dict[str, str]:
        """Return names and attempts of checkpoints directly below the URI with this digest.

        ``BRANCHES_DIR`` names the one with the newest branch that went back (branches.py).
        """
        with self._lock:
            self._scan()
            return dict(self._steps.get(parent_digest, {}))

    def fills(self) -> list[Json]:
        with self._lock:
            self._scan()
            found = [source for source in self._sources.values() if isinstance(source, Incoming)]
            for source in found:
                source.refresh()
            return [
                {
                    "uri": source.frozen.uri,
                    "version": source.frozen.version,
                    "chunk_size_bytes": source.frozen.chunk_size_bytes,
                    "chunks": source.frozen.first_ordinals[-1],
                    "chunks_landed": sum(len(chunks) for chunks in source.lines.landed.values()),
                    "size_bytes": source.frozen.size_bytes,
                    "landed_bytes": source.lines.landed_bytes,
                    "live": source.is_filled_now(),
                }
                for source in found
            ]

    # --- scans ---------------------------------------------------------------------------------------------------

    def _known(self, version: str, chunk_size_bytes: int) -> list[ChunkSource]:
        """Return the sources with chunks of this size, as of the last refresh."""
        sources = self.by_version.get(version, [])
        return [source for source in sources if source.frozen.chunk_size_bytes == chunk_size_bytes]

    def _view(self, version: str, chunk_size_bytes: int) -> ChunkIndex | None:
        self._find(version)
        sources, key = self._known(version, chunk_size_bytes), (version, chunk_size_bytes)
        if not sources or chunk_size_bytes > CHUNK_BYTES_MAX or sources[0].frozen.first_ordinals[-1] > CHUNKS_MAX:
            return None
        if key not in self._views:
            self._views[key] = ChunkIndex(sources[0].frozen)
        return self._views[key]

    def _find(self, version: str) -> None:
        sources = self.by_version.get(version, [])
        are_there = [source.refresh() for source in sources]
        if not all(are_there):
            self._scanned_at = float("-inf")
        if self._scanned_at == float("-inf") or not any(source.is_whole for source in sources):
            self._scan()

    def _scan(self) -> None:
        if time.monotonic() - self._scanned_at < SCAN_SECONDS:
            return
        found: dict[Path, ChunkSource] = {}
        for directory, read in self._candidates():
            if directory in found:
                continue
            known = self._sources.get(directory)
            source = known if known is not None and known.refresh() else self._read(read, directory)
            if source is not None:
                found[directory] = source
        self._replace(found)
        self._scanned_at = time.monotonic()

    def _read(self, read: Callable[[Path], ChunkSource | None], directory: Path) -> ChunkSource | None:
        try:
            return read(directory)
        except (OSError, ManifestError) as error:
            log.debug("%s holds nothing for peers: %s", directory, error)
            return None

    def _replace(self, found: dict[Path, ChunkSource]) -> None:
        trusted = {source.frozen.version: source for source in self._sources.values() if isinstance(source, Incoming)}
        by_version: dict[str, list[ChunkSource]] = {}
        for directory, source in found.items():
            if directory not in self._sources and isinstance(source, Whole) and source.frozen.version in trusted:
                source.trust(trusted[source.frozen.version].lines)  # its chunks landed while this process watched (J2)
            by_version.setdefault(source.frozen.version, []).append(source)
            if isinstance(source, Committed):
                for version, single in source.singles.items():
                    by_version.setdefault(version, []).append(single)
        self._sources, self.by_version = found, by_version
        self._views = {key: view for key, view in self._views.items() if key[0] in by_version}
        self._index_checkpoints()

    def _index_checkpoints(self) -> None:
        self._manifests, self._steps = {}, {}
        went_back_at = dict[Path, int]()
        for directory, source in self._sources.items():
            if isinstance(source, Committed) and (location := location_at(self._root, directory)) is not None:
                self._manifests[digest_of(location.uri.encode())] = directory
                parent, _, name = location.uri.rpartition("/")
                steps = self._steps.setdefault(digest_of((parent or "/").encode()), {})
                steps[name] = source.attempt
                if source.went_back_at > went_back_at.get(directory.parent, 0):
                    went_back_at[directory.parent], steps[BRANCHES_DIR] = source.went_back_at, name

    def _candidates(self) -> Iterator[tuple[Path, Callable[[Path], ChunkSource | None]]]:
        for version, directory in list(self._named):
            for place in {incoming_of(directory, version), incoming_next_to(directory, version)}:
                yield place, Incoming
            yield directory, _whole_or_committed
        for name in _names(self._root / "cache"):
            if name.endswith(SUFFIX):
                yield self._root / "cache" / name, Incoming
            elif not name.startswith("."):
                yield self._root / "cache" / name, Whole
        yield from self._below(self._root / "checkpoints", DEPTH_MAX)

    def _below(self, directory: Path, depth: int) -> Iterator[tuple[Path, Callable[[Path], ChunkSource | None]]]:
        for name in _names(directory):
            path = directory / name
            if name.endswith(SUFFIX) and name.startswith("."):
                yield path, Incoming
                continue
            if (path / MANIFEST).is_file():
                yield path, Committed
            elif depth and name != PRIVATE_DIR:
                yield from self._below(path, depth - 1)
            for inner in _names(path / PRIVATE_DIR):
                if inner.endswith(SUFFIX):
                    yield path / PRIVATE_DIR / inner, Incoming


def _list(view: ChunkIndex, sources: Sequence[ChunkSource], after: int, most: int) -> ChunkReport:
    if any(source.is_whole for source in sources):
        return ChunkReport(view.total, view.total, view.total, whole=True)
    view.take(sources)
    start = after if after <= len(view.log) else 0
    new = tuple(view.log[start : start + most])
    return ChunkReport(view.total, len(view.log), start + len(new), new)


def _whole_or_committed(directory: Path) -> ChunkSource | None:
    return Whole(directory) if (directory / RECEIPT).is_file() else Committed(directory)


def _names(directory: Path) -> list[str]:
    """Return the directories in one, without links (J3)."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
