"""``tierckpt prefetch --to DIR``: every listed file, and no file of an old version; directories in use."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tierckpt
from tests.model_layouts import LAYOUTS, Layout, write
from tests.services import AzureServer, S3Server
from tests.states import save_drained, small_state
from tierckpt.cache.partial_entry import PartialEntry
from tierckpt.cache.receipt import RECEIPT, WRITTEN
from tierckpt.cli.ui.app import run as run_cli
from tierckpt.errors import CheckpointError, ConfigError, IntegrityError, MissingExtraError, StoreError, TierckptError
from tierckpt.format.layout import Location, parse_uri
from tierckpt.stores import fsspec_store
from tierckpt.stores.base import FolderMarkers
from tierckpt.types import ObjectInfo

OLD = LAYOUTS["shards and an index"]
NEW = LAYOUTS["one file"]


def publish(layout: Layout, source: Path, **more: str) -> Path:
    """Replace the model at ``source``."""
    for path in sorted(source.rglob("*"), reverse=True) if source.exists() else ():
        path.rmdir() if path.is_dir() else path.unlink()
    write(layout, source)
    for name, text in more.items():
        (source / f"{name}.json").write_text(text)
    return source


def names_in(target: Path) -> set[str]:
    return {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()} - {RECEIPT}


def same(target: Path, source: Path) -> bool:
    found, wanted = (tierckpt.load_safetensors(place) for place in (target, source))
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("order", [(OLD, NEW), (NEW, OLD)])
def test_new_version_removes_files_of_the_old_one(order: tuple[Layout, Layout], tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    tierckpt.prefetch(publish(order[0], source, quantize_config="{}"), to=target)
    tierckpt.prefetch(publish(order[1], source), to=target)
    assert names_in(target) == names_in(source) and same(target, source)


def test_user_files_stay_and_weights_among_them_raise_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = publish(OLD, tmp_path / "source"), tmp_path / "target"
    tierckpt.prefetch(source, to=target)
    (target / "notes.txt").write_text("mine")
    save_file({"mine": torch.zeros(1)}, target / "mine.safetensors")
    with caplog.at_level(logging.WARNING):
        tierckpt.prefetch(publish(NEW, source), to=target)
    assert names_in(target) == names_in(source) | {"notes.txt", "mine.safetensors"}
    assert any("mine.safetensors" in line and "look like weights" in line for line in caplog.messages)
    assert not any("notes.txt" in line for line in caplog.messages)


def test_filtered_prefetch_keeps_other_files_until_a_full_one(tmp_path: Path) -> None:
    source, target = publish(OLD, tmp_path / "source", tokenizer="{}"), tmp_path / "target"
    tierckpt.prefetch(source, to=target, include=["*.json"])
    tierckpt.prefetch(source, to=target, include=["*.safetensors"])
    assert names_in(target) - {WRITTEN} == names_in(source)
    publish(NEW, source)
    tierckpt.prefetch(source, to=target, include=["*.safetensors"])
    assert names_in(target) - {WRITTEN} == {"model.safetensors", "config.json", "tokenizer.json", *OLD.indexes}
    tierckpt.prefetch(source, to=target)
    assert names_in(target) == names_in(source) and same(target, source)


def test_files_behind_a_user_link_are_not_removed(tmp_path: Path) -> None:
    source, target, own = publish(NEW, tmp_path / "source"), tmp_path / "target", tmp_path / "own"
    (source / "tokenizer").mkdir()
    (source / "tokenizer" / "vocab.txt").write_text("a")
    tierckpt.prefetch(source, to=target)
    (target / "tokenizer").rename(own)
    (target / "tokenizer").symlink_to(own)
    tierckpt.prefetch(publish(OLD, source), to=target)
    assert (own / "vocab.txt").read_text() == "a"


@pytest.mark.parametrize("is_empty", [True, False])
def test_existing_directory_keeps_its_inode_mode_and_group(is_empty: bool, tmp_path: Path) -> None:
    source, target = publish(NEW, tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    if not is_empty:
        tierckpt.prefetch(publish(OLD, source), to=target)
        publish(NEW, source)
    if os.geteuid() == 0:
        os.chown(target, 1000, 2000)
    target.chmod(0o2775)
    before = target.stat()
    tierckpt.prefetch(source, to=target)
    after = target.stat()
    assert (after.st_ino, after.st_mode, after.st_uid, after.st_gid) == (
        *(before.st_ino, before.st_mode, before.st_uid, before.st_gid),
    )
    assert (target / "model.safetensors").stat().st_gid == before.st_gid, "setgid is lost"
    assert same(target, source)


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("moves", range(4))
def test_prefetch_interrupted_between_two_files_is_completed(
    moves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of both versions are recorded until the new one is complete, so no old file stays."""
    source, target = publish(NEW, tmp_path / "source", old="{}"), tmp_path / "target"
    tierckpt.prefetch(source, to=target)
    publish(OLD, source)
    real, left = Path.replace, [moves]

    def replace(self: Path, to: Any) -> Path:
        if Path(to).parent == target and left[0] == 0:
            raise _KilledError
        left[0] -= Path(to).parent == target
        return real(self, to)

    with monkeypatch.context() as patched, pytest.raises(_KilledError):
        patched.setattr(Path, "replace", replace)
        tierckpt.prefetch(source, to=target)
    with pytest.raises(IntegrityError, match="two versions"):
        tierckpt.load_safetensors(target)
    tierckpt.prefetch(source, to=target)
    assert names_in(target) == names_in(source) and same(target, source)


