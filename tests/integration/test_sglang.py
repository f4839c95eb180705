"""The SGLang plugin with a released SGLang: hooks, connectors and the call order of its remote loader."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.engine_wheels import imported, load_plugin, wheel_python
from tests.reads import told
from tests.states import same
from tierckpt.errors import ObjectNotFoundError

REAL_MODULES = ("sglang.srt.connector", "sglang.srt.plugins", "sglang.srt.configs.load_config")
STUBBED_VALUES = {
    "sglang.srt.utils.parse_connector_type": lambda url: url.partition("://")[0],
    "sglang.srt.environ.envs": SimpleNamespace(SGLANG_PLUGINS=SimpleNamespace(get=lambda: "tierckpt")),
}


@pytest.fixture
def sglang() -> Iterator[Any]:
    """SGLang's connectors after it has loaded its plugins."""
    with imported(wheel_python("sglang"), REAL_MODULES, ("orjson", "redis", "msgspec"), STUBBED_VALUES):
        connector = import_module("sglang.srt.connector")
        importer = SimpleNamespace()  # a module that imported the name earlier, as SGLang's loaders do
        module = type(sys)("sglang.importer")
        module.create_remote_connector = connector.create_remote_connector  # type: ignore[attr-defined]
        sys.modules["sglang.importer"] = module
        registry = import_module("sglang.srt.plugins.hook_registry").HookRegistry
        load_plugin("sglang.srt.plugins")
        registry.apply_hooks()
        importer.connect, importer.kind = module.create_remote_connector, connector.get_connector_type
        importer.filesystem = connector.ConnectorType.FS
        yield importer


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(tmp_path / "root"))
    tensors = {f"layers.{index}.weight": torch.randn(64, 32) for index in range(4)}
    (tmp_path / "model/sub").mkdir(parents=True)
    for index, (name, value) in enumerate(tensors.items()):
        save_file({name: value}, tmp_path / f"model/model-{index:05d}.safetensors")
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model/sub/vocab.txt").write_text("a b c")
    return tensors


def url(tmp_path: Path) -> str:
    return f"tierckpt://file{tmp_path}/model"


def test_configuration_tokenizer_and_weights_are_read_from_the_url(
    sglang: Any, model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """In SGLang's order: configuration files, tokenizer files, then weights through another connector."""
    client = sglang.connect(url(tmp_path))
    client.pull_files(allow_pattern=["*config.json"])
    assert [path.name for path in Path(client.get_local_dir()).iterdir()] == ["config.json"]
    client.pull_files(ignore_pattern=["*.pt", "*.safetensors", "*.bin"])
    pulled = {str(path.relative_to(client.get_local_dir())) for path in Path(client.get_local_dir()).rglob("*.*")}
    assert pulled == {"config.json", "sub/vocab.txt"}
    directory = Path(client.get_local_dir())
    client.close()
    assert not directory.exists()
    with sglang.connect(url(tmp_path), device="cpu") as client:
        assert sglang.kind(client) == sglang.filesystem
        assert len(client.glob(allow_pattern=["*.safetensors"])) == 4
        assert same(dict(client.weight_iterator()), model)


def test_a_second_engine_of_the_node_reads_nothing_from_the_store(
    sglang: Any, model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    for expected in (True, False):
        with told() as read, sglang.connect(url(tmp_path)) as client:
            assert len(dict(client.weight_iterator())) == 4
        assert bool(read["shared"]) == expected


def test_missing_model_raises(sglang: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(tmp_path / "root"))
    with sglang.connect(url(tmp_path)) as client, pytest.raises(ObjectNotFoundError, match="has no files"):
        client.pull_files()


def test_other_urls_are_left_to_sglang(sglang: Any) -> None:
    with pytest.raises(ValueError, match=re.escape("Invalid connector type: ftp://host/model")):
        sglang.connect("ftp://host/model")
