"""The vLLM plugin against a stub of vLLM: found by its entry point, registered, and every weight arrives once."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.states import same
from tierckpt.errors import CheckpointNotFoundError, ConfigError

REPOSITORY = Path(__file__).parents[2]
STUBS = REPOSITORY / "tests" / "stubs"


class Model:
    """A model of two linear layers of which this rank has half the rows: it slices whole tensors, as vLLM's do."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.parameters: dict[str, torch.Tensor] = {}
        self.training = True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, value in weights:
            assert name not in self.parameters, "a weight came twice"
            self.parameters[name] = value.chunk(self.world)[self.rank].clone()
        return set(self.parameters)

    def eval(self) -> Model:
        self.training = False
        return self


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    tensors = {f"layers.{index}.weight": torch.randn(64, 32).bfloat16() for index in range(6)}
    (tmp_path / "model").mkdir()
    for index, (name, value) in enumerate(tensors.items()):
        save_file({name: value}, tmp_path / f"model/model-{index:05d}.safetensors")
    return tensors


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stub, with our plugin loaded as vLLM loads it: by what pyproject.toml declares."""
    monkeypatch.syspath_prepend(str(STUBS))
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, function = declared["vllm.general_plugins"]["tierckpt"].partition(":")
    for _ in range(2):  # vLLM calls plugins again in processes that have them already
        getattr(import_module(module), function)()
    yield import_module("vllm.model_executor.model_loader")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def config(**extra: Any) -> Any:
    return SimpleNamespace(load_format="tierckpt", model_loader_extra_config=extra)


def loaded(vllm: Any, load_config: Any, model_config: Any, rank: int = 0, world: int = 1) -> Any:
    loader = vllm.get_model_loader(load_config)
    loader.download_model(model_config)
    return loader.load_model(SimpleNamespace(make_model=lambda: Model(rank, world)), model_config)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_weight_arrives_and_the_ranks_take_their_part(
    rank: int, vllm: Any, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = loaded(vllm, config(), SimpleNamespace(model=str(tmp_path / "model")), rank, 2)
    assert same(model.parameters, {name: value.chunk(2)[rank].clone() for name, value in tensors.items()})
    assert not model.training


def test_weights_may_be_elsewhere_than_the_configuration(
    vllm: Any, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    uri = (tmp_path / "model").as_uri()
    model = loaded(vllm, config(uri=uri, bytes_in_flight_max=8000), SimpleNamespace(model="meta/llama"))
    assert same(model.parameters, tensors)
    model = loaded(vllm, config(), SimpleNamespace(model="elsewhere", model_weights=str(tmp_path / "model")))
    assert same(model.parameters, tensors)


@pytest.mark.parametrize("extra", [{"urii": "x"}, {"uri": 3}, {"bytes_in_flight_max": True}, {"chunk_size_bytes": 7}])
def test_an_option_that_cannot_be_is_refused_before_anything_is_loaded(extra: dict[str, Any], vllm: Any) -> None:
    with pytest.raises(ConfigError):
        vllm.get_model_loader(config(**extra))


def test_a_model_that_is_not_there_is_said(vllm: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        loaded(vllm, config(), SimpleNamespace(model=str(tmp_path / "nowhere")))


def test_a_model_that_takes_no_more_ends_the_stream(
    vllm: Any, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    loader = vllm.get_model_loader(config(bytes_in_flight_max=4000))
    taken = []

    def refuse(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        taken.append(next(iter(weights)))
        raise RuntimeError("wrong shape")

    with pytest.raises(RuntimeError, match="wrong shape"):
        loader.load_weights(SimpleNamespace(load_weights=refuse), SimpleNamespace(model=str(tmp_path / "model")))
    assert len(taken) == 1


@pytest.mark.slow
def test_importing_tierckpt_never_imports_vllm(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    script = (
        f"import sys, tierckpt; tierckpt.load_safetensors({str(tmp_path / 'model')!r}); sys.exit('vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
