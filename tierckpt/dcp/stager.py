"""TierStager: one copy of a state dict, device to arena, straight into the layout that the files will have."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, Literal, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import torch_internals
from ..arena import memory, slots
from ..arena.memory import Memory, pin
from ..arena.slots import Lease, arena_for
from ..checkpoint import in_flight
from ..config import Settings
from ..errors import CheckpointSkippedError, ConfigError, StateMismatchError, TierckptError
from ..ipc.agent_client import shared_client
from ..resources import start_if_possible
from ..save import write_ahead
from ..save.shard_plan import Fetch
from . import split
from .bulk_objects import gc_paused
from .items import item_format
from .items.item_format import resolve_object
from .plan_outline import LOCAL_PART, is_local_part
from .planner import TierSavePlanner, saved_values
from .staging import Copies, Placed, RepeatedSave, StagingLayout

Mode = Literal["eager", "lazy"]


def outlives_process(settings: Settings) -> bool:
    """See ``Settings.staging_memory``."""
    kind = settings.staging_memory
    return settings.mover == "agent" and (kind == "shared" or (kind == "auto" and memory.shared_is_huge()))


def _start_agent(settings: Settings) -> None:
    """Returns at once: an agent starts slowly."""

    def start() -> None:
        with contextlib.suppress(TierckptError, OSError):
            shared_client(settings).ask({"op": "here"})

    start_if_possible(threading.Thread(target=start, name="tierckpt-announce", daemon=True))


class TierStager:
    """An ``AsyncStager``: copies a state dict to staging memory that is used again for the next checkpoint.

    ``stage`` returns when the copy is complete: training may change the tensors at once. With ``mode="lazy"`` it
    returns at once, the copy overlaps the next forward and backward passes, and a step of any of ``optimizers`` waits
    for its rest. The copy is valid until it is saved or no longer referenced. A ``TierStorageWriter`` also hands it to
    the node's agent, which finishes the save if this process dies (``Settings.staging_memory``).

    Args:
        optimizers: for lazy mode. Their parameters and state change only in ``step``; all else is copied before
            ``stage`` returns.
        shared: staging memory that another process can map, for ``AsyncCheckpointerType.PROCESS``.
        numa_nodes: NUMA nodes to take the memory from, in this order. Empty: the kernel's choice.
        settings: ``overrides`` replace single fields of it (``checkpoints_in_flight_max=3``).

    Raises (from ``stage``):
        StateMismatchError: a tensor on the meta device, quantized, sparse or nested.
        CapacityError: no staging memory is available.
        CheckpointSkippedError: all of it is in use (policy "skip"), or the disk that it waits for has not ended a
            request for 0.4 s. OperationTimeoutError: still in use after ten minutes (policy "wait").

    Cost: one copy of the state; the first call also pays for the memory. Not thread-safe.

    Example:
        >>> weight = torch.ones(4)
        >>> stager = tierckpt.TierStager()
        >>> staged = stager.stage({"weight": weight})
        >>> weight.zero_().sum().item(), staged["weight"].sum().item()
        (0.0, 4.0)
        >>> stager.close()
    """

    should_synchronize_after_execute = _synchronize_after_execute = False
    """``stage`` is complete when it returns, or the optimizer step waits."""

    def __init__(
        self,
        *,
        mode: Mode = "eager",
        optimizers: Iterable[torch.optim.Optimizer] = (),
        shared: bool = False,
        numa_nodes: Sequence[int] = (),
        settings: Settings | None = None,
        **overrides: Any,
    ) -> None:
        if mode not in ("eager", "lazy"):
            raise ConfigError(f"mode is {mode!r}", hint='Write "eager" or "lazy"')
        self.settings = Settings.load(settings, **overrides)
        self.mode: Mode = mode
        self._shared = shared
        self._numa_nodes = tuple(numa_nodes)
        self._outlives = outlives_process(self.settings)
        self._is_announced = False
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._fences: list[Any] = []
        self._pending: Copies | None = None
        self._layout: StagingLayout | None = None
        self._repeated: RepeatedSave | None = None
        self.watch(optimizers)

    # --- contract of AsyncStager --------------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any], **_: Any) -> Any:
        """Return the staged state dict; in lazy mode a Future of it."""
        refuse_tensors(state_dict)
        self.synchronize_staging()
        staged, copies = self._stage(state_dict, at_once=self.mode == "eager")
        ready = self._copy(copies)
        in_flight.staged(self.settings.local_root, ready)
        if self.mode == "eager":
            return staged
        future: Future[Any] = Future()
        ready.add_done_callback(lambda done: _settle(future, staged, done.exception()))
        return future

    def stage_items(
        self,
        items: Sequence[WriteItem],
        planner: SavePlanner,
        *,
        in_background: bool = False,
        lies_in_files: Callable[[torch.Tensor], bool] | None = None,
    ) -> StagedItems:
        """Copy only the data of ``items``: for callers that have the final plan before staging.

        Objects are serialised now. With ``in_background``, ``StagedItems.wait`` also waits for tensors that no longer
        change, and no optimizer's step waits. Tensors in files (``lies_in_files``) are not copied but added to the
        result.
        """
        self.synchronize_staging()
        known = saved_values(planner)
        at_once = self.mode == "eager" and not in_background
        if isinstance(planner, TierSavePlanner) and planner.is_repeated and lies_in_files is None and at_once:
            again = self._restage(items, planner, known)
            if again is not None:
                return again
        staged = StagedItems(split.keep_subclasses_whole(items, planner))
        tensors = []
        for item in staged.items:
            if item.type is WriteItemType.BYTE_IO:
                staged.data[item.index] = resolve_object(planner, item)
                continue
            is_whole = item.type is WriteItemType.TENSOR and type(item) is WriteItem
            tensor = known.get(item.index.fqn) if is_whole else None
            if type(tensor) is not torch.Tensor or tensor.requires_grad:
                tensor = split.resolve(planner, item).detach()
            if lies_in_files is not None and lies_in_files(tensor):
                staged.in_files[item.index] = tensor
            else:
                tensors.append((item, tensor))
        refuse_tensors({item.index.fqn: tensor for item, tensor in tensors})
        copied, copies = self._stage([tensor for _, tensor in tensors], at_once=at_once)
        for (item, _), tensor in zip(tensors, copied, strict=True):
            staged.data[item.index] = tensor
        staged.copied = copied_in_background(copies) if in_background else self._copy(copies)
        self._repeated = None
        if at_once and not staged.in_files and self._layout is not None and len(self._layout.facts) == len(tensors):
            self._repeated = RepeatedSave.of(items, tensors, known, self._layout)
        return staged

    def _restage(
        self, items: Sequence[WriteItem], planner: TierSavePlanner, known: Mapping[str, Any]
    ) -> StagedItems | None:
        repeated = self._repeated
        if repeated is None or repeated.items is not items:
            return None
        if (found := repeated.find(known, planner.addresses)) is None:
            return None
        staged, layout = StagedItems(items), repeated.layout
        for item in repeated.objects:
            staged.data[item.index] = resolve_object(planner, item, repeated.texts)
        with gc_paused():
            lease = self._lease(layout.size_bytes)
            base = self._arena_tensor(lease, layout)
            pairs = repeated.copy_small(known, found, base)
            ahead = write_ahead.prepare(self.settings, lease, layout.key, layout.size_bytes, layout.spans)
            staged.copied = self._copy(Copies([to for to, _ in pairs], [source for _, source in pairs], ahead))
            staged.placed = Placed(repeated, base, lease)
        return staged

    @property
    def needs_addresses(self) -> bool:
        """Whether ``stage_items`` uses the ``addresses`` of a planner."""
        return self.mode == "eager" and self._repeated is not None

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Also have the step of these optimizers wait for lazy copies."""
        known = set(map(id, self._optimizers))
        new = tuple(optimizer for optimizer in optimizers if id(optimizer) not in known)
        self._optimizers += new
        self._fences += [optimizer.register_step_pre_hook(self.wait_before_step) for optimizer in new]

    def _copy(self, copies: Copies) -> Future[None]:
        """Make the copies; in lazy mode only the urgent ones. The future is done when all are."""
        if self.mode == "eager":
            done: Future[None] = Future()
            copies.run()
            done.set_result(None)
            return done
        may_wait = self._changed_by_step()
        copies.run_now(lambda tensor: storage_id(tensor) not in may_wait)
        self._pending = copies
        return copied_in_background(copies)

    def synchronize_staging(self) -> None:
        """Wait for the copies of the last ``stage``. Raises their errors."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait(slots.SLOT_SECONDS)

    def close(self) -> None:
        """Wait for unfinished copies and release the optimizers. The memory stays with the process."""
        self.synchronize_staging()
        for fence in self._fences:
            fence.remove()
        self._fences.clear()

    def wait_before_step(self, *_: Any) -> None:
        """A hook of ``optimizer.step``. Raises the errors of the copies."""
        self.synchronize_staging()

    def _changed_by_step(self) -> set[int]:
        found = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found |= {storage_id(parameter) for parameter in group["params"]}
            for state in optimizer.state.values():
                found |= {storage_id(value) for value in state.values() if isinstance(value, torch.Tensor)}
        return found

    # --- staging ------------------------------------------------------------------------------------------------

    @gc_paused()
    def _stage(self, state: Any, *, at_once: bool) -> tuple[Any, Copies]:
        walk = _Walk(state)
        facts = [(leaf.dtype, leaf.shape) for leaf in walk.leaves]
        if self._layout is None or self._layout.facts != facts:
            self._layout = StagingLayout.of(facts, self.settings)
        layout = self._layout
        if not layout.size_bytes:
            targets = [torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") for leaf in walk.leaves]
            return walk.rebuild(targets), Copies(targets, walk.leaves)
        lease = self._lease(layout.size_bytes)
        targets = layout.views(self._arena_tensor(lease, layout))
        ahead = (
            write_ahead.prepare(self.settings, lease, layout.key, layout.size_bytes, layout.spans) if at_once else None
        )
        return walk.rebuild(targets), Copies(targets, walk.leaves, ahead)

    def _arena_tensor(self, lease: Lease, layout: StagingLayout) -> torch.Tensor:
        lease.tensors = layout.tensors_with_data
        pin(lease.memory)
        return base_of(lease, layout.size_bytes, torch_shares=self._shared)

    def _lease(self, size_bytes: int) -> Lease:
        shared = self._shared or self._outlives
        if self._outlives and not self._is_announced:
            self._is_announced = True
            _start_agent(self.settings)
        arena = arena_for(self.settings, shared=shared, read_elsewhere=self._shared, numa_nodes=self._numa_nodes)
        lease = arena.lease(size_bytes)
        if lease is None:
            raise CheckpointSkippedError(
                "every staging slot is still taken by a checkpoint that is being written",
                hint="Expected now and then with the staging_policy 'skip'; nothing was staged, training goes on",
            )
        return lease


class Source(Protocol):
    """Files that hold a part of a state until it is saved."""

    def wait(self, timeout_seconds: float) -> None:
        """Wait until the files are complete."""

    def is_current(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, as planned, is in the files."""

    def reader(self, tensor: torch.Tensor) -> Fetch:
        """Return the reader of the bytes that replace ``tensor``."""

    def release(self) -> None:
        """Raises if the files have changed."""


