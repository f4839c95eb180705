"""The printer: what people and programs see, and what strangers' file names cannot do to a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tierckpt.cli.ui.app import run
from tierckpt.cli.ui.output import (
    FILES_SHOWN,
    TRANSFERS_SHOWN,
    Output,
    Report,
    facts,
    human_bytes,
    human_seconds,
    progress_bar,
    table,
)
from tierckpt.errors import ConfigError, PartialTransferError
from tierckpt.telemetry import ignore_progress, logger
from tierckpt.types import FileProgress, Progress


@pytest.fixture
def output() -> Iterator[Output]:
    with closing(Output(as_json=False)) as printer:
        yield printer


@pytest.fixture
def json_output() -> Iterator[Output]:
    with closing(Output(as_json=True)) as printer:
        yield printer


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 << 20, "1.5 GiB"),
        (5 << 40, "5.0 TiB"),
        (3 << 50, "3.0 PiB"),
    ],
)
def test_sizes_as_people_read_them(size_bytes: int, text: str) -> None:
    assert human_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59, "59 s"), (90, "1.5 min"), (7200, "2.0 h"), (129600, "1.5 d")]
)
def test_durations_as_people_read_them(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_a_table_is_neither_cut_nor_wrapped_when_piped(output: Output, capsys: pytest.CaptureFixture[str]) -> None:
    long = "s3://bucket/" + "deep/" * 200 + "step-1"
    output.show(Report({}, [table("uri >size_in_bytes", [(long, 17), ("short", None)]), facts({"result": long})]))
    lines = capsys.readouterr().out.splitlines()
    assert sum(long in line for line in lines) == 2
    assert any("size in bytes" in line for line in lines)
    assert any("short" in line and line.rstrip().endswith("-") for line in lines)


def test_cells_and_facts_are_filled_from_rows(output: Output, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"uri": "{a:b}", "size_bytes": 2048, "good": True, "age": None}, ("more", 1, False, "text")]
    summary = {"size": "{size_bytes:bytes} in {count}", "uri": "{uri}", "left out": ""}
    columns = "uri >its_size=size_bytes:bytes good:yes age:seconds"
    output.show(Report({}, [table(columns, rows), facts(summary, rows[0], count=7), table("empty", [])]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line and "─" not in line[0]] == [
        ["uri", "its", "size", "good", "age"],
        ["{a:b}", "2.0", "KiB", "yes", "-"],
        ["more", "1", "B", "no", "text"],
        ["size", "2.0", "KiB", "in", "7"],
        ["uri", "{a:b}"],
    ]


def test_names_are_printed_as_they_are_and_command_no_terminal(
    output: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "a[red]b[/red]\x1b[2J\x07:smile:\nc\u202e"
    output.show(Report({}, [table("file", [(evil,)]), evil]))
    output.error(PartialTransferError(evil, hint=evil, failures={evil: evil}))
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert "a[red]b[/red]\\x1b[2J\\x07:smile:\\nc\\u202e" in text
        assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_warnings_of_the_library_become_part_of_the_document(
    json_output: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    logger("somewhere").warning("the %s is odd", "disk")
    logger("somewhere").info("nobody asked")
    json_output.show(Report({"a": 1}))
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"a": 1, "warnings": ["the disk is odd"]}
    assert printed.err == ""


def test_warnings_for_people_go_to_stderr(output: Output, capsys: pytest.CaptureFixture[str]) -> None:
    logger("somewhere").warning("the disk is odd")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "warning: the disk is odd\n")


def test_an_error_as_json_is_one_line_with_its_context_and_its_failures(
    json_output: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {"f": "gone", "g": "denied"}
    json_output.error(PartialTransferError("2 of 3", hint="again", uri="s3://b/m", failures=failures))
    json_output.show(Report({"a": 1}))
    printed = capsys.readouterr()
    assert printed.out == '{\n  "a": 1\n}\n' and len(printed.err.splitlines()) == 1
    assert json.loads(printed.err) == {
        "error": "PartialTransferError",
        "message": "2 of 3",
        "hint": "again",
        "uri": "s3://b/m",
        "failures": failures,
    }


def test_each_failure_is_named_to_people(output: Output, capsys: pytest.CaptureFixture[str]) -> None:
    output.error(PartialTransferError("2 of 3", hint="Again", tier="local", failures={"f": "gone", "g": "denied"}))
    assert capsys.readouterr().err == "error: 2 of 3\n  f: gone\n  g: denied\nhint: Again\n"


@pytest.mark.parametrize("options", [{"as_json": True}, {"as_json": False}, {"as_json": False, "progress": "none"}])
def test_no_bar_is_drawn_when_nobody_looks(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(**options) as listener:
        assert listener is ignore_progress
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_transfers_that_are_done_leave_their_rows_to_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with (tmp_path / "shown").open("wb") as shown:
        reader = subprocess.Popen(["cat"], stdin=ours, stdout=shown, stderr=subprocess.DEVNULL)
    os.close(ours)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 120, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        with progress_bar(as_json=False) as listener:
            listener(Progress("first", 1, 2))
            for number in range(40):
                files = tuple(FileProgress(f"{number}/{name}\x1b[2J", 1, 2) for name in range(40))
                listener(Progress(f"drain {number}", 1, 2, files=files))
                time.sleep(0.02)
                if number % 2:
                    for before in (number - 1, number):
                        listener(Progress(f"drain {before}", 2, 2))
            time.sleep(0.2)
    reader.wait(60)
    text = (tmp_path / "shown").read_bytes()
    rows = max(len(up) for up in re.findall(rb"(?:\x1b\[1A\x1b\[2K)+", text)) // len(b"\x1b[1A\x1b[2K") + 1
    assert FILES_SHOWN < rows <= TRANSFERS_SHOWN + FILES_SHOWN + 1
    assert b"first" in text and b"drain 39" in text and b" more files" in text
    assert b"\x1b[2J" not in text


def test_progress_as_json_is_a_line_now_and_then_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tierckpt.cli.ui.output.LINE_SECONDS", 3600.0)
    with progress_bar(as_json=True, progress="json") as listener:
        for done in range(0, 101, 10):
            listener(Progress("drain s3://b/step-1", done, 100, "a\nb"))
        listener(Progress("drain s3://b/step-2", 1, 2))
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(row["what"][-1], row["done_bytes"], row["total_bytes"]) for row in told] == [
        ("1", 0, 100),
        ("1", 100, 100),
        ("2", 1, 2),
    ]
    assert told[0]["note"] == "a\nb"


def test_an_error_that_is_no_error_of_ours_is_called_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("tierckpt.cli.ui.session.Session.settings", broken)
    assert run(["status", "--json"]) == 1
    error = json.loads(capsys.readouterr().err)
    assert "bug" in error["message"]
    assert "ZeroDivisionError" in error["message"]
    monkeypatch.setenv("TIERCKPT_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        run(["status"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"],
        ["nonsense"],
        ["ls", "s4://bucket/run"],
        ["ls", "s3://"],
        ["restore", "s3://b/run"],
        ["ls", "s3://b/run", "--loud"],
        ["export", "/a", "--to", "/b", "--max-shard-size", "much"],
        ["export", "/a", "--to", "/b", "--max-shard-size", "-1GiB"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_2_in_one_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == ConfigError.exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert "hint: " in printed.err
    assert "Traceback" not in printed.err
    assert run([*arguments, "--json"]) == ConfigError.exit_code
    assert json.loads(capsys.readouterr().err)["message"]


@pytest.mark.slow
@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_cli_extra_it_says_how_to_get_it(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from tierckpt.cli import main; main(sys.argv[1:])"
    for arguments in (["ls", "/x"], ["ls", "/x", "--json"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 2
        assert "pip install 'tierckpt[cli]'" in done.stderr
        assert "Traceback" not in done.stderr
    assert json.loads(done.stderr)["error"] == "MissingExtraError"
