"""The command line without a reader, without room for its output, and on poor terminals (tierckpt/cli/ui/app.py)."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.services import ENVIRONMENT, REPOSITORY, init_of, pid_namespace, unavailable
from tierckpt.cli.ui.app import app, run

RUN = """
import json, sys
from pathlib import Path
from tierckpt.process_start import begin_command
begin_command()
from tierckpt.cli.ui.app import run
Path(sys.argv[2]).write_text(json.dumps([run(arguments) for arguments in json.loads(sys.argv[1])]))
"""
BEYOND_ASCII = "modèle"
UNDECODABLE = "\udcff"

SIZE = ["size", "--params", "7e9"]
SHOWN = [["status"], ["ls", "{runs}"], ["info", "{run}"], SIZE, ["--help"], ["ls", "--help"], ["status", "--json"]]
DONE = [["prefetch", "{source}", "--to", "{base}/to"], ["drain"], ["cache", "ls"]]
REFUSED = [["ls", "{base}/nowhere"], ["no-verb"]]
SHOWN_ALL = [
    *([*arguments, "--json"] for arguments in (["ls", "{runs}"], ["info", "{run}"], SIZE, ["verify", "{run}"])),
    ["prefetch", "{source}", "--to", "{base}/to", "--json"],
    ["simulate", "--help"],
    ["--version"],
]
DONE_ALL = [
    ["verify", "{run}"],
    ["restore", "{run}", "--to", "{base}/restored"],
    ["drill", "{run}"],
    ["export", "{run}", "--to", "{base}/exported"],
    ["prune", "{runs}", "--keep-last", "1"],
    ["adopt", "{plain}", "{base}/adopted/step-1"],
    ["doctor"],
    ["agent", "--stop"],
    ["cache", "unpin", "{source}"],
    ["drain", "--wait"],
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A run with one checkpoint, and other files."""
    base = tmp_path_factory.mktemp("place")
    source = base / "source"
    source.mkdir()
    (source / BEYOND_ASCII).write_text("{}")
    code = """
import sys, torch, torch.distributed.checkpoint as dcp, tierckpt
dcp.save({"weight": torch.ones(4)}, storage_writer=tierckpt.TierStorageWriter(sys.argv[1] + "/runs/step-1"))
tierckpt.wait(sys.argv[1] + "/runs/step-1")
dcp.save({"weight": torch.ones(4)}, checkpoint_id=sys.argv[1] + "/plain")
"""
    environment = {**ENVIRONMENT, "TIERCKPT_LOCAL_ROOT": str(base / "root"), "TIERCKPT_MOVER": "inline"}
    subprocess.run([sys.executable, "-c", code, str(base)], cwd=REPOSITORY, env=environment, check=True)
    (base / "runs" / UNDECODABLE).mkdir()
    names = {"base": base, "source": source, "runs": base / "runs", "run": base / "runs" / "step-1"}
    return {name: str(path) for name, path in (names | {"plain": base / "plain"}).items()}


@contextmanager
def unread(condition: str) -> Iterator[dict[str, object]]:
    """Options of ``Popen`` for streams that cannot be written."""
    if condition == "no room":
        with open("/dev/full", "wb") as full:  # noqa: PTH123
            yield {"stdout": full, "stderr": full}
    elif condition == "closed":
        yield {"preexec_fn": lambda: os.closerange(0, 3)}
    else:
        reading, writing = os.pipe()
        os.close(reading)
        try:
            yield {"stdout": writing, "stderr": writing}
        finally:
            os.close(writing)


def codes_of(
    commands: Sequence[Sequence[str]], place: Mapping[str, str], scratch: Path, **options: object
) -> list[int]:
    """Exit codes of command lines, one after the other in one process."""
    filled = [[word.format_map(place | {"base": str(scratch)}) for word in command] for command in commands]
    result = scratch / "codes.json"
    environment = {**ENVIRONMENT, "TIERCKPT_LOCAL_ROOT": place["base"] + "/root", "TIERCKPT_MOVER": "inline"}
    environment |= options.pop("env", {})  # type: ignore[call-overload,operator]
    arguments = [sys.executable, "-c", RUN, json.dumps(filled), str(result)]
    options = {"cwd": REPOSITORY, **options}
    child = subprocess.Popen(arguments, env=environment, **options)  # type: ignore[call-overload]
    assert child.wait(150) == 0
    codes: list[int] = json.loads(result.read_text())
    return codes


