"""Safetensors from a URI through the node cache: each byte is fetched once, and loads start before the fetch ends."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import save_file

import tierckpt
from tests.reads import told
from tests.services import S3Server
from tests.states import same
from tierckpt.cache import entry
from tierckpt.cache.partial_entry import PartialEntry
from tierckpt.cache.store_chunks import StoreChunks
from tierckpt.client import close_all
from tierckpt.errors import IntegrityError

KIB = 1024
FILES = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


@pytest.fixture
def fetched() -> Iterator[Counter[str]]:
    with told() as read:
        yield read


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A model in two files with an index, in a directory ``model``."""
    generator = torch.Generator().manual_seed(1)
    tensors = {f"w{index}": torch.randn(96, 512, generator=generator) for index in range(8)}  # 192 KiB each
    weight_map = {name: FILES[index // 4] for index, name in enumerate(tensors)}
    directory = tmp_path / "model"
    directory.mkdir()
    for file in FILES:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text("{}")
    (directory / "consolidated.pth").write_bytes(bytes(3 << 20))
    return tensors


@pytest.fixture(params=["s3", "file"])
def uri(request: pytest.FixtureRequest, tensors: dict[str, torch.Tensor], tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "model").as_uri()
    s3_uri: str = request.getfixturevalue("s3_uri")
    moto: S3Server = request.getfixturevalue("moto")
    for path in (tmp_path / "model").iterdir():
        moto.client().upload_file(str(path), urlsplit(s3_uri).netloc, f"run/model/{path.name}")
    return f"{s3_uri}/model"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_CHUNK_SIZE_BYTES", "64KiB")


def needed_bytes(directory: Path) -> int:
    return sum((directory / file).stat().st_size for file in [*FILES, "model.safetensors.index.json"])


@pytest.mark.slow
def test_each_needed_byte_is_fetched_once(
    uri: str, tensors: dict[str, torch.Tensor], tmp_path: Path, fetched: Counter[str]
) -> None:
    assert same(tierckpt.load_safetensors(uri), tensors)
    assert fetched["shared"] == needed_bytes(tmp_path / "model")  # no bytes of files without tensors
    assert same(tierckpt.load_safetensors(uri), tensors)
    close_all()
    assert same(dict(tierckpt.stream_safetensors(uri, bytes_in_flight_max=400 * KIB)), tensors)
    assert same(dict(tierckpt.load_safetensors(uri, shard=(0, 1, 0), lazy=True)), tensors)
    assert fetched["shared"] == needed_bytes(tmp_path / "model")


def test_one_tensor_fetches_only_its_chunks(uri: str, tensors: dict[str, torch.Tensor], fetched: Counter[str]) -> None:
    assert same(tierckpt.load_safetensors(f"{uri}/{FILES[1]}", names=["w6"])["w6"], tensors["w6"])
    assert fetched["shared"] <= tensors["w6"].nbytes + 3 * 64 * KIB  # one more chunk at each end, and the header
    with tierckpt.load_safetensors(uri, lazy=True) as lazy:
        assert lazy.keys() == tensors.keys()
        before = fetched["shared"]
        assert same(lazy["w1"], tensors["w1"])
        assert fetched["shared"] - before <= tensors["w1"].nbytes + 2 * 64 * KIB


@pytest.mark.slow
def test_prefetched_model_is_read_from_its_files(
    uri: str, tensors: dict[str, torch.Tensor], fetched: Counter[str]
) -> None:
    directory = tierckpt.prefetch(uri)
    before = fetched["shared"]
    assert same(tierckpt.load_safetensors(uri), tensors)
    assert same(tierckpt.load_safetensors(directory), tensors)
    assert same(
        tierckpt.load_safetensors(f"{uri}/{FILES[0]}"), {name: tensors[name] for name in ("w0", "w1", "w2", "w3")}
    )
    assert fetched["shared"] == before, "bytes were fetched again"


def test_concurrent_loads_share_fetched_chunks(
    uri: str, tensors: dict[str, torch.Tensor], tmp_path: Path, fetched: Counter[str]
) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(tierckpt.load_safetensors, [uri] * 3)
    assert all(same(one, tensors) for one in found)
    assert fetched["shared"] == needed_bytes(tmp_path / "model")


def test_entry_published_while_a_load_joins_is_reused(
    uri: str, tensors: dict[str, torch.Tensor], tmp_path: Path, fetched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    join = entry.PartialEntry
    model = tmp_path / "model"

    def late(*args: Any, **options: Any) -> PartialEntry:
        monkeypatch.setattr(entry, "PartialEntry", join)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(tierckpt.prefetch, uri).result(60)
        return join(*args, **options)

    monkeypatch.setattr(entry, "PartialEntry", late)
    assert same(tierckpt.load_safetensors(uri), tensors)
    assert fetched["shared"] == sum(path.stat().st_size for path in model.iterdir())


def test_stream_starts_before_the_fetch_ends(
    uri: str, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = threading.Event()
    blocked: list[str] = []
    late: list[int] = []
    read = StoreChunks.read

    async def slow(self: StoreChunks, index: int, chunk: int, *rest: Any) -> Any:
        is_last = self.frozen.files[index].path == FILES[1] and self.frozen.chunk_range(index, chunk).start > 400 * KIB
        if is_last:
            blocked.append(f"{index}-{chunk}")
            deadline = asyncio.get_running_loop().time() + 30
            while not seen.is_set():  # not in a thread: blocked chunks would take all threads of the file store
                if asyncio.get_running_loop().time() > deadline:
                    late.append(chunk)
                    break
                await asyncio.sleep(0.01)
        return await read(self, index, chunk, *rest)

    monkeypatch.setattr(StoreChunks, "read", slow)
    found = {}
    for name, tensor in tierckpt.stream_safetensors(uri, bytes_in_flight_max=400 * KIB):
        found[name] = tensor
        seen.set()  # the first tensor has arrived
    assert blocked, "no chunk was delayed, so the test shows nothing"
    assert not late, "the first tensor arrived only after the last chunk"
    assert same(found, tensors)


def test_changed_model_is_never_mixed(tensors: dict[str, torch.Tensor], tmp_path: Path, fetched: Counter[str]) -> None:
    directory = tmp_path / "model"
    lazy = tierckpt.load_safetensors(directory.as_uri(), lazy=True)
    assert same(lazy["w0"], tensors["w0"])
    other = {name: torch.zeros_like(tensors[name]) for name in ("w4", "w5", "w6", "w7")}
    save_file(other, directory / "other")
    (directory / "other").replace(directory / FILES[1])
    with pytest.raises(IntegrityError):
        lazy["w7"]
    lazy.close()
    assert same(tierckpt.load_safetensors(directory.as_uri()), {**tensors, **other})
