"""Helper processes of tierckpt run no modules planted in the working directory or on a relative path."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents import until
from tierckpt.agent import handoffs
from tierckpt.agent.handoffs import ClientProcess, HeldHandoff, SaveHandoffs
from tierckpt.config import Settings
from tierckpt.format.layout import agent_dir
from tierckpt.ipc.agent_client import LOCK, AgentClient
from tierckpt.process_start import clean_environment, start_python

pytestmark = pytest.mark.usefixtures("short_idle_time")

PLANTED = ("torch", "json", "socket", "asyncio", "pydantic", "obstore", "typer", "numpy", "sitecustomize", "tierckpt")
SETTINGS = {"mover": "agent"}


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with modules that leave marks when imported. Yields the directory of the marks."""
    marks, folder = tmp_path / "marks", tmp_path / "cwd"
    marks.mkdir()
    folder.mkdir(mode=0o777)
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"import os\nos.close(os.open({str(marks / name)!r}, os.O_CREAT))\n")
    folder.chmod(0o777)
    monkeypatch.chdir(folder)
    yield marks


def marks_of(marks: Path) -> list[str]:
    return sorted(path.name for path in marks.iterdir())


def runs(marks: Path, *command: str, **environment: str) -> list[str]:
    subprocess.run([sys.executable, *command], env=os.environ | environment, timeout=120, check=False)
    return marks_of(marks)


def test_control_planted_modules_run_without_protection(hostile: Path) -> None:
    assert "torch" in runs(hostile, "-c", "import torch")
    assert "sitecustomize" in runs(hostile, "-c", "", PYTHONPATH=":/nowhere")  # an empty entry: the working directory


@pytest.mark.parametrize("path", ["", ".:", "cwd"])
def test_agent_and_its_helpers_run_no_planted_code(
    path: str, hostile: Path, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path_list = str(Path.cwd()) if path == "cwd" else path
    monkeypatch.setenv("PYTHONPATH", path_list)
    monkeypatch.setenv("PYTHONSTARTUP", str(Path.cwd() / "torch.py"))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::torch.Warning")
    with contextlib.closing(AgentClient(Settings.load(local_root=local_root, **SETTINGS))) as contact:
        pid = contact.ask({"op": "status"})["pid"]
        try:
            assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
        finally:
            contact.ask({"op": "stop"})
    assert marks_of(hostile) == []


@pytest.mark.slow
def test_helper_that_finishes_a_save_runs_no_planted_code(hostile: Path) -> None:
    """The helper of an agent that a user started there; it imports torch and ends at the first descriptor."""
    save = SaveHandoffs(
        "none", 1, True, {0: HeldHandoff(ClientProcess(1), {"handoff": os.open(os.devnull, os.O_RDONLY)})}
    )
    process, life = handoffs.start_executor(save)
    save.close()
    process.wait(120)
    os.close(life)
    assert marks_of(hostile) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-m",), ("-P", "-m")])
def test_command_line_runs_no_planted_code(options: tuple[str, ...], hostile: Path, local_root: Path) -> None:
    (Path.cwd() / "tierckpt.py").unlink()  # `python -m tierckpt` imports that one by design
    assert runs(hostile, *options, "tierckpt.cli", "status", "--local-root", str(local_root)) == []
    command = [sys.executable, *options, "tierckpt.cli", "agent", "--leave-when-idle", "--local-root", str(local_root)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until((agent_dir(local_root) / LOCK).exists, "the agent to start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert marks_of(hostile) == []


def test_only_absolute_and_protected_path_lists_are_inherited(tmp_path: Path) -> None:
    own, open_to_all = tmp_path / "own", tmp_path / "open"
    own.mkdir(mode=0o755)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    path_list = f"{own}:relative:.::{open_to_all}:{tmp_path / 'missing'}"
    cleaned = clean_environment(
        {"PYTHONPATH": path_list, "PYTHONINSPECT": "1", "LD_PRELOAD": "/lib/x.so", "HOME": "/h"}
    )
    home = str(Path(handoffs.__file__).parents[2])
    assert cleaned.pop("PYTHONPATH").split(":") in ([str(own), home], [str(own)])
    assert cleaned == {"PYTHONSAFEPATH": "1", "LD_PRELOAD": "/lib/x.so", "HOME": "/h"}


def test_relative_executable_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "python")
    with pytest.raises(FileNotFoundError):
        start_python("tierckpt.agent")
