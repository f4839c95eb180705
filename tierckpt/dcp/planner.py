"""TierSavePlanner: plans a structure once; saving it again costs a walk over the state dict and two small messages.

A plan depends on keys, shapes, dtypes and layouts, not on values:

    every rank      compares the state dict with its cached outlines: "equal to generation G, as rank 3"
    coordinator     all ranks equal G: the metadata of G, and small responses; else a new generation G'
    every rank      takes the final plan of G from its cache

A rank with any difference sends its full plan. The coordinator then completes the other plans from its own cache.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import secrets
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan

from ..errors import CheckpointError
from .bulk_objects import gc_paused, index_of, read_whole
from .plan_outline import Outline
from .split import Held

CACHED_PLANS_MAX = 4

ITEMS_MAX = 1_000_000


# --- plans on their way -------------------------------------------------------------------------------------------


class _Parcel(SavePlan):
    """At 256 ranks the collector would scan the coordinator's millions of objects a dozen times."""

    def __reduce__(self) -> tuple[Any, ...]:
        with gc_paused():
            return _unpack, (pickle.dumps((self.items, self.storage_data, self.planner_data, self.usable)),)


def _unpack(data: bytes) -> _Parcel:
    with gc_paused():
        return _Parcel(*pickle.loads(data))


# --- the cache -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ticket:
    """``planner_data`` between coordinator and ranks: a plan and its generation.

    ``alive`` lists the generations that the coordinator keeps.
    """

    coordinator: str
    generation: str
    index: int
    alive: frozenset[str] = frozenset()


@dataclass(eq=False)
class _PlanMemory:
    key: Hashable
    outline: Outline
    names: list[str]
    mappings: dict[str, Any]
    local: SavePlan
    final: SavePlan
    ticket: _Ticket
    in_use: bool = False


@dataclass(frozen=True, eq=False)
class _Generation:
    name: str
    locals: list[SavePlan]
    kinds: list[type]
    metadata: Metadata


class PlanCache:
    """Shared by all planners of this process, as many jobs make one per save. Newest first."""

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        """Drop all, and become another coordinator: ranks forked from one process differ."""
        self.coordinator = secrets.token_hex(8)
        self._memories: list[_PlanMemory] = []
        self._generations: OrderedDict[str, _Generation] = OrderedDict()
        self._lock = threading.Lock()

    def find(
        self, key: Hashable, state_dict: Mapping[str, Any], *, with_addresses: bool = False
    ) -> tuple[_PlanMemory, list[Any], list[int] | None] | None:
        """Return the matching entry, marked as in use, and the result of its outline.

        An entry already in use belongs to a save without an answer. It is dropped, so that the next save plans in full.
        """
        with self._lock:
            candidates = [memory for memory in self._memories if memory.key == key]
        for memory in candidates:
            found = memory.outline.leaves_of(state_dict, with_addresses=with_addresses)
            if found is not None:
                with self._lock:
                    if memory.in_use:
                        self._drop(memory)
                        return None
                    memory.in_use = True
                return memory, *found
        return None

    def keep(self, memory: _PlanMemory, alive: frozenset[str], replaced: _PlanMemory | None) -> None:
        with self._lock:
            if replaced is not None:
                self._drop(replaced)
            coordinator = memory.ticket.coordinator
            kept = [
                other
                for other in self._memories
                if other.ticket.coordinator != coordinator or other.ticket.generation in alive
            ]
            self._memories = [memory, *kept][:CACHED_PLANS_MAX]

    def used(self, memory: _PlanMemory) -> None:
        with self._lock:
            memory.in_use = False
            if memory in self._memories:
                self._drop(memory)
                self._memories.insert(0, memory)

    def generation(self, name: str) -> _Generation | None:
        with self._lock:
            if name in self._generations:
                self._generations.move_to_end(name)
            return self._generations.get(name)

    def kept_generations(self, generation: _Generation) -> frozenset[str]:
        with self._lock:
            left, item_count = [generation.name], 0
            for other in reversed(self._generations.values()):
                item_count += sum(len(plan.items) for plan in other.locals)
                if len(left) == CACHED_PLANS_MAX or item_count > ITEMS_MAX:
                    break
                left.append(other.name)
            return frozenset(left)

    def keep_generation(self, generation: _Generation, alive: frozenset[str]) -> None:
        with self._lock:
            self._generations[generation.name] = generation
            for name in self._generations.keys() - alive:
                del self._generations[name]

    def _drop(self, memory: _PlanMemory) -> None:
        self._memories = [other for other in self._memories if other is not memory]


cache = PlanCache()
os.register_at_fork(after_in_child=cache.start_anew)


# --- the planner --------------------------------------------------------------------------------------------------


@dataclass
class _PlanProgress:
    key: Hashable = None
    original: Mapping[str, Any] | None = None
    memory: _PlanMemory | None = None
    outline: Outline | None = None
    local: SavePlan | None = None
    generation: _Generation | None = None


def saved_values(planner: object) -> Mapping[str, Any]:
    """The values that DCP's own planner would look up, by name; none for another planner."""
    return _values_of(planner, DefaultSavePlanner, "resolve_data", "lookup_object", "transform_object")


