"""An entry that cannot drain within its time limit is set aside: reported, kept on the SSD, retried or given up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import CommandLine
from tests.states import load, same, save, small_state
from tierckpt.cache import space
from tierckpt.checkpoint.journal import READY, SET_ASIDE, Journal, JournalEntry
from tierckpt.client import Client, close_all, wait
from tierckpt.config import Settings
from tierckpt.drain import drainer
from tierckpt.drain.background_drains import BackgroundDrains
from tierckpt.drain.drainer import Drainer
from tierckpt.errors import (
    CommitAbandonedError,
    EndpointError,
    PermissionDeniedError,
    StoreUnavailableError,
    TierckptError,
)
from tierckpt.format.layout import CLAIM, local_dir, parse_uri
from tierckpt.format.manifest import seal
from tierckpt.mover import Mover
from tierckpt.stores import retry


@pytest.fixture
def saved(file_uri: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A step committed on this node, with no drain started."""
    uri = f"{file_uri}/step-1"
    with monkeypatch.context() as patch:
        patch.setattr(Client, "drain_in_background", lambda *_: None)

        async def is_no_link(*_: object) -> bool:
            return False

        patch.setattr(BackgroundDrains, "send_linked", is_no_link)
        save(uri, small_state(1))
    close_all()
    return uri


def only_entry(local_root: Path) -> JournalEntry:
    [entry] = Journal(local_root).entries()
    return entry


def claim_by_another_save(uri: str) -> None:
    claim = Path(uri) / CLAIM
    claim.parent.mkdir(parents=True, exist_ok=True)
    claim.write_bytes(seal({"attempt": "rival", "replaces": []}))


def missing_rank(uri: str, local_root: Path) -> None:
    """A journal entry of 2 ranks; rank 1 never delivers its part."""
    entry = only_entry(local_root)
    assert entry.manifest is not None
    alien = replace(entry.manifest.files[0], path="__1_0-0123456789abcdef.distcp", token="0123456789abcdef", rank=1)
    manifest = replace(entry.manifest, files=(*entry.manifest.files, alien))
    Journal(local_root).write(replace(entry, manifest=manifest))


def run_agent(local_root: Path) -> int:
    command = [sys.executable, "-m", "tierckpt.agent", "0.5"]
    settings = Settings.load(local_root=local_root, commit_timeout_seconds=1.0).model_dump_json()
    return subprocess.run(command, input=settings, text=True, timeout=90, check=False).returncode


def drained_by(local_root: Path, **settings: Any) -> TierckptError | None:
    """Drain the only entry once, with retries."""

    async def work() -> TierckptError | None:
        mover = Mover(Settings.load(local_root=local_root, **settings))
        try:
            _, errors = await mover.drains.drain_all(patient=True)
            return errors[0] if errors else None
        finally:
            await mover.close()

    return asyncio.run(work())


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["another save", "a rank"])
def test_agent_sets_the_entry_aside_and_exits(cause: str, saved: str, local_root: Path, cli: CommandLine) -> None:
    claim_by_another_save(saved) if cause == "another save" else missing_rank(saved, local_root)
    assert run_agent(local_root) == 0, "the agent must exit by itself"
    entry = only_entry(local_root)
    assert entry.state == SET_ASIDE
    reason = "belongs to another save" if cause == "another save" else "other ranks' parts"
    assert reason in entry.error
    begun = time.monotonic()
    assert run_agent(local_root) == 0 and time.monotonic() - begun < 60, "the next agent must exit at once"

    document = cli.answer("status")
    assert document["set_aside"] == 1 and document["lag_seconds"] == 0.0
    assert document["journal"][0]["state"] == SET_ASIDE and reason in document["journal"][0]["last_error"]
    assert "--forget" in cli.text("status").out
    assert cli("drain", "--wait").code == CommitAbandonedError.exit_code, "`drain --wait` must end with an error"
    assert same(load(saved, small_state(1)), small_state(1)), "the acknowledged save must be restorable"
    with pytest.raises(CommitAbandonedError, match="set aside"):
        wait(saved, timeout_seconds=60)


