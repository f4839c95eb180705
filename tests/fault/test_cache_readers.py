"""Many processes of one node that read one cold model: each chunk is fetched once, and no byte is wrong.

The readers are real processes (tests/fault/cache_readers.py). Cites tierckpt/disk/claims.py (C1 to C3) and
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
"""Chunks that one reader has on their way at a time: twice its concurrency."""


def test_80_staggered_readers_of_a_cold_model_fetch_each_chunk_once_and_get_no_wrong_byte(
    tmp_path: Path, record_property: Any
) -> None:
    outcome = run(tmp_path, READERS, 0)
    record_property("outcome", outcome)
    assert outcome["ends"] == {0: READERS}
    assert outcome["wrong"] == []
    assert outcome["requests"] == outcome["distinct"] == outcome["chunks"]
    assert (outcome["directories"], outcome["whole"], outcome["left"]) == (1, True, [])


def test_what_killed_readers_had_claimed_is_taken_over_and_fetched_once_more_at_most(tmp_path: Path) -> None:
    outcome = run(tmp_path, 10, 4)
    assert outcome["ends"] == {-9: 4, 0: 6}
    assert outcome["wrong"] == []
    assert outcome["distinct"] == outcome["chunks"]
    assert outcome["requests"] <= outcome["chunks"] + 4 * WORKERS
    assert (outcome["directories"], outcome["whole"], outcome["left"]) == (1, True, [])


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_mistake_put_in_on_purpose_is_found(bug: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, 5, 0, bug)
    assert outcome["wrong"] or outcome["requests"] > outcome["chunks"] or outcome["ends"] != {0: 5}
