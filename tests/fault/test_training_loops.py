"""Random training loops with a gradient log: a restore has the bits of training, or reports why it has fewer steps.

``TIERCKPT_TEST_TRAINING_LOOPS`` loops from seed ``TIERCKPT_TEST_SEED``; in each hundred, a process is killed.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fault.runner import start
from tests.fault.training_loops import EVENTS, Log, Run, check, train_and_kill, train_for_ever
from tests.services import ENVIRONMENT
from tierckpt.replay import checksum
from tierckpt.training.codec.attachment import Attachments

LOOPS = int(ENVIRONMENT.get("TIERCKPT_TEST_TRAINING_LOOPS", "40"))
SEED = int(ENVIRONMENT.get("TIERCKPT_TEST_SEED", "0"))

pytestmark = pytest.mark.timeout(600 + 10 * LOOPS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_restored_loop_equals_training_or_reports_why_not(tmp_path: Path) -> None:
    wrong, fired, ended = dict[int, str](), Counter[str](), Counter[str]()
    for seed in range(SEED, SEED + LOOPS):
        run = Run(seed, tmp_path / str(seed))
        trained = train_and_kill(run)
        reason, log = check(run, trained)
        if reason:
            wrong[seed] = f"{reason} ({dict(run.fired)})"
        fired += run.fired
        ended.update(one.partition(",")[0][:60] for one in trained.ends())
        ended["at the restore"] += any("which ends there" in line for line in log.lines)
    print(f"{LOOPS} loops from seed {SEED}; logs that ended: {dict(ended)}; events: {dict(fired)}")
    assert not wrong
    assert LOOPS < 500 or {name.partition(",")[0] for name in fired} >= set(EVENTS), "an event kind never occurred"


@pytest.mark.parametrize("event", ["edit_element", "edit_storage", "zero_moment_data", "edit_frozen"])
@pytest.mark.parametrize("is_on", [True, False], ids=["no bug", "without digests"])
def test_control_log_without_digests_is_found(
    event: str, is_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without frame digests a wrong state is restored."""
    if not is_on:
        monkeypatch.setattr(checksum, "frame_digest", lambda seen, others: "")
        monkeypatch.setattr(Attachments, "check", lambda *_: checksum.no_check)
    run = Run(7, tmp_path)
    run.steps, run.asked, run.interval, run.always_looks, run.is_compiled = 7, True, 1000, False, False
    run.events = {4: [(event, "after")]}
    trained = train_and_kill(run)
    reason, _ = check(run, trained)
    assert sum(run.fired.values()) == 1
    assert ("other bits" in reason) is not is_on


def test_killed_process_leaves_a_log_equal_to_training(tmp_path: Path) -> None:
    chosen = random.Random(SEED)
    for number in range(max(1, LOOPS // 100)):
        run = Run(SEED + 100_000 + number, tmp_path / str(number))
        child, steps = (
            start(train_for_ever, run.root / "job", root=str(run.root), seed=run.seed),
            chosen.randrange(3, 12),
        )
        child.until(lambda: len(child.lines()) >= steps, f"{steps} steps")  # noqa: B023
        time.sleep(chosen.uniform(0.0, 0.03))
        child.kill()
        run.digests = {int(step): digest for step, digest in map(str.split, child.lines())}
        run.steps = max(run.digests)
        for step in range(1, run.steps + 1):
            run.fired.update(f"{name}, {where}" for name, where in run.events.get(step, ()))
        reason, log = check(run, Log())
        assert not reason, (run.seed, run.events, reason, log.lines)
