"""``tierckpt prefetch`` as a process that is throttled, killed and interrupted, and ``tierckpt cache``."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierckpt
from tests.agents import until
from tests.files import contents
from tests.integration.test_cli import COMMAND, KIB, tierckpt_
from tests.model_layouts import LAYOUTS, SHARDS, write
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
    write(LAYOUTS["shards and an index"], directory, lambda *_: torch.randn(768, 256))
    (directory / "tokenizer").mkdir()
    (directory / "tokenizer/vocab.txt").write_text("a\nb\n")
    return directory


def begun(origin: Origin, served: Path, **options: object) -> subprocess.Popen[str]:
    """Start a prefetch, and wait until some chunks have arrived; the origin sends no more."""
    origin.stop_at(400 * KIB)
    process = subprocess.Popen([*COMMAND, "prefetch", MODEL, "--to", str(served), "--json"], text=True, **options)  # type: ignore[call-overload]
    until(lambda: origin.sent_bytes() >= 400 * KIB, "some chunks")
    assert process.poll() is None, f"exited too early: {process.communicate()}"
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
    assert tierckpt.load_safetensors(tmp_path / "served").keys() == {"a", "b"}


@pytest.mark.slow
def test_model_changed_after_a_killed_prefetch_is_fetched_in_full(origin: Origin, model: Path, tmp_path: Path) -> None:
    process = begun(origin, tmp_path / "served")
    process.kill()
    process.wait(60)
    changed = model / SHARDS[1]
    changed.write_bytes(changed.read_bytes()[:-4] + b"\x01\x02\x03\x04")
    origin.stop_at(None)
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


# --- cache ------------------------------------------------------------------------------------------------------

SIZE = 256 * KIB


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """Three models, fetched in order."""
    uris = []
    for number in range(3):
        folder = tmp_path / f"model-{number}"
        folder.mkdir()
        (folder / "weights.bin").write_bytes(bytes([number]) * SIZE)
        uris.append(str(folder))
        assert tierckpt_("prefetch", uris[-1]).code == 0
    return uris


def cached_models() -> list[str]:
    return [entry["uri"] for entry in tierckpt_("cache", "ls").document["entries"]]


def test_check_of_a_directory_that_prefetch_filled(models: list[str], tmp_path: Path) -> None:
    assert tierckpt_("cache", "check", models[0], "--to", str(tmp_path / "to")).code == 3
    assert tierckpt_("prefetch", models[0], "--to", str(tmp_path / "to")).code == 0
    assert tierckpt_("cache", "check", models[0], "--to", str(tmp_path / "to")).code == 0


def test_ls_sorts_by_last_use_and_evict_goes_down_to_a_size(models: list[str]) -> None:
    assert cached_models() == models[::-1]
    done = tierckpt_("cache", "evict", "--max-bytes", "600KiB")
    assert [row["uri"] for row in done.document["evicted"]] == [models[0]]
    tierckpt_("cache", "pin", models[1])
    done = tierckpt_("cache", "evict", "--max-bytes", "0")
    assert (done.code, [row["uri"] for row in done.document["kept"]]) == (3, [models[1]])
    assert cached_models() == [models[1]]


def test_pin_and_evict_of_a_missing_entry_raise(models: list[str], tmp_path: Path) -> None:
    for verb in ("pin", "evict"):
        done = tierckpt_("cache", verb, tmp_path / "other")
        assert done.code == 4 and "has no files of" in done.err
    assert tierckpt_("cache", "evict").code == 2


def test_max_bytes_of_a_prefetch(models: list[str], tmp_path: Path) -> None:
    """The cache evicts to stay below it; a larger fetch into a directory is refused."""
    tierckpt_("cache", "evict", models[2])
    assert tierckpt_("prefetch", models[2], "--max-bytes", "300KiB").code == 0
    assert cached_models() == [models[2]]
    done = tierckpt_("prefetch", models[0], "--to", str(tmp_path / "to"), "--max-bytes", "100KiB")
    assert done.code == 1 and "more than 100.0 KiB" in done.err
    assert not (tmp_path / "to").exists()
    assert tierckpt_("prefetch", models[0], "--max-bytes", "100KiB").code == 1
