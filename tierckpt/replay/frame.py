"""Encodes an optimizer step as JSON and tensors, and a training step as a frame of a gradient log.

Invariant:
    F3  No value is rounded. A gradient is stored as bfloat16 only if that loses no bit; ``apply`` widens it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from .. import torch_internals
from ..errors import ConfigError
from ..save import log_segments
from ..save.log_segments import Read
from ..types import Json
from .capture import Step

DTYPES = {str(one).removeprefix("torch."): one for one in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
)}  # fmt: skip
DeviceOf = Callable[[str], torch.device]
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Frame:
    number: int
    steps: Mapping[str, Step]
    layouts: Mapping[str, str]
    attachment: bytes = b""


def encode(frame: Frame, previous: str = "", parameters: str = "") -> tuple[bytes, list[memoryview], str]:
    """Return the record of a frame, its data as views, and its digest. Wait for copies of gradients.

    ``previous`` is the digest of the previous record, ``parameters`` that of parameters and state after the step.
    """
    joined, views, steps = _JoinedViews(), list[memoryview](), dict[str, Json]()
    for name, step in frame.steps.items():
        step_fields, gradients = encode_step(step)
        steps[name] = {"layout": frame.layouts[name], **step_fields}
        stored = (one if one.is_cpu and one.is_contiguous() else one.cpu().contiguous() for one in gradients)
        views += map(joined.add, stored)
    fields = {"number": frame.number, "previous": previous, "steps": steps}
    if parameters:
        fields["parameters"] = parameters
    attachment = memoryview(frame.attachment)
    record, digest = log_segments.pack_frame(fields, [*views, attachment])
    return record, [*joined.views(), attachment], digest


def decode(read: Read, *, where: str) -> Frame:
    """Copy a frame. Raises IntegrityError if the bytes are cut short, damaged, or not a frame."""
    fields, _, offset = log_segments.unpack(read, log_segments.FRAME, where=where)
    sizes = iter([size_bytes for size_bytes, _ in fields["data"]])
    pieces = log_segments.verified_pieces(read, fields, offset, where=where)

    def fill(view: memoryview) -> None:
        if next(sizes, None) != len(view):
            raise log_segments.damaged(where, "its header was not written by tierckpt")
        done = 0
        while done < len(view):
            piece = next(pieces)
            view[done : done + len(piece)] = piece
            done += len(piece)

    steps = {}
    for name, step_fields in fields["steps"].items():
        gradients = [
            torch.empty(shape, dtype=DTYPES[dtype], device=HOST) for _, dtype, shape in step_fields["gradients"]
        ]
        for gradient in gradients:
            fill(bytes_of(gradient))
        steps[name] = decode_step(step_fields, gradients)
    layouts = {name: step_fields["layout"] for name, step_fields in fields["steps"].items()}
    return Frame(fields["number"], steps, layouts, b"".join(pieces))


def encode_step(step: Step) -> tuple[Json, list[torch.Tensor]]:
    gradients = [*step.gradients.values()]
    step_fields = {
        "version": step.version,
        "skipped": step.is_skipped,
        "hyperparameters": [to_json(group) for group in step.hyperparameters],
        "gradients": [
            [key, dtype_name(one.dtype), list(one.shape)] for key, one in zip(step.gradients, gradients, strict=True)
        ],
    }
    return step_fields, gradients


def decode_step(step_fields: Json, gradients: Iterable[torch.Tensor], device_of: DeviceOf = lambda _: HOST) -> Step:
    keys = [key for key, *_ in step_fields["gradients"]]
    return Step(
        int(step_fields["version"]),
        [from_json(group, device_of) for group in step_fields["hyperparameters"]],
        dict(zip(keys, gradients, strict=True)),
        torch.ones((), device=HOST) if step_fields["skipped"] else None,
    )


class _JoinedViews:
    """Joins adjacent tensors: each call into torch may yield the interpreter to training."""

    def __init__(self) -> None:
        self._storage_views: dict[int, memoryview] = {}
        """A view keeps its storage alive."""
        self._ranges: list[tuple[int, int, int]] = []

    def add(self, tensor: torch.Tensor) -> memoryview:
        storage = tensor.untyped_storage()
        address = torch_internals.storage_address_of(storage)
        if address not in self._storage_views:
            self._storage_views[address] = bytes_of(torch.empty(0, dtype=torch.uint8, device=HOST).set_(storage))
        begin = int(tensor.storage_offset()) * tensor.element_size()
        end = begin + tensor.nbytes
        if self._ranges and self._ranges[-1][0] == address and self._ranges[-1][2] == begin:
            self._ranges[-1] = (address, self._ranges[-1][1], end)
        elif begin < end:
            self._ranges.append((address, begin, end))
        return self._storage_views[address][begin:end]

    def views(self) -> list[memoryview]:
        return [self._storage_views[address][begin:end] for address, begin, end in self._ranges]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview(cast(Any, tensor.view(-1).view(torch.uint8).numpy()))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def to_json(value: Any) -> Any:
    """Keep the bits of floats. A tensor (``lr=torch.tensor(...)``) becomes its bytes."""
    if isinstance(value, Mapping):
        return {key: to_json(one) for key, one in value.items()}
    if isinstance(value, torch.Tensor):
        stored = value.detach().cpu().contiguous()
        return {
            "tensor": [dtype_name(value.dtype), list(value.shape), bytes(bytes_of(stored)).hex(), str(value.device)]
        }
    if isinstance(value, tuple | list):
        return [to_json(one) for one in value]
    if not isinstance(value, bool | int | float | str | None):
        raise ConfigError(f"an option of the optimizer is a {type(value).__name__} ({value!r}), which cannot be logged",
            hint="Use Python numbers: float(...)",
        )  # fmt: skip
    return value


def from_json(value: Any, device_of: DeviceOf = lambda _: HOST) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"tensor"}:
            dtype, shape, data, device = value["tensor"]
            tensor = torch.empty(shape, dtype=DTYPES[dtype], device=HOST)
            bytes_of(tensor)[:] = bytes.fromhex(data)
            return tensor.to(device_of(device))
        return {key: from_json(one, device_of) for key, one in value.items()}
    if isinstance(value, list):
        return tuple(from_json(one, device_of) for one in value)
    return cast(Any, value)
