"""Commands that run another command as on another host, or in another container of this one. Needs root."""

from __future__ import annotations

import os
import shlex
import subprocess
import uuid
from functools import cache
from pathlib import Path

import pytest

BOOT_ID = "/proc/sys/kernel/random/boot_id"


def container() -> list[str]:
    """Pids and a host name of its own; the kernel, and so the boot id, is this one."""
    return ["unshare", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child"]


def other_host(directory: Path) -> list[str]:
    """Another boot id; the number of the pid namespace is this host's, as for the first one on every host."""
    boot = directory / f"boot-{uuid.uuid4()}"
    boot.write_text(f"{uuid.uuid4()}\n")
    mount = f'mount --bind {shlex.quote(str(boot))} {BOOT_ID} && exec "$@"'
    return ["unshare", "--mount", "--fork", "--kill-child", "sh", "-c", mount, "sh"]


@cache
def _has_namespaces() -> bool:
    command = [*container(), "mount", "--bind", BOOT_ID, BOOT_ID]
    try:
        return os.geteuid() == 0 and not subprocess.run(command, capture_output=True).returncode
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(not _has_namespaces(), reason="only root can make pid and mount namespaces")
