"""One mapping of staging memory: filled with pages once, then reused. Three kinds:

    PRIVATE   anonymous, transparent huge pages; seen by this process and its threads only
    HUGETLB   a memory file in the pool of huge pages (vm.nr_hugepages)
    SHM       a memory file; huge pages if the kernel makes them on request (Linux 6.1) or shmem_enabled allows

The kernel frees the pages with the last mapping and descriptor, also after a crash. The memory is mapped into addresses
that Python's ``mmap`` reserves, and releases with the last view. Pages can be locked for faster copies from a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import functools
import mmap
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from ..disk.file_io import address_of
from ..errors import CapacityError, ConfigError
from ..quantities import round_up
from ..resources import ThreadPool
from ..telemetry import logger
from . import capacity, pages

log = logger("arena")

HUGE_PAGE_BYTES = pages.HUGE_PAGE_BYTES
PREFAULT_THREADS = 2  # 1.5 to 1.9 times as fast as one
_PIECE_BYTES = 64 << 20

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_REMOVE, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_WIPEONFORK, _MADV_KEEPONFORK = 9, 14, 15, 18, 19
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
_MFD_CLOEXEC, _MFD_ALLOW_SEALING, _MFD_HUGETLB, _MFD_NOEXEC_SEAL, _MFD_HUGE_2MB = 0x1, 0x2, 0x4, 0x8, 21 << 26
_F_ADD_SEALS, _SEAL_SIZE = 1033, 0x1 | 0x2 | 0x4
_FAILED = ctypes.c_void_p(-1).value
_NAME = re.compile(r"/proc/(\d+)/fd/(\d+)")

_RELEASED = memoryview(b"")
_RELEASED.release()
_abandoned: list[mmap.mmap | None] = []

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Kind(enum.StrEnum):
    PRIVATE = "private"
    HUGETLB = "hugetlb"
    SHM = "shm"


class Memory:
    """Memory with its pages allocated, 2 MiB aligned, zero-filled. ``close`` releases it.

    After ``fork`` the child of a PRIVATE owner sees zeros; shared kinds stay shared. ``fd`` is None for PRIVATE, and
    after ``close``.
    """

    address: int
    view: memoryview

    def __init__(self, size_bytes: int, kind: Kind, fd: int | None) -> None:
        """Use ``allocate``, ``open`` or ``from_fd``. This owns ``fd`` from now on."""
        self.size_bytes, self.kind, self.fd = size_bytes, kind, fd
        self._huge: bool | None = False
        self._map: mmap.mmap | None = None
        self.pinned_by = 0
        """The process that registered it with CUDA."""
        try:
            self._map_pages()
        except BaseException:
            self.close()
            raise

    @classmethod
    def allocate(
        cls, size_bytes: int, *, kind: Kind | None = None, shared: bool = False, numa_nodes: Sequence[int] = ()
    ) -> Memory:
        """Return new memory that later use can neither fault in nor fail on.

        Args:
            size_bytes: rounded up to a multiple of 2 MiB.
            kind: None: PRIVATE, or for ``shared`` HUGETLB if the pool has room, else SHM.
            numa_nodes: filled in this order, front to back. Empty: the kernel's choice.

        Raises:
            CapacityError: it does not fit; raised before the OOM killer acts, and nothing stays allocated.
            ConfigError: an invalid size, kind or node.

        Cost: about 0.1 s per GiB of huge pages and 0.3 s per GiB of 4 KiB pages.
        """
        if size_bytes <= 0:
            raise ConfigError(f"an arena of {size_bytes} bytes cannot be", hint="Ask for at least one byte")
        if kind is Kind.PRIVATE and shared:
            raise ConfigError("private memory cannot be shared", hint="Leave out kind=, or use Kind.SHM")
        pages.check_nodes(numa_nodes)
        size_bytes = round_up(size_bytes, HUGE_PAGE_BYTES)
        if kind is None and shared and pages.huge_pool().usable_bytes >= size_bytes:
            try:
                return cls._allocate(size_bytes, Kind.HUGETLB, numa_nodes)
            except CapacityError as error:
                log.info("no memory for the arena in the pool of huge pages: %s", error)
        return cls._allocate(size_bytes, kind or (Kind.SHM if shared else Kind.PRIVATE), numa_nodes)

    @classmethod
    def _allocate(cls, size_bytes: int, kind: Kind, numa_nodes: Sequence[int]) -> Memory:
        from_pool = min(size_bytes, pages.huge_pool().free_bytes) if kind is Kind.HUGETLB else 0
        capacity.require(size_bytes - from_pool, asked_bytes=size_bytes)
        memory = cls(size_bytes, kind, _create(kind, size_bytes))
        try:
            if numa_nodes:
                free = pages.free_bytes(numa_nodes, huge_pool=kind is Kind.HUGETLB)
                pages.prefer(memory.address, pages.plan(size_bytes, free, HUGE_PAGE_BYTES))
            memory._prefault(is_new=True)
        except BaseException:
            memory.close()
            raise
        return memory

    @classmethod
    def reserve(cls, size_bytes: int) -> Memory:
        """Return SHM with pages allocated on first use, by any process. Raises CapacityError."""
        size_bytes = round_up(size_bytes, HUGE_PAGE_BYTES)
        capacity.require(size_bytes, asked_bytes=size_bytes)
        return cls(size_bytes, Kind.SHM, _create(Kind.SHM, size_bytes))

    @classmethod
    def open(cls, name: str, *, fill: bool = True) -> Memory:
        """Return another process's shared memory, of the same user. ``fill``: allocate all pages at once.

        Raises ConfigError: an invalid name, or its owner ended or closed it.
        """
        if _NAME.fullmatch(name) is None:
            raise ConfigError(f"{name!r} does not name an arena", hint="Use Memory.name of the process that owns it")
        try:
            fd = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            hint = "Its owner has ended, or belongs to another user; descriptors can also be sent over a socket"
            raise ConfigError(f"arena {name} cannot be opened: {error.strerror}", hint=hint) from error
        return cls._adopt(fd, _kind_of(fd), fill=fill)

    @classmethod
    def from_fd(cls, fd: int, kind: Kind, *, fill: bool = True) -> Memory:
        """Map ``fd``, which stays the caller's. Raises ConfigError: not a memory file of that kind."""
        return cls._adopt(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), kind, fill=fill)

    @classmethod
    def _adopt(cls, fd: int, kind: Kind | None, *, fill: bool = True) -> Memory:
        size_bytes = os.fstat(fd).st_size
        if kind is None or size_bytes == 0 or size_bytes % HUGE_PAGE_BYTES or _kind_of(fd) is not kind:
            what = _target_of(fd)
            os.close(fd)
            hint = "Its owner may have ended and its pid may have been reused"
            raise ConfigError(f"{what} is not an arena of kind {kind}", hint=hint)
        memory = cls(size_bytes, kind, fd)
        if not fill:
            return memory
        try:
            memory._prefault(is_new=False)
        except BaseException:
            memory.close()
            raise
        return memory

    @property
    def name(self) -> str | None:
        """For ``open`` in another process of this user; None for PRIVATE."""
        return None if self.fd is None else f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def huge(self) -> bool:
        """True if at least nine tenths are huge pages, measured once. Cost: 10 to 40 ms per GiB of 4 KiB pages."""
        if self._huge is None:
            self._huge = pages.huge_bytes(self.address, self.size_bytes) >= 0.9 * self.size_bytes
        return self._huge

    def keep_on_fork(self) -> None:
        """Let forked children see the contents, copied on write, and the kernel use huge pages again.

        Nothing may read into it directly any more.
        """
        self._advise(_MADV_KEEPONFORK)
        self._advise(_MADV_HUGEPAGE)

    def make_huge(self, offset: int, size_bytes: int) -> None:
        if self.kind is Kind.SHM and offset % HUGE_PAGE_BYTES == 0:
            _collapse(self.address + offset, size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)

    def use_small_pages(self, part: memoryview) -> None:
        """Use 4 KiB pages for the unallocated rest of ``part``, which is page-aligned."""
        self._advise(_MADV_NOHUGEPAGE, part)

    def fill_in(self, part: memoryview) -> None:
        """Pages that the kernel refuses are allocated on first use."""
        if code := populate(address_of(part), len(part)):
            log.debug("madvise(%d): %s", _MADV_POPULATE_WRITE, os.strerror(code))

    def discard(self) -> None:
        """Free the pages, for all processes. The memory reads as zeros."""
        self._advise(_MADV_REMOVE)

    def close(self) -> None:
        """Release the memory. Idempotent. Slices and tensors of ``view`` stay valid; the last frees the pages."""
        if self.pinned_by == os.getpid():  # else the registration is the parent's
            self.pinned_by = 0
            _unpin(self.address)
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        # Dropped, not unmapped: torch.frombuffer does not export the view, and an unmap would leave it dangling.
        self.view, self._map = _RELEASED, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "pinned_by"):
            self.close()

    def __repr__(self) -> str:
        return f"<Memory {self.kind} {self.size_bytes} bytes at {self.address:#x}{', huge' if self._huge else ''}>"

    def _map_pages(self) -> None:
        reserved_bytes = self.size_bytes + HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if self.fd is None else _MAP_NORESERVE)
        try:
            reserved = mmap.mmap(-1, reserved_bytes, flags=flags)
        except (OSError, OverflowError) as error:
            raise _no_memory(self.size_bytes, self.kind, getattr(error, "errno", None) or errno.ENOMEM) from error
        start = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
        self.address = round_up(start, HUGE_PAGE_BYTES)
        offset = self.address - start
        self._map, self.view = reserved, memoryview(reserved)[offset : offset + self.size_bytes]
        if self.fd is not None:
            self._map_file(self.fd)
        else:
            # Without WIPEONFORK, fork makes these pages copy-on-write: a direct read in flight could land in the
            # child's copy. DONTFORK would leave a hole in the child for another mapping, which this object's end would
            # unmap. A kernel before 4.14 copies on write: slower, never wrong for writes to disk.
            self._advise(_MADV_WIPEONFORK)
        if self.kind is not Kind.HUGETLB:
            self._advise(_MADV_HUGEPAGE)

    def _map_file(self, fd: int) -> None:
        """Map the file over the reserved addresses.

        A failed MAP_FIXED may leave a hole, where another thread may map memory that a release would unmap. So the
        mapping is tried elsewhere first; if MAP_FIXED fails anyway, the reservation is never released.
        """
        access = mmap.PROT_READ | mmap.PROT_WRITE
        trial_address = _libc.mmap(None, self.size_bytes, access, mmap.MAP_SHARED, fd, 0)
        if trial_address == _FAILED:
            raise _no_memory(self.size_bytes, self.kind, ctypes.get_errno())
        _libc.munmap(trial_address, self.size_bytes)
        if _libc.mmap(self.address, self.size_bytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == _FAILED:
            code = ctypes.get_errno()
            _abandoned.append(self._map)
            raise _no_memory(self.size_bytes, self.kind, code)

    def _advise(self, advice: int, part: memoryview | None = None) -> None:
        start, size_bytes = (self.address, self.size_bytes) if part is None else (address_of(part), len(part))
        if _libc.madvise(start, size_bytes, advice) != 0:
            log.debug("madvise(%d) on %s memory: %s", advice, self.kind, os.strerror(ctypes.get_errno()))

    def _prefault(self, *, is_new: bool) -> None:
        counted = is_new and self.kind is not Kind.HUGETLB  # taken already
        position, end, lock = self.address, self.address + self.size_bytes, threading.Lock()

        def take() -> tuple[int, int]:
            nonlocal position
            with lock:
                piece_bytes = capacity.piece_bytes(asked_bytes=self.size_bytes) if counted else _PIECE_BYTES
                start, position = position, min(end, position + piece_bytes)
                return start, position - start

        def fill() -> None:
            nonlocal position
            try:
                while position < end:
                    self._fill(*take(), is_new=is_new)
            except BaseException:
                position = end
                raise

        with ThreadPool(PREFAULT_THREADS, "tierckpt-prefault") as pool:
            for done in [pool.submit(fill) for _ in range(PREFAULT_THREADS)]:
                done.result()
        self._huge = None

    def _fill(self, start: int, size_bytes: int, *, is_new: bool) -> None:
        if is_new and self.kind is Kind.SHM:
            _collapse(start, size_bytes)
        code = populate(start, size_bytes) if size_bytes else 0
        if code in (errno.EINVAL, errno.ENOSYS):
            self._touch(start, size_bytes, is_new=is_new)
        elif code:
            raise _no_memory(self.size_bytes, self.kind, code)

    def _touch(self, start: int, size_bytes: int, *, is_new: bool) -> None:
        if not is_new:
            return  # other bytes are in there
        if self.fd is not None:
            try:  # an unavailable page is an error here, and a SIGBUS on access
                os.posix_fallocate(self.fd, start - self.address, size_bytes)
            except OSError as error:
                raise _no_memory(self.size_bytes, self.kind, error.errno or errno.ENOMEM) from error
        ctypes.memset(start, 0, size_bytes)


def shared_is_huge(size_bytes: int = 1 << 30) -> bool:
    return pages.shared_memory_is_huge(size_bytes) or collapses()


@functools.cache
def collapses() -> bool:
    """This kernel makes huge pages of a memory file on request."""
    try:
        with Memory.allocate(HUGE_PAGE_BYTES, kind=Kind.SHM) as memory:
            return memory.huge
    except CapacityError:
        return False


def _create(kind: Kind, size_bytes: int) -> int | None:
    if kind is Kind.PRIVATE:
        return None
    fd = -1
    try:
        fd = _memory_file(kind)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SIZE)  # no process can truncate it: access would be a SIGBUS
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise _no_memory(size_bytes, kind, error.errno or errno.ENOMEM) from error
    return fd


