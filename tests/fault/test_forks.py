"""Children of a process that has used storage: each start method, each operation of a worker, during transfers of the
parent. A child holds no lock or lease of its parent."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, Dataset

import tierckpt
from tests.fault.runner import start
from tests.fault.verbs import empty_root, load_safetensors, prefetch, put_model, save_step, url_of
from tests.services import ENVIRONMENT, azurite_server, moto_server
from tierckpt.disk import read_lease
from tierckpt.disk.file_lock import try_lock

STEPS = 3
CHILD_SECONDS = 150.0
STATE = {"w": torch.arange(100_000.0), "lr": 0.1}


def latest(root: str) -> object:
    return tierckpt.latest(f"{root}/run", local_root=empty_root())


def load_model(root: str) -> object:
    return float(tierckpt.load_model(f"{root}/own", local_root=empty_root())["w"].sum())


def read(root: str) -> object:
    with fsspec.open(f"{url_of(root)}/model/model.safetensors", "rb") as file:
        return len(file.read())


def ls(root: str) -> object:
    return sorted(name.rpartition("/")[2] for name in fsspec.filesystem("tierckpt").ls(f"{url_of(root)}/run", False))


def reader(root: str) -> object:
    state = {"w": torch.zeros(100_000), "lr": 0.0}
    where = f"{root}/run/step-1"
    dcp.load(state, storage_reader=tierckpt.TierStorageReader(where, local_root=empty_root()), no_dist=True)
    return float(state["w"].sum())


def restore(root: str) -> object:
    state = {"model": {"w": torch.zeros(1000)}}
    step = tierckpt.Checkpointer(f"{root}/own", local_root=empty_root()).restore(state)
    return [step, float(state["model"]["w"].sum())]


def save(root: str) -> object:
    where = f"{root}/child-{os.getpid()}"
    save_step(where, STATE)
    return "saved"


VERBS: list[Callable[[str], object]] = [latest, ls, read, load_safetensors, prefetch, load_model, reader, restore, save]


def _all_verbs(root: str, answers: Any) -> None:
    faulthandler.dump_traceback_later(CHILD_SECONDS - 5)  # where it hangs, on stderr
    said: dict[str, Any] = {}
    for verb in VERBS:
        begun = time.monotonic()
        try:
            said[verb.__name__] = verb(root)
        except BaseException:
            said[verb.__name__] = traceback.format_exc()[-1500:]
        if time.monotonic() - begun > 60:
            said[f"{verb.__name__} took"] = time.monotonic() - begun
    answers.put(said)


class Bytes(Dataset[int]):
    """Reads a file of the model through the node cache, in each worker; the first one was opened by the parent."""

    def __init__(self, root: str) -> None:
        self.url = f"{url_of(root)}/model/model.safetensors"
        self.file = fsspec.open(self.url, "rb").open()
        self.file.read(8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.file.seek(index * 100)
        with fsspec.open(self.url, "rb") as other:
            other.seek(index * 100)
            return int(other.read(50) == self.file.read(50))


def _in_children(root: str, how: str) -> object:
    if how.startswith("loader-"):
        loader = DataLoader(Bytes(root), num_workers=2, multiprocessing_context=how.removeprefix("loader-"))
        return sum(int(batch.sum()) for batch in loader)
    if how == "grandchild":
        return _answer_of("fork", lambda answers: answers.put(_in_children(root, "fork")))
    return _answer_of(how, _all_verbs, root)


def _answer_of(how: str, act: Callable[..., None], *arguments: object) -> object:
    """Run ``act(*arguments, answers)`` in a child. Returns what it puts into the queue."""
    context: Any = multiprocessing.get_context(how)
    answers = context.Queue()
    child = context.Process(target=act, args=(*arguments, answers), daemon=False)
    child.start()
    try:
        return answers.get(timeout=CHILD_SECONDS)
    except Exception as error:
        return f"no answer: {type(error).__name__}"
    finally:
        child.join(60)
        child.kill()


def _exit_of_a_fork() -> object:
    """How long a child that ends by ``sys.exit`` takes, while the parent drains."""
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        sys.exit(7)
    _, status = os.waitpid(pid, 0)
    return [os.waitstatus_to_exitcode(status), time.monotonic() - begun < 60]


@contextlib.contextmanager
def _busy(root: str) -> Any:
    """Requests, reads and saves under way at whatever moment a child is forked."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            tierckpt.latest(f"{root}/run")
            tierckpt.load_safetensors(f"{root}/model", local_root=empty_root())

    def write() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            writer = tierckpt.TierStorageWriter(f"{root}/busy/step-{count}")
            dcp.save({"w": torch.zeros(3_000_000)}, storage_writer=writer, no_dist=True)
            time.sleep(0.2)

    threads = [threading.Thread(target=ask), threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def use_storage_in_children(folder: Path, root: str, ways: list[str]) -> dict[str, object]:
    """Make a run and a model below ``root``; keep requests and saves under way; run each verb in a child of each kind.

    Returns the answers of each child, by the way it was started.
    """
    for step in range(STEPS):
        save_step(f"{root}/run/step-{step}", STATE)
    own = tierckpt.Checkpointer(f"{root}/own")
    own.save(5, {"model": {"w": torch.ones(1000)}})
    own.wait()
    put_model(f"{root}/model/model.safetensors", {"w": torch.ones(300_000)})
    answers: dict[str, object] = {}
    with _busy(root):
        for way in ways:
            answers[way] = _exit_of_a_fork() if way == "exit" else _in_children(root, way)
    assert tierckpt.latest(f"{root}/run") == f"{root}/run/step-{STEPS - 1}"
    return answers


# --- the tests --------------------------------------------------------------------------------------------------------

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


PLACES = [("s3", "inline"), ("s3", "agent"), ("az", "inline"), ("directory", "agent"), ("directory", "inline")]
CASES = [
    ("s3", "inline", ("fork", "loader-fork", "loader-spawn", "exit")),
    *((place, mover, METHODS) for place, mover in (PLACES if IS_FULL else ())),
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
        wanted = [7, True] if way == "exit" else 8 if way.startswith("loader") else expected
        assert results[way] == wanted, f"{way}: {results[way]}\n{job.output()[-6000:]}"


def test_lock_and_lease_end_with_their_process_despite_a_live_child(tmp_path: Path) -> None:
    path, directory = tmp_path / "entry.lock", tmp_path / "step-1"
    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:
        with try_lock(path), read_lease.reading(tmp_path, directory):
            if os.fork() == 0:  # it has let go of the locks when this returns
                os.write(writing, f"{os.getpid()}\n".encode())
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
