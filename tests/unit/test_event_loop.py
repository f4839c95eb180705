"""The end of a loop, and Ctrl-C where the main thread cannot know yet whether its call has begun on the loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tierckpt.event_loop import LoopThread
from tierckpt.stores.base import acquired, to_completion

SECONDS = 30.0


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[LoopThread]:
    made = LoopThread(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("state", ["queued", "executing", "waiting", "started"])
def test_an_interrupt_ends_a_call_not_started_work(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    begun, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()
    request = asyncio.run_coroutine_threadsafe

    async def work() -> None:
        begun.set()
        if state in ("executing", "started"):
            may_go_on.wait(SECONDS)
        try:
            await asyncio.sleep(SECONDS)
        finally:
            ended.set()

    def interrupted(call: Any, on: asyncio.AbstractEventLoop) -> Any:
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", request)
        request(call, on)
        assert state == "queued" or begun.wait(SECONDS)
        if state != "started":
            threading.Timer(0.05, may_go_on.set).start()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        (loop.start if state == "started" else loop.run)(work())
    if state == "started":
        may_go_on.set()
        loop.close()
        assert ended.is_set()
        return
    assert ended.is_set() == begun.is_set()
    assert loop.run(asyncio.sleep(0, "next")) == "next"


def test_an_interrupted_constructor_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, may_end = asyncio.new_event_loop, threading.Event()

    def interrupting() -> asyncio.AbstractEventLoop:
        assert threading.current_thread() is not threading.main_thread(), "half a loop is left by Ctrl-C"
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert may_end.wait(SECONDS)
        return make()

    monkeypatch.setattr(asyncio, "new_event_loop", interrupting)
    others = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        LoopThread(tmp_path)
    may_end.set()
    for thread in set(threading.enumerate()) - others:
        thread.join(SECONDS)
        assert not thread.is_alive()


def close_at_work(loop: LoopThread, call: Callable[[Callable[[], None]], Coroutine[Any, Any, None]]) -> list[str]:
    """Close the loop while ``call`` waits for its work on a thread. Return the events."""
    begun, may_go_on, seen = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        may_go_on.wait(SECONDS)
        seen.append("worked")

    async def called() -> None:
        try:
            await call(work)
        finally:
            seen.append("ended")

    loop.start(called())
    assert begun.wait(SECONDS)
    closing = threading.Thread(target=loop.close)
    closing.start()
    closing.join(0.2)
    may_go_on.set()
    closing.join(SECONDS)
    return seen


def test_a_closing_loop_waits_for_a_write_before_its_file_is_closed(loop: LoopThread) -> None:
    assert close_at_work(loop, lambda write: to_completion(asyncio.to_thread(write))) == ["worked", "ended"]


def test_a_closing_loop_closes_a_file_that_a_thread_opens(loop: LoopThread) -> None:
    closed = threading.Event()
    seen = close_at_work(loop, lambda open_: acquired(asyncio.to_thread(open_), lambda _: closed.set()))
    assert seen == ["ended", "worked"] and closed.is_set()
