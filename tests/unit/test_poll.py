"""One poll loop: it looks at once, ever more rarely, and for the last time at the deadline."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tierckpt import poll as polls
from tierckpt.poll import GROWTH, Pauses, Poll


class Clock:
    """Stands for ``time`` and ``asyncio``: a sleep passes at once and is noted."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> Any:
        self.now += seconds
        self.slept.append(seconds)
        return asyncio.sleep(0) if asyncio._get_running_loop() else None


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(polls, "time", made)
    monkeypatch.setattr(polls, "asyncio", made)
    return made


def test_the_first_look_is_at_once_and_the_last_at_the_deadline(clock: Clock) -> None:
    looks = [clock.now for _ in Poll(10.0, Pauses(1.0, 3.0))]
    assert looks == [100.0, 101.0, 102.5, 104.75, 107.75, 110.0]
    assert clock.slept == [1.0, GROWTH, GROWTH**2, 3.0, 2.25]


@pytest.mark.parametrize("timeout_seconds", [0.0, -1.0])
def test_without_time_there_is_one_look(clock: Clock, timeout_seconds: float) -> None:
    assert len(list(Poll(timeout_seconds))) == 1
    assert not clock.slept


def test_a_pause_by_hand_says_when_the_time_is_up(clock: Clock) -> None:
    poll = Poll(1.5, Pauses(1.0, 1.0))
    assert [poll.pause() for _ in range(3)] == [True, True, False]
    assert clock.slept == [1.0, 0.5]


def test_coroutines_wait_the_same_way(clock: Clock) -> None:
    async def looks() -> list[float]:
        return [clock.now async for _ in Poll(4.0, Pauses(1.0, 3.0))]

    assert asyncio.run(looks()) == [100.0, 101.0, 102.5, 104.0]
