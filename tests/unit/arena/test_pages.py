"""Staging memory's queries of the kernel: free memory, NUMA nodes, and the settings that would allow more.

The kernel's files are simulated, so that other machines can be described.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tierckpt.arena import capacity, pages
from tierckpt.arena.memory import HUGE_PAGE_BYTES
from tierckpt.errors import CapacityError

MiB, GiB = 1 << 20, 1 << 30


# --- what limits memory -----------------------------------------------------------------------------------------


def machine(root: Path, files: dict[str, object]) -> Path:
    """A directory that replaces / for reads of the kernel's files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


ROOMY = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\nHugePages_Total: 0"}
V2 = "25 24 0:23 {inner} /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1 = "35 31 0:32 {inner} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def free_in_gib(root: Path) -> list[float]:
    return [limit.free_bytes / GiB for limit in capacity.limits(root)]


def test_the_machine_limits_memory(tmp_path: Path) -> None:
    machine(tmp_path, ROOMY)
    assert free_in_gib(tmp_path) == [60]
    capacity.require(59 * GiB, asked_bytes=59 * GiB, root=tmp_path)
    with pytest.raises(CapacityError, match="61440 MiB of 65536 MiB of memory are free"):
        capacity.require(60 * GiB, asked_bytes=60 * GiB, root=tmp_path)  # the last GiB is for everybody else


def test_a_version_2_group_and_each_above_it_limit_memory_and_page_cache_is_free(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slurm/job/step",
        "proc/self/mountinfo": V2.format(inner="/"),
        "sys/fs/cgroup/slurm/memory.max": "max",
        "sys/fs/cgroup/slurm/job/memory.max": 8 * GiB,
        "sys/fs/cgroup/slurm/job/memory.current": 7 * GiB,
        "sys/fs/cgroup/slurm/job/memory.stat": f"anon 5\ninactive_file {2 * GiB}\nactive_file {GiB}",
        "sys/fs/cgroup/slurm/job/step/memory.max": 32 * GiB,
        "sys/fs/cgroup/slurm/job/step/memory.current": 2 * GiB,
    }
    machine(tmp_path, ROOMY | files)
    assert free_in_gib(tmp_path) == [60, 30, 4]
    with pytest.raises(CapacityError, match="job are free") as caught:
        capacity.require(4 * GiB, asked_bytes=5 * GiB, root=tmp_path)
    assert "raise the memory limit" in str(caught.value)
    assert caught.value.context == {"asked_bytes": 5 * GiB, "free_bytes": 4 * GiB}


def test_a_version_1_group_limits_memory(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "8:pids:/other\n4:cpu,memory:/job\n0::/",
        "proc/self/mountinfo": V1.format(inner="/") + "\n36 31 0:33 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": GiB,
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 3 * GiB,
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 2 * GiB,
        "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GiB}",
    }
    assert free_in_gib(machine(tmp_path, ROOMY | files)) == [60, 2]


