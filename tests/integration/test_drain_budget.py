"""Rate limits of real drains to a file system and to S3, changed by commands during the drain."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.agents import until
from tests.command_line import CommandLine
from tests.states import load, same, save
from tierckpt.checkpoint.journal import Journal
from tierckpt.client import Client, close_all
from tierckpt.config import Settings
from tierckpt.drain.rate_limiter import change_control
from tierckpt.stores.local import LocalStore

MIB = 1 << 20
STATE_BYTES = 12 * MIB
SHARDS = {"shard_size_bytes_max": "4MiB", "chunk_size_bytes": "1MiB"}


@pytest.fixture(autouse=True)
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable hard links, as if the shared tier were on another file system."""

    async def cannot(*_: Any) -> bool:
        return False

    monkeypatch.setattr(LocalStore, "link", cannot)


def saved_and_not_drained(uri: str, local_root: Path) -> dict[str, Any]:
    """Save while drains are paused and close the movers: all entries stay in the journal."""
    change_control(local_root, paused=True)
    state = {f"w{number}": torch.randn(MIB // 4) for number in range(12)}
    save(uri, state, **SHARDS)
    close_all()
    assert [entry.state for entry in Journal(local_root).entries()] == ["ready"]
    change_control(local_root, paused=False)
    return state


class Drain:
    """Drains the whole journal in its own mover and measures the time."""

    def __init__(self, **settings: Any) -> None:
        self.client = Client(Settings.load(drain=False, **SHARDS, **settings), self._listen)
        self.done_bytes = 0
        self.seconds = 0.0
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _listen(self, progress: Any) -> None:
        if progress.done_bytes:
            self.done_bytes = progress.done_bytes

    def _run(self) -> None:
        self.result = self.client.run(self.client.mover.drains.drain_all(patient=True))
        self.seconds = time.monotonic() - self._begun

    def finish(self) -> float:
        self._thread.join(120)
        assert not self._thread.is_alive()
        self.client.close()
        assert [one.outcome for one in self.result[0]] == ["committed"]
        assert self.result[1] == []
        return self.seconds


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.server)])
def shared(request: pytest.FixtureRequest) -> str:
    return f"{request.getfixturevalue(f'{request.param}_uri')}/step-1"


@pytest.mark.slow
def test_drain_keeps_its_rate_limit(shared: str, local_root: Path) -> None:
    state = saved_and_not_drained(shared, local_root)
    seconds = Drain(drain_bytes_per_second="8MiB").finish()
    least = (STATE_BYTES - 2 * MIB) / (8 * MIB)  # a quarter of a second's bytes may go at once
    assert seconds >= least * 0.98
    assert same(load(shared, state, local_root=local_root / "elsewhere"), state)


@pytest.mark.slow
def test_command_changes_the_rate_of_a_running_drain(shared: str, local_root: Path, cli: CommandLine) -> None:
    saved_and_not_drained(shared, local_root)
    drain = Drain(drain_bytes_per_second="256KiB")
    until(lambda: drain.done_bytes >= MIB, "the first MiB")
    begun, left = time.monotonic(), STATE_BYTES - drain.done_bytes
    document = cli.answer("drain", "--limit", "1GiB/s", "--concurrency", "2")
    assert (document["bytes_per_second"], document["concurrency"], document["paused"]) == (1 << 30, 2, False)
    drain.finish()
    assert time.monotonic() - begun < 0.8 * left / (256 << 10), "44 s at the original rate"
    assert drain.client.mover.limiter.concurrency == 2


@pytest.mark.slow
def test_pause_and_resume_apply_to_every_mover_of_the_node(file_uri: str, local_root: Path, cli: CommandLine) -> None:
    uri = f"{file_uri}/step-1"
    state = saved_and_not_drained(uri, local_root)
    drain = Drain(drain_bytes_per_second="256KiB")
    until(lambda: drain.done_bytes >= MIB, "the first MiB")
    assert cli.answer("drain", "--pause", "--limit", "3MiB/s")["paused"] is True  # 4 s for the rest, were it not
    stood_at = -1
    while stood_at != drain.done_bytes:  # each mover checks once a second
        stood_at = drain.done_bytes
        time.sleep(1.5)
    assert stood_at < STATE_BYTES
    assert cli.answer("status")["budget"]["paused"] is True
    assert cli.answer("drain", "--resume", "--limit", "none")["paused"] is False
    assert cli.answer("status")["budget"] == {
        "bytes_per_second": None,
        "concurrency": Settings.load().concurrency,
        "paused": False,
        "problem": None,
    }
    drain.finish()
    assert same(load(uri, state, local_root=local_root / "elsewhere"), state)


def test_status_reports_a_damaged_control_file(local_root: Path, cli: CommandLine) -> None:
    local_root.mkdir(parents=True, exist_ok=True)
    (local_root / "control.json").write_text("{")
    assert "is not a control file" in cli.answer("status")["budget"]["problem"]
    cli.answer("drain", "--resume")
    assert cli.answer("status")["budget"]["problem"] is None


def test_hard_links_are_made_while_drains_are_paused(
    file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # enable links again
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(local_root))
    monkeypatch.setenv("TIERCKPT_MOVER", "inline")
    change_control(local_root, paused=True)
    state = {"w": torch.randn(MIB)}
    save(f"{file_uri}/step-1", state, drain_bytes_per_second=1)
    tierckpt.wait(f"{file_uri}/step-1", timeout_seconds=60, drain_bytes_per_second=1)


@pytest.mark.parametrize(
    "arguments",
    [("--limit", "fast"), ("--limit", "0"), ("--concurrency", "0"), ("--pause", "--wait"), ("--limit", "-5MiB")],
)
def test_invalid_drain_options_are_refused(arguments: tuple[str, ...], local_root: Path, cli: CommandLine) -> None:
    done = cli("drain", *arguments)
    assert (done.code, done.error["error"]) == (2, "ConfigError")
    assert not (local_root / "control.json").exists()
