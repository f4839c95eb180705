"""A proxy in front of an object store that injects the configured faults and counts them.

Raw HTTP/1.1 over asyncio streams: a fault here is bytes on a real connection, seen by the real client below our store.
It runs on a thread of its own, so that a test that blocks does not stop it.

Each bucket has its own plan: one kind of fault, at a share of the requests. The share is kept exactly: of every
``1 / share`` requests that the kind can break, one is broken, at a place drawn from the seed. The head of a request
passes unchanged, Host included, so that servers that check signatures (Ceph RGW) accept it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


class Kind(enum.StrEnum):
    """What goes wrong. The first five can break any request, the next four a body on its way to the client."""

    SLOW_DOWN = "slow_down"  # 503 without asking the server
    SERVER_ERROR = "server_error"  # 500 without asking the server
    RESET = "reset"  # RST instead of an answer
    LOST_ANSWER = "lost_answer"  # the server did it, and the connection closes
    HANG = "hang"  # half of the body, of the request or of the answer, then silence
    DRIP = "drip"  # the body, of the request or of the answer, a few bytes a second
    TRUNCATED = "truncated"  # half of the announced body
    BIT_FLIP = "bit_flip"  # one bit of the body
    WRONG_OBJECT = "wrong_object"  # as many bytes of something else
    SHORT = "short"  # half of the body, and headers that agree with that


_NEEDS_BODY = {Kind.TRUNCATED, Kind.BIT_FLIP, Kind.WRONG_OBJECT, Kind.SHORT}
DRIP_BYTES = 512
DRIP_SECONDS = 0.1
HANG_SECONDS = 60.0
RECEIVE_BUFFER_BYTES = 64 * 1024
"""Small, so that a client that sends a large body feels how slowly it is read."""
RECENT_BODIES = 32


@dataclass
class Plan:
    """Faults for requests of one bucket, and their counts. ``share`` 0 passes all requests."""

    kind: Kind
    share: float = 0.0
    seed: int = 0
    only: Callable[[str, str], bool] = lambda verb, path: True
    """Which requests may be broken, by verb and path with query."""
    faults_max: int | None = None
    requests: int = 0
    eligible: int = 0
    fired: int = 0
    times: list[float] = field(default_factory=list)
    verbs: Counter[str] = field(default_factory=Counter)
    recent: list[bytes] = field(default_factory=list)
    broken: list[tuple[str, str, int]] = field(default_factory=list)
    """Verb, path and connection of each broken request."""
    after: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Connections of the requests, by verb and path."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._left = self._due = 0

    def is_due(self) -> bool:
        """True for a random one in every ``1 / share`` calls."""
        if self.share <= 0 or (self.faults_max is not None and self.fired >= self.faults_max):
            return False
        self.eligible += 1
        if self._left <= 0:
            self._left = max(1, round(1 / self.share))
            self._due = self.random.randrange(self._left)
        self._left -= 1
        return self._left == self._due


class FaultProxy:
    """``with FaultProxy(upstream).running() as endpoint``. Plans are by bucket; one without a plan passes untouched."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.removeprefix("http://").partition(":")
        self.host, self.port = host, int(port)
        self.plans: dict[str, Plan] = {}
        self.answer: Callable[[str, str, bytes], bytes | None] | None = None
        """For scenarios: given verb, path and head, an answer to give instead of the server's, or None."""
        self._connections = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        loop = asyncio.new_event_loop()
        ready = threading.Event()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        listener.bind(("127.0.0.1", 0))

        async def serve() -> None:
            server = await asyncio.start_server(self._serve, sock=listener, limit=RECEIVE_BUFFER_BYTES)
            loop.call_soon(ready.set)
            async with server:
                with contextlib.suppress(asyncio.CancelledError):
                    await server.serve_forever()

        main: list[asyncio.Task[None]] = []

        def run() -> None:
            main.append(loop.create_task(serve()))
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(main[0])
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left))
            loop.close()

        thread = threading.Thread(target=run, name="faultproxy", daemon=True)
        thread.start()
        ready.wait(60)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            loop.call_soon_threadsafe(main[0].cancel)
            thread.join(60)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        connection = self._connections
        try:
            while await self._one(reader, writer, connection):
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, asyncio.CancelledError):
            pass  # the client has left, or the test is over
        finally:
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> bool:
        """Serve one request. False when the connection ends with it."""
        head = await reader.readuntil(b"\r\n\r\n")
        verb, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        plan = self.plans.get(path.lstrip("/").partition("/")[0].partition("?")[0])
        fault = None
        if plan is not None:
            plan.requests += 1
            plan.verbs[verb] += 1
            plan.times.append(time.monotonic())
            plan.after.setdefault((verb, path), []).append(connection)
            if plan.kind not in _NEEDS_BODY and plan.only(verb, path) and plan.is_due():
                fault = self._fire(plan, verb, path, connection)
        body = await self._request_body(reader, head, fault)
        if self.answer is not None and (scripted := self.answer(verb, path, head)) is not None:
            writer.write(scripted)
            return True
        if fault is Kind.RESET:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if fault in {Kind.SLOW_DOWN, Kind.SERVER_ERROR}:
            writer.write(_error(fault, verb))
            return True
        answer_head, answer = await self._ask(head, body, verb)
        if fault is Kind.LOST_ANSWER:
            return False
        if plan is not None and plan.kind in _NEEDS_BODY and answer and _is_good(answer_head):
            if plan.only(verb, path) and plan.is_due():
                fault = self._fire(plan, verb, path, connection)
                answer_head, answer = _spoiled(plan, answer_head, answer)
            else:
                plan.recent = [*plan.recent[1 - RECENT_BODIES :], answer]
        return await _deliver(writer, answer_head, answer, fault, has_sent=bool(body))

    def _fire(self, plan: Plan, verb: str, path: str, connection: int) -> Kind:
        plan.fired += 1
        plan.broken.append((verb, path, connection))
        return plan.kind

    async def _request_body(self, reader: asyncio.StreamReader, head: bytes, fault: Kind | None) -> bytes:
        size = _length(head)
        if fault is Kind.HANG and size:
            await reader.readexactly(size // 2)
            await asyncio.sleep(HANG_SECONDS)
        body = b""
        while fault is Kind.DRIP and size - len(body) > DRIP_BYTES:  # a client gives up before the end of a large body
            body += await reader.readexactly(DRIP_BYTES)
            await asyncio.sleep(DRIP_SECONDS)
        return body + await reader.readexactly(size - len(body))

    async def _ask(self, head: bytes, body: bytes, verb: str) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head)[:-2] + b"Connection: close\r\n\r\n" + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if verb == "HEAD":
                return answer, b""
            if b"transfer-encoding: chunked" in answer.lower():
                data = await _chunks(reader)
                head_without = re.sub(rb"(?i)\r\ntransfer-encoding:[^\r]*", b"", answer)
                return head_without[:-2] + f"Content-Length: {len(data)}\r\n\r\n".encode(), data
            return answer, await reader.readexactly(_length(answer))
        finally:
            writer.close()


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while size := int(await reader.readline(), 16):
        data += await reader.readexactly(size)
        await reader.readline()
    return data


