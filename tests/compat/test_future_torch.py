"""A later torch does not lock users out: its checkpoints load, and its additions are passed on (S4)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CLASSES = [
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_StorageInfo",
]
ROOT = Path(__file__).parents[2]


def run(kind: str, verb: str, directory: Path, later: str = "") -> Any:
    said = python(["-m", "tests.compat.future_torch", kind, verb], directory, {"LATER": later})
    return json.loads(said) if said else None


def python(arguments: list[str], directory: Path, more_env: dict[str, str], interpreter: str = sys.executable) -> str:
    env = {**os.environ, "TIERCKPT_LOCAL_ROOT": str(directory / "root"), "TIERCKPT_MOVER": "inline", **more_env}
    command = [interpreter, "-W", "ignore", *arguments, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_further_field_of_each_class_is_read_and_passed_on(tmp_path: Path) -> None:
    run("fields", "save", tmp_path, "saved")
    for name, later in run("fields", "load", tmp_path, "loaded").items():
        assert sorted(later) == CLASSES
        assert {kind for kind, value in later.items() if value[-1] != "saved"} == set(), name


@pytest.mark.slow
def test_what_a_later_torch_has_saved_is_read_by_this_one(tmp_path: Path) -> None:
    run("fields", "save", tmp_path, "saved")
    for later in run("none", "load", tmp_path).values():
        assert later.pop("TensorProperties") == "none"  # the class takes no more than it knows
        assert {value[-1] for value in later.values()} == {"saved"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fields", "enum"])
def test_what_this_torch_has_saved_is_read_by_a_later_one(kind: str, tmp_path: Path) -> None:
    run("none", "save", tmp_path)
    assert run(kind, "load", tmp_path, "loaded").keys() == {"ours", "stock"}


CHANNELS = """
import pickle, sys
import torch, torch.distributed.checkpoint.metadata as m
from tierckpt.dcp.sealed_unpickler import load_metadata
size = torch.Size([1])
properties = m.TensorProperties(memory_format=torch.channels_last_3d)
entry = m.TensorStorageMetadata(properties, size, [m.ChunkStorageMetadata(torch.Size([0]), size)])
data = pickle.dumps(m.Metadata({"w": entry}))
assert load_metadata(data, where="m").state_dict_metadata["w"].properties.memory_format is torch.channels_last_3d
open(sys.argv[1] + "/m", "wb").write(data)
"""


@pytest.mark.slow
def test_a_further_member_of_an_enum_is_given_where_torch_has_it_and_refused_by_name_elsewhere(tmp_path: Path) -> None:
    from tierckpt.dcp.sealed_unpickler import load_metadata
    from tierckpt.errors import UnsafeCheckpointError

    install = "import sys; from tests.compat import future_torch as f; f._Loader.kind = 'enum'; "
    program = f"{install}sys.meta_path.insert(0, f._Finder)\n{CHANNELS}"
    python(["-c", program], tmp_path, {})
    # Python 3.11.2 pickles a member by its name, later ones by its value.
    match = r"(3|'TORCH_CHANNELS_LAST_3D') is no member of \S+_MEM_FORMAT_ENCODING in torch 2"
    with pytest.raises(UnsafeCheckpointError, match=match) as caught:
        load_metadata((tmp_path / "m").read_bytes(), where="m")
    assert "tierckpt newer than 0.1.0" in str(caught.value) and "do harm" not in str(caught.value)
