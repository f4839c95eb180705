"""Staging memory: guarantees of a mapping, for every kind on this machine, and the error if there is none."""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import mmap
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.open_files import open_files
from tests.services import ALONE_SECONDS, shared_memory_alone, unavailable
from tierckpt.arena import capacity, pages
from tierckpt.arena import memory as memory_module
from tierckpt.arena.memory import HUGE_PAGE_BYTES, Kind, Memory, collapses
from tierckpt.errors import CapacityError, ConfigError
from tierckpt.poll import Poll

MiB, GiB = 1 << 20, 1 << 30


def has_hugetlb() -> bool:
    """True if an administrator has provided a pool of huge pages."""
    try:
        Memory.allocate(64 * MiB, kind=Kind.HUGETLB).close()
    except CapacityError:
        return False
    return True


SHARED = [Kind.HUGETLB, Kind.SHM] if has_hugetlb() else [Kind.SHM]


@pytest.fixture(params=[Kind.PRIVATE, *SHARED], ids=str)
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    with Memory.allocate(16 * MiB, kind=request.param) as made:
        yield made


@pytest.fixture(params=SHARED, ids=str)
def shared(request: pytest.FixtureRequest) -> Iterator[Memory]:
    with Memory.allocate(16 * MiB, kind=request.param) as made:
        yield made


def run_python(code: str, *arguments: str, fds: tuple[int, ...] = ()) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, pass_fds=fds)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def in_child(action: Callable[[], object]) -> int:
    """Run ``action`` in a forked child. Returns 0 if it returned true, less if a signal ended it."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = 0 if action() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def minor_faults(who: int = resource.RUSAGE_THREAD) -> int:
    """Page faults of this thread only."""
    return resource.getrusage(who).ru_minflt


def faults_of_a_write(memory: Memory) -> int:
    before = minor_faults()
    ctypes.memset(memory.address, 0xA5, memory.size_bytes)
    return minor_faults() - before


def least(measure: Callable[[], int]) -> int:
    """The minimum of three: page migration by the kernel, or another thread, may add faults."""
    return min(measure() for _ in range(3))


def descriptors() -> int:
    return len(open_files("/memfd:"))


def meminfo(field: str) -> int:
    return capacity.meminfo_bytes(Path("/proc/meminfo"))[field]


def rollup(field: str) -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


# --- every kind -------------------------------------------------------------------------------------------------


def test_memory_is_aligned_zeroed_and_all_there(memory: Memory) -> None:
    assert memory.address % HUGE_PAGE_BYTES == 0
    assert memory.size_bytes == len(memory.view) == 16 * MiB
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory.view)) == memory.address
    assert bytes(memory.view) == bytes(16 * MiB)
    memory.view[-3:] = b"end"
    assert ctypes.string_at(memory.address + memory.size_bytes - 3, 3) == b"end"


@pytest.mark.parametrize("kind", [Kind.PRIVATE, *SHARED], ids=str)
def test_later_use_takes_no_page_faults(kind: Kind) -> None:
    def faults() -> int:
        with Memory.allocate(16 * MiB, kind=kind) as memory:
            return faults_of_a_write(memory)

    assert least(faults) < 8  # 8 of huge pages or 4096 of small ones if they were not there


def test_huge_is_what_the_kernel_did_not_what_was_asked(memory: Memory) -> None:
    if memory.kind is Kind.HUGETLB:
        assert memory.huge
    if not Path("/sys/kernel/mm").exists():
        unavailable("/sys is not mounted, where the kernel says which pages it gives")
    if memory.kind is Kind.PRIVATE and not pages.private_is_huge():
        assert not memory.huge
    if memory.kind is Kind.SHM:
        assert memory.huge == (pages.memory_files_are_huge() or collapses())


def test_huge_is_measured(memory: Memory) -> None:
    def agrees() -> bool:
        with Memory.allocate(16 * MiB, kind=memory.kind) as made:
            return made.huge == (pages.huge_bytes(made.address, made.size_bytes) >= 0.9 * made.size_bytes)

    assert any(agrees() for _ in range(3))  # the kernel may make huge pages between the two


@pytest.mark.parametrize("advice", ["_MADV_COLLAPSE", "_MADV_POPULATE_WRITE"])
def test_without_kernel_support_shared_memory_has_small_pages(advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, advice, 9999)  # as an older kernel answers
    unpopulated = 8 * MiB // mmap.PAGESIZE if advice == "_MADV_POPULATE_WRITE" else 0

    def faults() -> int:
        with Memory.allocate(8 * MiB, kind=Kind.SHM) as memory:
            assert memory.huge == pages.memory_files_are_huge()
            return faults_of_a_write(memory)

    assert least(faults) < 8 + unpopulated


@pytest.mark.parametrize(("asked", "expected"), [(mmap.MADV_HUGEPAGE, True), (mmap.MADV_NOHUGEPAGE, False)])
def test_the_measure_of_huge_pages_agrees_with_the_total_of_the_process(asked: int, expected: bool) -> None:
    if expected and not pages.private_is_huge():
        pytest.skip("this kernel gives private memory no huge pages")
    size_bytes = 32 * MiB

    def agrees() -> bool:
        before = rollup("AnonHugePages")
        with mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
            mapped.madvise(asked)
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            ctypes.memset(address, 1, len(mapped))
            counted = pages.huge_bytes(address, len(mapped))
            return (counted >= size_bytes) == expected and counted == rollup("AnonHugePages") - before

    assert any(agrees() for _ in range(3))  # the kernel may make others meanwhile


def test_close_gives_everything_back_at_once() -> None:
    resident, open_before = rollup("Rss"), descriptors()
    for _ in range(5):
        for kind in (Kind.PRIVATE, Kind.SHM):
            made = Memory.allocate(64 * MiB, kind=kind)
            made.close()
            made.close()
            assert made.fd is None
            with pytest.raises(ValueError, match="released"):
                made.view[0]
    assert rollup("Rss") - resident < 16 * MiB
    assert descriptors() == open_before


def test_views_outlive_close_and_free_the_memory_with_the_last_one(memory: Memory) -> None:
    part, name = memory.view[4096:8192], memory.name
    part[:3] = b"abc"
    resident = rollup("Rss") + rollup("Private_Hugetlb")
    memory.close()
    assert part[:3] == b"abc"
    part[:3] = b"def"
    if name is not None:
        with pytest.raises(ConfigError):
            Memory.open(name)
    del part
    assert resident - rollup("Rss") - rollup("Private_Hugetlb") > 12 * MiB


@pytest.mark.slow
def test_tensors_outlive_close() -> None:
    torch = pytest.importorskip("torch")
    made = Memory.allocate(4 * MiB, kind=Kind.SHM)
    tensor = torch.frombuffer(made.view[: 2 * MiB], dtype=torch.uint8)
    made.close()
    gc.collect()
    tensor.fill_(7)  # a crash if close had unmapped: torch keeps the view, but exports no buffer of it
    assert int(tensor.sum()) == 7 * 2 * MiB


# --- other processes --------------------------------------------------------------------------------------------

HOLD = """
    import sys, time
    from tierckpt.arena.memory import Kind, Memory
    memory = Memory.allocate(int(sys.argv[1]), kind=Kind.SHM)
    memory.view[:4] = b"held"
    print(memory.name, flush=True)
    time.sleep(120)
