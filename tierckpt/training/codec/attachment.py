"""Encodes the state of a training step outside its optimizers, for a gradient log.

    8 bytes size of the JSON, little endian; JSON; the bytes of the tensors

The JSON runs no code (P9). It describes the tensors, and has

    values     entries of the state that are neither modules nor optimizers
    groups     options of the groups of each optimizer
    tensors    changed buffers of modules, and changed parameters that no optimizer of the state steps
    extra      extra state of submodules
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from ... import torch_internals
from ...errors import StateMismatchError
from ...replay.checksum import Check, Fingerprint, begin_digests, combined_digest, digest_values, digests_of, sample_of
from ...replay.optimizers import local_shard, optimizers_in, parameters_of
from .reconstruction import Decoder
from .structure import CONSTANTS, Encoder, bad, text_of

_HEAD = struct.Struct("<Q")
_BELOW = "step"
TensorKey = tuple[str, str]
NONE_SENT: Mapping[TensorKey, int | torch.Tensor] = MappingProxyType({})
UNTRACED = (
    "{}, which no optimizer of the state steps, was changed in a way that version counters do not show (.data, numpy, "
    "a fused kernel of another optimizer). The log includes it in each step after the next checkpoint"
)


class Attachments:
    """Encodes the attachment of each step of ``state``, with the module tensors changed since the last one.

    Buffers are compared by their bits, as kernels write to them without a trace; other parameters by version counters
    and a sample of elements, and by all bits in ``check``.
    """

    def __init__(self, state: Mapping[str, Any], untraced: set[TensorKey]) -> None:
        self._seen: dict[TensorKey, Any] = {(name, key): _mark(tensor) for name, key, tensor in _tensors_of(state)}
        self._untraced = untraced
        self._marks: dict[TensorKey, int] = {}
        self._places = frozenset(self._seen)

    def rebase(self, state: Mapping[str, Any]) -> None:
        """Make the current state the base: a checkpoint has it."""
        for name, key, tensor in _tensors_of(state):
            if self._seen.get((name, key)) != _mark(tensor):
                self._seen.pop((name, key), None)

    def check(self, state: Mapping[str, Any], sent: Mapping[TensorKey, int | torch.Tensor] = NONE_SENT) -> Check:
        marks: dict[TensorKey, Any] = dict(sent)
        for name, key, tensor in _parameters_of(state):
            if (name, key) not in marks:
                marks[name, key] = begin_digests([local_shard(tensor.detach())])

        def read() -> Callable[[], tuple[str, int]]:
            for tensor_key, mark in marks.items():
                if callable(mark):
                    marks[tensor_key] = sum(mark())
            return finish

        def finish() -> tuple[str, int]:
            found = dict(zip(marks, digest_values([*marks.values()]), strict=True))
            known, self._marks = self._marks, found
            changed = [
                tensor_key
                for tensor_key in found
                if tensor_key not in sent and known.get(tensor_key, found[tensor_key]) != found[tensor_key]
            ]
            self._untraced.update(changed)
            return (UNTRACED.format(".".join(changed[0])) if changed else ""), _total(found)

        return read

    def encode(self, state: Mapping[str, Any]) -> tuple[bytes, Check]:
        """Return the attachment of a step, and its ``Check``. Raises StateMismatchError: a value cannot be restored."""
        encoder = Encoder(_BELOW, is_ambiguous=True)
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        sent, tensor_keys = dict[TensorKey, int | torch.Tensor](), set[TensorKey]()
        for name, key, tensor in _tensors_of(state):
            mark = _mark(tensor)
            tensor_keys.add((name, key))
            if self._seen.get((name, key)) != mark or (name, key) in self._untraced:
                tensors.setdefault(name, {})[key] = tensor.detach()
                self._seen[name, key] = mark
                if isinstance(tensor, torch.nn.Parameter):
                    [sent[name, key]] = digests_of([local_shard(tensor.detach())]) or [0]
        if other := min(tensor_keys ^ self._places, default=None):
            raise _mismatch(".".join(other))
        value = {
            "values": _values(state),
            "groups": {name: _groups(one) for name, one in optimizers_in(state).items()},
            "tensors": tensors,
            "extra": {name: dict(_extra_of(one)) for name, one in _modules(state)},
        }
        node, _ = encoder.encode(value, (_BELOW,))
        parts = [local_shard(one.detach()).cpu().contiguous() for one in encoder.numbered.values()]
        described = [
            [str(one.dtype), list(one.shape), list(part.shape)]
            for one, part in zip(encoder.numbered.values(), parts, strict=True)
        ]
        text = text_of({"node": node, "tensors": described}).encode()
        data = b"".join(part.view(-1).view(torch.uint8).numpy().tobytes() if part.numel() else b"" for part in parts)
        return _HEAD.pack(len(text)) + text + data, self.check(state, sent)


class Attached:
    """Restores attachments: tensors in order, the rest of the newest one in ``finish``.

    Raises UnsafeCheckpointError: not an attachment. StateMismatchError: it does not fit the state.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self._live = {(name, key): tensor for name, key, tensor in _tensors_of(state)}
        self._newest: dict[str, Any] | None = None
        self._marks: dict[TensorKey, int] = {}

    def take(self, attachment: bytes) -> int:
        if not self._marks:
            self._mark({(name, key) for name, key, _ in _parameters_of(self._state)})
        self._newest = _decode(attachment, self._state)
        for name, tensors in self._newest["tensors"].items():
            for key, tensor in tensors.items():
                live = self._live.get((name, key))
                if live is None or local_shard(live).shape != local_shard(tensor).shape:
                    raise _mismatch(f"{name}.{key}")
                local_shard(live.detach()).copy_(local_shard(tensor))
            self._mark({(name, key) for key in tensors if isinstance(self._live[name, key], torch.nn.Parameter)})
        return _total(self._marks)

    def _mark(self, tensor_keys: Collection[TensorKey]) -> None:
        for tensor_key in tensor_keys:
            [self._marks[tensor_key]] = digest_values(digests_of([local_shard(self._live[tensor_key].detach())])) or [0]

    def finish(self) -> None:
        if self._newest is None:
            return
        for name, groups in self._newest["groups"].items():
            for group, options in zip(self._state[name].param_groups, groups, strict=True):
                _put_options(group, options)
        for name, modules in self._newest["extra"].items():
            for path, extra in modules.items():
                inner(self._state[name]).get_submodule(path).set_extra_state(extra)
        for name, value in self._newest["values"].items():
            if name not in self._state:
                raise _mismatch(name)
            if isinstance(self._state[name], Stateful):
                self._state[name].load_state_dict(value)
            else:
                self._state[name] = value


