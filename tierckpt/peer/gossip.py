"""Gossip: exchanges the list of members with a few other nodes twice a second (membership.py).

S1  It never raises and never blocks the loop: a round begins in time, whether or not the last probes have been
    answered. An address has one probe in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from ..errors import PermissionDeniedError
from ..telemetry import logger
from ..types import Json
from .membership import Member, MemberList

log = logger("peer")

LOOKUP_SECONDS = 15.0
"""Interval of lookups of the seeds; a quarter of it while there is no other member."""
GOODBYES_MAX = 16
GOODBYE_SECONDS = 0.5


MembersRequest: TypeAlias = Callable[[str, Json], Awaitable[Json]]
"""Exchanges the members with the agent at an address: ``{"me": row, "members": [row, ...]}``."""


class Gossip:
    """Keeps ``table`` current while ``run`` runs. Any exception of ``probe`` means no answer."""

    def __init__(
        self,
        table: MemberList,
        probe: MembersRequest,
        look_up: Callable[[], Awaitable[Sequence[str]]],
        rng: random.Random | None = None,
    ) -> None:
        self.table = table
        self.seeds: list[str] = []
        self._denials: dict[str, str] = {}
        """Reasons of nodes that deny this one, by address."""
        self._names: dict[str, str] = {}
        self._probe, self._look_up = probe, look_up
        self._rng = rng or random.Random()
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._looked_up_at: float | None = None
        self._look_up_task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    @property
    def me(self) -> Member:
        return self.table.me

    # --- for the server ------------------------------------------------------------------------------------------

    def answer(self, asker: Any = None) -> Json:
        """Return the answer to ``/v1/members``. ``asker``: the requesting node's row, unchecked."""
        if asker is not None:
            self.table.merge(asker)
        return self.table.answer(self._rng)

    def asked(self, name: str) -> None:
        self.table.received_request(name)

    # --- rounds --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            while True:
                try:
                    self._round()
                except Exception:
                    log.exception("a gossip round failed; the next one follows")
                pause = self.table.timing.interval_seconds * self._rng.uniform(0.9, 1.1)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), pause)
                self._wake.clear()
        finally:
            for task in [*self._probes.values(), *([self._look_up_task] if self._look_up_task else ())]:
                task.cancel()

    def look_up_now(self) -> None:
        self._looked_up_at = None
        self._wake.set()

    def _round(self) -> None:
        now = asyncio.get_running_loop().time()
        self.table.begin_round()
        interval = LOOKUP_SECONDS if any(self.table.states().values()) else LOOKUP_SECONDS / 4
        is_due = self._looked_up_at is None or now - self._looked_up_at >= interval
        if is_due and (self._look_up_task is None or self._look_up_task.done()):
            self._looked_up_at = now
            self._look_up_task = asyncio.create_task(self._look_up_seeds())
        for address in self.table.targets(self._rng, self.seeds):
            if address not in self._probes:
                self._probes[address] = asyncio.create_task(self._exchange(address))

    async def _look_up_seeds(self) -> None:
        try:
            seeds = await self._look_up()
        except Exception:
            log.exception("cannot look up the seeds; the next lookup follows")
            return
        known = set(seeds)
        if known - set(self.seeds):
            self._wake.set()
        self.seeds = list(seeds)
        self._denials = {seed: text for seed, text in self._denials.items() if seed in known}

    async def _exchange(self, address: str) -> None:
        try:
            async with asyncio.timeout(self.table.timing.timeout_seconds * self.table.patience):
                answer = await self._probe(address, self.table.my_row())
        except Exception as error:
            self.table.failed(address, refused=_is_refusal(error))
            if not isinstance(error, PermissionDeniedError):
                self._denials.pop(address, None)
                return
            if not self._denials:
                log.warning("a peer does not accept this node as a member: %s: %s", address, error)
            self._denials[address] = f"{address}: {error}"
        else:
            self._denials.pop(address, None)
            self.table.merge_answer(answer, address)
            if isinstance(answer, dict) and isinstance(answer.get("me"), dict):
                self._names[address] = str(answer["me"].get("name", ""))
        finally:
            del self._probes[address]

    @property
    def denied(self) -> str:
        return next(iter(self._denials.values()), "")

    def is_reachable(self, address: str) -> bool:
        usable = {record.member for record in self.table.records.values() if self.table.is_usable(record)} | {self.me}
        name = self._names.get(address)
        return any(address == member.address or name == member.name for member in usable)

    async def announce_departure(self) -> None:
        """Send a goodbye to some members, which pass it on. Best effort: silence has the same effect."""
        self.table.leave()
        live = [member.address for member in self.table.live()]
        chosen = self._rng.sample(live, min(GOODBYES_MAX, len(live)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                probes = (self._probe(address, self.table.my_row()) for address in chosen)
                await asyncio.gather(*probes, return_exceptions=True)


def _is_refusal(error: BaseException | None) -> bool:
    """True if the machine refuses the connection: the process has exited."""
    depth = 0
    while error is not None and depth < 8:
        if isinstance(error, ConnectionRefusedError):
            return True
        error, depth = error.__cause__ or error.__context__, depth + 1
    return False