@pytest.mark.parametrize("exists", [True, False])
def test_one_of_two_concurrent_versions_wins_and_the_other_raises(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, target = [publish(OLD, tmp_path / "one"), publish(NEW, tmp_path / "two")], tmp_path / "target"
    if exists:
        target.mkdir()
    both, real, first_calls = threading.Barrier(2, timeout=60), PartialEntry.publish, iter(range(2))

    def together(self: PartialEntry) -> bool:
        if next(first_calls, None) is not None:
            both.wait()  # both have fetched everything without seeing the other
        return real(self)

    def fetch(number: int) -> TierckptError | None:
        try:
            tierckpt.prefetch(sources[number], to=target, local_root=tmp_path / f"root-{number}")
        except TierckptError as error:
            return error
        return None

    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as pool:
        patched.setattr(PartialEntry, "publish", together)
        failures = [*pool.map(fetch, range(2))]
    [lost] = [number for number, error in enumerate(failures) if error is not None]
    assert isinstance(failures[lost], CheckpointError) and str(sources[lost]) in str(failures[lost])
    won = sources[1 - lost]
    assert names_in(target) >= names_in(won) and same(target, won)
    tierckpt.prefetch(sources[lost], to=target)  # the retry that the error suggests
    assert names_in(target) == names_in(sources[lost]) and same(target, sources[lost])


# --- links and pipes of a mount, markers and odd keys of a bucket -----------------------------------------------------


def files_in(target: Path) -> list[str]:
    return sorted(name for name in names_in(target) if not name.startswith(".tierckpt/"))


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


def test_linked_directories_are_followed(source: Path, tmp_path: Path) -> None:
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
def test_entry_that_is_no_file_is_named_or_excluded(odd: str, source: Path, tmp_path: Path) -> None:
    name, make, message = ODD[odd]
    make(source / name)
    with pytest.raises(ConfigError, match="--exclude") as caught:
        tierckpt.prefetch(source, to=tmp_path / "target")
    assert name in caught.value.message and message in caught.value.message
    assert not (tmp_path / "target").exists()
    tierckpt.prefetch(source, to=tmp_path / "target", exclude=[name])
    assert "config.json" in files_in(tmp_path / "target")


def test_markers_of_folders_are_found_in_any_order() -> None:
    listed = [ObjectInfo(key, 9) for key in ("model.safetensors", "model/x", "deep/a/b")]
    markers_or_empty = ("model", "deep", "hadoop_$folder$", "slash/", "empty", "deep/a", "deep/a/none")
    listed += [ObjectInfo(key, 0) for key in markers_or_empty]
    for order in itertools.islice(itertools.permutations(listed), 0, None, 50_021):
        markers = FolderMarkers()
        objects = {one.key for one in order if markers.take(one)}
        assert objects | {one.key for one in markers.empty()} == {
            *("model.safetensors", "model/x", "deep/a/b", "empty", "deep/a/none")
        }


def test_markers_and_odd_keys_of_a_bucket(
    moto: S3Server, s3_uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client, bucket = moto.client(), parse_uri(s3_uri).authority
    for key in ("model", "model/x", "model.safetensors", "sub/", "later_$folder$", "a\\b", "config.json"):
        is_marker = key in ("model", "sub/", "later_$folder$")
        client.put_object(Bucket=bucket, Key=f"run/{key}", Body=b"" if is_marker else b"12")
    with caplog.at_level(logging.WARNING):
        tierckpt.prefetch(s3_uri, to=tmp_path / "target")
    assert files_in(tmp_path / "target") == ["a%5Cb", "config.json", "model.safetensors", "model/x"]
    assert any("fetching it as a%5Cb" in line for line in caplog.messages)
    client.put_object(Bucket=bucket, Key="run/config.json/y", Body=b"12")
    with pytest.raises(ConfigError, match=r"'config\.json' is an object, and others are below config\.json/"):
        tierckpt.prefetch(s3_uri, to=tmp_path / "target")
    tierckpt.prefetch(s3_uri, to=tmp_path / "target", exclude=["config.json/*"])


ODD_KEYS = {
    "": b"of the folder itself",
    "/x": b"0",
    "sub//deep": b"1",
    "./y": b"2",
    "../z": b"3",
    "big//w.bin": b"4" * 3_000_000,
}


@pytest.fixture
def odd_uri(moto: S3Server, s3_uri: str) -> str:
    for key, data in {**ODD_KEYS, "config.json": b"{}", "x.json": b"[]"}.items():
        moto.client().put_object(Bucket=parse_uri(s3_uri).authority, Key=f"run/{key}", Body=data)
    return s3_uri


@pytest.mark.slow
def test_keys_that_are_no_paths_get_legal_names(odd_uri: str, tmp_path: Path) -> None:
    for _ in range(2):  # the second run fetches nothing
        tierckpt.prefetch(odd_uri, to=tmp_path / "target")
    wanted = {"x": "/x", "sub/deep": "sub//deep", "y": "./y", "%2E%2E/z": "../z", "big/w.bin": "big//w.bin"}
    assert files_in(tmp_path / "target") == sorted([*wanted, "config.json", "x.json"])
    for path, key in wanted.items():
        assert (tmp_path / "target" / path).read_bytes() == ODD_KEYS[key]
    tierckpt.prefetch(odd_uri, to=tmp_path / "other", exclude=["*/*"])
    assert files_in(tmp_path / "other") == ["config.json", "x.json"]


def test_keys_that_are_no_paths_need_fsspec(odd_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(location: Location, **_: object) -> None:
        raise MissingExtraError("s3:// needs a package that is not installed: s3fs")

    monkeypatch.setattr(fsspec_store, "open_filesystem", missing)
    with pytest.raises(StoreError, match=r"run/.*Rename or remove that object: fsspec.*not installed: s3fs"):
        tierckpt.prefetch(odd_uri, to=tmp_path / "target")


def test_run_among_odd_keys_is_listed_and_pruned(moto: S3Server, odd_uri: str) -> None:
    for step in (1, 2):
        save_drained(f"{odd_uri}/step-{step}", small_state())
    client, bucket = moto.client(), parse_uri(odd_uri).authority
    for foreign in ("step-1//config.json", "/step-2/config.json"):
        client.put_object(Bucket=bucket, Key=f"run/{foreign}", Body=b"of another tool")
    assert tierckpt.latest(odd_uri) == f"{odd_uri}/step-2"
    assert run_cli(["prune", odd_uri, "--keep-last", "1", "--yes"]) == 0
    left = {one["Key"].removeprefix("run/") for one in client.list_objects_v2(Bucket=bucket)["Contents"]}
    assert {"config.json", "/step-2/config.json", "sub//deep"} <= left
    assert [key for key in left if key.startswith("step-1/")] == ["step-1//config.json"], "a foreign key must stay"
    assert [key for key in left if key.startswith("step-2/")]


@pytest.mark.server
def test_azure_folder_markers_are_recognized_by_metadata(azurite: AzureServer, az_uri: str, tmp_path: Path) -> None:
    container = az_uri.removeprefix("az://").partition("/")[0]
    with azurite.client(container) as client:
        client.upload_blob("run/config.json", b"{}")
        client.upload_blob("run/empty", b"")
        client.upload_blob("run/folder", b"", metadata={"hdi_isfolder": "true"})
    tierckpt.prefetch(az_uri, to=tmp_path / "target")
    assert files_in(tmp_path / "target") == ["config.json", "empty"]
