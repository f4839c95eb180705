"""Shared storage that takes no uploads until a test says so."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tierckpt.drain.background_drains import BackgroundDrains
from tierckpt.drain.drainer import Drainer


def hold_drains(patched: pytest.MonkeyPatch) -> threading.Event:
    """Let each drain of this process wait until the returned event is set, and none send hard links."""
    go, real = threading.Event(), Drainer.send_files

    async def late(self: Drainer, *arguments: Any) -> Any:
        while not go.is_set():  # noqa: ASYNC110  # set by another thread
            await asyncio.sleep(0.02)
        return await real(self, *arguments)

    async def never(*_: Any) -> bool:
        return False

    patched.setattr(Drainer, "send_files", late)
    patched.setattr(BackgroundDrains, "send_linked", never)
    return go