def loaded_values(planner: object) -> Mapping[str, Any]:
    """As ``saved_values``, without five calls for each."""
    return _values_of(planner, DefaultLoadPlanner, "resolve_tensor", "lookup_tensor", "transform_tensor")


def _values_of(planner: Any, stock: type, *names: str) -> Mapping[str, Any]:
    is_stock = isinstance(planner, stock) and not any(
        name in vars(planner) or getattr(type(planner), name) is not getattr(stock, name) for name in names
    )
    return planner.state_dict if is_stock else {}


class TierSavePlanner(DefaultSavePlanner):
    """DCP's default planner that plans a structure once. For any StorageWriter.

    Guarantee: items, metadata and errors are as with ``DefaultSavePlanner`` for the same state dict, at every save.
    No tensor lives longer than with the stock planner. Plans are cached per process, at most four structures.

    State dicts with ShardedTensor, CheckpointableTensor or objects that plan for themselves
    (``__create_write_items__``), keys other than text and integers, and planners with ``flatten_state_dict=False`` or
    ``flatten_sharded_tensors=False`` are planned at every save. So is a subclass that changes plans in
    ``create_global_plan``: give it ``enable_plan_caching=False``.

    Args:
        enable_plan_caching: False plans at every save.
        cache_key: planners of different keys share no cache. Needed if one process saves the same structure with
            several process groups.

    Raises (inside DCP's CheckpointException):
        CheckpointError: a rank refers to a plan that the coordinator does not have. The next save plans in full.

    Cost: about two microseconds per tensor of an unchanged state dict.

    Example:
        >>> state = {"weight": torch.ones(4)}
        >>> for step in (1, 2):  # the second save is not planned again
        ...     writer = TierStorageWriter(f"run/step-{step}")
        ...     metadata = dcp.save(state, storage_writer=writer, planner=tierckpt.TierSavePlanner())
        >>> sorted(metadata.state_dict_metadata)
        ['weight']
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = True,
        *,
        cache_key: Hashable = None,
    ) -> None:
        super().__init__(
            flatten_state_dict, flatten_sharded_tensors, dedup_replicated_tensors, dedup_save_to_lowest_rank
        )
        self._remembers = enable_plan_caching and flatten_state_dict and flatten_sharded_tensors
        self._cache_key = cache_key
        self._turn = _PlanProgress()
        self.is_repeated = False
        """The plan is cached, from an earlier save with equal items."""
        self.with_addresses = False
        self.addresses: list[int] | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take ``state_dict``, and find its cached plan."""
        self._turn, self.is_repeated, self.addresses = _PlanProgress(self._key(is_coordinator), state_dict), False, None
        key, wanted = self._turn.key, self.with_addresses
        found = cache.find(key, state_dict, with_addresses=wanted) if self._remembers else None
        if found is None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            return
        memory, leaves, self.addresses = found
        self._turn.memory = memory
        self.state_dict = dict(zip(memory.names, leaves, strict=True))
        self.mappings = memory.mappings
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return this rank's plan, or one without items that refers to a cached plan."""
        turn = self._turn
        if turn.memory is not None and turn.memory.ticket.coordinator == cache.coordinator and not self.is_coordinator:
            # Without collectives no other rank knows the ticket: a rank that gets it back has these very items.
            self.plan = turn.memory.local
            return self.plan
        if turn.memory is not None:
            self.plan = SavePlan([], planner_data=turn.memory.ticket, usable=False)
            return self.plan
        if not self._remembers:
            return super().create_local_plan()
        turn.local = _Parcel(**vars(super().create_local_plan()))
        if turn.original is not None:
            turn.outline = Outline.of(turn.original, self.state_dict.values())
        turn.original = None
        self.plan = turn.local
        return turn.local

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return every rank's plan and the metadata. Raises CheckpointError for an unknown plan."""
        if not self._remembers:
            return super().create_global_plan(all_plans)
        all_plans = [self._as_ticket(plan) for plan in all_plans]
        generation = _generation_of(all_plans)
        if generation is not None:
            self.global_plan, self.metadata = all_plans, _copy(generation.metadata)
            return self.global_plan, self.metadata
        complete = [self._full_plan(plan) for plan in all_plans]
        with gc_paused():
            global_plan, metadata = super().create_global_plan(complete)
        generation = _Generation(
            secrets.token_hex(8),
            [dataclasses.replace(plan, storage_data=None) for plan in complete],
            _plan_types(all_plans),
            _copy(metadata),
        )
        alive = cache.kept_generations(generation)
        self._turn.generation = generation
        tickets = (_Ticket(cache.coordinator, generation.name, index, alive) for index in range(len(global_plan)))
        return [
            dataclasses.replace(plan, planner_data=ticket) for plan, ticket in zip(global_plan, tickets, strict=True)
        ], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan that this rank writes, and cache it. Raises CheckpointError for an unknown plan."""
        turn, ticket = self._turn, new_plan.planner_data
        if not self._remembers or not isinstance(ticket, _Ticket):
            return super().finish_plan(new_plan)
        if turn.generation is not None:
            cache.keep_generation(turn.generation, ticket.alive)
        if turn.memory is not None and not new_plan.usable:
            cache.used(turn.memory)
            plan = dataclasses.replace(turn.memory.final, storage_data=new_plan.storage_data)
            self.is_repeated = True
        else:
            plan = SavePlan(new_plan.items, new_plan.storage_data, self.mappings)
            self._store_plan(plan, ticket)
        self._turn = _PlanProgress()
        return super().finish_plan(plan)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the state of one save: DCP pickles planners for other processes."""
        of_a_save = {"state_dict", "plan", "global_plan", "metadata", "_turn", "addresses"}
        return {name: value for name, value in vars(self).items() if name not in of_a_save} | {"mappings": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _turn=_PlanProgress(), addresses=None)

    def _key(self, is_coordinator: bool) -> Hashable:
        place = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None
        return type(self), self.dedup_save_to_lowest_rank, self._cache_key, is_coordinator, place

    def _as_ticket(self, plan: SavePlan) -> SavePlan:
        """Return a ticket, if ``plan`` has not left this process since it was cached."""
        mine = self._turn.memory
        if mine is None or not plan.usable or plan.items is not mine.local.items:
            return plan
        return dataclasses.replace(plan, items=[], planner_data=mine.ticket, usable=False)

    def _full_plan(self, plan: SavePlan) -> SavePlan:
        if plan.usable:
            return plan
        local, storage_data = self._local_of(plan.planner_data), plan.storage_data
        if isinstance(storage_data, Held):
            storage_data = Held(tuple(local.items))
        return dataclasses.replace(local, storage_data=storage_data)

    def _local_of(self, ticket: object) -> SavePlan:
        if isinstance(ticket, _Ticket):
            generation = cache.generation(ticket.generation)
            if generation is not None:
                return generation.locals[ticket.index]
            mine = self._turn.memory
            if mine is not None and (mine.ticket.generation, mine.ticket.index) == (ticket.generation, ticket.index):
                return mine.local
        raise CheckpointError(
            "a rank refers to a save plan that this coordinator does not have",
            hint="Save again: it will plan in full. Planners of different process groups need different cache_key",
        )

    def _store_plan(self, plan: SavePlan, ticket: _Ticket) -> None:
        turn, old = self._turn, self._turn.memory
        alive, ticket = ticket.alive, dataclasses.replace(ticket, alive=frozenset())
        if old is not None:
            cache.keep(dataclasses.replace(old, final=plan, ticket=ticket, in_use=False), alive, old)
        elif turn.outline is not None and turn.local is not None:
            names = list(self.state_dict)
            memory = _PlanMemory(turn.key, turn.outline, names, self.mappings, turn.local, plan, ticket)
            cache.keep(memory, alive, None)


