"""Random histories of a run that restores older steps, compared with a model (``histories.py``)."""

from __future__ import annotations

import os

import pytest

from tests.fault.histories import BUGS, History, play

HISTORIES = int(os.environ.get("TIERCKPT_TEST_HISTORIES", "4"))
HISTORIES_OF_BUGS = 40
SECONDS = 60 + 40 * HISTORIES  # longer than a slow run takes

pytestmark = pytest.mark.timeout(max(SECONDS, 600) + 30)


def play_until_wrong(first: int, count: int, bug: str = "") -> list[History]:
    histories: list[History] = []
    for seed in range(first, first + count):
        histories.append(play(seed, bug))
        print(seed, histories[-1].wrong, histories[-1].told)
        if histories[-1].wrong:
            break
    return histories


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_histories_find_each_seeded_bug(bug: str) -> None:
    assert any(one.wrong for one in play_until_wrong(0, HISTORIES_OF_BUGS, bug)), (
        f"not found in {HISTORIES_OF_BUGS} histories"
    )


@pytest.mark.slow
def test_histories_lose_no_acknowledged_checkpoint() -> None:
    histories = play_until_wrong(0, HISTORIES)
    assert not [one for one in histories if one.wrong], histories[-1].told
    assert len(histories) == HISTORIES
