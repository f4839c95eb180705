"""Files of dcp.save and dcp.async_save on the SSD: stock FileSystemReader and ours restore every kind of state."""

from __future__ import annotations

import io
import os
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import tierckpt
from tests.compat.everything import DTYPES, blank, differences, everything, random_bits
from tests.states import raises_ours
from tests.states import save as save_at_once
from tierckpt.checkpoint.local_commit import read_local_manifest
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.format.manifest import digest_of
from tierckpt.save import flush as flush_module
from tierckpt.save.shard_plan import Shard

KiB, MiB = 1 << 10, 1 << 20

Save = Callable[..., None]


def save_in_background(uri: str, state: dict[str, Any], stager: Any = None, **options: Any) -> None:
    writer = tierckpt.TierStorageWriter(uri, **options)
    with raises_ours():
        dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True).result(60)


def save_staged_shared(uri: str, state: dict[str, Any], **options: Any) -> None:
    save_in_background(uri, state, tierckpt.TierStager(shared=True), **options)


@pytest.fixture(params=[save_at_once, save_in_background, save_staged_shared], ids=["sync", "async", "shared memory"])
def save(request: pytest.FixtureRequest) -> Save:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def uri(file_uri: str) -> str:
    return f"{file_uri}/step-1"


def shards(local_root: Path, uri: str) -> list[Path]:
    return sorted(local_dir(local_root, parse_uri(uri)).glob("*.distcp"))


def read_back(uri: str, state: dict[str, Any]) -> list[str]:
    """Return the differences after loading with each reader: the local tier with ours, the shared tier with torch's."""
    wrong = []
    for reader in (tierckpt.TierStorageReader(uri), FileSystemReader(uri)):
        target = blank(state)
        with raises_ours():
            dcp.load(target, storage_reader=reader, no_dist=True)
        wrong += [f"{type(reader).__name__}: {difference}" for difference in differences(state, target)]
    return wrong


def check_files(local_root: Path, uri: str) -> None:
    """Manifest digests match the files, and every tensor item is a valid archive."""
    directory = local_dir(local_root, parse_uri(uri))
    manifest = read_local_manifest(directory)
    assert manifest is not None
    for entry in manifest.files:
        content = (directory / entry.path).read_bytes()
        chunk = manifest.chunk_size_bytes
        assert len(content) == entry.size_bytes
        assert list(entry.digests) == [digest_of(content[at : at + chunk]) for at in range(0, len(content), chunk)]
    metadata = FileSystemReader(directory).read_metadata()
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], dcp.metadata.TensorStorageMetadata):
            content = (directory / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                assert archive.testzip() is None, index


# --- every kind of state ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_size_bytes": 4096},
        {"chunk_size_bytes": 12 * KiB, "shard_size_bytes_max": 40 * KiB},
        {"single_file_per_rank": False},
    ],
    ids=["defaults", "tiny chunks", "many shards", "a file per item"],
)
def test_every_kind_of_state(save: Save, options: dict[str, Any], uri: str, local_root: Path) -> None:
    state = everything(1)
    save(uri, state, **options)
    assert read_back(uri, state) == []
    check_files(local_root, uri)
    count = len(shards(local_root, uri))
    assert count > 3 if "shard_size_bytes_max" in options or "single_file_per_rank" in options else count <= 2


def test_control_one_wrong_bit_is_detected(uri: str) -> None:
    state = everything(1)
    save_at_once(uri, state)
    state["big"].view(torch.uint8).reshape(-1)[12345] ^= 1
    assert len(read_back(uri, state)) == 2


def test_two_passes_over_the_same_state_give_the_same_bytes(file_uri: str, local_root: Path) -> None:
    """A copied save and one in place from the arena write the same file."""
    state = {"small": torch.randn(300), "big": torch.randn(300_000), "odd": torch.randn(7, 77_777)}
    for step, way in enumerate((save_at_once, save_in_background, save_staged_shared)):
        way(f"{file_uri}/step-{step}", state, chunk_size_bytes=1 * MiB)
    contents = [shards(local_root, f"{file_uri}/step-{step}")[0].read_bytes() for step in range(3)]
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_tensors_of_every_dtype_and_kind(save: Save, dtype: torch.dtype, uri: str) -> None:
    empty = torch.empty(0, 3, dtype=dtype)
    state = {"empty": empty, "other": random_bits(dtype, 3)}
    if dtype.is_complex:
        state |= {"conjugate": empty.conj(), "negative": empty.conj().imag}
    save(uri, state)
    assert read_back(uri, state) == []


def test_view_saves_only_its_own_bytes(save: Save, uri: str, local_root: Path) -> None:
    secret = torch.full((200_000,), 0x5EC2E7, dtype=torch.int32)
    secret[5000:5010] = torch.arange(10, dtype=torch.int32)
    state = {"view": secret[5000:5010], "rows": secret[5000:5010].reshape(2, 5).t()}
    save(uri, state)
    assert read_back(uri, state) == []
    content = b"".join(path.read_bytes() for path in shards(local_root, uri))
    assert len(content) < 8 * KiB
    assert (0x5EC2E7).to_bytes(4, "little") not in content


def test_gaps_hold_no_bytes_of_earlier_checkpoints(file_uri: str, local_root: Path) -> None:
    """The arena is reused: no bytes of an earlier, larger state remain between the items of a smaller one."""
    mark = b"\xde\xad\xbe\xef"
    full = {"all": torch.frombuffer(bytearray(mark * (1 * MiB)), dtype=torch.uint8)}
    for step in range(3):
        save_in_background(f"{file_uri}/step-{step}", full)
    sparse = {f"w{index}": torch.zeros(70_001, dtype=torch.uint8) for index in range(12)}
    save_in_background(f"{file_uri}/step-9", sparse)
    (path,) = shards(local_root, f"{file_uri}/step-9")
    assert mark in shards(local_root, f"{file_uri}/step-2")[0].read_bytes()
    assert mark not in path.read_bytes()


