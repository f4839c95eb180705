"""The ``tierckpt`` command in this process, and Python programs in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tests.services import REPOSITORY
from tierckpt.cli.ui.app import run


@dataclass(frozen=True)
class Done:
    """A completed command line."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.out)  # type: ignore[no-any-return]

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.err)  # type: ignore[no-any-return]


class CommandLine:
    """``cli("ls", uri)`` runs ``tierckpt ls uri --json`` in this process; ``cli.text`` runs it without ``--json``."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def text(self, *arguments: object) -> Done:
        self._capsys.readouterr()
        code = run([*map(str, arguments)])
        return Done(code, *self._capsys.readouterr())

    def __call__(self, *arguments: object) -> Done:
        return self.text(*arguments, "--json")

    def answer(self, *arguments: object) -> dict[str, Any]:
        """Return the document of a command that must succeed."""
        done = self(*arguments)
        assert done.code == 0, (arguments, done.err)
        return done.document


def python(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that finds the packages of this checkout. ``options`` are those of ``Popen``."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    given = {"cwd": REPOSITORY, "timeout": 120.0, "check": False} | options
    return subprocess.run(command, capture_output=True, text=True, **given)
