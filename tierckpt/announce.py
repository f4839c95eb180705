"""Logs the reason of a long wait in a call: minutes without a message look like a hang."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .resources import start_if_possible

FIRST_SECONDS = 1.0
EVERY_SECONDS = 10.0


@contextmanager
def announced(log: logging.Logger, describe: Callable[[], str], first_seconds: float = FIRST_SECONDS) -> Iterator[None]:
    """While the block runs, log ``describe()`` as a warning after ``first_seconds``, and then every ten seconds.

    ``describe`` is called on a thread of its own; an empty text is not logged.
    """
    is_done = threading.Event()

    def tell() -> None:
        pause = first_seconds
        while not is_done.wait(pause):
            pause = EVERY_SECONDS
            if text := describe():
                log.warning("%s", text)

    thread = threading.Thread(target=tell, name="tierckpt-announce", daemon=True)
    start_if_possible(thread)
    try:
        yield
    finally:
        is_done.set()