def _generation_of(plans: list[SavePlan]) -> _Generation | None:
    """Return None if a new plan is needed, also for another kind of writer."""
    tickets = [plan.planner_data for plan in plans if not plan.usable and isinstance(plan.planner_data, _Ticket)]
    if len(tickets) < len(plans) or len({ticket.generation for ticket in tickets}) != 1:
        return None
    generation = cache.generation(tickets[0].generation)
    if generation is None or len(generation.locals) != len(plans) or generation.kinds != _plan_types(plans):
        return None
    return generation if [ticket.index for ticket in tickets] == list(range(len(plans))) else None


def _plan_types(plans: list[SavePlan]) -> list[type]:
    return [type(plan.storage_data) for plan in plans]


def _copy(metadata: Metadata) -> Metadata:
    """Copy for a writer to fill in: entries are shared, and replaced where they change."""
    return dataclasses.replace(metadata, state_dict_metadata=dict(metadata.state_dict_metadata))


class TargetPlanner(DefaultLoadPlanner):
    """Reads into ``target``, and needs no state dict: call ``dcp.load({}, planner=...)``.

    Items are as with ``DefaultLoadPlanner``. ``target`` has tensors and placeholders, by name in the checkpoint;
    objects replace their values.
    """

    def __init__(self, target: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.target = target

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = self.target, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Raises the errors of DCP's planner for tensors that do not fit."""
        assert self.metadata is not None
        with gc_paused():
            whole = dict(self._whole_tensors(self.metadata))
            rest = {name: value for name, value in self.target.items() if name not in whole}
            plan = create_default_local_load_plan(rest, self.metadata)
            return LoadPlan([*whole.values(), *plan.items])

    def _whole_tensors(self, metadata: Metadata) -> Iterator[tuple[str, ReadItem]]:
        stored = metadata.state_dict_metadata
        for name, value in self.target.items():
            found = stored.get(name)
            if type(value) is not torch.Tensor or type(found) is not TensorStorageMetadata or len(found.chunks) != 1:
                continue
            [chunk], size = found.chunks, found.size
            if size == value.size() == chunk.sizes and 0 not in size:
                yield name, read_whole(index_of(name, chunk.offsets, 0), chunk.offsets, size)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.target[read_item.dest_index.fqn] = torch.load(value, weights_only=False)
