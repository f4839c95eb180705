"""Identifies processes across pid reuse, containers and hosts, and their temporary files.

A pid is valid within one pid namespace of one boot of one machine.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import zlib
from pathlib import Path


@functools.cache
def boot_id() -> str:
    """Return the id of this boot; else one of this process and its children."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or secrets.token_hex(16)
    except OSError:
        return secrets.token_hex(16)


def host_id() -> int:
    """Return 32 bits that differ between machines and boots; equal in all containers."""
    return zlib.crc32(boot_id().encode())


@functools.cache
def pid_namespace() -> int:
    """Return 32 bits that differ between pid namespaces of all hosts; 0 if /proc lacks this process's pids."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # noqa: PTH115  # /proc is of another namespace
            return 0
        return zlib.crc32(f"{boot_id()} {os.stat('/proc/self/ns/pid').st_ino}".encode())  # noqa: PTH116
    except OSError:
        return 0


os.register_at_fork(after_in_child=pid_namespace.cache_clear)


def start_ticks(pid: int) -> int:
    """Return clock ticks from boot to the start of ``pid``; 0 without one, or for a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def has_ended(pid: int, started_ticks: int, namespace: int) -> bool | None:
    """Return None in another namespace, where it is unknown."""
    if not namespace or namespace != pid_namespace():
        return None
    return start_ticks(pid) != started_ticks


def current_umask() -> int | None:
    """Return the umask, which ``os.umask`` cannot read without a change."""
    try:
        match = re.search(rb"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_bytes(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1], 8) if match else None


_OWNED = re.compile(r"\.([0-9a-f]{8})([0-9a-f]{8})([0-9a-f]{16})[0-9a-f]{8}\.tmp$")
_TEMPORARY = re.compile(r"^\..+\.[0-9a-f]{8,}\.tmp$", re.DOTALL)
_MADE_HERE = re.compile(r"^\..+\.(?:[0-9a-f]{12}|[0-9a-f]{40})\.tmp$", re.DOTALL)


STEM_BYTES_MAX = 97
"""Of 255 name bytes (143 on eCryptfs), a temporary name needs up to 46."""


def stem_of(name: str) -> str:
    raw = os.fsencode(name)
    if len(raw) <= STEM_BYTES_MAX:
        return name
    return f"{raw[: STEM_BYTES_MAX - 9].decode(errors='ignore')}-{zlib.crc32(raw):08x}"


def companion_path(path: Path, ending: str) -> Path:
    return path.with_name(f".{stem_of(path.name)}{ending}")


def set_aside_name(path: str) -> str:
    directory, slash, name = path.rpartition("/")
    return f"{directory}{slash}{stem_of(name)}.bad"


def is_temporary(name: str) -> bool:
    """True for ``.<name>.<random>.tmp``: an incomplete object, never listed."""
    return bool(_TEMPORARY.match(name))


def is_made_here(name: str) -> bool:
    """True for a temporary name of this version. A user's file may resemble another version's."""
    return bool(_MADE_HERE.match(name))


def temporary_of_this_process(name: str) -> str:
    return f".{stem_of(name)}.{_this_process()}{secrets.token_hex(4)}.tmp"


def is_abandoned(name: str) -> bool:
    """True for a temporary name of an ended process of this machine; False if unknown."""
    match = _OWNED.search(name)
    if match is None:
        return False
    namespace, pid, started_ticks = (int(part, 16) for part in match.groups())
    return has_ended(pid, started_ticks, namespace) is True


@functools.cache  # two reads below /proc cost 30 us of a small file's 90
def _this_process() -> str:
    return f"{pid_namespace():08x}{os.getpid():08x}{start_ticks(os.getpid()):016x}"


os.register_at_fork(after_in_child=_this_process.cache_clear)
