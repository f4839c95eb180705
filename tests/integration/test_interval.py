"""``Checkpointer(interval=...)``: saves at measured intervals, equal on all ranks, on one or two levels."""

from __future__ import annotations

import itertools
import logging
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierckpt
from tests.command_line import CommandLine
from tests.compat.worker import launch
from tests.fault.scenario_tools import of_each_rank
from tests.held_drains import hold_drains
from tierckpt import AutoInterval, Checkpointer, EveryStep
from tierckpt.checkpoint.journal import LOCAL_ONLY, Journal
from tierckpt.config import Settings
from tierckpt.format.layout import SUPERSEDED, local_dir, parse_uri, step_of
from tierckpt.training.drain_decider import DrainDecider
from tierckpt.training.interval import PROFILE_STEPS
from tierckpt.training.saves import SaveRecord

HERE = "tests.integration.test_interval"


def train(checkpointer: Checkpointer, steps: int, seconds: float = 0.004, first: int = 1) -> dict[str, Any]:
    state = {"w": torch.zeros(1000)}
    for step in range(first, first + steps):
        time.sleep(seconds)
        state["w"].fill_(step)
        checkpointer.step(step, state)
    return state


def train_until_saved(checkpointer: Checkpointer, count: int) -> int:
    """Train until ``count`` saves exist, at any interval. Returns the last step."""
    steps = 0
    while len(checkpointer.stats) < count:
        train(checkpointer, 1, first=(steps := steps + 1))
    return steps


def committed(local_root: Path, uri: str) -> list[int]:
    run = local_dir(local_root, parse_uri(uri))
    return sorted(int(path.parent.parent.name[5:]) for path in run.glob("*/.tierckpt/manifest.json"))


