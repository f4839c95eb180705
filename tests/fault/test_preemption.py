"""SIGTERM, and SIGKILL 30 seconds later, with 1 GiB on its way: the step is on the SSD, and where it fits on shared
storage too; what is left is said, and drained by whoever comes next.

``TIERCKPT_TEST_PREEMPTIONS`` is how often (``make torture``: 17 of each of four ways).
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents import until
from tests.fault import single_scenarios
from tests.fault.runner import start
from tests.services import ALONE_SECONDS, shared_memory_alone

KILL_SECONDS = 30.0
TIMES = int(os.environ.get("TIERCKPT_TEST_PREEMPTIONS", "1"))
SLOW_BYTES_PER_SECOND = 10_000_000
"""512 MiB take 50 s: more than is given."""
SHORT_GRACE_SECONDS = 10.0

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150 + ALONE_SECONDS)]


@pytest.fixture
def shared() -> Iterator[str]:
    """Memory, which stands for storage on another file system than the SSD: nothing can be linked."""
    folder = tempfile.mkdtemp(prefix="shared-", dir="/dev/shm")
    with shared_memory_alone():
        yield f"file://{folder}/run"
        shutil.rmtree(folder)


def preempt(folder: Path, shared: str, **settings: Any) -> tuple[int | None, float, str]:
    """Send SIGTERM as soon as step 2 is staged. Returns the exit code, None if SIGKILL was needed; seconds; the log."""
    job = start(single_scenarios.train_until_told, folder, uri=shared, **settings)
    until((folder / "staged").exists, "the second step to be staged")
    begun = time.monotonic()
    os.kill(job.pids[0], signal.SIGTERM)
    [code] = job.codes(KILL_SECONDS)
    seconds = time.monotonic() - begun
    job.kill()
    return code, seconds, job.output()


def comes_back(folder: Path, shared: str, **arguments: Any) -> tuple[int | None, bool]:
    """Which step a restarted job finds, and whether it is whole."""
    job = start(single_scenarios.come_back, folder, uri=shared, **arguments)
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
    code, seconds, log = preempt(tmp_path, shared, mover="inline", **slow)
    assert (code, seconds < SHORT_GRACE_SECONDS + 5) == (-signal.SIGTERM, True), log[-2000:]
    assert f"{shared.removeprefix('file://')}/step-2 is on the local tier only; `tierckpt drain --wait` finishes" in log
    other = {"mover": "inline", "local_root": str(tmp_path / "another node")}
    assert comes_back(tmp_path, shared, **other) == (1, False)  # what is committed there is older, and whole
    assert comes_back(tmp_path, shared, mover="inline", drain=True) == (2, True)
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
    """Control."""
    code, _, _ = preempt(tmp_path, shared, mover="inline", grace_seconds=0)
    assert code == -signal.SIGTERM
    assert comes_back(tmp_path, shared, mover="inline") == (1, False)
