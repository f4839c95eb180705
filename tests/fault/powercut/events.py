"""Events that the guest records before and after each action, and the disk states that they allow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

BLOCK_BYTES = 4096
EVENT_BLOCKS = 1024
"""Blocks after the file system, one event in each."""

BEGIN, DONE, REMOVABLE, REST = "begin", "done", "removable", "rest"
LOCAL, SHARED = "local", "shared"
Key = tuple[str, str]
"""Name of a checkpoint, and tier."""


@dataclass(frozen=True)
class Event:
    """The ``number``-th event.

    begin      from now on, ``name`` may be save ``label``, on both tiers
    done       acknowledged: ``name`` on ``tier`` is save ``label``
    removable  from now on, ``name`` may be missing from ``tier``
    rest       no save, drain or removal is running
    """

    number: int
    kind: str
    name: str = ""
    tier: str = ""
    label: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def decode(data: bytes) -> Event | None:
    """Return the event in a line or block, None if there is none."""
    text = data.rstrip(b"\0").strip()
    return Event(**json.loads(text)) if text.startswith(b"{") else None


def allowed(events: Iterable[Event]) -> dict[Key, set[str | None]]:
    """Return the labels allowed at each place; None: empty. Places without an entry must be empty."""
    permitted: dict[Key, set[str | None]] = {}
    for event in events:
        if event.kind == BEGIN:
            for tier in (LOCAL, SHARED):
                permitted.setdefault((event.name, tier), {None}).add(event.label)
        elif event.kind == DONE:
            permitted[event.name, event.tier] = {event.label}
        elif event.kind == REMOVABLE:
            permitted.setdefault((event.name, event.tier), {None}).add(None)
    return permitted


def acknowledged(events: Iterable[Event]) -> dict[Key, str]:
    """Return the places that must hold one known save."""
    permitted = allowed(events)
    return {
        key: label for key, labels in permitted.items() if len(labels) == 1 for label in labels if label is not None
    }
