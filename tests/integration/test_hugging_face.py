"""``hf://`` against a fake Hub that counts requests: one commit, few calls, checked content, typed errors."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import fsspec
import pytest

import tierckpt
from tests.agents import until
from tests.command_line import CommandLine, Done
from tests.files import contents, flip
from tests.fuse_mount import mounted
from tests.servers.hub import TOKEN, FakeHub, Repository, fake_hub, oid
from tierckpt.client import close_all
from tierckpt.config import Settings
from tierckpt.errors import (
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
)
from tierckpt.format.layout import parse_uri
from tierckpt.stores import http_reader, open_store
from tierckpt.stores.hub import api

KIB, MIB = 1 << 10, 1 << 20
REPO = "org/model-1.5B"
Files = dict[str, bytes]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(tmp_path / "root"))
        yield hub


def content(size_bytes: int, seed: int = 0) -> bytes:
    return bytes((index * 31 + seed) % 251 for index in range(1021)) * (size_bytes // 1021 + 1)


def model(files: int = 4, size_bytes: int = 200 * KIB, seed: int = 0) -> Files:
    """Return a model of weights, stored by LFS, and small files, stored by git."""
    weights = {f"model-{index:05d}.safetensors": content(size_bytes, seed + index) for index in range(files)}
    return weights | {"config.json": b"{}", "sub/vocab.txt": b"a b c", "empty": b""}


@pytest.fixture
def files(hub: FakeHub) -> Files:
    """The model that is on the Hub."""
    return published(hub, model())


def published(hub: FakeHub, files: Files, **repository: Any) -> Files:
    hub.repositories[REPO] = Repository(**repository)
    hub.repositories[REPO].commit(files)
    return files


def fetch(tmp_path: Path, uri: str = f"hf://{REPO}", **settings: Any) -> Path:
    return tierckpt.prefetch(uri, tmp_path / "here", chunk_size_bytes=64 * KIB, **settings)


def holds(directory: Path, files: Files) -> bool:
    return contents(directory) == files


@pytest.mark.parametrize("ignores_ranges", [True, False])
@pytest.mark.parametrize("is_mirror", [True, False])
def test_a_mirror_or_cdn_sends_each_file_once(
    is_mirror: bool, ignores_ranges: bool, hub: FakeHub, tmp_path: Path
) -> None:
    """A range request is answered with the range or the whole file, directly or after a redirect."""
    files = published(hub, model(files=3, size_bytes=3 << 20))
    hub.is_mirror, hub.ignores_ranges = is_mirror, ignores_ranges
    assert holds(fetch(tmp_path), files)
    sent = sum(hub.sent.values())
    # A mirror has filled the socket buffers before it learns that the client closes.
    assert sent <= sum(map(len, files.values())) + (is_mirror and ignores_ranges) * (5 << 20)


# --- downloads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/1", "refs%2Fpr%2F1", "feature%2Fx", "a%231%2520b"])
def test_names_and_revisions_are_url_encoded(revision: str, hub: FakeHub, tmp_path: Path) -> None:
    names = ("a#1", "a?x=2", "a%20b", "a[1]", "a@b", "%2F", "é", "d@x/y#z?")
    published(hub, {"config.json": b"{}"})
    files = {f"{size}/{name}": name.encode() * size for name in names for size in (1, 500)}
    hub.repositories[REPO].commit(files, unquote(revision))
    assert holds(fetch(tmp_path, f"hf://{REPO}@{revision}"), files)


def test_model_of_64_files_needs_few_calls(hub: FakeHub, tmp_path: Path) -> None:
    files = published(hub, {f"model-{index:05d}.safetensors": content(150 * KIB, index) for index in range(64)})
    hub.page = 30  # the tree has pages
    assert holds(fetch(tmp_path), files)
    assert hub.calls == {"revision": 1, "tree": 3, "resolve": 64}
    assert hub.sent.total() == sum(map(len, files.values()))


def test_xet_file_is_read_through_its_http_bridge(hub: FakeHub, files: Files, tmp_path: Path) -> None:
    """Through the redirect's signed URL, unchanged and renewed when it expires."""
    hub.xet, hub.expires_after = True, 3
    assert holds(fetch(tmp_path), files)
    assert hub.calls.keys() == {"revision", "tree", "resolve"}  # no token request for the Xet protocol
    assert hub.bridged and hub.cdn_authorizations == {""}
    assert hub.sent.total() == sum(map(len, files.values()))


