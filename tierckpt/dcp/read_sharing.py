"""Finds the bytes of a load that several ranks of a node want. DCP's planning carries the messages.

Each rank adds an offer to its plan (``offered``): where it runs, and which ranges of which files it wants. The
coordinator, which sees all plans, answers each with a pact or nothing (``answered``). What a pact says is then read
once for the node (read/shared_read.py). One process, one rank on a node, or a planner that drops what it does not know:
no pact, and every rank reads for itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ..arena.memory import Memory
from ..arena.shared_buffer import Process, Window, reserve
from ..checkpoint.catalog import Checkpoint
from ..config import Settings
from ..disk.processes import boot_id, pid_namespace
from ..errors import ConfigError, TierckptError
from ..format.manifest import DIGEST_BLOCK_BYTES
from ..read import shared_read
from ..read.parallel_read import Pull, pull
from ..read.shared_read import SharedRead, SharedReadPlan
from ..telemetry import logger
from ..torch_internals import StorageInfo
from .read_plan import frame_of

log = logger("restore")

WINDOW_BYTES = 64 << 20
"""Memory that the ranks of a node share while they load."""
PATIENCE_SECONDS = 30.0
"""A rank that has had nothing from the others for this long reads the rest for itself."""

Spans: TypeAlias = Callable[[ReadItem], tuple[str, list[tuple[int, int]]]]
"""The file of an item, and the bytes of it that are wanted, in order."""


def spans(item: ReadItem, info: StorageInfo, stored: tuple[torch.dtype, torch.Size] | None) -> list[tuple[int, int]]:
    """The bytes of an item's file that reading it takes, but for the head of an item of which some rows are wanted."""
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


class Neighbours:
    """What a reader has of the other ranks of its node, from its offer to the end of its load."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._memory: Memory | None = None

    def offered(self, plan: LoadPlan, spans_of: Spans, checkpoint: Checkpoint) -> LoadPlan:
        """Return ``plan`` with an offer, where there may be other ranks.

        Args:
            spans_of: tells where in the files an item lies.
        """
        self._memory = None  # that of the load before: all ranks have ended it, or have failed
        if not dist.is_initialized() or dist.get_world_size() < 2:
            return plan
        window_bytes = WINDOW_BYTES
        wanted: dict[str, list[tuple[int, int]]] = {}
        try:
            self._memory = reserve(window_bytes)
            for item in plan.items:
                name, ranges = spans_of(item)
                wanted.setdefault(name, []).extend(ranges)
        except TierckptError as error:  # of no memory, or of metadata that cannot be: then the load itself says it
            log.info("this rank reads alone: %s", error)
            return plan
        manifest = checkpoint.manifest
        chunk = manifest.chunk_size_bytes if manifest else int(self._settings.chunk_size_bytes)
        attempt = manifest.attempt if manifest else ""
        offer = shared_read.ReadInterest(
            group=f"{_node()} {self._settings.local_root} {checkpoint.location.uri} {attempt} {chunk} {window_bytes}",
            process=Process.this(),
            window=self._memory.name or "",
            window_bytes=window_bytes,
            wanted={name: shared_read.merged(ranges) for name, ranges in wanted.items()},
            verify_block_bytes=chunk if chunk % DIGEST_BLOCK_BYTES else DIGEST_BLOCK_BYTES,
            unit_bytes=shared_read.unit_bytes(chunk, window_bytes),
        )
        return replace(plan, storage_data=offer)

    @staticmethod
    def answered(plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans with what each rank is to read together with others instead of its offer."""
        offers = [
            plan.storage_data if isinstance(plan.storage_data, shared_read.ReadInterest) else None for plan in plans
        ]
        if not any(offers):
            return plans
        pacts = shared_read.agree(offers)
        return [
            replace(plan, storage_data=pact) if offer is not None else plan
            for plan, offer, pact in zip(plans, offers, pacts, strict=True)
        ]

    @contextlib.contextmanager
    def reading(self, plan: LoadPlan, spans_of: Spans) -> Iterator[Reading]:
        """How the bytes of ``plan`` are read."""
        crew = self._crew(plan.storage_data) if isinstance(plan.storage_data, SharedReadPlan) else None
        if crew is None:
            self._memory = None
        try:
            yield Reading(spans_of, crew)
        finally:
            if crew is not None:
                crew.leave()

    def _crew(self, pact: SharedReadPlan) -> SharedRead | None:
        try:
            if pact.me == 0 and self._memory is not None:
                window = Window(self._memory, pact.members, pact.me, pact.unit_bytes)
            else:
                self._memory = None
                window = Window.open(pact.window, pact.members, pact.me, pact.unit_bytes)
        except ConfigError as error:
            log.warning("this rank reads alone what other ranks of its node read too: %s", error)
            return None
        return SharedRead(pact, window, PATIENCE_SECONDS)


class Reading:
    """How the bytes of one load are read: with ``crew``, or by this rank for itself."""

    def __init__(self, spans_of: Spans, crew: SharedRead | None) -> None:
        self._spans_of, self._crew = spans_of, crew

    def order(self, items: Iterable[ReadItem], place_of: Callable[[ReadItem], Any]) -> list[ReadItem]:
        """By file and place. What is read together comes first: then no rank waits while another reads its own.

        Args:
            place_of: where an item lies, for who reads alone and need not know which bytes of it are wanted.
        """
        if self._crew is None:
            return sorted(items, key=place_of)
        places = [(self._first_unit(item) is None, *self._place(item), item) for item in items]
        return [place[-1] for place in sorted(places, key=lambda place: place[:-1])]

    def pull_before(self, then: ReadItem | None) -> Pull:
        """``read.parallel_read.pull``, or what does the same with the other ranks of the node.

        Args:
            then: the first item, in the order of ``order``, that a later call is about.
        """
        if self._crew is None:
            return pull
        return partial(self._crew.pull, later=self._first_unit(then) if then is not None else None)

    def _first_unit(self, item: ReadItem) -> int | None:
        if self._crew is None:
            return None
        name, ranges = self._spans_of(item)
        units = (self._crew.units.first_of(name, start, stop) for start, stop in ranges)
        return next((unit for unit in units if unit is not None), None)

    def _place(self, item: ReadItem) -> tuple[str, int]:
        name, ranges = self._spans_of(item)
        return name, ranges[0][0]


def _node() -> str:
    """Who has the same name here can open each other's memory: one kernel, one table of processes, one user."""
    return f"{boot_id()} {pid_namespace()} {os.getuid()}"