def test_auto_saves_after_profiling_and_logs_its_decision_once(file_uri: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tierckpt.interval")
    with Checkpointer(file_uri, interval="auto") as checkpointer:
        train_until_saved(checkpointer, 2)
        saved = [record.step for record in checkpointer.stats]
    assert saved[0] == PROFILE_STEPS
    [first, *_] = [record for record in caplog.records if record.name == "tierckpt.interval"]
    assert "a checkpoint every" in first.getMessage()
    facts = vars(first)
    assert facts["interval_steps"] >= facts["blocked_seconds"] / (0.035 * facts["step_seconds"]) - 1
    assert {"step_seconds", "durable_seconds", "overhead", "overhead_max", "shared_every"} <= facts.keys()


def test_step_interval_saves_at_its_multiples_and_returns_futures(file_uri: str, local_root: Path) -> None:
    with Checkpointer(file_uri, interval=5) as checkpointer:
        futures = [checkpointer.step(step, {"w": torch.zeros(10)}) for step in range(1, 12)]
        assert [step for step, future in enumerate(futures, 1) if future is not None] == [5, 10]
    assert committed(local_root, file_uri) == [5, 10, 11]


def test_error_skips_the_final_save_and_releases_the_state(file_uri: str, local_root: Path) -> None:
    with pytest.raises(KeyError), Checkpointer(file_uri, interval=5) as checkpointer:
        state = train(checkpointer, 7)
        raise KeyError("data")
    assert committed(local_root, file_uri) == [5]
    assert sys.getrefcount(state) == 2  # this variable and the argument


def test_saved_last_step_is_not_saved_again(file_uri: str) -> None:
    with Checkpointer(file_uri, interval=5) as checkpointer:
        train(checkpointer, 5)
        checkpointer.save(6, {"w": torch.zeros(10)})
    assert [record.step for record in checkpointer.stats] == [5, 6]


@pytest.mark.parametrize(
    ("options", "as_dicts"),
    [
        ({}, False),
        ({}, True),
        ({"every_step": EveryStep(gradient_log=True)}, False),
        ({"every_step": EveryStep(window_steps=2)}, False),
    ],
    ids=str,
)
def test_state_changed_after_its_step_is_not_saved_as_that_step(
    options: dict[str, Any], as_dicts: bool, file_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, stranger = torch.nn.Linear(4, 4), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def update(one: torch.nn.Module, through: torch.optim.Optimizer) -> None:
        through.zero_grad()  # gradients that are overwritten in place end a window early: step 7 is saved as a whole
        sum(parameter.sum() for parameter in one.parameters()).backward()
        through.step()

    with Checkpointer(file_uri, interval=5, **options) as checkpointer:
        for step in range(1, 9):
            update(model, optimizer)
            if step == 8:
                break  # a stop requested between the two
            live = {"model": model, "optimizer": optimizer}
            checkpointer.step(step, {"model": model.state_dict()} if as_dicts else live)
    assert 7 not in committed(local_root, file_uri)
    assert any("step 7 is not saved" in line for line in caplog.messages)
    with Checkpointer(f"{file_uri}-2", interval=5) as checkpointer:
        checkpointer.step(7, {"model": model})
        update(stranger, torch.optim.SGD(stranger.parameters(), lr=0.1))  # shares nothing with the state
    assert committed(local_root, f"{file_uri}-2") == [7]


def last_step_of_two_ranks(uri: str) -> list[int]:
    with Checkpointer(uri, interval=4) as checkpointer:
        train(checkpointer, 6)
    return [record.step for record in checkpointer.stats]


@pytest.mark.distributed
def test_all_ranks_save_the_last_step(file_uri: str) -> None:
    assert launch(f"{HERE}:last_step_of_two_ranks", 2, uri=file_uri) == [4, 6]
    state = {"w": torch.zeros(1000)}
    with Checkpointer(file_uri) as checkpointer:
        assert checkpointer.restore(state) == 6
    assert state["w"].unique().tolist() == [6.0]


@pytest.mark.slow
def test_two_levels_send_every_nth_and_the_last_checkpoint(
    file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_there = hold_drains(monkeypatch)
    with Checkpointer(file_uri, interval=AutoInterval(overhead_max=0.9)) as checkpointer:
        last = train_until_saved(checkpointer, 6) + 1
        train(checkpointer, 1, first=last)
        checkpointer.wait("local")
        sent = [record.is_sent for record in checkpointer.stats]
        kept = [entry for entry in Journal(local_root).entries() if entry.state == LOCAL_ONLY]
        is_there.set()
        assert sum(sent) < len(sent) / 2, sent
        assert len(kept) <= 2, "an entry older than two newer ones must leave the journal"
    newest = checkpointer.stats[-1].step
    assert newest == last
    assert not Journal(local_root).entries()
    shutil.rmtree(local_root)  # lose the node after the job
    state = {"w": torch.zeros(1000)}
    assert Checkpointer(file_uri).restore(state) == newest
    assert state["w"].unique().tolist() == [newest]


@pytest.mark.slow
def test_skipped_checkpoint_is_restorable_until_evicted(
    file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_drains(monkeypatch)  # the first upload never completes
    checkpointer = Checkpointer(file_uri, interval=1, exposure_seconds_max=math.inf, exit_timeout_seconds=0)
    train(checkpointer, 6)
    checkpointer.wait("local")
    assert [record.is_sent for record in checkpointer.stats] == [True] + [False] * 5
    run = local_dir(local_root, parse_uri(file_uri))
    assert sorted(path.parent.parent.name for path in run.glob(f"*/{SUPERSEDED}")) == ["step-2", "step-3", "step-4"]
    state = {"w": torch.zeros(1000)}
    assert checkpointer.restore(state, 3) == 3
    assert state["w"].unique().tolist() == [3]
    small = Checkpointer(file_uri, local_bytes_max=60_000, local_full_policy="error", drain=False)
    small.save(7, {"w": torch.zeros(1000)}).result(60)
    left = committed(local_root, file_uri)
    assert {1, 5, 6, 7} <= set(left), "neither the upload in progress nor the newest is evicted"
    assert len(left) < 7


def test_tierckpt_drain_sends_the_newest_checkpoint_of_a_dead_job(
    file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    with monkeypatch.context() as slow:
        hold_drains(slow)
        checkpointer = Checkpointer(file_uri, interval=1, exposure_seconds_max=math.inf, exit_timeout_seconds=0)
        train(checkpointer, 4)
        checkpointer.wait("local")
        tierckpt.client.close_all()  # as at process exit
    outcomes = {row["uri"]: row["outcome"] for row in cli.answer("drain", "--wait")["entries"]}
    assert outcomes[f"{file_uri}/step-4"] == "committed"
    shutil.rmtree(local_root)
    state = {"w": torch.zeros(1000)}
    assert Checkpointer(file_uri).restore(state) == 4


def test_throughput_is_measured_in_every_save_of_a_long_job() -> None:
    decider, records = DrainDecider(Settings.load(exposure_seconds_max=3600)), list[SaveRecord]()
    for step in range(200):
        records.append(SaveRecord(step, "", 1000, local_commit_seconds=1.0 if step < 100 else 0.1))
        decider.decide(step, records[-64:], 1, 1.0)
    assert decider._state.local_rate == pytest.approx(10_000, rel=0.01)  # private: only the decisions show it


# --- several ranks -------------------------------------------------------------------------------------------------


def decide_together(uri: str, interval: Any, **options: Any) -> dict[str, Any]:
    """Return the decisions of each rank; one rank is slow."""
    rank = dist.get_rank()
    with Checkpointer(uri, interval=interval, **options) as checkpointer:
        state = {f"own-{rank}": torch.zeros(1000), "both": torch.zeros(10)}
        for step in itertools.count(1):
            time.sleep(0.003 + 0.004 * rank)
            dist.all_reduce(torch.ones(1))
            checkpointer.step(step, state)
            if step >= 60 and len(checkpointer.stats) >= 2:
                break
        pace = checkpointer._interval.pace  # private: the chosen interval
        chosen = [(record.step, record.is_sent) for record in checkpointer.stats], (pace.steps, pace.every)
    outcomes = of_each_rank(chosen)
    return {"same": all(one == outcomes[0] for one in outcomes), "saves": len(chosen[0]), "pace": chosen[1]}


def decide_apart() -> None:
    """Seeded bug: each rank decides from its own measurements."""
    from tierckpt.training import interval

    interval.all_gather = lambda value: [value]  # type: ignore[assignment]
    interval.broadcast = lambda work: work()  # type: ignore[assignment]
    interval.optimal_interval.choose = lambda *_, **__: interval.optimal_interval.Pace(3 + dist.get_rank(), 1, "")  # type: ignore[assignment]


def decide_apart_and_compare(uri: str) -> list[Any]:
    decide_apart()
    pacer = Checkpointer(uri, interval="auto")._interval  # private: as above
    pacer.step_seconds = 0.1
    record = tierckpt.training.SaveRecord(1, "", 10, 0.1, 0.2)
    pacer.before_save(2, [record])
    return of_each_rank(pacer.pace.steps if pacer.pace else None)


@pytest.mark.slow
@pytest.mark.distributed
def test_all_ranks_decide_the_same(file_uri: str) -> None:
    found = launch(f"{HERE}:decide_together", 2, uri=file_uri, interval="auto")
    assert found["same"]
    assert found["saves"] >= 2
    assert launch(f"{HERE}:decide_apart_and_compare", 2, uri=f"{file_uri}-2") == [3, 4]  # the check detects the bug


def save_and_lose_two_nodes(uri: str, roots: str) -> dict[str, Any]:
    """Make six saves on two nodes while shared storage accepts nothing, then lose both nodes."""
    is_up = hold_drains(pytest.MonkeyPatch())
    rank = dist.get_rank()
    root = Path(roots, f"node-{rank}")
    name = f"own-{rank}"
    with Checkpointer(uri, interval=1, local_root=root, exposure_seconds_max=math.inf) as checkpointer:
        for step in range(1, 7):
            checkpointer.step(step, {name: torch.full((5000,), float(step)), "both": torch.zeros(10)})
        checkpointer.wait("local")
        run = local_dir(root, parse_uri(uri))
        shards = sorted(int(path.parent.name[5:]) for path in run.glob("step-*/*.distcp"))
        sent = [record.step for record in checkpointer.stats if record.is_sent]
        entries = sorted((step_of(entry.uri) or 0, entry.state) for entry in Journal(root).entries())
        is_up.set()
    outcome = {"sent": sent, "shards": shards, "entries": entries, "left": len(Journal(root).entries())}
    dist.barrier()
    shutil.rmtree(root)
    state = {name: torch.zeros(5000), "both": torch.zeros(10)}
    outcome["restored"] = Checkpointer(uri, local_root=root).restore(state)
    outcome["value"] = state[name].unique().tolist()
    outcomes = of_each_rank(outcome)
    return {key: [one[key] for one in outcomes] for key in outcome}


@pytest.mark.slow
@pytest.mark.distributed
def test_two_nodes_keep_the_same_checkpoints_and_send_the_newest(tmp_path: Path, file_uri: str) -> None:
    found = launch(f"{HERE}:save_and_lose_two_nodes", 2, uri=file_uri, roots=str(tmp_path))
    assert found["sent"] == [[1], [1]]
    assert found["entries"] == [[[1, "ready"], [5, "local-only"], [6, "local-only"]]] * 2
    # The coordinator's node can still restore skipped checkpoints; the other node lacks the file names.
    assert found["shards"] == [[1, 2, 3, 4, 5, 6], [1, 5, 6]]
    assert found["left"] == [0, 0]
    assert found["restored"] == [6, 6]
    assert found["value"] == [[6.0], [6.0]]