def test_tied_weights_and_parameters(save: Save, uri: str) -> None:
    weight = torch.nn.Parameter(torch.randn(400, 300))
    state = {"embedding": weight, "head": weight, "grad_of_nothing": torch.randn(3, requires_grad=True)}
    save(uri, state)
    assert read_back(uri, {key: value.detach() for key, value in state.items()}) == []


class Scaled(torch.Tensor):
    """A tensor subclass with attributes, which torch.save keeps."""

    scale: float


def test_tensor_subclass_saved_by_torch(save: Save, uri: str) -> None:
    """As with stock DCP, torch.save writes the item."""
    scaled = torch.randn(50, 40).as_subclass(Scaled)
    state: dict[str, Any] = {"scaled": scaled, "plain": torch.randn(100_000)}
    save(uri, state)
    target = blank({"scaled": scaled.as_subclass(torch.Tensor), "plain": state["plain"]})
    with torch.serialization.safe_globals([Scaled]):
        dcp.load(target, storage_reader=FileSystemReader(uri), no_dist=True)
    assert torch.equal(target["scaled"], scaled.as_subclass(torch.Tensor))
    assert torch.equal(target["plain"], state["plain"])


def test_objects_larger_than_a_chunk(save: Save, uri: str, local_root: Path) -> None:
    state = {"w": torch.randn(50_000), "blob": os.urandom(300_000), "more": list(range(50_000))}
    save(uri, state, chunk_size_bytes=8 * KiB, shard_size_bytes_max=250 * KiB)
    target: dict[str, Any] = {"w": torch.zeros(50_000), "blob": b"", "more": []}
    dcp.load(target, storage_reader=FileSystemReader(uri), no_dist=True)
    assert target["blob"] == state["blob"] and target["more"] == state["more"]
    assert torch.equal(target["w"], state["w"])
    check_files(local_root, uri)


def test_empty_state(save: Save, uri: str) -> None:
    save(uri, {})
    assert tierckpt.latest(uri) == uri


# --- the arena owns staged bytes ------------------------------------------------------------------------------------


def test_staged_memory_is_written_in_place(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An async save makes no second copy if the arena has huge pages, even with an empty tensor in the state."""
    seen: list[Shard] = []
    real = flush_module.flush

    def spy(shards: list[Shard], **options: Any) -> Any:
        seen.extend(shards)
        return real(shards, **options)

    monkeypatch.setattr("tierckpt.dcp.shard_delivery.flush", spy)
    state = {"a": torch.randn(5), "none": torch.empty(0), "b": torch.randn(50_000), "c": torch.randn(7), "n": 3}
    stager = tierckpt.TierStager()
    staged = stager.stage(state)
    save_at_once(uri, staged)
    image = seen[0].image
    assert image is not None and image.memory.huge, "transparent huge pages are off on this machine"
    assert read_back(uri, {key: value for key, value in state.items() if key != "n"} | {"n": 3}) == []


def test_one_staged_copy_saved_in_two_parts(file_uri: str) -> None:
    """Writing one part in place must not change the adjacent part."""
    state = {
        part: {f"{part}{index}": random_bits(torch.float32, 37) for index in range(5)} for part in ("model", "optim")
    }
    staged = tierckpt.TierStager().stage(state)
    for part in state:
        save_at_once(f"{file_uri}/{part}/step-1", staged[part])
    for part, tensors in state.items():
        assert read_back(f"{file_uri}/{part}/step-1", tensors) == []


@pytest.mark.parametrize("cap", [4 * KiB, 40 * KiB, 1 << 30])
def test_writer_and_stager_need_not_agree_on_shards(cap: int, uri: str) -> None:
    state = {f"w{index}": random_bits(torch.float32, 37 + 1000 * index) for index in range(20)}
    staged = tierckpt.TierStager(shard_size_bytes_max=100 * KiB).stage(state)
    save_at_once(uri, staged, shard_size_bytes_max=cap)
    assert read_back(uri, state) == []


@pytest.mark.parametrize("shared", [False, True])
def test_stock_writer_saves_a_tierckpt_staged_state(shared: bool, tmp_path: Path) -> None:
    state = everything(3)
    stager = tierckpt.TierStager(shared=shared)
    for step in range(3):
        writer = FileSystemWriter(tmp_path / f"step-{step}")
        dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True).result(60)
        target = blank(state)
        dcp.load(target, storage_reader=FileSystemReader(tmp_path / f"step-{step}"), no_dist=True)
        assert list(differences(state, target)) == []


# --- memory -------------------------------------------------------------------------------------------------------


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.slow
@pytest.mark.parametrize("way", [save_at_once, save_in_background], ids=["sync", "async"])
def test_fifty_saves_leave_memory_flat(way: Save, file_uri: str) -> None:
    """Steady state: no leaked slot (16 MiB each, 4096 faults), no new page faults."""
    state = {f"w{index}": torch.randn(1 * MiB) for index in range(4)}
    options = {"drain": False, "sync_files": False}
    both_slots = [tierckpt.TierStager().stage(state) for _ in range(2)]
    del both_slots
    for _ in range(4):
        way(f"{file_uri}/step-1", state, **options)
    before, faults = rss_bytes(), minor_faults()
    for _ in range(50):
        way(f"{file_uri}/step-1", state, **options)
    assert rss_bytes() - before < 12 * MiB
    assert (minor_faults() - faults) / 50 < 1000
