"""Model tensors that are read on first use, and only the part in use.

An engine keeps a part of each tensor, or drops it; only its own code knows which.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import torch_internals
from .fill import TensorRequest, fill
from .tensor_parts import Bounds

DEFERRED_BYTES_MIN = 1 << 20
"""Smaller tensors are read together in advance."""

_OF_SHAPE = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta", "is_cpu", "nbytes")
} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size, Tensor.is_contiguous,
    Tensor.is_floating_point, Tensor.__len__, Tensor.__hash__, Tensor.storage_offset,
}  # fmt: skip

_VIEWS = {
    Tensor.narrow, torch.narrow, Tensor.chunk, torch.chunk, Tensor.split, torch.split, Tensor.unbind, torch.unbind,
    Tensor.select, torch.select, Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze, Tensor.t, torch.t,
    Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.detach, torch.detach, Tensor.view,
    Tensor.__getitem__, *(getattr(Tensor, name).__get__ for name in ("data", "T", "mT")),
}  # fmt: skip


@dataclass(eq=False, slots=True)
class _Source:
    request: TensorRequest
    device: torch.device
    made: list[weakref.ref[DeferredTensor]]
    whole: Tensor | None = None

    def read(self, view: Tensor) -> Tensor:
        bounds = None if self.whole is not None else _bounds_of(view, self.request.shape)
        if bounds is None or bounds == self.request.bounds:
            return self.read_all().as_strided(view.shape, view.stride(), view.storage_offset())
        part = fill([replace(self.request, bounds=bounds)], self.device)[self.request.name]
        steps = dict(zip(_strides(self.request.shape), part.stride(), strict=True))
        strides = [steps[stride] if size > 1 else 1 for size, stride in zip(view.shape, view.stride(), strict=True)]
        return part.as_strided(view.shape, strides)

    def read_all(self) -> Tensor:
        if self.whole is None:
            self.whole = fill([self.request], self.device)[self.request.name]
        return self.whole

    def share(self) -> None:
        """A write to one view is visible in the others."""
        self.read_all()
        for reference in self.made:
            if (one := reference()) is not None and one._source is self:
                one._read = None  # a private copy without writes


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _bounds_of(view: Tensor, shape: tuple[int, ...]) -> Bounds | None:
    sizes = {stride: size for size, stride in zip(view.shape, view.stride(), strict=True) if size != 1}
    if len(sizes) < sum(size != 1 for size in view.shape):
        return None
    position, bounds = int(view.storage_offset()), []
    for size, stride in zip(shape, _strides(shape), strict=True):
        start, position = divmod(position, stride)
        stop = start + (sizes.pop(stride, 1) if size > 1 else 1)
        if stop > size:
            return None
        bounds.append((start, stop))
    return None if sizes else tuple(bounds)


class DeferredTensor(Tensor):
    """A tensor or view without storage that reads its values once, when needed.

    Operations known to need no values (``shape``, ``narrow``, ``chunk``, an index) read nothing; others get an ordinary
    tensor. An in-place operation reads the whole tensor: its views share writes.
    """

    _source: _Source
    _view: Tensor
    _read: Tensor | None

    @staticmethod
    def __new__(cls, source: _Source, view: Tensor) -> DeferredTensor:
        self: DeferredTensor = torch_internals.make_wrapper_subclass(
            cls, view.shape, view.stride(), view.storage_offset(), dtype=view.dtype, device=source.device
        )
        torch_internals.throw_on_mutable_data_ptr(self)  # code that takes its address fails
        self._source, self._view, self._read = source, view, None
        source.made.append(weakref.ref(self))
        return self

    def read(self) -> Tensor:
        """Raise IntegrityError, CapacityError, StoreError."""
        if self._read is None:
            self._read = self._source.read(self._view)
        return self._read

    def _views(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found, spec = torch_internals.tree_flatten(func(self._view, *args, **kwargs))
        here = torch_internals.storage_address_of(self._view.untyped_storage())
        if any(torch_internals.storage_address_of(one.untyped_storage()) != here for one in found):
            return None
        return torch_internals.tree_unflatten([DeferredTensor(self._source, one) for one in found], spec)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_SHAPE:
            with torch_internals.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first: Any = args[0] if args else None
        if func in _VIEWS and isinstance(first, cls) and not _has_tensors((args[1:], kwargs)):
            views = first._views(func, *args[1:], **kwargs)
            if views is not None:
                return views
        if func is Tensor.copy_ and first.is_meta and isinstance(args[1], cls):  # the caller counts bytes to copy
            return func(first, args[1]._view, *args[2:], **kwargs)
        if isinstance(first, cls) and _writes(getattr(func, "__name__", "")):
            first._source.share()
        return func(*_each_read(args), **_each_read(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_each_read(args), **_each_read(kwargs or {}))


def _writes(name: str) -> bool:
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_") and name != "requires_grad_"


def _has_tensors(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in torch_internals.tree_flatten(tree)[0])


class Deferral:
    """Defers tensors of ``bytes_min`` or more. ``settle`` it before its source is closed."""

    def __init__(self, bytes_min: int = DEFERRED_BYTES_MIN) -> None:
        self._bytes_min = bytes_min
        self._made: list[weakref.ref[DeferredTensor]] = []

    def fill(
        self, requests: Sequence[TensorRequest], device: torch.device, stop: threading.Event | None = None
    ) -> dict[str, Tensor]:
        tensors = fill([request for request in requests if request.size_bytes < self._bytes_min], device, stop)
        for request in requests:
            if request.name not in tensors:
                view = torch.empty(request.shape, dtype=request.dtype, device="meta")
                tensors[request.name] = DeferredTensor(_Source(request, device, self._made), view)
        return tensors

    def settle(self) -> None:
        """Read unused tensors that are still referenced."""
        for reference in self._made:
            if (tensor := reference()) is not None:
                tensor.read()


def _each_read(arguments: Any) -> Any:
    return torch_internals.tree_map_only(DeferredTensor, DeferredTensor.read, arguments)