def test_entry_is_retried_when_the_cause_is_fixed(saved: str, local_root: Path, cli: CommandLine) -> None:
    claim_by_another_save(saved)
    set_aside(local_root)
    (Path(saved) / CLAIM).unlink()
    document = cli.answer("drain", "--retry", "--wait")
    assert (document["left"], document["entries"][0]["outcome"]) == (0, "committed")
    assert not Journal(local_root).entries()


def test_give_up_keeps_the_local_copy(saved: str, local_root: Path, cli: CommandLine) -> None:
    claim_by_another_save(saved)
    set_aside(local_root)
    assert cli("drain", "--forget", f"{saved}9").code == 4
    assert cli.answer("drain", "--forget", saved)["forgotten"] == 1
    assert not Journal(local_root).entries()
    assert same(load(saved, small_state(1)), small_state(1))


def set_aside(local_root: Path) -> None:
    drained_by(local_root, commit_timeout_seconds=0.2)
    time.sleep(0.3)
    drained_by(local_root, commit_timeout_seconds=0.2)
    assert only_entry(local_root).state == SET_ASIDE


def test_time_limit_spans_mover_restarts(saved: str, local_root: Path) -> None:
    claim_by_another_save(saved)
    assert drained_by(local_root, commit_timeout_seconds=1000) is not None
    entry = only_entry(local_root)
    assert entry.state == READY and entry.failing_since_unix_seconds > 0
    Journal(local_root).write(replace(entry, failing_since_unix_seconds=entry.failing_since_unix_seconds - 900))
    drained_by(local_root, commit_timeout_seconds=1000)
    assert only_entry(local_root).state == READY
    Journal(local_root).write(replace(entry, failing_since_unix_seconds=entry.failing_since_unix_seconds - 1100))
    drained_by(local_root, commit_timeout_seconds=1000)
    assert only_entry(local_root).state == SET_ASIDE


@pytest.mark.parametrize("error", [PermissionDeniedError, EndpointError, StoreUnavailableError])
@pytest.mark.parametrize(("days", "state"), [(6.9, READY), (7.1, SET_ASIDE)])
def test_transient_errors_have_a_week(
    error: Callable[[str], TierckptError],
    days: float,
    state: str,
    saved: str,
    local_root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = 0

    async def fails(*_: object) -> None:
        nonlocal tries
        tries += 1
        if tries > 3:
            raise asyncio.CancelledError
        raise error("not now")

    monkeypatch.setattr(Drainer, "send_files", fails)
    monkeypatch.setattr(drainer, "NOTE_SECONDS", 0.0)
    monkeypatch.setattr(retry, "PAUSE_SECONDS_MAX", 0.01)
    settings = {"commit_timeout_seconds": 0.01}
    with pytest.raises(asyncio.CancelledError) if error is StoreUnavailableError else nullcontext():
        drained_by(local_root, **settings)
    entry = only_entry(local_root)
    assert entry.state == READY and entry.failing_since_unix_seconds > 0
    if error is StoreUnavailableError:
        assert entry.error == "", "an entry waiting for space must keep waiting"
    tries = 0
    Journal(local_root).write(replace(entry, failing_since_unix_seconds=time.time() - days * 86400))
    waits = error is StoreUnavailableError and state == READY
    with pytest.raises(asyncio.CancelledError) if waits else nullcontext():
        drained_by(local_root, **settings)
    assert only_entry(local_root).state == state


def test_set_aside_checkpoint_is_not_evicted(saved: str, local_root: Path, cli: CommandLine) -> None:
    claim_by_another_save(saved)
    set_aside(local_root)
    settings = Settings.load(local_root=local_root, local_bytes_max=1, local_full_policy="error")
    directory = local_dir(local_root, parse_uri(saved))
    assert not space.has_room(settings, 1 << 20, directory.parent / "step-2")
    cli.answer("prune", Path(saved).parent, "--keep-last", 1)
    assert same(load(saved, small_state(1)), small_state(1))
