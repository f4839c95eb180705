"""NUMA nodes of a buffer: in the order of a list, from the start of the buffer to its end.

A memory tier on CXL appears in Linux as a NUMA node without processors. ``nodes=[0, 2]`` therefore means: local memory
first, and the rest on node 2. Low addresses are on the first node, so slots that are filled from the start
use the fast memory first.

The policy is MPOL_PREFERRED for each range, not MPOL_BIND: ranges are sized by the free memory of now. If that
changes before the pages are allocated, MPOL_BIND makes the kernel kill a process although other nodes have room.
MPOL_PREFERRED uses the nearest node instead; ``placement`` returns the actual nodes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import CapacityError, ConfigError
from .capacity import ROOT, margin_bytes, mebibytes, meminfo_bytes

Stretch = tuple[int, int]  # node, bytes

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_NODES_MAX = 1024
_NODES = Path("sys/devices/system/node")

_libc = ctypes.CDLL(None, use_errno=True)


def existing_nodes(root: Path = ROOT) -> list[int]:
    """Return the nodes that have memory."""
    try:
        text = (root / _NODES / "has_memory").read_text()
    except OSError:
        return [0]
    nodes: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1) if first else []
    return nodes


def check_nodes(nodes: Sequence[int], root: Path = ROOT) -> None:
    """Check that every node exists and none is named twice.

    Raises:
        ConfigError: names the nodes there are.
    """
    there = existing_nodes(root)
    unknown = [node for node in nodes if node not in there]
    if unknown or len(set(nodes)) != len(nodes):
        what = f"there is no NUMA node {unknown[0]} with memory" if unknown else "a NUMA node is named twice"
        raise ConfigError(f"{what} in {list(nodes)}", hint=f"The nodes of this machine: {', '.join(map(str, there))}")


def free_bytes(nodes: Sequence[int], *, huge_pool: bool = False, root: Path = ROOT) -> dict[int, int]:
    """Return the available memory of each node: free memory and clean cache less a margin, or its huge page pool."""
    free: dict[int, int] = {}
    for node in nodes:
        directory = root / _NODES / f"node{node}"
        if huge_pool:
            free[node] = int((directory / "hugepages/hugepages-2048kB/free_hugepages").read_text()) << 21
            continue
        fields = meminfo_bytes(directory / "meminfo")
        room = fields.get("MemFree", 0) + fields.get("Inactive(file)", 0) - margin_bytes(fields.get("MemTotal", 0))
        free[node] = max(0, room)
    return free


def plan(size_bytes: int, free: Mapping[int, int], granule_bytes: int) -> list[Stretch]:
    """Return how many bytes go to each node, in the order of ``free``, each a multiple of ``granule_bytes``.

    Raises:
        CapacityError: they do not have enough together; lists the free memory of each.
    """
    stretches: list[Stretch] = []
    left = size_bytes
    for node, room in free.items():
        taken = min(left, room // granule_bytes * granule_bytes)
        if taken:
            stretches.append((node, taken))
            left -= taken
    if left:
        each = ", ".join(f"node {node}: {mebibytes(room)}" for node, room in free.items())
        raise CapacityError(
            f"no room for {mebibytes(size_bytes)} of staging memory on the NUMA nodes asked for ({each} free)",
            hint="Use a smaller arena, or name more nodes",
            asked_bytes=size_bytes,
            free_bytes=sum(free.values()),
        )
    return stretches


def prefer(address: int, stretches: Sequence[Stretch]) -> None:
    """Set the node of each stretch, from ``address`` on. Only pages that are not there yet follow it.

    Raises:
        ConfigError: the processor is not known here, or the node is forbidden to this process (cpuset).
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        raise ConfigError(f"NUMA placement is not supported on {platform.machine()}", hint="Leave the node list empty")
    for node, size_bytes in stretches:
        mask = (ctypes.c_ulong * (_NODES_MAX // 64))()
        mask[node // 64] = 1 << (node % 64)
        arguments = (address, size_bytes, _MPOL_PREFERRED, ctypes.addressof(mask), _NODES_MAX, 0)
        if _libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)) != 0:
            code = ctypes.get_errno()
            hint = "Is it allowed? See Mems_allowed_list in /proc/self/status"
            if code in (errno.ENOSYS, errno.EPERM):
                hint = "This kernel or its seccomp filter does not allow mbind; leave the node list empty"
            raise ConfigError(f"memory cannot be placed on NUMA node {node}: {os.strerror(code)}", hint=hint)
        address += size_bytes
