"""Time that passes only when no task can run: exact deadlines and pauses of an event loop, on a busy machine too."""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Any

import pytest


class VirtualTime:
    """``time.monotonic`` and the running loop: where the loop would sleep, the clock jumps to the next timer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        selector: selectors.BaseSelector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        select = selector.select

        def jump(timeout: float | None = None) -> list[Any]:
            ready = select(None if timeout is None else 0)
            if not ready and timeout:
                self.now += timeout
            return ready

        monkeypatch.setattr(selector, "select", jump)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
