"""A store that refuses: the first save raises; later saves stay on the SSD and drain after recovery.

Closing during an outage ends after ``exit_timeout_seconds``. Ranks with different URIs raise.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.compat.worker import launch
from tests.fault.scenario_tools import of_each_rank
from tests.integration.test_resume import heal, proxy
from tests.servers.faultproxy import FaultProxy, Kind, Plan, scripted
from tests.services import S3Server, free_port
from tierckpt import Checkpointer, TierStorageWriter
from tierckpt.checkpoint.journal import Journal
from tierckpt.client import close_all, get_client
from tierckpt.errors import ConfigError, OperationTimeoutError, StoreError
from tierckpt.training.drain_decider import SaveDirective
from tierckpt.training.interval import IntervalController

pytestmark = pytest.mark.server

__all__ = ["proxy"]  # fixture
REFUSALS = {
    "403": ("403 Forbidden", "AccessDenied"),
    "404": ("404 Not Found", "NoSuchBucket"),
    "412": ("412 Precondition Failed", "PreconditionFailed"),
}


@pytest.fixture
def run(moto: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TIERCKPT_EXIT_TIMEOUT_SECONDS", "20")
    with moto.bucket() as bucket:
        yield f"s3://{bucket}/run"
        heal(proxy)


def refuse(proxy: FaultProxy, how: str) -> None:
    proxy.answer = lambda verb, path, _: scripted(*REFUSALS[how], verb)


# --- in the middle of a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["403", "404"])
def test_refusal_at_first_contact_fails_the_first_save(how: str, run: str, proxy: FaultProxy) -> None:
    refuse(proxy, how)
    with pytest.raises(StoreError):  # from the future, if the store answers late
        Checkpointer(run, exit_timeout_seconds=0).save(1, {"value": 1}).result(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("how", REFUSALS)
def test_expired_credentials_fail_no_save(
    how: str, run: str, proxy: FaultProxy, local_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each save reaches the SSD and drains when the store accepts requests again."""
    checkpointer = Checkpointer(run)
    checkpointer.save(1, {"value": 1}).result(timeout=60)
    checkpointer.wait()
    refuse(proxy, how)
    with caplog.at_level(logging.WARNING):
        for step in (2, 3, 4):
            checkpointer.save(step, {"value": step}).result(timeout=60)
        deadline = time.monotonic() + 60
        while not any("is refused by its store" in line for line in caplog.messages):
            assert time.monotonic() < deadline, caplog.messages
            time.sleep(0.02)
    assert len(Journal(local_root).entries()) == 3
    proxy.answer = None
    checkpointer.close()
    close_all()
    assert Checkpointer(run, local_root=tmp_path / "fresh").restore({"value": 0}) == 4


def test_plain_dcp_saves_continue(run: str, proxy: FaultProxy, tmp_path: Path) -> None:
    for step in (1, 2):
        if step == 2:
            refuse(proxy, "403")
        dcp.save({"w": torch.full((10,), step)}, storage_writer=TierStorageWriter(f"{run}/step-{step}"), no_dist=True)
        if step == 1:
            tierckpt.wait(f"{run}/step-1", timeout_seconds=60)
    proxy.answer = None
    tierckpt.wait(f"{run}/step-2", timeout_seconds=60)
    assert tierckpt.latest(run, local_root=tmp_path / "fresh") == f"{run}/step-2"


@pytest.mark.parametrize("how", REFUSALS)
def test_transient_refusal_at_the_start_of_a_save(how: str, run: str, proxy: FaultProxy, tmp_path: Path) -> None:
    checkpointer = Checkpointer(run)
    checkpointer.save(1, {"value": 1}).result(timeout=60)
    left = [1]

    def once(verb: str, path: str, _: bytes) -> bytes | None:
        if not path.endswith("/step-2/.tierckpt/claim.json") or verb != "GET":
            return None
        left[0] -= 1
        return scripted(*REFUSALS[how], verb) if left[0] >= 0 else None

    proxy.answer = once
    checkpointer.save(2, {"value": 2}).result(timeout=60)
    assert left[0] <= 0, "the request was not refused"
    checkpointer.close()
    close_all()
    assert Checkpointer(run, local_root=tmp_path / "fresh").restore({"value": 0}) == 2


