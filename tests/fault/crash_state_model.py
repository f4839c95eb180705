"""Crash states: everything that a power cut may leave on a disk, at every moment of a run that was recorded.

``Recorder`` notes each change that this process makes below a directory: names made, moved and removed, bytes written,
sizes changed, and what was made durable when. ``crash_states`` then yields directories that may be found after a crash:

    data        what was written to a file since its last fsync may be lost, there, or there in any of its blocks;
                its size may have changed without them. ``close`` and O_DIRECT make nothing durable.
    names       each change of a directory since its last fsync may be lost or there, independently of all others.
                A rename is one change. fsync of a file says nothing about its name.

That is less than any file system promises, so code that survives it does not rely on one (Pillai et al., OSDI'14, found
that most applications do). A run that is recorded is the run that happened: whatever the recorder could not see makes
``Recorder.differences`` name a path.
"""

from __future__ import annotations

import builtins
import io
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tierckpt.disk import file_io

BLOCK_BYTES = 512
"""What a disk writes at once, all of it or nothing."""

NAMES_ALL_MAX = 8
"""With this many changes of names or fewer under way, every subset of them is a crash state."""

ROOT = 0


@dataclass(frozen=True, slots=True)
class Names:
    """Directory entries changed at once: ``(directory, name, inode)``, inode None where the name is gone."""

    changes: tuple[tuple[int, str, int | None], ...]
    is_directory: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    inode: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Persist:
    """fsync of a file or a directory."""

    inode: int


@dataclass(frozen=True, slots=True)
class Mark:
    """What the caller has to say about this moment: a save is acknowledged, a removal begins."""

    note: Any


Operation = Names | Write | Resize | Persist | Mark
Directory = dict[str, "int | bytes"]


