"""Ranks of one node read shared bytes once: total bytes read, and the loaded state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compat.worker import launch
from tests.servers.origin import Origin

pytestmark = pytest.mark.distributed

SCENARIOS = "tests.compat.sharing"
RANKS = 4
SMALL_BYTES = 8192
EXTRA_BYTES = 400_000
"""Metadata, which every rank reads itself, and pages with the heads of items."""


def total(load: dict[str, Any]) -> float:
    return float(sum(load["read"].values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "window_bytes", "apart"),
    [("replicated", "replicated", 256 << 20, 4.0), ("rows", "columns", 2 << 20, 4.0), ("mixed", "mixed", 2 << 20, 2.2)],
)
def test_shared_bytes_are_read_once(saved: str, loaded: str, window_bytes: int, apart: float, file_uri: str) -> None:
    options = {"saved": saved, "loaded": loaded, "window_bytes": window_bytes}
    found = launch(f"{SCENARIOS}:save_and_load", RANKS, folder=file_uri, **options)
    assert (found["shared"]["right"], found["apart"]["right"], found["shared"]["alone"]) == (True, True, 0)
    assert found["size"] <= total(found["shared"]) <= found["size"] + EXTRA_BYTES, found
    assert total(found["apart"]) >= apart * 0.95 * found["size"], found  # the control: else there was nothing to share


@pytest.mark.slow
def test_on_more_ranks_than_have_saved_it(file_uri: str) -> None:
    launch(f"{SCENARIOS}:save", 2, folder=file_uri, saved="rows")
    found = launch(f"{SCENARIOS}:load_twice", RANKS, folder=file_uri, loaded="rows")
    assert (found["shared"]["right"], found["shared"]["alone"]) == (True, 0)
    assert total(found["shared"]) <= 1.15 * found["size"], found  # two ranks read the chunk where their rows meet


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "apart"), [(2, False), (4, False), (8, False), (4, True)])
def test_parts_of_files_that_every_rank_wants_leave_the_store_once(ranks: int, apart: bool, tmp_path: Path) -> None:
    """By the server's own count. The node's page cache cannot do this: the node has no file."""
    (tmp_path / "bucket").mkdir()
    launch(f"{SCENARIOS}:save", 2, folder=f"file://{tmp_path}/bucket/run", saved="trained")
    with Origin.running(tmp_path) as origin:
        node = {**origin.environment(), "TIERCKPT_LOCAL_ROOT": str(tmp_path / "elsewhere")}
        found = launch(f"{SCENARIOS}:load_model", ranks, env=node, uri="s3://bucket/run/step-1", apart=apart)
        sent = origin.counts()["sent_bytes_by_key"]
    shards = sum(count for key, count in sent.items() if key.endswith(".distcp"))
    assert found["right"]
    times = ranks if apart else 1
    assert times * found["size"] <= shards <= times * (found["size"] + EXTRA_BYTES), sent
    assert not list((tmp_path / "elsewhere").rglob("*.distcp"))  # and no file is left on the node


@pytest.mark.slow
@pytest.mark.server
def test_a_checkpointer_on_a_new_node_fetches_once_what_its_ranks_restore(s3_uri: str, tmp_path: Path) -> None:
    found = launch(f"{SCENARIOS}:restore_elsewhere", RANKS, uri=s3_uri, local_root=str(tmp_path / "elsewhere"))
    size = found["size"]
    assert (found["step"], found["right"], found["alone"]) == (7, True, 0)
    assert size <= found["read"]["shared"] <= size + EXTRA_BYTES, found
    assert size <= found["read"]["local"] <= size + EXTRA_BYTES, found