def test_direct_puts_stay_on_the_ssd_during_refusals(
    run: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(run, interval=1, exposure_seconds_max=math.inf, exit_timeout_seconds=0)
    checkpointer.save(1, {"value": 1}).result(timeout=60)
    checkpointer.wait()
    straight = SaveDirective(is_sent=True, is_direct_put=True)
    monkeypatch.setattr(IntervalController, "before_save", lambda *_, **__: straight)
    refuse(proxy, "403")
    checkpointer.save(2, {"value": torch.ones(5000)}).result(timeout=60)
    proxy.answer = None
    checkpointer.wait(timeout_seconds=60)


# --- closing -------------------------------------------------------------------------------------------------------


CLOSING = """
import sys, time
import tierckpt
with tierckpt.Checkpointer(sys.argv[1], keep_last=2) as checkpointer:
    for step in (1, 2, 3):
        checkpointer.save(step, {"value": step}).result(timeout=60)
    print("leaving", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mover"), [("refused", "agent"), ("hanging", "inline")])
def test_exit_during_an_outage_ends_at_its_timeout(
    kind: str, mover: str, run: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    """One timeout covers saves, drains, retention, records and process exit."""
    endpoint = os.environ["AWS_ENDPOINT_URL"] if kind == "hanging" else f"http://127.0.0.1:{free_port()}"
    env = {**os.environ, "AWS_ENDPOINT_URL": endpoint, "TIERCKPT_EXIT_TIMEOUT_SECONDS": "8", "TIERCKPT_MOVER": mover}
    env["TIERCKPT_LOCAL_ROOT"] = str(tmp_path / "l")
    if kind == "hanging":
        proxy.plans[run.split("/")[2]] = Plan(Kind.HANG, share=1.0)
    process = subprocess.Popen(
        [sys.executable, "-c", CLOSING, run], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "leaving\n"
        begun = time.monotonic()
        _, errors = process.communicate(timeout=120)
        seconds = time.monotonic() - begun
    finally:
        process.kill()
    assert process.returncode == 1 and "OperationTimeoutError" in errors, errors
    assert "closing: waiting for" in errors and "of 8 s left" in errors and "Ctrl-C" in errors, errors
    assert seconds < 60, f"{seconds:.1f} s\n{errors}"
    assert len(Journal(tmp_path / "l").entries()) == 3, "all saves must stay in the journal"
    for entry in Journal(tmp_path / "l").entries():  # lets its agent exit
        Journal(tmp_path / "l").remove(entry.token)


@pytest.mark.slow
def test_process_exit_does_not_wait_again(run: str, proxy: FaultProxy) -> None:
    proxy.plans[run.split("/")[2]] = Plan(Kind.SLOW_DOWN, share=1.0)
    checkpointer = Checkpointer(run, exit_timeout_seconds=3)
    checkpointer.save(1, {"value": 1}).result(timeout=60)
    with pytest.raises(OperationTimeoutError):
        checkpointer.close()
    client = get_client(checkpointer.settings)
    client.settings = client.settings.model_copy(update={"exit_timeout_seconds": 600.0})
    exits = threading.Thread(target=client.finish, daemon=True)
    exits.start()
    exits.join(60)
    assert not exits.is_alive()


# --- ranks ---------------------------------------------------------------------------------------------------------


def differ(uris: list[str]) -> dict[str, Any]:
    """Return the errors of Checkpointer and plain ``dcp.save`` if each rank has its own URI."""
    rank = dist.get_rank()
    own_errors: dict[str, str] = {}
    try:
        Checkpointer(uris[rank]).close()
    except ConfigError as error:
        own_errors["checkpointer"] = error.message
    try:
        dcp.save({"w": torch.ones(10), f"own-{rank}": torch.ones(5)}, storage_writer=TierStorageWriter(uris[rank]))
    except BaseException as error:
        own_errors["save"] = str(error)
    return {"told": of_each_rank(own_errors)}


@pytest.mark.slow
def test_ranks_with_different_uris_raise(file_uri: str) -> None:
    uris = [f"{file_uri}/a", f"{file_uri}/a", f"{file_uri}/b"]
    by_rank = launch("tests.integration.test_refusals:differ", 3, timeout_seconds=90, uris=uris)["told"]
    for rank in by_rank:
        assert f"rank 2 has {uris[2]}" in rank["checkpointer"] and f"rank 0 has {uris[0]}" in rank["checkpointer"]
        assert f"rank 2 has {uris[2]}" in rank["save"]
