"""Children of a process that has used storage: each start method, each operation of a worker, during transfers of the
parent (fork_scenarios.py). A child holds no lock or lease of its parent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fault.fork_scenarios import use_storage_in_children
from tests.fault.runner import start
from tests.services import ENVIRONMENT, azurite_server, moto_server
from tierckpt.disk import read_lease
from tierckpt.disk.file_lock import try_lock

IS_FULL = bool(ENVIRONMENT.get("TIERCKPT_TEST_FORKS"))
FULL_SUM = float(sum(range(100_000)))
METHODS = ("fork", "grandchild", "loader-fork", "exit", "forkserver", "spawn", "loader-spawn")


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    with ExitStack() as stack:
        if request.param == "directory":
            yield str(tmp_path / "shared"), {}
            return
        if request.param == "s3":
            server: Any = stack.enter_context(moto_server(keep_alive=True))
            root = f"s3://{stack.enter_context(server.bucket())}/top"
        else:
            server = stack.enter_context(azurite_server(tmp_path / "azurite"))
            root = f"az://{stack.enter_context(server.container())}/top"
        yield root, server.environment()


CASES = [
    ("s3", "inline", ("fork", "loader-fork", "loader-spawn", "exit")),
    *([("s3", mover, METHODS) for mover in ("inline", "agent")] if IS_FULL else []),
    *(
        [("az", "inline", METHODS), ("directory", "agent", METHODS), ("directory", "inline", METHODS)]
        if IS_FULL
        else []
    ),
]


@pytest.mark.slow
@pytest.mark.timeout(900 if IS_FULL else 300)
@pytest.mark.parametrize(("place", "mover", "ways"), CASES, indirect=["place"])
def test_children_can_use_storage_like_their_parent(
    place: tuple[str, dict[str, str]], tmp_path: Path, mover: str, ways: tuple[str, ...]
) -> None:
    root, environment = place
    (tmp_path / "local").mkdir(exist_ok=True)
    job = start(
        use_storage_in_children, tmp_path / "job", env={**environment, "TIERCKPT_MOVER": mover}, idle_seconds=1.0,
        root=root, ways=ways,
    )  # fmt: skip
    results = job.result(800 if IS_FULL else 250)
    expected = {
        "latest": f"{root}/run/step-2",
        "ls": ["step-0", "step-1", "step-2"],
        "read": 1_200_080,
        "load_safetensors": 300_000.0,
        "prefetch": "model.safetensors",
        "load_model": 1000.0,
        "reader": pytest.approx(FULL_SUM, rel=1e-5),
        "restore": [5, 1000.0],
        "save": "saved",
    }
    for way in ways:
        if way == "exit":
            assert results[way] == [7, True]
        else:
            assert results[way] == (8 if way.startswith("loader") else expected), (
                way,
                results[way],
                job.output()[-6000:],
            )


def test_lock_and_lease_end_with_their_process_despite_a_live_child(tmp_path: Path) -> None:
    path, directory = tmp_path / "entry.lock", tmp_path / "step-1"
    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:
        with try_lock(path), read_lease.reading(tmp_path, directory):
            worker = os.fork()
            if worker:
                os.write(writing, f"{worker}\n".encode())
            time.sleep(60)
        os._exit(0)
    worker = int(os.read(reading, 32))
    try:
        with try_lock(path) as held:
            assert not held
        assert read_lease.is_read(tmp_path, directory)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        with try_lock(path) as held:
            assert held
        assert not read_lease.is_read(tmp_path, directory)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_child_cannot_release_its_parents_locks(tmp_path: Path) -> None:
    path, directory = tmp_path / "entry.lock", tmp_path / "step-1"
    with ExitStack() as block:
        assert block.enter_context(try_lock(path, remove=True))
        block.enter_context(read_lease.reading(tmp_path, directory))
        pid = os.fork()
        if pid == 0:
            block.close()
            os._exit(0)
        os.waitpid(pid, 0)
        assert path.exists()
        with try_lock(path) as other:
            assert not other
        assert read_lease.is_read(tmp_path, directory)
    assert not read_lease.is_read(tmp_path, directory)
