"""A staged save of dead trainers is never committed after their job was restarted (F1 to F3)."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.agents import agent_runs, is_gone, start_agent, until
from tests.fault import agent_scenarios
from tests.fault.agent_scenarios import whole_state
from tests.fault.runner import Job, start
from tests.services import in_full
from tests.states import load, same
from tierckpt.checkpoint import epoch as epochs
from tierckpt.checkpoint.journal import Journal
from tierckpt.checkpoint.local_commit import read_local_manifest
from tierckpt.client import close_all
from tierckpt.config import Settings
from tierckpt.disk.local_root import use_local_root
from tierckpt.errors import CommitAbandonedError
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.ipc import agent_client

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("short_idle_time")]

SETTINGS: dict[str, Any] = {"mover": "agent"}
JOB = {"idle_seconds": 0.7, **SETTINGS}
RESTARTED_SEED = 77
"""Seed of the state that the restarted job saves as step 2."""

HOOK = """
import os, sys, time
if "tierckpt.dcp.handoff.finish" in sys.orig_argv:
    from pathlib import Path
    from tierckpt.checkpoint import local_commit as commit
    folder, name, lives = Path(os.environ["HOOK_FOLDER"]), os.environ["HOOK_AT"], "HOOK_LIVES" in os.environ
    def wrapped(real):
        def call(*arguments, **options):
            if lives:
                sys.modules["__main__"]._end = lambda: None
            (folder / "reached").write_text(str(os.getpid()))
            while not (folder / "go").exists():
                time.sleep(0.02)
            return real(*arguments, **options)
        return call
    setattr(commit, name, wrapped(getattr(commit, name)))
"""


@pytest.fixture(autouse=True)
def initialised_root(local_root: Path) -> None:
    use_local_root(Settings.load(local_root=local_root))


@pytest.fixture
def slow_agent(tmp_path: Path, local_root: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start an agent whose helper processes stop at a point of the commit until the file ``go`` exists."""
    hooks, folder, started = tmp_path / "hooks", tmp_path / "points", []
    hooks.mkdir(mode=0o755)
    folder.mkdir()
    (hooks / "sitecustomize.py").write_text(HOOK)

    def start(at: str, *, lives: bool) -> subprocess.Popen[bytes]:
        environment = {"PYTHONPATH": str(hooks), "HOOK_FOLDER": str(folder), "HOOK_AT": at}
        environment |= {"HOOK_LIVES": "1"} if lives else {}
        started.append(start_agent(Settings.load(local_root=local_root, **SETTINGS), 60, **environment))
        return started[-1]

    yield start
    (folder / "go").touch()
    for process in started:
        process.kill()
        process.wait()
    close_all()
    until(lambda: not agent_runs(local_root), "the last agent to exit")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent_fault", "at", "way"),
    [
        ("killed", "commit_local", "async_save"),
        ("stopped", "write_attempt_metadata", "Checkpointer"),
        *in_full(
            [
                ("killed", "write_attempt_metadata", "Checkpointer"),
                ("stopped", "write_attempt_metadata", "async_save"),
                ("stopped", "commit_local", "Checkpointer"),
                ("stopped", "commit_local", "without collectives"),
                ("killed", "write_attempt_metadata", "async_save, ours"),
            ]
        ),
    ],
)
def test_staged_save_is_not_committed_after_the_job_restarted(
    agent_fault: str,
    at: str,
    way: str,
    slow_agent: Callable[..., subprocess.Popen[bytes]],
    s3_uri: str,
    local_root: Path,
    tmp_path: Path,
) -> None:
    agent = slow_agent(at, lives=agent_fault == "stopped")
    reached = tmp_path / "points" / "reached"
    job = start(agent_scenarios.all_die, tmp_path / "job", uri=s3_uri, way=way, point="handed in", **JOB)
    assert job.codes() == [-signal.SIGKILL], job.output()
    helper = int(until(lambda: reached.exists() and reached.read_text(), "the helper to reach the commit", 120))
    os.kill(agent.pid, signal.SIGKILL if agent_fault == "killed" else signal.SIGSTOP)
    if agent_fault == "killed":
        until(lambda: is_gone(helper), "the helper to end with its agent")
    saved = {"way": way, "step": 2, "as_step": RESTARTED_SEED}
    again = start(agent_scenarios.restarts_and_saves, tmp_path / "again", uri=s3_uri, **saved, **JOB)
    until(lambda: list(again.folder.glob("commits.*")) or again.codes(0.0) != [None], "the save", 120)
    (tmp_path / "points" / "go").touch()  # the old commit continues after the new save's check for commits
    until(lambda: is_gone(helper), "the helper to abandon the old save")
    (again.folder / "go").touch()
    assert again.result() in (1, f"{s3_uri}/step-1")  # and no AlreadyCommittedError
    until(lambda: Journal(local_root).entries() == [], "an empty journal")
    close_all()
    expected = whole_state(RESTARTED_SEED, 1)
    for root in (local_root, tmp_path / "another node"):
        assert tierckpt.latest(s3_uri, local_root=root) == f"{s3_uri}/step-2"
        assert same(load(f"{s3_uri}/step-2", expected, local_root=root), expected)
    directory = local_dir(local_root, parse_uri(f"{s3_uri}/step-2"))
    manifest = read_local_manifest(directory)
    assert manifest is not None
    files = {str(path.relative_to(directory)) for path in directory.glob("*.distcp")}
    assert files == {file.key for file in manifest.files if file.key.endswith(".distcp")}  # no old shards


