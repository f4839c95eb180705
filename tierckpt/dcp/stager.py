"""TierStager: one copy of a state dict, device to arena, straight into the layout that the files will have.

In ``lazy`` mode not even that copy is waited for: it overlaps the next forward and backward pass, and the optimizer's
step waits only if it is not done (DataStates-LLM, HPDC'24). What may change before that step is copied at once: every
tensor that is neither a parameter nor a state of the optimizers given.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import torch_internals
from ..arena import slots
from ..arena.memory import Memory
from ..arena.pinning import pin
from ..arena.slots import Lease, arena_for
from ..checkpoint import in_flight
from ..config import Settings
from ..errors import CheckpointSkippedError, ConfigError, StateMismatchError
from ..quantities import round_up
from ..save import write_ahead
from ..save.shard_plan import Fetch
from . import split
from .gc_pause import gc_paused
from .handoff import handoff_client
from .items import item_format, shard_layout
from .items.torch_save import resolve_object
from .planner import LOCAL_PART, is_local_part
from .staging_copy import Copies

Mode = Literal["eager", "lazy"]


class TierStager:
    """An ``AsyncStager``: copies a state dict to staging memory that is used again for the next checkpoint.

    ``stage`` returns when the copy is complete: training may change the tensors at once. With ``mode="lazy"`` it
    returns at once, and a step of any of ``optimizers`` waits for what is not copied yet. The copy is valid until it
    has been saved, or until nothing refers to it. A ``TierStorageWriter`` that saves it hands it to the node's agent
    as well, which finishes the save should this process end (``Settings.staging_memory``).

    Args:
        mode: "eager" or "lazy".
        optimizers: for lazy mode. Their parameters and state are what changes in ``step`` and only there; all else in
            the state dict is copied before ``stage`` returns. Without any, that is everything.
        shared: staging memory that another process can map, for ``AsyncCheckpointerType.PROCESS``.
        numa_nodes: NUMA nodes to take the memory from, in this order: DRAM first, then a CXL node. Empty: where the
            kernel puts it.
        settings: a ``Settings``; ``overrides`` are single fields of it (``checkpoints_in_flight_max=3``).

    Raises (from ``stage``):
        StateMismatchError: a tensor on the meta device, or quantized. CapacityError: staging memory cannot be had.
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

    _synchronize_after_execute = False

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
        self._outlives = handoff_client.is_wanted(self.settings)
        self._is_announced = False
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._fences: list[Any] = []
        self._pending: Copies | None = None
        self.watch(optimizers)

    # --- contract of AsyncStager --------------------------------------------------------------------------------

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: ``stage`` is complete when it returns, and in lazy mode the optimizer step waits."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any], **_: Any) -> Any:
        """Return the staged state dict; in lazy mode a Future of it that is done when the copies are."""
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
        lies_in_files: Callable[[torch.Tensor], bool] = lambda tensor: False,
    ) -> StagedItems:
        """Copy what ``items`` ask for and nothing else: for those who have the final plan before they stage.

        Objects are serialised now, on the caller's thread. In lazy mode ``StagedItems.wait`` is for the copies; with
        ``in_background``, for tensors that nobody changes any more, too, and no optimizer's step waits for them.
        ``lies_in_files`` says which are not copied: those of a ``Source``, which is added to what this returns.
        """
        self.synchronize_staging()
        staged = StagedItems()
        tensors = []
        for item in items:
            if item.type is WriteItemType.BYTE_IO:
                staged.data[item.index] = resolve_object(planner, item)
            elif lies_in_files(tensor := split.resolve(planner, item).detach()):
                staged.in_files[item.index] = tensor
            else:
                tensors.append((item, tensor))
        refuse_tensors({item.index.fqn: tensor for item, tensor in tensors})
        at_once = self.mode == "eager" and not in_background
        copied, copies = self._stage([tensor for _, tensor in tensors], at_once=at_once)
        for (item, _), tensor in zip(tensors, copied, strict=True):
            staged.data[item.index] = tensor
        staged.copied = copied_in_background(copies) if in_background else self._copy(copies)
        return staged

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Have the step of these optimizers too wait for lazy copies."""
        known = set(map(id, self._optimizers))
        new = tuple(optimizer for optimizer in optimizers if id(optimizer) not in known)
        self._optimizers += new
        self._fences += [optimizer.register_step_pre_hook(self.wait_before_step) for optimizer in new]

    def _copy(self, copies: Copies) -> Future[None]:
        """Make the copies, or in lazy mode those that cannot wait; the future is done when all are."""
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
        """Return when the copies of the last ``stage`` are done. Raises what went wrong with them."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait(slots.SLOT_SECONDS)

    def close(self) -> None:
        """Wait for copies under way and let go of the optimizers. The memory stays with the process's arena."""
        self.synchronize_staging()
        for fence in self._fences:
            fence.remove()
        self._fences.clear()

    def wait_before_step(self, *_: Any) -> None:
        """Wait for the copies, as a hook of ``optimizer.step``. Raises what went wrong with them."""
        self.synchronize_staging()

    def _changed_by_step(self) -> set[int]:
        """Storages that change in an optimizer's step and nowhere else."""
        found = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found |= {storage_id(parameter) for parameter in group["params"]}
            for state in optimizer.state.values():
                found |= {storage_id(value) for value in state.values() if isinstance(value, torch.Tensor)}
        return found

    # --- staging ------------------------------------------------------------------------------------------------

    def _stage(self, state: Any, *, at_once: bool) -> tuple[Any, Copies]:
        with gc_paused():
            return self._staged(state, at_once=at_once)

    def _staged(self, state: Any, *, at_once: bool) -> tuple[Any, Copies]:
        walk = _Walk(state)
        frames = [item_format.frame(leaf.dtype, tuple(leaf.shape)) for leaf in walk.leaves]
        shards = shard_layout.arrange(
            frames,
            shard_bytes_max=self.settings.shard_size_bytes_max,
            unit=shard_layout.unit_bytes(self.settings.chunk_size_bytes),
        )
        offsets, size_bytes = _in_arena(frames, shards)
        if not size_bytes:
            targets = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in walk.leaves]
            return walk.rebuild(targets), Copies(targets, walk.leaves)
        lease = self._lease(size_bytes)
        targets = self._targets(lease, walk.leaves, offsets, size_bytes)
        written = None
        if at_once:
            spans = _spans(frames, shards, offsets, lease.memory.address)
            written = write_ahead.prepare(self.settings, lease, spans, offsets, size_bytes)
        return walk.rebuild(targets), Copies(targets, walk.leaves, written)

    def _targets(
        self, lease: Lease, leaves: Sequence[torch.Tensor], offsets: Sequence[int], size_bytes: int
    ) -> list[torch.Tensor]:
        lease.tensors = sum(leaf.numel() > 0 for leaf in leaves)
        pin(lease.memory)
        base = base_of(lease, size_bytes, torch_shares=self._shared)
        by_dtype: dict[torch.dtype, torch.Tensor] = {}
        targets = []
        for leaf, offset in zip(leaves, offsets, strict=True):
            dtype = leaf.dtype
            typed = by_dtype.get(dtype)
            if typed is None:
                typed = by_dtype[dtype] = base[: size_bytes - size_bytes % dtype.itemsize].view(dtype)
            strides = leaf.stride() if leaf.is_contiguous() else _contiguous_strides(leaf.shape)
            targets.append(typed.as_strided(leaf.shape, strides, offset // dtype.itemsize))
        return targets

    def _lease(self, size_bytes: int) -> Lease:
        shared = self._shared or self._outlives
        if self._outlives and not self._is_announced:
            self._is_announced = True
            handoff_client.announce(self.settings)
        arena = arena_for(self.settings, shared=shared, read_elsewhere=self._shared, numa_nodes=self._numa_nodes)
        lease = arena.lease(size_bytes)
        if lease is None:
            raise CheckpointSkippedError(
                "every staging slot is still taken by a checkpoint that is being written",
                hint="Expected now and then with the staging_policy 'skip'; nothing was staged, training goes on",
            )
        return lease


class Source(Protocol):
    """Files that have a part of a state, and keep it until it is saved."""

    def wait(self, timeout_seconds: float) -> None:
        """Return when they have it."""

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, as it was planned, is theirs."""

    def reader(self, tensor: torch.Tensor) -> Fetch:
        """Return what reads the bytes that are to be saved in the place of those of ``tensor``."""

    def release(self) -> None:
        """They need not keep it any more. Raises when they have not."""


class StagedItems:
    """Stands in for the planner when a save is written: knows the staged data of each item, parts included."""

    def __init__(self) -> None:
        self.data: dict[MetadataIndex, Any] = {}
        self.copied: Future[None] = Future()
        self.in_files: dict[MetadataIndex, torch.Tensor] = {}
        """What is not copied: a source says where it lies."""
        self.sources: list[Source] = []
        self.readers: dict[MetadataIndex, Fetch] = {}
        """Of what lies in files: ``data`` says only what it is."""

    def resolve_data(self, item: WriteItem) -> Any:
        return self.data[item.index]

    def tensor(self, item: WriteItem) -> torch.Tensor:
        return cast(torch.Tensor, self.data[item.index])

    def wait(self, timeout_seconds: float) -> None:
        """Return when all copies are made. Raises what went wrong with them."""
        self.copied.result(timeout_seconds)
        for source in self.sources:
            source.wait(timeout_seconds)
            found = {i: tensor for i, tensor in self.in_files.items() if source.has(tensor)}
            self.data |= found
            self.readers |= {i: source.reader(tensor) for i, tensor in found.items()}

    def release(self) -> None:
        """All is read. Raises when a source has changed meanwhile, after all are released."""
        sources, self.sources = self.sources, []
        with contextlib.ExitStack() as stack:
            for source in sources:
                stack.callback(source.release)


class _Walk:
    """Takes a state dict apart into the tensors to copy, and puts it together again around their copies."""

    def __init__(self, state: Any) -> None:
        self.leaves: list[torch.Tensor] = []
        self._places: list[tuple[Any, Any, DTensor | None]] = []
        self._tuples: list[tuple[Any, Any]] = []
        self._local_parts: list[tuple[Any, Any, dict[str, Any]]] = []
        self._others: torch_internals.StateDictStager | None = None
        self._root: list[Any] = [None]
        self._visit(self._root, 0, state)
        if self._others is not None:
            vars(self._others).clear()  # it refers to itself: where no collector runs it would stay, and its copies

    def rebuild(self, targets: Sequence[torch.Tensor]) -> Any:
        """The state dict with ``targets`` in place of the leaves. Once."""
        for (container, key, like), target in zip(self._places, targets, strict=True):
            container[key] = target if like is None else _distributed(target, like)
        for container, key, facts in self._local_parts:
            vars(container[key]).update(facts)
        for container, key in self._tuples:  # inner ones first: they were noted first
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
        if isinstance(value, DTensor):
            like, plain = value, value.to_local()
        if plain.requires_grad or type(plain) is torch.nn.Parameter:
            plain = plain.detach()
        if item_format.is_plain(plain):
            self.leaves.append(plain)
            self._places.append((container, key, like))
            if is_local_part(value):  # without these attributes its copy would be planned as a whole tensor
                self._local_parts.append((container, key, {name: getattr(value, name) for name in LOCAL_PART}))
        else:
            container[key] = self._copied(value)

    def _copied(self, value: Any) -> Any:
        """Anything else: a copy in ordinary memory, tensors inside it moved to the CPU."""
        self._others = self._others or torch_internals.StateDictStager()
        return self._others.stage({"": value})[""]


_IMMUTABLE = frozenset({int, float, complex, str, bool, bytes, type(None)})


def _distributed(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor around staged memory.

    Made around an empty tensor first: a wrapper over one with a storage offset claims memory that its own storage does
    not have, and crashes the process that unpickles it.
    """
    spec = torch_internals.spec_of(like)
    made = cast(Any, DTensor)(torch.empty(local.shape, dtype=local.dtype), spec, requires_grad=False)
    torch_internals.set_local_tensor(made, local)
    return cast(DTensor, made)


def _in_arena(
    frames: Sequence[item_format.Frame], shards: Sequence[Sequence[shard_layout.Placed]]
) -> tuple[list[int], int]:
    """Where each frame's data goes in one piece of memory that holds the images of all shards, and the size of that."""
    offsets = [0] * len(frames)
    start = 0
    for shard in shards:
        end = start
        for index, offset in shard:
            offsets[index] = start + offset + len(frames[index].head)
            end = start + offset + frames[index].total_bytes
        start = round_up(end)
    return offsets, start


def _spans(
    frames: Sequence[item_format.Frame],
    shards: Sequence[Sequence[shard_layout.Placed]],
    offsets: Sequence[int],
    base: int,
) -> list[write_ahead.Span]:
    """Where the files to be lie in memory, and the data in them, for who writes it before there are files."""
    spans = []
    for shard in shards:
        staged = [(index, offset) for index, offset in shard if frames[index].size_bytes]
        if not staged:
            continue
        index, offset = staged[0]
        head = offset + len(frames[index].head)
        data = [(at + len(frames[n].head), at + len(frames[n].head) + frames[n].size_bytes) for n, at in staged]
        last, end = staged[-1]
        size_bytes = round_up(end + frames[last].total_bytes)
        spans.append(write_ahead.Span(base + offsets[index] - head, size_bytes, data))
    return spans


def base_of(lease: Lease, size_bytes: int, *, torch_shares: bool = False) -> torch.Tensor:
    """The leased memory as one tensor of bytes; the lease is free again when no view of it is left.

    ``torch_shares``: torch must be able to hand its tensors to another process.
    """
    if not torch_shares or lease.memory.fd is None:
        base = torch.frombuffer(lease.memory.view[:size_bytes], dtype=torch.uint8)
        storage: Any = StorageWeakRef(base.untyped_storage())  # type: ignore[no-untyped-call]
        lease.in_use = lambda: not storage.expired()
        lease.storage = torch_internals.storage_address_of(base.untyped_storage())
        return base
    # Another process can map only a storage that torch made of the descriptor. It maps the memory once more, so it is
    # kept as long as the memory, and the views of this lease are counted instead.
    shared = _shared_storages.get(lease.memory)
    if shared is None:
        shared = torch_internals.new_shared_storage(os.dup(lease.memory.fd), lease.memory.size_bytes)
        _shared_storages[lease.memory] = shared
    base = torch.empty(0, dtype=torch.uint8).set_(shared)[:size_bytes]
    lease.in_use = lambda: torch_internals.storage_use_count(torch_internals.storage_address_of(shared)) > 1
    return base


_shared_storages: WeakKeyDictionary[Memory, torch.UntypedStorage] = WeakKeyDictionary()


def copied_in_background(copies: Copies) -> Future[None]:
    done: Future[None] = Future()
    copies.run_in_background(lambda error: _settle(done, None, error))
    return done


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def storage_id(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return int(torch_internals.storage_address_of(tensor.untyped_storage()))


def _settle(future: Future[Any], value: Any, error: BaseException | None) -> None:
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def refuse_tensors(state_dict: Mapping[str, Any], prefix: str = "") -> None:
    """Raise StateMismatchError for the first tensor that a checkpoint cannot give back."""
    for key, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            refuse_tensor(f"{prefix}{key}", value)
        if isinstance(value, dict):
            refuse_tensors(value, f"{prefix}{key}.")


def refuse_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise StateMismatchError(
            f"{name} is on the meta device and has no bytes to save",
            hint="Materialise the module first (to_empty and initialise, or load a checkpoint)",
            tensor=name,
        )
    if tensor.is_quantized:
        raise StateMismatchError(
            f"{name} is quantized: DCP would load its numbers into the scale of another tensor",
            hint="Save its int_repr(), its scale and its zero point",
            tensor=name,
        )
