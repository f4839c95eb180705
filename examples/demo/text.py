"""The training text, included in every Python: the language reference as printed by ``help()``."""

from __future__ import annotations

import torch
from torch import Tensor


def corpus() -> Tensor:
    """Return some 460 KB of English about Python, as bytes in a uint8 tensor."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def batch(text: Tensor, *, step: int, rank: int, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets. A pure function of seed, step and rank, so a resumed run sees the same data."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 1_009 + rank)
    starts = torch.randint(len(text) - length - 1, (rows,), generator=generator)
    window = torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
    return window[:, :-1], window[:, 1:]
