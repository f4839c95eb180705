"""An event loop on a thread of its own, for servers that blocking tests talk to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], timeout_seconds: float = 60.0) -> T:
    """Run ``work`` on the loop and return its result. Tasks that it starts continue afterwards."""
    return asyncio.run_coroutine_threadsafe(work, loop()).result(timeout_seconds)


@cache
def loop() -> asyncio.AbstractEventLoop:
    found = asyncio.new_event_loop()
    threading.Thread(target=found.run_forever, name="test-loop", daemon=True).start()
    return found
