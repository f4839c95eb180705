"""Parts of tensors: bit-identical on every read path, with few extra bytes read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tierckpt
from tests.safetensors_files import bytes_of, encode, raw, tensor, write
from tests.states import same
from tierckpt.errors import ConfigError, StateMismatchError
from tierckpt.loading import fill
from tierckpt.loading.tensor_parts import Parts
from tierckpt.telemetry import BYTES, Metric, listen

KIB = 1024


@pytest.fixture
def bytes_read() -> Iterator[list[float]]:
    counted: list[float] = []

    def count(metric: Metric, value: float, labels: Any) -> None:
        if metric is BYTES and labels["direction"] == "read":
            counted.append(value)

    stop = listen(count)
    yield counted
    stop()


@pytest.fixture(params=["as it is", "tiny reads"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real sizes, and small ones that send small tensors through every read path."""
    if request.param == "tiny reads":
        monkeypatch.setattr(fill, "READ_BYTES", 16 * KIB)
        monkeypatch.setattr(fill, "DIRECT_BYTES_MIN", 6 * KIB)
        monkeypatch.setattr(fill, "RUN_BYTES_MIN", 2 * KIB)
        monkeypatch.setattr(fill, "GAP_BYTES_MAX", KIB)


DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn]


def some_tensors(generator: random.Random, count: int) -> dict[str, torch.Tensor]:
    found = {}
    for index in range(count):
        shape = [generator.choice([1, 2, 3, 7, 16, 61]) for _ in range(generator.randint(0, 4))]
        dtype = generator.choice(DTYPES)
        size_bytes = torch.Size(shape).numel() * dtype.itemsize
        found[f"t{index}"] = torch.frombuffer(bytearray(generator.randbytes(size_bytes)), dtype=dtype).reshape(shape)
    return found


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 3, 8])
def test_a_shard_equals_torch_chunk(world: int, dim: int, tmp_path: Path) -> None:
    tensors = some_tensors(random.Random(world * 10 + dim), 24)
    save_file(tensors, tmp_path / "m.safetensors")
    for rank in range(world):
        expected = {
            name: _expected(value, (rank, world, dim) if dim < value.dim() else None) for name, value in tensors.items()
        }
        assert same(tierckpt.load_safetensors(tmp_path, shard=(rank, world, dim)), expected)


def _some_part(generator: random.Random, shape: torch.Size) -> Any:
    kind = generator.randint(0, 3)
    if kind == 0 or not shape:
        return None
    if kind == 1:
        return (generator.randint(0, 2), 3, generator.randrange(len(shape)))

    def some_slice() -> slice:
        ends = [None, 0, 1, 5, 40, -1, -3]
        return slice(generator.choice(ends), generator.choice(ends))

    return some_slice() if kind == 2 else tuple(some_slice() for _ in range(generator.randint(1, len(shape))))


def _expected(value: torch.Tensor, part: Any) -> torch.Tensor:
    if part is None:
        return value
    if isinstance(part, tuple) and isinstance(part[0], int):
        chunks = value.chunk(part[1], part[2])
        return chunks[part[0]] if part[0] < len(chunks) else value.narrow(part[2], 0, 0)
    return value[part]


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("seed", range(6))
def test_a_plan_equals_slicing(seed: int, tmp_path: Path) -> None:
    generator = random.Random(seed)
    tensors = some_tensors(generator, 30)
    save_file(tensors, tmp_path / "m.safetensors")
    plan = {name: _some_part(generator, value.shape) for name, value in tensors.items()}
    expected = {name: _expected(value, plan[name]) for name, value in tensors.items()}
    assert same(tierckpt.load_safetensors(tmp_path, plan=plan), expected)
    assert same(tierckpt.load_safetensors(tmp_path, plan=plan.get), expected)
    assert same(dict(tierckpt.load_safetensors(tmp_path, plan=plan, lazy=True)), expected)
    assert same(dict(tierckpt.stream_safetensors(tmp_path, plan=plan, bytes_in_flight_max=4000)), expected)


