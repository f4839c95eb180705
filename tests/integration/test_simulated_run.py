"""The simulator and a real run: a small job is killed repeatedly, then simulated with the measured parameters.

``TIERCKPT_TEST_SWEEP=full`` kills it 25 times; the normal suite three times. ``pytest -s`` shows the agreement.
"""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import CommandLine
from tests.fault import training_scenarios
from tests.fault.runner import start
from tests.unit.planning.test_simulator import RATES
from tierckpt.format.layout import HISTORY_DIR, local_dir, parse_uri
from tierckpt.planning.goodput import Goodput, analyse, read_start
from tierckpt.planning.simulator import Cluster, Configuration, SimulationResult, simulate

KILLS = 25 if os.environ.get("TIERCKPT_TEST_SWEEP") == "full" else 3
MEAN_SECONDS = 2.0
INTERVAL_STEPS = 15
NEVER_DRAINED_BYTES = 1e15
"""The SSD is not lost, so that a restore never needs shared storage."""
AGREEMENT = 0.12 if KILLS < 10 else 0.05
STEP_SECONDS = 0.02

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3 * (60 + 20 * KILLS))]


def killed_at_random(folder: Path, uri: str) -> None:
    chance = random.Random(7)
    options: dict[str, Any] = {"step_seconds": STEP_SECONDS, "interval": INTERVAL_STEPS, "line_seconds": 0.02}
    for life in range(KILLS + 1):
        job = start(training_scenarios.train, folder, uri=uri, start=life, **options)
        seen = folder / f"seen-{life:03d}-0"
        job.until(lambda: seen.exists() and seen.stat().st_size, "the first step")  # noqa: B023
        time.sleep(0.3 + chance.expovariate(1 / (MEAN_SECONDS - 0.3)))
        job.kill()


def as_simulated(found: Goodput, *, fails: bool = True) -> tuple[SimulationResult, float]:
    """Simulate the same failures with the measured means. Returns the result, and the measured value."""
    first = found.starts[0]
    origin = first.began_at + first.spent["starting"] + first.spent["loading"]
    wall = first.began_at + found.wall_seconds - origin
    steps = found.kept_steps + sum(one.lost_steps for one in found.failures)
    step_seconds = (found.spent["kept"] + found.spent["lost"]) / steps
    loading = found.spent["loading"] / len(found.failures)
    away = sum(one.away_seconds for one in found.failures) / len(found.failures)
    blocked = found.spent["blocked"] / found.saves
    plan = Configuration(
        "real",
        INTERVAL_STEPS * step_seconds,
        checkpoint_bytes=NEVER_DRAINED_BYTES,
        restart_seconds=max(0.0, away - loading),
        stall_seconds=blocked,
        local=True,
        flush_seconds=max(0.0, (found.local_commit_seconds or 0.0) - blocked),
        local_load_seconds=loading,
    )
    cluster = Cluster(1, RATES, (), strikes_at=tuple(one.at - origin for one in found.failures if fails))
    return simulate(cluster, plan, days=wall / 86400), found.kept_seconds / wall


@pytest.mark.slow
def test_simulated_ettr_matches_the_real_run(
    tmp_path: Path, file_uri: str, cli: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    for attempt in range(3):  # a busy machine delays single steps and starts; the simulator knows only the means
        uri = f"{file_uri}-{attempt}"
        killed_at_random(tmp_path / f"job-{attempt}", uri)
        document = cli.answer("report", uri)
        found = analyse(start for start in map(read_start, histories(uri)) if start)
        assert document["ettr"] == found.ettr
        assert len(found.failures) == KILLS
        run, measured = as_simulated(found)
        with capsys.disabled():
            print(f"\nreal {measured:.2%}, simulated {run.ettr:.2%}, {KILLS} kills in {found.wall_seconds:.1f} s")
        assert run.failures == {"seen": KILLS}
        agrees = run.ettr == pytest.approx(measured, abs=AGREEMENT)
        agrees &= run.lost_seconds == pytest.approx(found.spent["lost"], abs=max(0.5, 0.1 * KILLS))
        if agrees:
            break
    assert agrees, (run, measured, found)
    without, _ = as_simulated(found, fails=False)
    assert without.ettr > measured + AGREEMENT, "the comparison cannot fail"


def histories(uri: str) -> list[list[dict[str, Any]]]:
    root = Path(os.environ["TIERCKPT_LOCAL_ROOT"])
    paths = sorted((local_dir(root, parse_uri(uri)) / HISTORY_DIR).glob("*.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] for path in paths]


def test_failures_at_given_times() -> None:
    plan = Configuration("plain", 10.0, checkpoint_bytes=1.0, restart_seconds=5.0, local=True)
    run = simulate(Cluster(1, RATES, (), strikes_at=(25.0, 60.0)), plan, days=100 / 86400)
    assert (run.failures, run.restarting_seconds) == ({"seen": 2}, 10.0)
    assert simulate(replace(Cluster(1, RATES, ()), strikes_at=()), plan, days=1).failures == {}
