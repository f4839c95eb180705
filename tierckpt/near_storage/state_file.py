"""Layout of tensors in blocks; two mapped versions of each, and the records that decide which one is valid (N1)."""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import hashlib
import json
import math
import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import xxhash

from ..disk.durable import durable_write, fsync_dir, make_dirs, read_whole, remove_tree, translated
from ..disk.file_io import address_of, allocate, libc, read_into
from ..disk.file_lock import try_lock
from ..errors import (
    ConfigError,
    IntegrityError,
    ManifestError,
    ObjectNotFoundError,
    OperationTimeoutError,
    PreconditionFailedError,
    StateMismatchError,
    UpdaterLostError,
)
from ..poll import LOCAL, Poll
from ..quantities import DISK_BLOCK_BYTES, round_up
from ..replay.frame import DTYPES, dtype_name
from ..save.shard_plan import Fetch
from ..telemetry import logger

BLOCK_BYTES = 4 << 20
"""Minimum size of a block, so that its record and msync cost little."""
ALIGNMENT = 64
MASTER_DTYPE = torch.float32
MASTER = ""


@dataclass(frozen=True, slots=True)
class TrainerParameter:
    key: str
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def group(self) -> int:
        return int(self.key.partition(".")[0])


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """``offset`` is from the block's start, ``index`` that of its presence byte."""

    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    index: int


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Its first bytes say which tensors are present."""

    index: int
    keys: tuple[str, ...]
    places: tuple[TensorPlace, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    kind: str
    blocks: tuple[StateBlock, ...]
    size_bytes: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()[:32]


def layout_of(
    kind: type[torch.optim.Optimizer], members: Sequence[TrainerParameter], groups: Sequence[Mapping[str, Any]]
) -> BlockLayout:
    """Lay out the state of ``members``, as a trial step of one element creates it."""
    made: dict[int, dict[str, tuple[torch.dtype, bool]]] = {}
    runs: list[list[TrainerParameter]] = []
    block_bytes = BLOCK_BYTES
    for one in members:
        if one.group not in made:
            made[one.group] = {MASTER: (MASTER_DTYPE, True)} | _state_of(kind, groups[one.group])
        if block_bytes >= BLOCK_BYTES:
            runs.append([])
            block_bytes = 0
        runs[-1].append(one)
        block_bytes += math.prod(one.shape) * sum(dtype.itemsize for dtype, _ in made[one.group].values())
    blocks: list[StateBlock] = []
    offset = 0
    for run in runs:
        positions: list[TensorPlace] = []
        at = round_up(sum(len(made[one.group]) for one in run), ALIGNMENT)
        for one in run:
            for name, (dtype, is_whole) in made[one.group].items():
                shape = one.shape if is_whole else ()
                positions.append(TensorPlace(one.key, name, dtype_name(dtype), shape, at, len(positions)))
                at = round_up(at + math.prod(shape) * dtype.itemsize, ALIGNMENT)
        size_bytes = round_up(at, DISK_BLOCK_BYTES)
        blocks.append(StateBlock(len(blocks), tuple(one.key for one in run), tuple(positions), offset, size_bytes))
        offset += size_bytes
    return BlockLayout(kind.__name__, tuple(blocks), offset)


def shared_bytes(members: Sequence[TrainerParameter]) -> int:
    return max(ALIGNMENT, sum(_shared_bytes(one) for one in members))


def shared_tensors(members: Sequence[TrainerParameter], memory: memoryview) -> dict[str, torch.Tensor]:
    found, offset = {}, 0
    for one in members:
        found[one.key] = view_of(memory, offset, one)
        offset += _shared_bytes(one)
    return found


def _shared_bytes(one: TrainerParameter) -> int:
    return round_up(math.prod(one.shape) * DTYPES[one.dtype].itemsize, ALIGNMENT)


def view_of(memory: memoryview, offset: int, one: TrainerParameter | TensorPlace) -> torch.Tensor:
    dtype, count = DTYPES[one.dtype], math.prod(one.shape)
    if not count:
        return torch.empty(one.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(one.shape)


def _state_of(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, bool]]:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=MASTER_DTYPE, device="cpu"))
    parameter.grad = torch.zeros(2, dtype=MASTER_DTYPE, device="cpu")
    optimizer = cast(Any, kind)([{**group, "params": [parameter]}])
    optimizer.step()
    found = {}
    for name, value in optimizer.state[parameter].items():
        if isinstance(value, torch.Tensor):
            found[name] = (value.dtype, value.ndim > 0)
        elif value is not None:
            raise ConfigError(
                f"{kind.__name__} keeps {name!r} as a {type(value).__name__}; only tensors can be stored in the file",
                hint='Save whole checkpoints (mode="async") with this optimizer',
            )
    return found


log = logger("replay")

STATE, RECORDS = "state", "records"
RECORD_BYTES = 64
_RECORD = struct.Struct("<8sqQ16s")
_MAGIC = b"TKBLOCK1"
_MS_SYNC = 4

Tensors = dict[str, dict[str, torch.Tensor]]

libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

DMESG = "Check dmesg for disk errors"
LOST = "Build the optimizer over an empty directory, and restore the newest checkpoint"


class StateFile:
    """The blocks of ``layout`` in ``directory``, each with a version 0 and 1.

    Its files are closed with the last reference to it or to a ``reader``. Raises CapacityError, before the first byte.
    """

    def __init__(self, directory: Path, layout: BlockLayout, *, create: bool = False) -> None:
        self.directory, self.layout = directory, layout
        path = directory / STATE
        if create:
            make_dirs(directory)
        with translated(path):
            if create:
                directory.chmod(0o700)
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
            self._file = self._open(path, flags)
            self._records = self._open(directory / RECORDS, flags)
            size_bytes = 2 * layout.size_bytes
            if create:
                allocate(self._file, size_bytes)
                os.ftruncate(self._file, size_bytes)
                os.ftruncate(self._records, 2 * RECORD_BYTES * len(layout.blocks))
                os.fsync(self._file)
                os.fsync(self._records)
                fsync_dir(directory)
            elif os.fstat(self._file).st_size < size_bytes:
                raise _unreadable(path, "it is too short")
            self._view = memoryview(mmap.mmap(self._file, size_bytes))
        self._address = address_of(self._view)

    def _open(self, path: Path, flags: int) -> int:
        file = os.open(path, flags, 0o600)
        weakref.finalize(self, os.close, file)
        return file

    def tensors(self, block: StateBlock, version: int, *, all_of_them: bool = False) -> Tensors:
        view = self.bytes_of(block, version)
        found: Tensors = {key: {} for key in block.keys}
        for tensor_place in block.places:
            if all_of_them or view[tensor_place.index]:
                found[tensor_place.key][tensor_place.name] = view_of(view, tensor_place.offset, tensor_place)
        return found

    def present(self, block: StateBlock, version: int) -> dict[str, set[str]]:
        flags = bytearray(len(block.places))
        self._read(address_of(flags), len(flags), self._begin_of(block, version))
        found: dict[str, set[str]] = {key: set() for key in block.keys}
        for tensor_place in block.places:
            if flags[tensor_place.index]:
                found[tensor_place.key].add(tensor_place.name)
        return found

    def all_tensors(self) -> Tensors:
        found: Tensors = {}
        for block in self.layout.blocks:
            found |= self.tensors(block, 0, all_of_them=True)
        return found

    def owns(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self._address < self.layout.size_bytes

    def reader(self, tensor: torch.Tensor, versions: Sequence[int]) -> Fetch:
        """Return a function that reads ``tensor`` at the version that ``versions`` has for its block (N6)."""
        at = tensor.data_ptr() - self._address
        block = bisect.bisect_right(self.layout.blocks, at, key=lambda one: one.offset) - 1
        at += versions[block] * self.layout.size_bytes
        return lambda target, start, count: self._read(target, count, at + start)

    def mark(self, block: StateBlock, version: int, present: Mapping[str, Container[str]]) -> None:
        flags = bytes(tensor_place.name in present.get(tensor_place.key, {}) for tensor_place in block.places)
        with translated(self.directory / STATE):
            os.pwrite(self._file, flags, self._begin_of(block, version))

    def bytes_of(self, block: StateBlock, version: int) -> memoryview:
        begin = self._begin_of(block, version)
        return self._view[begin : begin + block.size_bytes]

    def _begin_of(self, block: StateBlock, version: int) -> int:
        return version * self.layout.size_bytes + block.offset

    def _read(self, target: int, count: int, offset: int) -> None:
        path, into, problem = self.directory / STATE, memoryview((ctypes.c_char * count).from_address(target)), ""
        try:
            if read_into(self._file, into, offset) < count:
                problem = "it is too short"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            raise _unreadable(path, problem)

    def copy(self, block: StateBlock, source: int) -> int:
        into, of = (torch.frombuffer(self.bytes_of(block, one), dtype=torch.uint8) for one in (1 - source, source))
        into.copy_(of)
        return 1 - source

    def digest(self, block: StateBlock, version: int, *, is_trainers: bool = False) -> bytes:
        """``is_trainers``: read with pread (N6)."""
        digest, data = xxhash.xxh3_128(), self.bytes_of(block, version)
        if is_trainers:
            data = memoryview(bytearray(block.size_bytes))
            self._read(address_of(data), len(data), self._begin_of(block, version))
        digest.update(data)
        return digest.digest()

    def check(self, block: StateBlock, version: int, digest: bytes) -> None:
        """Raise UpdaterLostError if a version does not match ``digest`` (N7). Cost: one pass."""
        if self.digest(block, version) != digest:
            raise UpdaterLostError(
                f"block {block.index} of {self.directory / STATE} (version {version}) does not match its digest",
                hint=f"Save again or call step(): it uses the other version and the logged gradients. {DMESG}",
                path=self.directory / STATE,
            )

    def record(self, block: StateBlock, version: int, step: int, digest: bytes) -> None:
        """Make a version of a block durable, then its record (N1)."""
        with translated(self.directory / STATE):
            begin = self._address + self._begin_of(block, version)
            if libc.msync(begin, block.size_bytes, _MS_SYNC):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        head = _RECORD.pack(_MAGIC, step, block.index, digest)
        with translated(self.directory / RECORDS):
            os.pwrite(self._records, head + xxhash.xxh3_128_digest(head), self._record_at(block, version))
            os.fdatasync(self._records)

    def newest(self, block: StateBlock, last_step: int | None = None) -> tuple[int, int, bytes]:
        """Return the newest valid version up to ``last_step``, its step and digest. Raises IntegrityError: none."""
        found = []
        for version in (0, 1):
            data = os.pread(self._records, _RECORD.size + 16, self._record_at(block, version))
            head, check = data[: _RECORD.size], data[_RECORD.size :]
            if len(data) == _RECORD.size + 16 and xxhash.xxh3_128_digest(head) == check:
                _, step, index, digest = _RECORD.unpack(head)
                if index == block.index and (last_step is None or step <= last_step):
                    found.append((step, version, digest))
        for step, version, digest in sorted(found, reverse=True):
            if self.digest(block, version) == digest:
                return version, step, digest
            log.warning("block %d of %s is damaged at step %d", block.index, self.directory / STATE, step)
        raise IntegrityError(
            f"both versions of block {block.index} of {self.directory / STATE} are damaged"
            + (f" or newer than step {last_step}" if last_step is not None else ""),
            hint=LOST,
            path=self.directory / STATE,
        )

    def forget_after(self, step: int) -> None:
        with translated(self.directory / RECORDS):
            for block in self.layout.blocks:
                for version in (0, 1):
                    data = os.pread(self._records, _RECORD.size, self._record_at(block, version))
                    if len(data) == _RECORD.size and _RECORD.unpack(data)[1] > step:
                        os.pwrite(self._records, bytes(RECORD_BYTES), self._record_at(block, version))
            os.fdatasync(self._records)

    def _record_at(self, block: StateBlock, version: int) -> int:
        return (version * len(self.layout.blocks) + block.index) * RECORD_BYTES


def _unreadable(path: Path, problem: str) -> IntegrityError:
    return IntegrityError(f"{path} cannot be read: {problem}", hint=f"{DMESG}. {LOST}", path=path)


LOCK, CURRENT = "lock", "current.json"
CURRENT_BYTES_MAX = 1 << 16
END_SECONDS = 45.0
"""Time for an updater to finish or abandon its work after its trainer ended."""
LOCK_SECONDS = 60.0
"""Longer than ``END_SECONDS``."""


@contextmanager
def directory_lock(directory: Path, trainer: int) -> Iterator[None]:
    """Hold ``directory`` for the process ``trainer``.

    Raises PreconditionFailedError: another trainer uses it. OperationTimeoutError: an updater does not end.
    """
    make_dirs(directory)
    path = directory / LOCK
    for _ in Poll(LOCK_SECONDS, LOCAL):
        with try_lock(path) as hold:
            if hold:
                os.ftruncate(hold.descriptor, 0)
                os.pwrite(hold.descriptor, str(trainer).encode(), 0)
                yield
                return
        other = path.read_text()
        if other and Path(f"/proc/{other}").exists():
            raise PreconditionFailedError(
                f"{directory} is in use by an optimizer of process {other}, which is running",
                hint="Use a separate directory for each optimizer and rank, or close that optimizer",
                path=directory,
            )
    raise OperationTimeoutError(
        f"an optimizer process still holds {directory} {LOCK_SECONDS:g} s after its trainer ended",
        hint="Look for a hanging disk, and for a process `python -m tierckpt.near_storage.updater`",
        path=directory,
    )


def current_state(directory: Path, layout: BlockLayout) -> Path | None:
    """Raises StateMismatchError: of another optimizer or other parameters."""
    try:
        found = json.loads(read_whole(directory / CURRENT, CURRENT_BYTES_MAX))
        token, layout_digest, kind = (str(found[name]) for name in ("token", "layout", "kind"))
    except ObjectNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(directory / CURRENT, repr(error)) from None
    if layout_digest != layout.digest:
        raise StateMismatchError(
            f"the optimizer's state in {directory} is of {kind} with other parameters, types or options",
            hint="Build the optimizer with its earlier settings, or use an empty directory",
            path=directory,
        )
    if not (directory / token).is_dir():
        raise _damaged(directory / CURRENT, f"it names state {token}, which does not exist")
    return directory / token


def _damaged(path: Path, problem: str) -> ManifestError:
    return ManifestError(f"{path} is damaged: {problem}", hint=LOST, path=path)


class NewState:
    """Not current before ``commit`` (N5). Raises CapacityError."""

    def __init__(self, directory: Path, layout: BlockLayout) -> None:
        self._directory, self._token = directory, secrets.token_hex(8)
        try:
            self.file = StateFile(directory / self._token, layout, create=True)
        except BaseException:
            remove_tree(directory / self._token, ignore_errors=True)
            raise

    def commit(self, present: Mapping[str, Container[str]], step: int) -> None:
        layout = self.file.layout
        for block in layout.blocks:
            self.file.mark(block, 0, present)
            self.file.record(block, 0, step, self.file.digest(block, 0, is_trainers=True))
        found = {"token": self._token, "layout": layout.digest, "kind": layout.kind}
        durable_write(self._directory / CURRENT, json.dumps(found).encode())
        for other in self._directory.iterdir():
            if other.is_dir() and other.name != self._token:
                remove_tree(other)
        fsync_dir(self._directory)

    def discard(self) -> None:
        remove_tree(self._directory / self._token, ignore_errors=True)


def begin_state(directory: Path, layout: BlockLayout, values: Tensors, step: int) -> None:
    new = NewState(directory, layout)
    try:
        for key, tensors in new.file.all_tensors().items():
            for name in tensors.keys() & values[key].keys():
                tensors[name].copy_(values[key][name])
        new.commit(values, step)
    except BaseException:
        new.discard()
        raise
