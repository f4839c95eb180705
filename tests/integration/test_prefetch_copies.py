"""``tierckpt prefetch`` copies chunks that this node holds; an update costs one listing and the changed files."""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.command_line import CommandLine
from tests.files import tmpfs
from tests.fuse_mount import mounted
from tests.integration.test_http_servers import CHUNK, Server, bucket, fetch, served
from tests.integration.test_hugging_face import REPO, hub
from tests.reads import told
from tests.servers.hub import FakeHub, Repository
from tests.states import flip, save_drained
from tierckpt.cache import reuse
from tierckpt.client import close_all
from tierckpt.disk.durable import hard_link
from tierckpt.loading.cached_view import open_cached

__all__ = ["bucket", "hub", "served"]  # fixtures

MODEL = {f"model-{number}.safetensors": random.Random(number).randbytes(3 * CHUNK + number) for number in range(4)}
FILES = MODEL | {"config.json": b"{}", "sub/vocab.txt": b"a b c"}
TOTAL = sum(map(len, FILES.values()))
FIRST = next(iter(MODEL))


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_CHUNK_SIZE_BYTES", str(CHUNK))


@pytest.fixture(params=["s3", "file", "hf"])
def source(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Any, Any]]:
    """Yield a model's URI, a function that replaces one file, and a counter of bytes read from the source."""
    if request.param == "file":

        def write(name: str, data: bytes) -> None:
            path = tmp_path / "source" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

        for name, data in FILES.items():
            write(name, data)
        with told() as read:
            yield f"file://{tmp_path}/source", write, lambda: read["shared"]
    elif request.param == "s3":
        server: Server = request.getfixturevalue("bucket")
        server.files = dict(FILES)
        yield server.uri, server.files.__setitem__, lambda: sum(server.sent.values())
    else:
        fake: FakeHub = request.getfixturevalue("hub")
        fake.repositories[REPO] = Repository()
        fake.repositories[REPO].commit(dict(FILES))
        write = lambda name, data: fake.repositories[REPO].commit(FILES | {name: data})  # noqa: E731
        yield f"hf://{REPO}", write, lambda: fake.sent.total()


def holds(directory: Path, files: dict[str, bytes]) -> bool:
    return all((directory / name).read_bytes() == data for name, data in files.items())


def test_cached_model_is_copied_without_store_reads(
    source: tuple[str, Any, Any], tmp_path: Path, cli: CommandLine
) -> None:
    uri, _, count = source
    cached = Path(cli.answer("prefetch", uri)["directory"])
    before = count()
    plan = cli.answer("prefetch", uri, "--to", tmp_path / "to", "--dry-run")
    assert (plan["would_fetch_bytes"], plan["would_copy_bytes"], plan["would_fetch"]) == (0, TOTAL, [])
    document = cli.answer("prefetch", uri, "--to", tmp_path / "to")
    assert count() == before
    assert document["bytes_by_source"] == {"here": 0, "cache": TOTAL, "peer": 0, "shared": 0, "other_processes": 0}
    assert holds(tmp_path / "to", FILES)
    assert cli("cache", "check", uri, "--to", tmp_path / "to", "--read-data").code == 0
    (tmp_path / "to" / FIRST).write_bytes(b"mine")  # as a user's program writing in place
    assert holds(cached, FILES)
    shown = " ".join(cli.text("prefetch", uri, "--to", tmp_path / "other").out.split())
    assert re.search(r"0 B from the store, [\d.]+ KiB from the node cache", shown), shown


def test_control_linked_cache_is_detected(
    monkeypatch: pytest.MonkeyPatch, bucket: Server, tmp_path: Path, cli: CommandLine
) -> None:
    """Seeded bug: the directory shares its inodes with the cache."""

    def linked(filling: Any, index: int, chunk: int, place: Path, expected: str) -> bool:
        path = filling.prepare(index)
        temporary = path.with_name(f"{path.name}.{chunk}")
        hard_link(place, temporary)
        temporary.replace(path)
        temporary.unlink(missing_ok=True)  # rename of one hard link to another does nothing
        filling.append_line(f"{index} {chunk} {expected}")
        filling.keep(index)
        return True

    monkeypatch.setattr("tierckpt.cache.entry.copy_chunk", linked)
    bucket.files = dict(FILES)
    with pytest.raises(AssertionError, match="holds"):
        test_cached_model_is_copied_without_store_reads(
            (bucket.uri, None, lambda: sum(bucket.sent.values())), tmp_path, cli
        )


