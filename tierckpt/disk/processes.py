"""Identifies processes across pid reuse, containers and hosts.

A pid is valid within one pid namespace of one boot of one machine. The number of a namespace alone does not identify
a host: the number of the first one is the same on every machine.
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
    """Return the id of this boot of this machine; without one in the kernel, an id of this process and its children."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or secrets.token_hex(16)
    except OSError:
        return secrets.token_hex(16)


def host_id() -> int:
    """32 bits that differ between machines, and between boots of one; equal in all containers of one kernel."""
    return zlib.crc32(boot_id().encode())


@functools.cache
def pid_namespace() -> int:
    """Return 32 bits that differ between pid namespaces of all hosts; 0 if pids of this process cannot be looked up."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # noqa: PTH115  # /proc is of another namespace
            return 0
        return zlib.crc32(f"{boot_id()} {os.stat('/proc/self/ns/pid').st_ino}".encode())  # noqa: PTH116
    except OSError:
        return 0


os.register_at_fork(after_in_child=pid_namespace.cache_clear)


def start_ticks(pid: int) -> int:
    """Clock ticks from boot to the start of ``pid`` (proc(5)); 0 when there is none, or only its remains (a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def has_ended(pid: int, started_ticks: int, namespace: int) -> bool | None:
    """Return True if that process has ended, False if it lives, None if it is in another namespace (unknown)."""
    if not namespace or namespace != pid_namespace():
        return None
    return start_ticks(pid) != started_ticks


def current_umask() -> int | None:
    """The umask of this process, which ``os.umask`` cannot read without a change; None where the kernel is silent."""
    try:
        match = re.search(rb"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_bytes(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1], 8) if match else None
