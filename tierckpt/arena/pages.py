"""Pages of a mapping: huge page settings of the kernel, the faster page size, and NUMA nodes.

Huge pages are slower in a virtual machine with free page reporting, so both kinds are measured. The policy is
MPOL_PREFERRED: with MPOL_BIND the kernel kills a process that exceeds the memory of a node.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import CapacityError, ConfigError
from .capacity import ROOT, margin_bytes, mebibytes, meminfo_bytes, read_number, read_text

MEASURE_INTERVAL = 32
"""Of so many pieces, the first two are measured, one of each kind."""
BYTES_MIN = 4 << 20
WEIGHT = 0.3
GAIN_MIN = 0.5
"""Small pages also cost the disk and every later use: they are taken only below this cost."""


class Paging:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._seconds_per_byte: dict[bool, float] = {}

    @property
    def is_huge(self) -> bool:
        huge, small = self._seconds_per_byte.get(True), self._seconds_per_byte.get(False)
        return huge is None or small is None or small > GAIN_MIN * huge

    def next(self) -> tuple[bool, bool]:
        """Whether the next piece gets huge pages, and whether to measure it."""
        with self._lock:
            self._count += 1
            turn = self._count % MEASURE_INTERVAL
            return self.is_huge != (turn == 2), turn in (1, 2)

    def learn(self, size_bytes: int, seconds: float, *, is_huge: bool) -> None:
        if size_bytes < BYTES_MIN:
            return
        with self._lock:
            new, old = seconds / size_bytes, self._seconds_per_byte.get(is_huge)
            self._seconds_per_byte[is_huge] = new if old is None else old + WEIGHT * (new - old)


paging = Paging()


Stretch = tuple[int, int]  # node, bytes

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_NODES_MAX = 1024
_NODES = Path("sys/devices/system/node")

_libc = ctypes.CDLL(None, use_errno=True)


def existing_nodes(root: Path = ROOT) -> list[int]:
    nodes: list[int] = []
    for part in (read_text(root / _NODES / "has_memory").strip() or "0").split(","):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def check_nodes(nodes: Sequence[int]) -> None:
    """Raise ConfigError unless every node exists and is named once."""
    there = existing_nodes()
    if not set(nodes) <= {*there} or len(set(nodes)) != len(nodes):
        hint = f"The nodes of this machine: {', '.join(map(str, there))}"
        raise ConfigError(f"numa_nodes {list(nodes)} must be different nodes with memory", hint=hint)


def free_bytes(nodes: Sequence[int], *, huge_pool: bool = False, root: Path = ROOT) -> dict[int, int]:
    """Return per node the free memory and clean cache less a margin, or its huge page pool."""
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
    """Return the bytes per node, in the order of ``free``. Raises CapacityError."""
    stretches: list[Stretch] = []
    left = size_bytes
    for node, room in free.items():
        node_bytes = min(left, room // granule_bytes * granule_bytes)
        if node_bytes:
            stretches.append((node, node_bytes))
            left -= node_bytes
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
    """Set the nodes of pages not yet allocated. Raises ConfigError: an unknown processor or a forbidden node."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise ConfigError(f"NUMA placement is not supported on {platform.machine()}", hint="Leave the node list empty")
    for node, size_bytes in stretches:
        mask = (ctypes.c_ulong * (_NODES_MAX // 64))()
        mask[node // 64] = 1 << (node % 64)
        arguments = (address, size_bytes, _MPOL_PREFERRED, ctypes.addressof(mask), _NODES_MAX, 0)
        if _libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)) != 0:
            raise ConfigError(
                f"memory cannot be placed on NUMA node {node}: {os.strerror(ctypes.get_errno())}",
                hint="See Mems_allowed_list in /proc/self/status; a kernel or seccomp filter may forbid mbind: then "
                "leave the node list empty",
            )
        address += size_bytes


HUGE_PAGE_BYTES = 2 << 20

_THP = Path("sys/kernel/mm/transparent_hugepage")
_POOL = Path("sys/kernel/mm/hugepages/hugepages-2048kB")
_WANTED = {"always", "within_size", "advise", "force"}
_HUGE_FIELDS = {"AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"}


class HugePool(NamedTuple):
    free_bytes: int
    usable_bytes: int
    """With what the kernel may add."""


def huge_pool(root: Path = ROOT) -> HugePool:
    def count(name: str) -> int:
        return read_number(root / _POOL / name) or 0

    free = max(0, count("free_hugepages") - count("resv_hugepages"))
    growth = max(0, count("nr_overcommit_hugepages") - count("surplus_hugepages"))
    return HugePool(free * HUGE_PAGE_BYTES, (free + growth) * HUGE_PAGE_BYTES)


def huge_bytes(address: int, size_bytes: int) -> int:
    """Return how much of this mapping huge pages back; 0 if unknown. Cost: 10 ms per GiB of 4 KiB pages."""
    found, inside = 0, False
    try:
        with Path("/proc/self/smaps").open() as lines:
            for line in lines:
                first, _, rest = line.partition(" ")
                if first[-1] != ":":
                    low, high = (int(part, 16) for part in first.split("-"))
                    if low >= address + size_bytes:
                        break
                    inside = low >= address and high <= address + size_bytes
                elif inside and first in _HUGE_FIELDS:
                    found += int(rest.split()[0]) * 1024
    except OSError:
        return 0
    return found


def chosen(path: Path) -> str:
    return next((word.strip("[]") for word in read_text(path).split() if word.startswith("[")), "")


def private_is_huge(root: Path = ROOT) -> bool:
    return chosen(root / _THP / "enabled") in ("always", "madvise")


def memory_files_are_huge(root: Path = ROOT) -> bool:
    return chosen(root / _THP / "shmem_enabled") in _WANTED


def shared_memory_is_huge(size_bytes: int = 1 << 30, root: Path = ROOT) -> bool:
    return memory_files_are_huge(root) or huge_pool(root).usable_bytes >= size_bytes


def huge_page_pool_hint(size_bytes: int) -> str:
    count = -(-size_bytes // HUGE_PAGE_BYTES)
    return f"Run `sysctl -w vm.nr_overcommit_hugepages={count}` (or vm.nr_hugepages, which takes the memory at once)"


def advice(shared_bytes: int = 1 << 30, root: Path = ROOT, *, collapses: bool = False) -> list[str]:
    why = "O_DIRECT from 4 KiB pages takes up to 3 times longer than from huge pages"
    said = []
    thp = root / _THP
    if chosen(thp / "enabled") and not private_is_huge(root):
        said.append(f"private staging memory has no huge pages ({why}): echo madvise > {thp / 'enabled'}")
    if not (collapses or shared_memory_is_huge(shared_bytes, root)):
        said.append(
            f"shared staging memory has no huge pages ({why}). As root, run one of: echo advise > "
            f"{thp / 'shmem_enabled'}; "
            f"sysctl -w vm.nr_overcommit_hugepages={-(-shared_bytes // HUGE_PAGE_BYTES)}"
        )
    return said
