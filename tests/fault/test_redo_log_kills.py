"""A job killed while it saves or replays a redo log has the previous checkpoint, or the right new one."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.fault import runner
from tests.fault.training_jobs import PLAIN, REDO, REDO_POINTS, Job, restore_redo_log, restored, save_redo_log
from tests.services import in_full
from tierckpt.client import close_all

SECONDS = 120.0
IS_FULL = bool(in_full([1]))
# CI kills before a few points and checks the seeded bugs there; `make torture-redo` kills before and after each point.
SIDES = ("before", "after") if IS_FULL else ("before",)  # after a point is before the next, except for the last
SAVE = ("pack", "write", "commit", "drain")
FOLD = ("read", "replay", "save", "write", "commit", "drain", "load")


def run_job(what: Callable[..., None], root: Path, run: Path, seconds: float = SECONDS, **options: str) -> int | None:
    environment = {"TIERCKPT_LOCAL_ROOT": str(root), "TIERCKPT_MOVER": "agent"}
    threads = torch.get_num_threads()
    job = runner.start(what, run.parent / "job", env=environment, threads=threads, run=str(run), **options)
    [code] = job.codes(seconds)
    job.kill()
    return code


def check_run(run: Path, steps: set[int]) -> None:
    """Check that stock PyTorch reads one version, and that the restored step is one of ``steps``, bit for bit."""
    for metadata in run.glob("step-*/.metadata"):
        step = int(metadata.parent.name.removeprefix("step-"))
        read, expected = Job(), Job().train_to(step)
        model = read.model.state_dict()
        dcp.load({"model": model}, checkpoint_id=metadata.parent)
        assert all((one == model[name]).all() for name, one in expected.model.state_dict().items()), metadata
    job = Job()
    restored(run, job)
    assert job.step in steps
    assert job.checksum() == Job().train_to(job.step).checksum()


@pytest.mark.slow
@pytest.mark.parametrize("when", SIDES)
@pytest.mark.parametrize("point", SAVE if IS_FULL else ("commit",))
def test_kill_during_the_write_of_a_redo_log(point: str, when: str, local_root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_job(save_redo_log, local_root, run, point=point, when=when) == -signal.SIGKILL
    is_committed = (point, when) in {("commit", "after"), ("drain", "before"), ("drain", "after")}
    check_run(run, {REDO} if is_committed else {PLAIN, REDO})


@pytest.mark.slow
@pytest.mark.parametrize("when", SIDES)
@pytest.mark.parametrize("point", FOLD if IS_FULL else ("replay", "commit"))
def test_kill_during_the_replay_of_a_redo_log(point: str, when: str, local_root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_job(save_redo_log, local_root, run) == 0
    assert not (run / f"step-{REDO}").exists()
    assert run_job(restore_redo_log, local_root, run, point=point, when=when) == -signal.SIGKILL
    if FOLD.index(point) < FOLD.index("write"):
        assert tierckpt.latest(run) == str(run / f"step-{PLAIN}")
    check_run(run, {REDO})
    assert tierckpt.latest(run) == str(run / f"step-{REDO}")


@pytest.mark.slow
def test_kills_at_random_moments(local_root: Path, tmp_path: Path) -> None:
    chosen = random.Random(7)
    for number in range(20 if IS_FULL else 1):
        run = tmp_path / f"run-{number}"
        run_job(save_redo_log, local_root, run, chosen.uniform(0.0, 6.0))
        for _ in range(2):
            run_job(restore_redo_log, local_root, run, chosen.uniform(0.0, 5.0))
        check_run(run, {0, PLAIN, REDO})
        close_all()


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["a missing step", *in_full(["a stale hyperparameter"])])
def test_wrong_redo_log_is_skipped(bug: str, local_root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_job(save_redo_log, local_root, run, bug=bug) == 0
    check_run(run, {PLAIN})
    assert not (run / f"step-{REDO}").exists()


@pytest.mark.slow
def test_control_mixed_version_is_found(local_root: Path, tmp_path: Path) -> None:
    """Control: a window published as a checkpoint before its replay."""
    run = tmp_path / "run"
    assert run_job(save_redo_log, local_root, run, bug="a mixed version as a checkpoint") == 0
    assert (run / f"step-{REDO}" / ".metadata").exists()
    with pytest.raises(AssertionError, match=rf"step-{REDO}"):
        check_run(run, {REDO})


def test_every_point_is_covered() -> None:
    assert set(REDO_POINTS) == {*SAVE, *FOLD}
