"""Repairs damaged chunks of the node cache: fetches them again and writes over the bad bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ..errors import IntegrityError, ObjectNotFoundError, TierckptError
from ..stores.common import to_completion
from ..telemetry import logger
from ..types import Buffer, Tier
from .direct_write import write_at
from .partial_entry import same_digest
from .verifier import Checker

log = logger("cache")


async def mend(
    checker: Checker,
    get: Callable[[int, int, None], Awaitable[tuple[Buffer, str]]],
    store_uri: str,
    target: str,
    index: int,
    chunk: int,
) -> Buffer:
    """Return a chunk that is damaged on this node, or has gone from it, from the store; mend what is damaged.

    Args:
        get: returns a chunk from the store, and its digest.
        target: the directory of the entry, for people.

    Raises:
        IntegrityError: it is damaged here, and the store has no good one, or cannot be asked.
        StoreError: it has gone from here, and cannot be had.
    """
    frozen, digest = checker.frozen, checker.digest(index, chunk)
    item, at = frozen.files[index], frozen.chunk_range(index, chunk)
    if (index, chunk) not in checker.bad:
        log.warning("%s: %s has gone from the cache, reading past it", frozen.uri, target)
        return (await get(index, chunk, None))[0]
    try:
        data, found = await get(index, chunk, None)
        if digest and not same_digest(data, found, digest):
            raise IntegrityError("the store has other bytes there now", tier=Tier.SHARED)
    except TierckptError as error:
        raise IntegrityError(
            f"bytes {at.start}-{at.stop} of {item.path} are damaged in the node cache, "
            f"and the store has no good ones: {error.message}",
            hint=f"Load it again when {store_uri} can be reached, or fetch it anew: "
            f"`tierckpt cache evict {frozen.uri}`, then `tierckpt prefetch`",
            file=item.path,
            entry=target,
            tier=Tier.LOCAL,
        ) from error
    await to_completion(asyncio.to_thread(_put_back, checker, index, chunk, data))
    return data


def _put_back(checker: Checker, index: int, chunk: int, data: Buffer) -> None:
    """Write good bytes over bad ones, in place: whoever reads meanwhile verifies what he gets (V1 of
    cache/verifier.py).

    A crash in the middle leaves a chunk that is not good, as it was before.
    """
    frozen = checker.frozen
    path, start = frozen.files[index].path, frozen.chunk_range(index, chunk).start
    for directory in checker.directories():
        try:
            write_at(directory / path, data, start)
        except ObjectNotFoundError:
            continue  # it lies in the other one
        except TierckptError as error:
            log.warning("%s: cannot repair the damage in %s: %s", frozen.uri, directory, error)
            return
        checker.note_good(index, chunk)
        log.warning("%s: %s is mended in %s, from the store", frozen.uri, path, directory)
        return