@pytest.mark.parametrize("where", ["a whole entry", "a partial entry"])
def test_rest_of_a_partly_cached_model_is_fetched(where: str, bucket: Server, tmp_path: Path, cli: CommandLine) -> None:
    bucket.files = dict(FILES)
    names = [name for name in bucket.files if "-0." in name or "-1." in name]
    if where == "a whole entry":
        cli.answer("prefetch", bucket.uri, "--include", "*-0.*", "--include", "*-1.*")
    else:
        with open_cached(bucket.uri) as view:
            assert all(bytes(view.read(name)) == bucket.files[name] for name in names)
    bucket.sent.clear()
    document = cli.answer("prefetch", bucket.uri, "--to", tmp_path / "to")
    assert holds(tmp_path / "to", bucket.files)
    assert document["bytes_by_source"]["cache"] == sum(len(bucket.files[name]) for name in names)
    assert bucket.sent.keys() == bucket.files.keys() - {*names}


@pytest.mark.parametrize("fault", ["bit flip", "cut off", "gone", "a link to another"])
def test_chunks_damaged_in_the_cache_are_fetched(
    fault: str, source: tuple[str, Any, Any], tmp_path: Path, cli: CommandLine, caplog: pytest.LogCaptureFixture
) -> None:
    uri, _, count = source
    path = Path(cli.answer("prefetch", uri)["directory"]) / FIRST
    status = path.stat()
    if fault == "bit flip":
        flip(path, CHUNK + 3)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as disk corruption would
    elif fault == "cut off":
        os.truncate(path, CHUNK + 1)
    else:
        path.unlink()
        if fault == "a link to another":
            path.symlink_to(path.with_name("model-1.safetensors"))
    before = count()
    document = cli.answer("prefetch", uri, "--to", tmp_path / "to")
    assert holds(tmp_path / "to", FILES)
    assert 0 < count() - before <= len(FILES[FIRST])
    assert document["bytes_by_source"]["cache"] == TOTAL - document["fetched_bytes"] >= TOTAL - len(FILES[FIRST])
    if fault == "bit flip":
        assert document["fetched_bytes"] == CHUNK
        assert sum("not copied from the node cache" in line for line in caplog.messages) == 1


def test_control_unverified_copies_are_detected(
    monkeypatch: pytest.MonkeyPatch, bucket: Server, tmp_path: Path, cli: CommandLine, caplog: pytest.LogCaptureFixture
) -> None:
    """Seeded bug: chunks are not compared with their digests."""
    monkeypatch.setattr(reuse, "same_digest", lambda *_: True)
    bucket.files = dict(FILES)
    with pytest.raises(AssertionError, match="holds"):
        test_chunks_damaged_in_the_cache_are_fetched(
            "bit flip", (bucket.uri, None, lambda: sum(bucket.sent.values())), tmp_path, cli, caplog
        )


def test_files_changed_in_the_store_are_fetched(source: tuple[str, Any, Any], tmp_path: Path, cli: CommandLine) -> None:
    uri, write, count = source
    cli.answer("prefetch", uri)
    changed = bytes(len(FILES[FIRST]))
    write(FIRST, changed)
    before = count()
    document = cli.answer("prefetch", uri, "--to", tmp_path / "to")
    assert holds(tmp_path / "to", FILES | {FIRST: changed})
    assert count() - before == document["fetched_bytes"] == len(changed)