@pytest.mark.slow
@pytest.mark.parametrize("condition", ["no room", "closed", "no reader"])
def test_work_that_is_done_stays_done_and_a_lost_answer_is_an_error(
    condition: str, place: dict[str, str], tmp_path: Path
) -> None:
    with unread(condition) as options:
        codes = codes_of([*SHOWN, *SHOWN_ALL, *DONE, *DONE_ALL, *REFUSED], place, tmp_path, **options)
    assert codes == [1] * len(SHOWN + SHOWN_ALL) + [0] * len(DONE + DONE_ALL) + [4, 2]
    assert (tmp_path / "to" / BEYOND_ASCII).exists()


def test_a_command_says_why_its_answer_is_lost(place: dict[str, str], tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full, (tmp_path / "said").open("wb") as said:  # noqa: PTH123
        commands = [["ls", "{runs}"], ["drain"], ["drain", "--json"]]
        assert codes_of(commands, place, tmp_path, stdout=full, stderr=said) == [1, 0, 1]
    shown = (tmp_path / "said").read_text().splitlines()
    assert shown[0] == "error: its output cannot be written: No space left on device"
    assert shown[2].startswith("warning: drain ended with exit code 0, but its output cannot be written")


def test_a_lost_socket_of_a_verb_is_not_taken_for_a_lost_reader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("tierckpt.cli.ui.session.Session.settings", broken)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # typer puts another there
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    assert run(["status"]) == 1
    assert "Broken pipe" in capsys.readouterr().err


# --- terminals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii:strict", "COLUMNS": "20"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "1"},
        {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "0"},
    ],
    ids=lambda one: " ".join(one),
)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_tables_of_any_names_on_any_terminal(
    environment: dict[str, str], is_terminal: bool, place: dict[str, str], tmp_path: Path
) -> None:
    to = ["prefetch", "{source}", "--to", "{base}/to"]
    commands = [*SHOWN, to, ["cache", "check", *to[1:], "--json"], ["prefetch", "{source}"], ["cache", "ls"], *REFUSED]
    try:
        ours, theirs = pty.openpty() if is_terminal else os.pipe()
    except OSError as error:
        unavailable(f"no terminal can be opened: {error}")
    options = {"stdout": theirs, "stderr": theirs, "stdin": theirs if is_terminal else subprocess.DEVNULL}
    reader = subprocess.Popen(["cat"], stdin=ours, stdout=(tmp_path / "shown").open("wb"), stderr=subprocess.DEVNULL)
    os.close(ours)
    try:
        codes = codes_of(commands, place, tmp_path, env=environment, **options)
    finally:
        os.close(theirs)
        reader.wait(60)
    assert codes == [0] * (len(commands) - 2) + [4, 2], (tmp_path / "shown").read_text(errors="replace")
    assert "Traceback" not in (tmp_path / "shown").read_text(errors="replace")


# --- working directory -----------------------------------------------------------------------------------------


