"""Many jobs save on one node at once: none fails, and none waits much longer than another.

``TIERCKPT_TEST_SAVERS`` sets their number (``make torture``: 64).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.fault.runner import start
from tests.fault.scenario_tools import counted_state, until
from tests.services import ALONE_SECONDS
from tests.states import same


def save_often(folder: Path, uri: str, saver: int, savers: int, saves: int) -> tuple[Any, ...]:
    """Wait for the others and save. Returns the seconds to each tier, the restored step, and if its bytes are right."""
    state = counted_state(4, 1 << 21, saver + 1)  # 32 MiB
    with tierckpt.Checkpointer(f"{uri}/{saver}", timeout_seconds=300) as checkpointer:
        checkpointer.save(0, state)  # memory, connections
        checkpointer.wait("local")
        (folder.parent / f"ready-{saver}").touch()
        until(lambda: len(list(folder.parent.glob("ready-*"))) == savers)
        begun = time.monotonic()
        for step in range(1, saves + 1):
            checkpointer.save(step, state)
            checkpointer.wait("local")
        local_seconds = time.monotonic() - begun
        checkpointer.wait()
        shared_seconds = time.monotonic() - begun
        wanted = {name: torch.empty_like(value) for name, value in state.items()}
        step_found = checkpointer.restore(wanted)
    return local_seconds, shared_seconds, step_found, same(wanted, state)


# --- the tests --------------------------------------------------------------------------------------------------------

SAVERS = int(os.environ.get("TIERCKPT_TEST_SAVERS", "8"))
SAVES = 12
"""Enough that no saver ends within the burst of a disk with a budget: fairness shows only after it."""
FAIRNESS_MAX = 3.0

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60 + ALONE_SECONDS + 20 * SAVERS)]


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["/dev/shm" if SAVERS <= 8 else None], indirect=True)  # it is too small for more
def test_savers_of_one_node_get_equal_throughput(tmp_path: Path, shared: str, record_property: Any) -> None:
    options = {"uri": shared, "savers": SAVERS, "saves": SAVES}
    savers = range(SAVERS)
    jobs = [start(save_often, tmp_path / str(saver), saver=saver, **options) for saver in savers]
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
