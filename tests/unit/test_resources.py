"""Resource limits of the system raise one typed error; a pool continues with the threads it has."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.services import REPOSITORY
from tierckpt.disk.durable import translate_os_error
from tierckpt.errors import CapacityError, ObjectNotFoundError
from tierckpt.resources import ThreadPool, exhausted, start_thread
from tierckpt.tracebacks import short_traceback
from tierckpt.types import Tier

SCARCE = """
import os, resource, threading, time
from tierckpt.errors import CapacityError
from tierckpt.resources import ThreadPool, start_if_possible, start_thread
alive, empty = ThreadPool(4), ThreadPool(4)
alive.submit(int).result()
used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), resource.RLIM_INFINITY))
slow = [alive.submit(time.sleep, 0.05) for _ in range(8)]  # one thread does all of it
assert [one.result(10) for one in slow] == [None] * 8
done = []
for call in (lambda: empty.submit(done.append, 1), lambda: start_thread(threading.Thread(target=int))):
    try:
        call()
    except CapacityError as error:
        assert error.context["resource"] in ("threads", "memory"), error
        assert "ulimit -v" in error.hint
    else:
        raise AssertionError("a thread was there")
assert not start_if_possible(threading.Thread(target=int))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
assert empty.submit(int).result() == 0
assert done == [], "what was refused is done later"
"""


def test_a_pool_without_memory_for_a_thread() -> None:
    done = subprocess.run([sys.executable, "-c", SCARCE], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("error", "resource"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "descriptors"),
        (OSError(errno.ENFILE, "Too many open files in system"), "descriptors"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
        (MemoryError(), "memory"),
        (RuntimeError("can't start new thread"), "threads"),
    ],
)
def test_public_errors_of_missing_resources_are_typed(error: Exception, resource: str) -> None:
    @short_traceback
    def call() -> None:
        raise error

    with pytest.raises(CapacityError) as caught:
        call()
    assert caught.value.context["resource"] == resource
    if isinstance(error, OSError):
        translated = translate_os_error(error, Path("file"), Tier.LOCAL)
        assert isinstance(translated, CapacityError)


@pytest.mark.parametrize("way", ["thread", "pool"])
def test_an_interrupt_in_the_start_of_a_thread_stays_one(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        with threading.Lock() as locked:
            assert locked
            try:
                raise KeyboardInterrupt  # as ``Condition.wait`` takes its lock again
            finally:
                threading.Lock().release()  # RuntimeError: release unlocked lock

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        if way == "thread":
            start_thread(threading.Thread())
        else:
            ThreadPool(1).submit(print)


def test_other_errors_are_not_converted() -> None:
    for error in (RuntimeError("else"), OSError(errno.ENOENT, "none"), ValueError(), ObjectNotFoundError("gone")):
        assert exhausted(error) is None
