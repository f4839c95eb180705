"""The order of the data: every sample of an epoch once, whoever reads it and however often it is interrupted."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.utils.data import DataLoader, Dataset

from tierckpt.errors import CheckpointError, ConfigError, StateMismatchError
from tierckpt.training.data_order import DataOrder


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def read(
    length: int, world_size: int, state: dict[str, Any] | None, steps: int, **options: Any
) -> tuple[list[int], Any]:
    """What all ranks of a job receive in ``steps`` steps from ``state`` on, and the state then."""
    seen: list[int] = []
    batches, states = set(), []
    for rank in range(world_size):
        order = DataOrder(length, rank=rank, world_size=world_size, **options)
        if state is not None:
            order.load_state_dict(state)
        count = 0
        for batch in order.over(order):
            assert batch, "an empty batch cannot be trained on"
            seen += batch
            count += 1
            if count == steps:
                break
        batches.add(count)
        states.append(order.state_dict())
    assert len(batches) == 1, "ranks must take as many steps"
    assert all(one == states[0] for one in states)
    return seen, states[0]


@settings(max_examples=60, deadline=None)
@given(
    length=some.integers(1, 200),
    epochs=some.integers(1, 3),
    batch_size=some.integers(1, 9),
    pieces=some.lists(some.tuples(some.integers(1, 5), some.integers(1, 6)), min_size=1, max_size=8),
    shuffle=some.booleans(),
)
def test_every_epoch_has_each_sample_once_with_any_ranks_and_interruptions(
    length: int, epochs: int, batch_size: int, pieces: list[tuple[int, int]], shuffle: bool
) -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for world_size, steps in [*pieces, (1, 10**9)]:
        remaining = epochs * length - (state["position"] if state else 0)
        if remaining < world_size:
            continue  # so small a rest is read by fewer ranks
        part, state = read(length, world_size, state, steps, batch_size=batch_size, epochs=epochs, shuffle=shuffle)
        seen += part
    assert Counter(seen) == dict.fromkeys(range(length), epochs)


def test_an_order_is_that_of_its_seed_and_epoch_alone() -> None:
    one, _ = read(100, 1, None, 20, batch_size=10, seed=3)
    four, _ = read(100, 4, None, 5, batch_size=10, seed=3)
    assert sorted(one[:100]) == sorted(one[100:]) == list(range(100))
    assert one[:100] != one[100:]
    assert Counter(one) == Counter(four)
    assert read(100, 1, None, 10, batch_size=10, seed=4)[0] != one[:100]


def test_what_workers_read_ahead_does_not_count() -> None:
    order = DataOrder(Numbers(1000), batch_size=10, epochs=1, shuffle=False)
    loader = DataLoader(Numbers(1000), batch_sampler=order, num_workers=1, prefetch_factor=4)
    received: list[int] = []
    for batch in order.over(loader):
        received += batch.tolist()
        if len(received) == 200:
            break
    assert order.state_dict()["position"] == 200
    again = DataOrder(Numbers(1000), batch_size=20, epochs=1, shuffle=False)
    again.load_state_dict(order.state_dict())
    assert next(iter(again)) == list(range(200, 220))


def test_batches_that_nobody_counts_are_not_saved_as_if_they_were() -> None:
    order = DataOrder(100, batch_size=10)
    next(iter(order))
    with pytest.raises(CheckpointError, match=r"read without DataOrder\.over"):
        order.state_dict()


def test_a_state_of_other_data_is_refused() -> None:
    state = DataOrder(100, batch_size=10).state_dict()
    with pytest.raises(StateMismatchError, match="101 samples here and had 100"):
        DataOrder(101, batch_size=10).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dataset": 0}, "the length of the dataset is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"rank": 2, "world_size": 2}, "rank is 2: with 2 ranks it is 0 to 1"),
    ],
)
def test_bad_input_gets_a_sentence(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DataOrder(**{"dataset": 10, "batch_size": 1, **arguments})


def test_padding_as_samplers_do_would_be_found() -> None:
    """Control: torch's own sampler for several ranks sees some samples twice."""
    from torch.utils.data.distributed import DistributedSampler

    seen = [index for rank in range(4) for index in DistributedSampler(Numbers(10), 4, rank, shuffle=False)]
    assert Counter(seen) != dict.fromkeys(range(10), 1)


def test_the_order_does_not_touch_the_generators_of_training() -> None:
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    list(DataOrder(50, batch_size=10, epochs=1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
