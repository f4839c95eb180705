"""Claims: exclusive ownership by name between processes, of one host or several, each with a heartbeat.

Invariants:
    C1  A claim appears whole, with its holder's name in it, or not at all: it is a symbolic link, made by one call that
        fails when the name is taken. Where the file system has no such links it is a file, made by an exclusive create;
        for the moment between that and the write of the name nobody else takes it.
    C2  A claim of a process that has ended is free at once; so is one whose holder has let its heartbeat stop for
        ``SILENT_SECONDS`` (stopped, hung, or killed in another container or on another host). Its remover holds the
        lock of the folder (flock, open(2)) and looks again: what another has claimed meanwhile is never removed.
    C3  A claim decides who works, never what is right: a holder that was taken for dead and goes on does the same work
        twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..errors import StoreError
from ..ownership import file_mode
from ..resources import start_thread
from ..telemetry import logger
from ..types import Tier
from .durable import CANNOT_LINK, make_dirs, translated, write_new
from .processes import has_ended, host_id, pid_namespace, start_ticks
from .quarantine import kind_of, open_regular, set_aside

log = logger("cache")

BEAT_SECONDS = 2.0
SILENT_SECONDS = 20.0
"""Ten beats: a process that is merely starved of processor time is not taken for a dead one."""
TRIES = 100
NAME_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True)
class Owner:
    """One holder: a process (pid, and when it started, so that a pid used again is told apart) and a token of its own.

    ``namespace`` says where the pid means something (``processes``), ``host`` which machine runs it.
    """

    pid: int
    started_ticks: int
    namespace: int
    host: int
    token: str

    @classmethod
    def mine(cls) -> Owner:
        pid = os.getpid()
        return cls(pid, start_ticks(pid), pid_namespace(), host_id(), secrets.token_hex(4))

    @property
    def name(self) -> str:
        return f"{self.pid}-{self.started_ticks}-{self.namespace}-{self.host}-{self.token}"

    @classmethod
    def parse(cls, name: str) -> Owner | None:
        try:
            pid, started, namespace, host, token = name.split("-")
            return cls(int(pid), int(started), int(namespace), int(host), token)
        except ValueError:
            return None

    def has_ended(self) -> bool | None:
        """True when the process is gone, False while it lives, None when that cannot be known (another container)."""
        return has_ended(self.pid, self.started_ticks, self.namespace)


def is_live(name: str, beats: Path) -> bool:
    """True while the holder ``name`` lives and its heartbeat in directory ``beats`` goes on.

    A holder without a heartbeat file has let go. The file is opened, as a network mount may answer a ``stat`` with what
    it knew a minute ago, and its time is compared with the time that this process's own heartbeat there has: the
    server's, whose clock may differ from ours.
    """
    owner = Owner.parse(name)
    if owner is None or owner.has_ended():
        return False
    now = _heart.time_in(beats)
    try:
        return (time.time() if now is None else now) - _beat_at(beats / name) < SILENT_SECONDS
    except OSError:
        return False


def _beat_at(path: Path) -> float:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:  # another user's, with a strict umask
        return path.stat().st_mtime
    try:
        return os.fstat(file).st_mtime
    finally:
        os.close(file)


class Heartbeat:
    """This process's heartbeat in the directory ``beats``, from ``begin`` to ``end``, or until the process ends."""

    def __init__(self, beats: Path) -> None:
        self.owner = Owner.mine()
        self._path = beats / self.owner.name
        self._file = -1

    @property
    def name(self) -> str:
        return self.owner.name

    def begin(self) -> None:
        """Raises OSError or StoreError when the directory cannot be written."""
        for left in reversed(range(TRIES)):
            try:
                make_dirs(self._path.parent, is_durable=False)
                self._file = open_regular(self._path, os.O_WRONLY | os.O_CREAT, file_mode(self._path))
                break
            except FileNotFoundError:  # somebody has tidied the empty directory away meanwhile
                if not left:
                    raise
        _heart.add(self._file, self._path.parent)

    def end(self) -> None:
        """Let go. Idempotent; in a forked child it leaves the parent's alone."""
        if self._file < 0 or self.owner.pid != os.getpid():
            return
        _heart.remove(self._file)
        os.close(self._file)
        self._file = -1
        with contextlib.suppress(OSError):
            self._path.unlink()