class Recorder:
    """Records what this process, in all of its threads, changes below ``root``, while it is entered.

    One change at a time: calls are held apart by a lock, so the record is an order in which they happened. A call that
    would change files in a way that is not recorded raises NotImplementedError.

    Replaces functions of ``os``, ``open`` and the fallocate of ``cache.writing``; for tests, one at a time.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self.start = _scan(root)
        self._lock = threading.RLock()
        self._names: dict[int, dict[str, int]] = {}
        self._sizes: dict[int, int] = {}
        self._descriptors: dict[int, tuple[int, int, int]] = {}
        """Open descriptors: our inode, the kernel's, and the flags."""
        self._undo: list[tuple[Any, str, Any]] = []
        self._next = ROOT
        self._adopt(self.start)

    def _adopt(self, tree: Tree) -> int:
        inode = self._new()
        names = self._names[inode] = {}
        for name, child in tree.items():
            if isinstance(child, dict):
                names[name] = self._adopt(child)
            else:
                names[name] = self._new()
                self._sizes[names[name]] = len(child)
        return inode

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    def mark(self, note: Any) -> None:
        """Note something about this moment, for who checks the crash states."""
        with self._lock:
            self.operations.append(Mark(note))

    def differences(self) -> list[str]:
        """Name each path where what was recorded is not what is there: it must be empty, or the record is no good."""
        model = Model(self.start)
        for operation in self.operations:
            model.apply(operation)
        there, recorded = flat(_scan(self.root)), flat(model.now())
        return sorted(path for path in there.keys() | recorded.keys() if there.get(path) != recorded.get(path))

    # --- standing in for the functions that change files ------------------------------------------------------------

    def __enter__(self) -> Recorder:
        for name in ("open", "close", "write", "pwrite", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "unlink",
                     "remove", "rmdir", "mkdir", "rename", "replace", "link"):  # fmt: skip
            self._stand_in(os, name, getattr(self, f"_{name}"))
        for name in ("symlink", "truncate", "mkfifo", "mknod"):
            self._stand_in(os, name, self._refusing_path)
        for name in ("writev", "pwritev", "sendfile", "copy_file_range", "splice"):
            self._stand_in(os, name, self._refusing_descriptor)
        self._stand_in(io, "open", self._open_file)
        self._stand_in(builtins, "open", self._open_file)
        self._stand_in(file_io, "libc", lambda real: _Libc(real, self))
        return self

    def _stand_in(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        real = getattr(owner, name)
        self._undo.append((owner, name, real))
        setattr(owner, name, make(real))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for owner, name, real in reversed(self._undo):
            setattr(owner, name, real)
        self._undo.clear()

    def _place(self, path: Any, descriptor: int | None = None) -> tuple[int, str] | None:
        """Directory and name that ``path`` means below our root; None for what is elsewhere (the root itself too)."""
        if isinstance(path, int):
            return None
        text = os.fsdecode(path)
        if descriptor is not None and not text.startswith("/"):
            inode = self._inode_of(descriptor)
            if inode is None:
                return None
            names = os.path.normpath(text).split("/")
        else:
            text = os.path.normpath(Path.cwd() / text)
            prefix = f"{self.root}/"
            if not text.startswith(prefix):
                return None
            inode, names = ROOT, text[len(prefix) :].split("/")
        for name in names[:-1]:
            child = self._names.get(inode, {}).get(name)
            if child is None:
                return None  # the call will fail, and change nothing
            inode = child
        return inode, names[-1]

    def _is_below(self, path: Any) -> bool:
        return self._place(path) is not None or os.fspath(path) == str(self.root)

    def _inode_of(self, descriptor: int) -> int | None:
        """Our inode behind an open descriptor, None when it is not one of ours (any more)."""
        known = self._descriptors.get(descriptor)
        if known is None:
            return None
        if os.fstat(descriptor).st_ino != known[1]:  # closed behind our back, and the number was given out again
            del self._descriptors[descriptor]
            return None
        return known[0]

    def _log_name(self, *changes: tuple[int, str, int | None], is_directory: bool = False) -> None:
        self.operations.append(Names(changes, is_directory))
        for directory, name, inode in changes:
            if inode is None:
                self._names[directory].pop(name, None)
            else:
                self._names[directory][name] = inode

    def _log_write(self, inode: int, offset: int, data: bytes) -> None:
        self.operations.append(Write(inode, offset, data))
        self._sizes[inode] = max(self._sizes[inode], offset + len(data))

    def _log_size(self, inode: int, size_bytes: int) -> None:
        if self._sizes[inode] != size_bytes:
            self.operations.append(Resize(inode, size_bytes))
            self._sizes[inode] = size_bytes

    def _open(self, real: Any) -> Any:
        def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            with self._lock:
                place = self._place(path, dir_fd)
                descriptor: int = real(path, flags, mode, dir_fd=dir_fd)
                if flags & os.O_TMPFILE == os.O_TMPFILE and self._is_below(path):
                    inode = self._new()  # which nothing finds before a link gives it a name
                    self._sizes[inode] = 0
                    self._descriptors[descriptor] = (inode, os.fstat(descriptor).st_ino, flags)
                    return descriptor
                if place is None and not (isinstance(path, str | Path) and self._is_below(path)):
                    self._descriptors.pop(descriptor, None)
                    return descriptor
                inode = ROOT if place is None else self._opened(place, flags)
                self._descriptors[descriptor] = (inode, os.fstat(descriptor).st_ino, flags)
                return descriptor

        return open

    def _opened(self, place: tuple[int, str], flags: int) -> int:
        directory, name = place
        if name in {"", "."}:
            return directory
        inode = self._names[directory].get(name)
        if inode is None:
            inode = self._new()
            self._sizes[inode] = 0
            self._log_name((directory, name, inode))
        elif flags & os.O_TRUNC:
            self._log_size(inode, 0)
        return inode

    def _close(self, real: Any) -> Any:
        def close(descriptor: int) -> None:
            with self._lock:
                self._descriptors.pop(descriptor, None)
                real(descriptor)

        return close

    def _write(self, real: Any) -> Any:
        def write(descriptor: int, data: Any) -> int:
            if descriptor not in self._descriptors:
                return real(descriptor, data)  # type: ignore[no-any-return]  # a pipe: it may block
            with self._lock:
                inode = self._inode_of(descriptor)
                if inode is None:
                    return real(descriptor, data)  # type: ignore[no-any-return]
                appends = self._descriptors[descriptor][2] & os.O_APPEND
                offset = self._sizes[inode] if appends else os.lseek(descriptor, 0, os.SEEK_CUR)
                count: int = real(descriptor, data)
                self._log_write(inode, offset, bytes(memoryview(data).cast("B")[:count]))
                return count

        return write

    def _pwrite(self, real: Any) -> Any:
        def pwrite(descriptor: int, data: Any, offset: int) -> int:
            with self._lock:
                inode = self._inode_of(descriptor)
                count: int = real(descriptor, data, offset)
                if inode is not None:
                    self._log_write(inode, offset, bytes(memoryview(data).cast("B")[:count]))
                return count

        return pwrite

    def _ftruncate(self, real: Any) -> Any:
        def ftruncate(descriptor: int, size_bytes: int) -> None:
            with self._lock:
                inode = self._inode_of(descriptor)
                real(descriptor, size_bytes)
                if inode is not None:
                    self._log_size(inode, size_bytes)

        return ftruncate

    def allocated(self, descriptor: int, end: int) -> None:
        """Note that a file has at least ``end`` bytes now."""
        with self._lock:
            inode = self._inode_of(descriptor)
            if inode is not None:
                self._log_size(inode, max(end, self._sizes[inode]))

    def _posix_fallocate(self, real: Any) -> Any:
        def posix_fallocate(descriptor: int, offset: int, count: int) -> None:
            with self._lock:
                real(descriptor, offset, count)
                self.allocated(descriptor, offset + count)

        return posix_fallocate

    def _fsync(self, real: Any) -> Any:
        def fsync(descriptor: int) -> None:
            with self._lock:
                real(descriptor)
                inode = self._inode_of(descriptor)
                if inode is not None:
                    self.operations.append(Persist(inode))

        return fsync

    _fdatasync = _fsync

    def _unlink(self, real: Any) -> Any:
        def unlink(path: Any, *, dir_fd: int | None = None) -> None:
            with self._lock:
                place = self._place(path, dir_fd)
                real(path, dir_fd=dir_fd)
                if place is not None:
                    self._log_name((*place, None))

        return unlink

    _remove = _unlink
    _rmdir = _unlink

    def _mkdir(self, real: Any) -> Any:
        def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            with self._lock:
                place = self._place(path, dir_fd)
                real(path, mode, dir_fd=dir_fd)
                if place is not None:
                    inode = self._new()
                    self._names[inode] = {}
                    self._log_name((*place, inode), is_directory=True)

        return mkdir

    def _rename(self, real: Any) -> Any:
        def rename(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            with self._lock:
                old, new = self._place(source, src_dir_fd), self._place(target, dst_dir_fd)
                if (old is None) != (new is None):
                    raise NotImplementedError(f"a rename across the border of {self.root}: {source} to {target}")
                real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                if old is not None and new is not None:
                    inode = self._names[old[0]][old[1]]
                    if self._names[new[0]].get(new[1]) != inode:  # else both are one file, and nothing happens
                        self._log_name((*old, None), (*new, inode), is_directory=inode in self._names)

        return rename

    _replace = _rename

    def _link(self, real: Any) -> Any:
        def link(source: Any, target: Any, **options: Any) -> None:
            with self._lock:
                inode, new = self._linked(source), self._place(target)
                if (inode is None) != (new is None):
                    raise NotImplementedError(f"a link across the border of {self.root}: {source} to {target}")
                real(source, target, **options)
                if inode is not None and new is not None:
                    self._log_name((*new, inode))

        return link

    def _linked(self, source: Any) -> int | None:
        """Our inode that ``source`` names, be it by an open descriptor."""
        descriptor = os.fsdecode(source).removeprefix("/proc/self/fd/")
        if descriptor.isdecimal():
            return self._inode_of(int(descriptor))
        place = self._place(source)
        return None if place is None else self._names[place[0]].get(place[1])

    def _refusing_path(self, real: Any) -> Any:
        def refusing(*arguments: Any, **options: Any) -> Any:
            if any(isinstance(item, str | bytes | os.PathLike) and self._place(item) for item in arguments):
                raise NotImplementedError(f"{real.__name__}{arguments} is not recorded")
            return real(*arguments, **options)

        return refusing

    def _refusing_descriptor(self, real: Any) -> Any:
        def refusing(*arguments: Any, **options: Any) -> Any:
            written = arguments[:2] if real.__name__ in {"copy_file_range", "splice"} else arguments[:1]
            if any(self._inode_of(item) is not None for item in written):
                raise NotImplementedError(f"{real.__name__}{arguments} is not recorded")
            return real(*arguments, **options)

        return refusing

    def _open_file(self, real: Any) -> Any:
        def open(file: Any, mode: str = "r", buffering: int = -1, *arguments: Any, **options: Any) -> Any:
            if not set(mode) & set("wax+") or (self._place(file) is None and file not in self._descriptors):
                return real(file, mode, buffering, *arguments, **options)
            raw = _Raw(file, mode)
            if buffering == 0:
                return raw
            stream = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return stream if "b" in mode else io.TextIOWrapper(stream, *arguments, **options)

        return open


class _Raw(io.RawIOBase):
    """A file opened by ``open``, on the functions of ``os``, so that the recorder sees what it does."""

    def __init__(self, file: Any, mode: str) -> None:
        kind = next(letter for letter in mode if letter in "rwax")
        flags = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND, "x": os.O_CREAT | os.O_EXCL}[kind]
        access = os.O_RDWR if "+" in mode else os.O_WRONLY
        self._descriptor = file if isinstance(file, int) else os.open(file, access | flags | os.O_CLOEXEC, 0o666)
        self.mode = mode

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return "+" in self.mode

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        data = os.read(self._descriptor, len(target))
        target[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        return os.write(self._descriptor, data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return os.lseek(self._descriptor, offset, whence)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self._descriptor, size)
        return size

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


class _Libc:
    """The C library as ``cache.writing`` uses it."""

    def __init__(self, real: Any, recorder: Recorder) -> None:
        self._real, self._recorder = real, recorder

    def fallocate(self, descriptor: int, mode: int, offset: int, count: int) -> int:
        result: int = self._real.fallocate(descriptor, mode, offset, count)
        if result == 0 and mode == 0:
            self._recorder.allocated(descriptor, offset + count)
        return result


# --- what is on the disk ----------------------------------------------------------------------------------------------

Tree = dict[str, Any]
"""A directory: names to bytes (files) and trees (directories)."""

Files = dict[str, bytes]
"""Files below the root by their relative paths."""


def _scan(root: Path) -> Tree:
    tree: Tree = {}
    with os.scandir(root) as entries:
        for entry in entries:
            path = root / entry.name
            if entry.is_dir(follow_symlinks=False):
                tree[entry.name] = _scan(path)
            elif stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                tree[entry.name] = path.read_bytes()
    return tree


def flat(tree: Tree, prefix: str = "") -> Files:
    """The files of ``tree`` by path; an empty directory is an entry that ends in a slash."""
    files: Files = {}
    for name, child in tree.items():
        if isinstance(child, dict):
            files |= flat(child, f"{prefix}{name}/") or {f"{prefix}{name}/": b""}
        else:
            files[f"{prefix}{name}"] = child
    return files


def materialise(tree: Tree, root: Path) -> None:
    """Write ``tree`` below ``root``, which is there and empty."""
    for name, child in tree.items():
        if isinstance(child, dict):
            (root / name).mkdir()
            materialise(child, root / name)
        else:
            (root / name).write_bytes(child)


@dataclass(slots=True)
class ShardFile:
    durable: bytes = b""
    pending: list[Write | Resize] = field(default_factory=list)
    _now: bytes | None = None

    def apply(self, operation: Write | Resize) -> None:
        self.pending.append(operation)
        self._now = None

    def persist(self) -> None:
        self.durable = self.now()
        self.pending = []

    def now(self) -> bytes:
        if self._now is None:
            self._now = _played(self.durable, self.pending)
        return self._now

    def torn(self, chance: random.Random) -> bytes:
        """One of the things a crash may leave of what was not fsynced."""
        kind = chance.randrange(4)
        if kind == 0:  # any of the changes, in order
            return _played(self.durable, [item for item in self.pending if chance.random() < 0.5])
        if kind == 1:  # the size, and none of the data
            return self.durable[: len(self.now())].ljust(len(self.now()), b"\0")
        if kind == 2:  # cut off
            return self.now()[: chance.randrange(len(self.now()) + 1) // BLOCK_BYTES * BLOCK_BYTES]
        old, new = self.durable.ljust(len(self.now()), b"\0"), self.now()
        return b"".join(
            (new if chance.random() < 0.5 else old)[start : start + BLOCK_BYTES]
            for start in range(0, len(new), BLOCK_BYTES)
        )


def _played(data: bytes, operations: Sequence[Write | Resize]) -> bytes:
    content = bytearray(data)
    for operation in operations:
        if isinstance(operation, Resize):
            del content[operation.size_bytes :]
            content.extend(bytes(operation.size_bytes - len(content)))
        else:
            end = operation.offset + len(operation.data)
            content.extend(bytes(max(0, end - len(content))))
            content[operation.offset : end] = operation.data
    return bytes(content)


class Model:
    """The disk at one moment of a recorded run: what is durable, and what may be or may not."""

    def __init__(self, start: Tree) -> None:
        self.directories: dict[int, dict[str, int]] = {}
        self.files: dict[int, ShardFile] = {}
        self.pending: list[tuple[Names, set[int]]] = []
        """Changes of names that are not durable, and the directories that have to be fsynced until they are."""
        self._next = ROOT
        self._adopt(start)

    def _adopt(self, tree: Tree) -> int:
        inode, self._next = self._next, self._next + 1
        names = self.directories[inode] = {}
        for name, child in tree.items():
            if isinstance(child, dict):
                names[name] = self._adopt(child)
            else:
                names[name], self._next = self._next, self._next + 1
                self.files[names[name]] = ShardFile(child)
        return inode

    def apply(self, operation: Operation) -> None:
        if isinstance(operation, Names):
            for _, _, inode in operation.changes:
                if inode is not None and inode not in self.files and inode not in self.directories:
                    if operation.is_directory:
                        self.directories[inode] = {}
                    else:
                        self.files[inode] = ShardFile()
            self.pending.append((operation, {directory for directory, _, _ in operation.changes}))
        elif isinstance(operation, Write | Resize):
            self.files.setdefault(operation.inode, ShardFile()).apply(operation)  # it may have no name yet
        elif isinstance(operation, Persist):
            self._persist(operation.inode)

    def _persist(self, inode: int) -> None:
        if inode in self.files:
            self.files[inode].persist()
            return
        left = []
        for names, wanted in self.pending:
            wanted.discard(inode)
            if wanted:
                left.append((names, wanted))
            else:
                _rename(self.directories, names)
        self.pending = left

    def now(self) -> Tree:
        """What every process sees."""
        return self.after_crash(range(len(self.pending)), {})

    def after_crash(self, kept: Sequence[int], contents: dict[int, bytes]) -> Tree:
        """What is there when of the pending changes of names those in ``kept`` arrived, and files have ``contents``."""
        directories = self.directories
        if kept:
            touched = {directory for index in kept for directory, _, _ in self.pending[index][0].changes}
            directories = {**directories, **{inode: dict(directories[inode]) for inode in touched}}
            for index in kept:
                _rename(directories, self.pending[index][0])
        return self._tree(ROOT, directories, contents)

    def _tree(self, inode: int, directories: dict[int, dict[str, int]], contents: dict[int, bytes]) -> Tree:
        tree: Tree = {}
        for name, child in directories[inode].items():
            if child in directories:
                tree[name] = self._tree(child, directories, contents)
            else:
                content = contents.get(child)
                tree[name] = self.files[child].now() if content is None else content
        return tree

    def dirty(self) -> list[int]:
        return [inode for inode, file in self.files.items() if file.pending]


def _rename(directories: dict[int, dict[str, int]], names: Names) -> None:
    for directory, name, inode in names.changes:
        if inode is None:
            directories[directory].pop(name, None)
        else:
            directories[directory][name] = inode


# --- what a crash may leave -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CrashState:
    """What a crash just after operation ``point`` may leave. ``number`` counts the states of one call."""

    number: int
    point: int
    tree: Tree


def crash_states(recorder: Recorder, count: int, seed: int = 0) -> Iterator[CrashState]:
    """Yield ``count`` crash states or a few more, of all moments of the run: first each moment's own, then at random.

    A moment's own states are those that no earlier moment had: after a change that is not durable yet, every choice
    with that change (every subset of the names, where they are few); after a ``Mark``, every choice there is, because
    something else is expected of them now. Random ones have files torn in more ways. The same seed, the same states.

    Cost: about 20 microseconds a state for a tree of 50 files. Memory: what was written, once.
    """
    chance = random.Random(seed)
    number, share = 0, 0
    while number < count:
        model = Model(recorder.start)
        for point, operation in enumerate(recorder.operations):
            model.apply(operation)
            if isinstance(operation, Persist):
                continue
            choices = _own(model, operation, chance) if not share else _random(model, share, chance)
            for kept, contents in choices:
                yield CrashState(number, point, model.after_crash(kept, contents))
                number += 1
            if share and number >= count:
                return
        share = max(1, (count - number) // max(1, len(recorder.operations)) // 4)


Choice = tuple[Sequence[int], dict[int, bytes]]


def _own(model: Model, operation: Operation, chance: random.Random) -> Iterator[Choice]:
    names, dirty = len(model.pending), model.dirty()
    for kept in _subsets(names, chance):
        if isinstance(operation, Names) and names - 1 not in kept:
            continue
        for contents in _plain_contents(model, dirty):
            yield kept, contents
        if dirty:
            yield kept, {inode: model.files[inode].torn(chance) for inode in dirty}


def _random(model: Model, share: int, chance: random.Random) -> Iterator[Choice]:
    names, dirty = len(model.pending), model.dirty()
    for _ in range(share if names > NAMES_ALL_MAX or dirty else 1):
        odds = chance.choice((0.1, 0.5, 0.9))
        kept = [index for index in range(names) if chance.random() < odds]
        yield kept, {inode: model.files[inode].torn(chance) for inode in dirty}


def _subsets(count: int, chance: random.Random) -> Iterator[tuple[int, ...]]:
    """Every subset of ``range(count)``; where that is too many: none, all, each alone, all but each, and some more."""
    if count <= NAMES_ALL_MAX:
        for mask in range(1 << count):
            yield tuple(index for index in range(count) if mask >> index & 1)
        return
    everything = tuple(range(count))
    yield from ((), everything)
    for index in everything:
        yield (index,)
        yield everything[:index] + everything[index + 1 :]
    for _ in range(1 << (NAMES_ALL_MAX - 1)):
        odds = chance.choice((0.1, 0.5, 0.9))
        yield tuple(index for index in everything if chance.random() < odds)


def _plain_contents(model: Model, dirty: Sequence[int]) -> Iterator[dict[int, bytes]]:
    """All of what was written is there, or nothing, or the sizes only."""
    yield {}
    if dirty:
        files = {inode: model.files[inode] for inode in dirty}
        yield {inode: file.durable for inode, file in files.items()}
        yield {inode: file.durable[: len(file.now())].ljust(len(file.now()), b"\0") for inode, file in files.items()}
