"""What the guest says before and after each thing it does, and what a disk may hold after a cut by what was said."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

BLOCK_BYTES = 4096
MARKS = 1024
"""Blocks behind the file system, one event in each."""

BEGIN, DONE, MAY_GO, REST = "begin", "done", "may go", "rest"
LOCAL, SHARED = "local", "shared"
Key = tuple[str, str]
"""Name of a checkpoint, and tier."""


@dataclass(frozen=True)
class Event:
    """The ``number``-th thing that was said.

    begin   from now on save ``label`` may stand under ``name``, on both tiers
    done    acknowledged: save ``label`` stands under ``name`` on ``tier``, and nothing else
    may go  from now on nothing may stand there
    rest    no save, drain or removal is under way
    """

    number: int
    kind: str
    name: str = ""
    tier: str = ""
    label: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def decode(data: bytes) -> Event | None:
    """The event in a line or a block; None when there is none."""
    text = data.rstrip(b"\0").strip()
    return Event(**json.loads(text)) if text.startswith(b"{") else None


def allowed(events: Iterable[Event]) -> dict[Key, set[str | None]]:
    """The saves that may stand at each place; None for nothing. A place that is not in it holds nothing."""
    may: dict[Key, set[str | None]] = {}
    for event in events:
        if event.kind == BEGIN:
            for tier in (LOCAL, SHARED):
                may.setdefault((event.name, tier), {None}).add(event.label)
        elif event.kind == DONE:
            may[event.name, event.tier] = {event.label}
        elif event.kind == MAY_GO:
            may.setdefault((event.name, event.tier), {None}).add(None)
    return may


def acknowledged(events: Iterable[Event]) -> dict[Key, str]:
    """The places that must hold one certain save."""
    may = allowed(events)
    return {key: label for key, labels in may.items() if len(labels) == 1 for label in labels if label is not None}
