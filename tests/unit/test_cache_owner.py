"""Who holds what on a node: claims, heartbeats, processes that end (C1 to C3 in tierckpt/disk/claims.py)."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fuse_mount import mounted
from tierckpt.disk import claims as owner
from tierckpt.disk.claims import Claims, Heartbeat, Owner, holder_of, is_live


@pytest.fixture
def beats(tmp_path: Path) -> Path:
    return tmp_path / "owners"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "claims").mkdir()
    return tmp_path / "claims"


def holder(folder: Path, beats: Path) -> tuple[Claims, Heartbeat]:
    presence = Heartbeat(beats)
    presence.begin()
    return Claims(folder, beats, presence.name), presence


HOLD = """
import sys, time
from pathlib import Path
from tierckpt.disk.claims import Claims, Heartbeat
presence = Heartbeat(Path(sys.argv[2]))
presence.begin()
print(Claims(Path(sys.argv[1]), Path(sys.argv[2]), presence.name).take("chunk"), flush=True)
time.sleep(120)
"""


@pytest.fixture
def other(folder: Path, beats: Path) -> subprocess.Popen[str]:
    """Another process, which has claimed ``chunk``."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), str(beats)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "True"
    yield process  # type: ignore[misc]
    process.kill()
    process.wait()


def test_a_claim_is_had_by_one_and_names_it(folder: Path, beats: Path) -> None:
    first, first_presence = holder(folder, beats)
    second, _ = holder(folder, beats)
    assert first.take("chunk")
    assert not second.take("chunk")
    assert second.holder("chunk") == first_presence.name
    second.release("chunk")  # not its own: nothing happens
    assert first.holder("chunk") == first_presence.name
    first.release("chunk")
    assert second.take("chunk")


def test_a_claim_of_a_killed_process_is_free_at_once(folder: Path, beats: Path, other: subprocess.Popen[str]) -> None:
    mine, _ = holder(folder, beats)
    assert not mine.take("chunk")
    assert mine.count() == 1
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert mine.count() == 0
    assert mine.take("chunk")
    assert mine.taken_over == 1


