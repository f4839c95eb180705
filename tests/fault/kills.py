"""What scenarios share: to die at a point of the code, and to wait for other processes."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any


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
