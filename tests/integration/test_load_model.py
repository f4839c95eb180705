"""Loading only the model, as for a rollout or evaluation: optimizer state is not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import tierckpt
from tests.reads import asked, told
from tests.states import same, save
from tierckpt.errors import CheckpointNotFoundError, StateMismatchError

WIDTH = 512


def module(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH))


def trained(seed: int) -> dict[str, Any]:
    """A module, its Adam state of three times its size, and a master copy."""
    model = module(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    ballast = {f"moment-{index}": torch.randn(WIDTH, 3 * WIDTH) for index in range(4)}
    return {"model": model, "optimizer": optimizer, "ballast": ballast, "step": 3}


def size_of(model: nn.Module) -> int:
    return sum(value.numel() * value.itemsize for value in model.state_dict().values())


@pytest.fixture
def run(file_uri: str) -> tuple[str, dict[str, Any]]:
    """A run with two steps; tests load the second."""
    with tierckpt.Checkpointer(file_uri) as checkpointer:
        for step in (1, 2):
            state = trained(step)
            checkpointer.save(step, state)
        checkpointer.wait()
    return file_uri, state


def most(model: nn.Module) -> int:
    """Return the maximum bytes to read: the model plus a tenth, and headers and block edges of its tensors."""
    return int(1.1 * size_of(model)) + (1 << 20)


def test_restore_of_only_the_model_reads_only_its_bytes(
    run: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, saved = run
    fresh = trained(9)
    before = {name: value.clone() for name, value in fresh["ballast"].items()}
    moments = [value["exp_avg"].clone() for value in fresh["optimizer"].state.values()]
    total = sum(path.stat().st_size for path in Path(f"{uri}/step-2").glob("*.distcp"))
    with tierckpt.Checkpointer(uri) as checkpointer, told() as read, asked(monkeypatch) as got:
        assert checkpointer.restore(fresh, only="model") == 2
    assert same(dict(fresh["model"].state_dict()), dict(saved["model"].state_dict()))
    assert same(fresh["ballast"], before)
    assert all(map(torch.equal, (value["exp_avg"] for value in fresh["optimizer"].state.values()), moments))
    for count in (read.total(), got["files"]):
        assert size_of(fresh["model"]) <= count <= most(fresh["model"]) < total / 4


def test_restore_of_several_names_in_any_order(run: tuple[str, dict[str, Any]]) -> None:
    uri, saved = run
    fresh = trained(9)
    ballast = fresh["ballast"]
    with tierckpt.Checkpointer(uri) as checkpointer:
        assert checkpointer.restore(fresh, 2, only=["step", "optimizer"]) == 2
    wanted = [value["exp_avg"] for value in saved["optimizer"].state.values()]
    assert all(map(torch.equal, (value["exp_avg"] for value in fresh["optimizer"].state.values()), wanted))
    assert fresh["ballast"] is ballast
    assert same(dict(fresh["model"].state_dict()), dict(trained(9)["model"].state_dict()))


def test_unknown_entry_name_is_refused(run: tuple[str, dict[str, Any]]) -> None:
    with (
        tierckpt.Checkpointer(run[0]) as checkpointer,
        pytest.raises(StateMismatchError, match="the state to restore has no 'modell'; it has 'model', 'optimizer'"),
    ):
        checkpointer.restore(trained(9), only="modell")


@pytest.mark.parametrize("place", ["run", "step"])
def test_load_model_gives_the_model_of_the_newest_checkpoint(place: str, run: tuple[str, dict[str, Any]]) -> None:
    uri, saved = run
    with told() as read:
        found = tierckpt.load_model(uri if place == "run" else f"{uri}/step-2")
    assert same(found, dict(saved["model"].state_dict()))
    assert size_of(saved["model"]) <= read.total() <= most(saved["model"])


def test_load_model_fills_a_module_in_place(run: tuple[str, dict[str, Any]]) -> None:
    uri, saved = run
    fresh = module(9)
    addresses = [parameter.data_ptr() for parameter in fresh.parameters()]
    found = tierckpt.load_model(uri, fresh)
    assert same(dict(fresh.state_dict()), dict(saved["model"].state_dict()))
    assert [parameter.data_ptr() for parameter in fresh.parameters()] == addresses
    assert found.keys() == fresh.state_dict().keys()


def test_only_the_model_is_read_from_a_store(s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained(4)
    with tierckpt.Checkpointer(s3_uri) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
    with asked(monkeypatch) as got:
        found = tierckpt.load_model(s3_uri, local_root=tmp_path / "another-node")
    assert same(found, dict(state["model"].state_dict()))
    assert size_of(state["model"]) <= got["stores"] <= most(state["model"])


def test_checkpoints_of_stock_dcp_and_of_bare_state_dicts(file_uri: str) -> None:
    model = module(5)
    nested = {"app": {"model": model.state_dict()}, "other": torch.zeros(3)}
    dcp.save(nested, storage_writer=dcp.FileSystemWriter(f"{file_uri}/stock"), no_dist=True)
    assert same(tierckpt.load_model(f"{file_uri}/stock", prefix="app.model"), dict(model.state_dict()))
    save(f"{file_uri}/bare", dict(model.state_dict()))
    assert same(tierckpt.load_model(f"{file_uri}/bare", prefix=""), dict(model.state_dict()))
    fresh = module(6)
    tierckpt.load_model(f"{file_uri}/bare", fresh, prefix="")
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))


def test_error_lists_the_existing_entries(run: tuple[str, dict[str, Any]], file_uri: str) -> None:
    uri, _ = run
    with pytest.raises(StateMismatchError, match=r"is under 'net'; its entries: ballast, model, optimizer, step"):
        tierckpt.load_model(uri, prefix="net")
    with pytest.raises(StateMismatchError, match="does not fit"):
        tierckpt.load_model(uri, nn.Linear(3, 3))
    with pytest.raises(CheckpointNotFoundError):
        tierckpt.load_model(f"{file_uri}-elsewhere")
