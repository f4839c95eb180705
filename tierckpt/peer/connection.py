"""One connection to a peer: bytes are received where they are to be, and never more than were announced and allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from .messages import HEAD_BYTES_MAX, Answer, WireError, parse_answer

_END = b"\r\n\r\n"


class Stale(Exception):
    """The connection was closed before a byte of the answer came."""


class Link(asyncio.BufferedProtocol):
    """One request at a time: ``ask``, then ``changed`` until ``is_done``, then ``result`` and ``rest``; or ``abort``.

    Whatever goes wrong ends it: a connection on which something odd has come is not used again.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(HEAD_BYTES_MAX)
        self._held = 0
        self._into: memoryview | None = None
        self._target: memoryview | None = None
        self._judge: Callable[[Answer], int] | None = None
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        self._is_open = False
        self._waiter: asyncio.Future[None] | None = None
        self.done_bytes = 0

    # --- asking --------------------------------------------------------------------------------------------------

    def ask(self, request: bytes, into: memoryview | None, judge: Callable[[Answer], int]) -> None:
        """Send a request. ``judge`` says how long the body of an answer may be, or raises. Raises Stale."""
        if not self.is_usable() or self._transport is None:
            raise Stale("the peer has closed the connection")
        self._held, self.done_bytes, self._into, self._judge = 0, 0, into, judge
        self._answer = self._target = self._error = None
        self._transport.write(request)

    @property
    def has_head(self) -> bool:
        return self._answer is not None

    def is_done(self) -> bool:
        if self._error is not None:
            return True
        return self._answer is not None and self.done_bytes == self._answer.length

    async def changed(self, timeout_seconds: float) -> None:
        """Return when the head has come, when all has come or failed, or after a while."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait_for(self._waiter, timeout_seconds)
        except TimeoutError:
            pass
        finally:
            self._waiter = None

    def result(self) -> tuple[Answer, memoryview]:
        """The answer and its body. Raises what went wrong."""
        if self._error is not None:
            raise self._error
        if self._answer is None:
            raise WireError("no answer")
        return self._answer, self._target if self._target is not None else memoryview(b"")

    def rest(self) -> None:
        """Be idle: whatever comes now ends the connection."""
        self._into = self._target = self._judge = None

    def is_usable(self) -> bool:
        return self._is_open and self._error is None

    def abort(self) -> None:
        """End the connection now. Nothing is written to the caller's memory after this."""
        self._into = self._target = self._judge = None
        self._is_open = False
        if self._transport is not None:
            self._transport.abort()

    # --- what the event loop calls -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._is_open = True

    def get_buffer(self, sizehint: int) -> Any:
        if self._target is not None and self.done_bytes < len(self._target):
            return self._target[self.done_bytes :]
        if self._answer is None and self._held < len(self._buffer):
            return memoryview(self._buffer)[self._held :]
        return bytearray(1)  # nothing may come now: one byte is enough to see that something does

    def buffer_updated(self, count: int) -> None:
        if self._judge is None or self.is_done():
            self._fail(WireError("more comes than was asked for"))
        elif self._answer is not None:
            self.done_bytes += count
            if self.is_done():
                self._wake()
        else:
            self._take_head(count)

    def _take_head(self, count: int) -> None:
        look_from = max(0, self._held - len(_END) + 1)
        self._held += count
        end = self._buffer.find(_END, look_from, self._held)
        if end < 0:
            if self._held == len(self._buffer):
                self._fail(WireError("the head of the answer has no end"))
            return
        end += len(_END)
        try:
            self._begin_body(parse_answer(bytes(self._buffer[:end])), self._held - end, end)
        except Exception as error:
            self._fail(error)
        self._wake()

    def _begin_body(self, answer: Answer, have: int, end: int) -> None:
        length = self._judge(answer) if self._judge is not None else 0
        if have > length:
            raise WireError("more comes than was announced")
        if answer.status == 200 and self._into is not None:
            self._target = self._into
        else:
            self._target = memoryview(bytearray(length))
        self._target[:have] = memoryview(self._buffer)[end : end + have]
        self._answer, self.done_bytes = answer, have

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._is_open = False
        if self._judge is None or self.is_done():
            return
        if self._answer is None and not self._held:
            self._fail(Stale(f"the connection was closed: {type(error).__name__ if error else 'end of stream'}"))
        else:
            self._fail(WireError(f"the answer ended early, after {self.done_bytes} bytes of its body"))

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._into = self._target = None
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
