"""Mutated metadata: each is rejected by a TierckptError, or is safe to act on. test_fuzz.py mutates manifests."""

from __future__ import annotations

import contextlib
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tests.states import save, small_state
from tierckpt.dcp.sealed_unpickler import load_metadata
from tierckpt.errors import UnsafeCheckpointError

SEED = 20261121
INPUTS_MIN = 320
"""Least number of inputs, also on a slow machine."""
OPCODES = bytes(range(0x80, 0x98)) + b"(.0123FIJKLMNPQRSTUVXabcdeghijlopqrstu}])GCB"


def fuzz(directory: Path, seconds: float) -> dict[str, Any]:
    """Count tried and accepted inputs; raise on any other error, or if an accepted one is not safe."""
    uri = str(directory / "shared/step-1")
    options = {"local_root": directory / "local", "mover": "inline"}
    save(uri, {**small_state(1), "list": [torch.ones(2), {"a": 1}]}, **options)
    step = next((directory / "local").rglob("manifest.json")).parent.parent
    pickled = next(path for path in step.rglob("*metadata*") if path.is_file()).read_bytes()
    load_metadata(pickled, where="genuine")
    rng = random.Random(SEED)
    counts = {"metadata": 0, "accepted": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end or counts["metadata"] < INPUTS_MIN:
        for _ in range(20):
            counts["metadata"] += 1
            with contextlib.suppress(UnsafeCheckpointError):
                check(load_metadata(mutate(pickled, rng), where="fuzz"))
                counts["accepted"] += 1
    return counts


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Apply one to four changes: bits, bytes, opcodes; pieces removed, repeated, moved; larger lengths."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, count = rng.randrange(len(made)), rng.randrange(1, 20)
        kind = rng.randrange(8)
        if kind == 0:
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            made[at] = rng.randrange(256)
        elif kind == 2:
            made[at] = rng.choice(OPCODES)
        elif kind == 3:
            del made[at : at + count]
        elif kind == 4:
            made[at:at] = bytes([rng.choice(OPCODES)])
        elif kind == 5:
            made[at:at] = made[at : at + count]
        elif kind == 6:
            piece = bytes(made[at : at + count])
            to = rng.randrange(len(made))
            made[to : to + count] = piece
        else:
            made[at : at + 4] = b"\xff\xff\xff\x7f"
        if not made:
            made = bytearray(b".")
    return bytes(made)


def check(found: Metadata) -> None:
    """Check S5 again, independently of the code under test."""
    entries = found.state_dict_metadata
    for entry in entries.values():
        if isinstance(entry, TensorStorageMetadata):
            assert all(0 <= size < 1 << 50 for size in entry.size)
            for chunk in entry.chunks:
                ends = [at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
                inside = all(end <= size for end, size in zip(ends, entry.size, strict=True))
                assert inside or torch.Size(chunk.sizes).numel() == 0
    for info in (found.storage_data or {}).values():
        parts = Path(info.relative_path).parts
        assert parts and not Path(info.relative_path).is_absolute() and ".." not in parts
        assert info.offset >= 0 and info.length >= 0
    json.dumps(found.planner_data, default=str)