@pytest.mark.usefixtures("sizes")
def test_misaligned_tensors(tmp_path: Path) -> None:
    data, fields, position = raw(200_000), {}, 0
    for index, (dtype, shape) in enumerate([("U8", [3]), ("F32", [40, 100]), ("U8", [1]), ("I64", [9]), ("F32", [])]):
        size_bytes = torch.Size(shape).numel() * {"U8": 1, "F32": 4, "I64": 8}[dtype]
        fields[f"t{index}"] = tensor(dtype, shape, position, position + size_bytes)
        position += size_bytes
    file = write(tmp_path / "odd.safetensors", encode(fields, data[:position], align=8))
    for name, value in tierckpt.load_safetensors(file).items():
        start, stop = fields[name]["data_offsets"]
        assert bytes_of(value) == data[start:stop], name
        assert value.data_ptr() % value.dtype.itemsize == 0
    half = tierckpt.load_safetensors(file, shard=(1, 2, 1))["t1"]
    start, stop = fields["t1"]["data_offsets"]
    whole = torch.frombuffer(bytearray(data[start:stop]), dtype=torch.float32).view(40, 100)
    assert same(half, whole[:, 50:].contiguous())


def test_a_row_shard_reads_few_extra_bytes(tmp_path: Path, bytes_read: list[float]) -> None:
    tensors = {f"w{index}": torch.randn(1024, 1024) for index in range(6)} | {"bias": torch.randn(1024)}
    save_file(tensors, tmp_path / "m.safetensors")
    loaded = tierckpt.load_safetensors(tmp_path, shard=(1, 4, 0))
    needed = sum(value.nbytes for value in loaded.values())
    assert needed == sum(value.nbytes for value in tensors.values()) // 4
    assert sum(bytes_read) <= 1.1 * needed
    bytes_read.clear()
    tierckpt.load_safetensors(tmp_path, names=["w3"])
    assert sum(bytes_read) <= 1.1 * tensors["w3"].nbytes
    bytes_read.clear()
    tierckpt.load_safetensors(tmp_path, shard=(1, 4, 1))  # control: columns need whole rows
    assert sum(bytes_read) > 3 * needed


def test_a_part_of_long_rows_does_not_read_whole_rows(tmp_path: Path, bytes_read: list[float]) -> None:
    experts = torch.randn(3, 1024, 1024)
    save_file({"experts": experts}, tmp_path / "m.safetensors")
    loaded = tierckpt.load_safetensors(tmp_path, shard=(2, 4, 1))["experts"]
    assert same(loaded, experts[:, 512:768].contiguous())
    assert sum(bytes_read) <= 1.1 * loaded.nbytes


@pytest.mark.parametrize("shard", [(0, 0, 0), (2, 2, 0), (-1, 2, 0), (0, 2, -1), (0, 2), "0/2", (0.0, 2, 0)])
def test_invalid_shards_are_rejected(shard: Any) -> None:
    with pytest.raises(ConfigError, match="shard"):
        Parts(shard)


@pytest.mark.parametrize(
    ("part", "error"),
    [
        (slice(0, 4, 2), ConfigError),
        ("half", ConfigError),
        ((0, 2, 5), StateMismatchError),
        ((slice(0), slice(0), slice(0)), StateMismatchError),
    ],
)
def test_a_mismatched_plan_names_the_tensor(part: Any, error: type[Exception], tmp_path: Path) -> None:
    save_file({"w": torch.ones(4, 4)}, tmp_path / "m.safetensors")
    with pytest.raises(error, match="'w'"):
        tierckpt.load_safetensors(tmp_path, plan={"w": part})
    with pytest.raises(ConfigError, match="not both"):
        tierckpt.load_safetensors(tmp_path, plan={"w": None}, shard=(0, 1, 0))


def test_selection_by_names_and_prefixes(tmp_path: Path) -> None:
    tensors = {"a.x": torch.ones(1), "a.y": torch.ones(2), "b.x": torch.ones(3)}
    save_file(tensors, tmp_path / "m.safetensors")
    assert tierckpt.load_safetensors(tmp_path, prefix="a.").keys() == {"a.x", "a.y"}
    assert tierckpt.load_safetensors(tmp_path, names=["b.x"]).keys() == {"b.x"}
    assert tierckpt.load_safetensors(tmp_path, names=lambda name: name.endswith("x")).keys() == {"a.x", "b.x"}
    assert tierckpt.load_safetensors(tmp_path, prefix="a.", names=lambda name: name == "b.x") == {}
    with pytest.raises(StateMismatchError, match=r"a\.z"):
        tierckpt.load_safetensors(tmp_path, names=["a.x", "a.z"])
    with pytest.raises(StateMismatchError, match=r"c\."):
        tierckpt.load_safetensors(tmp_path, prefix="c.")
