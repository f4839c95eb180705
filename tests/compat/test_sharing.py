"""Ranks of one node read what they share once: the bytes that all of them together read, and what they get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compat.worker import launch

pytestmark = pytest.mark.distributed

SCENARIOS = "tests.compat.sharing"
RANKS = 4
SMALL_BYTES = 8192
EXTRA_BYTES = 400_000
"""Metadata, which every rank reads for itself, and pages at which the heads of items are looked at."""


def total(load: dict[str, Any]) -> float:
    return float(sum(load["read"].values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "window", "apart"),
    [
        ("replicated", "replicated", "256MiB", 4.0),
        ("rows", "columns", "2MiB", 4.0),
        ("mixed", "mixed", "2MiB", 2.2),
    ],
)
def test_what_every_rank_wants_is_read_once(saved: str, loaded: str, window: str, apart: float, file_uri: str) -> None:
    found = launch(f"{SCENARIOS}:save_and_load", RANKS, folder=file_uri, saved=saved, loaded=loaded, window=window)
    assert (found["shared"]["right"], found["apart"]["right"], found["shared"]["alone"]) == (True, True, 0)
    assert found["size"] <= total(found["shared"]) <= found["size"] + EXTRA_BYTES, found
    assert total(found["apart"]) >= apart * 0.95 * found["size"], found  # the control: else there was nothing to share


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "bucket_bytes"),
    [("replicated", "replicated", 32 << 20), ("mixed", "mixed", 1), ("rows", "whole", 3 << 20)],
)
def test_over_the_process_group_each_byte_is_read_once(
    saved: str, loaded: str, bucket_bytes: int, file_uri: str
) -> None:
    """What all want is read by one and broadcast; what only some want each reads for itself."""
    found = launch(
        f"{SCENARIOS}:load_over_group", RANKS, folder=file_uri, saved=saved, loaded=loaded, bucket_bytes=bucket_bytes
    )
    assert (found["group"]["right"], found["apart"]["right"]) == (True, True)
    columns = 1.2 if loaded == "mixed" else 1.0  # columns of a layer are read by rows that several ranks want
    assert total(found["group"]) <= columns * found["size"] + EXTRA_BYTES, found
    assert total(found["apart"]) >= 1.5 * found["size"], found
    common = (2 if loaded == "mixed" else 8) * 2 << 20
    assert common <= sum(found["sent"]) <= common + SMALL_BYTES
    assert len(found["sent"]) >= common // max(bucket_bytes, 2 << 20)


@pytest.mark.slow
def test_a_rank_that_cannot_read_its_part_is_named_and_nobody_waits(file_uri: str) -> None:
    """B1: the others read for themselves what it should have sent."""
    found = launch(f"{SCENARIOS}:damaged_over_group", RANKS, folder=file_uri, damage="a rank that cannot read")
    assert found["errors"] == ["[2]"] * RANKS
    assert [fits for rank, fits in enumerate(found["right"]) if rank != 2] == [True] * (RANKS - 1)


@pytest.mark.slow
def test_targets_that_are_not_alike_are_not_broadcast_into(file_uri: str) -> None:
    """B1."""
    found = launch(f"{SCENARIOS}:damaged_over_group", RANKS, folder=file_uri, damage="targets of another dtype")
    assert found["errors"] == [""] * RANKS and found["right"] == [True] * RANKS


@pytest.mark.slow
def test_on_more_ranks_than_have_saved_it(file_uri: str) -> None:
    launch(f"{SCENARIOS}:only_save", 2, folder=file_uri, saved="rows")
    found = launch(f"{SCENARIOS}:load_twice", RANKS, folder=file_uri, loaded="rows")
    assert (found["shared"]["right"], found["shared"]["alone"]) == (True, 0)
    assert total(found["shared"]) <= 1.15 * found["size"], found  # two ranks read the chunk where their rows meet


@pytest.mark.slow
@pytest.mark.server
def test_a_checkpointer_on_a_new_node_fetches_once_what_its_ranks_restore(s3_uri: str, tmp_path: Path) -> None:
    found = launch(f"{SCENARIOS}:restore_elsewhere", RANKS, uri=s3_uri, local_root=str(tmp_path / "elsewhere"))
    size = found["size"]
    assert (found["step"], found["right"], found["alone"]) == (7, True, 0)
    assert size <= found["read"]["shared"] <= size + EXTRA_BYTES, found
    assert size <= found["read"]["local"] <= size + EXTRA_BYTES, found


@pytest.mark.slow
@pytest.mark.server
def test_over_the_process_group_a_job_reads_the_store_once(s3_uri: str, tmp_path: Path) -> None:
    """Four nodes without a peer between them; the control is that each reads all of it."""
    found = launch(f"{SCENARIOS}:restore_on_nodes", RANKS, uri=s3_uri, roots=str(tmp_path))
    assert found["group"]["right"] and found["apart"]["right"]
    assert found["size"] <= found["group"]["read"]["shared"] <= found["size"] + EXTRA_BYTES, found
    assert found["apart"]["read"]["shared"] >= 0.95 * RANKS * found["size"], found
