"""State dicts the tests save, and how they compare: bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tierckpt.errors import TierckptError

KIB = 1024


def small_state(seed: int = 0) -> dict[str, Any]:
    """About 200 KiB: several tensors, an empty one, a scalar, objects."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": drawn(generator, 128, 256),
            "bias": drawn(generator, 256).to(torch.bfloat16),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(float(seed)),
            "transposed": drawn(generator, 32, 64).t(),
        },
        "step": seed,
        "note": {"text": f"seed {seed}", "list": [1, "two", 3.0]},
    }


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """The same numbers on every device."""
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def zeros_like(state: Any) -> Any:
    """The same structure with nothing in it, for ``dcp.load`` to fill."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state, memory_format=torch.contiguous_format)
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    if isinstance(state, list):
        return [zeros_like(value) for value in state]
    return None


def same(left: Any, right: Any) -> bool:
    """True when both hold the same bits."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        raw = [item.contiguous().reshape(-1).view(torch.uint8) if item.numel() else item for item in (left, right)]
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*(one.cpu() for one in raw))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def save(uri: str, state: dict[str, Any], **options: Any) -> None:
    with raises_ours():
        dcp.save(state, storage_writer=tierckpt.TierStorageWriter(uri, **options), no_dist=True)


def save_drained(uri: str, state: dict[str, Any], **options: Any) -> None:
    """Save, and wait until the checkpoint is on shared storage."""
    save(uri, state, **options)
    tierckpt.wait(uri, timeout_seconds=60)


def load(uri: str, like: dict[str, Any], **options: Any) -> dict[str, Any]:
    target = zeros_like(like)
    with raises_ours():
        dcp.load(target, storage_reader=tierckpt.TierStorageReader(uri, **options), no_dist=True)
    return target  # type: ignore[no-any-return]


class raises_ours:
    """Raise the error of ours inside DCP's CheckpointException as itself, for ``pytest.raises``."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, dcp.CheckpointException):
            for cause, _ in error.failures.values():
                if isinstance(cause, TierckptError):
                    raise cause


def flip(path: Path, at: int | None = None) -> None:
    """Flip one bit of a file in place, under all its names; by default in its middle."""
    with path.open("r+b") as file:
        at = path.stat().st_size // 2 if at is None else at
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
