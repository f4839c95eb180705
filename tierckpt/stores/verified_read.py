"""Trying again, at the level where the bytes and their digests are known. Stores that have a network below them help.

What is counted, paid for and waited for is in stores/retry.py; a store without these verbs (a directory) is asked once:
what a disk gives back does not get better by asking again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..errors import IntegrityError
from ..telemetry import logger
from .base import Recoverable, Store

log = logger("retry")

T = TypeVar("T")

READS_MAX = 3
"""Times that damaged bytes are asked for before they count as damaged where they lie."""


async def again(store: Store, work: Callable[[], Awaitable[T]]) -> T:
    """Do ``work``, made of verbs of ``store``, again while it fails in a way that may pass. It must be idempotent."""
    return await store.again(work) if isinstance(store, Recoverable) else await work()


async def verified(store: Store, read: Callable[[], Awaitable[T]]) -> T:
    """Return what ``read`` gives, which asks ``store`` for bytes and checks them. Damaged: again, on a new connection.

    Raises:
        IntegrityError: damaged every time, so it is not the way but what lies there; or the retry budget is spent.
    Cost: nothing while the bytes are good; up to ``READS_MAX`` reads of what is damaged in the store.
    """
    for _ in range(READS_MAX - 1):
        try:
            return await read()
        except IntegrityError as damage:
            if not isinstance(store, Recoverable):
                raise
            log.warning("%s: a damaged answer, asking again on a new connection: %s", store.uri, damage.message)
            await store.reconnect(damage)
    return await read()


async def available(store: Store) -> bool:
    """Wait, as long as it takes, until ``store`` is up. False, at once, when nobody knows it to be down."""
    return await store.available() if isinstance(store, Recoverable) else False
