"""Direct put: sends shards from staging memory to the store, bypassing the SSD.

T1  A rank's results name its shards only when all are durable on the shared tier, with digests of the bytes that
    were sent. So a commit on either tier names readable files.
T2  A shard that cannot be put goes to the SSD instead, and vice versa. If neither tier takes it, the save fails;
    objects that remain have names that no commit knows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from ..arena.memory import Memory
from ..drain.rate_limiter import DrainFlow
from ..format.manifest import Flushed
from ..stores.base import Store, to_completion
from ..stores.verified_read import again
from ..telemetry import BYTES
from ..types import Buffer, Tier
from .flush import Stream
from .shard_plan import Shard


async def send(
    store: Store, shards: Sequence[Shard], slot: Memory, chunk_size_bytes: int, flow: DrainFlow
) -> list[Flushed]:
    """Put ``shards`` into ``store``, durably. Raises TierckptError if one cannot be put; earlier ones are stored."""
    return [await send_shard(store, shard, slot, chunk_size_bytes, flow) for shard in shards]


async def send_shard(store: Store, shard: Shard, slot: Memory, chunk_size_bytes: int, flow: DrainFlow) -> Flushed:
    async def attempt() -> Flushed:
        stream = Stream(shard, slot, chunk_size_bytes)
        await store.put_stream(shard.path.name, _pieces(stream, flow), shard.size_bytes)
        return stream.flushed()

    return await again(store, attempt)


async def _pieces(stream: Stream, flow: DrainFlow) -> AsyncIterator[Buffer]:
    pieces = stream.pieces()
    while piece := await to_completion(flow.limiter.in_background(lambda: bytes(next(pieces, b"")))):
        await flow.spend(len(piece))
        yield piece
        BYTES.emit(len(piece), tier=Tier.SHARED, direction="written")
