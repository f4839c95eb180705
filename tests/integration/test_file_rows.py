"""Progress bars of a transfer on a terminal: the total and the files in flight, in a bounded number of rows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.agents import until
from tests.servers.hub import Repository, fake_hub
from tests.services import ENVIRONMENT, REPOSITORY, free_port
from tierckpt import TierStorageWriter
from tierckpt.cli.ui.app import run
from tierckpt.client import close_all
from tierckpt.stores import retry

UP = re.compile(r"(?:\x1b\[1A\x1b\[2K)+")


def on_terminal(arguments: list[str], environment: Mapping[str, str], tmp_path: Path, columns: int = 100) -> str:
    """Return the output of a command on a terminal. It must exit with 0."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {**ENVIRONMENT, "TERM": "xterm", "TIERCKPT_LOCAL_ROOT": str(tmp_path / "root"), **environment}
    with (tmp_path / "shown").open("wb") as shown:
        reader = subprocess.Popen(["cat"], stdin=ours, stdout=shown, stderr=subprocess.DEVNULL)
    os.close(ours)
    command = [sys.executable, "-m", "tierckpt", *arguments]
    code = subprocess.call(command, env=environment, cwd=REPOSITORY, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    reader.wait(60)
    text = (tmp_path / "shown").read_text()
    assert code == 0, text
    return text


def redrawn(shown: Path) -> Callable[[], None]:
    """Return a wait until the file ``shown`` has grown since the previous wait."""
    turn, seen = threading.Lock(), [0]

    def wait() -> None:
        with turn:
            until(lambda: shown.stat().st_size > seen[0], "the next output", 30)
            seen[0] = shown.stat().st_size

    return wait


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_file_bars_and_total_progress(columns: int, tmp_path: Path) -> None:
    files = {f"model-{number}-of-3.safetensors": os.urandom(1 << 20) for number in range(1, 4)}
    with fake_hub() as hub:
        hub.repositories["org/model"] = Repository()
        hub.repositories["org/model"].commit(files)
        hub.on_piece = redrawn(tmp_path / "shown")
        environment = {"HF_ENDPOINT": hub.endpoint, "TIERCKPT_CHUNK_SIZE_BYTES": "131072"}
        text = on_terminal(["prefetch", "hf://org/model", "--to", str(tmp_path / "to")], environment, tmp_path, columns)
    rows = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", row) for row in re.split(r"\r?\n|\r", UP.sub("\n", text))]
    whole = {int(row.split("%")[0].split()[-1]) for row in rows if row.startswith("prefetch hf://") and "%" in row}
    assert len(whole) > 4 and max(whole) <= 100
    for name in files:
        assert len({row for row in rows if row.endswith(f"% {name}")}) > 1, (name, rows)
    assert max(map(len, rows)) <= columns


def test_every_transfer_verb_names_its_files(
    s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = f"{s3_uri}/step-1"
    with monkeypatch.context() as away:
        away.setattr(retry, "RETRIES_MAX", 0)
        away.setenv("TIERCKPT_EXIT_TIMEOUT_SECONDS", "0")
        away.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        dcp.save({"weights": torch.ones(100_000)}, storage_writer=TierStorageWriter(step, chunk_size_bytes=65536))
        close_all()
    seen: dict[str, int] = {}
    totals: list[int] = []

    @contextlib.contextmanager
    def collect(**_: object) -> Iterator[Any]:
        def listen(progress: Any) -> None:
            totals.append(progress.done_bytes)
            for file in progress.files:
                assert 0 <= file.done_bytes <= file.total_bytes
                seen[file.path] = max(seen.get(file.path, 0), file.done_bytes)

        yield listen

    monkeypatch.chdir(tmp_path)
    verbs = {
        "drain": ["--wait"],
        "verify": [step, "--read-data"],
        "restore": [step, "--to=restored"],
        "export": [step, "--to=model"],
        "drill": [step],
        "prefetch": [step, "--to=fetched", "--local-root=elsewhere"],  # an empty local root, so that files are fetched
    }
    for verb, arguments in verbs.items():
        monkeypatch.setattr("tierckpt.cli.ui.session.progress_bar", collect)
        assert run([verb, *arguments]) == 0, capsys.readouterr().err
        ends = ".safetensors" if verb == "export" else ".distcp"
        assert any(path.endswith(ends) and done > 0 for path, done in seen.items()), (verb, seen)
        assert len(set(totals)) > 1 and totals == sorted(totals), (verb, totals)
        seen.clear()
        totals.clear()
