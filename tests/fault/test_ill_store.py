"""A shared store that stops answering around a save: saves return within half a second and are committed locally."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import tierckpt
from tests.waits import SEEDED_SECONDS, TooLongError, counted
from tierckpt.checkpoint import shared_commit
from tierckpt.checkpoint.local_commit import read_local_manifest
from tierckpt.dcp import save_planning
from tierckpt.disk import illness
from tierckpt.errors import AlreadyCommittedError, BucketNotFoundError
from tierckpt.format.layout import local_dir, parse_uri

pytestmark = pytest.mark.ill

Patch = pytest.MonkeyPatch
SECONDS = 60.0
URI = "s3://bucket/run"


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


@pytest.fixture(autouse=True)
def healthy_disk(monkeypatch: Patch) -> None:
    """However busy the machine is, no save is skipped."""
    monkeypatch.setattr(illness, "ILL_SECONDS", SECONDS)
    monkeypatch.setattr(illness, "wait_while", lambda work, progress: not futures.wait(work, SECONDS).not_done)


@pytest.fixture
def silent_store(monkeypatch: Patch) -> Iterator[None]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as server:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
            **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "key"),
            "TIERCKPT_EXIT_TIMEOUT_SECONDS": "0.2",
        }.items():
            monkeypatch.setenv(name, value)
        yield
        tierckpt.client.close_all()


@pytest.mark.usefixtures("silent_store")
def test_saves_continue_while_the_store_is_silent(local_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The store has ten seconds to list its attempts; no step waits for them, not even one that needs space."""
    checkpointer = tierckpt.Checkpointer(URI, checkpoints_in_flight_max=2)
    saved = []
    for step in range(1, 6):
        with counted():
            saved.append(checkpointer.save(step, state(float(step))))
    for one in saved:
        one.result(SECONDS)
    outages = [one for one in caplog.records if "does not answer" in one.getMessage() and one.levelno > logging.DEBUG]
    assert [one.levelname for one in outages] == ["WARNING"]  # one line for all saves
    assert read_local_manifest(local_dir(local_root, parse_uri(f"{URI}/step-5"))) is not None


@pytest.mark.usefixtures("silent_store")
def test_control_wait_for_a_silent_store_is_found(monkeypatch: Patch) -> None:
    """Seeded bug: planning waits for the store."""
    monkeypatch.setattr(save_planning, "wait_while", lambda work, progress: not futures.wait(work, SECONDS).not_done)
    checkpointer = tierckpt.Checkpointer(URI)
    with counted(SEEDED_SECONDS), pytest.raises(CheckpointException, match=TooLongError.__name__):
        checkpointer.save(1, state(1.0))


@pytest.mark.parametrize("answer", ["f" * 16, BucketNotFoundError("no bucket")], ids=["attempt", "refusal"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_late_answer_of_the_store_is_respected_before_the_commit(
    answer: str | BucketNotFoundError, overwrite: bool, file_uri: str, local_root: Path, monkeypatch: Patch
) -> None:
    may_answer = threading.Event()

    async def list_attempts(store: Any) -> set[str]:
        await asyncio.to_thread(may_answer.wait, SECONDS)
        if isinstance(answer, BucketNotFoundError):
            raise answer
        return {answer}

    monkeypatch.setattr(shared_commit, "current_attempts", list_attempts)
    checkpointer = tierckpt.Checkpointer(file_uri, overwrite=overwrite)
    with counted():
        saved = checkpointer.save(1, state(1.0))
    may_answer.set()
    error = saved.exception(SECONDS)
    manifest = read_local_manifest(local_dir(local_root, parse_uri(f"{file_uri}/step-1")))
    if isinstance(answer, str) and overwrite:
        assert error is None and manifest is not None and manifest.replaces == (answer,)
    else:
        assert isinstance(error, AlreadyCommittedError if isinstance(answer, str) else BucketNotFoundError)
        assert manifest is None