def test_a_process_that_waits_to_be_reaped_has_ended(folder: Path, beats: Path) -> None:
    mine, _ = holder(folder, beats)
    pid = os.fork()
    if pid == 0:
        child, _ = holder(folder, beats)
        os._exit(0 if child.take("chunk") else 1)
    deadline = time.monotonic() + 60
    while mine.holder("chunk") is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    while not mine.take("chunk"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_stopped_process_is_silent_after_a_while(folder: Path, beats: Path, other: subprocess.Popen[str]) -> None:
    mine, _ = holder(folder, beats)
    other.send_signal(signal.SIGSTOP)
    [name] = [path.name for path in beats.iterdir() if path.name.startswith(f"{other.pid}-")]
    past = time.time() - owner.SILENT_SECONDS - 1
    os.utime(beats / name, (past, past))
    assert not is_live(name, beats)
    assert mine.take("chunk")


def test_a_pid_that_was_given_to_another_process_is_not_its_former_one(beats: Path) -> None:
    presence = Heartbeat(beats)
    presence.begin()
    now = presence.owner
    former = Owner(now.pid, now.started_ticks - 1, now.namespace, now.host, now.token)
    (beats / former.name).touch()
    assert is_live(now.name, beats)
    assert not is_live(former.name, beats)


def test_heartbeats_are_judged_by_the_clock_of_their_file_system(beats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's clock differs from this host's by minutes, either way."""
    presence = Heartbeat(beats)
    presence.begin()
    stranger = Owner(1, 1, 12345, 1, "aa")
    (beats / stranger.name).touch()
    real = time.time
    for skew in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda skew=skew: real() + skew)
        assert is_live(stranger.name, beats)
    past = real() - owner.SILENT_SECONDS - 5
    os.utime(beats / stranger.name, (past, past))
    assert not is_live(stranger.name, beats), "though by this host's clock it will beat in an hour"


def test_of_a_process_in_another_container_only_the_heartbeat_counts(beats: Path) -> None:
    beats.mkdir()
    stranger = Owner(1, 1, 12345, 1, "aa")
    (beats / stranger.name).touch()
    assert stranger.has_ended() is None
    assert is_live(stranger.name, beats)
    past = time.time() - owner.SILENT_SECONDS - 1
    os.utime(beats / stranger.name, (past, past))
    assert not is_live(stranger.name, beats)


def test_a_heart_beats_until_it_lets_go(beats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_SECONDS", 0.01)
    owner.start_anew()
    presence = Heartbeat(beats)
    presence.begin()
    path, past = beats / presence.name, time.time() - 100
    os.utime(path, (past, past))
    deadline = time.monotonic() + 60
    while path.stat().st_mtime < past + 50:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    presence.end()
    presence.end()
    assert not path.exists()
    assert not is_live(presence.name, beats)


def test_a_forked_child_leaves_its_parents_claims_alone(folder: Path, beats: Path) -> None:
    mine, presence = holder(folder, beats)
    assert mine.take("chunk")
    pid = os.fork()
    if pid == 0:
        presence.end()
        os._exit(0)
    os.waitpid(pid, 0)
    assert is_live(presence.name, beats)


@pytest.mark.parametrize("left", [False, True], ids=["free", "of a dead holder"])
def test_of_many_that_race_for_a_claim_one_gets_it(left: bool, folder: Path, beats: Path) -> None:
    """Threads here, as each holder has a name of its own; the start line makes them meet."""
    everyone = [holder(folder, beats)[0] for _ in range(8)]
    for round_ in range(20):
        if left:
            (folder / str(round_)).symlink_to("1-1-1-dead")
        line, won = threading.Barrier(len(everyone)), Counter[bool]()

        def race(
            claims: Claims, line: threading.Barrier = line, won: Counter[bool] = won, name: str = str(round_)
        ) -> None:
            line.wait()
            won[claims.take(name)] += 1

        threads = [threading.Thread(target=race, args=(claims,)) for claims in everyone]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won[True] == 1


def test_who_comes_while_another_removes_a_dead_holders_claim_leaves_it_to_that_one(folder: Path, beats: Path) -> None:
    mine, _ = holder(folder, beats)
    (folder / "chunk").symlink_to("1-1-1-dead")
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert not mine.take("chunk")
    os.close(other)
    assert mine.take("chunk")


def test_a_dead_holders_claim_is_taken_where_there_are_no_locks(
    folder: Path, beats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    mine, _ = holder(folder, beats)
    (folder / "chunk").symlink_to("1-1-1-dead")
    assert mine.take("chunk")


def test_names_that_are_no_owners_hold_nothing(folder: Path, beats: Path) -> None:
    mine, _ = holder(folder, beats)
    (folder / "chunk").symlink_to("anything at all")
    assert mine.take("chunk")


# --- where a claim cannot be a symbolic link ------------------------------------------------------------------------


@pytest.fixture
def without_links(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path, no=["symlink", "link", "utime"]) as mount:
        (mount.path / "claims").mkdir()
        yield mount.path


def test_one_of_many_gets_a_claim_where_there_are_no_links(without_links: Path) -> None:
    folder, beats = without_links / "claims", without_links / "owners"
    everyone = [holder(folder, beats)[0] for _ in range(6)]
    with ThreadPoolExecutor(len(everyone)) as pool:
        for name in ("one", "two"):
            won = list(pool.map(lambda claims, name=name: claims.take(name), everyone))
            assert won.count(True) == 1 and all(claims.is_held(name) for claims in everyone)
            assert everyone[0].count() == 1
            winner = everyone[won.index(True)]
            assert holder_of(folder / name) == winner.holder(name)
            winner.release(name)
            assert not winner.is_held(name) and everyone[0].take(name)
            everyone[0].release(name)


def test_a_dead_holders_claim_is_taken_where_there_are_no_links(without_links: Path) -> None:
    mine, _ = holder(without_links / "claims", without_links / "owners")
    (without_links / "claims/chunk").write_text("1-1-1-1-dead")
    assert not mine.is_held("chunk") and mine.take("chunk") and mine.taken_over == 1


def test_a_claim_that_is_being_made_is_left_alone(without_links: Path) -> None:
    """Between the create and the write of its name; a holder that ended there holds it for ``SILENT_SECONDS``."""
    mine, _ = holder(without_links / "claims", without_links / "owners")
    path = without_links / "claims/chunk"
    path.touch()
    assert not mine.take("chunk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "SILENT_SECONDS", -1.0)
        assert mine.take("chunk")
    assert mine.is_held("chunk")


def test_a_heart_beats_where_no_times_can_be_set(without_links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_SECONDS", 0.01)
    _, presence = holder(without_links / "claims", without_links / "owners")
    path = without_links / "owners" / presence.name
    first = path.stat().st_mtime_ns
    deadline = time.monotonic() + 30
    while path.stat().st_mtime_ns == first:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    presence.end()
