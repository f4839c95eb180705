"""The rows of a table: how the machine, stock PyTorch, other libraries and tierckpt save one state dict.

A row saves to a new path and reports its seconds. Preparation (a warm stager) and cleaning are outside the clock.
``check`` loads the checkpoint and compares it with the state.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import tierckpt

from .limits import Image, memcpy, raw_matches, raw_write
from .meter import Timing
from .states import MismatchError, State, blank, local, same, size_bytes

RAW = "raw O_DIRECT + fsync"
MEMCPY = "memcpy, warm"
OURS_SAVE = "tierckpt: dcp.save"
OURS_ASYNC = "tierckpt: async_save, TierStager"
OURS_WRITER = "tierckpt: async_save, writer stages"
OURS_PROCESS = "tierckpt: async_save, PROCESS"
OURS_CHECKPOINTER = "tierckpt: Checkpointer.save"

LIMIT, STOCK, OURS = "limit", "stock", "tierckpt"
THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS

PLAIN = StagingOptions(False, False, False, False)
SHARED_MEMORY = StagingOptions(False, True, False, False)


def _nothing() -> None:
    pass


@dataclass
class Row:
    """One row. Only ``save`` is timed; ``missing`` is the reason if the row cannot be measured here."""

    name: str
    kind: str
    save: Callable[[Path], Timing] = lambda path: Timing(0.0, 0.0)
    check: Callable[[Path], None] = lambda path: None
    before: Callable[[], None] = _nothing
    after: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing
    missing: str = ""


@dataclass
class Bench:
    """State that the rows of a case share on this rank."""

    case: str
    state: State
    directory: Path
    scale: float = 1.0
    copies: int = 1
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        self.mine_bytes = size_bytes(self.state)
        self.total_bytes = self.mine_bytes * self.world // self.copies
        """Bytes of one copy of the whole state."""
        self.local_root = self.directory / "local"

    @cached_property
    def image(self) -> Image:
        """This rank's part of one copy of the state: destination of memcpy and source of the raw writer."""
        return Image(self.mine_bytes // self.copies)

    @property
    def alone(self) -> bool:
        return self.world == 1

    def local_tier(self, path: Path) -> Path:
        """Return the local-tier directory of the checkpoint saved as ``path``."""
        found = [each.parent for each in self.local_root.rglob(".metadata") if each.parent.name == path.name]
        if len(found) != 1:
            raise MismatchError(f"{len(found)} checkpoints named {path.name} under the local root")
        return found[0]

    def remove(self, path: Path) -> None:
        """Remove checkpoint ``path`` from every tier."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        for metadata in list(self.local_root.rglob(".metadata")):
            if metadata.parent.name == path.name:
                shutil.rmtree(metadata.parent)


# --- limits -----------------------------------------------------------------------------------------------------------


def raw_row(bench: Bench) -> Row:
    """One process writes one copy of the state; other ranks wait."""

    def save(path: Path) -> Timing:
        seconds = raw_write(path, bench.image, bench.total_bytes) if bench.rank == 0 else 0.0
        return Timing(seconds, seconds)

    def check(path: Path) -> None:
        if bench.rank == 0 and not raw_matches(path, bench.image, bench.total_bytes):
            raise MismatchError("the file differs from the written data")

    return Row(RAW, LIMIT, save, check)


def memcpy_row(bench: Bench) -> Row:
    """Each rank copies its part of one copy of the state into allocated memory."""
    share, image = bench.mine_bytes // bench.copies, bench.image
    sources: list[tuple[int, int]] = []
    for tensor in map(local, bench.state.values()):
        take = min(tensor.nbytes, share - sum(size for _, size in sources)) if bench.copies > 1 else tensor.nbytes
        sources.append((tensor.data_ptr(), take))

    def save(path: Path) -> Timing:
        seconds = min(memcpy(image, sources, threads) for threads in {1, os.cpu_count() or 1})
        return Timing(seconds, seconds)

    def check(path: Path) -> None:
        at = 0
        for tensor, (_, size) in zip(bench.state.values(), sources, strict=True):
            ours = local(tensor).detach().reshape(-1).view(torch.uint8)[:size]
            if size and not torch.equal(torch.frombuffer(image.view, dtype=torch.uint8)[at : at + size], ours):
                raise MismatchError("the copy differs")
            at += size

    return Row(MEMCPY, LIMIT, save, check)


# --- stock ------------------------------------------------------------------------------------------------------------


def torch_save_row(bench: Bench) -> Row:
    mine = {name: local(tensor) for name, tensor in bench.state.items()}

    def write(path: Path) -> None:
        with path.open("wb") as file:
            torch.save(mine, file)
            file.flush()
            os.fsync(file.fileno())

    def check(path: Path) -> None:
        if writes_own_file(bench):
            same(torch.load(own_file(bench, path), weights_only=True), mine)

    return Row("torch.save + fsync", STOCK, lambda path: _timed(lambda: _own(bench, path, write)), check)


def safetensors_row(bench: Bench) -> Row:
    name = "safetensors save_file + fsync"
    try:
        from safetensors.torch import load_file, save_file
    except ImportError:
        return Row(name, STOCK, missing="pip install safetensors")
    mine = {key: local(tensor) for key, tensor in bench.state.items()}

    def write(path: Path) -> None:
        save_file(mine, path)
        _fsync(path)

    def check(path: Path) -> None:
        if writes_own_file(bench):
            same(load_file(own_file(bench, path)), mine)

    return Row(name, STOCK, lambda path: _timed(lambda: _own(bench, path, write)), check)


def own_file(bench: Bench, path: Path) -> Path:
    return path / f"rank-{bench.rank}"


def writes_own_file(bench: Bench) -> bool:
    """With DDP only the first rank saves, as usual with torch.save."""
    return bench.copies == 1 or bench.rank == 0


def _own(bench: Bench, path: Path, write: Callable[[Path], None]) -> None:
    if writes_own_file(bench):
        path.mkdir(exist_ok=True)
        write(own_file(bench, path))


def torchsnapshot_row(bench: Bench) -> Row:
    name = "torchsnapshot take, then flushed"
    try:
        from torchsnapshot import Snapshot, StateDict
    except ImportError:
        return Row(name, STOCK, missing="pip install torchsnapshot (last release 0.1.0, 2022)")

    def take(path: Path) -> None:
        Snapshot.take(str(path), {"state": StateDict(**bench.state)})
        os.sync()  # torchsnapshot does not fsync

    def check(path: Path) -> None:
        into = StateDict(**blank(bench.state))
        Snapshot(str(path)).restore({"state": into})
        same(into, bench.state)

    return Row(name, STOCK, lambda path: _timed(lambda: take(path)), check)


def dcp_row(bench: Bench, threads: int) -> Row:
    def save(path: Path) -> Timing:
        writer = FileSystemWriter(path, thread_count=threads, sync_files=True)
        watch = WriteData(writer, bench)
        timing = _timed(lambda: dcp.save(bench.state, storage_writer=writer, no_dist=bench.alone))
        return watch.into(timing)

    return Row(f"dcp.save, {threads} thread{'s'[: threads - 1]}", STOCK, save, stock_check(bench))


def writer_stages_row(bench: Bench) -> Row:
    def save(path: Path) -> Timing:
        writer = FileSystemWriter(path)
        watch = WriteData(writer, bench)
        return watch.into(async_timed(bench, storage_writer=writer))

    return Row("async_save, FileSystemWriter stages", STOCK, save, stock_check(bench))


def cached_writer_row(bench: Bench) -> Row:
    writer: list[FileSystemWriter] = []

    def before() -> None:
        writer.append(FileSystemWriter(bench.directory / "unused", cache_staged_state_dict=True))
        writer[0].stage(bench.state)  # pins memory, so it needs an accelerator

    def save(path: Path) -> Timing:
        return async_timed(bench, storage_writer=writer[0], checkpoint_id=path)

    return Row(
        "async_save, FileSystemWriter stages, cached", STOCK, save, stock_check(bench), before, after=writer.clear
    )


def default_stager_row(bench: Bench) -> Row:
    """``dcp.async_save(state, checkpoint_id=...)`` creates a new DefaultStager for every save."""
    return Row(
        "async_save, DefaultStager, new each time",
        STOCK,
        lambda path: async_timed(bench, checkpoint_id=path),
        stock_check(bench),
    )


def kept_stager_row(bench: Bench, options: StagingOptions, executor: AsyncCheckpointerType) -> Row:
    kept: list[DefaultStager] = []

    def before() -> None:
        kept.append(DefaultStager(options))
        kept[0].stage(bench.state)

    def save(path: Path) -> Timing:
        return async_timed(bench, executor, storage_writer=FileSystemWriter(path), async_stager=kept[0])

    def after() -> None:
        while kept:
            kept.pop().close()

    process = ", PROCESS" if executor == PROCESS else ""
    kind = " shm" if options.use_shared_memory else ""
    return Row(f"async_save, DefaultStager{kind}, warm{process}", STOCK, save, stock_check(bench), before, after)


def stock_check(bench: Bench) -> Callable[[Path], None]:
    one_copy = bench.copies > 1  # one rank checks, as all would read the same

    def check(path: Path) -> None:
        if one_copy and bench.rank:
            return
        into = blank(bench.state)
        dcp.load(into, storage_reader=FileSystemReader(path), no_dist=bench.alone or one_copy)
        same(into, bench.state)

    return check


# --- tierckpt ---------------------------------------------------------------------------------------------------------


def tier_writer(bench: Bench, path: Path) -> tierckpt.TierStorageWriter:
    return tierckpt.TierStorageWriter(path, local_root=bench.local_root, drain=False)


def ours_check(bench: Bench) -> Callable[[Path], None]:
    """Load with PyTorch's own reader: shards of the local tier need no tierckpt."""
    check = stock_check(bench)
    return lambda path: check(bench.local_tier(path))


def ours_save_row(bench: Bench) -> Row:
    def save(path: Path) -> Timing:
        writer = tier_writer(bench, path)
        watch = WriteData(writer, bench)
        timing = _timed(lambda: dcp.save(bench.state, storage_writer=writer, no_dist=bench.alone))
        return watch.into(timing)

    return Row(OURS_SAVE, OURS, save, ours_check(bench))


def warm(bench: Bench, save: Callable[[Path], object]) -> None:
    """Save once more before the clock: a virtual machine has slower access to memory unused for a minute, and PyTorch's
    stagers are filled just before, too."""
    path = bench.directory / f"warm-{next(_warmed)}"
    save(path)
    if not bench.alone:
        dist.barrier()
    if bench.rank == 0:
        bench.remove(path)


_warmed = itertools.count(1_000_000)
"""Steps that no measured save has."""


def ours_stager_row(bench: Bench) -> Row:
    kept: list[Any] = []

    def before() -> None:
        if not kept:
            kept.append(tierckpt.TierStager(local_root=bench.local_root))
        warm(bench, save)

    def save(path: Path) -> Timing:
        writer = tier_writer(bench, path)
        watch = WriteData(writer, bench)
        return watch.into(async_timed(bench, storage_writer=writer, async_stager=kept[0]))

    def close() -> None:
        while kept:
            kept.pop().close()

    return Row(OURS_ASYNC, OURS, save, ours_check(bench), before, close=close)


def ours_process_row(bench: Bench) -> Row:
    """The checkpoint process writes from shared memory that the trainer has staged."""
    kept: list[Any] = []

    def before() -> None:
        if not kept:
            kept.append(tierckpt.TierStager(local_root=bench.local_root, shared=True))

    def save(path: Path) -> Timing:
        return async_timed(bench, PROCESS, storage_writer=tier_writer(bench, path), async_stager=kept[0])

    def close() -> None:
        while kept:
            kept.pop().close()

    return Row(OURS_PROCESS, OURS, save, ours_check(bench), before, close=close)


def ours_writer_row(bench: Bench) -> Row:
    """Without a stager: the writer stages."""

    def save(path: Path) -> Timing:
        writer = tier_writer(bench, path)
        watch = WriteData(writer, bench)
        return watch.into(async_timed(bench, storage_writer=writer))

    return Row(OURS_WRITER, OURS, save, ours_check(bench), before=lambda: warm(bench, save))


def ours_checkpointer_row(bench: Bench) -> Row:
    kept: list[tierckpt.Checkpointer] = []

    def before() -> None:
        if not kept:
            run = bench.directory / "run"
            kept.append(tierckpt.Checkpointer(run, local_root=bench.local_root, drain=False))
        warm(bench, save)

    def save(path: Path) -> Timing:
        step = int(path.name.rpartition("-")[2])
        return finished(time.perf_counter(), kept[0].save(step, bench.state))

    def close() -> None:
        while kept:
            kept.pop().close()

    return Row(OURS_CHECKPOINTER, OURS, save, ours_check(bench), before, close=close)


# --- clocks -----------------------------------------------------------------------------------------------------------


def _timed(save: Callable[[], object]) -> Timing:
    begun = time.perf_counter()
    save()
    seconds = time.perf_counter() - begun
    return Timing(seconds, seconds)


def async_timed(bench: Bench, executor: AsyncCheckpointerType = THREAD, **how: Any) -> Timing:
    begun = time.perf_counter()
    no_dist = bench.alone and executor == THREAD
    return finished(begun, dcp.async_save(bench.state, async_checkpointer_type=executor, no_dist=no_dist, **how))


def finished(begun: float, save: Future[Any] | AsyncSaveResponse) -> Timing:
    """The timing of a save that began at ``begun`` and has just returned; waits until it is durable."""
    blocked = time.perf_counter() - begun
    (save.upload_completion if isinstance(save, AsyncSaveResponse) else save).result()
    return Timing(blocked, time.perf_counter() - begun)


class WriteData:
    """Times ``write_data`` of a storage writer: the cost of a save without DCP's planning."""

    def __init__(self, writer: Any, bench: Bench) -> None:
        self.seconds = 0.0
        self.count = len(bench.state)
        write_data = writer.write_data

        def timed(*args: Any) -> Any:
            begun = time.perf_counter()
            future = write_data(*args)
            future.wait()
            self.seconds += time.perf_counter() - begun
            return future

        writer.write_data = timed

    def into(self, timing: Timing) -> Timing:
        timing.more |= {
            "write_data_seconds": self.seconds,
            "write_data_microseconds_per_tensor": self.seconds / self.count * 1e6,
        }
        return timing


def _fsync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


# --- which rows a case has --------------------------------------------------------------------------------------------


def rows_of(bench: Bench) -> list[Row]:
    return list(_rows(bench))


def _rows(bench: Bench) -> Iterator[Row]:
    """The rows in the order of the table. Limits are measured twice: a ratio uses the nearer one."""
    yield from (memcpy_row(bench), raw_row(bench), torch_save_row(bench), safetensors_row(bench))
    if bench.case in {"large", "medium"}:
        yield torchsnapshot_row(bench)
    yield from (dcp_row(bench, 1), dcp_row(bench, 4))
    if bench.case != "small":
        yield default_stager_row(bench)
    if bench.case == "large":
        yield from (writer_stages_row(bench), cached_writer_row(bench))
    yield kept_stager_row(bench, PLAIN, THREAD)
    if bench.case == "large":
        yield kept_stager_row(bench, SHARED_MEMORY, THREAD)
        yield kept_stager_row(bench, SHARED_MEMORY, PROCESS)
    yield from (memcpy_row(bench), raw_row(bench))
    yield from (ours_save_row(bench), ours_stager_row(bench), ours_writer_row(bench))
    if bench.case in {"large", "medium"}:
        yield ours_checkpointer_row(bench)
    if bench.case == "large":
        yield ours_process_row(bench)
