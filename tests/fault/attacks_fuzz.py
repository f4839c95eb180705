"""Mutated metadata and manifests: each is rejected by a TierckptError, or is safe to act on."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tests.states import save, small_state
from tierckpt.dcp.sealed import load_metadata
from tierckpt.errors import ManifestError, UnsafeCheckpointError
from tierckpt.format import manifest

SEED = 20261121
INPUTS_MIN = 320
"""Least number of metadata inputs, also on a slow machine; half as many manifests."""
OPCODES = bytes(range(0x80, 0x98)) + b"(.0123FIJKLMNPQRSTUVXabcdeghijlopqrstu}])GCB"
ODD_VALUES = [-1, 0, 1 << 63, 1e308, "", "..", "/x", "a/../b", None, True, [], {}, "\0", "x" * 5000]


def fuzz(directory: Path, seconds: float) -> dict[str, Any]:
    """Count tried and accepted inputs; raise on any other error, or if an accepted one is not safe."""
    uri = str(directory / "shared/step-1")
    options = {"local_root": directory / "local", "mover": "inline"}
    save(uri, {**small_state(1), "list": [torch.ones(2), {"a": 1}]}, **options)
    step = next((directory / "local").rglob("manifest.json")).parent.parent
    pickled = next(path for path in step.rglob("*metadata*") if path.is_file()).read_bytes()
    described = (step / ".tierckpt/manifest.json").read_bytes()
    load_metadata(pickled, where="genuine")
    manifest.decode(described)
    rng = random.Random(SEED)
    counts = {"metadata": 0, "metadata_accepted": 0, "manifest": 0, "manifest_accepted": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end or counts["metadata"] < INPUTS_MIN:
        for _ in range(20):
            _count_outcome("metadata", counts, lambda: check(load_metadata(mutate(pickled, rng), where="fuzz")))
        for _ in range(5):
            _count_outcome("manifest", counts, lambda: manifest.decode(mutate(described, rng)))
            _count_outcome("manifest", counts, lambda: check_manifest(manifest.decode(reseal(described, rng))))
    return counts


def _count_outcome(kind: str, counts: dict[str, int], action: Callable[[], None]) -> None:
    counts[kind] += 1
    try:
        action()
    except (UnsafeCheckpointError, ManifestError):
        return
    counts[f"{kind}_accepted"] += 1


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


def reseal(data: bytes, rng: random.Random) -> bytes:
    """Change a value in the manifest and make its digest valid again, as an attacker would."""
    body = json.loads(data)
    body.pop("self_digest")
    node: Any = body
    while True:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.2:
            break
        node = node[key]
    node[key] = rng.choice(ODD_VALUES)
    return manifest.seal(body)


def check_manifest(found: manifest.Manifest) -> None:
    for entry in found.entries:
        for path in (entry.path, entry.key):
            assert path and not Path(path).is_absolute() and ".." not in Path(path).parts
        assert entry.size_bytes >= 0 and len(entry.digests) == -(-entry.size_bytes // found.chunk_size_bytes)