class Claims:
    """Claims by name in the directory ``folder``, for one holder, whose heartbeat is in ``beats``."""

    def __init__(self, folder: Path, beats: Path, holder: str) -> None:
        self.folder, self._beats, self._holder = folder, beats, holder
        self.taken_over = 0
        """Claims of dead or silent holders that this one has taken."""

    def take(self, name: str) -> bool:
        """Claim ``name``; False when a live holder has it.

        Raises:
            ObjectNotFoundError: the folder has gone.
            CapacityError, StoreError: no claim can be made there; what lies there is none, and cannot be moved away.
        """
        path = self.folder / name
        with translated(path):
            for _ in range(TRIES):
                try:
                    _make(path, self._holder)
                    return True
                except FileExistsError:
                    holder = self.holder(name)
                    if is_live(holder, self._beats) if holder is not None else _is_being_made(path):
                        return False
                    if not self._clear(path, holder):
                        return False
        return False  # others come and go faster than we look: they do the work

    def _clear(self, path: Path, dead: str | None) -> bool:
        """Remove the claim of ``dead``, or what is no claim; False when another is just doing such a thing, and goes
        first."""
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not _lock(folder):
                return False
            if dead is not None and holder_of(path) == dead:
                path.unlink(missing_ok=True)
                self.taken_over += 1
                log.info("taking over %s from %s, which has ended or says nothing any more", path.name, dead)
            elif dead is None and holder_of(path) is None and not _remove_other(path):
                raise StoreError(
                    f"{path} is {kind_of(path)} and no claim",
                    hint="A copy of the directory made without its links? Remove it",
                    path=path,
                    tier=Tier.LOCAL,
                )
            return True
        finally:
            _unlock(folder)  # a child that was forked meanwhile has this descriptor too
            os.close(folder)

    def holder(self, name: str) -> str | None:
        return holder_of(self.folder / name)

    def is_held(self, name: str) -> bool:
        """True while a live holder has ``name``."""
        holder = self.holder(name)
        return holder is not None and is_live(holder, self._beats)

    def release(self, name: str) -> None:
        """Give up ``name`` if it is still ours."""
        if self.holder(name) == self._holder:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()

    def count(self) -> int:
        """How many claims live holders have now."""
        try:
            names = [name for name in os.listdir(self.folder) if not name.startswith(".")]  # noqa: PTH208
        except OSError:
            return 0
        holders = Counter(self.holder(name) for name in names)
        return sum(count for holder, count in holders.items() if holder and is_live(holder, self._beats))


def _lock(folder: int) -> bool:
    """False while another has the lock of ``folder``. Where there are no locks, all have it (C3)."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _unlock(folder: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(folder, fcntl.LOCK_UN)


def _make(path: Path, holder: str) -> None:
    """Raises FileExistsError: the name is taken. OSError."""
    try:
        path.symlink_to(holder)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise
        write_new(path, holder.encode(), is_durable=False)


def holder_of(path: Path) -> str | None:
    """Return the holder that the claim at ``path`` names; None without one, and of what is no claim."""
    with contextlib.suppress(OSError):
        return str(path.readlink())
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        name = os.read(file, NAME_BYTES_MAX).decode(errors="replace")
        return name if Owner.parse(name) else None
    except OSError:
        return None
    finally:
        os.close(file)


def _is_being_made(path: Path) -> bool:
    """True for an empty file that was made just now: its holder is about to write its name."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and not status.st_size and time.time() - status.st_mtime < SILENT_SECONDS
    return False


def _remove_other(path: Path) -> bool:
    """Remove what is no claim; False where that is not ours to do."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and not status.st_size:  # a holder has ended before it wrote its name
            path.unlink()
            return True
    return kind_of(path) in ("a link", "nothing") or set_aside(path)


class _Heart:
    """One thread per process that touches the files of all its presences."""

    def __init__(self) -> None:
        self._files: dict[int, Path] = {}
        self._lock = threading.Lock()
        self._is_beating = False

    def add(self, file: int, beats: Path) -> None:
        with self._lock:
            self._files[file] = beats
            if not self._is_beating:
                start_thread(threading.Thread(target=self._beat, name="tierckpt-heart", daemon=True))
                self._is_beating = True

    def remove(self, file: int) -> None:
        with self._lock:
            self._files.pop(file, None)

    def time_in(self, beats: Path) -> float | None:
        """The time of this process's last beat in ``beats``, by the clock of that file system; None without one."""
        with self._lock:
            files = [file for file, place in self._files.items() if place == beats]
            with contextlib.suppress(OSError):
                return max((os.fstat(file).st_mtime for file in files), default=None)
        return None

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            with self._lock:
                if not self._files:
                    self._is_beating = False
                    return
                for file in self._files:
                    with contextlib.suppress(OSError):  # the file system is in trouble: others will see silence
                        try:
                            os.utime(file)
                        except PermissionError:  # it sets no times: a write does
                            os.pwrite(file, b"\n", 0)


_heart = _Heart()


def start_anew() -> None:
    """In a forked child nothing of the parent's beats, and its locks may be held for ever."""
    global _heart
    _heart = _Heart()


os.register_at_fork(after_in_child=start_anew)
