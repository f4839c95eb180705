"""Huge pages or small ones, for memory that is filled once and read into: whichever has come faster lately.

Huge pages are the better ones nearly everywhere: one fault instead of 512, and fewer pieces for the disk. But a virtual
machine may give free memory back to its host (free page reporting), which takes huge pages only. Each used after that
comes anew from there, at up to 2 s a GiB, where small pages that the guest has kept cost a tenth. No switch says so and
it changes with what the machine has done before, so it is measured while the reads go on: all but a few are of the kind
that is faster.
"""

from __future__ import annotations

import threading

TRY_EVERY = 32
"""One read in so many is of the other kind, so that the choice follows the machine."""
FIRST_TRY = 3
BYTES_MIN = 4 << 20
WEIGHT = 0.3
"""Of the newest measurement."""
GAIN_MIN = 0.8
"""Small pages cost every later use something. They are taken only where they take at most so much of the time."""


class Paging:
    """The choice, of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._seconds_per_byte: dict[bool, float] = {}

    @property
    def is_huge(self) -> bool:
        """What is taken when nothing is tried."""
        huge, small = self._seconds_per_byte.get(True), self._seconds_per_byte.get(False)
        return huge is None or small is None or small > GAIN_MIN * huge

    def next_is_huge(self) -> bool:
        """Which pages the next read is to have."""
        with self._lock:
            self._count += 1
            return self.is_huge != (self._count % TRY_EVERY == FIRST_TRY)

    def learn(self, size_bytes: int, seconds: float, *, is_huge: bool) -> None:
        """A read into new pages took that long. One of few bytes says little of pages, and is not counted."""
        if size_bytes < BYTES_MIN:
            return
        with self._lock:
            new, old = seconds / size_bytes, self._seconds_per_byte.get(is_huge)
            self._seconds_per_byte[is_huge] = new if old is None else old + WEIGHT * (new - old)


paging = Paging()
