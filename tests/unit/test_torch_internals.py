"""Private names of torch: each exists, only one module uses them, and a missing one disables only its features."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tierckpt
from tierckpt import torch_internals
from tierckpt.errors import ConfigError, UnsupportedTorchError

PACKAGE = Path(tierckpt.__file__).parent


def test_every_private_name_exists() -> None:
    assert torch_internals.missing() == {}


def test_the_installed_torch_is_a_checked_version() -> None:
    assert ".".join(torch.__version__.split(".")[:2]) in torch_internals.CHECKED_VERSIONS


def test_no_other_module_uses_private_names_of_torch() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "torch_internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("torch.", "dist.", "Tensor.")):
                names = ast.unparse(node).split(".")
            else:
                continue
            if any(re.fullmatch("_[A-Za-z]\\w*", name) for name in names):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {'.'.join(names)}")
    assert found == []


def test_errors_name_the_missing_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_internals.NAMES, "gone", ("torch.utils._pytree:not_there", "the feature"))
    with pytest.raises(UnsupportedTorchError, match=r"no torch\.utils\._pytree\.not_there, which the feature"):
        _ = torch_internals.gone
    assert torch_internals.missing() == {"torch.utils._pytree.not_there": "the feature"}
    assert issubclass(UnsupportedTorchError, ConfigError) and issubclass(UnsupportedTorchError, ImportError)
    with pytest.raises(AttributeError):
        _ = torch_internals.never_heard_of


PROGRAM = """
import os, sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from tierckpt import torch_internals
import tierckpt

def mount(place):
    dcp.save({"w": torch.ones(3)}, storage_writer=tierckpt.TierStorageWriter(place), no_dist=True)
    into = {"w": torch.zeros(3)}
    dcp.load(into, storage_reader=tierckpt.TierStorageReader(place), no_dist=True)
    assert into["w"].sum() == 3

def checkpointer(place):
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)}
    with tierckpt.Checkpointer(place) as made:
        made.save(1, state)
    with tierckpt.Checkpointer(place) as made:
        assert made.restore(state) == 1

def outcome(work, place, feature):
    try:
        work(place)
        return "works"
    except (tierckpt.errors.UnsupportedTorchError, dcp.CheckpointException) as error:
        assert f"_renamed, which {feature} needs" in str(error), error
        return "says so"

for wanted in sys.argv[1:]:
    if (child := os.fork()) == 0:
        root = tempfile.mkdtemp()
        os.environ["TIERCKPT_LOCAL_ROOT"] = root + "/local"
        for name, (path, feature) in list(torch_internals.NAMES.items()):
            if feature == wanted:
                torch_internals.NAMES[name] = path + "_renamed", feature
        found = [outcome(work, f"{root}/{work.__name__}", wanted) for work in (mount, checkpointer)]
        print(wanted, *found, sep=":", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, wanted
"""

FEATURES = {feature for _, feature in torch_internals.NAMES.values()}
MOUNT = {"saving and loading checkpoints"}
CHECKPOINTER = {"Checkpointer", "TierStager and async_save"}


@pytest.mark.slow
def test_a_missing_name_disables_only_its_features(tmp_path: Path) -> None:
    env = {**os.environ, "TIERCKPT_MOVER": "inline", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, *sorted(FEATURES)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=170)
    assert done.returncode == 0, done.stderr
    found = {name: tuple(rest) for name, *rest in (line.split(":") for line in done.stdout.splitlines())}
    assert found.keys() == FEATURES
    for feature, (mount, checkpointer) in found.items():
        assert mount == ("says so" if feature in MOUNT else "works"), feature
        assert checkpointer == ("says so" if feature in MOUNT | CHECKPOINTER else "works"), feature
