"""Shared reads in DCP's planning: each rank sends its interest, and receives its shared plan.

A rank that is alone on its node, or has a planner that drops ``storage_data``, reads alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ..arena.memory import Memory
from ..arena.shared_buffer import Process, SharedWindow, reserve
from ..checkpoint.catalog import Checkpoint
from ..config import Settings
from ..disk.processes import boot_id, pid_namespace
from ..errors import ConfigError, TierckptError
from ..format.manifest import DIGEST_BLOCK_BYTES
from ..read.shared_read import (
    ReadInterest,
    SharedRead,
    SharedReadPlan,
    Spans,
    merge_ranges,
    plan_shared_reads,
    unit_bytes,
)
from ..telemetry import logger
from ..torch_internals import StorageInfo
from .read_plan import frame_of

log = logger("restore")

WINDOW_BYTES = 64 << 20
"""Memory that the ranks of a node share while they load."""
IDLE_SECONDS_MAX = 30.0
"""Without a unit from other ranks for this long, a rank reads the rest itself."""


def spans(item: ReadItem, info: StorageInfo, stored: tuple[torch.dtype, torch.Size] | None) -> list[tuple[int, int]]:
    """Return the needed bytes of the file, without the head of an item read by rows."""
    whole = [(info.offset, info.offset + info.length)]
    if item.type == LoadItemType.BYTE_IO or getattr(info, "transform_descriptors", None) or stored is None:
        return whole
    dtype, size = stored
    if not size or not item.lengths or (rows := item.lengths[0]) == size[0]:
        return whole
    frame = frame_of(dtype, size, info.length)
    if frame is None:
        return whole
    row_bytes = size[1:].numel() * dtype.itemsize
    start = info.offset + len(frame.head) + item.storage_offsets[0] * row_bytes
    return [(start, start + rows * row_bytes)]


class ReadSharing:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._memory: Memory | None = None

    def add_interest(self, plan: LoadPlan, spans_of: Spans, checkpoint: Checkpoint) -> LoadPlan:
        self._memory = None  # of the previous load: every rank ended it or failed
        if not dist.is_initialized() or dist.get_world_size() < 2:
            return plan
        window_bytes = WINDOW_BYTES
        wanted: dict[str, list[tuple[int, int]]] = {}
        try:
            self._memory = reserve(window_bytes)
            for item in plan.items:
                name, ranges = spans_of(item)
                wanted.setdefault(name, []).extend(ranges)
        except TierckptError as error:  # the load itself reports it
            log.info("this rank reads alone: %s", error)
            return plan
        manifest, root = checkpoint.manifest, self._settings.local_root
        chunk = manifest.chunk_size_bytes if manifest else int(self._settings.chunk_size_bytes)
        attempt = manifest.attempt if manifest else ""
        # One kernel, one table of processes, one user: such ranks can open each other's memory.
        node = f"{boot_id()} {pid_namespace()} {os.getuid()}"
        interest = ReadInterest(
            group=f"{node} {root} {checkpoint.location.uri} {attempt} {chunk} {window_bytes}",
            process=Process.this(),
            window=self._memory.name or "",
            window_bytes=window_bytes,
            wanted={name: merge_ranges(ranges) for name, ranges in wanted.items()},
            verify_block_bytes=chunk if chunk % DIGEST_BLOCK_BYTES else DIGEST_BLOCK_BYTES,
            unit_bytes=unit_bytes(chunk, window_bytes),
        )
        return replace(plan, storage_data=interest)

    @staticmethod
    def assign_shared_plans(plans: list[LoadPlan]) -> list[LoadPlan]:
        """Put the shared plan of each rank in place of its interest."""
        interests = [plan.storage_data if isinstance(plan.storage_data, ReadInterest) else None for plan in plans]
        return [
            replace(plan, storage_data=shared) if interest is not None else plan
            for plan, interest, shared in zip(plans, interests, plan_shared_reads(interests), strict=True)
        ]

    @contextlib.contextmanager
    def open_shared_read(self, plan: LoadPlan, spans_of: Spans) -> Iterator[SharedRead | None]:
        """Yield None if this rank reads alone."""
        shared = self._open(plan.storage_data, spans_of) if isinstance(plan.storage_data, SharedReadPlan) else None
        if shared is None:
            self._memory = None
        try:
            yield shared
        finally:
            if shared is not None:
                shared.stop_sharing()

    def _open(self, plan: SharedReadPlan, spans_of: Spans) -> SharedRead | None:
        try:
            if plan.me == 0 and self._memory is not None:
                window = SharedWindow(self._memory, plan.members, plan.me, plan.unit_bytes)
            else:
                self._memory = None
                window = SharedWindow.open(plan.window, plan.members, plan.me, plan.unit_bytes)
        except ConfigError as error:
            log.warning("this rank reads alone what other ranks of its node read too: %s", error)
            return None
        return SharedRead(plan, window, IDLE_SECONDS_MAX, spans_of)
