"""Connections, descriptors and memory stay flat over any number of saves and reads, also without garbage collection
(leak_scenarios.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.leak_scenarios import measure
from tests.fault.runner import start
from tests.services import ENVIRONMENT, S3Server, moto_server

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
        assert growth["descriptors"] <= 4, growth  # concurrent requests may add a connection or two to a pool
        assert growth["threads"] <= 8, growth  # pools grow up to their size
        assert growth["unreachable"] < OPERATIONS or growth["scenario"] in TORCH_LOAD_OPERATIONS, growth
        assert not growth["kept"].keys() - BOUNDED, growth
        if OPERATIONS > 1000:
            assert growth["memory_kib"] / OPERATIONS < 4, growth
