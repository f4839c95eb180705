"""What closing a Checkpointer waits for, in words, and waiting no longer than was said."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from ..config import Settings
from ..format.layout import Location, step_name
from .job import SaveRecord

T = TypeVar("T")

NAMES_SHOWN = 4


def describe_wait(
    location: Location, settings: Settings, saving: int, stats: Sequence[SaveRecord], deadline: float
) -> str:
    """What is waited for, how long, and how to stop. ``saving``: saves that are not on the local tier yet."""
    if saving:
        return f"closing: {saving} save(s) of {location.uri} are on their way to the SSD"
    records = [record for record in stats if not record.error and record.is_sent]
    names = [step_name(record.step) for record in records if record.shared_commit_seconds is None]
    shown = f"{', '.join(names[-NAMES_SHOWN:])}{' and others' if len(names) > NAMES_SHOWN else ''}"
    return (
        f"closing: waiting for {shown or 'retention'} to reach {location.uri}, "
        f"{max(0.0, deadline - time.monotonic()):.0f} of {settings.exit_timeout_seconds:g} s left "
        "(exit_timeout_seconds). Ctrl-C stops: what is left stays on this node, `tierckpt drain --wait` finishes it"
    )


async def until(deadline: float | None, work: Awaitable[T]) -> T:
    """Await ``work``, no longer than ``deadline`` (monotonic). Raises TimeoutError."""
    async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
        return await work