def _memory_file(kind: Kind) -> int:
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING | (_MFD_HUGETLB | _MFD_HUGE_2MB if kind is Kind.HUGETLB else 0)
    try:
        return os.memfd_create(f"tierckpt-{kind}", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(f"tierckpt-{kind}", flags)  # a kernel before 6.3


def _target_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink()).removesuffix(" (deleted)")


def _kind_of(fd: int) -> Kind | None:
    target = _target_of(fd)
    return next((kind for kind in (Kind.HUGETLB, Kind.SHM) if target == f"/memfd:tierckpt-{kind}"), None)


def populate(start: int, size_bytes: int) -> int:
    """Allocate all pages, without the GIL. Returns 0 or the errno."""
    while _libc.madvise(start, size_bytes, _MADV_POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN):
            return code
    return 0


def _collapse(start: int, size_bytes: int) -> None:
    """Back this part of a memory file with huge pages, unless ``shmem_enabled`` says ``deny`` (Linux 6.1).

    The kernel needs one small page in each 2 MiB.
    """
    for page in range(start, start + size_bytes, HUGE_PAGE_BYTES):
        if populate(page, mmap.PAGESIZE):
            return
    _libc.madvise(start, size_bytes, _MADV_COLLAPSE)


def _no_memory(size_bytes: int, kind: Kind, code: int) -> CapacityError:
    reason = os.strerror(code)
    if kind is Kind.HUGETLB:
        pool = pages.huge_pool()
        detail = f"{capacity.mebibytes(pool.usable_bytes)} of the pool of huge pages are free"
        hint = pages.huge_page_pool_hint(size_bytes)
    else:
        free = min((limit.usable_bytes for limit in capacity.limits()), default=0)
        detail = f"{capacity.mebibytes(free)} may still be taken"
        hint = "Check `ulimit -v`, vm.overcommit_memory and the memory limit of this container, or use a smaller arena"
    return CapacityError(
        f"no {kind} memory of {capacity.mebibytes(size_bytes)} for the arena: {reason}; {detail}",
        hint=hint,
        asked_bytes=size_bytes,
    )


