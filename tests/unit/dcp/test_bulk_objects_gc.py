"""A block without garbage collection leaves no work for later collections, and keeps the job's own gc settings."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tierckpt.dcp import bulk_objects
from tierckpt.dcp.bulk_objects import gc_paused

MANY = 20_000
MORE = 3 * gc.get_threshold()[0]
"""Enough for a collection of the youngest: 700 objects up to Python 3.12, 2,000 from 3.13 on."""


class Collections:
    """Generations of the collections, and the number of objects each one visited."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self.seen.append(len(gc.get_objects(generation=info["generation"])))


@pytest.fixture(autouse=True)
def no_frozen_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_objects, "has_frozen", False)


@pytest.fixture
def collections() -> Iterator[Collections]:
    gc.collect()
    noted = Collections()
    gc.callbacks.append(noted)
    yield noted
    gc.callbacks.remove(noted)
    gc.unfreeze()


def young(count: int) -> list[list[int]]:
    return [[number] for number in range(count)]


@pytest.mark.slow
def test_no_collection_inside_and_no_visits_afterwards(collections: Collections) -> None:
    with gc_paused():
        made = young(MANY)
        assert collections.seen == []
    more = young(MORE)
    assert collections.seen, "the collector is enabled again"
    assert max(collections.seen) < MANY / 2
    assert len(made) + len(more) == MANY + MORE


def test_control_without_the_block_all_objects_are_visited(collections: Collections) -> None:
    gc.disable()
    made = young(MANY)
    gc.enable()
    more = young(MORE)
    assert max(collections.seen) >= MANY
    assert len(made) + len(more) == MANY + MORE


@pytest.mark.slow
def test_garbage_is_freed_by_the_next_full_collection(collections: Collections) -> None:
    class Cycle:
        living = 0

        def __init__(self) -> None:
            self.me = self
            Cycle.living += 1

        def __del__(self) -> None:
            Cycle.living -= 1

    with gc_paused():
        for _ in range(100):
            Cycle()
    assert Cycle.living == 100
    gc.collect()
    assert Cycle.living == 0


def test_objects_frozen_by_the_job_stay_frozen() -> None:
    theirs: list[object] = []
    gc.freeze()
    try:
        with gc_paused():
            young(100)
        assert not any(found is theirs for found in gc.get_objects()), "the collector tracks it again"
    finally:
        gc.unfreeze()


def test_a_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="inside"), gc_paused():
        raise ValueError("inside")
    assert gc.isenabled()