def test_hf_uri_uses_the_node_cache(hub: FakeHub, files: Files, tmp_path: Path) -> None:
    assert holds(tierckpt.prefetch(f"hf://{REPO}"), files)
    before = hub.sent.total()
    assert holds(tierckpt.prefetch(f"hf://{REPO}@main"), files)  # another URI, so a separate entry
    assert holds(tierckpt.prefetch(f"hf://{REPO}"), files)
    assert hub.sent.total() == 2 * before


def test_commit_is_not_resolved_and_a_subdirectory_may_be_named(hub: FakeHub, files: Files, tmp_path: Path) -> None:
    commit = hub.repositories[REPO].revisions["main"]
    assert holds(fetch(tmp_path, f"hf://{REPO}@{commit}/sub"), {"vocab.txt": b"a b c"})
    assert hub.calls["revision"] == 0


def test_dataset_and_fsspec_url(hub: FakeHub, files: Files, tmp_path: Path) -> None:
    assert holds(fetch(tmp_path, f"hf://datasets/{REPO}"), files)
    place = f"tierckpt://hf/{REPO}"
    assert fsspec.open(f"{place}/sub/vocab.txt").open().read() == b"a b c"
    names = {name.rpartition("/")[2] for name in fsspec.filesystem("tierckpt").ls(place, detail=False)}
    assert names == {*files, "sub"} - {"sub/vocab.txt"}
    assert not fsspec.filesystem("tierckpt").exists("tierckpt://hf/org")


def test_branch_that_moves_during_a_prefetch_changes_nothing(hub: FakeHub, files: Files, tmp_path: Path) -> None:
    newer = model(seed=7)

    def move() -> None:
        hub.on_resolve = lambda: None
        hub.repositories[REPO].commit(newer)

    hub.on_resolve = move
    assert holds(fetch(tmp_path), files)
    (tmp_path / "later").mkdir()
    assert holds(fetch(tmp_path / "later", local_root=tmp_path / "later-root"), newer)


# --- secrets and places --------------------------------------------------------------------------------------------


