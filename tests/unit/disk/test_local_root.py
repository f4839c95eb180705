"""The next recovery removes temporary files of killed writers, and keeps those of live ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tierckpt.disk.durable import durable_write
from tierckpt.disk.local_root import clear_leftovers
from tierckpt.disk.processes import is_abandoned, is_temporary

WRITER = """
import os, sys
from pathlib import Path
from tierckpt.stores import local
path = Path(sys.argv[1])
def stop(*_):
    print("written", flush=True)
    sys.stdin.read()
os.fsync = stop
local.durable_write(path, b"half")
"""


def test_of_a_writer_that_was_killed_nothing_stays_and_of_a_live_one_all(tmp_path: Path) -> None:
    target = tmp_path / "journal" / "ab12.json"
    target.parent.mkdir()
    durable_write(target, b"before")
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "written\n"
        [temporary] = target.parent.glob(".*.tmp")
        assert is_temporary(temporary.name) and not is_abandoned(temporary.name)
        assert clear_leftovers(tmp_path) == 0 and temporary.exists(), "it lives, stopped or not"
        os.kill(writer.pid, signal.SIGSTOP)
        assert clear_leftovers(tmp_path) == 0 and temporary.exists()
    finally:
        writer.kill()
        writer.wait()
    assert clear_leftovers(tmp_path) == 1
    assert [path.name for path in target.parent.iterdir()] == ["ab12.json"]
    assert target.read_bytes() == b"before"
