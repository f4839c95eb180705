"""Garbage collection, kept out of the way."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No cyclic garbage collection in here: while thousands of items are made, it would look at every object of the
    job again and again, for nothing, because nothing made here is in a cycle.

    For short stretches without I/O. Two threads at once at worst collect a little earlier.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