def test_token_is_sent_only_to_the_hub(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = published(hub, model(), gated=True)
    with pytest.raises(PermissionDeniedError, match="gated") as error:
        fetch(tmp_path)
    assert error.value.exit_code == 6 and f"{hub.endpoint}/{REPO}" in str(error.value)
    assert "without HF_TOKEN" in str(error.value)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/token").write_text("hf_" + "x" * 30)
    with pytest.raises(PermissionDeniedError, match="this token may not") as error:
        fetch(tmp_path)
    assert "x" * 30 not in str(error.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert holds(fetch(tmp_path), files)
    assert hub.cdn_requests and hub.cdn_authorizations == {""}
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_mode_sends_no_request(
    name: str, hub: FakeHub, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(StoreUnavailableError, match=name):
        fetch(tmp_path)
    assert not hub.requests


# --- errors --------------------------------------------------------------------------------------------------------

MISSING = {
    "hf://org/nothing-here": "no repository org/nothing-here",
    f"hf://{REPO}@v9": "no revision 'v9'",
    f"hf://{REPO}/none": "no file|has no files",
    "hf://gpt2": "names no repository",
    "hf://org/na#me": "names no repository",
    "hf://org/a b": "names no repository",
}


@pytest.mark.parametrize("uri", MISSING)
def test_missing_repository_revision_or_file_raises(uri: str, hub: FakeHub, files: Files, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=MISSING[uri]):
        fetch(tmp_path, uri)
    assert hub.requests <= (4 if uri.endswith("/none") else 2)  # raised at the first refusal


@pytest.mark.parametrize("endpoint", ["huggingface.co", "http://[", "https://user:hunter22@127.0.0.1:1"])
def test_invalid_endpoint_is_a_config_error(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(ConfigError, match="HF_ENDPOINT") as refusal:
        fetch(tmp_path, local_root=tmp_path / "root")
    assert "hunter22" not in str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize("header", [{"Retry-After": "1.5"}, {"Retry-After": "0"}, {"RateLimit": '"api";r=0;t=1'}])
def test_rate_limit_is_retried_after_its_delay(header: dict[str, str], hub: FakeHub, tmp_path: Path) -> None:
    files = published(hub, model())
    hub.limited = [header] * 2
    begun = time.monotonic()
    assert holds(fetch(tmp_path), files)
    assert time.monotonic() - begun >= 1


def test_transient_hub_errors_are_retried(hub: FakeHub, files: Files, tmp_path: Path) -> None:
    hub.refused = [503, 500]
    assert holds(fetch(tmp_path), files)


@pytest.mark.parametrize("is_proxied", [False, True])
def test_transient_cdn_errors_are_retried(
    is_proxied: bool, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_proxied:
        monkeypatch.setenv("http_proxy", hub.cdn)  # the same host, used as a proxy
        monkeypatch.setenv("no_proxy", hub.endpoint.removeprefix("http://"))
    files = published(hub, model(files=1))
    hub.cdn_refused = [503, 429, 503, 503]
    assert holds(fetch(tmp_path), files)
    assert not hub.cdn_refused and hub.calls["resolve"] == 3  # the URL stayed valid


@pytest.mark.parametrize("begins", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"])
def test_slow_drip_answer_times_out(begins: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single bytes with pauses between them do not count as an answer, in a head or in a body."""
    monkeypatch.setattr(http_reader, "time", SimpleNamespace(monotonic=lambda: 10.0 * len(dripped)))
    ended = b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200 + b"\r\n\r\n" if not begins else b"x" * 200

    def drip() -> None:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            client.recv(4096)
            client.sendall(begins)
            for index in range(len(ended)):
                client.sendall(ended[index : index + 1])
                dripped.append(index)
                time.sleep(0.02)

    dripped: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=drip, daemon=True)
        server.start()
        with pytest.raises(StoreUnavailableError, match="TimeoutError"):
            api.request(f"http://127.0.0.1:{listener.getsockname()[1]}/api", {})
        server.join()
    assert 1 < len(dripped) < len(ended)


@pytest.mark.parametrize("pointers", [False, True])
def test_lfs_pointer_without_object_raises(pointers: bool, hub: FakeHub, files: Files, tmp_path: Path) -> None:
    hub.lost, hub.pointers = {"model-00001.safetensors"}, pointers
    with pytest.raises(TierckptError, match=r"pointer without its object|no object for it") as error:
        fetch(tmp_path)
    assert "model-00001" in str(error.value)
    assert not (tmp_path / "here").exists()


ITEM = {"type": "file", "path": "config.json", "size": 2, "oid": "1" * 40}
LISTINGS = {
    "nested without end": b"[" * 200_000,
    "no list": b"{}",
    "no files": b"[1]",
    "outside": json.dumps([ITEM | {"path": "../config.json"}]).encode(),
    "less than nothing": json.dumps([ITEM | {"size": -1}]).encode(),
}


@pytest.mark.parametrize("listing", LISTINGS)
def test_invalid_listing_is_refused(listing: str, hub: FakeHub, files: Files, tmp_path: Path) -> None:
    hub.listing = LISTINGS[listing]
    with pytest.raises(StoreError, match=r"as a Hub does|lists no files|lists a file that cannot be"):
        fetch(tmp_path)
    assert not (tmp_path / "here").exists() and not hub.calls["resolve"]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/file"])
def test_redirect_to_another_scheme_than_http_is_refused(url: str, hub: FakeHub, files: Files, tmp_path: Path) -> None:
    hub.leads_to = url
    with pytest.raises(TierckptError, match="not an HTTP URL"):
        fetch(tmp_path)


def test_damaged_bytes_are_refused_and_fetched_again(hub: FakeHub, files: Files, tmp_path: Path) -> None:
    hub.damaged = {"model-00002.safetensors"}
    with pytest.raises(IntegrityError, match="sha256") as error:
        fetch(tmp_path)
    assert "model-00002" in str(error.value) and not (tmp_path / "here").exists()
    hub.damaged, before = set(), hub.sent["model-00000.safetensors"]
    assert holds(fetch(tmp_path), files)
    assert hub.sent["model-00000.safetensors"] <= max(before, 200 * KIB)  # good chunks are not fetched again


async def test_hf_store_is_read_only(hub: FakeHub, files: Files) -> None:
    store = open_store(parse_uri(f"hf://{REPO}"), Settings.load())
    for refused in (store.put("key", b"data"), store.delete("config.json"), store.delete_dir("sub")):
        with pytest.raises(PermissionDeniedError, match="read only"):
            await refused
    assert not hub.requests


# --- the cache of Hugging Face libraries -----------------------------------------------------------------------------

HUB_CLIENT = """
import sys, huggingface_hub as hub
local = sys.argv[1] == "offline"
directory = hub.snapshot_download("org/model-1.5B", local_files_only=local)
print(directory)
print(hub.try_to_load_from_cache("org/model-1.5B", "sub/vocab.txt"))
info = hub.scan_cache_dir()
print(len(info.warnings), [len(repo.revisions) for repo in info.repos], info.size_on_disk)
"""


def run_hub_client(how: str, **environment: str) -> list[str]:
    """Return the files that an unmodified huggingface_hub finds."""
    pytest.importorskip("huggingface_hub")
    command = [sys.executable, "-c", HUB_CLIENT, how]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def snapshot_holds(snapshot: Path, files: Files) -> bool:
    paths = [path for path in snapshot.rglob("*") if not path.is_dir()]
    assert not any(path.readlink().is_absolute() for path in paths)
    return {str(path.relative_to(snapshot)): path.read_bytes() for path in paths} == files


def test_huggingface_hub_uses_the_snapshot_offline_and_online(hub: FakeHub, files: Files, tmp_path: Path) -> None:
    commit = hub.repositories[REPO].revisions["main"]
    snapshot = tierckpt.prefetch(f"hf://{REPO}", hf_cache=True)
    root = tmp_path / "hf/hub/models--org--model-1.5B"
    assert snapshot == root / "snapshots" / commit and snapshot_holds(snapshot, files)
    assert (root / "refs/main").read_text() == commit
    assert {path.name for path in (root / "blobs").iterdir()} == {oid(data) for data in files.values()}
    assert {path.name for path in root.iterdir()} == {"blobs", "refs", "snapshots"}
    found = run_hub_client("offline", HF_HUB_OFFLINE="1")
    assert found[:2] == [str(snapshot), str(snapshot / "sub/vocab.txt")]
    assert found[2] == f"0 [1] {sum(len(data) for data in files.values())}"
    before = hub.sent.total()
    assert run_hub_client("online")[0] == str(snapshot)  # compares etags with blob names
    assert hub.sent.total() == before


def test_only_missing_blobs_are_fetched(hub: FakeHub, files: Files, tmp_path: Path) -> None:
    first = tierckpt.prefetch(f"hf://{REPO}", tmp_path / "cache", hf_cache=True)
    newer = files | {"config.json": b'{"newer": true}', "model-00001.safetensors": content(300 * KIB, 77)}
    hub.repositories[REPO].commit(newer)
    before = hub.sent.total()
    second = tierckpt.prefetch(f"hf://{REPO}", tmp_path / "cache", hf_cache=True)
    assert first != second and snapshot_holds(first, files) and snapshot_holds(second, newer)
    assert hub.sent.total() - before == len(newer["config.json"]) + len(newer["model-00001.safetensors"])
    tierckpt.prefetch(f"hf://{REPO}", tmp_path / "cache", hf_cache=True)
    assert hub.sent.total() - before == len(newer["config.json"]) + len(newer["model-00001.safetensors"])


@pytest.mark.parametrize("no", [["link"], ["symlink"], ["symlink", "link"]])
def test_hf_cache_on_a_file_system_without_links(hub: FakeHub, files: Files, tmp_path: Path, no: list[str]) -> None:
    """SMB, exFAT: the snapshot holds the files themselves, as huggingface_hub writes them; nothing is stored twice."""
    (tmp_path / "fuse").mkdir()
    with mounted(tmp_path / "fuse", no=no) as mount:
        cache = mount.path / "cache"
        snapshot, before = tierckpt.prefetch(f"hf://{REPO}", cache, hf_cache=True), hub.sent.total()
        paths = [path for path in snapshot.rglob("*") if not path.is_dir()]
        assert {str(path.relative_to(snapshot)): path.read_bytes() for path in paths} == files
        assert any(path.is_symlink() for path in paths) == ("symlink" not in no)
        assert tierckpt.prefetch(f"hf://{REPO}", cache, hf_cache=True) == snapshot
        assert hub.sent.total() == before, "a complete snapshot must not be fetched again"
        root = cache / "models--org--model-1.5B"
        assert any((root / "blobs").iterdir()) == (len(no) < 2)
        assert {path.name for path in root.iterdir()} == {"blobs", "refs", "snapshots"}
        close_all()


def test_hf_cache_of_a_subdirectory_or_some_files(hub: FakeHub, files: Files, tmp_path: Path) -> None:
    found = tierckpt.prefetch(f"hf://{REPO}/sub", tmp_path / "cache", hf_cache=True)
    assert snapshot_holds(found, {"sub/vocab.txt": files["sub/vocab.txt"]})
    found = tierckpt.prefetch(f"hf://{REPO}", tmp_path / "cache", hf_cache=True, include=["*.json"])
    assert snapshot_holds(found, {name: files[name] for name in ("sub/vocab.txt", "config.json")})


def test_damaged_bytes_never_reach_the_hf_cache(hub: FakeHub, files: Files, tmp_path: Path) -> None:
    hub.damaged = {"model-00002.safetensors"}
    with pytest.raises(IntegrityError, match="sha256"):
        tierckpt.prefetch(f"hf://{REPO}", tmp_path / "cache", hf_cache=True)
    root = tmp_path / "cache/models--org--model-1.5B"
    assert not (root / "refs").exists() and not (root / "snapshots").exists()


def test_snapshot_is_published_with_all_links(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that knows the commit opens the snapshot directory without reading a ref."""
    files, symlink_to, links = published(hub, model()), Path.symlink_to, []
    commit, root = hub.repositories[REPO].revisions["main"], tmp_path / "cache/models--org--model-1.5B"

    def stopped(link: Path, *target: Any) -> None:
        links.extend([link] * (".tmp/" in str(link)))
        if len(links) == 3:
            raise OSError(errno.EIO, "killed")
        symlink_to(link, *target)

    with monkeypatch.context() as patch, pytest.raises(StoreError):
        patch.setattr(Path, "symlink_to", stopped)
        patch.setattr("tierckpt.cache.hub_layout.remove_tree", lambda *_, **__: None)
        tierckpt.prefetch(f"hf://{REPO}@{commit}", tmp_path / "cache", hf_cache=True)
    assert not (root / "snapshots" / commit).exists()
    monkeypatch.setattr(
        "tierckpt.cache.hub_layout.is_abandoned", lambda name: name.startswith(".")
    )  # the process ended
    before = hub.sent.total()
    snapshot = tierckpt.prefetch(f"hf://{REPO}@{commit}", tmp_path / "cache", hf_cache=True)
    assert snapshot_holds(snapshot, files) and hub.sent.total() == before
    assert {path.name for path in root.iterdir()} == {"blobs", "snapshots"}


def checked(cache: Path, cli: CommandLine, *more: str) -> Done:
    return cli("cache", "check", f"hf://{REPO}", "--hf-cache", "--to", cache, *more)


def test_hf_cache_check_digests_every_file(hub: FakeHub, tmp_path: Path, cli: CommandLine) -> None:
    files, cache = published(hub, model()), tmp_path / "cache"
    done = checked(cache, cli)
    assert (done.code, done.document["state"], done.document["missing"].keys()) == (3, "absent", files.keys())
    snapshot = tierckpt.prefetch(f"hf://{REPO}", cache, hf_cache=True)
    sent = hub.sent.total()
    done = checked(cache, cli)
    assert (done.code, done.document["state"], done.document["directory"]) == (0, "whole", str(snapshot))
    assert done.document["here_bytes"] == done.document["size_bytes"] == sum(map(len, files.values()))
    assert checked(cache, cli, "--include", "*.json").document["files"] == 1
    assert hub.sent.total() == sent, "a check must not fetch"


HARMS: dict[str, tuple[Callable[[Path], object], int]] = {
    "flipped": (lambda path: flip(path.resolve()), 5),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), 5),
    "no link": (Path.unlink, 3),
    "no blob": (lambda path: path.resolve().unlink(), 3),
}


@pytest.mark.parametrize("name", ["model-00001.safetensors", "config.json", "sub/vocab.txt"])
@pytest.mark.parametrize("harm", HARMS)
def test_hf_cache_check_names_the_damaged_file(
    name: str, harm: str, hub: FakeHub, tmp_path: Path, cli: CommandLine
) -> None:
    files, cache = published(hub, model()), tmp_path / "cache"
    inflict, code = HARMS[harm]
    snapshot = tierckpt.prefetch(f"hf://{REPO}", cache, hf_cache=True)
    blob = (snapshot / name).resolve()
    inflict(snapshot / name)
    found = checked(cache, cli)
    wrong, lacks = found.document["bad"], found.document["missing"]
    assert (found.code, found.document["state"], [*wrong, *lacks]) == (code, "partial", [name])
    assert found.document["here_bytes"] == sum(map(len, files.values())) - len(files[name])
    if code == 5:
        assert str(blob) in wrong[name]
    else:
        assert lacks[name] == (len(files[name]) if harm == "no blob" else 0)
    shown = cli.text("cache", "check", f"hf://{REPO}", "--hf-cache", "--to", cache)
    assert shown.code == code
    assert name in shown.out and ("remove the damaged ones" in shown.out) == (code == 5)
    if code == 5:
        blob.unlink()
    tierckpt.prefetch(f"hf://{REPO}", cache, hf_cache=True)
    assert checked(cache, cli).code == 0


def test_hf_cache_check_of_older_snapshots(hub: FakeHub, tmp_path: Path, cli: CommandLine) -> None:
    files, cache = published(hub, model()), tmp_path / "cache"
    old = tierckpt.prefetch(f"hf://{REPO}", cache, hf_cache=True)
    hub.repositories[REPO].commit(files | {"config.json": b'{"newer": true}'})
    done = checked(cache, cli)
    assert (done.code, done.document["state"], done.document["directory"]) == (3, "outdated", None)
    assert done.document["missing"]["model-00000.safetensors"] == 0, "its blob exists"
    new = tierckpt.prefetch(f"hf://{REPO}", cache, hf_cache=True)
    ref = new.parent.parent / "refs/main"
    assert checked(cache, cli).code == 0
    ref.write_text(old.name)
    done = checked(cache, cli)
    assert (done.code, done.document["missing"]) == (3, {"refs/main": 0}), "offline, the branch names the older one"
    ref.unlink()
    assert checked(cache, cli).code == 3


def test_hf_cache_accepts_only_repositories(hub: FakeHub, tmp_path: Path, cli: CommandLine) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="hf://"):
        tierckpt.prefetch(tmp_path, hf_cache=True)
    for command in (("cache", "check", tmp_path), ("prefetch",), ("prefetch", f"hf://{REPO}", "--pin")):
        assert cli(*command, "--hf-cache").code == 2


# --- kill -9 -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", ["directory", "cache"])
def test_killed_prefetch_resumes(target: str, hub: FakeHub, tmp_path: Path) -> None:
    chunk, workers = 64 * KIB, 8
    files = published(hub, {f"model-{index:05d}.safetensors": content(256 * KIB, index) for index in range(64)})
    total, killing = sum(map(len, files.values())), threading.Event()
    hub.on_piece = lambda: hub.sent.total() < total // 2 or killing.wait(60)
    command = [sys.executable, "-m", "tierckpt", "prefetch", f"hf://{REPO}", "--to", str(tmp_path / "here"), "--json"]
    command += ["--hf-cache"] * (target == "cache")
    environment = os.environ | {
        "TIERCKPT_CHUNK_SIZE_BYTES": str(chunk),
        "TIERCKPT_CONCURRENCY": str(workers // 2),  # prefetch doubles it
    }
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: hub.sent.total() >= total // 2, "half of the files")
    assert killed.poll() is None
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killing.set()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["files"] == 64
    assert (holds if target == "directory" else snapshot_holds)(Path(document["directory"]), files)
    assert 0 <= hub.sent.total() - total <= workers * chunk
