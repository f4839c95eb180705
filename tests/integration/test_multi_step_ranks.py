"""Two ranks copy their shards over several steps: each logs its own reduced gradient, without a collective."""

from __future__ import annotations

import pytest

from tests.compat.worker import launch


@pytest.mark.parametrize("kind", [pytest.param("fsdp", marks=pytest.mark.slow), "ddp", "bucket views"])
def test_two_ranks_bring_their_shards_to_one_version(kind: str) -> None:
    fallbacks = launch("tests.integration.multi_step_ranks:windows_copied_whole", 2, kind=kind)
    allowed = (0, 1) if kind == "bucket views" else (0,)
    assert [len(of_rank) in allowed for of_rank in fallbacks] == [True] * 2, fallbacks
