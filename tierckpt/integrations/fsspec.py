"""fsspec's protocol ``tierckpt://`` (docs/guide/fsspec.md), found through the entry point ``fsspec.specs``.

tierckpt://s3/BUCKET/KEY    tierckpt://az/CONTAINER/KEY    tierckpt://gs/BUCKET/KEY    tierckpt://file/ABSOLUTE/PATH
"""

from __future__ import annotations

import io
import os
import posixpath
import shutil
from collections.abc import Iterable, Sequence
from glob import has_magic
from pathlib import Path
from typing import Any, cast

from fsspec import AbstractFileSystem
from fsspec.compression import compr
from fsspec.core import get_compression

from ..checkpoint.journal import SET_ASIDE_STATES, Journal, JournalEntry, set_aside_error
from ..checkpoint.namespace import Thing, root_of
from ..client import get_client
from ..config import Settings
from ..drain import write_back
from ..errors import ConfigError, ObjectNotFoundError, OperationTimeoutError
from ..format.layout import METADATA, Location, parse_uri
from ..format.uris import TIER_FORMS
from ..mover import Mover
from ..poll import LOCAL, Poll
from ..save.spool import PIECE_BYTES, Spool
from ..stores.schemes import check_location, check_target
from ..telemetry import logger
from ..tracebacks import short_traceback
from .files import CompressingWriter, Reader, TextWriter, Writer, open_raw, put

log = logger("fsspec")

ARRIVE_SECONDS = 10.0
"""Wait of a direct write or removal for pending files of the same name."""


class TierFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Any store as a file system, read through the node cache.

    An open file keeps its version. A closed file is durable on this node, and drains in the background. Checkpoints of
    tierckpt appear when they commit, and cannot be changed file by file.

    Args:
        write_back: False writes to the store before ``close`` returns, for immediate readers on other nodes.
        settings: a ``Settings``; other keywords are single fields of it (``local_root``, ``cache_bytes_max``).

    Raises (every verb): ConfigError for an invalid URL; StoreError.
    """

    protocol = "tierckpt"
    root_marker = ""

    def __init__(self, settings: Settings | None = None, *, write_back: bool = True, **options: Any) -> None:
        fields = {name: value for name, value in options.items() if name in Settings.model_fields}
        super().__init__(**{name: value for name, value in options.items() if name not in fields})
        self.write_back = write_back
        self.settings = Settings.load(settings, **fields)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return os.fspath(path).removeprefix(f"{cls.protocol}://").rstrip("/")

    @classmethod
    def _parent(cls, path: str) -> str:
        return str(cls._strip_protocol(path)).rpartition("/")[0]

    def _location(self, path: str) -> Location:
        name = self._strip_protocol(path)
        try:
            return check_location(parse_uri(f"{self.protocol}://{name}"))
        except ConfigError as error:
            if error.message.startswith(f"{self.protocol}://"):
                raise
            raise ConfigError(f"tierckpt://{name}: {error.message}", hint=f"Write {TIER_FORMS}") from error

    def _run(self, work: Any) -> Any:
        return get_client(self.settings).run(work)

    @property
    def _mover(self) -> Mover:
        return get_client(self.settings).mover

    def _find(self, path: str) -> Thing:
        return cast(Thing, self._run(self._mover.browser.find(self._location(path))))

    def _info(self, name: str, entry: Thing) -> dict[str, Any]:
        if entry.is_dir:
            return {"name": name, "size": 0, "type": "directory"}
        return {"name": name, "size": entry.size_bytes, "type": "file", "ETag": entry.etag}

    @short_traceback
    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        return self._info(name, self._find(name))

    @short_traceback
    def exists(self, path: str, **kwargs: Any) -> bool:
        """Raises if the store refuses or does not answer."""
        return self._is_dir(path) is not None

    @short_traceback
    def isdir(self, path: str) -> bool:
        return self._is_dir(path) is True

    @short_traceback
    def isfile(self, path: str) -> bool:
        return self._is_dir(path) is False

    def _is_dir(self, path: str) -> bool | None:
        try:
            return self._find(path).is_dir
        except FileNotFoundError:
            return None

    @short_traceback
    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        name = self._strip_protocol(path)
        location = self._location(name)
        try:
            entries = self._run(self._mover.browser.level(location))
            infos = [self._info(f"{name}/{entry.location.name}", entry) for entry in entries]
        except ObjectNotFoundError:
            infos = [self.info(name)]
            if infos[0]["type"] == "directory":
                raise
        return infos if detail else [info["name"] for info in infos]

    @short_traceback
    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> Any:
        name = self._strip_protocol(path)
        location = self._location(name)
        if location.scheme == "file" or maxdepth is not None:
            return super().find(name, maxdepth=maxdepth, withdirs=withdirs, detail=detail, **kwargs)
        entries = self._run(self._mover.browser.below(location))
        skip = len(location.path.rstrip("/")) + 1 if location.path else 0
        found = {path: self._info(path, entry) for entry in entries if (path := f"{name}/{entry.location.path[skip:]}")}
        if not found and self.isfile(name):
            found = {name: self.info(name)}
        if withdirs and found and name not in found:
            found |= {one: {"name": one, "size": 0, "type": "directory"} for one in _directories(found, name)}
        return dict(sorted(found.items())) if detail else sorted(found)

    def expand_path(self, path: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> list[str]:
        """Existing names are literal: ``a[1]`` is not ``a1``."""
        paths = [path] if isinstance(path, str | os.PathLike) else list(path)
        literal = {self._strip_protocol(one) for one in paths if self._is_literal(one)}
        others = [one for one in paths if self._strip_protocol(one) not in literal]
        found = set(super().expand_path(others, recursive, maxdepth, **kwargs)) if others or not literal else set()
        for name in literal:
            found |= {name, *(self.find(name, maxdepth=maxdepth, withdirs=True) if recursive else ())}
        return sorted(found)

    def _is_literal(self, path: str | os.PathLike[str]) -> bool:
        return has_magic(os.fspath(path)) and self.exists(os.fspath(path))

    def invalidate_cache(self, path: str | None = None) -> None:
        """Do nothing: listings are not cached."""

    @short_traceback
    def open(self, path: str, mode: str = "rb", *args: Any, compression: str | None = None, **kwargs: Any) -> Any:
        """Text and compressed files also appear complete or not at all."""
        if "r" in mode:
            return super().open(path, mode, *args, compression=compression, **kwargs)
        text = {name: kwargs.pop(name) for name in ("encoding", "errors", "newline") if name in kwargs}
        file = super().open(path, mode.replace("t", "").replace("b", "") + "b", *args, **kwargs)
        if (kind := get_compression(str(path), compression)) is not None:
            file = CompressingWriter(compr[kind](file, mode="w"), file)
        return file if "b" in mode else TextWriter(file, **text)

    @short_traceback
    def _open(self, path: str, mode: str = "rb", block_size: Any = None, autocommit: bool = True, **kwargs: Any) -> Any:
        name = self._strip_protocol(path)
        if mode == "rb":
            entry = self._file(name)
            return Reader(self, name, entry, self._info(name, entry), self.settings)
        if mode not in ("wb", "xb", "ab"):
            raise ConfigError(f"mode {mode!r} is not offered", hint="Use rb, wb, xb or ab", uri=name)
        location, is_new = self._location(name), mode == "xb"
        check_target(location, self.settings.local_root)
        self._run(self._mover.browser.check_write(location))
        if is_new and self.exists(name):
            raise FileExistsError(name)
        writer = Writer(
            self,
            name,
            lambda stream, size: self._write(name, stream, size, if_absent=is_new),
            Spool(self.settings, is_kept=self._is_behind(location, is_new)),
            autocommit=autocommit,
        )
        if mode == "ab" and self.exists(name):
            with self._open(name) as old:
                shutil.copyfileobj(old, writer, PIECE_BYTES)
        return writer

    def _file(self, name: str) -> Thing:
        entry = self._find(name)
        if entry.is_dir:
            raise IsADirectoryError(name)
        return entry

    @short_traceback
    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        return self._cat(path, [(start, end)])[0]

    @short_traceback
    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        starts = starts if isinstance(starts, Iterable) else [starts] * len(paths)
        ends = ends if isinstance(ends, Iterable) else [ends] * len(paths)
        ranges_by_path: dict[str, list[tuple[int, Any, Any]]] = {}
        for number, (path, start, end) in enumerate(zip(paths, starts, ends, strict=True)):
            ranges_by_path.setdefault(path, []).append((number, start, end))
        results: list[Any] = [None] * len(paths)
        for path, ranges in ranges_by_path.items():
            try:
                found: list[Any] = list(self._cat(path, [(start, end) for _, start, end in ranges]))
            except Exception as error:
                if on_error != "return":
                    raise
                found = [error] * len(ranges)
            for (number, _, _), data in zip(ranges, found, strict=True):
                results[number] = data
        return results

    def _cat(self, path: str, ranges: Sequence[tuple[int | None, int | None]]) -> list[bytes]:
        entry = self._file(self._strip_protocol(path))
        found = []
        with open_raw(entry, self.settings) as file:
            for bounds in ranges:
                start, stop, _ = slice(*bounds).indices(entry.size_bytes)
                data = bytearray(max(0, stop - start))
                if data:
                    file.read_into(start, memoryview(data))
                found.append(bytes(data))
        return found

    @short_traceback
    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._put(path, io.BytesIO(value), len(value), if_absent=mode == "create")

    @short_traceback
    def put_file(self, lpath: str, rpath: str, callback: Any = None, mode: str = "overwrite", **kwargs: Any) -> None:
        source = Path(lpath)
        if source.is_dir():
            self.makedirs(rpath, exist_ok=True)
            return
        with source.open("rb") as stream:
            self._put(rpath, stream, source.stat().st_size, if_absent=mode == "create")

    @short_traceback
    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        entry = self._find(path1)
        if entry.is_dir:
            self.makedirs(path2, exist_ok=True)
            return
        with self._open(path1) as stream:
            self._put(path2, stream, stream.size, if_absent=False)

    @short_traceback
    def copy(self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        if isinstance(path1, str) and self._is_literal(path1):
            path1, path2 = self._pairs(path1, path2, self.isdir(path2), recursive, maxdepth)
        super().copy(path1, path2, recursive=recursive, maxdepth=maxdepth, **kwargs)

    @short_traceback
    def get(self, rpath: Any, lpath: Any, recursive: bool = False, *args: Any, **kwargs: Any) -> None:
        if isinstance(rpath, str) and self._is_literal(rpath):
            rpath, lpath = self._pairs(rpath, os.fspath(lpath), Path(lpath).is_dir(), recursive, kwargs.get("maxdepth"))
        super().get(rpath, lpath, recursive, *args, **kwargs)

    def _pairs(
        self, old: str, new: str, is_dir: bool, recursive: bool, maxdepth: int | None
    ) -> tuple[list[str], list[str]]:
        old, target = self._strip_protocol(old), new.rstrip("/")
        if is_dir or new.endswith("/"):
            target = f"{target}/{old.rpartition('/')[2]}"
        names = [name for name in self.expand_path(old, recursive, maxdepth) if recursive or not self.isdir(name)]
        return names, [f"{target}{name[len(old) :]}" for name in names]

    @short_traceback
    def wait(self, path: str, timeout_seconds: float = 600.0) -> None:
        """Wait until the store has this node's writes and removals at ``path`` and under it.

        Raises OperationTimeoutError; CommitAbandonedError: the drain of a file failed for too long.
        """
        started_tokens: set[str] = set()
        for _ in Poll(timeout_seconds, LOCAL):
            left = self._undrained(path)
            if not left:
                return
            if failed := next((entry for entry in left if entry.state in SET_ASIDE_STATES), None):
                raise set_aside_error(failed)
            for token in {entry.token for entry in left} - started_tokens:  # also of ended processes
                get_client(self.settings).drain_in_background(token)
                started_tokens.add(token)
        raise OperationTimeoutError(
            f"{len(left)} files at {path} are on this node only after {timeout_seconds:g} s",
            hint="`tierckpt status` shows the journal; `tierckpt drain --wait` retries",
            last_error=next((entry.error for entry in left if entry.error), None),
        )

    @short_traceback
    def is_drained(self, path: str) -> bool:
        """Return whether ``wait`` would return at once."""
        return not self._undrained(path)

    def _undrained(self, path: str) -> list[JournalEntry]:
        above = f"{self._location(path).uri.rstrip('/')}/"
        return [entry for entry in Journal(self.settings.local_root).files() if f"{entry.uri}/".startswith(above)]

    def _put(self, path: str, stream: Any, size_bytes: int, *, if_absent: bool) -> None:
        if if_absent and self.exists(path):
            raise FileExistsError(path)
        if self._intrans:
            with self.open(path, "xb" if if_absent else "wb") as file:
                shutil.copyfileobj(stream, file, PIECE_BYTES)
            return
        self._write(path, stream, size_bytes, if_absent=if_absent)

    def _write(self, path: str, stream: Any, size_bytes: int, *, if_absent: bool) -> None:
        location = self._location(path)
        is_behind = self._is_behind(location, if_absent)
        if not is_behind:  # earlier files go first: of its name (W1), next to it and under it (W2)
            self.wait(self._parent(path))
        put(self.settings, location, stream, size_bytes, if_absent=if_absent, write_back=is_behind)

    def _is_behind(self, location: Location, if_absent: bool) -> bool:
        return self.write_back and self.settings.drain and not if_absent and write_back.can_write_back(location)

    def _directory(self, path: str) -> Path | None:
        """Return None in an object store, which has no directories."""
        location = self._location(path)
        return Path(location.path) if location.scheme == "file" else None

    @short_traceback
    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        if (directory := self._directory(path)) is not None:
            directory.mkdir(parents=create_parents)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if (directory := self._directory(path)) is not None:
            directory.mkdir(parents=True, exist_ok=exist_ok)

    def rmdir(self, path: str) -> None:
        if (directory := self._directory(path)) is not None:
            directory.rmdir()

    @short_traceback
    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Copy, then remove, also on the store."""
        old, new = self._strip_protocol(path1), self._strip_protocol(path2)
        if old == new:
            return
        if f"{new}/".startswith(f"{old}/"):
            raise ConfigError(f"{new} is inside {old}", hint="Move it to a place outside")
        self.copy(path1, path2, recursive=recursive, maxdepth=maxdepth, on_error="raise")
        above = posixpath.commonpath([self._parent(old), self._parent(new)])
        if "/" not in above:  # drains to two stores or buckets are unordered
            self.wait(path2)
            above = ""
        self._remove(path1, recursive, maxdepth, above)

    @short_traceback
    def rm_file(self, path: str) -> None:
        self._remove_file(path, "")

    def _remove_file(self, path: str, moved_in: str) -> None:
        thing = self._file(self._strip_protocol(path))
        location = thing.location
        self._run(self._mover.browser.check_change(location))
        if thing.checkpoint is not None:
            raise ConfigError(f"{location.uri} is of a checkpoint", hint="`tierckpt prune` removes it as a whole")
        # A mover may be sending it, or its replacement: the removal comes after that (W2, W3).
        may_wait = self.write_back and write_back.can_write_back(location)
        is_behind = may_wait and not self.is_drained(moved_in or self._parent(path))
        run_path = self._parent(self._parent(path))
        if may_wait and not (is_behind or moved_in or location.scheme == "file") and "/" in run_path:
            # An older step removed file by file waits as one removed as a whole does (W5).
            is_behind = any(entry.files for entry in self._undrained(run_path))
            moved_in = run_path
        if thing.written is not None or is_behind:
            self._remove_behind(location, self._location(moved_in) if moved_in else None)
            return
        root, key = root_of(location)
        self._run(self._mover.store(root).delete(key))

    _rm = rm_file

    @short_traceback
    def rm_behind(self, path: str) -> None:
        """Remove a file once it, and the files that this node closed next to it, are on the store (W6)."""
        location = self._location(path)
        if write_back.can_write_back(location):
            self._remove_behind(location, location)
        else:
            self.rm_file(path)

    def _remove_behind(self, location: Location, after: Location | None = None) -> None:
        get_client(self.settings).drain_in_background(write_back.remove(self.settings, location, after))

    @short_traceback
    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, and directories with ``recursive``. ``tierckpt prune`` removes tierckpt checkpoints."""
        self._remove(path, recursive, maxdepth, "")

    def _remove(self, path: Any, recursive: bool, maxdepth: int | None, moved_in: str) -> None:
        for name in self.expand_path(path):
            if not self.isdir(name):
                self._remove_file(name, moved_in)
                continue
            if not recursive or maxdepth is not None:
                raise IsADirectoryError(f"{name} is a directory: remove it with recursive=True, as a whole")
            location = self._location(name)
            root, key = root_of(location)
            self._run(self._mover.browser.check_removal(location))
            below = self._run(self._mover.browser.below(location))
            above = moved_in or self._parent(name)
            # Later files may be on this node only: the store keeps this one until it has them (W5).
            is_behind = self.write_back and all(write_back.can_write_back(thing.location) for thing in below)
            is_behind = is_behind and any(
                entry.files and not f"{entry.uri}/".startswith(f"{location.uri}/") for entry in self._undrained(above)
            )
            run_path = self._location(above) if is_behind else None
            below.sort(key=lambda thing: thing.location.name != METADATA)  # first the file that marks it as whole
            for thing in below:
                if is_behind or thing.written is not None:
                    self._remove_behind(thing.location, run_path)
            if is_behind and below:
                log.warning("%s stays on the store until the files written next to it have been drained", location.uri)
                continue
            if location.scheme == "file":  # a running transfer would make the directory again
                for _ in Poll(ARRIVE_SECONDS, LOCAL):
                    if not any(entry.files for entry in self._undrained(name)):
                        break
            self._run(self._mover.store(root).delete_dir(key))


def _directories(names: Iterable[str], above: str) -> set[str]:
    found = {above}
    for name in names:
        while (name := name.rpartition("/")[0]) not in found and len(name) > len(above):
            found.add(name)
    return found
