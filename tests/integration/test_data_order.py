"""Exactly once: a job killed by SIGKILL at random restarts with another number of ranks, and each epoch trains on every
sample once.

``TIERCKPT_TEST_SWEEP=full`` kills it 20 times; the normal suite four times.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fault import training_scenarios
from tests.fault.runner import start
from tierckpt.format.layout import MANIFEST

KILLS = 20 if os.environ.get("TIERCKPT_TEST_SWEEP") == "full" else 4
SAMPLES = 150 * KILLS
EPOCHS = 2

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60 + 30 * KILLS)]


def steps_seen(folder: Path) -> dict[int, list[int]]:
    """Return the samples of each step, from the last run that took the step."""
    by_life: dict[int, dict[int, list[int]]] = {}
    for path in sorted(folder.glob("seen-*")):
        life = by_life.setdefault(int(path.name.split("-")[1]), {})
        for line in path.read_text().splitlines():
            step, _, samples = line.partition(" ")
            life.setdefault(int(step), []).extend(map(int, samples.split(",")) if samples else ())
    seen: dict[int, list[int]] = {}
    for _, life in sorted(by_life.items()):
        seen = {step: samples for step, samples in seen.items() if step < min(life, default=10**9)} | life
    return seen


def lines(folder: Path, life: int) -> int:
    path = folder / f"seen-{life:03d}-0"
    return len(path.read_text().splitlines()) if path.exists() else 0


def killed_and_finished(
    folder: Path, uri: str, kills: int, *, when_committed: bool = False, **options: Any
) -> tuple[Counter[int], int]:
    """Train to the end through ``kills`` SIGKILLs of all ranks. Returns counts of the samples, and kills that fired.

    ``when_committed``: kill only after a checkpoint exists.
    """
    chance = random.Random(kills)
    fired = 0
    for life in range(kills + 1):
        wanted = chance.randrange(5, 20) if life < kills else 0
        job = start(
            training_scenarios.train,
            folder,
            1 + life % 2,
            uri=uri,
            samples=SAMPLES,
            epochs=EPOCHS,
            start=life,
            hold_after=wanted,
            **options,
        )
        if life == kills:
            assert set(job.codes(120)) == {0}, job.output()[-3000:]
            break
        job.until(lambda: lines(folder, life) >= wanted, f"{wanted} steps")  # noqa: B023
        if when_committed:
            job.until(lambda: any(Path(uri).glob(f"*/{MANIFEST}")), "a checkpoint")
        job.kill()
        fired += set(job.codes(10)) == {-9}
    return Counter(sample for samples in steps_seen(folder).values() for sample in samples), fired


@pytest.mark.slow
def test_each_epoch_has_every_sample_once_over_random_kills_and_world_sizes(tmp_path: Path) -> None:
    seen, fired = killed_and_finished(tmp_path / "job", str(tmp_path / "run"), KILLS)
    assert fired == KILLS
    assert seen == dict.fromkeys(range(SAMPLES), EPOCHS)


@pytest.mark.slow
def test_control_job_that_loses_its_position_is_detected(tmp_path: Path) -> None:
    """Control with a seeded bug. A kill before the first checkpoint would not show it."""
    job, run = tmp_path / "job", str(tmp_path / "run")
    seen, fired = killed_and_finished(job, run, 1, when_committed=True, bug="forget the place")
    assert fired == 1
    assert seen != dict.fromkeys(range(SAMPLES), EPOCHS)


@pytest.mark.slow
def test_example_resumes_within_an_epoch(tmp_path: Path) -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    script = Path(__file__).parents[2] / "examples" / "stateful_dataloader.py"

    def output(stop: int) -> list[str]:
        command = [sys.executable, str(script), str(tmp_path / "run"), "--stop", str(stop)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        return done.stdout.splitlines()

    assert output(20)[0] == "starting after batch 0"
    first, last = output(64)
    assert first == "starting after batch 20"
    assert last == "64 batches, sum of their numbers 130816, of the dataset 130816", "a sample is missing or repeated"
