"""Cost of a model update: one listing and the changed files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import tierckpt
from tests.fuse_mount import mounted
from tests.integration.test_http_servers import CHUNK, Server, bucket, fetch, served
from tierckpt.loading.cached_view import open_cached

__all__ = ["bucket", "served"]  # fixtures

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


def test_reused_bytes_are_verified(model: Server, tmp_path: Path) -> None:
    """A load detects a shard damaged on this node after the fetch and reads it from the store."""
    before = Path(tierckpt.prefetch(model.uri, local_root=tmp_path, chunk_size_bytes=CHUNK))
    model.files[SHARDS[3]] = shard(99)
    after = Path(tierckpt.prefetch(model.uri, local_root=tmp_path, chunk_size_bytes=CHUNK))
    assert after != before and (after / SHARDS[5]).samefile(before / SHARDS[5])
    with (after / SHARDS[5]).open("r+b") as file:
        file.write(b"damaged")
    with open_cached(model.uri, local_root=tmp_path, chunk_size_bytes=CHUNK) as view:
        assert bytes(view.read(SHARDS[5], 0, 100)) == shard(5)[:100]


def test_files_are_copied_without_hard_links(model: Server, tmp_path: Path) -> None:
    with mounted(tmp_path, no=("link", "symlink")) as mount:
        fetch(model, mount.path / "to")
        model.files[SHARDS[3]] = shard(99)
        reset_requests(model)
        assert fetch(model, mount.path / "to") == model.files
    assert sum(model.sent.values()) <= 1.05 * len(shard(99))


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
    model.files[SHARDS[3]] = shard(99)
    reset_requests(model)
    assert fetch(model, tmp_path / "to") == model.files
    assert {SHARDS[3], SHARDS[5]} <= model.sent.keys()


def test_weak_etags_do_not_identify_bytes(model: Server, tmp_path: Path) -> None:
    model.etags = "weak"
    fetch(model, tmp_path / "to")
    model.files[SHARDS[3]] = shard(99)
    reset_requests(model)
    assert fetch(model, tmp_path / "to") == model.files
    assert sum(model.sent.values()) >= 29 * len(shard(0))
