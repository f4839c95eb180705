"""Chooses huge or small pages for memory that is filled once: whichever the kernel lately gave faster.

Huge pages are faster nearly everywhere: one fault instead of 512, and fewer pieces for the disk. But a virtual
machine may return free memory to its host (free page reporting), in huge pages only. Each such page is requested
again on use, at up to 2 s a GiB, while small pages that the guest still has cost a quarter. No switch reports this
and it changes with the history of the machine, so both kinds are measured while memory is filled: all but a few pages
are of the faster kind.
"""

from __future__ import annotations

import threading

TRY_EVERY = 32
"""In so many pieces of memory, the first has its price taken, and the second, which is of the other kind: so the choice
follows the machine."""
BYTES_MIN = 4 << 20
WEIGHT = 0.3
"""Of the newest measurement."""
GAIN_MIN = 0.5
"""Small pages cost the disk something, and every later use. They are taken only where they cost at most so much."""


class Paging:
    """The choice, of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._seconds_per_byte: dict[bool, float] = {}

    @property
    def is_huge(self) -> bool:
        """Return the kind to use without a measurement."""
        huge, small = self._seconds_per_byte.get(True), self._seconds_per_byte.get(False)
        return huge is None or small is None or small > GAIN_MIN * huge

    def next(self) -> tuple[bool, bool]:
        """Whether the next piece of memory is to have huge pages, and whether its price is wanted (``learn``)."""
        with self._lock:
            self._count += 1
            turn = self._count % TRY_EVERY
            return self.is_huge != (turn == 2), turn in (1, 2)

    def learn(self, size_bytes: int, seconds: float, *, is_huge: bool) -> None:
        """To fill in pages, and nothing else, took that long. Few bytes say little, and are not counted."""
        if size_bytes < BYTES_MIN:
            return
        with self._lock:
            new, old = seconds / size_bytes, self._seconds_per_byte.get(is_huge)
            self._seconds_per_byte[is_huge] = new if old is None else old + WEIGHT * (new - old)


paging = Paging()
