"""Tensors of ``.metadata`` without torch: the same that DCP's own metadata says, and nothing else is accepted."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import tierckpt
from tests.states import small_state
from tierckpt.client import close_all
from tierckpt.dcp.sealed_unpickler import load_metadata
from tierckpt.errors import UnsafeCheckpointError
from tierckpt.format import tensor_listing
from tierckpt.format.tensor_listing import BITS, OBJECT, tensors_in

STATE = {
    **small_state(3),
    "many": {f"layer.{n}": torch.ones(n, 3, dtype=torch.float16, device="cpu") for n in range(1, 40)},
    "int": torch.arange(7, dtype=torch.uint8, device="cpu"),
}


@pytest.fixture(params=["tierckpt", "stock", "of an earlier release"])
def metadata(request: pytest.FixtureRequest, tmp_path: Path, local_root: Path) -> bytes:
    if request.param == "of an earlier release":
        return Path("tests/data/run_without_structure/step-5/.metadata").read_bytes()
    if request.param == "stock":
        dcp.save(STATE, checkpoint_id=tmp_path / "stock")
        return (tmp_path / "stock" / ".metadata").read_bytes()
    dcp.save(STATE, storage_writer=tierckpt.TierStorageWriter(tmp_path / "run" / "step-1"))
    tierckpt.wait(tmp_path / "run" / "step-1", timeout_seconds=60)
    close_all()
    return (tmp_path / "run" / "step-1" / ".metadata").read_bytes()


def test_it_says_what_torch_reads(metadata: bytes) -> None:
    expected = load_metadata(metadata, where="x")
    rows = tensors_in(metadata, "x")
    assert [row.name for row in rows] == sorted(expected.state_dict_metadata)
    assert expected.storage_data is not None
    for row in rows:
        known = expected.state_dict_metadata[row.name]
        if isinstance(known, TensorStorageMetadata):
            assert (row.dtype, row.shape) == (str(known.properties.dtype).removeprefix("torch."), tuple(known.size))
            assert row.size_bytes == known.size.numel() * known.properties.dtype.itemsize
        else:
            length = sum(info.length for index, info in expected.storage_data.items() if index.fqn == row.name)
            assert (row.dtype, row.shape, row.size_bytes) == (OBJECT, (), length)


def test_it_knows_the_dtypes_of_torch() -> None:
    """A dtype that is missing here is an error on the page, not a wrong size."""
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype) and name in BITS:
            assert BITS[name] == 8 * value.itemsize, name
    assert {"float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64"} <= BITS.keys()


def test_damage_and_attacks_are_refused(metadata: bytes) -> None:
    made = random.Random(5)
    for _ in range(300):
        data = bytearray(metadata)
        for _ in range(made.randrange(1, 4)):
            data[made.randrange(len(data))] = made.randrange(256)
        try:
            rows = tensors_in(bytes(data), "x")
        except UnsafeCheckpointError:
            continue
        assert all(type(row.name) is str and row.size_bytes >= 0 for row in rows)
    for cut in range(0, len(metadata) - 1, max(1, len(metadata) // 200)):
        with pytest.raises(UnsafeCheckpointError):
            tensors_in(metadata[:cut], "x")
    for attack in (pickle.dumps(print), b"cos\nsystem\n(S'true'\ntR.", pickle.dumps({"a": 1}), b""):
        with pytest.raises(UnsafeCheckpointError, match="cannot be listed"):
            tensors_in(attack, "x")


def test_a_large_one_is_refused_before_it_is_read(metadata: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_listing, "METADATA_BYTES_MAX", len(metadata) - 1)
    with pytest.raises(UnsafeCheckpointError, match="too many"):
        tensors_in(metadata, "x")


def test_it_needs_no_torch() -> None:
    code = "import sys, tierckpt.format.tensor_listing, tierckpt.agent.agent_server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