class StagedItems:
    """Replaces the planner when a save is written: knows the staged data of each item and part."""

    def __init__(self, items: Sequence[WriteItem] = ()) -> None:
        self.items = items
        self.data: dict[MetadataIndex, Any] = {}
        """Without the tensors of ``placed``."""
        self.placed: Placed | None = None
        self.copied: Future[None] = Future()
        self.in_files: dict[MetadataIndex, torch.Tensor] = {}
        self.sources: list[Source] = []
        self.readers: dict[MetadataIndex, Fetch] = {}

    @cached_property
    def _views(self) -> dict[MetadataIndex, torch.Tensor]:
        with gc_paused():
            return self.placed.data() if self.placed is not None else {}

    def resolve_data(self, item: WriteItem) -> Any:
        found = self.data.get(item.index)
        return found if found is not None else self._views[item.index]

    def tensor(self, item: WriteItem) -> torch.Tensor:
        return cast(torch.Tensor, self.resolve_data(item))

    def wait(self, timeout_seconds: float) -> None:
        """Wait for all copies. Raises the error of a failed copy."""
        self.copied.result(timeout_seconds)
        for source in self.sources:
            source.wait(timeout_seconds)
            found = {i: tensor for i, tensor in self.in_files.items() if source.is_current(tensor)}
            self.data.update(found)
            self.readers |= {i: source.reader(tensor) for i, tensor in found.items()}

    def release(self) -> None:
        """Release all; then raise if a source has changed meanwhile."""
        sources, self.sources = self.sources, []
        with contextlib.ExitStack() as stack:
            for source in sources:
                stack.callback(source.release)


