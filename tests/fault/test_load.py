"""Many jobs save on one node at once: none fails, and none waits much longer than another.

``TIERCKPT_TEST_SAVERS`` sets their number (``make torture``: 64).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault import single_scenarios
from tests.fault.runner import start
from tests.services import ALONE_SECONDS, shared_memory_alone

SAVERS = int(os.environ.get("TIERCKPT_TEST_SAVERS", "8"))
SAVES = 12
"""Enough that no saver ends within the burst of a disk with a budget: fairness shows only after it."""
FAIRNESS_MAX = 3.0

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60 + ALONE_SECONDS + 20 * SAVERS)]


@pytest.fixture
def shared() -> Iterator[str]:
    """Another file system, so that bytes are copied; for very many savers the same one, as /dev/shm is too small."""
    folder = tempfile.mkdtemp(prefix="shared-", dir="/dev/shm" if SAVERS <= 8 else None)
    with shared_memory_alone():
        yield f"file://{folder}"
        shutil.rmtree(folder)


@pytest.mark.slow
def test_savers_of_one_node_get_equal_throughput(tmp_path: Path, shared: str, record_property: Any) -> None:
    options = {"uri": shared, "savers": SAVERS, "saves": SAVES}
    savers = range(SAVERS)
    jobs = [start(single_scenarios.save_often, tmp_path / str(saver), saver=saver, **options) for saver in savers]
    codes = [job.codes(30 + 15 * SAVERS)[0] for job in jobs]
    for job in jobs:
        job.kill()
    assert codes == [0] * SAVERS, jobs[0].output()[-5000:]
    results = [job.results()[0] for job in jobs]
    assert [(step, whole) for _, _, step, whole in results] == [(SAVES, True)] * SAVERS
    for tier, column in (("local", 0), ("shared", 1)):
        seconds = [one[column] for one in results]
        fairness = max(seconds) / min(seconds)
        record_property(f"{tier}_fairness", round(fairness, 2))
        record_property(f"{tier}_seconds", round(max(seconds), 2))
        assert fairness <= FAIRNESS_MAX, f"to the {tier} tier: {sorted(seconds)}"
