"""Copies of gradient logs on other nodes: a lost node costs the steps of one round.

    <run>/.tierckpt-gradients/rank-N/                    the log of a rank of this node (training/every_step)
    <run>/.tierckpt-gradients/copies/<member>/rank-N/    this node's copy of the log of that member

Crash safety: a copy is append-only, and its new frames are verified. A torn tail is ignored (R4), and truncated by the
next fetch. A segment is started after its predecessor is whole: a copy is a prefix of the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path

from ..cache import space
from ..checkpoint.retention import marked_directories
from ..config import Settings
from ..disk.durable import closing_file, fsync_dir, make_dirs, matching, translated
from ..disk.file_io import pwrite_all
from ..disk.file_lock import lock_async
from ..disk.quarantine import open_regular
from ..errors import CapacityError, IntegrityError, TierckptError
from ..format.layout import GRADIENTS_DIR, Location, local_dir, location_at, step_of
from ..peer.inventory import Opened, open_range
from ..peer.membership import Member
from ..peer.peer_catalog import PeerCatalog
from ..peer.replica_policy import BASES_MAX, LogRow
from ..save.log_segments import Tail, paths_in, remove_before, step_of_path
from ..types import Buffer, ByteRange, Tier

COPIES = "copies"
PIECE_BYTES = 4 << 20
LOCK_SECONDS = 60.0


async def _at_once(size_bytes: int) -> None: ...


def copies_of(directory: Path) -> list[Path]:
    return [path for member in matching(directory.parent / COPIES, "*") for path in matching(member, directory.name)]


class LogIndex:
    """The gradient logs below a local root, and copies of others'. Blocking; any thread."""

    def __init__(self, local_root: Path) -> None:
        self._root = local_root
        self._lock = threading.Lock()
        self._tails: dict[Path, Tail] = {}
        self._paths: dict[str, Path] = {}
        self.rows: list[LogRow] = []

    def refresh(self) -> None:
        with self._lock:
            runs, tails = marked_directories(self._root / "checkpoints", GRADIENTS_DIR), dict[Path, Tail]()
            rows = [self._row(tails, *found) for run in runs for found in self._logs(run)]
            named = [(row.identity(path.name), path) for row, found in rows for path in found]
            self._tails, self._paths, self.rows = tails, dict(named), [row for row, _ in rows]

    def _logs(self, run: Path) -> Iterator[tuple[Location, str, Path]]:
        location, top = location_at(self._root, run), run / GRADIENTS_DIR
        if location is None:
            return
        for of, directory in [("", top), *((one.name, one) for one in matching(top / COPIES, "*"))]:
            for log in matching(directory, "rank-*"):
                yield location, of, log

    def _row(self, tails: dict[Path, Tail], run: Location, of: str, directory: Path) -> tuple[LogRow, list[Path]]:
        # The list comes first: if it has a segment, the one before it is complete.
        found = [self._look_at(path) for path in paths_in(directory)]
        tails |= {tail.path: tail for tail in found}
        begun = [tail for tail in found if tail.segment is not None]
        step = max((tail.step for tail in begun), default=-1)
        if begun and begun[-1].segment is not None:
            step = begun[-1].step if begun[-1].step >= 0 else min(step, begun[-1].segment.step)  # S2
        bases = tuple(base for tail in begun if tail.segment is not None for base in tail.segment.bases)[-BASES_MAX:]
        parts = tuple((tail.path.name, tail.size_bytes) for tail in begun)
        return LogRow(run.uri, step_of(directory.name) or 0, of, step, parts, bases), [tail.path for tail in begun]

    def _look_at(self, path: Path) -> Tail:
        is_copy = path.parents[2].name == COPIES
        tail = self._tails.get(path) or Tail(path, is_verified=is_copy)
        tail.read_new()
        self._tails[path] = tail
        return tail

    def open(self, identity: str, at: ByteRange) -> Opened | None:
        path = self._paths.get(identity)
        return open_range(path, at) if path is not None else None

    def missing_segments(self, directory: Path, row: LogRow, after: int) -> list[tuple[Tail, int]]:
        """Return the segments of ``row`` that the copy in ``directory`` lacks after step ``after``, and their sizes.

        First removes abandoned segments: those not in the log that start at one of its segments or later.
        """
        names, first = {name for name, _ in row.segments}, step_of_path(Path(row.segments[0][0]))
        with self._lock:
            for path in paths_in(directory):
                if path.name not in names and step_of_path(path) >= first:
                    path.unlink(missing_ok=True)
                    self._tails.pop(path, None)
            found = [(self._look_at(directory / name), size_bytes) for name, size_bytes in row.after(after)]
            return [(tail, size_bytes) for tail, size_bytes in found if tail.size_bytes < size_bytes]

    def append(self, path: Path, data: Buffer, at: int) -> None:
        """Write ``data`` at ``at``, directly after the previous bytes, and fsync it (R4)."""
        with self._lock, translated(path):
            with closing_file(open_regular(path, os.O_RDWR | os.O_CREAT, 0o644)) as file:
                os.ftruncate(file, at)
                pwrite_all(file, data, at, path)
                os.fdatasync(file)
            if not at:
                fsync_dir(path.parent)

    def look_at(self, path: Path) -> Tail:
        with self._lock:
            return self._look_at(path)

    def truncate(self, row: LogRow, after: int, *, is_told: bool) -> None:
        """Remove a copy's segments with no step above ``after``. Raises OSError.

        The last one stays while its member reports that log.
        """
        directory = copy_directory(self._root, row, row.of)
        with self._lock:
            remove_before(directory, after)
            if not is_told and row.step <= after:
                for path in paths_in(directory):
                    path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    directory.rmdir()