"""
OPEN = """
    import sys
    from tierckpt.arena.memory import Memory
    with Memory.open(sys.argv[1]) as memory:
        print(memory.kind, memory.size_bytes, bytes(memory.view[:5]).decode(), memory.huge)
        memory.view[-5:] = b"there"
"""


def test_another_process_opens_it_by_name(shared: Memory) -> None:
    shared.view[:5] = b"hello"
    assert shared.name is not None
    assert run_python(OPEN, shared.name) == f"{shared.kind} {16 * MiB} hello {shared.huge}"
    assert shared.view[-5:] == b"there"


def test_memory_outlives_its_owner_where_another_process_has_it_open() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), str(4 * MiB)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    with Memory.open(name) as ours:
        owner.kill()
        owner.wait()
        assert ours.view[:4] == b"held"
        with pytest.raises(ConfigError, match="Its owner has ended"):
            Memory.open(name)


def test_the_size_is_sealed(shared: Memory) -> None:
    assert shared.fd is not None
    for size_bytes in (0, 2 * MiB, GiB):
        with pytest.raises(PermissionError):
            os.ftruncate(shared.fd, size_bytes)


def test_what_is_not_an_arena_is_refused(tmp_path: Path, shared: Memory) -> None:
    other = tmp_path / "file"
    other.write_bytes(bytes(2 * MiB))
    open_before = descriptors()
    with other.open("r+b") as file:
        for name in (f"/proc/{os.getpid()}/fd/{file.fileno()}", f"/proc/{os.getpid()}/fd/999", str(other), ""):
            with pytest.raises(ConfigError):
                Memory.open(name)
        with pytest.raises(ConfigError):
            Memory.from_fd(file.fileno(), Kind.SHM)
    assert shared.fd is not None
    wrong = Kind.SHM if shared.kind is not Kind.SHM else Kind.HUGETLB
    for kind in (wrong, Kind.PRIVATE):
        with pytest.raises(ConfigError):
            Memory.from_fd(shared.fd, kind)
    assert descriptors() == open_before


def test_a_forked_child_of_a_private_owner_sees_zeros_and_cannot_harm_it() -> None:
    with Memory.allocate(64 * MiB, kind=Kind.PRIVATE) as ours:
        ctypes.memset(ours.address, 0x5A, ours.size_bytes)

        def child() -> bool:
            ours.view[:4] = b"mine"
            clean = bytes(ours.view[4:MiB]) == bytes(MiB - 4)
            ours.close()
            with Memory.allocate(64 * MiB) as other:  # may land where the closed one was
                other.view[-1] = 1
            return clean

        assert in_child(child) == 0
        assert bytes(ours.view) == b"\x5a" * ours.size_bytes


def faults_after_a_fork() -> int:
    with Memory.allocate(64 * MiB, kind=Kind.PRIVATE) as ours:
        ours.view[:] = b"\x5a" * ours.size_bytes
        anonymous_bytes = rollup("Anonymous")
        wait, go = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(wait, 1)  # a DataLoader worker: alive, and holding whatever fork gave it
            os._exit(0 if rollup("Anonymous") < anonymous_bytes - 48 * MiB else 1)
        faults = faults_of_a_write(ours)
        os.write(go, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(go)
        os.close(wait)
        return faults


def test_fork_neither_copies_private_memory_nor_makes_the_parent_fault() -> None:
    # 32 huge or 16384 small pages would have been copied on write; the interpreter itself has about 10 faults.
    assert least(faults_after_a_fork) < 32 + 24


def test_a_forked_child_shares_shared_memory(shared: Memory) -> None:
    shared.view[:4] = b"ours"

    def child() -> bool:
        seen = shared.view[:4] == b"ours"
        shared.view[:5] = b"child"
        shared.close()
        return seen

    before = minor_faults()
    assert in_child(child) == 0
    assert shared.view[:5] == b"child"
    ctypes.memset(shared.address, 0, shared.size_bytes)
    assert minor_faults() - before < 2048  # the fork itself; 4096 more if the memory were copy-on-write
    assert shared.name is not None
    Memory.open(shared.name).close()


# --- no room ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.PRIVATE, Kind.SHM, None])
def test_more_than_there_is_is_refused_before_anything_is_taken(kind: Kind | None) -> None:
    before = minor_faults(resource.RUSAGE_SELF)
    with pytest.raises(CapacityError, match="Use a smaller arena") as caught:
        Memory.allocate(meminfo("MemTotal"), kind=kind, shared=kind is None)
    assert caught.value.context["asked_bytes"] >= meminfo("MemTotal")
    assert 0 < caught.value.context["free_bytes"] < meminfo("MemTotal")
    assert minor_faults(resource.RUSAGE_SELF) - before < 4096


def test_a_pool_too_small_names_the_setting() -> None:
    size_bytes = pages.huge_pool().usable_bytes + 2 * MiB
    with pytest.raises(CapacityError, match="nr_overcommit_hugepages=") as caught:
        Memory.allocate(size_bytes, kind=Kind.HUGETLB)
    assert caught.value.context["asked_bytes"] == size_bytes


def test_an_address_space_limit_is_an_error_of_ours() -> None:
    code = """
        import resource
        from tierckpt.arena.memory import Memory
        from tierckpt.errors import CapacityError
        resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
        try:
            Memory.allocate(600 << 20)
        except CapacityError as error:
            print("ulimit -v" in str(error), "600 MiB" in str(error))
    """
    assert run_python(code) == "True True"


@pytest.mark.timeout(ALONE_SECONDS + 180)
@shared_memory_alone()
def test_memory_that_goes_while_it_is_being_filled_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when all ranks of a node allocate at once: each saw enough, together they have not."""
    before, calls = rollup("Pss_Shmem"), []

    def tight(*, asked_bytes: int) -> int:
        calls.append(asked_bytes)
        if len(calls) > 3:
            raise CapacityError("no room", asked_bytes=asked_bytes)
        return 64 * MiB

    monkeypatch.setattr(capacity, "piece_bytes", tight)
    open_before = descriptors()
    with pytest.raises(CapacityError):
        Memory.allocate(512 * MiB, kind=Kind.SHM)
    assert descriptors() == open_before
    assert any(rollup("Pss_Shmem") - before < 64 * MiB for _ in Poll(60.0))
    assert 4 <= len(calls) <= 5  # neither thread goes on after the error


