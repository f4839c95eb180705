"""``tierckpt prefetch --watch``: a rollout over all nodes in a line. Asks each agent twice a second. The page of
``tierckpt status --web`` draws it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from concurrent.futures import Future

from ...agent.rollout import Rollout, line
from ...agent.rollout_watch import RolloutWatch
from ...config import Settings
from ...errors import ConfigError, ObjectNotFoundError
from ...format.layout import Location
from ...process_start import has_reader
from .output import Report, printable

TICK_SECONDS = 0.5
LINE_SECONDS = 2.0
BEGIN_SECONDS = 60.0
SETTLED_TICKS = 2


def watch(
    location: Location | None, settings: Settings, *, as_json: bool, fetching: Future[Report] | None = None
) -> Report:
    """Watch one version fill all nodes that want it, until it is whole on all of them, or Ctrl-C.

    Args:
        location: whose; None: what most nodes are filling.
        fetching: what this node fetches meanwhile; when it fails there is nothing more to watch.

    Raises:
        ConfigError: there are no ``peers``.
        ObjectNotFoundError: nobody has begun to fill it in a minute.
    """
    if settings.peers is None:
        raise ConfigError("no peers are set, so there is one node to watch", hint="Set peers (TIERCKPT_PEERS)")
    uri = location.uri if location is not None else None
    seen = RolloutWatch(uri, settings)
    with contextlib.suppress(*(() if fetching is not None else (KeyboardInterrupt,))):
        asyncio.run(_watch(seen, _Line(is_quiet=as_json), fetching, shown_on=1 if as_json else 2))
    if seen.rollout is None:
        return Report({"uri": uri, "done": False, "nodes": []}, ["Nothing was being filled."])
    return Report(seen.rollout.to_json(), [line(seen.rollout)])


async def _watch(seen: RolloutWatch, out: _Line, fetching: Future[Report] | None, *, shown_on: int) -> None:
    """Watch until all nodes have it. Where this node fetches nothing, end when ``shown_on`` has no reader."""
    begun, settled = time.monotonic(), 0
    try:
        while settled < SETTLED_TICKS and (fetching is not None or has_reader(shown_on)):
            await seen.look()
            if fetching is not None and fetching.done():
                if fetching.exception() is not None:
                    return
                settled += seen.rollout is None  # a checkpoint, which no node tells of as something it fills
            elif seen.rollout is None and fetching is None and time.monotonic() - begun > BEGIN_SECONDS:
                raise ObjectNotFoundError(
                    f"no node is filling {seen.uri or 'anything'}", hint="`tierckpt prefetch URI` on each node fills it"
                )
            if seen.rollout is not None:
                settled = settled + 1 if seen.rollout.is_done else 0
            out.show(seen.rollout, seen.members)
            await asyncio.sleep(TICK_SECONDS)
    finally:
        out.end()
        await seen.close()


class _Line:
    """One line on stderr: written over where a person looks, else a new one now and then; none with ``--json``."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet, self._is_live = is_quiet, sys.stderr.isatty()
        self._said_at, self._width = float("-inf"), 0

    def show(self, rollout: Rollout | None, members: int) -> None:
        if self._is_quiet or (not self._is_live and time.monotonic() - self._said_at < LINE_SECONDS):
            return
        self._said_at = time.monotonic()
        text = line(rollout) if rollout is not None else f"nothing is being filled yet on {members} nodes"
        if self._is_live:
            text = printable(text)[: shutil.get_terminal_size().columns - 1]
            self._width, text = len(text), "\r" + text.ljust(self._width)
        sys.stderr.write(text if self._is_live else printable(text) + "\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the terminal as it was."""
        if self._is_live and self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