def copy_directory(local_root: Path, row: LogRow, of: str) -> Path:
    return local_dir(local_root, row.location) / GRADIENTS_DIR / COPIES / of / f"rank-{row.rank}"


async def fetch_log(
    index: LogIndex,
    settings: Settings,
    cluster: PeerCatalog,
    member: Member,
    row: LogRow,
    *,
    after: int = -1,
    spend: Callable[[int], Awaitable[None]] = _at_once,
) -> int:
    """Fetch the frames in ``row`` after step ``after`` into the copy on this node. Returns the number of bytes.

    Only one process of a node may call this at a time.

    Raises:
        CapacityError: only this node's own saves could be evicted. Nothing was written.
        IntegrityError: damaged frames; the steps before them are here.
        TierckptError, TimeoutError: the member does not send them.
    """
    directory = copy_directory(settings.local_root, row, row.of or member.name)
    await asyncio.to_thread(make_dirs, directory)
    async with lock_async(directory.with_name(f".{directory.name}.lock"), LOCK_SECONDS, str(directory)):
        lacking = await asyncio.to_thread(index.missing_segments, directory, row, after)
        needed = sum(size_bytes - tail.size_bytes for tail, size_bytes in lacking)
        if needed and not await asyncio.to_thread(space.has_room, settings, needed, directory):
            raise CapacityError(f"{needed} bytes are needed, and only this node's own saves could be evicted")
        for tail, size_bytes in lacking:
            identity = row.identity(tail.path.name)
            for at, stop in pairwise([*range(tail.size_bytes, size_bytes, PIECE_BYTES), size_bytes]):
                await spend(stop - at)
                data = await cluster.segment(member, identity, ByteRange(at, stop))
                await asyncio.to_thread(index.append, tail.path, data, at)
            if (await asyncio.to_thread(index.look_at, tail.path)).size_bytes < size_bytes:
                raise IntegrityError(
                    f"damaged bytes from {member.name} in the gradient log of rank {row.rank} of {row.uri} "
                    f"after step {tail.step}",
                    hint="They are fetched again. If this persists, the disk of that node is damaged",
                    tier=Tier.PEER,
                    peer=member.name,
                )
    return needed


async def bring_log(settings: Settings, cluster: PeerCatalog, run: Location, rank: int, base: str, beyond: int) -> None:
    """Fetch the log of ``rank`` after the checkpoint ``base``, if a node has steps after ``beyond``.

    Raises as ``fetch_log``.
    """
    members = {member.name: member for member in (await cluster.wait_for_members()).other_nodes}
    replies = await cluster.fresh(members.values())
    rows = [(row, name) for name, (_, logs) in replies.items() for row in logs if row.log == (run.uri, rank)]
    rows = [(row, name) for row, name in rows if base in row.bases and row.step > beyond]
    failure: Exception | None = None
    for row, name in sorted(rows, key=lambda found: found[0].step, reverse=True):
        try:
            await fetch_log(LogIndex(settings.local_root), settings, cluster, members[name], row)
            return
        except (TierckptError, OSError, TimeoutError) as error:
            failure = error
    if failure is not None:
        raise failure