_PORTABLE = 1  # for every CUDA context of this process


def pin(memory: Memory) -> bool:
    """Register ``memory`` with CUDA until it is closed. False without CUDA, or if it refuses (logged)."""
    if memory.pinned_by == os.getpid():
        return True
    runtime = cuda_runtime()
    if runtime is None:
        return False
    if not _call("cudaHostRegister", lambda: runtime.cudaHostRegister(memory.address, memory.size_bytes, _PORTABLE)):
        forget_error()
        return False
    memory.pinned_by = os.getpid()
    return True


def _unpin(address: int) -> None:
    runtime = cuda_runtime()
    if runtime is not None:
        _call("cudaHostUnregister", lambda: runtime.cudaHostUnregister(address))


def cuda_runtime() -> Any:
    """A process without torch has nothing on a GPU to copy."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    try:
        return torch.cuda.cudart()
    except Exception as error:
        log.warning("staging memory stays unpinned: %s", error)
        return None


def forget_error() -> None:
    """Clear CUDA's last error: the trainer's next kernel would report it as its own."""
    torch = sys.modules["torch"]
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _call(what: str, function: Any) -> bool:
    try:
        result = int(function())
    except Exception as error:
        log.warning("%s failed, staging memory stays as it is: %s", what, error)
        return False
    if result != 0:
        log.warning("%s failed with CUDA error %d, staging memory stays as it is", what, result)
    return result == 0
