"""Every listed file is fetched or named by an error: links and pipes on a mount, markers and odd keys in a bucket."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.services import AzureServer, S3Server, moto_server
from tests.states import save_drained, small_state
from tierckpt.cli.ui.app import run as run_cli
from tierckpt.client import close_all
from tierckpt.errors import ConfigError, MissingExtraError, StoreError
from tierckpt.format.layout import Location
from tierckpt.stores import fsspec_store
from tierckpt.stores.base import FolderMarkers
from tierckpt.types import ObjectInfo


def files_in(target: Path) -> list[str]:
    found = (str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    return sorted(name for name in found if not name.startswith(".tierckpt/"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model, shared = tmp_path / "model", tmp_path / "shared"
    (model / "own").mkdir(parents=True)
    (shared / "inner").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (shared / "vocab.txt").write_text("a")
    (shared / "inner" / "merges.txt").write_text("b")
    (model / "tokenizer").symlink_to(shared)
    (model / "own" / "twice").symlink_to(shared / "inner")
    (model / "linked.json").symlink_to(shared / "vocab.txt")
    (model / ".vocab.deadbeef.tmp").write_text("of the user")
    return model


def test_linked_directories_are_followed(source: Path, tmp_path: Path, local_root: Path) -> None:
    tierckpt.prefetch(source, to=tmp_path / "target")
    assert files_in(tmp_path / "target") == [
        *(".vocab.deadbeef.tmp", "config.json", "linked.json", "own/twice/merges.txt"),
        *("tokenizer/inner/merges.txt", "tokenizer/vocab.txt"),
    ]


ODD = {
    "a dangling link": ("weights.bin", lambda path: path.symlink_to("nowhere"), "nowhere, where no file is"),
    "a loop": ("own/loop", lambda path: path.symlink_to(".."), "which it is in"),
    "a link to itself": ("own/self", lambda path: path.symlink_to("self"), "a link to self"),
    "a pipe": ("pipe", os.mkfifo, "a FIFO"),
}


@pytest.mark.parametrize("odd", ODD)
def test_entry_that_is_no_file_is_named_or_excluded(odd: str, source: Path, tmp_path: Path, local_root: Path) -> None:
    name, make, message = ODD[odd]
    make(source / name)
    with pytest.raises(ConfigError, match="--exclude") as caught:
        tierckpt.prefetch(source, to=tmp_path / "target")
    assert name in caught.value.message and message in caught.value.message
    assert not (tmp_path / "target").exists()
    tierckpt.prefetch(source, to=tmp_path / "target", exclude=[name])
    assert "config.json" in files_in(tmp_path / "target")


def info(key: str, size_bytes: int = 0) -> ObjectInfo:
    return ObjectInfo(key, size_bytes)


def test_markers_of_folders_are_found_in_any_order() -> None:
    listed = [info("model"), info("model.safetensors", 9), info("model/x", 9), info("deep/a/b", 9), info("deep")]
    listed += [info("hadoop_$folder$"), info("slash/"), info("empty"), info("deep/a"), info("deep/a/none")]
    for order in itertools.islice(itertools.permutations(listed), 0, None, 50_021):
        markers = FolderMarkers()
        objects = {one.key for one in order if markers.take(one)}
        assert objects | {one.key for one in markers.empty()} == {
            *("model.safetensors", "model/x", "deep/a/b", "empty", "deep/a/none")
        }


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


def test_markers_and_odd_keys_of_a_bucket(
    server: S3Server,
    tmp_path: Path,
    local_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    with server.bucket() as bucket:
        for key in ("model", "model/x", "model.safetensors", "sub/", "later_$folder$", "a\\b", "config.json"):
            is_marker = key in ("model", "sub/", "later_$folder$")
            server.client().put_object(Bucket=bucket, Key=f"m/{key}", Body=b"" if is_marker else b"12")
        with caplog.at_level(logging.WARNING):
            tierckpt.prefetch(f"s3://{bucket}/m", to=tmp_path / "target")
        assert files_in(tmp_path / "target") == ["a%5Cb", "config.json", "model.safetensors", "model/x"]
        assert any("fetching it as a%5Cb" in line for line in caplog.messages)
        server.client().put_object(Bucket=bucket, Key="m/config.json/y", Body=b"12")
        with pytest.raises(ConfigError, match=r"'config\.json' is an object, and others are below config\.json/"):
            tierckpt.prefetch(f"s3://{bucket}/m", to=tmp_path / "target")
        tierckpt.prefetch(f"s3://{bucket}/m", to=tmp_path / "target", exclude=["config.json/*"])


ODD_KEYS = {
    "": b"of the folder itself",
    "/x": b"0",
    "sub//deep": b"1",
    "./y": b"2",
    "../z": b"3",
    "big//w.bin": b"4" * 3_000_000,
}


@pytest.fixture
def odd_bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    with server.bucket() as bucket:
        for key, data in {**ODD_KEYS, "config.json": b"{}", "x.json": b"[]"}.items():
            server.client().put_object(Bucket=bucket, Key=f"m/{key}", Body=data)
        yield f"s3://{bucket}/m", server.client()
        close_all()


@pytest.mark.slow
def test_keys_that_are_no_paths_get_legal_names(odd_bucket: tuple[str, Any], tmp_path: Path) -> None:
    uri, _ = odd_bucket
    for _ in range(2):  # the second run fetches nothing
        tierckpt.prefetch(uri, to=tmp_path / "target")
    wanted = {"x": "/x", "sub/deep": "sub//deep", "y": "./y", "%2E%2E/z": "../z", "big/w.bin": "big//w.bin"}
    assert files_in(tmp_path / "target") == sorted([*wanted, "config.json", "x.json"])
    for path, key in wanted.items():
        assert (tmp_path / "target" / path).read_bytes() == ODD_KEYS[key]
    tierckpt.prefetch(uri, to=tmp_path / "other", exclude=["*/*"])
    assert files_in(tmp_path / "other") == ["config.json", "x.json"]


def test_keys_that_are_no_paths_need_fsspec(
    odd_bucket: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, _ = odd_bucket

    def missing(location: Location, **_: object) -> None:
        raise MissingExtraError("s3:// needs a package that is not installed: s3fs")

    monkeypatch.setattr(fsspec_store, "open_filesystem", missing)
    with pytest.raises(StoreError, match=r"m/.*Rename or remove that object: fsspec.*not installed: s3fs"):
        tierckpt.prefetch(uri, to=tmp_path / "target")


def test_run_among_odd_keys_is_listed_and_pruned(odd_bucket: tuple[str, Any]) -> None:
    uri, client = odd_bucket
    for step in (1, 2):
        save_drained(f"{uri}/step-{step}", small_state())
    bucket = uri.split("/")[2]
    client.put_object(Bucket=bucket, Key="m/step-1//config.json", Body=b"of another tool")
    client.put_object(Bucket=bucket, Key="m//step-2/config.json", Body=b"of another tool")
    assert tierckpt.latest(uri) == f"{uri}/step-2"
    assert run_cli(["prune", uri, "--keep-last", "1", "--yes"]) == 0
    left = {one["Key"] for one in client.list_objects_v2(Bucket=bucket)["Contents"]}
    assert {"m/config.json", "m//step-2/config.json", "m/sub//deep"} <= left
    assert [key for key in left if key.startswith("m/step-1/")] == ["m/step-1//config.json"], "a foreign key must stay"
    assert [key for key in left if key.startswith("m/step-2/")]


@pytest.mark.server
def test_azure_folder_markers_are_recognized_by_metadata(
    azurite: AzureServer, az_uri: str, tmp_path: Path, local_root: Path
) -> None:
    container = az_uri.removeprefix("az://").partition("/")[0]
    with azurite.client(container) as client:
        client.upload_blob("run/config.json", b"{}")
        client.upload_blob("run/empty", b"")
        client.upload_blob("run/folder", b"", metadata={"hdi_isfolder": "true"})
    tierckpt.prefetch(az_uri, to=tmp_path / "target")
    assert files_in(tmp_path / "target") == ["config.json", "empty"]
