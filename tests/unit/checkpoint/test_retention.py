"""Which copies of a run a rule removes."""

from __future__ import annotations

import pytest

from tierckpt.checkpoint.retention import CheckpointCopy, Health, Policy
from tierckpt.types import Tier


def removed(policy: Policy, steps: list[int], own: list[int], tier: Tier = Tier.SHARED) -> list[int]:
    copies = [CheckpointCopy(f"step-{step}", step, tier, Health.WHOLE, is_drained=True) for step in steps]
    return sorted(verdict.copy.step for verdict in policy.judge(copies, drains=False, own=own) if verdict.remove)


@pytest.mark.parametrize("tier", [Tier.LOCAL, Tier.SHARED])
def test_a_process_keeps_its_own_saves_beside_newer_ones_of_another(tier: Tier) -> None:
    steps, own = [12, 14, 16, 100, 200, 300], [12, 14, 16]
    assert removed(Policy.of(keep_last=2), steps, [], tier) == [12, 14, 16, 100]
    assert removed(Policy.of(keep_last=2), steps, own, tier) == [12, 100]
    assert removed(Policy.of(keep_last=1, keep_every=7), steps, own, tier) == [12, 100, 200]
    assert removed(Policy(), steps, own, tier) == []


def test_the_latest_save_of_a_step_counts() -> None:
    """A job that goes back saves lower steps later."""
    assert removed(Policy.of(keep_last=1), [10, 20, 30], [20, 30, 10]) == [20]