def test_chunks_of_another_size_are_copied(
    bucket: Server, tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.files = dict(FILES)
    cli.answer("prefetch", bucket.uri)
    monkeypatch.setenv("TIERCKPT_CHUNK_SIZE_BYTES", str(2 * CHUNK))
    assert cli.answer("prefetch", bucket.uri, "--to", tmp_path / "to")["bytes_by_source"]["cache"] == TOTAL


def test_a_hugging_face_cache_is_filled_from_the_node_cache(hub: FakeHub, tmp_path: Path, cli: CommandLine) -> None:
    hub.repositories[REPO] = Repository()
    hub.repositories[REPO].commit(dict(FILES))
    cli.answer("prefetch", f"hf://{REPO}")
    before = hub.sent.total()
    document = cli.answer("prefetch", f"hf://{REPO}", "--hf-cache", "--to", tmp_path / "hub")
    assert holds(Path(document["directory"]), FILES)
    assert (hub.sent.total(), document["bytes_by_source"]["cache"]) == (before, TOTAL)


def test_a_checkpoint_on_the_local_tier_is_copied(s3_uri: str, tmp_path: Path, cli: CommandLine) -> None:
    save_drained(f"{s3_uri}/step-1", {"w": torch.arange(1 << 16)})
    close_all()
    document = cli.answer("prefetch", f"{s3_uri}/step-1", "--to", tmp_path / "to")
    assert document["bytes_by_source"]["cache"] == document["size_bytes"] > document["fetched_bytes"] == 0
    assert cli("cache", "check", f"{s3_uri}/step-1", "--to", tmp_path / "to", "--read-data").code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_directory_on_another_file_system_gets_a_copy(bucket: Server, tmp_path: Path, cli: CommandLine) -> None:
    with tmpfs(tmp_path / "mount", "size=16m") as mount:
        bucket.files = dict(FILES)
        cli.answer("prefetch", bucket.uri)
        bucket.sent.clear()
        cli.answer("prefetch", bucket.uri, "--to", mount / "to")
        assert holds(mount / "to", FILES) and not bucket.sent


@contextmanager
def xfs(folder: Path) -> Iterator[Path]:
    """Mount an image of XFS, or skip the test."""
    image, mount = folder / "xfs.img", folder / "xfs"
    mount.mkdir()
    image.touch()
    os.truncate(image, 400 << 20)
    try:
        for command in (["mkfs.xfs", "-q", image], ["mount", "-o", "loop", image, mount]):
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no xfs to mount: {error}")
    try:
        yield mount
    finally:
        close_all()
        subprocess.run(["umount", mount], check=True)


@pytest.mark.slow
def test_reflink_copy_needs_no_space(bucket: Server, tmp_path: Path, cli: CommandLine) -> None:
    with xfs(tmp_path) as mount:
        bucket.files = {name: data * 100 for name, data in MODEL.items()}
        root = ("--local-root", mount / "root")
        cached = Path(cli.answer("prefetch", bucket.uri, *root)["directory"])
        os.sync()
        before = os.statvfs(mount).f_bfree * 4096
        cli.answer("prefetch", bucket.uri, "--to", mount / "to", *root)
        os.sync()
        size_bytes = sum(map(len, bucket.files.values()))
        assert before - os.statvfs(mount).f_bfree * 4096 < size_bytes / 10
        (mount / "to" / FIRST).write_bytes(b"mine")
        assert holds(cached, bucket.files)


# --- a new version of a model -----------------------------------------------------------------------------------------


SHARDS = [f"model-{number:05d}-of-00030.safetensors" for number in range(30)]


def shard(seed: int) -> bytes:
    return random.Random(seed).randbytes(3 * CHUNK + 5)


@pytest.fixture
def model(bucket: Server) -> Server:
    bucket.files = {name: shard(number) for number, name in enumerate(SHARDS)} | {"config.json": b"{}"}
    return bucket


def cached(model: Server, root: Path) -> dict[str, bytes]:
    directory = Path(tierckpt.prefetch(model.uri, local_root=root, chunk_size_bytes=CHUNK))
    return {name: (directory / name).read_bytes() for name in model.files}


def reset_requests(model: Server) -> None:
    model.asked.clear()
    model.sent.clear()


def updated(model: Server, to: Path) -> Counter[str]:
    """Change a shard and prefetch again. Returns the bytes sent of each file."""
    model.files[SHARDS[3]] = shard(99)
    reset_requests(model)
    assert fetch(model, to) == model.files
    return model.sent


@pytest.mark.parametrize("into", ["cache", "directory"])
def test_an_unchanged_model_costs_one_listing(into: str, model: Server, tmp_path: Path) -> None:
    for _ in range(2):
        reset_requests(model)
        found = cached(model, tmp_path) if into == "cache" else fetch(model, tmp_path / "to")
        assert found == model.files
    assert dict(model.asked) == {"GET /m": 1}
    assert not model.sent


@pytest.mark.parametrize("into", ["cache", "directory"])
def test_an_update_fetches_the_shard_that_changed(into: str, model: Server, tmp_path: Path) -> None:
    def fetched() -> dict[str, bytes]:
        return cached(model, tmp_path) if into == "cache" else fetch(model, tmp_path / "to")

    fetched()
    model.files[SHARDS[3]] = shard(99)
    reset_requests(model)
    assert fetched() == model.files
    assert sum(model.sent.values()) <= 1.05 * len(shard(99))
    assert sum(model.asked.values()) <= 2 + 4
    model.files.pop(SHARDS[4])
    reset_requests(model)
    assert fetched() == model.files
    assert not model.sent


def test_files_are_copied_without_hard_links(model: Server, tmp_path: Path) -> None:
    with mounted(tmp_path, no=("link", "symlink")) as mount:
        fetch(model, mount.path / "to")
        assert updated(model, mount.path / "to").total() <= 1.05 * len(shard(99))


@pytest.mark.parametrize("what", ["another size", "written since", "no receipt", "a link"])
def test_file_that_may_have_changed_is_fetched(what: str, model: Server, tmp_path: Path) -> None:
    fetch(model, tmp_path / "to")
    path = tmp_path / "to" / SHARDS[5]
    if what == "another size":
        path.write_bytes(b"cut off")
    elif what == "written since":
        path.write_bytes(bytes(len(shard(5))))
    elif what == "no receipt":
        (tmp_path / "to/.tierckpt/prefetched.json").unlink()
    else:
        path.unlink()
        path.symlink_to(tmp_path / "to" / SHARDS[6])
    assert {SHARDS[3], SHARDS[5]} <= updated(model, tmp_path / "to").keys()


def test_weak_etags_do_not_identify_bytes(model: Server, tmp_path: Path) -> None:
    model.etags = "weak"
    fetch(model, tmp_path / "to")
    assert updated(model, tmp_path / "to").total() >= 29 * len(shard(0))