def test_a_kernel_without_populate_gets_its_pages_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "populate", lambda start, size_bytes: errno.EINVAL)

    def faults(kind: Kind) -> int:
        with Memory.allocate(16 * MiB, kind=kind) as made:
            found = faults_of_a_write(made)
            if made.name is not None:
                with Memory.open(made.name) as again:
                    assert again.view[-1] == 0xA5  # opening does not write
            return found

    for kind in (Kind.PRIVATE, Kind.SHM):
        assert least(functools.partial(faults, kind)) < 8


def test_a_refused_mapping_leaves_the_neighbours_alone() -> None:
    """A fixed mapping that the kernel refuses leaves a hole; memory mapped there since must not be unmapped."""
    refused, kept = [], []
    for _ in range(20):
        with pytest.raises(CapacityError) as caught:
            Memory.allocate(pages.huge_pool().usable_bytes + 16 * MiB, kind=Kind.HUGETLB)
        refused.append(caught)  # the traceback holds the refused object
        kept.append(Memory.allocate(2 * MiB))
    refused.clear()
    gc.collect()
    for made in kept:
        made.view[0] = made.view[-1] = 1  # a crash if it went with its refused neighbour
        made.close()


def test_sizes_and_kinds_that_cannot_be() -> None:
    for size_bytes in (0, -1):
        with pytest.raises(ConfigError):
            Memory.allocate(size_bytes)
    with pytest.raises(ConfigError):
        Memory.allocate(2 * MiB, kind=Kind.PRIVATE, shared=True)


