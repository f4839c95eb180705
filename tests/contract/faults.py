"""A store that fails on demand, around any other: scripted faults for one test, seeded random ones for many."""

from __future__ import annotations

import asyncio
import builtins
import enum
import fnmatch
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from tierckpt.errors import StoreUnavailableError, TierckptError
from tierckpt.stores.base import Conditional, Store
from tierckpt.types import Buffer, ByteRange, ObjectInfo

T = TypeVar("T")


class Kind(enum.StrEnum):
    """What goes wrong."""

    UNAVAILABLE = "unavailable"  # the verb fails and nothing happened
    LOST_ANSWER = "lost_answer"  # the verb happened, and fails
    TRUNCATE = "truncate"  # a read comes back short, which the protocol forbids: callers must notice
    CORRUPT = "corrupt"  # a read comes back with one bit flipped
    DELAY = "delay"  # the verb takes longer
    CUT = "cut"  # put_stream fails after ``after_bytes``


_READS = {"get", "get_range"}
_POSSIBLE = {Kind.TRUNCATE: _READS, Kind.CORRUPT: _READS, Kind.CUT: {"put_stream"}}
VERBS = (
    *("head", "get", "get_range", "put", "put_stream", "replace", "remove"),
    *("link", "list", "list_dirs", "delete", "delete_dir"),
)


