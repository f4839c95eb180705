"""The journal: durable before the first byte (J1), one owner at a time (J2), survives what it cannot read."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.unit.test_manifest import checkpoint, entry
from tierckpt.layout import parse_uri
from tierckpt.mover.journal import READY, Journal

LOCATION = parse_uri("s3://bucket/run/step-1")


def test_an_entry_comes_back_as_it_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    opened = journal.open("aa", LOCATION, 3, 4096)
    written = journal.write(replace(opened, files=(entry(token="aa"),), manifest=checkpoint(), state=READY, error="x"))
    assert journal.read("aa") == written
    assert journal.entries() == [written]
    assert written.location == LOCATION


def test_entries_are_newest_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for index, token in enumerate(("a", "b", "c")):
        journal.write(replace(journal.open(token, LOCATION, 0, 4096), created_unix_seconds=float(index)))
    assert [item.token for item in journal.entries()] == ["c", "b", "a"]


def test_a_removed_entry_is_gone(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open("aa", LOCATION, 0, 4096)
    journal.remove("aa")
    assert journal.read("aa") is None
    assert journal.entries() == []


def test_an_unreadable_entry_hides_no_other(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open("aa", LOCATION, 0, 4096)
    for name, data in {"torn": b'{"token": "to', "empty": b"", "list": b"[]"}.items():
        (journal.directory / f"{name}.json").write_bytes(data)
    assert [item.token for item in journal.entries()] == ["aa"]


def test_one_owner_at_a_time_even_in_one_process(tmp_path: Path) -> None:  # J2
    journal = Journal(tmp_path)
    journal.open("aa", LOCATION, 0, 4096)
    with journal.own("aa") as first, journal.own("aa") as second:
        assert (first, second) == (True, False)
    with journal.own("aa") as again:
        assert again


def test_ownership_dies_with_its_process(tmp_path: Path) -> None:  # J2
    journal = Journal(tmp_path)
    journal.open("aa", LOCATION, 0, 4096)
    code = (
        "import sys, time; from pathlib import Path; from tierckpt.mover.journal import Journal\n"
        "with Journal(Path(sys.argv[1])).own('aa') as held:\n"
        "    print(held, flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "True"
        with journal.own("aa") as while_alive:
            assert not while_alive
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(timeout=10)
        with journal.own("aa") as after_death:
            assert after_death
    finally:
        holder.kill()
        holder.wait(timeout=10)


def test_no_lock_file_outlives_its_entry(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with journal.own("gone"):
        pass
    assert list(journal.directory.iterdir()) == []
