"""The bytes of one step in a gradient log.

    header        a record (``segments``)
    then          gradients, one behind the other, in the order of the header; the attachment

Invariants:
    F1  Whole or refused: the header has the digest of each chunk of the gradients, and its own comes before it.
    F2  In one place only: the header names the frame before by its digest, and the layout of the optimizer. A frame of
        another run, of another step, or one that was repeated does not fit.
    F3  Nothing is rounded. A gradient lies as it came over the link (``link.Copy``), as bfloat16 where that loses no
        bit; the header says what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import torch

from .. import torch_internals
from ..errors import ConfigError
from ..save import log_segments
from .capture import Step

DTYPES = {str(one).removeprefix("torch."): one for one in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frame:
    """A step, and its place in a log."""

    step: Step
    layout: str
    """``optimizers.layout_digest``."""
    previous: str = ""
    """``digest`` of the record before."""
    number: int = 0
    """The step as training counts it."""
    attachment: bytes = b""
    """What else belongs to the step; whoever wrote it knows what it is."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Of gradients that are narrower here than they were; the others have their own."""
    optimizer: str = ""
    """Its name, where a log has several."""
    is_last: bool = True
    """No other optimizer's frame of this training step follows."""
    digest: str = ""
    """Of the header, which has those of all gradients: it names the frame. Set by ``decode``."""
    parameters: str = ""
    """``checksum.digest_of`` all parameters of the log after this training step. '' where they were not looked at."""


def encode(frame: Frame) -> tuple[bytes, list[memoryview], str]:
    """Return the head and header, the gradients (views of host memory), and the digest that names the frame.

    Cost: one pass over the gradients, to digest them.
    """
    memory = _Memory()
    entries: list[list[Any]] = []
    for key, gradient in frame.step.gradients.items():
        stored = gradient if gradient.is_cpu and gradient.is_contiguous() else gradient.cpu().contiguous()
        view = memory.add(stored)
        begins = range(0, len(view), log_segments.CHUNK_BYTES)
        digests = [log_segments.digest_of_piece(view[at : at + log_segments.CHUNK_BYTES]) for at in begins]
        dtype = frame.dtypes.get(key, gradient.dtype)
        entries.append([key, dtype_name(dtype), dtype_name(stored.dtype), list(gradient.shape), digests])
    views = [*memory.views(), memoryview(frame.attachment)]
    fields = {
        "version": frame.step.version,
        "number": frame.number,
        "previous": frame.previous,
        "layout": frame.layout,
        "optimizer": frame.optimizer,
        "is_last": frame.is_last,
        "skipped": frame.step.is_skipped,
        "hyperparameters": [to_json(group) for group in frame.step.hyperparameters],
        "gradients": entries,
        "attachment": [len(frame.attachment), log_segments.digest_of_piece(frame.attachment)],
        "data_bytes": sum(map(len, views)),
        **({"parameters": frame.parameters} if frame.parameters else {}),
    }
    header, digest = log_segments.pack(log_segments.FRAME, fields)
    return header, views, digest


def decode(read: Callable[[int, int], memoryview], *, where: str) -> Frame:
    """Return a frame. Its gradients are copies.

    Args:
        read: returns bytes of the log, given offset from the head of the frame and size; fewer at the end of the log.

    Raises:
        IntegrityError: it is cut short, damaged, or no frame at all. ``where`` says which log it is in.
    """

    def part(offset: int, size_bytes: int) -> memoryview:
        found = read(offset, size_bytes)
        if len(found) < size_bytes:
            raise log_segments.damaged(where, "it is cut short")
        return found

    fields, digest, at = log_segments.unpack(read, log_segments.FRAME, where=where)
    gradients: dict[str, torch.Tensor] = {}
    pieces = log_segments.verified_pieces(part, fields, at, where=where)
    for key, dtype, stored, shape, digests in fields["gradients"]:
        tensor = torch.empty(shape, dtype=DTYPES[stored], device="cpu")
        view, done = bytes_of(tensor), 0
        for piece in islice(pieces, len(digests)):
            view[done : done + len(piece)] = piece
            done += len(piece)
        gradients[key] = tensor.to(DTYPES[dtype])
    attachment = bytes(next(pieces))
    step = Step(
        fields["version"],
        [from_json(group) for group in fields["hyperparameters"]],
        gradients,
        torch.ones((), device="cpu") if fields["skipped"] else None,
    )
    return Frame(
        step, fields["layout"], fields["previous"], fields["number"], attachment, optimizer=fields["optimizer"],
        is_last=fields["is_last"], digest=digest, parameters=fields.get("parameters", ""),
    )  # fmt: skip


class _Memory:
    """The bytes of contiguous tensors in host memory, as few views: those that lie one behind the other are one.

    Of tensors that share memory only the first is a call into torch, which would hand the interpreter to the thread
    that trains.
    """

    def __init__(self) -> None:
        self._whole: dict[int, memoryview] = {}
        """By storage, all of it: it lives as long as a view."""
        self._runs: list[tuple[int, int, int]] = []

    def add(self, tensor: torch.Tensor) -> memoryview:
        storage = tensor.untyped_storage()
        place = torch_internals.storage_address_of(storage)
        if place not in self._whole:
            self._whole[place] = bytes_of(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
        begin = int(tensor.storage_offset()) * tensor.element_size()
        end = begin + tensor.nbytes
        if self._runs and self._runs[-1][0] == place and self._runs[-1][2] == begin:
            self._runs[-1] = (place, self._runs[-1][1], end)
        elif begin < end:
            self._runs.append((place, begin, end))
        return self._whole[place][begin:end]

    def views(self) -> list[memoryview]:
        return [self._whole[place][begin:end] for place, begin, end in self._runs]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview(cast(Any, tensor.view(-1).view(torch.uint8).numpy()))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def to_json(value: Any) -> Any:
    """Python's floats survive JSON bit for bit; a tensor (``lr=torch.tensor(...)``) is written as its bytes."""
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
        raise ConfigError(f"an option is a {type(value).__name__} ({value!r}), and none that can be written down",
            hint="Write numbers as those of Python: float(...)",
        )  # fmt: skip
    return value


def from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"tensor"}:
            dtype, shape, data, _ = value["tensor"]
            tensor = torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
            bytes_of(tensor)[:] = bytes.fromhex(data)
            return tensor
        return {key: from_json(one) for key, one in value.items()}
    if isinstance(value, list):
        return tuple(from_json(one) for one in value)
    return cast(Any, value)
