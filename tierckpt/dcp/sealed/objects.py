"""Items of a checkpoint, loaded as data. What torch pickles can run code; here everything is read ``weights_only``.

Invariants (tests cite them):
    S7  No item is unpickled by anything but ``torch.load(weights_only=True)`` before it was written anew.
    S8  The bytes a planner gets for an object were made here from data that passed S7, and pass it too. So it does not
        matter that planners load them with ``weights_only=False``, nor whether two readers of torch's formats agree
        about the bytes of the file: no planner ever sees those.
"""

from __future__ import annotations

import builtins
import io
import re
import threading
from typing import Any, BinaryIO

import torch

from ...errors import TierckptError, UnsafeCheckpointError

SMALL_BYTES = 4096
KNOWN_MAX = 4096

_DATA_CLASSES = (io.BytesIO,)
"""Mere data that torch does not know as such. Trainers have long put their counters into a BytesIO."""

_WANTED = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)")
_lock = threading.Lock()


class Objects:
    """Turns the bytes of objects into bytes that are safe to unpickle.

    Remembers small ones: the options of an optimizer are the same few numbers for thousands of parameters.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}

    def inert(self, data: bytes, name: str) -> bytes:
        """Return bytes of the same object that any ``torch.load`` reads without running code (S8).

        Args:
            data: the bytes of an item that is no tensor.
            name: what errors call it.

        Raises:
            UnsafeCheckpointError: it holds more than data, or is not what ``torch.save`` writes.
        Cost: some 0.4 ms for what is small and new, nothing for what is small and known, else three passes.
        """
        known = self._known.get(data)
        if known is not None:
            return known
        stream = io.BytesIO()
        value = _load_object(data, name)
        try:
            torch.save(value, stream)
        except Exception as error:
            raise UnsafeCheckpointError(
                f"{name} is refused: it cannot be written anew ({type(error).__name__}: {error})"
            ) from error
        made = stream.getvalue()
        _load_object(made, name)
        if len(data) <= SMALL_BYTES and len(self._known) < KNOWN_MAX:
            self._known[data] = made
        return made


def load_tensor(stream: Any, name: str) -> torch.Tensor:
    """Return the tensor in ``stream``, on the CPU. Raises UnsafeCheckpointError when it is no tensor, or more."""
    value = _load(stream, "cpu", name)
    if not isinstance(value, torch.Tensor):
        raise UnsafeCheckpointError(f"{name} is refused: a {type(value).__name__} stands where a tensor belongs")
    return value


def _load_object(data: bytes, name: str) -> Any:
    with _lock, torch.serialization.safe_globals(_missing_data_classes()):
        return _load(io.BytesIO(data), None, name)


def _load(stream: BinaryIO, map_location: str | None, name: str) -> Any:
    """``torch.load(weights_only=True)``, with one kind of error. What reading ``stream`` raised of ours stays as it is.

    Said explicitly, ``weights_only`` is not overridden by any environment variable of torch.
    """
    try:
        return torch.load(stream, map_location=map_location, weights_only=True, mmap=False)
    except TierckptError:
        raise
    except Exception as error:
        raise _refused(error, name) from None


def _missing_data_classes() -> list[Any]:
    """Those that the user has not registered: leaving ``safe_globals`` would take them away again."""
    registered = torch.serialization.get_safe_globals()
    return [kind for kind in _DATA_CLASSES if kind not in registered]


def _refused(error: Exception, name: str) -> UnsafeCheckpointError:
    found = _WANTED.search(str(error))
    if found is None:
        return UnsafeCheckpointError(
            f"{name} is refused: torch.load(weights_only=True) cannot read it ({type(error).__name__}: {_gist(error)})",
            hint="It is damaged or made to do harm, unless you wrote it yourself in a format of your own: "
            "then read it with trust_pickle=True",
        )
    wanted = found[1][:200]
    ways = "trust_pickle=True, which runs whatever code the checkpoint names"
    if _is_class(wanted, str(error)):
        ways = f"torch.serialization.add_safe_globals([{wanted}]), or {ways}"
    return UnsafeCheckpointError(
        f"{name} is refused: it needs {wanted}, which is more than data",
        hint=f"If you wrote this checkpoint yourself: {ways}",
        wanted=wanted,
    )


def _gist(error: Exception) -> str:
    """What torch says, without its advice to load the file unsafely."""
    lines = [line for line in str(error).splitlines() if line and "documentation" not in line]
    return lines[-1].partition(" In PyTorch 2.6")[0][:300] if lines else ""


def _is_class(wanted: str, message: str) -> bool:
    """May this be advised to be registered? Not what torch never registers, and no function like ``eval``."""
    if "is blocked" in message:
        return False
    return "." in wanted or isinstance(getattr(builtins, wanted, None), type)
