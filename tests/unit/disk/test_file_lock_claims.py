"""Claims of processes and leases of hosts (C1 to C4 in tierckpt/disk/file_lock.py)."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fuse_mount import mounted
from tests.hosts import container, needs_namespaces
from tierckpt.disk import file_lock
from tierckpt.disk.file_lock import Claims, HostLease, locked
from tierckpt.errors import ObjectNotFoundError
from tierckpt.poll import LOCAL, Poll

HOLD = """
import sys, time
from pathlib import Path
from tierckpt.disk.file_lock import Claims
claims = Claims(Path(sys.argv[1]))
print(claims.share(0) and all(claims.take(at) for at in (7, 8, 1 << 40)), flush=True)
time.sleep(120)
"""


def holding(path: Path, *wrap: str) -> subprocess.Popen[str]:
    """Another process, which shares byte 0 and has claimed bytes 7, 8 and 1 << 40."""
    process = subprocess.Popen([*wrap, sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "True"
    return process


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "claims"


@pytest.fixture
def other(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = holding(path)
    yield process
    process.kill()
    process.wait()


def test_a_claim_has_one_holder(path: Path) -> None:
    first, second = Claims(path), Claims(path)
    assert first.take(1) and not first.take(1) and not second.take(1)
    assert first.held(0, 9) == second.held(0, 9) == [1]
    second.release(1)  # not its own: nothing happens
    assert first.held(0, 9) == [1] and not second.take(1)
    first.release(1)
    assert second.take(1)
    second.close()
    second.close()
    assert first.take(1)


def test_a_byte_is_shared_and_seen(path: Path) -> None:
    first, second = Claims(path), Claims(path)
    assert first.share(0) and second.share(0) and not Claims(path).take(0)
    first.close()
    assert Claims(path).held(0, 1) == [0]


def test_every_held_byte_of_a_range_is_found(path: Path, other: subprocess.Popen[str]) -> None:
    mine = Claims(path)
    assert mine.take(9) and mine.take(20)
    assert mine.held(0, 1 << 41) == [0, 7, 8, 9, 20, 1 << 40]
    assert mine.held(8, 20) == [8, 9] and mine.held(10, 20) == []
    file = os.open(path, os.O_RDONLY)
    assert sorted(locked(file, 1, 21)) == [7, 8, 9, 20]
    os.close(file)


@pytest.mark.parametrize("kind", ["process", pytest.param("container", marks=needs_namespaces)])
def test_the_claims_of_a_killed_process_are_free_at_once(path: Path, kind: str) -> None:
    process, mine = holding(path, *(container() if kind == "container" else ())), Claims(path)
    assert not mine.take(7)
    process.kill()  # unshare takes its child along
    process.wait()
    for _ in Poll(20, LOCAL):
        if not mine.held(0, 1 << 41):
            break
    assert mine.take(7) and mine.held(0, 1 << 41) == [7]


def test_a_stopped_process_keeps_its_claims(path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGSTOP)
    assert not Claims(path).take(7)


def test_a_forked_child_holds_nothing_and_releases_nothing(path: Path) -> None:
    mine, others = Claims(path), Claims(path)
    assert mine.take(1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        reused = Claims(path)  # its file may have the number that the parent's has
        if not (reused.take(2) and mine.take(3)) or Claims(path).held(3, 4):
            os._exit(2)
        mine.release(2)
        mine.close()
        if Claims(path).take(2):
            os._exit(1)
        os.close(write)
        os.read(read, 1)  # until the parent has looked
        os._exit(0)
    os.close(read)
    assert not others.take(1)
    mine.close()
    assert others.take(1), "the child holds nothing"
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_without_locks_every_process_gets_every_claim(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    first, second = Claims(path), Claims(path)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert first.has_locks and first.take(1) and second.take(1) and not first.has_locks
    assert first.held(0, 9) == [1] and not first.take(1)


# --- leases between hosts --------------------------------------------------------------------------------------------


@pytest.fixture(params=["local", "no links, no times"])
def lease_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    if request.param == "local":
        yield tmp_path / "host"
        return
    with mounted(tmp_path, no=["symlink", "link", "utime"]) as mount:
        yield mount.path / "host"


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_a_lease_has_one_host_and_all_its_processes(lease_path: Path) -> None:
    first, again, other = HostLease(lease_path, "1"), HostLease(lease_path, "1"), HostLease(lease_path, "2")
    assert first.take() and first.take() and again.take() and not other.take()
    assert other.is_held_elsewhere() and not again.is_held_elsewhere()
    first.release(is_last=False)
    assert not other.take()
    again.release()
    again.release()
    assert not lease_path.exists() and other.take() and not first.take()
    other.release()


def test_a_silent_host_is_overtaken(tmp_path: Path) -> None:
    path = tmp_path / "host"
    path.write_text("1")
    other = HostLease(path, "2")
    assert not other.take()
    age(path, file_lock.SILENT_SECONDS + 1)
    assert not other.take(), "it was written to since the last look"
    third = HostLease(path, "3")
    assert third.take(), "by the clock of the file system it is old"
    assert path.read_text() == "3" and not other.take()
    third.release()


def test_a_silent_host_is_overtaken_by_the_clock_of_the_waiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the file server is an hour ahead."""
    path = tmp_path / "host"
    path.write_text("1")
    age(path, -3600)
    other = HostLease(path, "2")
    assert not other.take()
    monkeypatch.setattr(file_lock, "SILENT_SECONDS", 0.05)
    time.sleep(0.1)
    assert other.take()
    other.release()


def test_of_many_that_overtake_a_host_one_gets_the_lease(tmp_path: Path) -> None:
    for round_ in range(20):
        path = tmp_path / f"host-{round_}"
        path.write_text("dead")
        age(path, 3600)
        everyone = [HostLease(path, f"{number}") for number in range(6)]
        line = threading.Barrier(len(everyone))
        with ThreadPoolExecutor(len(everyone), initializer=line.wait) as pool:
            won = list(pool.map(HostLease.take, everyone))
        assert won.count(True) == 1
        for lease in everyone:
            lease.release()


def test_a_host_writes_until_it_releases(lease_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock, "HEARTBEAT_SECONDS", 0.01)
    lease, before = HostLease(lease_path, "1"), threading.enumerate()
    assert lease.take()
    [thread] = [each for each in threading.enumerate() if each.name == "tierckpt-lease" and each not in before]
    first = lease_path.stat().st_mtime_ns
    for _ in Poll(30, LOCAL):
        if lease_path.stat().st_mtime_ns != first:
            break
    assert lease_path.stat().st_mtime_ns != first and lease_path.read_text() == "1"
    lease.release()
    thread.join(30)
    assert not thread.is_alive()


def test_a_lease_whose_directory_has_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError):
        HostLease(tmp_path / "gone" / "host", "1").take()