def test_verbs_need_no_working_directory_but_for_relative_paths(place: dict[str, str], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    commands = [*SHOWN, *DONE, ["verify", "{run}"], ["doctor"]]
    export = ["export", "{run}", "--to", "{base}/exported"]  # torch needs a directory: it leaves the removed one
    relative = [["ls", "runs"], ["prefetch", "{source}", "--to", "to"], ["status", "--local-root", "root"]]
    with (tmp_path / "said").open("wb") as said:
        options = {"cwd": gone, "preexec_fn": gone.rmdir, "stdout": subprocess.DEVNULL, "stderr": said}
        codes = codes_of([*commands, *relative, export], place, tmp_path, **options)
    messages = (tmp_path / "said").read_text()
    assert codes == [0] * len(commands) + [2] * len(relative) + [0], messages
    assert messages.count("the working directory of this process was removed") == len(relative)


def test_the_command_begins_in_a_working_directory_that_was_removed(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = [sys.executable, "-m", "tierckpt", "--version"]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run(command, cwd=gone, preexec_fn=gone.rmdir, env=environment, check=False).returncode == 0


# --- signals ---------------------------------------------------------------------------------------------------

URI = "s3://bucket/run"
WAITING = {
    "prefetch": ["prefetch", URI, "--to", "{base}/to"],
    "prefetch hf": ["prefetch", "hf://org/name", "--to", "{base}/to"],
    "ls": ["ls", URI],
    "info": ["info", URI],
    "verify": ["verify", URI],
    "restore": ["restore", URI, "--to", "{base}/to"],
    "export": ["export", URI, "--to", "{base}/to"],
    "prune": ["prune", URI, "--keep-last", "1"],
    "drill": ["drill", URI],
    "doctor": ["doctor", URI],
    "report": ["report", URI],
    "size": ["size", "--checkpoint", URI],
}
QUICK = ("prefetch", "prefetch hf")


@contextmanager
def waiting(verb: str, base: Path, before: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A verb that waits for the answer of a server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        endpoint = "http://{}:{}".format(*server.getsockname())
        environment = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
        environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(base / "hf"), "TIERCKPT_LOCAL_ROOT": str(base / "root")}
        command = [*before, sys.executable, "-m", "tierckpt", *(word.format(base=base) for word in WAITING[verb])]
        process = subprocess.Popen(command, env={**ENVIRONMENT, **environment}, stderr=subprocess.DEVNULL)
        try:
            with server.accept()[0]:
                yield process
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "verb", [*QUICK, *(pytest.param(verb, marks=pytest.mark.slow) for verb in WAITING if verb not in QUICK)]
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_a_verb_as_process_1_and_elsewhere(verb: str, number: signal.Signals, tmp_path: Path) -> None:
    with waiting(verb, tmp_path) as process:
        process.send_signal(number)
        assert process.wait(60) == (-number if number is signal.SIGTERM else 130)
    with waiting(verb, tmp_path, pid_namespace()) as process:
        os.kill(init_of(process), number)
        assert process.wait(60) == 128 + number


# --- pictures --------------------------------------------------------------------------------------------------


def test_a_watch_ends_with_its_reader(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "TIERCKPT_LOCAL_ROOT": str(tmp_path), "TIERCKPT_PEERS": "127.0.0.1:9"}
    environment |= {"TIERCKPT_PEER_SECRET_FILE": str(tmp_path / "secret")}
    (tmp_path / "secret").write_text("secret" * 10)
    (tmp_path / "secret").chmod(0o600)
    command = [sys.executable, "-m", "tierckpt"]
    options: dict[str, Any] = {"cwd": REPOSITORY, "env": environment, "stdout": subprocess.PIPE}
    status = subprocess.Popen([*command, "status", "--watch", "--interval", "0.1"], **options)
    rollout = subprocess.Popen([*command, "prefetch", "--watch"], **options | {"stderr": subprocess.PIPE})
    assert status.stdout is not None
    assert rollout.stderr is not None
    assert status.stdout.readline().startswith(b"local root")
    status.stdout.close()
    assert status.wait(60) == 1
    rollout.stderr.close()
    assert rollout.wait(50) == 0


# --- help ------------------------------------------------------------------------------------------------------


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from verbs(below, (*path, name))


@pytest.mark.parametrize("path", list(verbs(typer.main.get_command(app))), ids=" ".join)
def test_h_is_help(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*path, "--help"]) == 0
    long = capsys.readouterr().out
    assert long.startswith(" ".join(("Usage: tierckpt", *path)))
    assert run([*path, "-h"]) == 0
    assert capsys.readouterr().out == long


def test_without_arguments_it_lists_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    page = capsys.readouterr().out
    assert all(f" {path[0]} " in page for path in verbs(typer.main.get_command(app)) if path)