@dataclass(slots=True)
class Fault:
    """One line of a script: the next ``times`` calls of ``verb`` on keys like ``key`` (a glob) fail as ``kind``."""

    verb: str
    kind: Kind = Kind.UNAVAILABLE
    key: str = "*"
    times: int = 1
    skip: int = 0
    after_bytes: int = 0
    delay_seconds: float = 0.01
    error: TierckptError | None = None

    def __post_init__(self) -> None:
        self.kind = Kind(self.kind)
        if self.verb not in VERBS or self.verb not in _POSSIBLE.get(self.kind, VERBS):
            raise ValueError(f"{self.verb!r} cannot fail as {self.kind.value!r}")

    def due(self, verb: str, key: str) -> bool:
        """True when this call is to fail. Counts the call."""
        if verb != self.verb or self.times <= 0 or not fnmatch.fnmatchcase(key, self.key):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class FaultyStore:
    """``inner`` with faults. ``fired`` counts them as ``"verb:kind"``, so that a test can tell it tested something.

    As behind a network, a damaged answer may be requested again: ``fired["reconnect"]`` counts that. Verbs are not
    retried, so that each fault is visible.

    ``script`` is consulted first, in order. ``probabilities`` maps ``"verb:kind"``, or ``"verb"`` for UNAVAILABLE, to a
    chance per call; the same ``seed`` and the same calls give the same faults.
    """

    def __init__(
        self,
        inner: Store,
        script: Sequence[Fault] = (),
        *,
        probabilities: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.has_put_if_absent = inner.has_put_if_absent
        self.script = [*script]
        self.fired: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._chances = [(_random_fault(name), chance) for name, chance in (probabilities or {}).items()]

    def _draw(self, verb: str, key: str) -> Fault | None:
        fault = next((fault for fault in self.script if fault.due(verb, key)), None)
        if fault is None:
            for candidate, chance in self._chances:
                if candidate.verb == verb and self._random.random() < chance:
                    fault = candidate
                    break
        if fault is not None:
            self.fired[f"{verb}:{fault.kind.value}"] += 1
        return fault

    async def _before(self, verb: str, key: str) -> Fault | None:
        fault = self._draw(verb, key)
        if fault is not None and fault.kind is Kind.UNAVAILABLE:
            raise _error(fault, verb, key)
        if fault is not None and fault.kind is Kind.DELAY:
            await asyncio.sleep(fault.delay_seconds)
        return fault

    def _after(self, fault: Fault | None, verb: str, key: str) -> None:
        if fault is not None and fault.kind is Kind.LOST_ANSWER:
            raise _error(fault, verb, key)

    def _spoil(self, fault: Fault | None, data: Buffer) -> Buffer:
        if fault is None or not len(data):
            return data
        if fault.kind is Kind.TRUNCATE:
            return memoryview(data)[: self._random.randrange(len(data))]
        if fault.kind is Kind.CORRUPT:
            spoiled = bytearray(data)
            spoiled[self._random.randrange(len(spoiled))] ^= 1 << self._random.randrange(8)
            return spoiled
        return data

    async def head(self, key: str) -> ObjectInfo:
        fault = await self._before("head", key)
        info = await self.inner.head(key)
        self._after(fault, "head", key)
        return info

    async def get(self, key: str) -> bytes:
        fault = await self._before("get", key)
        data = await self.inner.get(key)
        self._after(fault, "get", key)
        return bytes(self._spoil(fault, data))

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        fault = await self._before("get_range", key)
        data = await self.inner.get_range(key, byte_range, if_match=if_match)
        self._after(fault, "get_range", key)
        return self._spoil(fault, data)

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        fault = await self._before("put", key)
        await self.inner.put(key, data, if_absent=if_absent)
        self._after(fault, "put", key)

    async def put_stream(self, key: str, pieces: AsyncIterator[Buffer], size_bytes: int) -> None:
        fault = await self._before("put_stream", key)
        if fault is not None and fault.kind is Kind.CUT:
            pieces = _cut(pieces, fault, key)
        await self.inner.put_stream(key, pieces, size_bytes)
        self._after(fault, "put_stream", key)

    async def replace(self, key: str, data: Buffer, *, etag: str) -> None:
        fault = await self._before("replace", key)
        await cast(Conditional, self.inner).replace(key, data, etag=etag)
        self._after(fault, "replace", key)

    async def remove(self, key: str, *, etag: str) -> None:
        fault = await self._before("remove", key)
        await cast(Conditional, self.inner).remove(key, etag=etag)
        self._after(fault, "remove", key)

    async def link(self, key: str, source: Path) -> bool:
        fault = await self._before("link", key)
        linked = await self.inner.link(key, source)
        self._after(fault, "link", key)
        return linked

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        fault = await self._before("list", prefix)
        async for info in self.inner.list(prefix):
            yield info
        self._after(fault, "list", prefix)

    async def list_dirs(self, prefix: str = "") -> builtins.list[str]:
        fault = await self._before("list_dirs", prefix)
        names = await self.inner.list_dirs(prefix)
        self._after(fault, "list_dirs", prefix)
        return names

    async def list_level(self, prefix: str = "") -> tuple[builtins.list[ObjectInfo], builtins.list[str]] | None:
        fault = await self._before("list_level", prefix)
        found = await self.inner.list_level(prefix)
        self._after(fault, "list_level", prefix)
        return found

    async def delete(self, key: str) -> None:
        fault = await self._before("delete", key)
        await self.inner.delete(key)
        self._after(fault, "delete", key)

    async def delete_dir(self, prefix: str) -> None:
        fault = await self._before("delete_dir", prefix)
        await self.inner.delete_dir(prefix)
        self._after(fault, "delete_dir", prefix)

    async def again(self, work: Callable[[], Awaitable[T]]) -> T:
        return await work()

    async def reconnect(self, damage: TierckptError) -> None:
        self.fired["reconnect"] += 1

    async def available(self) -> bool:
        return False

    def probe_soon(self) -> None:
        self.fired["probe_soon"] += 1

    async def close(self) -> None:
        await self.inner.close()


def _random_fault(name: str) -> Fault:
    verb, _, kind = name.partition(":")
    return Fault(verb, Kind(kind or Kind.UNAVAILABLE))


def _error(fault: Fault, verb: str, key: str) -> TierckptError:
    return fault.error or StoreUnavailableError(f"injected: {verb} of {key!r} failed", hint="This is a test")


async def _cut(pieces: AsyncIterator[Buffer], fault: Fault, key: str) -> AsyncIterator[Buffer]:
    """Yield the first ``fault.after_bytes``, then fail as a connection does; the store under test aborts."""
    left = fault.after_bytes
    try:
        async for piece in pieces:
            if len(piece) > left:
                yield memoryview(piece)[:left]
                raise _error(fault, "put_stream", key)
            left -= len(piece)
            yield piece
        raise _error(fault, "put_stream", key)
    finally:
        aclose = getattr(pieces, "aclose", None)
        if aclose is not None:
            await aclose()