@pytest.mark.parametrize("own", ["/docker/abc", "/"])
def test_a_container_sees_its_own_group_at_the_mount_point(tmp_path: Path, own: str) -> None:
    files = {
        "proc/self/cgroup": f"4:memory:{own}",
        "proc/self/mountinfo": V1.format(inner="/docker/abc" if own != "/" else "/"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 4 * GiB,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": GiB,
    }
    assert free_in_gib(machine(tmp_path, ROOMY | files)) == [60, 3]


def test_no_piece_takes_more_than_a_small_part_of_what_is_left(tmp_path: Path) -> None:
    def piece_bytes(free_bytes: int) -> int:
        text = f"MemTotal: {GiB >> 10} kB\nMemAvailable: {((free_bytes + GiB // 20) >> 10) + 1} kB"
        return capacity.piece_bytes(asked_bytes=GiB, root=machine(tmp_path, {"proc/meminfo": text}))

    assert [piece_bytes(free) for free in (640 * MiB, 320 * MiB, 3 * MiB)] == [20 * MiB, 10 * MiB, 2 * MiB]
    assert piece_bytes(512 * GiB) == 64 * MiB
    with pytest.raises(CapacityError, match="no room for 1024 MiB"):
        piece_bytes(1 * MiB)


def test_what_cannot_be_read_does_not_limit(tmp_path: Path) -> None:
    assert capacity.limits(tmp_path) == []
    capacity.require(GiB, asked_bytes=GiB, root=tmp_path)


def test_nodes_are_filled_in_the_order_given() -> None:
    free = {2: 10 * MiB + 5, 0: 0, 1: 100 * MiB}
    assert pages.plan(4 * MiB, free, HUGE_PAGE_BYTES) == [(2, 4 * MiB)]
    assert pages.plan(64 * MiB, free, HUGE_PAGE_BYTES) == [(2, 10 * MiB), (1, 54 * MiB)]
    with pytest.raises(CapacityError, match=r"node 2: 10 MiB, node 0: 0 MiB, node 1: 100 MiB free"):
        pages.plan(112 * MiB, free, HUGE_PAGE_BYTES)


def test_what_a_node_has_free(tmp_path: Path) -> None:
    node = "sys/devices/system/node/node3"
    files = {
        "sys/devices/system/node/has_memory": "0,2-3",
        f"{node}/meminfo": f"Node 3 MemTotal: {64 << 20} kB\nNode 3 MemFree: {8 << 20} kB\n"
        f"Node 3 Active(file): {9 << 20} kB\nNode 3 Inactive(file): {4 << 20} kB",
        f"{node}/hugepages/hugepages-2048kB/free_hugepages": 512,
    }
    machine(tmp_path, files)
    assert pages.existing_nodes(tmp_path) == [0, 2, 3]
    assert pages.free_bytes([3], root=tmp_path) == {3: 11 * GiB}  # less the GiB that is everybody's
    assert pages.free_bytes([3], huge_pool=True, root=tmp_path) == {3: GiB}


# --- advice -----------------------------------------------------------------------------------------------------

THP = "sys/kernel/mm/transparent_hugepage"
POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
USUAL = {
    f"{THP}/enabled": "always [madvise] never",
    f"{THP}/shmem_enabled": "always within_size advise [never] deny force",
}


def test_the_usual_kernel_is_told_two_ways_to_share_huge_pages(tmp_path: Path) -> None:
    (sentence,) = pages.advice(root=machine(tmp_path, USUAL))
    assert f"echo advise > {tmp_path / THP}/shmem_enabled" in sentence
    assert "sysctl -w vm.nr_overcommit_hugepages=512" in sentence
    assert "O_DIRECT from 4 KiB pages takes up to 3 times longer" in sentence


@pytest.mark.parametrize(
    ("files", "sentences"),
    [
        ({f"{THP}/shmem_enabled": "always within_size [advise] never deny force"}, 0),
        ({f"{POOL}/free_hugepages": 600, f"{POOL}/resv_hugepages": 80}, 0),
        ({f"{POOL}/free_hugepages": 0, f"{POOL}/nr_overcommit_hugepages": 512, f"{POOL}/surplus_hugepages": 0}, 0),
        ({f"{THP}/shmem_enabled": "always within_size advise never [deny] force"}, 1),
        ({f"{POOL}/free_hugepages": 600, f"{POOL}/resv_hugepages": 100}, 1),
    ],
    ids=["advise", "pool", "growing pool", "denied", "pool too small"],
)
def test_any_one_of_them_is_enough(tmp_path: Path, files: dict[str, object], sentences: int) -> None:
    assert len(pages.advice(GiB, root=machine(tmp_path, USUAL | files))) == sentences


def test_private_memory_without_huge_pages_is_told_too(tmp_path: Path) -> None:
    files = {f"{THP}/enabled": "always madvise [never]", f"{THP}/shmem_enabled": "[always] never"}
    (sentence,) = pages.advice(root=machine(tmp_path, files))
    assert sentence.endswith(f"echo madvise > {tmp_path / THP}/enabled")


def test_doctor_passes_the_advice_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from tierckpt.cli import doctor

    monkeypatch.setattr(pages, "advice", lambda **_: ["turn this", "or that"])
    found = [(check.name, check.status, check.detail) for check in doctor.huge_pages()]
    assert found == [("huge pages", "warn", "turn this"), ("huge pages", "warn", "or that")]
    monkeypatch.setattr(pages, "advice", lambda **_: [])
    assert [check.status for check in doctor.huge_pages()] == ["ok"]