def pages_by_node(address: int, size_bytes: int) -> dict[int, int]:
    """On which nodes the pages of this mapping are now, in bytes."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    found: dict[int, int] = {}
    for line in lines:
        words = line.split()
        if not address <= int(words[0], 16) < address + size_bytes:
            continue
        facts = dict(word.split("=", 1) for word in words if "=" in word)
        page_bytes = int(facts.get("kernelpagesize_kB", 4)) * 1024
        for name, count in facts.items():
            if name[0] == "N" and name[1:].isdigit():
                found[int(name[1:])] = found.get(int(name[1:]), 0) + int(count) * page_bytes
    return found


def test_pages_lie_on_the_node_asked_for(memory: Memory) -> None:
    if not Path("/sys/devices/system/node").exists():
        unavailable("/sys is not mounted, where the kernel says which nodes have memory")
    node = pages.existing_nodes()[-1]
    with Memory.allocate(16 * MiB, kind=memory.kind, numa_nodes=[node]) as on:
        assert pages_by_node(on.address, on.size_bytes) == {node: 16 * MiB}
        assert sum(pages_by_node(memory.address, memory.size_bytes).values()) == 16 * MiB


def test_a_node_that_is_not_there_names_those_that_are() -> None:
    there = ", ".join(map(str, pages.existing_nodes()))
    for wrong in (999, pages.existing_nodes()[0]):
        with pytest.raises(ConfigError, match=f"different nodes .* The nodes of this machine: {there}$"):
            Memory.allocate(2 * MiB, numa_nodes=[pages.existing_nodes()[0], wrong])


class Runtime:
    """CUDA's two calls, and their arguments."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.calls: list[tuple[object, ...]] = []

    def cudaHostRegister(self, *arguments: object) -> int:
        self.calls.append(("register", *arguments))
        return self.answer

    def cudaHostUnregister(self, *arguments: object) -> int:
        self.calls.append(("unregister", *arguments))
        return self.answer


def test_memory_is_pinned_once_and_unpinned_before_it_goes(monkeypatch: pytest.MonkeyPatch, memory: Memory) -> None:
    runtime = Runtime()
    monkeypatch.setattr(memory_module, "cuda_runtime", lambda: runtime)
    address = memory.address
    assert memory_module.pin(memory)
    assert memory_module.pin(memory)
    assert in_child(lambda: memory.close() is None and len(runtime.calls) == 1) == 0  # CUDA is the parent's
    memory.close()
    assert runtime.calls == [("register", address, 16 * MiB, 1), ("unregister", address)]


def test_memory_that_cuda_refuses_works_unpinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, memory: Memory
) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(memory_module, "cuda_runtime", lambda: Runtime(answer=2))
    monkeypatch.setattr(memory_module, "forget_error", lambda: forgotten.append(True))
    assert not memory_module.pin(memory)
    assert "CUDA error 2" in caplog.text
    assert forgotten == [True]
    memory.view[:2] = b"ok"