class _Walk:
    def __init__(self, state: Any) -> None:
        self.leaves: list[torch.Tensor] = []
        self._places: list[tuple[Any, Any, DTensor | None]] = []
        self._tuples: list[tuple[Any, Any]] = []
        self._local_parts: list[tuple[Any, Any, dict[str, Any]]] = []
        self._others: torch_internals.StateDictStager | None = None
        self._root: list[Any] = [None]
        self._visit(self._root, 0, state)
        if self._others is not None:
            vars(self._others).clear()  # a cycle would keep the copies without a collector

    def rebuild(self, targets: Sequence[torch.Tensor]) -> Any:
        for (container, key, like), target in zip(self._places, targets, strict=True):
            container[key] = target if like is None else _distributed(target, like)
        for container, key, facts in self._local_parts:
            vars(container[key]).update(facts)
        for container, key in self._tuples:  # inner ones were noted first
            container[key] = tuple(container[key])
        return self._root[0]

    def _visit(self, container: Any, key: Any, value: Any) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self._tensor(container, key, value)
        elif kind in (dict, OrderedDict):
            made = container[key] = dict.fromkeys(value) if kind is dict else OrderedDict.fromkeys(value)
            for name, item in value.items():
                self._visit(made, name, item)
        elif kind in (list, tuple):
            parts = container[key] = [None] * len(value)
            for index, item in enumerate(value):
                self._visit(parts, index, item)
            if kind is tuple:
                self._tuples.append((container, key))
        else:
            container[key] = value if kind in _IMMUTABLE else self._copied(value)

    def _tensor(self, container: Any, key: Any, value: torch.Tensor) -> None:
        like = None
        plain = value
        if type(value) is not torch.Tensor and isinstance(value, DTensor):
            like, plain = value, value.to_local()
        if plain.requires_grad or type(plain) is torch.nn.Parameter:
            plain = plain.detach()
        if item_format.is_plain(plain):
            self.leaves.append(plain)
            self._places.append((container, key, like))
            if is_local_part(value):  # else its copy is planned as a whole tensor
                self._local_parts.append((container, key, {name: getattr(value, name) for name in LOCAL_PART}))
        else:
            container[key] = self._copied(value)

    def _copied(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
            return self._copied_by_parts(value.detach())
        self._others = self._others or torch_internals.StateDictStager()
        return self._others.stage({"": value})[""]

    def _copied_by_parts(self, value: Any) -> torch.Tensor:
        """Few subclasses have the operators of torch's copy."""
        names, context = value.__tensor_flatten__()
        parts = {name: self._copied(getattr(value, name)) for name in names}
        made = type(value).__tensor_unflatten__(parts, context, value.size(), value.stride())
        for name, attribute in vars(value).items():
            if name not in vars(made):
                setattr(made, name, self._copied(attribute))
        return cast(torch.Tensor, made)


_IMMUTABLE = frozenset({int, float, complex, str, bool, bytes, type(None)})


def _distributed(local: torch.Tensor, like: DTensor) -> DTensor:
    """Start with an empty tensor: a wrapper over a storage offset crashes the process that unpickles it."""
    spec = torch_internals.spec_of(like)
    made = cast(Any, DTensor)(torch.empty(local.shape, dtype=local.dtype, device="cpu"), spec, requires_grad=False)
    torch_internals.set_local_tensor(made, local)
    return cast(DTensor, made)


def base_of(lease: Lease, size_bytes: int, *, torch_shares: bool = False) -> torch.Tensor:
    """Return the leased memory as one tensor of bytes; the lease is free again when no view of it is left.

    ``torch_shares``: torch must be able to pass its tensors to another process.
    """
    if not torch_shares or lease.memory.fd is None:
        base = torch.frombuffer(lease.memory.view[:size_bytes], dtype=torch.uint8)
        storage: Any = StorageWeakRef(base.untyped_storage())  # type: ignore[no-untyped-call]
        lease.in_use = lambda: not storage.expired()
        lease.storage = torch_internals.storage_address_of(base.untyped_storage())
        return base
    # Another process can map only a storage that torch made of the descriptor. This second mapping is kept, and the
    # views of the lease are counted instead.
    shared = _shared_storages.get(lease.memory)
    if shared is None:
        shared = torch_internals.new_shared_storage(os.dup(lease.memory.fd), lease.memory.size_bytes)
        _shared_storages[lease.memory] = shared
    base = torch.empty(0, dtype=torch.uint8, device="cpu").set_(shared)[:size_bytes]
    lease.in_use = lambda: torch_internals.storage_use_count(torch_internals.storage_address_of(shared)) > 1
    return base


_shared_storages: WeakKeyDictionary[Memory, torch.UntypedStorage] = WeakKeyDictionary()


def copied_in_background(copies: Copies) -> Future[None]:
    done: Future[None] = Future()
    copies.run_in_background(lambda error: _settle(done, None, error))
    return done


def storage_id(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return int(torch_internals.storage_address_of(tensor.untyped_storage()))


def _settle(future: Future[Any], value: Any, error: BaseException | None) -> None:
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


_DTYPES_WITHOUT_BYTES = frozenset(
    getattr(torch, name, None)
    for name in (
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    )
)


def refuse_tensors(state_dict: Mapping[str, Any], prefix: str = "") -> None:
    """Raise StateMismatchError for the first tensor that a checkpoint cannot restore."""
    for key, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            refuse_tensor(f"{prefix}{key}", value)
        if isinstance(value, dict):
            refuse_tensors(value, f"{prefix}{key}.")


def refuse_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        problem = f"{name} is on the meta device and has no bytes to save"
        hint = "Materialise the module first (to_empty and initialise, or load a checkpoint)"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        problem = f"{name} is {'nested' if tensor.is_nested else 'not dense'} ({tensor.layout}), which DCP cannot save"
        hint = "Save its dense tensors, such as its indices() and values()"
    elif tensor.dtype in _DTYPES_WITHOUT_BYTES:
        problem = f"{name} has elements of {tensor.dtype}, which torch.save cannot write"
        hint = "Save a view of it as uint8"
    elif tensor.is_quantized:
        problem = f"{name} is quantized: DCP would load its numbers into the scale of another tensor"
        hint = "Save its int_repr(), its scale and its zero point"
    elif type(tensor) in _TORCH_CLASSES and tensor.numel() and not tensor.data_ptr():  # torch's own copy would crash
        problem = f"the storage of {name} was freed, and has no bytes to save"
        hint = "Save its source, such as the shards of a gathered parameter"
    else:
        return
    raise StateMismatchError(problem, hint=hint, tensor=name)


_TORCH_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})
