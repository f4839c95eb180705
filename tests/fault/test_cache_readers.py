"""Many processes of one node read one uncached model: each chunk is fetched once, and no byte is wrong.

The readers are processes of tests/fault/cache_readers.py. Invariants: tierckpt/disk/file_lock.py (C1 to C3) and
tierckpt/cache/partial_entry.py (G1, G2, G4).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.fault.cache_readers import BUGS, run

READERS = int(os.environ.get("TIERCKPT_TEST_CACHE_READERS", "80"))
WORKERS = 4
"""Chunks in flight of one reader: twice its concurrency."""


@pytest.mark.slow
def test_80_staggered_readers_of_an_uncached_model_fetch_each_chunk_once(tmp_path: Path, record_property: Any) -> None:
    outcome = run(tmp_path, READERS, 0)
    record_property("outcome", outcome)
    assert outcome["ends"] == {0: READERS}
    assert outcome["wrong"] == []
    assert outcome["requests"] == outcome["distinct"] == outcome["chunks"]
    assert (outcome["directories"], outcome["whole"], outcome["left"]) == (1, True, [])


@pytest.mark.slow
def test_chunks_claimed_by_killed_readers_are_fetched_at_most_once_more(tmp_path: Path) -> None:
    outcome = run(tmp_path, 10, 4)
    assert outcome["ends"] == {-9: 4, 0: 6}
    assert outcome["wrong"] == []
    assert outcome["distinct"] == outcome["chunks"]
    assert outcome["requests"] <= outcome["chunks"] + 4 * WORKERS
    assert (outcome["directories"], outcome["whole"], outcome["left"]) == (1, True, [])


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_readers_find_a_seeded_bug(bug: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, 5, 0, bug)
    assert outcome["wrong"] or outcome["requests"] > outcome["chunks"] or outcome["ends"] != {0: 5}