# --- epochs ---------------------------------------------------------------------------------------------------------

RUN = parse_uri("s3://bucket/run")
NUMBERS = itertools.count()


def use_run(folder: Path, root: str, what: str) -> None:
    """Begin to use the run, print its epoch, and stay until killed. ``what``: trains, looks or commits."""
    if what == "commits":
        with epochs.committing(Path(root), RUN, epochs.current(Path(root), RUN)):
            print(flush=True)
            signal.pause()
    epochs.enter(Path(root), RUN, trains=what == "trains")
    print(epochs.current(Path(root), RUN), flush=True)
    signal.pause()


@contextlib.contextmanager
def run_user(root: Path, what: str) -> Iterator[tuple[Job, str]]:
    """Run another process that uses the run until exit. Yields its epoch."""
    job = start(use_run, root.parent / f"user-{next(NUMBERS)}", root=str(root), what=what)
    job.until(job.lines, "the epoch")
    yield job, job.lines()[0]
    job.kill()


@pytest.fixture
def local_run(local_root: Path) -> Iterator[Path]:
    agent_client.private_directory(local_root)
    yield local_root
    for run in epochs.runs.values():  # forget this process's epochs for the next test
        os.close(run.file)
    epochs.runs.clear()


@pytest.mark.slow
def test_restart_begins_an_epoch_but_a_second_rank_does_not(local_run: Path) -> None:
    with run_user(local_run, "trains") as (first, epoch):
        with run_user(local_run, "trains") as (_, same_epoch), run_user(local_run, "looks") as (_, seen):
            assert epoch == same_epoch == seen
        assert epochs.current(local_run, RUN) == epoch
        first.kill()
        with run_user(local_run, "trains") as (_, next_epoch):
            assert next_epoch not in ("", epoch)


def test_first_reader_after_dead_trainers_begins_an_epoch(local_run: Path) -> None:
    with run_user(local_run, "trains") as (_, epoch):
        pass
    seen = []
    for _ in range(3):
        epochs.enter(local_run, RUN, trains=False)
        seen.append(epochs.current(local_run, RUN))
    assert seen[0] != epoch
    assert len(set(seen)) == 1
    with run_user(local_run, "trains") as (_, after):  # a reader is no live trainer
        assert after != seen[0]


def test_save_staged_in_an_older_epoch_is_not_committed(local_run: Path) -> None:
    epochs.enter(local_run, RUN, trains=False)
    epoch = epochs.current(local_run, RUN)
    with epochs.committing(local_run, RUN, epoch):
        pass
    with run_user(local_run, "trains"):
        pass
    with pytest.raises(CommitAbandonedError, match="started again"), epochs.committing(local_run, RUN, epoch):
        pytest.fail("a save of an old epoch was committed")


def test_process_stuck_in_a_commit_is_killed_before_a_new_epoch(local_run: Path) -> None:
    with run_user(local_run, "commits") as (stuck, _):
        os.kill(stuck.pids[0], signal.SIGSTOP)
        epochs.enter(local_run, RUN, trains=True)
        assert stuck.codes() == [-signal.SIGKILL]
    assert epochs.current(local_run, RUN) != ""


def test_forked_child_is_no_trainer(local_run: Path) -> None:
    with run_user(local_run, "looks"):
        pass
    epochs.enter(local_run, RUN, trains=True)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    with run_user(local_run, "trains") as (_, epoch):
        assert epoch == epochs.current(local_run, RUN)  # the parent is a live trainer
    os.close(writer)
    os.close(reader)
    os.waitpid(child, 0)


def test_reader_creates_no_files_without_staged_saves(local_root: Path) -> None:
    epochs.enter(local_root, RUN, trains=False)
    assert not local_root.exists()
