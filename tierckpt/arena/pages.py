"""Reads the kernel's huge page settings, how many a mapping got, and which setting would give more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .capacity import ROOT

HUGE_PAGE_BYTES = 2 << 20

_THP = Path("sys/kernel/mm/transparent_hugepage")
_POOL = Path("sys/kernel/mm/hugepages/hugepages-2048kB")
_WANTED = {"always", "within_size", "advise", "force"}
# The lines of smaps that count memory mapped by huge pages, by what backs it.
_HUGE_FIELDS = {"AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"}


@dataclass(frozen=True, slots=True)
class HugePool:
    """The pool of 2 MiB pages: free pages, and how many the kernel may add on demand."""

    free_bytes: int
    growth_bytes: int

    @property
    def usable_bytes(self) -> int:
        return self.free_bytes + self.growth_bytes


def huge_pool(root: Path = ROOT) -> HugePool:
    """Return the state of the pool; nothing in it where the kernel has none."""

    def count(name: str) -> int:
        try:
            return int((root / _POOL / name).read_text())
        except (OSError, ValueError):
            return 0

    free = count("free_hugepages") - count("resv_hugepages")
    growth = count("nr_overcommit_hugepages") - count("surplus_hugepages")
    return HugePool(max(0, free) * HUGE_PAGE_BYTES, max(0, growth) * HUGE_PAGE_BYTES)


def huge_bytes(address: int, size_bytes: int) -> int:
    """Return how much of this mapping huge pages back, by /proc/self/smaps; 0 where the kernel does not tell.

    Cost: the kernel walks the page tables of the mappings below and of this one, 10 ms per GiB of 4 KiB pages.
    """
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
    """Return the bracketed word of a kernel switch; '' where there is none."""
    try:
        words = path.read_text().split()
    except OSError:
        return ""
    return next((word.strip("[]") for word in words if word.startswith("[")), "")


def private_is_huge(root: Path = ROOT) -> bool:
    """Return whether private memory that asks for huge pages may get them."""
    own = chosen(root / _THP / "hugepages-2048kB/enabled")
    return (chosen(root / _THP / "enabled") if own in ("", "inherit") else own) in ("always", "madvise")


def memory_files_are_huge(root: Path = ROOT) -> bool:
    """Return whether a memory file that asks for huge pages may get them.

    ``deny`` and ``force`` of the general switch win; otherwise the switch of this page size decides, which may inherit
    (Linux 6.11).
    """
    general = chosen(root / _THP / "shmem_enabled")
    own = chosen(root / _THP / "hugepages-2048kB/shmem_enabled")
    if general in ("deny", "force") or own in ("", "inherit"):
        return general in _WANTED
    return own in _WANTED


def shared_memory_is_huge(size_bytes: int = 1 << 30, root: Path = ROOT) -> bool:
    """Return whether shared memory of this size may have huge pages, of any kind."""
    return memory_files_are_huge(root) or huge_pool(root).usable_bytes >= size_bytes


def pool_command(size_bytes: int) -> str:
    """Return the sentence that says how to have ``size_bytes`` in the pool of huge pages."""
    count = -(-size_bytes // HUGE_PAGE_BYTES)
    return f"Run `sysctl -w vm.nr_overcommit_hugepages={count}` (or vm.nr_hugepages, which takes the memory at once)"


def advice(shared_bytes: int = 1 << 30, root: Path = ROOT, *, collapses: bool = False) -> list[str]:
    """Return one sentence for each kernel setting that would make staging faster; empty if all is well.

    Args:
        shared_bytes: The size that shared staging memory will have.
        collapses: The kernel makes huge pages of memory files on request (``memory.collapses``).
    """
    why = "O_DIRECT from 4 KiB pages takes up to 3 times longer than from huge pages"
    said = []
    thp = root / _THP
    if chosen(thp / "enabled") and not private_is_huge(root):
        said.append(f"private staging memory has no huge pages ({why}): echo madvise > {thp / 'enabled'}")
    if not (collapses or shared_memory_is_huge(shared_bytes, root)):
        switch = thp / "shmem_enabled"
        own = thp / "hugepages-2048kB/shmem_enabled"
        if chosen(own) not in ("", "inherit") and chosen(switch) != "deny":
            switch = own
        said.append(
            f"shared staging memory has no huge pages ({why}). As root, run one of: echo advise > {switch}; "
            f"sysctl -w vm.nr_overcommit_hugepages={-(-shared_bytes // HUGE_PAGE_BYTES)}"
        )
    return said
