"""What scenarios share: kills at a point of the code, waits for other processes, and large states."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def die(*_: Any, **__: Any) -> None:
    """End this process by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the function ``owner.name`` by ``make(function)``."""
    setattr(owner, name, make(getattr(owner, name)))


def before(owner: Any, name: str, act: Callable[..., Any] = die) -> None:
    """Call ``act`` with the arguments of each call of ``owner.name``, before the call."""

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            act(*args)
            return real(*args, **kwargs)

        return call

    replace(owner, name, make)


def after(owner: Any, name: str, act: Callable[[], Any] = die) -> None:
    """Call ``act`` after each call of ``owner.name``; if that returns a future of torch, when it is done."""

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            value = real(*args, **kwargs)
            if hasattr(value, "wait") and act is die:
                value.wait()
            act()
            return value

        return call

    replace(owner, name, make)


def until(is_true: Callable[[], Any], timeout_seconds: float = 60.0) -> None:
    """Wait until ``is_true()`` is. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_seconds
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_seconds:g} s for another process")
        time.sleep(0.002)


def of_each_rank(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def counted_state(tensors: int, elements: int, factor: int = 1) -> dict[str, Any]:
    """A state of integers in which each tensor and each ``factor`` has other values."""
    return {str(index): torch.arange(elements, dtype=torch.int32) * factor + index for index in range(tensors)}
