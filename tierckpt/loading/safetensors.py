"""Safetensors files to tensors: all at once, lazily, or as a stream."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Literal, overload

import torch
from torch import Tensor

from ..config import GiB, Settings
from ..disk.io_tuner import MODEL_READ_MODES, ReadMode
from ..errors import ConfigError, StateMismatchError
from ..read.parallel_read import batches
from ..resources import ThreadPool
from ..tracebacks import short_traceback
from .deferred import Deferral
from .fill import TensorRequest, fill
from .model_files import ModelTensors, in_file_order
from .model_source import USUAL, WeightChoice, find_model
from .tensor_parts import Parts, Plan, Shard, check_device

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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self)} tensors>"


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
        self.device = _device(device)
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
                    ready = deque((request.name, tensor) for request, tensor in _paired(window, reading.result()))
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


def _paired(window: list[TensorRequest], tensors: dict[str, Tensor]) -> Iterator[tuple[TensorRequest, Tensor]]:
    return ((request, tensors.pop(request.name)) for request in window)


def _size_bytes(window: list[TensorRequest]) -> int:
    return sum(request.size_bytes for request in window)


def _device(device: str | torch.device) -> torch.device:
    found = check_device(device)
    if found.type == "cuda" and found.index is None:  # other threads have another current device
        return torch.device("cuda", torch.cuda.current_device())
    return found


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
