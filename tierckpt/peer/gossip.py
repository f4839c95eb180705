"""Gossip: asks a few members twice a second for their list of members (membership.py).

A node asks at most ``members.ASKED`` live members, a few suspects, one of the dead and a few new places in a round,
however many there are, and each answer is bounded: a few requests per second, and what they hold.

Invariants:
    S1  It never raises and never blocks the loop: a round begins when its time has come, whether or not those asked
        in the one before have answered. Nobody is asked twice at a time.
    S2  A place that does not answer is asked less and less often, down to once in ``SEED_SECONDS_MAX``.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from ..errors import PermissionDeniedError
from ..telemetry import logger
from ..types import Json
from .membership import Member, Table

log = logger("peer")

LOOKUP_SECONDS = 15.0
"""How often the places to ask are looked up again; four times as often while nobody is known."""
SEED_SECONDS_MAX = 8.0
GOODBYES_MAX = 16
GOODBYE_SECONDS = 0.5


class Ask(Protocol):
    """Ask the agent at an address for its members, telling it who asks: ``{"me": row, "members": [row, ...]}``."""

    def __call__(self, address: str, me: Json, /) -> Awaitable[Json]: ...


class Gossip:
    """Keeps ``table`` true for as long as ``run`` runs.

    Args:
        ask: how to ask one agent. Whatever it raises means no answer.
        look_up: the places to ask first, as they are now (``hosts.Lookup.addresses``).
    """

    def __init__(
        self,
        table: Table,
        ask: Ask,
        look_up: Callable[[], Awaitable[Sequence[str]]],
        rng: random.Random | None = None,
    ) -> None:
        self.table = table
        self.seeds: list[str] = []
        self._refusals: dict[str, str] = {}
        """Why nodes did not take us for a member, by address, until they do."""
        self._names: dict[str, str] = {}
        """The members that have answered, by the address they were asked at."""
        self._ask, self._look_up = ask, look_up
        self._rng = rng or random.Random()
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._mute: dict[str, tuple[int, float]] = {}
        """Places that did not answer: how often in a row, and when to ask again."""
        self._looked_up_at: float | None = None
        self._looking_up: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    @property
    def me(self) -> Member:
        return self.table.me

    # --- the server's side ---------------------------------------------------------------------------------------

    def answer(self, asker: Any = None) -> Json:
        """What ``/v1/members`` answers. ``asker``: the row of who asks, as it came; it says where to ask back."""
        if asker is not None:
            self.table.hear(asker)
        return self.table.answer(self._rng)

    def asked(self, name: str) -> None:
        """A member has asked this node's server for something."""
        self.table.asked(name)

    # --- the task ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ask, round after round, until cancelled."""
        try:
            while True:
                try:
                    self._round()
                except Exception:
                    log.exception("a round of asking for members failed; the next one comes")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._pause_seconds())
                self._wake.clear()
        finally:
            for task in [*self._asking.values(), *([self._looking_up] if self._looking_up else ())]:
                task.cancel()

    def look_up_now(self) -> None:
        """The places to ask have changed."""
        self._looked_up_at = None
        self._mute.clear()
        self._wake.set()

    def _pause_seconds(self) -> float:
        return self.table.pace.interval_seconds * self._rng.uniform(0.9, 1.1)  # nodes started at once spread out

    def _round(self) -> None:
        now = asyncio.get_running_loop().time()
        self.table.tick()
        self._look_up_in_time(now)
        ready = [seed for seed in self.seeds if self._mute.get(seed, (0, 0.0))[1] <= now]
        for address in self.table.to_ask(self._rng, ready):
            if address not in self._asking:
                self._asking[address] = asyncio.create_task(self._ask_one(address))

    def _look_up_in_time(self, now: float) -> None:
        wait_seconds = LOOKUP_SECONDS if any(self.table.states().values()) else LOOKUP_SECONDS / 4
        due = self._looked_up_at is None or now - self._looked_up_at >= wait_seconds
        if due and (self._looking_up is None or self._looking_up.done()):
            self._looked_up_at = now
            self._looking_up = asyncio.create_task(self._look_up_seeds())

    async def _look_up_seeds(self) -> None:
        try:
            seeds = await self._look_up()
        except Exception:
            log.exception("the places to ask for members could not be looked up; they are tried again")
            return
        fresh = set(seeds) - set(self.seeds)
        self.seeds = list(seeds)
        self._refusals = {seed: text for seed, text in self._refusals.items() if seed in set(seeds)}
        self._mute = {seed: state for seed, state in self._mute.items() if seed in set(seeds)}
        if fresh:
            self._wake.set()

    async def _ask_one(self, address: str) -> None:
        try:
            await self._exchange(address)
        finally:
            del self._asking[address]

    async def _exchange(self, address: str) -> None:
        loop, seconds = asyncio.get_running_loop(), self.table.pace.ask_timeout_seconds * self.table.patience
        try:
            async with asyncio.timeout(seconds):
                answer = await self._ask(address, self.table.my_row())
        except Exception as error:
            count = self._mute.get(address, (0, 0.0))[0] + 1
            pause = min(self.table.pace.interval_seconds * 2**count, SEED_SECONDS_MAX)
            if address in self.seeds:
                self._mute[address] = (count, loop.time() + pause * self._rng.uniform(0.5, 1.0))
            self.table.failed(address, refused=_is_refusal(error))
            self._note_denial(address, error)
            return
        self._mute.pop(address, None)
        self._refusals.pop(address, None)
        self.table.take(answer, address)
        if isinstance(answer.get("me"), dict):
            self._names[address] = str(answer["me"].get("name", ""))
        if isinstance(answer.get("me"), dict) and answer["me"].get("name") == self.table.me.name:
            self._mute[address] = (0, loop.time() + SEED_SECONDS_MAX)  # it is ourselves

    def _note_denial(self, address: str, error: Exception) -> None:
        if not isinstance(error, PermissionDeniedError):
            self._refusals.pop(address, None)
            return
        text = f"{address}: {error}"
        if not self._refusals:
            log.warning("a peer does not take this node for a member: %s", text)
        self._refusals[address] = text

    @property
    def denied(self) -> str:
        """Why another node does not take us for a member; "" when none refuses."""
        return next(iter(self._refusals.values()), "")

    def is_heard(self, address: str) -> bool:
        """True when this node, or a member that can be asked, answers at ``address``."""
        usable = {record.member for record in self.table.records.values() if self.table.is_usable(record)} | {self.me}
        named = self._names.get(address)
        return any(address == member.address or named == member.name for member in usable)

    async def goodbye(self) -> None:
        """Tell some members that this node leaves; they pass it on. Bounded in time, best effort: else its silence
        tells."""
        self.table.leave()
        known = [member.address for member in self.table.live()]
        chosen = self._rng.sample(known, min(GOODBYES_MAX, len(known)))
        asks = (self._ask(address, self.table.my_row()) for address in chosen)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await asyncio.gather(*asks, return_exceptions=True)


def _is_refusal(error: BaseException | None) -> bool:
    """True when nobody listens at the address: the process has gone, and its machine says so."""
    seen = 0
    while error is not None and seen < 8:
        if isinstance(error, ConnectionRefusedError):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False
