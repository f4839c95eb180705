"""The log of an agent is bounded while the agent runs, whatever writes to it (tierckpt/agent/agent_server.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import REPOSITORY
from tierckpt.ipc.agent_client import LOG

BOUND = 64 << 10

WRITER = """
import os, sys
from pathlib import Path
from tierckpt.agent import agent_server
directory, mode = Path(sys.argv[1]), sys.argv[2]
agent_server.LOG_BYTES_MAX = 64 << 10
log = agent_server.LogFile(directory)
for number in range(4000):
    if mode == "aside" and number == 100:
        (directory / "agent.log").replace(directory / "agent.log.1")  # who starts another agent does that
    os.write(2, b"line %d %s\\n" % (number, b"x" * 200))
    if number % 10 == 0:
        log.keep_small()
print("said on stdout")
"""

AGENT = """
import sys, threading, time
from tierckpt.agent import __main__ as main, agent_server as server
server.LOG_BYTES_MAX, server.LOG_CHECK_SECONDS = 64 << 10, 0.02
def flood():
    began = time.monotonic()
    while time.monotonic() - began < 3:
        print("line", "x" * 200, file=sys.stderr, flush=True)
        time.sleep(0.0005)
threading.Thread(target=flood).start()
sys.exit(main.main(4.0))
"""


def run(code: str, directory: Path, *arguments: str, stdin: str = "") -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (directory / LOG).open("ab") as output:
        command = [sys.executable, "-c", code, *arguments]
        subprocess.run(
            command, input=stdin.encode(), stdout=output, stderr=output, cwd=REPOSITORY, timeout=120, check=True
        )


@pytest.mark.parametrize("mode", ["alone", "aside"])
def test_a_log_that_is_full_is_put_aside_and_the_newest_is_kept(tmp_path: Path, mode: str) -> None:
    run(WRITER, tmp_path, str(tmp_path), mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOG, f"{LOG}.1"]
    assert all(path.stat().st_size <= BOUND + 4096 for path in tmp_path.iterdir())
    text = (tmp_path / f"{LOG}.1").read_text() + (tmp_path / LOG).read_text()
    numbers = [int(line.split()[1]) for line in text.splitlines() if line.startswith("line")]
    assert numbers == list(range(numbers[0], 4000)), "the log keeps its end, without gaps"
    assert "said on stdout" in text


@pytest.mark.slow
def test_an_agent_keeps_its_log_small_while_it_runs(tmp_path: Path) -> None:
    settings = f'{{"local_root": "{tmp_path}"}}'
    run(AGENT, tmp_path / "agent", stdin=settings)
    sizes = [path.stat().st_size for path in (tmp_path / "agent").glob(f"{LOG}*")]
    assert len(sizes) == 2
    assert sum(sizes) < 500_000, "of a megabyte"
    assert "agent exits" in (tmp_path / "agent" / LOG).read_text()


def test_what_is_not_the_agents_file_is_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "journal-of-the-site"
    with elsewhere.open("ab") as output:
        subprocess.run(
            [sys.executable, "-c", WRITER, str(tmp_path), "alone"],
            stdout=output,
            stderr=output,
            cwd=REPOSITORY,
            timeout=120,
            check=True,
        )
    assert elsewhere.stat().st_size > 800_000
    assert os.listdir(tmp_path) == [elsewhere.name]  # noqa: PTH208
