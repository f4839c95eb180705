"""Several nodes: separate SSDs, the last drain commits, and a lost node never leads to a mixed checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.worker import launch

pytestmark = pytest.mark.distributed
SCENARIOS = "tests.integration.node_scenarios"


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("use_collectives", [True, False])
def test_last_drain_commits(use_collectives: bool, slow: int, s3_uri: str, tmp_path: Path) -> None:
    outcome = launch(
        f"{SCENARIOS}:save_on_two_nodes", 2, uri=s3_uri, roots=str(tmp_path), use_collectives=use_collectives, slow=slow
    )
    assert outcome["journal"] == [0, 0]
    for claim in ("knows the commit", "own shard only", "value", "latest"):
        assert outcome[claim] == [True, True], (claim, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("lose", [0, 1])
def test_node_lost_before_its_drain_loses_only_that_step(lose: int, s3_uri: str, tmp_path: Path) -> None:
    outcome = launch(f"{SCENARIOS}:restart_from_what_is_left", 2, uri=s3_uri, roots=str(tmp_path), lose=lose)
    assert outcome["outcomes"] == [[1, [1.0], [1.0]], [1, [2.0], [1.0]]]
    assert outcome["seconds"] < 30
