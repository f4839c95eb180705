"""Items of a checkpoint, loaded as data. torch's pickles can run code; here everything is read ``weights_only``.

Invariants (tests cite them):
    S7  No item is unpickled except by ``torch.load(weights_only=True)``, before it is rewritten. An item without
        globals is read by a reader that knows none, and so calls nothing.
    S8  A planner gets bytes made here from data that passed S7, and that pass it, too. So it does not matter
        that planners load them with ``weights_only=False``, nor whether two readers of torch's formats agree about the
        bytes of the file.
    S9  An unpacked item is not much larger than the item: ``torch.save`` never compresses, so an item that is
        compressed, or has a length in place of data, was made to fill the memory.
"""

from __future__ import annotations

import builtins
import io
import os
import re
import threading
import zipfile
from typing import Any, BinaryIO

import torch

from ...errors import TierckptError, UnsafeCheckpointError
from ...format import pickle_machine as machine
from ...torch_internals import PyTorchFileReader
from ..items.item_format import save_object

SMALL_BYTES = 4096
CACHED_OBJECTS_MAX = 4096
GROWTH_MAX = 4
GROWTH_BYTES_MIN = 1 << 20
_ZIP = b"PK\3\4"

_DATA_CLASSES = (io.BytesIO,)
"""Data that torch does not register. Trainers put their counters into a BytesIO."""

_UNSAFE_GLOBAL = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)")
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


class Objects:
    """Turns the bytes of objects into bytes that are safe to unpickle. Caches small ones, which repeat."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}

    def inert(self, data: bytes, name: str) -> bytes:
        """Return bytes of the same object that any ``torch.load`` reads without running code (S8).

        Raises UnsafeCheckpointError if ``data`` has more than data, or is not an item of ``torch.save``.
        """
        known = self._known.get(data)
        if known is not None:
            return known
        stream = io.BytesIO()
        value = _load_simple(data, name)
        is_simple = value is not _MORE
        if not is_simple:
            value = _load_object(data, name)
        if _size_bytes(value, set()) > _size_bytes_max(len(data)):
            raise _too_large(name, len(data))
        try:
            save_object(value, stream)
        except Exception as error:
            raise UnsafeCheckpointError(
                f"{name} is refused: it cannot be written again ({type(error).__name__}: {error})"
            ) from error
        made = stream.getvalue()
        if not is_simple:
            _load_object(made, name)  # S8
        if len(data) <= SMALL_BYTES and len(self._known) < CACHED_OBJECTS_MAX:
            self._known[data] = made
        return made


def load_tensor(stream: Any, name: str, *, trusted: bool = False) -> torch.Tensor:
    """Return the tensor in ``stream``, on the CPU. ``trusted`` runs whatever code it names.

    Raises UnsafeCheckpointError: no tensor, or a subclass that is not among torch's safe globals.
    """
    value = load_object(stream, "cpu", name, trusted=trusted)
    if not isinstance(value, torch.Tensor):
        raise UnsafeCheckpointError(f"{name} is refused: it has a {type(value).__name__} where a tensor belongs")
    return value


def _load_simple(data: bytes, name: str) -> Any:
    """Return ``_MORE`` for more than numbers, texts and lists, tuples and dicts of them."""
    stream = io.BytesIO(data)
    _check_growth(stream, name)
    try:
        return machine.run(PyTorchFileReader(stream).get_record("data.pkl"), {})
    except Exception:
        return _MORE


_MORE = object()


def _load_object(data: bytes, name: str) -> Any:
    with _lock, torch.serialization.safe_globals(_missing_data_classes()):
        return load_object(io.BytesIO(data), None, name)


def load_object(stream: BinaryIO, map_location: str | None, name: str, *, trusted: bool = False) -> Any:
    """``torch.load(weights_only=True)``, with one kind of error. Our own errors from ``stream`` pass unchanged."""
    try:
        _check_growth(stream, name)
        return torch.load(stream, map_location=map_location, weights_only=not trusted, mmap=False)
    except TierckptError:
        raise
    except Exception as error:
        raise _refusal_error(error, name) from None


def _check_growth(stream: BinaryIO, name: str) -> None:
    """Reject an archive with far larger records than itself, without unpacking it."""
    start, size_bytes = stream.tell(), stream.seek(0, io.SEEK_END)
    stream.seek(start)
    is_archive = stream.read(len(_ZIP)) == _ZIP
    stream.seek(start)
    if not is_archive:
        return
    records_bytes = _records_bytes(stream)
    stream.seek(start)
    if records_bytes > _size_bytes_max(size_bytes):
        raise _too_large(name, size_bytes, records_bytes)


def _records_bytes(stream: BinaryIO) -> int:
    reader = PyTorchFileReader(stream)
    if hasattr(reader, "get_record_size"):
        return sum(map(reader.get_record_size, reader.get_all_records()))
    with zipfile.ZipFile(stream) as archive:  # torch before 2.13 does not report it
        return sum(record.file_size for record in archive.infolist())


def _size_bytes_max(size_bytes: int) -> int:
    return GROWTH_MAX * size_bytes + GROWTH_BYTES_MIN


def _size_bytes(value: Any, seen: set[int]) -> int:
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return 0 if value.is_sparse or value.is_nested else value.untyped_storage().nbytes()
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    if isinstance(value, dict):
        return sum(_size_bytes(item, seen) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return sum(_size_bytes(item, seen) for item in value)
    return 0


def _too_large(name: str, size_bytes: int, records_bytes: int | None = None) -> UnsafeCheckpointError:
    made = "much more" if records_bytes is None else f"{records_bytes} bytes"
    return UnsafeCheckpointError(
        f"{name} is refused: {made} would come of its {size_bytes} bytes",
        hint="It is damaged, or made to fill the memory: use another copy or an older step",
    )


def _missing_data_classes() -> list[Any]:
    """The classes that the user has not registered: ``safe_globals`` would remove them on exit."""
    registered = torch.serialization.get_safe_globals()
    return [kind for kind in _DATA_CLASSES if kind not in registered]


def _refusal_error(error: Exception, name: str) -> UnsafeCheckpointError:
    found = _UNSAFE_GLOBAL.search(str(error))
    if found is None:
        return UnsafeCheckpointError(
            f"{name} is refused: torch.load(weights_only=True) cannot read it "
            f"({type(error).__name__}: {_torch_message(error)})",
            hint="It is damaged, or holds more than data: use another copy or an older step. A checkpoint that you "
            "wrote yourself in a format of your own is read with trust_pickle=True",
        )
    wanted = found[1][:200]
    ways = "trust_pickle=True, which runs whatever code the checkpoint names"
    is_class = "." in wanted or isinstance(getattr(builtins, wanted, None), type)
    if is_class and "is blocked" not in str(error):  # torch does not register functions like ``eval``
        ways = f"torch.serialization.add_safe_globals([{wanted}]), or {ways}"
    return UnsafeCheckpointError(
        f"{name} is refused: it needs {wanted}, which is more than data",
        hint=f"If you wrote this checkpoint yourself: {ways}",
        wanted=wanted,
    )


def _torch_message(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line and "documentation" not in line]
    return lines[-1].partition(" In PyTorch 2.6")[0][:300] if lines else ""
