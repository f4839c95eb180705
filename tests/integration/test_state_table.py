"""A restore equals ``torch.save`` and ``load_state_dict`` bit for bit, or both raise.

The rows are in ``state_shapes.py`` and ``state_shapes_of_modules.py``; the comparison is in ``state_compare.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler

from tests.integration import state_shapes, state_shapes_of_modules
from tests.integration.state_compare import Shape, check
from tests.integration.state_shapes import OPTIMIZERS, SCHEDULERS

SHAPES = [*state_shapes.SHAPES, *state_shapes_of_modules.SHAPES]


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_table_has_every_torch_optimizer_and_scheduler() -> None:
    def names(module: object, base: type) -> set[str]:
        found = inspect.getmembers(module, inspect.isclass)
        return {name for name, kind in found if issubclass(kind, base) and kind is not base and name[0] != "_"}

    assert names(torch.optim, torch.optim.Optimizer) - OPTIMIZERS.keys() == set()
    assert names(lr_scheduler, lr_scheduler.LRScheduler) - SCHEDULERS.keys() == set()
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_restore_equals_load_state_dict(shape: Shape, file_uri: str, request: pytest.FixtureRequest) -> None:
    if shape.needs == "process group":
        request.getfixturevalue("process_group")
    elif shape.needs and not hasattr(torch.optim, shape.needs):
        pytest.skip(f"this torch has no {shape.needs}")
    check(shape, file_uri)
