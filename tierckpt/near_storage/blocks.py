"""Layout of an optimizer's tensors in the state file and in shared memory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..errors import ConfigError
from ..quantities import DISK_BLOCK_BYTES, round_up
from ..replay.frame import DTYPES, dtype_name

BLOCK_BYTES = 4 << 20
"""Minimum size of a block, so that its record and msync cost little."""
ALIGNMENT = 64
MASTER_DTYPE = torch.float32
MASTER = ""


@dataclass(frozen=True, slots=True)
class TrainerParameter:
    key: str
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def group(self) -> int:
        return int(self.key.partition(".")[0])


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """``offset`` is from the block's start, ``index`` that of its presence byte."""

    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    index: int


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Its first bytes say which tensors are present."""

    index: int
    keys: tuple[str, ...]
    places: tuple[TensorPlace, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    kind: str
    blocks: tuple[StateBlock, ...]
    size_bytes: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()[:32]


def layout_of(
    kind: type[torch.optim.Optimizer], members: Sequence[TrainerParameter], groups: Sequence[Mapping[str, Any]]
) -> BlockLayout:
    """Lay out the state of ``members``, as a trial step of one element creates it."""
    made: dict[int, dict[str, tuple[torch.dtype, bool]]] = {}
    runs: list[list[TrainerParameter]] = []
    block_bytes = BLOCK_BYTES
    for one in members:
        if one.group not in made:
            made[one.group] = {MASTER: (MASTER_DTYPE, True)} | _state_of(kind, groups[one.group])
        if block_bytes >= BLOCK_BYTES:
            runs.append([])
            block_bytes = 0
        runs[-1].append(one)
        block_bytes += math.prod(one.shape) * sum(dtype.itemsize for dtype, _ in made[one.group].values())
    blocks: list[StateBlock] = []
    offset = 0
    for run in runs:
        positions: list[TensorPlace] = []
        at = round_up(sum(len(made[one.group]) for one in run), ALIGNMENT)
        for one in run:
            for name, (dtype, is_whole) in made[one.group].items():
                shape = one.shape if is_whole else ()
                positions.append(TensorPlace(one.key, name, dtype_name(dtype), shape, at, len(positions)))
                at = round_up(at + math.prod(shape) * dtype.itemsize, ALIGNMENT)
        size_bytes = round_up(at, DISK_BLOCK_BYTES)
        blocks.append(StateBlock(len(blocks), tuple(one.key for one in run), tuple(positions), offset, size_bytes))
        offset += size_bytes
    return BlockLayout(kind.__name__, tuple(blocks), offset)


def shared_bytes(members: Sequence[TrainerParameter]) -> int:
    return max(ALIGNMENT, sum(_shared_bytes(one) for one in members))


def shared_tensors(members: Sequence[TrainerParameter], memory: memoryview) -> dict[str, torch.Tensor]:
    found, offset = {}, 0
    for one in members:
        found[one.key] = view_of(memory, offset, one)
        offset += _shared_bytes(one)
    return found


def _shared_bytes(one: TrainerParameter) -> int:
    return round_up(math.prod(one.shape) * DTYPES[one.dtype].itemsize, ALIGNMENT)


def view_of(memory: memoryview, offset: int, one: TrainerParameter | TensorPlace) -> torch.Tensor:
    dtype, count = DTYPES[one.dtype], math.prod(one.shape)
    if not count:
        return torch.empty(one.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(one.shape)


def _state_of(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, bool]]:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=MASTER_DTYPE, device="cpu"))
    parameter.grad = torch.zeros(2, dtype=MASTER_DTYPE, device="cpu")
    optimizer = cast(Any, kind)([{**group, "params": [parameter]}])
    optimizer.step()
    found = {}
    for name, value in optimizer.state[parameter].items():
        if isinstance(value, torch.Tensor):
            found[name] = (value.dtype, value.ndim > 0)
        elif value is not None:
            raise ConfigError(
                f"{kind.__name__} keeps {name!r} as a {type(value).__name__}; only tensors can be stored in the file",
                hint='Save whole checkpoints (mode="async") with this optimizer',
            )
    return found
