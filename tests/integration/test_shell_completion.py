"""Completion in real shells: ``--install-completion``, then Tab on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.services import ENVIRONMENT, REPOSITORY, needs
from tierckpt.poll import LOCAL, Pauses, Poll

SHELLS = ("bash", "zsh", "fish")
COMMAND = """#!/bin/sh
[ -z "$_TIERCKPT_COMPLETE" ] || echo >> {asked}
if [ -n "$_TIERCKPT_COMPLETE" ] || [ "$1" = --install-completion ]; then exec {python} -m tierckpt "$@"; fi
printf '%s\\n' "$*" >> {lines}
"""
TAB = "\t"
LINES = {
    f"pref{TAB}": "prefetch",
    f"cache ev{TAB}": "cache evict",
    f"prefetch --include x --dry{TAB}": "prefetch --include x --dry-run",
    f"prefetch --progress js{TAB}": "prefetch --progress json",
    f"--log-level err{TAB}": "--log-level error",
    f"ls al{TAB}": "ls alpha/",
    f"restore x --to al{TAB}": "restore x --to alpha/",
}
"""Input after ``tierckpt``, and the arguments of the command on Enter."""


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """A user's environment with a ``tierckpt`` that completes, or logs its arguments."""
    for name in ("bin", "base/alpha/beta", "base/alpha/gamma"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "base/other").touch()
    command = tmp_path / "bin/tierckpt"
    command.write_text(COMMAND.format(python=sys.executable, lines=tmp_path / "lines", asked=tmp_path / "asked"))
    command.chmod(0o755)
    path = f"{command.parent}:{ENVIRONMENT['PATH']}"
    kept = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("XDG_", "ZDOTDIR", "BASH"))}
    return {**kept, "HOME": str(tmp_path), "PATH": path, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm"}


def take_terminal() -> None:
    """Make standard input the controlling terminal, without which shells have no job control and fish fails."""
    fcntl.ioctl(0, termios.TIOCSCTTY)


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_verbs_options_choices_and_paths(shell: str, home: dict[str, str], tmp_path: Path) -> None:
    needs(shell)
    base = tmp_path / "base"
    installed = subprocess.run([shell, "-c", "tierckpt --install-completion\ntrue"], env=home, capture_output=True)
    assert b"completion installed in" in installed.stdout, installed
    ours, theirs = pty.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen(
        [shell, "-i"], **streams, env=home, cwd=base, start_new_session=True, preexec_fn=take_terminal
    )
    os.close(theirs)
    seen, completed, lines = (tmp_path / name for name in ("seen", "asked", "lines"))
    with subprocess.Popen(["cat"], stdin=ours, stdout=seen.open("wb"), stderr=subprocess.DEVNULL):
        try:
            os.write(ours, b"tierckpt ready")
            for _ in Poll(60, Pauses(1.0, 5.0)):  # in zsh the first Tab only loads the function
                if completed.exists():
                    break
                os.write(ours, TAB.encode())
            os.write(ours, b"\r")
            for typed, expected in {"": "ready", **LINES}.items():
                os.write(ours, f"tierckpt {typed.format(base=base)}\r".encode() if typed else b"")
                is_whole = (lines.exists() and lines.read_text().endswith("\n") for _ in Poll(60, LOCAL))
                assert any(is_whole), seen.read_text(errors="replace")
                got = lines.read_text().removesuffix("\n").rstrip(" /")
                lines.unlink()
                assert got == expected.format(base=base).rstrip("/"), seen.read_text(errors="replace")
        finally:
            process.kill()
            process.wait()
            os.close(ours)


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_is_printed(shell: str, home: dict[str, str]) -> None:
    command = [sys.executable, "-m", "tierckpt"]
    environment = {**home, "_TIERCKPT_COMPLETE": f"source_{shell}"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "_TIERCKPT_COMPLETE=complete_" in printed.stdout and printed.stderr == ""
