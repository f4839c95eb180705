"""Locks of one node: one holder (K1), and a removed lock file lets no second one in (K3). K2: fault/test_ranks.py."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuse_mount import mounted
from tierckpt.disk.file_lock import lock, lock_record, record_holder, try_lock
from tierckpt.errors import OperationTimeoutError, StoreError


@pytest.fixture(params=["local", "inode numbers that change at each look"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    if request.param == "local":
        yield tmp_path / "lock"
        return
    with mounted(tmp_path, inodes="changing") as mount:
        yield mount.path / "lock"


def test_who_is_refused_does_not_remove_the_lock_of_who_holds_it(path: Path) -> None:
    with try_lock(path, remove=True) as first:
        assert first
        for _ in range(2):
            with try_lock(path, remove=True) as other:
                assert not other
        assert path.exists()
    assert not path.exists()


def test_a_lock_on_a_removed_file_is_no_lock(path: Path) -> None:
    with try_lock(path) as first:
        assert first
        path.unlink()
        with try_lock(path) as second:
            assert second  # a new file, a new lock
        path.write_text("")
    with try_lock(path) as again:
        assert again


def test_waiting_has_a_deadline(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with try_lock(path) as held:
        assert held
        with pytest.raises(OperationTimeoutError, match=r"0\.1 s"), lock(path, 0.1, "the thing"):
            pytest.fail("two holders")


@pytest.mark.parametrize("failing", ["removal", "unlock"])
def test_a_lock_is_released_although_its_removal_or_unlock_fails(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the file releases it too; a leaked descriptor would hold the lock until the process exits."""
    flock = fcntl.flock

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def no_unlock(file: int, operation: int) -> None:
        (fail if operation == fcntl.LOCK_UN else flock)(file, operation)

    with monkeypatch.context() as patch, try_lock(tmp_path / "lock", remove=failing == "removal") as held:
        assert held
        patch.setattr(*((Path, "unlink", fail) if failing == "removal" else (fcntl, "flock", no_unlock)))
    with try_lock(tmp_path / "lock") as held:
        assert held


def test_a_lock_is_inherited_with_its_descriptor_when_its_holder_is_killed(tmp_path: Path) -> None:  # K4
    path = tmp_path / "lock"
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        with try_lock(path) as hold:
            socket.send_fds(theirs, [b"x"], [hold.descriptor])
            time.sleep(60)
        os._exit(1)
    _, (inherited,), _, _ = socket.recv_fds(ours, 1, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with try_lock(path) as other:
        assert not other  # nobody gets it in between
    with try_lock(path, inherited=inherited) as ours_now:
        assert ours_now
    with try_lock(path) as free:
        assert free


def test_a_lock_let_go_of_in_order_is_not_inherited(tmp_path: Path) -> None:  # K2, K4
    path = tmp_path / "lock"
    with try_lock(path) as hold:
        inherited = os.dup(hold.descriptor)
    with try_lock(path) as next_holder:
        assert next_holder
        with try_lock(path, inherited=inherited) as late:
            assert not late


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(tmp_path: Path, number: int) -> None:
    with mounted(tmp_path, no=["flock"], numbers={"flock": number}) as mount:
        with pytest.raises(StoreError, match="no file locks") as caught, try_lock(mount.path / "lock"):
            raise AssertionError("there is no lock")
        assert str(mount.path) in caught.value.message and "TIERCKPT_LOCAL_ROOT" in caught.value.hint


def record_of_a_child(path: Path, kind: str, is_process: bool) -> subprocess.Popen[str]:
    """A process that locks byte 1 of ``path`` and waits."""
    lines = (
        "import fcntl, os, sys, time; from tierckpt.disk.file_lock import lock_record\n"
        "file = os.open(sys.argv[1], os.O_RDWR)\n"
        f"print(lock_record(file, fcntl.{kind}, 1, is_process={is_process}), flush=True)\n"
        "time.sleep(120)"
    )
    process = subprocess.Popen([sys.executable, "-c", lines, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "True\n"
    return process


@pytest.mark.parametrize("is_process", [False, True])
def test_a_record_lock_of_one_byte_is_visible_and_ends_with_its_holder(tmp_path: Path, is_process: bool) -> None:
    path = tmp_path / "file"
    path.touch()
    file = os.open(path, os.O_RDWR)
    child = record_of_a_child(path, "F_RDLCK", is_process)
    try:
        holder = record_holder(file, 1, is_process=is_process)
        assert holder == (child.pid if is_process else -1)
        assert record_holder(file, 0, is_process=is_process) is None
        assert not lock_record(file, fcntl.F_WRLCK, 1, is_process=is_process)
        assert lock_record(file, fcntl.F_RDLCK, 1, is_process=is_process), "others may share it"
        assert lock_record(file, fcntl.F_UNLCK, 1, is_process=is_process)
        assert lock_record(file, fcntl.F_WRLCK, 0, is_process=is_process), "another byte"
        child.kill()
        child.wait()
        assert record_holder(file, 1, is_process=is_process) is None
        assert lock_record(file, fcntl.F_WRLCK, 1, is_process=is_process)
    finally:
        child.kill()
        child.wait()
        os.close(file)
