"""Listings of files and directories for fsspec.

V1  A committed checkpoint is listed with the files of its manifest, also while it still drains.
V2  Files without a commit are hidden: shards of a running or failed save, and private files.
V3  A file that this node has written and not drained yet is listed as written; a removed one is hidden.
V4  Everything else (data sets, models, checkpoints of stock DCP) is shown as the store has it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..disk.illness import ILL_SECONDS
from ..disk.processes import is_temporary
from ..errors import (
    CheckpointNotFoundError,
    ConfigError,
    EndpointError,
    ManifestError,
    ObjectNotFoundError,
    StoreError,
    StoreUnavailableError,
    UncommittedCheckpointError,
)
from ..format.layout import BRANCHES_DIR, MANIFEST, METADATA, PRIVATE_DIR, SHARD_SUFFIX, Location, adopted_dir, step_of
from ..format.manifest import FileEntry
from ..stores.base import Store
from ..stores.hub.api import repository_of
from ..stores.verified_read import stored_bytes
from ..telemetry import logger
from ..types import ObjectInfo
from . import local_commit, select
from .branches import abandoned_here
from .catalog import Checkpoint
from .journal import Journal, JournalEntry
from .retention import marked_directories

log = logger("catalog")

REQUESTS_MAX = 16

_RANK_METADATA = re.compile(r"__\d+\.metadata$")


@dataclass(frozen=True, slots=True)
class Thing:
    location: Location
    is_dir: bool = False
    size_bytes: int = 0
    etag: str | None = None
    checkpoint: Checkpoint | None = None
    entry: FileEntry | None = None
    written: JournalEntry | None = None


def is_checkpoint_file(name: str) -> bool:
    return name == METADATA or name.endswith(SHARD_SUFFIX) or bool(_RANK_METADATA.match(name))


def is_private(location: Location) -> bool:
    return PRIVATE_DIR in location.path.split("/")


def root_of(location: Location) -> tuple[Location, str]:
    if location.scheme == "hf" and (repository := repository_of(location)) is not None:
        name = location.path.removesuffix(repository.path).rstrip("/")
        return Location(location.scheme, location.authority, name), repository.path
    root = Location(location.scheme, location.authority, "/" if location.scheme == "file" else "")
    return root, location.path.strip("/")


class Browser:
    """Lists all tiers. Runs on one event loop; no call uses a cache."""

    def __init__(
        self,
        store_at: Callable[[Location], Store],
        find: Callable[[Location], Awaitable[Checkpoint]],
        directory_of: Callable[[Location], Path],
        journal: Journal,
    ) -> None:
        self._store_at, self._find, self._directory_of, self._journal = store_at, find, directory_of, journal
        self._gate = asyncio.Semaphore(REQUESTS_MAX)
        self._hung: asyncio.Task[str] | None = None

    async def find(self, location: Location) -> Thing:
        """Raises ObjectNotFoundError. Cost: one HEAD for a file, and a listing or a GET for a directory or committed
        file.
        """
        written = await asyncio.to_thread(self._journal.files, location.uri)
        if written and written[-1].files:
            return _written(location, written[-1])
        if written:
            raise _not_found_error(location)
        root, key = root_of(location)
        if not is_private(location) and key:
            if is_checkpoint_file(location.name):
                is_ours, checkpoint = await self._checkpoint(location.parent)
                for entry in _files(checkpoint):
                    if entry.location == location:
                        return entry
                if is_ours:
                    raise _not_found_error(location)
            try:
                info = await self._store_at(root).head(key)
                return Thing(location, size_bytes=info.size_bytes, etag=info.etag)
            except (ObjectNotFoundError, StoreUnavailableError, EndpointError):
                if await asyncio.to_thread(_has_commit, self._directory_of(location)):
                    return Thing(location, is_dir=True)
                for entry in await self._adopted(location):
                    return entry if entry.location == location else Thing(location, is_dir=True)
        await self.level(location)
        return Thing(location, is_dir=True)

    async def _adopted(self, location: Location) -> list[Thing]:
        """Return the files of an adopted checkpoint above ``location``. Tries only names that end in a step."""
        above = location.parent
        while root_of(above)[1]:
            if step_of(above.name) is not None and await self._has_manifest(above):
                _, checkpoint = await self._checkpoint(above)
                at, below = location.path, f"{location.path}/"
                return [
                    one for one in _files(checkpoint) if one.location.path == at or one.location.path.startswith(below)
                ]
            above = above.parent
        return []

    async def _checkpoint(self, location: Location) -> tuple[bool, Checkpoint | None]:
        """Return whether tierckpt saves at ``location``, and the commit there.

        A stock checkpoint is not ours, even while this node drains its ``.metadata`` (W2).
        """
        # Local first: a file that is drained between the two requests is then on the shared tier.
        metadata = await asyncio.to_thread(self._journal.files, location.child(METADATA).uri)
        try:
            async with self._gate:
                found = await self._find(location)
        except UncommittedCheckpointError:
            return not (metadata and metadata[-1].files), None
        except (CheckpointNotFoundError, ObjectNotFoundError):
            return False, None
        return found.manifest is not None, found if found.manifest is not None else None

    async def level(self, location: Location) -> list[Thing]:
        written = await self._written_below(location)
        try:
            entries = {thing.location.name: thing for thing in await self._level(location)}
        except ObjectNotFoundError:
            entries = {one.location.name: one for one in _shallow(location, await self._adopted(location))}
            if not entries and not any(entry.files for entry in written.values()):
                raise
        for path, entry in written.items():
            name, slash, _ = path.partition("/")
            if slash and entry.files:
                entries.setdefault(name, Thing(location.child(name), is_dir=True))
            elif not slash:
                entries.pop(name, None)
                if entry.files:
                    entries[name] = _written(location.child(name), entry)
        removed = {path.partition("/")[0] for path, entry in written.items() if entry.after_uri == location.uri}
        for name in removed & entries.keys():
            if not await self._is_visible(location.child(name)):
                del entries[name]
        if not entries and any(entry.after_uri not in ("", location.uri, entry.uri) for entry in written.values()):
            raise _not_found_error(location)
        return sorted(entries.values(), key=lambda thing: thing.location.name)

    async def _written_below(self, location: Location) -> dict[str, JournalEntry]:
        """Undrained files and removals, which override the store."""
        above = f"{location.uri.rstrip('/')}/"
        entries = await asyncio.to_thread(self._journal.files)
        return {entry.uri.removeprefix(above): entry for entry in entries if entry.uri.startswith(above)}

    async def _level(self, location: Location) -> list[Thing]:
        """Raises ObjectNotFoundError. Cost: one listing; for each name with a final number a HEAD or two requests."""
        if is_private(location):
            raise _not_found_error(location)
        directory = self._directory_of(location)
        local = await asyncio.to_thread(_with_commits, directory)
        has_commit = await asyncio.to_thread((directory / MANIFEST).exists)
        found = await self._shared_level(location)
        infos, names = found or ([], [])
        files, hidden = await self._visible(location, infos, has_private=PRIVATE_DIR in names or has_commit)
        steps = [name for name in names if step_of(name) is not None and name not in local and not name.startswith(".")]
        seen = await asyncio.gather(*(self._is_visible(location.child(name)) for name in steps))
        gone = {PRIVATE_DIR, *(name for name, visible in zip(steps, seen, strict=True) if not visible)}
        if has_commit or PRIVATE_DIR in names:
            gone |= {name for name in names if name.startswith(adopted_dir(""))}
            files = _shallow(location, files)
        known = {entry.location.name for entry in files}
        entries = files + [Thing(location.child(name), is_dir=True) for name in {*names, *local} - gone - known]
        if not entries and (found is None or hidden or PRIVATE_DIR in names):
            raise _not_found_error(location)
        return sorted(entries, key=lambda entry: entry.location.name)

    async def _shared_level(self, location: Location) -> tuple[list[ObjectInfo], list[str]] | None:
        root, key = root_of(location)
        store = self._store_at(root)
        try:
            async with self._gate:
                return await store.list_level(key)
        except (StoreUnavailableError, EndpointError, ObjectNotFoundError) as error:
            await self._list_locally(location, error)
            return None

    async def _visible(
        self, location: Location, infos: Iterable[ObjectInfo], *, has_private: bool
    ) -> tuple[list[Thing], bool]:
        infos = [info for info in infos if not is_temporary(_name(info))]
        if not has_private and not any(is_checkpoint_file(_name(info)) for info in infos):
            return [_entry_of(location, info) for info in infos], False
        is_ours, checkpoint = await self._checkpoint(location)
        plain = [info for info in infos if not (is_ours and is_checkpoint_file(_name(info)))]
        files = [_entry_of(location, info) for info in plain] + _files(checkpoint)
        return files, len(plain) < len(infos)

    async def _has_manifest(self, location: Location) -> bool:
        if await asyncio.to_thread((self._directory_of(location) / MANIFEST).exists):
            return True
        root, key = root_of(location)
        async with self._gate:
            return await stored_bytes(self._store_at(root), f"{key}/{MANIFEST}") >= 0

    async def _is_visible(self, location: Location) -> bool:
        if await self._has_manifest(location):
            return True
        try:
            await self.level(location)
        except ObjectNotFoundError:
            return False
        return True

    async def below(self, location: Location) -> list[Thing]:
        """Cost: one listing, and a GET per checkpoint."""
        if is_private(location):
            return []
        written = await self._written_below(location)  # before the listing: a file drained in between is in both
        directories = await self._shared_below(location)
        local = await asyncio.to_thread(lambda: [*_commits(self._directory_of(location))])
        for relative in local:
            directories.setdefault(relative, [])
        marked = {name for name in directories if PRIVATE_DIR in name.split("/")}
        private = {name.partition(PRIVATE_DIR)[0].rstrip("/") for name in marked} | {*local}
        folders = tuple(f"{name}/{adopted_dir('')}".lstrip("/") for name in private)
        marked |= {name for name in directories if name.startswith(folders)}
        directories_to_visit = [name for name in {*directories, *private} if name not in marked]
        shown = await asyncio.gather(
            *(
                self._visible(_descendant(location, name), directories.get(name, ()), has_private=name in private)
                for name in directories_to_visit
            )
        )
        found = {thing.location.uri: thing for files, _ in shown for thing in files}
        for entry in written.values():
            found.pop(entry.uri, None)
            if entry.files:
                found[entry.uri] = _written(entry.location, entry)
        return sorted(found.values(), key=lambda thing: thing.location.path)

    async def _shared_below(self, location: Location) -> dict[str, list[ObjectInfo]]:
        root, key = root_of(location)
        directories: dict[str, list[ObjectInfo]] = {}
        skip = len(key) + 1 if key else 0
        try:
            async for info in self._store_at(root).list(key):
                directories.setdefault(info.key[skip:].rpartition("/")[0], []).append(info)
        except (StoreUnavailableError, EndpointError, ObjectNotFoundError) as error:
            await self._list_locally(location, error)
        return directories

    async def _list_locally(self, location: Location, error: StoreError) -> None:
        """Raise ``error`` if the local tier may not be shown alone."""
        is_away = isinstance(error, StoreUnavailableError | EndpointError)
        is_sufficient = _is_sufficient_alone if is_away else _has_commit
        if not await asyncio.to_thread(is_sufficient, self._directory_of(location)):
            raise error
        log.warning("%s: listing the local tier only (%s)", location.uri, error)

    async def check_change(self, location: Location) -> None:
        """Raise ConfigError if a commit refers to the file or directory."""
        if not root_of(location)[1]:
            raise ConfigError(f"{location.uri} names no file", hint="Give a name below it", uri=location.uri)
        if is_private(location):
            raise ConfigError(f"{location.uri} is not to be changed", hint="It is tierckpt's own", uri=location.uri)
        if is_checkpoint_file(location.name):
            _, checkpoint = await self._checkpoint(location.parent)
            if checkpoint is not None:
                raise _protected_error(checkpoint.location)

    async def check_write(self, location: Location) -> None:
        """``check_change``; on a mount that answers, also against names in the way."""
        await self.check_change(location)
        if location.scheme != "file" or (self._hung is not None and not self._hung.done()):
            return
        look = asyncio.create_task(asyncio.to_thread(_name_conflict, location, self._journal))
        done, _ = await asyncio.wait({look}, timeout=ILL_SECONDS)
        if not done:
            self._hung = look
        elif problem := look.result():
            raise ConfigError(f"{location.uri} cannot be a file: {problem}", hint="Give it another name")

    async def check_removal(self, location: Location) -> None:
        await self.check_change(location)
        local = await asyncio.to_thread(lambda: [*_commits(self._directory_of(location))])
        if local:
            raise _protected_error(_descendant(location, local[0]))
        for name in await self._shared_below(location):
            if PRIVATE_DIR in name.split("/"):
                raise _protected_error(_descendant(location, name.partition(PRIVATE_DIR)[0].rstrip("/")))


def _descendant(location: Location, relative: str) -> Location:
    for name in relative.split("/") if relative else ():
        location = location.child(name)
    return location


def _name(info: ObjectInfo) -> str:
    return info.key.rpartition("/")[2]


def _entry_of(location: Location, info: ObjectInfo) -> Thing:
    return Thing(location.child(_name(info)), size_bytes=info.size_bytes, etag=info.etag)


def _shallow(location: Location, entries: Iterable[Thing]) -> list[Thing]:
    found: dict[str, Thing] = {}
    for entry in entries:
        name, slash, _ = entry.location.path[len(location.path.rstrip("/")) + 1 :].partition("/")
        found.setdefault(name, Thing(location.child(name), is_dir=True) if slash else entry)
    return [*found.values()]


def _written(location: Location, entry: JournalEntry) -> Thing:
    return Thing(location, size_bytes=entry.size_bytes, etag=entry.token, written=entry)


def _files(checkpoint: Checkpoint | None) -> list[Thing]:
    if checkpoint is None or checkpoint.manifest is None:
        return []
    return [
        Thing(
            checkpoint.location.child(entry.path),
            size_bytes=entry.size_bytes,
            etag=f"{checkpoint.manifest.attempt}-{entry.token}",
            checkpoint=checkpoint,
            entry=entry,
        )
        for entry in checkpoint.manifest.entries
        if not entry.path.startswith(f"{PRIVATE_DIR}/")
    ]


def _commits(directory: Path) -> Iterator[str]:
    for path in marked_directories(directory):
        if (path / MANIFEST).exists():
            yield str(path)[len(str(directory)) + 1 :]


def _has_commit(directory: Path) -> bool:
    return next(_commits(directory), None) is not None


def _is_sufficient_alone(directory: Path) -> bool:
    """Return True if ``directory`` may be shown without the shared tier: its newest is this node's own (N3)."""
    if (directory / MANIFEST).exists():
        return True
    names = sorted(_with_commits(directory), key=select.age_of)
    try:
        if (directory / BRANCHES_DIR).is_dir():
            found = [(directory / name, local_commit.read_local_manifest(directory / name)) for name in names]
            abandoned = abandoned_here((path, manifest) for path, manifest in found if manifest is not None)
            names = [name for name in names if directory / name not in abandoned]
        newest = names[-1] if names else ""
        manifest = local_commit.read_local_manifest(directory / newest) if newest else None
    except (ManifestError, StoreError):
        return False
    return manifest is not None and select.is_origin(directory / newest, manifest)


def _with_commits(directory: Path) -> set[str]:
    return {name for name in select.directories_in(directory) if _has_commit(directory / name)}


def _name_conflict(location: Location, journal: Journal) -> str:
    with suppress(OSError):
        if Path(location.path).is_dir():
            below = [entry for entry in journal.files() if entry.uri.startswith(f"{location.uri}/")]
            return "" if any(not entry.files for entry in below) else "it is a directory"
        above = location.parent
        while root_of(above)[1]:
            written, place = journal.files(above.uri), Path(above.path)
            if written[-1].files if written else place.exists() and not place.is_dir():
                return f"{above.path} is a file"
            if place.is_dir():
                break
            above = above.parent
    return ""


def _not_found_error(location: Location) -> ObjectNotFoundError:
    return ObjectNotFoundError(
        f"there is no {location.uri}",
        hint="A checkpoint appears when it is committed; check the URI and the endpoint",
        uri=location.uri,
    )


def _protected_error(location: Location) -> ConfigError:
    return ConfigError(
        f"{location.uri} is a checkpoint of tierckpt, which is not changed file by file",
        hint="`tierckpt prune` removes checkpoints; save with TierStorageWriter or a Checkpointer",
        uri=location.uri,
    )
