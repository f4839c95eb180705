"""Connections, descriptors and memory stay flat over any number of saves and reads of a process that collects no
garbage."""

from __future__ import annotations

import gc
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.fault.runner import start
from tests.fault.verbs import local_root, put_model, save_step
from tests.services import ENVIRONMENT, S3Server, moto_server
from tierckpt.poll import Poll

WARM_UP = 5
POOLS = {"descriptors": 4, "threads": 8}
"""What pools may grow by: concurrent requests may add a connection or two, and threads up to the size of a pool."""
SETTLE_SECONDS = 10.0
STATE = {"w": torch.zeros(1000), "b": torch.zeros(10), "lr": 0.1}


def _prepared(uri: str) -> str:
    for step in range(3):
        save_step(f"{uri}/step-{step}", STATE)
    return f"{uri}/step-1"


def save(uri: str) -> Callable[[int], None]:
    return lambda step: save_step(f"{uri}/step-{step}", STATE)


def save_async(uri: str) -> Callable[[int], None]:
    def one(step: int) -> None:
        where = f"{uri}/step-{step}"
        dcp.async_save(dict(STATE), storage_writer=tierckpt.TierStorageWriter(where), no_dist=True).result()
        tierckpt.wait(where)

    return one


def staged(uri: str) -> Callable[[int], None]:
    stager = tierckpt.TierStager()

    def one(step: int) -> None:
        where = f"{uri}/step-{step}"
        writer = tierckpt.TierStorageWriter(where)
        state = {**STATE, "args": [bytearray(b"x"), {1}]}
        dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True).result()
        tierckpt.wait(where)

    return one


def checkpointer(uri: str) -> Callable[[int], None]:
    made = tierckpt.Checkpointer(uri, keep_last=3)

    def one(step: int) -> None:
        made.save(step, {"model": dict(STATE)}).result()
        if step % 5 == 4:  # the last one before each look, too
            made.wait()

    return one


def restore(uri: str) -> Callable[[int], None]:
    made = tierckpt.Checkpointer(uri)
    made.save(1, {"model": dict(STATE)})
    made.wait()

    def one(step: int) -> None:
        assert made.restore({"model": dict(STATE)}) == 1

    return one


def load(uri: str) -> Callable[[int], None]:
    where = _prepared(uri)

    def one(step: int) -> None:
        shutil.rmtree(local_root() / "reader", ignore_errors=True)  # so that each time the bytes come from the store
        reader = tierckpt.TierStorageReader(where, local_root=local_root() / "reader")
        dcp.load(dict(STATE), storage_reader=reader, no_dist=True)

    return one


def latest(uri: str) -> Callable[[int], None]:
    _prepared(uri)

    def one(step: int) -> None:
        assert tierckpt.latest(uri) == f"{uri}/step-2"
        assert tierckpt.latest(f"{uri}/nothing") is None

    return one


def prefetch(uri: str) -> Callable[[int], None]:
    where = _prepared(uri)
    return lambda step: shutil.rmtree(tierckpt.prefetch(where, to=local_root() / "fetched"))


def model(uri: str) -> Callable[[int], None]:
    put_model(f"{uri}/model/model.safetensors", {"w": torch.zeros(1000)})

    def one(step: int) -> None:
        assert tierckpt.load_safetensors(f"{uri}/model")["w"].shape == (1000,)

    return one


def _objects() -> Counter[str]:
    gc.collect()
    return Counter(f"{type(found).__module__}.{type(found).__qualname__}" for found in gc.get_objects())


def _numbers() -> dict[str, int]:
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    status = Path("/proc/self/status").read_text()
    return {
        "descriptors": len(links),
        "connections": sum(link.startswith("socket:") for link in links),
        "threads": threading.active_count(),
        "memory_kib": int(status.partition("RssAnon:")[2].split()[0]),
    }


def grown(operation: Callable[[int], None], operations: int) -> dict[str, Any]:
    """What grew in so many operations without a collection, and what of it would not go in one."""
    for step in range(WARM_UP):
        operation(step)
    before = _objects()
    gc.disable()
    first = _numbers()
    for step in range(WARM_UP, WARM_UP + operations):
        operation(step)
    time.sleep(0.5)  # threads release objects a moment after a result
    growth: dict[str, Any] = {}
    for _ in Poll(SETTLE_SECONDS):  # or later, on a busy machine
        growth = {name: value - first[name] for name, value in _numbers().items()}
        if all(growth[name] <= most for name, most in POOLS.items()):
            break
    growth["unreachable"] = gc.collect()
    gc.enable()
    kept = _objects() - before
    growth["kept"] = {name: count for name, count in kept.items() if name.startswith("tierckpt.") and count > 2}
    return growth


def measure(folder: Path, uri: str, operations: int, scenarios: list[str]) -> list[dict[str, Any]]:
    """Return what grew in each scenario between the end of the warm-up and the end of ``operations`` more."""
    return [
        {"scenario": scenario, **grown(globals()[scenario](f"{uri}/{scenario}"), operations)} for scenario in scenarios
    ]


# --- the tests --------------------------------------------------------------------------------------------------------

OPERATIONS = int(ENVIRONMENT.get("TIERCKPT_TEST_LEAK_OPERATIONS", "10"))
SCENARIOS = {
    "inline": ["save", "save_async", "staged", "checkpointer", "restore", "load", "latest", "prefetch", "model"],
    "agent": ["save", "checkpointer"],
}
TORCH_LOAD_OPERATIONS = {"restore", "load"}
"""Operations in which ``torch.load`` leaks a class for each object."""
BOUNDED = {
    "tierckpt.training.saves.SaveRecord",  # the latest 4096
    "tierckpt.stores.obstore_store.RemoteStore",  # the latest 16
    "tierckpt.stores.obstore_store.OddKeys",
    "tierckpt.format.uris.Location",
}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server(keep_alive=True) as started:
        yield started


@pytest.mark.slow
@pytest.mark.timeout(300 + 20 * OPERATIONS)
@pytest.mark.parametrize("mover", SCENARIOS)
def test_nothing_leaks_without_garbage_collection(server: S3Server, tmp_path: Path, mover: str) -> None:
    (tmp_path / "local").mkdir()
    with server.bucket() as bucket:
        options = {"uri": f"s3://{bucket}/run", "operations": OPERATIONS, "scenarios": SCENARIOS[mover]}
        environment = {**server.environment(), "TIERCKPT_MOVER": mover}
        job = start(measure, tmp_path / "job", env=environment, idle_seconds=1.0, **options)
        grown = job.result(250 + 20 * OPERATIONS)
    print(grown)
    assert [growth["scenario"] for growth in grown] == SCENARIOS[mover]
    for growth in grown:
        assert all(growth[name] <= most for name, most in POOLS.items()), growth
        assert growth["unreachable"] < OPERATIONS or growth["scenario"] in TORCH_LOAD_OPERATIONS, growth
        assert not growth["kept"].keys() - BOUNDED, growth
        if OPERATIONS >= 100:
            # For malloc's arenas of threads, however many operations run: 7 MiB once in 120 prefetches, and 1.7, 1.7
            # and 2.3 MiB after 40, 120 and 400 of them alone.
            assert growth["memory_kib"] < 7680, growth
