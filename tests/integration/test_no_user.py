"""A container's random user, without passwd entry and HOME: each verb works, or its error names TIERCKPT_LOCAL_ROOT."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import tierckpt
from tests.hosts import needs_namespaces
from tests.users import as_user
from tierckpt.client import close_all
from tierckpt.config import Settings
from tierckpt.disk.local_root import make_local_root
from tierckpt.loading.export import export_safetensors

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")

UID, ROOT_GROUP = 54321, 0
# The interpreter may be readable by root only, so the capability to read is kept.
CAPABILITIES = [f"--{kind}=-all,+dac_read_search" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
AS_USER = ["setpriv", f"--reuid={UID}", f"--regid={ROOT_GROUP}", "--clear-groups", *CAPABILITIES]
UNSET = ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TIERCKPT_LOCAL_ROOT")

NEED_NO_LOCAL_ROOT = [
    "ls {run}",
    "info {run}/step-1",
    "verify {run}/step-1",
    "drain --wait",
    "prefetch {run}/step-1 --to {to}",
    "restore {run}/step-1 --to {to}",
    "status",
    "prune {run}",
    "report {run}",
    "cache ls",
]
NEED_LOCAL_ROOT = [
    "prefetch {run}/step-1",
    "adopt {run}/step-1 {to}/step-1",
    "drill {run}",
    "agent --leave-when-idle --idle-seconds 0.1",
]
TRAINER = """
import sys, torch, tierckpt
state = {"x": torch.zeros(4)}
with tierckpt.Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(1, {"x": torch.ones(4)})
with tierckpt.Checkpointer(sys.argv[1]) as checkpointer:
    assert checkpointer.restore(state) == 1 and state["x"].sum() == 4
"""


@pytest.fixture
def run(shared_tmp: Path, tmp_path: Path) -> Path:
    with tierckpt.Checkpointer(str(shared_tmp / "run"), local_root=tmp_path / "root", mover="inline") as checkpointer:
        checkpointer.save(1, {"x": torch.ones(4)})
    return shared_tmp / "run"


def run_as_user(command: list[str], within: Sequence[str] = (), **variables: str) -> tuple[int, str]:
    """Run Python as the user. ``within``: a command that runs it in other namespaces; TMPDIR is of this one."""
    unset = (*UNSET, "TMPDIR") if within else UNSET
    env = {name: value for name, value in os.environ.items() if name not in unset} | variables
    command = [*within, *AS_USER, sys.executable, *command]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True)
    return done.returncode, done.stderr


def check(lines: list[str], run: Path, *, works: bool, **variables: str) -> None:
    for number, line in enumerate(lines):
        words = line.format(run=run, to=run.parent / f"{number}-{len(variables)}").split()
        code, output = run_as_user(["-m", "tierckpt", *words], **variables)
        assert "Traceback" not in output, output
        assert code == 0 if works else (code in (2, 6) and "TIERCKPT_LOCAL_ROOT" in output), (line, code, output)


@pytest.mark.slow
def test_every_verb_works_with_only_a_local_root(run: Path) -> None:
    check(NEED_NO_LOCAL_ROOT + NEED_LOCAL_ROOT, run, works=True, TIERCKPT_LOCAL_ROOT=str(run.parent / "local"))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one of each kind", "all"])
def test_without_local_root_a_verb_works_or_names_the_variable(every: bool, run: Path) -> None:
    check(NEED_NO_LOCAL_ROOT if every else NEED_NO_LOCAL_ROOT[:1], run, works=True)
    check(NEED_LOCAL_ROOT if every else NEED_LOCAL_ROOT[1:2], run, works=False)


@pytest.mark.slow
def test_trainer_and_its_agent_without_user(shared_tmp: Path) -> None:
    for mover in ("agent", "inline"):
        run, root = str(shared_tmp / mover), str(shared_tmp / "local" / mover)
        code, output = run_as_user(["-c", TRAINER, run], TIERCKPT_LOCAL_ROOT=root, TIERCKPT_MOVER=mover)
        assert code == 0, output


@pytest.mark.slow
@needs_namespaces
def test_container_with_a_read_only_root(run: Path) -> None:
    """``readOnlyRootFilesystem`` with a volume for the local root."""
    volume = run.parent / "volume"
    volume.mkdir()
    script = 'mount -t tmpfs -o mode=1777 tmpfs "$0" && mount -o remount,ro,bind / && exec "$@"'
    sealed = ["unshare", "--mount", "sh", "-c", script, str(volume)]
    for line in ("prefetch {run}/step-1", "drill {run}", "agent --leave-when-idle --idle-seconds 0.1"):
        command = ["-m", "tierckpt", *line.format(run=run).split()]
        code, output = run_as_user(command, sealed, TIERCKPT_LOCAL_ROOT=str(volume / "node"))
        assert code == 0, output


@pytest.mark.parametrize("below", ["", "below"])
def test_local_root_that_is_a_file_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(tierckpt.errors.ConfigError, match=r"file is not a directory.*TIERCKPT_LOCAL_ROOT"):
        make_local_root(Settings.load(local_root=tmp_path / "file" / below))


def test_inaccessible_local_root_error_names_it(shared_tmp: Path) -> None:
    (shared_tmp / "closed").mkdir(0o700)

    def work() -> None:
        make_local_root(Settings.load(local_root=shared_tmp / "closed" / "root"))

    error = as_user(UID, work, gid=ROOT_GROUP)
    assert error.startswith("PermissionDeniedError") and "TIERCKPT_LOCAL_ROOT" in error


def test_inaccessible_path_error_names_it(run: Path, tmp_path: Path) -> None:
    closed, root = run.parent / "closed", run.parent / "local"
    closed.mkdir(0o700)
    tierckpt.prefetch(str(run / "step-1"), to=tmp_path / "warm")  # import modules that the user cannot read
    export_safetensors(str(run / "step-1"), tmp_path / "warm-export")
    tierckpt.adopt(tmp_path / "warm", str(tmp_path / "warm-run" / "step-1")).wait(timeout_seconds=60)
    close_all()

    def save() -> None:
        with tierckpt.Checkpointer(str(closed / "run"), local_root=root, mover="inline") as checkpointer:
            checkpointer.save(1, {"x": torch.ones(4)})

    for work in (
        lambda: tierckpt.prefetch(str(run / "step-1"), to=closed / "x", local_root=root),
        lambda: export_safetensors(str(run / "step-1"), closed / "x", local_root=root),
        lambda: tierckpt.adopt(run / "step-1", str(closed / "a" / "step-1"), local_root=root).wait(timeout_seconds=60),
        lambda: tierckpt.load_safetensors(closed / "x", settings=Settings.load(local_root=root)),
        save,
    ):
        error = as_user(UID, work, gid=ROOT_GROUP)
        assert error.startswith("PermissionDeniedError") and str(closed) in error, error
