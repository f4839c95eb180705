"""A link that several transfers share fairly: what one does not use is the others'."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import simpy


@dataclass(eq=False, slots=True)
class Flow:
    """One transfer. ``done`` happens when its last byte has passed."""

    left: float
    cap: float
    done: simpy.Event
    rate: float = 0.0


class Pipe:
    """A fluid model: between two changes every transfer has a constant rate, max-min fair with a cap of its own.

    Cost: two events of the simulation for each transfer, whatever its size.
    """

    def __init__(self, env: simpy.Environment, bytes_per_second: float) -> None:
        self._env = env
        self._capacity = bytes_per_second
        self._flows: list[Flow] = []
        self._at = 0.0
        self._turn = 0

    def send(self, size_bytes: float, cap_bytes_per_second: float = math.inf) -> Flow:
        self._pass()
        flow = Flow(size_bytes, cap_bytes_per_second, self._env.event())
        self._flows.append(flow)
        self._share()
        return flow

    def cancel(self, flow: Flow) -> None:
        if flow in self._flows:
            self._pass()
            self._flows.remove(flow)
            self._share()

    def set_capacity(self, bytes_per_second: float) -> None:
        """From now on. Zero: an outage; transfers wait and go on."""
        self._pass()
        self._capacity = bytes_per_second
        self._share()

    def _pass(self) -> None:
        """Move the bytes since the last change."""
        elapsed, self._at = self._env.now - self._at, self._env.now
        for flow in self._flows:
            flow.left -= flow.rate * elapsed

    def _share(self) -> None:
        left = self._capacity
        for place, flow in enumerate(sorted(self._flows, key=lambda flow: flow.cap)):
            flow.rate = min(flow.cap, left / (len(self._flows) - place))
            left -= flow.rate
        self._turn += 1
        first = min((flow.left / flow.rate for flow in self._flows if flow.rate > 0), default=math.inf)
        if math.isfinite(first):
            turn = self._turn
            alarm = self._env.timeout(max(0.0, first))
            alarm.callbacks.append(lambda _: self._finish(turn))

    def _finish(self, turn: int) -> None:
        if turn != self._turn:
            return  # something changed since this was expected
        self._pass()
        for flow in _finished(self._flows):
            self._flows.remove(flow)
            flow.done.succeed()
        self._share()


def _finished(flows: Iterable[Flow]) -> list[Flow]:
    """Those with less left than passes in a microsecond: the rest is rounding."""
    return [flow for flow in flows if flow.left <= flow.rate * 1e-6]
