"""``tierckpt prefetch`` as a process that is throttled, killed, interrupted and watched."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tierckpt
from tests.files import contents
from tests.integration.test_cli import COMMAND, KIB, tierckpt_
from tests.servers.origin import Origin

MODEL = "s3://bucket/run/model"


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Origin]:
    with Origin.running(tmp_path / "store") as server:
        for name, value in {**server.environment(), "TIERCKPT_CHUNK_SIZE_BYTES": "64KiB"}.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def model(origin: Origin, tmp_path: Path) -> Path:
    """A sharded model in the layout of Hugging Face, which ``origin`` serves as ``MODEL``."""
    directory = tmp_path / "store/bucket/run/model"
    (directory / "tokenizer").mkdir(parents=True)
    generator = torch.Generator().manual_seed(7)
    weight_map = {}
    for index in range(1, 4):
        name = f"model-{index:05d}-of-00003.safetensors"
        tensors = {f"layers.{index}.{part}": torch.randn(256, 256, generator=generator) for part in "ab"}
        save_file(tensors, directory / name)
        weight_map |= dict.fromkeys(tensors, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text('{"architectures": ["Tiny"]}')
    (directory / "tokenizer/vocab.txt").write_text("a\nb\n")
    return directory


def begun(origin: Origin, served: Path, **options: object) -> subprocess.Popen[str]:
    """Start a prefetch that takes seconds, and wait until some chunks have arrived."""
    origin.pace(700 * KIB)
    process = subprocess.Popen([*COMMAND, "prefetch", MODEL, "--to", str(served), "--json"], text=True, **options)  # type: ignore[call-overload]
    deadline = time.monotonic() + 60
    while origin.sent_bytes() < 400 * KIB:
        assert process.poll() is None, f"exited too early: {process.communicate()}"
        assert time.monotonic() < deadline, "no chunk arrived"
        time.sleep(0.02)
    return process


@pytest.mark.slow
def test_info_and_prefetch_of_a_model_directory(model: Path, tmp_path: Path) -> None:
    files = contents(model)
    info = tierckpt_("info", MODEL).document
    assert (info["kind"], info["size_bytes"]) == ("files", sum(map(len, files.values())))
    done = tierckpt_("prefetch", MODEL, "--to", tmp_path / "served")
    assert (done.code, done.document["files"]) == (0, len(files))
    assert contents(tmp_path / "served") == files
    default = tierckpt_("prefetch", MODEL).document["directory"]
    assert contents(Path(default)) == files
    assert [(item["uri"], item["kind"]) for item in tierckpt_("status").document["local"]] == [(MODEL, "prefetched")]
    assert len(tierckpt.load_safetensors(tmp_path / "served")) == 6


@pytest.mark.slow
def test_model_changed_after_a_killed_prefetch_is_fetched_in_full(origin: Origin, model: Path, tmp_path: Path) -> None:
    process = begun(origin, tmp_path / "served")
    process.kill()
    process.wait(60)
    changed = model / "model-00002-of-00003.safetensors"
    changed.write_bytes(changed.read_bytes()[:-4] + b"\x01\x02\x03\x04")
    origin.pace(None)
    assert tierckpt_("prefetch", MODEL, "--to", tmp_path / "served").code == 0
    assert contents(tmp_path / "served") == contents(model)


@pytest.mark.slow
def test_interrupt_leaves_no_directory_and_no_traceback(origin: Origin, model: Path, tmp_path: Path) -> None:
    process = begun(origin, tmp_path / "served", stderr=subprocess.PIPE)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(errors)["message"] == "interrupted", errors
    assert not (tmp_path / "served").exists()
