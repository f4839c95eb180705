"""Several nodes: no rank sees another's SSD, whoever drains last commits, and a lost node never leads to a mix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.worker import launch

pytestmark = pytest.mark.distributed
SCENARIOS = "tests.integration.scenarios"


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("use_collectives", [True, False])
def test_whoever_drains_last_commits(use_collectives: bool, slow: int, s3_uri: str, tmp_path: Path) -> None:
    outcome = launch(
        f"{SCENARIOS}:save_on_two_nodes",
        2,
        uri=s3_uri,
        roots=str(tmp_path),
        use_collectives=use_collectives,
        slow=slow,
    )
    assert outcome["journal"] == [0, 0]
    for claim in ("knows the commit", "own shard only", "value", "latest"):
        assert outcome[claim] == [True, True], (claim, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("lose", [0, 1])
def test_a_node_lost_before_its_drain_costs_that_step_and_mixes_nothing(lose: int, s3_uri: str, tmp_path: Path) -> None:
    outcome = launch(f"{SCENARIOS}:restart_from_what_is_left", 2, uri=s3_uri, roots=str(tmp_path), lose=lose)
    assert outcome["outcomes"] == [[1, [1.0], [1.0]], [1, [2.0], [1.0]]]
    assert outcome["seconds"] < 30
