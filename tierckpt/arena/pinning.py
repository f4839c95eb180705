"""Page-locks staging memory for faster, asynchronous copies from the GPU. Optional."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from ..telemetry import logger
from .memory import Memory

log = logger("arena")

_PORTABLE = 1  # for every CUDA context of this process
_pinned: dict[int, int] = {}  # by address, the process that pinned it


def pin(memory: Memory) -> bool:
    """Register ``memory`` with CUDA until it is closed. False without CUDA, or if it refuses (logged)."""
    if _is_pinned(memory):
        return True
    runtime = cuda_runtime()
    if runtime is None:
        return False
    if not _call("cudaHostRegister", lambda: runtime.cudaHostRegister(memory.address, memory.size_bytes, _PORTABLE)):
        forget_error()
        return False
    _pinned[memory.address] = os.getpid()
    memory.before_close(functools.partial(_unregister, memory.address))
    return True


def _unregister(address: int) -> bool:
    if _pinned.pop(address, None) != os.getpid():
        return False  # not pinned, or the registration is the parent's
    runtime = cuda_runtime()
    return runtime is not None and _call("cudaHostUnregister", lambda: runtime.cudaHostUnregister(address))


def _is_pinned(memory: Memory) -> bool:
    return _pinned.get(memory.address) == os.getpid()


def cuda_runtime() -> Any:
    """A process without torch has nothing on a GPU to copy."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    try:
        return torch.cuda.cudart()
    except Exception as error:
        log.warning("staging memory stays unpinned: %s", error)
        return None


def forget_error() -> None:
    """Clear CUDA's last error: the trainer's next kernel would report it as its own."""
    torch = sys.modules["torch"]
    try:
        torch.ones(1, device="cuda")
    except RuntimeError:
        pass


def _call(what: str, function: Any) -> bool:
    try:
        result = int(function())
    except Exception as error:
        log.warning("%s failed, staging memory stays as it is: %s", what, error)
        return False
    if result != 0:
        log.warning("%s failed with CUDA error %d, staging memory stays as it is", what, result)
    return result == 0