def _decode(attachment: bytes, state: Mapping[str, Any]) -> dict[str, Any]:
    view = memoryview(attachment)
    (text_bytes,) = _HEAD.unpack_from(view)
    fields, position = json.loads(bytes(view[_HEAD.size :][:text_bytes])), _HEAD.size + text_bytes
    stored, data = {}, {}
    for number, (dtype, size, shape) in enumerate(fields["tensors"]):
        kind: Any = CONSTANTS["dtype"][dtype]
        size_bytes = torch.Size(shape).numel() * kind.itemsize
        if size_bytes > len(view) - position:
            raise bad("a tensor of a step is larger than its bytes")
        name = f"{_BELOW}.{number}"
        stored[name] = TensorStorageMetadata(TensorProperties(dtype=kind), torch.Size(size), [])
        data[name] = torch.empty(shape, dtype=kind, device="cpu")
        if size_bytes:
            raw = bytearray(view[position : position + size_bytes])
            data[name] = torch.frombuffer(raw, dtype=torch.uint8).view(kind).view(shape)
        position += size_bytes
    decoder = Decoder(json.dumps(fields["node"]), Metadata(dict(stored)), lambda: _live(state))
    for name, tensor in decoder.tensors.items():
        if local_shard(tensor).shape != data[name].shape:
            raise _mismatch(name)
        local_shard(tensor.detach()).copy_(data[name])
    decoder.finish()
    return dict(decoder.value)


def _live(state: Mapping[str, Any]) -> dict[str, Any]:
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, key, tensor in _tensors_of(state):
        tensors.setdefault(name, {})[key] = tensor
    groups = {name: [dict(group) for group in one.param_groups] for name, one in optimizers_in(state).items()}
    return {"values": _values(state), "groups": groups, "tensors": tensors}


def inner(module: torch.nn.Module) -> torch.nn.Module:
    """Unwrap DDP."""
    return inner(module.module) if isinstance(module, DistributedDataParallel) else module


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def _put_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
            group[key].copy_(value)  # a compiled step or a schedule holds this tensor
        else:
            group[key] = value


def _modules(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    yield from ((name, inner(value)) for name, value in state.items() if isinstance(value, torch.nn.Module))


def _values(state: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    others = {name: one for name, one in state.items() if not isinstance(one, kinds)}
    return {name: one.state_dict() if isinstance(one, Stateful) else one for name, one in others.items()}


def _tensors_of(state: Mapping[str, Any]) -> Iterator[tuple[str, str, torch.Tensor]]:
    stepped = {id(one.tensor) for optimizer in optimizers_in(state).values() for one in parameters_of(optimizer)}
    for name, module in _modules(state):
        for path, one in module.named_modules():
            prefix = f"{path}." if path else ""
            for key, buffer in one._buffers.items():
                if buffer is not None and key not in one._non_persistent_buffers_set:
                    yield name, prefix + key, buffer
            for key, parameter in one._parameters.items():
                if parameter is not None and id(parameter) not in stepped:
                    yield name, prefix + key, parameter


def _parameters_of(state: Mapping[str, Any]) -> Iterator[tuple[str, str, torch.Tensor]]:
    yield from (one for one in _tensors_of(state) if isinstance(one[2], torch.nn.Parameter))


def _total(marks: Mapping[TensorKey, int]) -> int:
    return int(combined_digest([marks[tensor_key] for tensor_key in sorted(marks)]), 16) if marks else 0


def _extra_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for path, one in module.named_modules():
        if type(one).get_extra_state is not torch.nn.Module.get_extra_state:
            yield path, one.get_extra_state()


def _mark(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, torch.nn.Parameter):
        shard = local_shard(tensor.detach())
        some = digests_of([sample_of(_in_memory_order(shard))]) if shard.device.type == "cpu" else []
        return id(tensor), torch_internals.version_of(tensor), torch_internals.version_of(shard), shard.data_ptr(), some
    return Fingerprint.of_tensor(local_shard(tensor)).int_value


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _mismatch(name: str) -> StateMismatchError:
    return StateMismatchError(
        f"the log of steps has {name}, but the state has no matching value",
        hint="Restore with the model that trained, or only the checkpoint (step=)",
        key=name,
    )