async def _deliver(
    writer: asyncio.StreamWriter, head: bytes, body: bytes, fault: Kind | None, *, has_sent: bool
) -> bool:
    head = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head)
    if fault is Kind.HANG:
        writer.write((head + body[: len(body) // 2]) if body else b"")
        await writer.drain()
        await asyncio.sleep(HANG_SECONDS)
        return False
    if fault is Kind.DRIP and not has_sent:
        writer.write(head)
        for start in range(0, len(body), DRIP_BYTES):
            writer.write(body[start : start + DRIP_BYTES])
            await writer.drain()
            await asyncio.sleep(DRIP_SECONDS)
        return True
    writer.write(head + body)
    await writer.drain()
    return fault is not Kind.TRUNCATED


def _spoiled(plan: Plan, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    if plan.kind is Kind.BIT_FLIP:
        flipped = bytearray(body)
        flipped[plan.random.randrange(len(body))] ^= 1 << plan.random.randrange(8)
        return head, bytes(flipped)
    if plan.kind is Kind.WRONG_OBJECT:
        return head, _others(plan, body)
    half = body[: len(body) // 2]
    if plan.kind is Kind.SHORT:
        head = re.sub(rb"(?i)\r\ncontent-length:[^\r]*", f"\r\nContent-Length: {len(half)}".encode(), head)
    return head, half


def _others(plan: Plan, body: bytes) -> bytes:
    """As many bytes of another answer of this bucket, or of nothing at all when there was none as long."""
    longer = [other for other in plan.recent if len(other) >= len(body) and other[: len(body)] != body]
    return plan.random.choice(longer)[: len(body)] if longer else plan.random.randbytes(len(body))


def _error(kind: Kind, verb: str) -> bytes:
    status, code = ("503 Service Unavailable", "SlowDown") if kind is Kind.SLOW_DOWN else ("500 Oops", "InternalError")
    return scripted(status, code, verb)


def scripted(status: str, code: str, verb: str) -> bytes:
    """An S3 error as bytes."""
    body = b"" if verb == "HEAD" else f"<Error><Code>{code}</Code></Error>".encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _length(head: bytes) -> int:
    match = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return int(match[1]) if match else 0


def _is_good(head: bytes) -> bool:
    return head.split(b" ", 2)[1] in {b"200", b"206"}
