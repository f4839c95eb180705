"""Safetensors files to tensors: all at once, lazily, or as a stream."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .. import torch_internals
from ..config import GiB, Settings
from ..disk.io_tuner import MODEL_READ_MODES, ReadMode
from ..errors import ConfigError, StateMismatchError
from ..read.parallel_read import batches
from ..resources import ThreadPool
from ..tracebacks import short_traceback
from .fill import TensorRequest, fill
from .model_files import ModelTensors, in_file_order
from .model_source import USUAL, WeightChoice, find_model
from .tensor_parts import Bounds, Parts, Plan, Shard, check_device

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

    An engine keeps a part of each tensor, or drops it; only its own code knows which.

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


BYTES_IN_FLIGHT_MAX = 1 * GiB

Names = Iterable[str] | Callable[[str], bool]


@overload
def load_safetensors(
    uri_or_dir: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    lazy: Literal[False] = False,
    names: Names | None = None,
    prefix: str = "",
    shard: Shard | None = None,
    plan: Plan | None = None,
    variant: str = "",
    subfolder: str = "",
    index: str = "",
    settings: Settings | None = None,
    **overrides: object,
) -> dict[str, Tensor]: ...
@overload
def load_safetensors(
    uri_or_dir: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    lazy: Literal[True],
    names: Names | None = None,
    prefix: str = "",
    shard: Shard | None = None,
    plan: Plan | None = None,
    variant: str = "",
    subfolder: str = "",
    index: str = "",
    settings: Settings | None = None,
    **overrides: object,
) -> LazyTensors: ...
@short_traceback
def load_safetensors(
    uri_or_dir: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    lazy: bool = False,
    names: Names | None = None,
    prefix: str = "",
    shard: Shard | None = None,
    plan: Plan | None = None,
    variant: str = "",
    subfolder: str = "",
    index: str = "",
    settings: Settings | None = None,
    **overrides: object,
) -> dict[str, Tensor] | LazyTensors:
    """Return every tensor of a model, by name: all of them, or an error that says which is missing.

    Headers are checked before anything is allocated. Bytes are read once, past the page cache unless they are in it.
    The tensors are writable, each with its own storage; the large ones of one file share an allocation, which is freed
    with the last of them.

    Of several sets of weights the one that ``transformers`` would load is loaded, with a warning. All tensors in the
    files of an index are loaded; a warning names the differences to the index. A URI is read through the node cache:
    one version of it; the processes of a node fetch each chunk once.

    Args:
        uri_or_dir: a directory of safetensors files, one such file, or the URI of either.
        lazy: return a mapping that reads a tensor at each access.
        names: only these tensors, or those for which the function returns True.
        prefix: only tensors with this prefix; they keep their names.
        shard: ``(rank, world, dim)``: of each tensor that has the dimension, the part that ``torch.chunk`` gives this
            rank. For ``dim`` 0 only its rows are read; for other dimensions whole rows are.
        plan: the part of each tensor, a mapping or a function of its name: ``(rank, world, dim)``, a slice or a
            tuple of slices, or None for all of it.
        variant: such as "fp16" (``model.fp16.safetensors``).
        subfolder: the directory of the weights in the model, such as "unet".
        index: such as "consolidated.safetensors.index.json".

    Raises:
        IntegrityError: a file of the index is missing, several sets of weights without a usual one, a damaged or
            truncated file, one name in two files, or a file that changed during the read.
        CheckpointNotFoundError, ObjectNotFoundError: no such place, variant or index, or no safetensors file in it.
        StateMismatchError: a requested tensor is missing, or has no such dimension, or torch lacks its dtype.
        CapacityError: the tensors do not fit in memory; nothing was read.
        ConfigError, StoreError: a bad argument, or an unreadable store.
    Cost: memory for the tensors, and 8 MiB per request for tensors that are cut by columns or go to a device.

    Example:
        >>> save_file({"layer.weight": torch.ones(4, 2), "layer.bias": torch.zeros(4)}, "model.safetensors")
        >>> tierckpt.load_safetensors("model.safetensors")["layer.weight"].shape
        torch.Size([4, 2])
        >>> tierckpt.load_safetensors("model.safetensors", shard=(0, 2, 0))["layer.weight"].shape
        torch.Size([2, 2])
    """
    choice, settings = WeightChoice(variant, subfolder, index), Settings.load(settings, **overrides)
    selected = WantedTensors(uri_or_dir, device, names, prefix, Parts(shard, plan), settings, choice=choice)
    if lazy:
        return LazyTensors(selected)
    with contextlib.closing(selected):
        selected.begin()
        tensors = fill(selected.requests, selected.device)
    return {name: tensors[name] for name in selected.names}


@short_traceback
def stream_safetensors(
    uri_or_dir: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    names: Names | None = None,
    prefix: str = "",
    shard: Shard | None = None,
    plan: Plan | None = None,
    variant: str = "",
    subfolder: str = "",
    index: str = "",
    bytes_in_flight_max: int = BYTES_IN_FLIGHT_MAX,
    settings: Settings | None = None,
    **overrides: object,
) -> Generator[tuple[str, Tensor], None, None]:
    """Yield every tensor of a model and its name, file by file in the order of their bytes.

    The next window is read while the caller uses the tensors of one, so a model larger than memory can be streamed. The
    tensors of a window share memory: clone the few that you keep. For the other arguments see ``load_safetensors``.

    Args:
        bytes_in_flight_max: maximum of bytes read and not yet yielded, or one larger tensor. A window has half of it.

    Raises:
        ConfigError: ``bytes_in_flight_max`` is not above 0.
        IntegrityError: at the call for headers and index; during iteration for damaged bytes.
        CheckpointNotFoundError, ObjectNotFoundError, StateMismatchError, CapacityError, StoreError: as in
            ``load_safetensors``, before anything is read.

    Example:
        >>> save_file({"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, "model.safetensors")
        >>> for name, tensor in tierckpt.stream_safetensors("model.safetensors"):
        ...     print(name, tuple(tensor.shape), tensor.dtype)
        a (2, 3) torch.float32
        b (4,) torch.bfloat16
    """
    if bytes_in_flight_max <= 0:
        raise ConfigError(f"bytes_in_flight_max is {bytes_in_flight_max}", hint="Give a number of bytes above 0")
    choice, settings = WeightChoice(variant, subfolder, index), Settings.load(settings, **overrides)
    selected = WantedTensors(uri_or_dir, device, names, prefix, Parts(shard, plan), settings, choice=choice)
    selected.begin()
    return selected.stream(bytes_in_flight_max)


class LazyTensors(Mapping[str, Tensor]):
    """Reads a tensor at each access. Thread-safe.

    No file stays open. A URI's version stays in the node cache until ``close``.
    """

    def __init__(self, selected: WantedTensors) -> None:
        self._selected, self._device, self._names = selected, selected.device, selected.names
        self._requests = {request.name: request for request in selected.requests}

    def close(self) -> None:
        """Later reads fail. Idempotent."""
        self._requests, self._names = {}, []
        self._selected.close()

    def __enter__(self) -> LazyTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Tensor:
        return fill([self._requests[name]], self._device)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._requests

    def meta(self, name: str) -> Tensor:
        """Return a meta tensor. Reads no data."""
        request = self._requests[name]
        return torch.empty(math.prod(request.shape), dtype=request.dtype, device="meta").reshape(request.shape)


class WantedTensors:
    def __init__(
        self,
        uri_or_dir: str | os.PathLike[str],
        device: str | torch.device,
        names: Names | None,
        prefix: str,
        parts: Parts,
        settings: Settings,
        modes: tuple[ReadMode, ...] = MODEL_READ_MODES,
        choice: WeightChoice = USUAL,
    ) -> None:
        self.device = check_device(device)
        if self.device.type == "cuda" and self.device.index is None:  # other threads have another current device
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._is_all = names is None and not prefix
        self._model = find_model(uri_or_dir, settings, modes, choice)
        try:
            self.names = _select(self._model, names, prefix)
            chosen = set(self.names)
            found = (one for one in in_file_order(self._model) if one[0] in chosen)
            self.requests = [TensorRequest.of(name, file, entry, parts) for name, file, entry in found]
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        if self._is_all:
            self._model.directory.begin(list(dict.fromkeys(request.file.name for request in self.requests)))

    def stream(
        self, bytes_in_flight_max: int, deferral: Deferral | None = None
    ) -> Generator[tuple[str, Tensor], None, None]:
        """The end of the generator closes this; with ``deferral`` the caller does."""
        stop = threading.Event()
        ordered = batches(self.requests, lambda request: request.size_bytes, bytes_in_flight_max // 2)
        read = fill if deferral is None else deferral.fill
        with contextlib.ExitStack() as stack, ThreadPool(1, "tierckpt-stream") as reader:
            if deferral is None:
                stack.callback(self.close)

            def begin(window: list[TensorRequest] | None) -> Future[dict[str, Tensor]] | None:
                return reader.submit(read, window, self.device, stop) if window is not None else None

            try:
                window = next(ordered, None)
                reading = begin(window)
                while window is not None and reading is not None:
                    tensors = reading.result()
                    ready = deque((request.name, tensors.pop(request.name)) for request in window)
                    present, window = window, next(ordered, None)
                    fits = window is not None and _size_bytes(present) + _size_bytes(window) <= bytes_in_flight_max
                    reading = begin(window) if fits else None
                    while ready:
                        yield ready.popleft()
                    reading = reading or begin(window)
            finally:
                stop.set()  # waits only for running requests

    def close(self) -> None:
        self._model.directory.close()


def _size_bytes(window: list[TensorRequest]) -> int:
    return sum(request.size_bytes for request in window)


def _select(model: ModelTensors, names: Names | None, prefix: str) -> list[str]:
    chosen = [name for name in model.tensors if name.startswith(prefix)]
    if prefix and not chosen:
        raise StateMismatchError(f"{model.where} holds no tensor with the prefix {prefix!r}")
    if names is None:
        return chosen
    if callable(names):
        return [name for name in chosen if names(name)]
    requested_names = {names} if isinstance(names, str) else set(names)
    missing = sorted(requested_names.difference(chosen))
    if missing:
        raise StateMismatchError(
            f"{model.where} does not hold {', '.join(map(repr, missing[:5]))}{', ...' * (len(missing) > 5)}",
            hint="Without names= everything is loaded",
            tensor=missing[0],
        )
    return [name for name in chosen if name in requested_names]
