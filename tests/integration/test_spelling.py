"""Spelling of URIs and paths: ``tierckpt://`` is the store it wraps, and misspelt URIs are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.integration.test_cli import tierckpt_
from tierckpt import Checkpointer, TierStorageReader, TierStorageWriter, latest, load_safetensors, prefetch, wait
from tierckpt.config import Settings
from tierckpt.errors import ConfigError
from tierckpt.format.layout import parse_uri
from tierckpt.format.uris import local_path
from tierckpt.loading.export import export_safetensors


@pytest.mark.parametrize(
    ("behind", "uri"),
    [
        ("s3/bucket/run/step-1", "s3://bucket/run/step-1"),
        ("s3a/bucket/run", "s3://bucket/run"),
        ("az/container/key/", "az://container/key"),
        ("gs/bucket/a b%20c", "gs://bucket/a b%20c"),
        ("file/mnt/data/key", "/mnt/data/key"),
        ("file//mnt//data/", "/mnt/data"),
        ("file", "/"),
        ("hf/user/model", "hf://user/model"),
    ],
)
@pytest.mark.parametrize("prefix", ["tierckpt://", "TIERCKPT://"])
def test_tierckpt_url_is_the_wrapped_store(prefix: str, behind: str, uri: str) -> None:
    assert parse_uri(prefix + behind) == parse_uri(uri)
    assert parse_uri(prefix + behind).uri == uri


BAD = {
    "s3:/bucket/run": "s3://bucket/run",
    "s3:bucket/run": "s3://bucket/run",
    "s3//bucket/run": "s3://bucket/run",
    "S3:/bucket/run": "s3://bucket/run",
    " s3://bucket/run": "s3://bucket/run",
    "s3://bucket/run\n": "s3://bucket/run",
    " s3:/bucket/run": "s3://bucket/run",
    "gs:/bucket/run": "gs://bucket/run",
    "az:/container/run": "az://container/run",
    "file:/mnt/run": "file:///mnt/run",
    "file://host/mnt/run": "host",
    "file://mnt/run": "file:///mnt/run",
    "https:/host/run": "https://host/run",
    "tierckpt:/s3/bucket/run": "tierckpt://s3/bucket/run",
    "tierckpt://": "tierckpt://s3/BUCKET/KEY",
    "tierckpt://s3://bucket/run": "tierckpt://s3/BUCKET/KEY",
    "tierckpt://tierckpt/s3/bucket/run": "tierckpt://s3/BUCKET/KEY",
    "tierckpt://s3": "s3://BUCKET/KEY",
    "tierckpt://file/a/../b": "without",
    "s3:///run": "s3://BUCKET/KEY",
}


@pytest.mark.parametrize("text", BAD)
def test_misspelt_url_is_refused_with_the_correct_one(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_uri(text)
    assert BAD[text] in str(caught.value)


def test_url_with_collapsed_slashes_is_refused() -> None:
    with pytest.raises(ConfigError, match="as text"):
        parse_uri(Path("s3://bucket/run"))


def test_tilde_is_expanded_without_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert parse_uri("~/run") == parse_uri(Path("~/run")) == parse_uri(tmp_path / "home/run")
    assert local_path("~/x", "--to") == Settings.load(local_root="~/x").local_root == tmp_path / "home/x"
    assert parse_uri("./~/run") == parse_uri(f"{tmp_path}/~/run")
    assert parse_uri("~nobody-of-that-name/run").path == f"{tmp_path}/~nobody-of-that-name/run"


@pytest.mark.parametrize("kind", [TierStorageWriter, Checkpointer])
def test_saving_over_http_is_refused(kind: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match="HTTP"):
        kind("https://host/run/step-1")


@pytest.mark.slow
def test_checkpoint_saved_through_a_tierckpt_url_is_found_by_every_verb(
    s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = s3_uri.replace("s3://", "tierckpt://s3/")
    state = {"x": torch.arange(8.0)}
    dcp.save(state, storage_writer=TierStorageWriter(f"{run}/step-1"), no_dist=True)
    wait(f"{run}/step-1", timeout_seconds=60)
    assert latest(run) == latest(s3_uri) == f"{s3_uri}/step-1"
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(tmp_path / "another node"))
    into = {"x": torch.zeros(8)}
    dcp.load(into, storage_reader=TierStorageReader(f"{run}/step-1"), no_dist=True)
    assert torch.equal(into["x"], state["x"])
    with Checkpointer(run) as checkpointer:
        assert checkpointer.restore({"x": into["x"]}) == 1
    assert (prefetch(f"{run}/step-1", to=tmp_path / "whole") / ".metadata").exists()
    export_safetensors(f"{run}/step-1", tmp_path / "exported")
    assert torch.equal(load_safetensors(tmp_path / "exported")["x"], state["x"])
    for verb in (["ls"], ["info"], ["verify"], ["prune"]):
        place = run if verb in (["ls"], ["prune"]) else f"{run}/step-1"
        assert tierckpt_(*verb, place).code == 0
    assert tierckpt_("restore", f"{run}/step-1", "--to", tmp_path / "restored").code == 0
    assert not list((tmp_path / "another node").rglob("checkpoints/tierckpt"))


@pytest.mark.parametrize("place", ["s3://bucket/dir", "s3:/bucket/dir", "file:///mnt/dir", "tierckpt://s3/bucket/dir"])
def test_url_instead_of_a_directory_is_refused(
    place: str, file_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for work in (
        lambda: Settings.load(local_root=place),
        lambda: prefetch(file_uri, to=place),
        lambda: export_safetensors(file_uri, place),
        lambda: prefetch(file_uri, to=Path(place)),
    ):
        with pytest.raises(ConfigError, match=r"a URL: .*directory of this node") as caught:
            work()
        assert ("/mnt/dir" in str(caught.value)) == place.startswith("file")
    for verb in ("restore", "prefetch", "export") if place == "s3://bucket/dir" else ("restore",):
        done = tierckpt_(verb, file_uri, "--to", place)
        assert done.code == 2 and "directory of this node" in done.err, done
    assert tierckpt_("ls", file_uri, "--local-root", place).code == 2
    assert tierckpt_("ls", file_uri, TIERCKPT_LOCAL_ROOT=place).code == 2
    assert not [path for path in tmp_path.iterdir() if ":" in path.name]


def test_misspelt_url_through_dcp_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, CheckpointException), match="s3://bucket/run"):
        dcp.save({}, checkpoint_id="s3:/bucket/run", storage_writer=TierStorageWriter(tmp_path / "run"), no_dist=True)
