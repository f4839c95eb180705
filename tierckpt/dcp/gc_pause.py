"""Pauses Python's garbage collector while thousands of objects of a save or load are made."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
has_frozen = False
"""The job was seen to have frozen objects, and is taken to go on with it: to count them is to visit each of them."""


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """No cyclic garbage collection in here: while thousands of items are made, it would look at every object of the
    job again and again, for nothing, because nothing made here is in a cycle. Nor afterwards: what was made becomes old
    without being looked at, where the next collection of the young would visit all of it once.

    For short stretches without I/O. Two threads at once at worst collect a little earlier. Young garbage of others
    becomes old too, and goes with the next full collection. A job that freezes (gc.freeze) is left as it is.

    Cost: some microseconds; once in a process that has frozen a million objects, 20 ms. It saved 1.5 us for each item
    of a save of 50,000.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _make_old()
            gc.enable()


def _make_old() -> None:
    global has_frozen
    # Who does not get the lock is beside another who does the same; a child that was forked meanwhile never gets it.
    if has_frozen or not _lock.acquire(blocking=False):
        return
    try:
        has_frozen = gc.get_freeze_count() > 0  # what the job has frozen must stay so
        if not has_frozen:
            gc.freeze()  # whole lists: what all generations have to the permanent one,
            gc.unfreeze()  # and from there to the oldest
    finally:
        _lock.release()
