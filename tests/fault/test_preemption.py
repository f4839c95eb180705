"""SIGTERM, and SIGKILL 30 seconds later, with 1 GiB on its way: the step is on the SSD, and where it fits on shared
storage too; what is left is said, and drained by whoever comes next.

``TIERCKPT_TEST_PREEMPTIONS`` is how often (``make torture``: 17 of each of four ways).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.agents import until
from tests.fault.runner import start
from tests.fault.scenario_tools import before, counted_state
from tests.services import ALONE_SECONDS
from tests.states import same
from tierckpt.save import flush


def large_state(tensors: int) -> dict[str, Any]:
    """32 MiB for each."""
    return counted_state(tensors, 1 << 23)


def train_until_told(
    folder: Path, uri: str, tensors: int = 16, stuck: bool = False, slow: bool = False, **settings: Any
) -> None:
    """Save steps 1 and 2. The file ``staged`` appears with step 1 on shared storage, and step 2 on its way to the SSD.

    ``stuck``: the main thread then stays in C code, as in a collective without its peer. ``slow``: step 2 gets to the
    SSD 15 s later, within the grace of a trainer that listens.
    """
    checkpointer = tierckpt.Checkpointer(uri, timeout_seconds=60, **settings)
    checkpointer.save(1, {"small": torch.ones(8)})
    checkpointer.wait()
    if slow:
        before(flush.ShardFile, "finish", lambda *_: time.sleep(15))
    checkpointer.save(2, large_state(tensors))
    (folder / "staged").touch()
    if stuck:
        _wait_in_c()
    time.sleep(1000)


def _wait_in_c() -> None:
    condition, mutex = ctypes.create_string_buffer(128), ctypes.create_string_buffer(128)  # zeros: initialised
    c = ctypes.CDLL(None)
    c.pthread_mutex_lock(mutex)
    c.pthread_cond_wait(condition, mutex)  # no signal ends it


def come_back(
    folder: Path, uri: str, drain: bool = False, tensors: int = 16, **settings: Any
) -> tuple[int | None, bool]:
    """Restore the newest step. Returns which it is, and whether every byte is there. ``drain``: drain step 2 first."""
    with tierckpt.Checkpointer(uri, timeout_seconds=60, **settings) as checkpointer:
        if drain:
            tierckpt.wait(f"{uri}/step-2", timeout_seconds=60, **settings)
        location = tierckpt.latest(uri, **settings)
        step = int(location.rpartition("-")[2]) if location else None
        if step != 2:
            return step, False
        saved = large_state(tensors)
        state = {name: torch.zeros_like(value) for name, value in saved.items()}
        checkpointer.restore(state, step)
        return step, same(state, saved)


# --- the tests --------------------------------------------------------------------------------------------------------

KILL_SECONDS = 30.0
TIMES = int(os.environ.get("TIERCKPT_TEST_PREEMPTIONS", "1"))
SMALL = {"tensors": 2}
SLOW_BYTES_PER_SECOND = 1_000_000
"""64 MiB take 67 s: more than is given."""
SHORT_GRACE_SECONDS = 10.0

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150 + ALONE_SECONDS)]


def preempt(folder: Path, shared: str, **settings: Any) -> tuple[int | None, float, str]:
    """Send SIGTERM as soon as step 2 is staged. Returns the exit code, None if SIGKILL was needed; seconds; the log."""
    job = start(train_until_told, folder, uri=shared, **settings)
    until((folder / "staged").exists, "the second step to be staged")
    begun = time.monotonic()
    os.kill(job.pids[0], signal.SIGTERM)
    [code] = job.codes(KILL_SECONDS)
    seconds = time.monotonic() - begun
    job.kill()
    return code, seconds, job.output()


def comes_back(folder: Path, shared: str, **arguments: Any) -> tuple[int | None, bool]:
    """Which step a restarted job finds, and whether it is whole."""
    job = start(come_back, folder, uri=shared, **arguments)
    step, whole = job.result(60)
    return step, whole


@pytest.mark.slow
@pytest.mark.parametrize("stuck", [False, True])
@pytest.mark.parametrize("time_of", range(TIMES))
def test_what_fits_into_the_grace_period_is_on_shared_storage(
    tmp_path: Path, shared: str, time_of: int, stuck: bool
) -> None:
    code, seconds, log = preempt(tmp_path, shared, mover="inline", grace_seconds=25, stuck=stuck)
    assert (code, seconds < KILL_SECONDS) == (-signal.SIGTERM, True), log[-2000:]
    assert comes_back(tmp_path, shared, mover="inline", local_root=str(tmp_path / "another node")) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("time_of", range(TIMES))
def test_what_does_not_fit_is_on_the_ssd_and_said_and_drained_by_the_next_process(
    tmp_path: Path, shared: str, time_of: int
) -> None:
    slow = {"drain_bytes_per_second": SLOW_BYTES_PER_SECOND, "grace_seconds": SHORT_GRACE_SECONDS}
    code, _, log = preempt(tmp_path, shared, mover="inline", **SMALL, **slow)
    assert code == -signal.SIGTERM, log[-2000:]
    assert f"{shared.removeprefix('file://')}/step-2 is on the local tier only; `tierckpt drain --wait` finishes" in log
    other = {"mover": "inline", "local_root": str(tmp_path / "another node"), **SMALL}
    assert comes_back(tmp_path, shared, **other) == (1, False)  # what is committed there is older, and whole
    assert comes_back(tmp_path, shared, mover="inline", drain=True, **SMALL) == (2, True)
    assert comes_back(tmp_path, shared, **other) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("time_of", range(TIMES))
def test_with_an_agent_the_trainer_leaves_when_its_step_is_safe_and_the_agent_drains_it(
    tmp_path: Path, shared: str, time_of: int
) -> None:
    settings = {"mover": "agent", "idle_seconds": 0.7}
    code, seconds, log = preempt(tmp_path, shared, grace_seconds=25, **settings)
    assert (code, seconds < KILL_SECONDS) == (-signal.SIGTERM, True), log[-2000:]
    assert comes_back(tmp_path, shared, drain=True, **settings) == (2, True)
    other = {"mover": "inline", "local_root": str(tmp_path / "another node")}
    assert comes_back(tmp_path, shared, **other) == (2, True)


@pytest.mark.slow
def test_a_trainer_that_does_not_listen_loses_the_step(tmp_path: Path, shared: str) -> None:
    code, _, _ = preempt(tmp_path, shared, mover="inline", grace_seconds=0, slow=True)
    assert code == -signal.SIGTERM
    assert comes_back(tmp_path, shared, mover="inline") == (1, False)
