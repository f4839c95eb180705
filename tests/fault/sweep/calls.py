"""The log of strace: system calls on files of the test, numbered among calls of the same name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"^(?P<name>\w+)\((?P<arguments>.*)\)\s+= (?P<result>.*)$")
_PATH = re.compile(r'"(/[^"]*)"(?:\.\.\.)?|\d+<(/[^>]*)>')

CHANGING = {
    *("openat", "write", "pwrite64", "fsync", "fallocate", "ftruncate"),
    *("rename", "link", "linkat", "unlink", "mkdir", "rmdir"),
}
"""The calls that change the disk (a flock ends with its holder). A kill before any other call finds the state that the
last of these left."""


@dataclass(frozen=True)
class Call:
    """One system call: the ``number``-th of its ``name``, on ``paths``."""

    name: str
    number: int
    paths: tuple[str, ...]
    arguments: str
    result: str

    @property
    def path(self) -> str:
        return self.paths[0]

    @property
    def is_injected(self) -> bool:
        return "(INJECTED)" in self.result

    @property
    def failed(self) -> bool:
        return self.result.startswith("-1")

    @property
    def creates(self) -> bool:
        return self.name == "openat" and "O_CREAT" in self.arguments

    @property
    def changes(self) -> bool:
        return self.name in CHANGING and (self.name != "openat" or self.creates)


def read(log: Path, root: Path) -> list[Call]:
    """Return the calls on paths below ``root``. All calls are numbered, as strace does it."""
    return [call for call in _all(log) if _is_below(root, call)]


def strayed(log: Path, root: Path) -> bool:
    """Say whether an injection hit a call outside ``root``, such as a read of Python's import."""
    return any(call.is_injected and not _is_below(root, call) for call in _all(log))


def _is_below(root: Path, call: Call) -> bool:
    return any(path.startswith(f"{root}/") or path == str(root) for path in call.paths)


def _all(log: Path) -> Iterator[Call]:
    numbers: Counter[str] = Counter()
    for line in log.read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        numbers[match["name"]] += 1
        paths = tuple((a or b).removesuffix(" (deleted)") for a, b in _PATH.findall(match["arguments"]))
        yield Call(match["name"], numbers[match["name"]], paths, match["arguments"], match["result"])


ERRNOS = {
    "write": ("ENOSPC", "EIO", "EROFS", "EINTR"),
    "pwrite64": ("ENOSPC", "EIO", "EROFS", "EINTR"),
    "fsync": ("EIO", "ENOSPC", "EROFS", "EINTR"),
    "fallocate": ("ENOSPC", "EIO", "EROFS"),
    "ftruncate": ("EIO", "EROFS", "EINTR"),
    "rename": ("ENOSPC", "EIO", "EROFS"),
    "link": ("ENOSPC", "EIO", "EROFS"),
    "unlink": ("EIO", "EROFS"),
    "mkdir": ("ENOSPC", "EIO", "EROFS"),
    "rmdir": ("EIO", "EROFS"),
    "flock": ("EINTR", "EIO"),
    "close": ("EIO", "EINTR"),
}
"""The injected errors of each call. All other calls read: EIO, or EINTR."""
READ_ERRNOS = ("EIO", "EINTR")
CREATE_ERRNOS = ("ENOSPC", "EIO", "EROFS", "EINTR")
SILENT_FAILURES = {"fsync": "retval=0", "write": "retval=0", "pwrite64": "retval=0"}
"""An fsync without effect that reports success; a write that writes no byte and returns 0."""


def injections_for(call: Call) -> tuple[str, ...]:
    """Return the possible injections into ``call``, in strace's syntax."""
    errnos = CREATE_ERRNOS if call.creates else ERRNOS.get(call.name, READ_ERRNOS)
    silent = (SILENT_FAILURES[call.name],) if call.name in SILENT_FAILURES else ()
    return (*(f"error={errno}" for errno in errnos), *silent)
