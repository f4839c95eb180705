"""Ctrl-C at any moment of any verb ends it with one KeyboardInterrupt, and nothing else is said."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services import ENVIRONMENT, REPOSITORY, moto_server
from tierckpt.stores.common import ended, to_completion

TIMES = int(ENVIRONMENT.get("TIERCKPT_TEST_INTERRUPTS", "1"))
VERBS = ("sharded", "load", "prefetch", "restore", "save", "close") if TIMES > 1 else ("sharded", "prefetch")
NOISE = (
    "never retrieved",
    "Task was destroyed",
    "Exception ignored",
    "Exception in thread",
    "Bad file descriptor",
    "never awaited",
    "Fatal Python error",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    local = tmp_path_factory.mktemp("local")
    with moto_server(keep_alive=True) as server, server.bucket() as bucket:
        environment = {
            **ENVIRONMENT,
            **server.environment(),
            "TIERCKPT_LOCAL_ROOT": str(local),
            "TIERCKPT_MOVER": "inline",
        }
        root = f"s3://{bucket}/top"
        _begin("prepare", root, environment).communicate(timeout=120)
        yield root, environment


def _begin(verb: str, root: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.fault.interrupt_scenarios", verb, root]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
@pytest.mark.timeout(600 + 120 * TIMES)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("seed", range(TIMES))
def test_an_interrupt_ends_a_verb_and_says_nothing_else(
    place: tuple[str, dict[str, str]], tmp_path: Path, verb: str, seed: int
) -> None:
    root, environment = place
    (tmp_path / "local").mkdir(exist_ok=True)
    child = _begin(verb, root, {**environment, "TIERCKPT_LOCAL_ROOT": str(tmp_path / "local")})
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n", child.communicate()[1]
    time.sleep(random.Random(f"{verb} {seed}").uniform(0.0, 1.5))
    child.send_signal(signal.SIGINT)
    try:
        _, said = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == -signal.SIGINT, said[-4000:]
    assert said.count("\nKeyboardInterrupt") == 1, said[-4000:]
    assert not [noise for noise in NOISE if noise in said], said[-4000:]


async def test_work_that_its_caller_closes_has_ended_however_often_it_is_cancelled() -> None:

    at_work, may_end = threading.Event(), threading.Event()

    def work() -> None:
        at_work.set()
        may_end.wait(60)
        raise OSError("it fails, and nobody waits for it any more")

    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    task = asyncio.ensure_future(to_completion(asyncio.to_thread(work)))
    await asyncio.to_thread(at_work.wait, 30)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done()
    may_end.set()
    await ended(task)
    assert task.cancelled()
    del task
    await asyncio.sleep(0.05)
    assert not told
