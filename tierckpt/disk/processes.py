"""Processes of this machine: what tells one from a later one that has its number, or from one in another container."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def boot_id() -> str:
    """What tells this boot of the machine from others. Raises OSError where the kernel does not say."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> int:
    """In which numbers of processes mean what they mean here; 0 where the kernel does not say."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    except OSError:
        return 0


def start_ticks(pid: int) -> int:
    """Clock ticks from boot to the start of ``pid`` (proc(5)); 0 when there is none, or only its remains (a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def current_umask() -> int | None:
    """The umask of this process, which ``os.umask`` cannot read without a change; None where the kernel is silent."""
    try:
        match = re.search(rb"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_bytes(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1], 8) if match else None
