"""Metadata and items are decoded as data: everything that DCP writes, and nothing else (S1 to S8)."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import io
import itertools
import logging
import pickle
import struct
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import IO, Any, cast

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import tierckpt
from tests.compat.everything import everything
from tests.compat.extensions import Flipped
from tests.states import load, raises_ours, save, small_state
from tierckpt import TierStorageReader, TierStorageWriter
from tierckpt.config import Settings
from tierckpt.dcp import metadata_encoder, sealed_unpickler
from tierckpt.dcp.metadata_encoder import encode
from tierckpt.dcp.sealed_unpickler import Objects, load_metadata, load_tensor, metadata
from tierckpt.errors import ConfigError, IntegrityError, UnsafeCheckpointError
from tierckpt.format import pickle_machine as machine
from tierckpt.format.layout import local_dir, parse_uri

SIZE = torch.Size


def read(data: bytes, **options: Any) -> Metadata:
    return load_metadata(data, where="m", **options)


def small(**fields: Any) -> Metadata:
    """One tensor of two chunks, one object."""
    properties = TensorProperties(dtype=torch.bfloat16)
    chunks = [ChunkStorageMetadata(SIZE([row, 0]), SIZE([2, 3])) for row in (0, 2)]
    entries: dict[str, Any] = {
        "w": TensorStorageMetadata(properties, SIZE([4, 3]), chunks),
        "o": BytesStorageMetadata(),
    }
    places = {
        MetadataIndex("w", chunk.offsets, i): _StorageInfo(f"__{i}_0.distcp", 64 * i, 12)
        for i, chunk in enumerate(chunks)
    }
    places[MetadataIndex("o")] = _StorageInfo("__0_0.distcp", 200, 9)
    whole = {
        "planner_data": {"w": ("w",), "o": ("o", 0)},
        "storage_data": places,
        "storage_meta": StorageMeta("/a", "b"),
    }
    return Metadata(entries, **{**whole, **fields})


# --- S4: metadata written by DCP decodes as with pickle ---------------------------------------------------------


@pytest.mark.parametrize("protocol", machine.PROTOCOLS)
def test_every_pickle_protocol(protocol: int) -> None:
    stream = io.BytesIO()
    # private: Python's pickler that is not written in C
    pickle._Pickler(stream, protocol).dump(small())  # type: ignore[attr-defined]
    for data in (pickle.dumps(small(), protocol), stream.getvalue()):
        assert read(data) == pickle.loads(data) == small()


def test_metadata_of_stock_dcp(tmp_path: Path) -> None:
    state = {**everything(), **small_state(), "list": [torch.ones(2), {"a": [torch.ones(1)]}]}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    data = (tmp_path / "c/.metadata").read_bytes()
    assert read(data) == pickle.loads(data)
    assert isinstance(read(data).storage_meta.checkpoint_id, Path)  # type: ignore[union-attr]


def test_equal_objects_are_written_and_read_once(file_uri: str, local_root: Path) -> None:
    state = {f"layer.{number}": torch.full((4, 3), number) for number in range(50)}
    save(f"{file_uri}/step-1", state)
    data = (local_dir(local_root, parse_uri(file_uri)) / "step-1/.metadata").read_bytes()
    for found in (read(data), pickle.loads(data)):
        tensors = list(found.state_dict_metadata.values())
        assert [len(tensor.chunks) for tensor in tensors] == [1] * 50
        sizes = [(tensor.size, chunk.sizes, chunk.offsets) for tensor in tensors for chunk in tensor.chunks]
        shared = [*zip(*sizes, strict=True), [tensor.chunks[0] for tensor in tensors], [t.properties for t in tensors]]
        assert [len(set(map(id, same))) for same in shared] == [1, 1, 1, 1, 1]
        assert all(one.chunks is not other.chunks for one, other in itertools.combinations(tensors, 2))
    assert len(data) < 200 * len(state)


# --- tierckpt's encoding: objects as calls of their classes -------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: None,
        lambda meta: setattr(meta, "storage_data", None),
        lambda meta: setattr(meta, "planner_data", None),
        lambda meta: setattr(next(iter(meta.storage_data.values())), "transform_descriptors", ["zstd"]),
        lambda meta: meta.state_dict_metadata.update(twice=meta.state_dict_metadata["w"]),
    ],
    ids=["whole", "no places", "no paths", "transforms", "one tensor under two names"],
)
def test_objects_written_as_calls(change: Callable[[Metadata], Any]) -> None:
    meta = small()
    change(meta)
    data = encode(meta)
    found = read(data)
    assert found == pickle.loads(data) == meta
    assert {type(index) for index in found.storage_data or {}} <= {MetadataIndex}
    assert all(
        hash(index) == hash(same) for index, same in zip(found.storage_data or (), meta.storage_data or (), strict=True)
    )


def test_subclasses_of_dcp_classes_are_not_encoded_as_the_base() -> None:
    @dataclasses.dataclass
    class Mine(_StorageInfo):
        more: int = 0

    meta = small(storage_data={MetadataIndex("w"): Mine("f", 0, 12, more=3)})
    with pytest.raises((pickle.PicklingError, AttributeError), match="Mine"):
        encode(meta)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda meta: place(meta, relative_path="../f"), "leads elsewhere"),
        (lambda meta: place(meta, relative_path=7), "a path is not a string"),
        (lambda meta: place(meta, offset=-1), "number from 0"),
        (lambda meta: place(meta, length=True), "number from 0"),
        (lambda meta: place(meta, length=3), "needs 12 bytes and has 3"),
        (lambda meta: place(meta, transform_descriptors=[7]), "not made of strings"),
        (lambda meta: vars(next(iter(meta.storage_data))).update(offset=(0, 0)), "no size"),
        (lambda meta: vars(next(iter(meta.storage_data))).update(index="0"), "an index"),
        (lambda meta: vars(next(iter(meta.storage_data))).update(fqn=b"w"), "a name"),
        (lambda meta: tensor(meta, chunks=()), "no list of chunks"),
        (lambda meta: tensor(meta, chunks=[]), "do not fill"),
        (lambda meta: tensor(meta, size=[4, 3]), "a size of w is none"),
        (lambda meta: tensor(meta, size=torch.Size([4, 4])), "do not fill"),
        (lambda meta: tensor(meta, size=torch.Size([3, 3])), "is outside"),
        (lambda meta: tensor(meta, properties=None), "the properties of a tensor"),
        (lambda meta: meta.state_dict_metadata.update(w=MetadataIndex("w")), "a TensorStorageMetadata belongs"),
        (lambda meta: meta.planner_data.update(w=meta.state_dict_metadata["w"]), "more than plain data"),
        (lambda meta: meta.planner_data.update({MetadataIndex("w"): 1}), "neither a string nor an integer"),
        (lambda meta: meta.state_dict_metadata.update({MetadataIndex("w"): meta.state_dict_metadata["w"]}), "a name"),
    ],
)
def test_calls_are_checked_like_states(change: Callable[[Metadata], Any], match: str) -> None:
    meta = small()
    change(meta)
    stream = io.BytesIO()
    metadata_encoder._MetadataPickler(stream).dump(meta)  # private: `encode` rejects such metadata
    with pytest.raises(UnsafeCheckpointError, match=match):
        read(stream.getvalue())


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("dumps", [pickle.dumps, encode])
def test_the_largest_of_chunks_with_one_offset_counts(dumps: Callable[[Metadata], bytes], order: int) -> None:
    chunks = [ChunkStorageMetadata(SIZE([0]), SIZE([count])) for count in (1 << 40, 1)][::order]
    entry = TensorStorageMetadata(TensorProperties(), SIZE([1 << 40]), chunks)
    meta = Metadata({"w": entry}, storage_data={MetadataIndex("w", SIZE([0])): _StorageInfo("f", 0, 12)})
    with pytest.raises(UnsafeCheckpointError, match="needs 4398046511104 bytes and has 12"):
        read(dumps(meta))


def place(meta: Metadata, **fields: Any) -> None:
    vars(next(iter(meta.storage_data.values()))).update(fields)  # type: ignore[union-attr]


def tensor(meta: Metadata, **fields: Any) -> None:
    vars(meta.state_dict_metadata["w"]).update(fields)


def test_work_is_bounded_for_repeated_tensor_names() -> None:
    chunks = [ChunkStorageMetadata(SIZE([0]), SIZE([0]))] * 2000
    one = TensorStorageMetadata(TensorProperties(), SIZE([0]), chunks)
    meta = Metadata({f"{number}": one for number in range(2000)})
    with pytest.raises(UnsafeCheckpointError, match="over and over"):
        read(encode(meta))


def sizes_of_one_hash(count: int) -> list[torch.Size]:
    """Pairs of numbers whose tuples have one hash in CPython (xxHash without a seed)."""
    one, two, five, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, (1 << 64) - 1

    def turned(lane: int) -> int:
        lane &= mask
        return ((lane << 31 | lane >> 33) * one) & mask

    wanted, found, first = turned(five), [], 0
    while len(found) < count:
        second = (wanted - turned(five + first * two)) * pow(two, -1, 1 << 64) & mask
        if second < 1 << 60:
            found.append(SIZE([first, second]))
        first += 1
    assert len({hash(size) for size in found}) == 1
    return found


@pytest.mark.parametrize("dumps", [pickle.dumps, encode])
def test_keys_with_crafted_hash_collisions_are_rejected(dumps: Callable[[Metadata], bytes]) -> None:
    few, many = (
        small(storage_data={MetadataIndex("w", size): _StorageInfo("f", 0, 12) for size in sizes_of_one_hash(count)})
        for count in (metadata.HASH_COLLISIONS_MAX, metadata.HASH_COLLISIONS_MAX + 2)
    )
    assert read(dumps(few)) == few
    with pytest.raises(UnsafeCheckpointError, match="share a hash"):
        read(dumps(many))


def test_more_than_256_memo_entries() -> None:
    entries = {f"m.{i}": dataclasses.replace(small().state_dict_metadata["w"]) for i in range(500)}
    big = small(planner_data={name: tuple(name.split(".")) for name in entries})
    big.state_dict_metadata = {**entries, "x" * 300: BytesStorageMetadata()}
    for protocol in machine.PROTOCOLS:
        assert read(pickle.dumps(big, protocol)) == big


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last, torch.preserve_format])
@pytest.mark.parametrize("kind", [TensorProperties, OldTensorProperties])
def test_every_memory_format_and_the_properties_of_old_torch(memory_format: torch.memory_format, kind: Any) -> None:
    meta = small()
    properties = kind(torch.int8, torch.sparse_coo, True, memory_format, True)
    meta.state_dict_metadata["w"].properties = properties  # type: ignore[union-attr]
    found = read(pickle.dumps(meta)).state_dict_metadata["w"].properties  # type: ignore[union-attr]
    assert found == properties
    assert type(found) is kind


def test_every_dtype_and_layout() -> None:
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        for layout in metadata.LAYOUTS.values():
            meta = small(storage_data=None)
            meta.state_dict_metadata["w"].properties = TensorProperties(dtype, layout)  # type: ignore[union-attr]
            assert read(pickle.dumps(meta)) == meta


@pytest.mark.parametrize("module", [b"builtins", b"__builtin__"])
def test_enums_pickled_by_name(module: bytes) -> None:
    """Python 3.11.3 and older pickle a member as ``getattr(its class, its name)``; protocol 2 names ``__builtin__``."""
    data = pickle.dumps(small(), 2)
    if b"getattr" in data:  # depends on the Python version
        assert read(data.replace(b"__builtin__", module)) == small()
        return
    value = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    at = data.index(value) + len(value)
    memo, rest = data[at : at + 2], data[at + 2 :]
    assert memo[:1] == b"q" and rest.startswith(b"K\0\x85q")
    name = b"X" + struct.pack("<I", 23) + b"TORCH_CONTIGUOUS_FORMAT"
    by_name = data[: at - len(value)] + b"c" + module + b"\ngetattr\n" + value + memo + name + b"\x86" + rest[3:]
    assert pickle.loads(by_name) == read(by_name) == small()


@pytest.mark.parametrize(
    "fields",
    [
        {"storage_meta": None},
        {"storage_data": None},
        {"planner_data": None},
        {"version": "1.0.0"},
        {"storage_meta": StorageMeta(Path("/run/step-1"), "s", "l", ["a", "b"])},
        {"planner_data": {"a": [1, -2, 1 << 40, -(1 << 62), 1.5, None, True, False, b"b", (), [], {}, {3: SIZE([1])}]}},
        {"planner_data": {"a": (1, 2, 3, 4), "b": "ü" * 300, "c": b"\xff" * 300, "d": torch.float8_e5m2}},
        {"planner_data": [("x", 3)]},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_fields_of_every_kind(fields: dict[str, Any]) -> None:
    for protocol in machine.PROTOCOLS[1:]:  # protocol 2 writes bytes as a codec call
        assert read(pickle.dumps(small(**fields), protocol)) == small(**fields)


def test_metadata_of_old_releases_lacks_fields() -> None:
    old = small()
    for name in ("storage_meta", "version", "planner_data"):
        del vars(old)[name]
    assert read(pickle.dumps(old)) == small(storage_meta=None, planner_data=None)
    young = small()
    del vars(young.storage_meta)["modules"]
    assert read(pickle.dumps(young)).storage_meta.modules == []  # type: ignore[union-attr]


def test_transforms_and_empty_shards() -> None:
    meta = small()
    meta.storage_data[MetadataIndex("o")].transform_descriptors = ["zstd"]
    meta.storage_data[MetadataIndex("w", [0, 0])] = _StorageInfo("a", 0, 1, ["zstd"])  # compressed: any length
    meta.state_dict_metadata["w"].chunks.append(ChunkStorageMetadata(SIZE([9, 0]), SIZE([0, 3])))  # type: ignore[union-attr]
    assert read(pickle.dumps(meta)) == meta


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_of_other_python_versions_and_systems(module: str) -> None:
    data = pickle.dumps(small(storage_meta=StorageMeta(Path("/a/b"))), 3)
    here = type(Path()).__module__.encode()
    for name, expected in (("PosixPath", Path("/a/b")), ("WindowsPath", PureWindowsPath("/", "a", "b"))):
        changed = data.replace(b"c" + here + b"\nPosixPath\n", f"c{module}\n{name}\n".encode())
        assert read(changed).storage_meta.checkpoint_id == expected  # type: ignore[union-attr]


def test_metadata_of_one_rank_with_its_own_chunks() -> None:
    meta = small()
    meta.state_dict_metadata["w"].chunks.pop()  # type: ignore[union-attr]
    assert read(pickle.dumps(meta), partial=True) == meta
    with pytest.raises(UnsafeCheckpointError, match="do not fill"):
        read(pickle.dumps(meta))


def test_every_field_of_this_torch_is_known() -> None:
    """A later torch may add a field: it is decoded as plain data until this module checks it by name."""
    properties = {"dtype", "layout", "requires_grad", "memory_format", "pin_memory", "strides"}
    known = {**metadata.FIELDS, TensorProperties: properties, OldTensorProperties: properties}
    for kind, names in known.items():
        assert {field.name for field in dataclasses.fields(kind)} <= names


HAS_STRIDES = "strides" in {field.name for field in dataclasses.fields(TensorProperties)}


def with_strides(strides: Any, *further: Any, size: tuple[int, ...] = (4, 3)) -> bytes:
    """The format of torch 2.15, from any torch: the state of the properties has the strides after the other fields."""

    class Later(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if type(value) is not TensorProperties:
                return NotImplemented
            state = value.__getstate__()[:5]  # type: ignore[no-untyped-call]
            return copyreg.__newobj__, (TensorProperties,), (*state, strides, *further)  # type: ignore[attr-defined]

    meta = small(storage_data=None)
    tensor(meta, size=SIZE(size), chunks=[ChunkStorageMetadata(SIZE([0] * len(size)), SIZE(size))])
    stream = io.BytesIO()
    Later(stream).dump(meta)
    return stream.getvalue()


@pytest.mark.parametrize("strides", [None, (3, 1), (1, 4), (0, 1)])
def test_strides_are_read_by_any_torch(strides: tuple[int, ...] | None) -> None:
    found = read(with_strides(strides)).state_dict_metadata["w"].properties  # type: ignore[union-attr]
    assert found == TensorProperties(dtype=torch.bfloat16, **({"strides": strides} if HAS_STRIDES else {}))
    assert getattr(found, "strides", strides) == strides


@pytest.mark.skipif(not HAS_STRIDES, reason="this torch has no strides: they are plain data that nothing relies on")
@pytest.mark.parametrize(
    ("strides", "match"),
    [
        ((1,), "2 dimensions and 1 strides"),
        ((-1, 1), "strides of a tensor are not numbers"),
        ((True, 1), "strides of a tensor are not numbers"),
        ((1.0, 1), "strides of a tensor are not numbers"),
        ((1 << 60, 1), "strides of a tensor are not numbers"),
        ((1,) * 65, "strides of a tensor are not numbers"),
        ("31", "strides of a tensor are not numbers"),
    ],
)
def test_strides_are_checked(strides: Any, match: str) -> None:
    with pytest.raises(UnsafeCheckpointError, match=match):
        read(with_strides(strides))


@pytest.mark.parametrize("value", [[3, 1], {}, ((1,),), (1,) * 65])
def test_fields_after_the_properties_must_be_plain_and_short(value: Any) -> None:
    with pytest.raises(UnsafeCheckpointError, match=r"not plain data|not numbers"):
        read(with_strides(value))
    with pytest.raises(UnsafeCheckpointError, match=r"a field \(7\) that torch"):
        read(with_strides(None, value))


# --- rejections (more cases: the corpus in tests/fault) --------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\x80\x01N.", "protocol 2 to 5"),
        (b"\x80\x04NN.", "left over"),
        (b"\x80\x04(N.", "left over"),
        (b"\x80\x04h\x05.", "truncated"),
        (b"\x80\x04j\x05\0\0\0.", "truncated"),
        (b"\x80\x04K\x01K\x02\x93.", "not a string"),
        (b"\x80\x04cos\n", "ValueError"),
        (b"\x80\x04\x8c\x01\xff.", "UnicodeDecodeError"),
        (b"\x80\x04](K\x01u.", "puts items into list"),
        (b"\x80\x04}(K\x01u.", "puts items into dict"),
        (b"\x80\x04}}.", "left over"),
        (b"\x80\x04N)R.", "calls NoneType"),
        (b"\x80\x04N)\x81.", "makes an instance of NoneType"),
        (b"\x80\x04NNb.", "sets the state of NoneType"),
        (
            b"\x80\x04ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n)R.",
            "calls Class ChunkStorageMetadata",
        ),
        (b"\x80\x04ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n)R.", "TypeError"),
        (b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadataIndex\nNNN\x87\x94R\x94.", "a name"),
        (b"\x80\x04NNN\x87\x94R\x94.", "truncated"),
        (b"\x80\x04NNNN\x87\x94R\x94.", "calls NoneType"),
        (b"\x80\x04ctorch\nSize\nN\x85R.", "numbers from 0"),
        (b"\x80\x04ctorch\nSize\n)R.", "TypeError"),
        (b"\x80\x04N.", "a Metadata belongs"),
        (b"\x80\x04ctorch.serialization\n_get_layout\n})\x86R.", "TypeError"),
        (b"\x80\x04ctorch.serialization\n_get_layout\n}\x85R.", "a layout"),
        (b"\x80\x04cbuiltins\ngetattr\nNN\x86R.", "getattr"),
    ],
    ids=str,
)
def test_invalid_pickle_programs(data: bytes, match: str) -> None:
    with pytest.raises(UnsafeCheckpointError, match=match) as caught:
        read(data)
    assert caught.value.exit_code == 5
    assert caught.value.context["file"] == "m"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"planner_data": {"a": frozenset({1})}}, "opcode|refers to"),
        ({"planner_data": {"a": OrderedDict()}}, "collections.OrderedDict"),
        ({"planner_data": {"a": Path("/x")}}, "more than plain data"),
        ({"storage_meta": "x"}, "a StorageMeta belongs"),
        ({"storage_meta": StorageMeta("a", modules=[1])}, "not made of strings"),  # type: ignore[list-item]
        ({"storage_meta": StorageMeta("a", modules="x")}, "modules is not a list"),  # type: ignore[arg-type]
        ({"storage_meta": StorageMeta("a", save_id=3)}, "save_id"),  # type: ignore[arg-type]
        ({"storage_data": {MetadataIndex("a"): _StorageInfo("x", 1.5, 1)}}, "number from 0"),  # type: ignore[arg-type]
        ({"storage_data": {MetadataIndex(7): _StorageInfo("x", 1, 1)}}, "a name"),  # type: ignore[arg-type]
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_fields(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsafeCheckpointError, match=match):
        read(pickle.dumps(small(**fields)))


def test_oversized_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(small())
    monkeypatch.setattr(metadata, "METADATA_BYTES_MAX", len(data))
    read(data)
    monkeypatch.setattr(metadata, "METADATA_BYTES_MAX", len(data) - 1)
    with pytest.raises(UnsafeCheckpointError, match="more than any"):
        read(data)


def test_only_unknown_globals_have_the_trust_hint() -> None:
    with pytest.raises(UnsafeCheckpointError) as caught:
        read(b"\x80\x04cmegatron.core\nMCoreMetadata\n.")
    assert "trust_pickle=True" in caught.value.hint
    assert caught.value.context["wanted"] == "megatron.core.MCoreMetadata"
    with pytest.raises(UnsafeCheckpointError) as caught:
        read(b"\x80\x04N.")
    assert "trust_pickle" not in caught.value.hint


def test_an_unknown_global_of_torch_has_the_hint_of_a_newer_torch() -> None:
    with pytest.raises(UnsafeCheckpointError) as caught:
        read(b"\x80\x04ctorch.serialization\n_new_helper\n.")
    assert "PyTorch newer than" in caught.value.hint and "trust_pickle" not in caught.value.hint


@pytest.mark.parametrize("dumps", [pickle.dumps, encode])
def test_truncation_at_every_byte_is_refused(dumps: Callable[[Metadata], bytes]) -> None:
    data = dumps(small())
    for length in range(len(data)):
        with pytest.raises(UnsafeCheckpointError):
            read(data[:length])


# --- S7, S8: items ------------------------------------------------------------------------------------------------


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def archive(data: bytes) -> bytes:
    """An item with this pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        made.writestr("archive/data.pkl", data)
        made.writestr("archive/version", "3\n")
    return stream.getvalue()


def test_a_bytesio_is_data() -> None:
    """Trainers often keep counters in a BytesIO."""
    before = set(torch.serialization.get_safe_globals())
    made = Objects().inert(saved(io.BytesIO(b"abc")), "x")
    assert torch.load(io.BytesIO(made), weights_only=False).getvalue() == b"abc"
    assert set(torch.serialization.get_safe_globals()) == before
    with torch.serialization.safe_globals([io.BytesIO]):
        Objects().inert(saved(io.BytesIO(b"abc")), "x")
        assert io.BytesIO in torch.serialization.get_safe_globals()  # the user's registration stays


SIMPLE = {
    "a number": 0.1,
    "texts": [f"layers.{number}.weight" for number in range(3)] * 2,
    "nested": {"a": [1, -2, (3, None, True)], "b": {"c": 1 << 40, 7: ""}},
    "itself": [[]],
    "a wide number": 1 << 70,
    "a tuple as a key": {(1, 2): 3},
    "bytes": b"abc",
    "ordered": OrderedDict(a=1),
}


@pytest.mark.parametrize("name", SIMPLE)
def test_plain_values(name: str) -> None:
    made = torch.load(io.BytesIO(Objects().inert(saved(SIMPLE[name]), name)), weights_only=True)
    assert (made, type(made)) == (SIMPLE[name], type(SIMPLE[name]))


class Mine:
    """A user's class."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mine) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


def test_user_classes_must_be_registered_or_trusted(file_uri: str, caplog: pytest.LogCaptureFixture) -> None:
    uri, state = f"{file_uri}/step-1", {"mine": Mine(3), "weight": torch.ones(3)}
    save(uri, state)
    with pytest.raises(UnsafeCheckpointError, match=r"mine is refused: it needs .*Mine") as caught:
        load(uri, state)
    context = caught.value.context
    assert (context["tensor"], context["checkpoint"], context["tier"]) == ("mine", uri, "local")
    assert context["file"].endswith(".distcp")
    assert "torch.serialization.add_safe_globals" in caught.value.hint and "trust_pickle=True" in caught.value.hint
    with torch.serialization.safe_globals([Mine]):
        assert load(uri, state)["mine"] == Mine(3)
    with caplog.at_level(logging.WARNING, "tierckpt"):
        for _ in range(2):
            assert load(uri, state, trust_pickle=True)["mine"] == Mine(3)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("tierckpt")]
    assert len([text for text in said if "is read with trust" in text]) == 1


def test_the_hint_does_not_suggest_to_register_functions() -> None:
    with pytest.raises(UnsafeCheckpointError) as caught:
        Objects().inert(saved(eval), "x")
    assert "add_safe_globals" not in caught.value.hint
    with pytest.raises(UnsafeCheckpointError) as caught:
        Objects().inert(saved(frozenset({1})), "x")
    assert "add_safe_globals([frozenset])" in caught.value.hint


def test_a_non_tensor_in_place_of_a_tensor() -> None:
    with pytest.raises(UnsafeCheckpointError, match="w is refused: it has a dict where"):
        sealed_unpickler.load_tensor(io.BytesIO(saved({})), "w")
    with pytest.raises(UnsafeCheckpointError, match="cannot read it"):
        sealed_unpickler.load_tensor(io.BytesIO(b""), "w")


def test_file_errors_pass_through() -> None:
    class Broken(io.BytesIO):
        def read(self, *_: Any) -> bytes:
            raise IntegrityError("no good copy")

        readinto = seek = tell = read  # type: ignore[assignment]

    with pytest.raises(IntegrityError, match="no good copy"):
        sealed_unpickler.load_tensor(Broken(b"x"), "w")


# --- the reader ---------------------------------------------------------------------------------------------------


def stock(directory: Path, change: Any) -> str:
    """A checkpoint of stock DCP with changed metadata."""
    dcp.save({"w": torch.ones(4, 4)}, checkpoint_id=directory, no_dist=True)
    path = directory / ".metadata"
    meta = pickle.loads(path.read_bytes())
    change(meta)
    path.write_bytes(pickle.dumps(meta))
    return str(directory)


def test_an_item_without_a_place_in_the_metadata(tmp_path: Path) -> None:
    uri = stock(tmp_path / "c", lambda meta: meta.storage_data.clear())
    with pytest.raises(IntegrityError, match="nothing about where w is"):
        load(uri, {"w": torch.ones(4, 4)})


def test_a_tensor_smaller_than_its_metadata(tmp_path: Path) -> None:
    def grow(meta: Metadata) -> None:
        entry: Any = meta.state_dict_metadata["w"]
        entry.size = entry.chunks[0].sizes = SIZE([4, 5])

    with pytest.raises(IntegrityError, match="less than its metadata says"):
        load(stock(tmp_path / "c", grow), {"w": torch.ones(4, 5)})


def test_unreadable_metadata_with_trust(tmp_path: Path) -> None:
    uri = stock(tmp_path / "c", lambda meta: None)
    (tmp_path / "c/.metadata").write_bytes(b"nothing of the kind")
    with pytest.raises(IntegrityError, match="cannot be unpickled"), raises_ours():
        dcp.load({"w": torch.ones(1)}, storage_reader=tierckpt.TierStorageReader(uri, trust_pickle=True), no_dist=True)


def test_checkpointer_trust_applies_to_restore(file_uri: str) -> None:
    state: dict[str, Any] = {"mine": Mine(3), "weight": torch.ones(3)}
    save(f"{file_uri}/step-1", state)
    checkpointer, found = tierckpt.Checkpointer(file_uri), {"mine": Mine(0), "weight": torch.zeros(3)}
    with pytest.raises(UnsafeCheckpointError):
        checkpointer.restore(found)
    assert checkpointer.restore(found, trust_pickle=True) == 1
    assert found["mine"] == Mine(3)


def test_trust_is_no_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="trust_pickle"):
        Settings.load(trust_pickle=True)
    monkeypatch.setenv("TIERCKPT_TRUST_PICKLE", "true")
    assert tierckpt.TierStorageReader(tmp_path / "run/step-1").trust_pickle is False
    assert "TIERCKPT_TRUST_PICKLE is not a setting and is ignored" in caplog.text
    monkeypatch.delenv("TIERCKPT_TRUST_PICKLE")
    monkeypatch.chdir(tmp_path)
    Path("tierckpt.toml").write_text("trust_pickle = true\n")
    with pytest.raises(ConfigError, match=r"tierckpt\.toml"):
        Settings.load()


# --- saves of Checkpointer ----------------------------------------------------------------------------------------


def test_a_save_warns_of_values_that_restore_rejects(file_uri: str, caplog: pytest.LogCaptureFixture) -> None:
    state = {
        "loader": {"position": np.int64(3), "seen": (2, Mine(4)), "stream": io.BytesIO(b"a")},
        "fine": [torch.ones(1), {"a": 1.5, "b": None}, torch.Size([1])],
        "wide": 1 << 5000,
        "model": torch.nn.Linear(1, 1).state_dict(),
    }
    with caplog.at_level(logging.WARNING, "tierckpt"):
        for _ in range(2):
            dcp.save(state, storage_writer=TierStorageWriter(file_uri))
    told = [record.getMessage() for record in caplog.records if "will refuse it" in record.getMessage()]
    assert len(told) == 3, told
    assert any(text.startswith("wide") for text in told)
    assert any("loader.position" in text and "numpy" in text for text in told)
    assert any("loader.seen" in text and "Mine" in text for text in told)


def test_integers_of_up_to_255_bytes() -> None:
    value = [1 << 2038, -(1 << 2038), {"nested": ([1 << 2038, "x"], None)}]
    assert torch.load(io.BytesIO(Objects().inert(saved(value), "x")), weights_only=True) == value
    with pytest.raises(UnsafeCheckpointError):
        Objects().inert(saved(1 << 2040), "x")


def test_a_wide_integer_is_no_way_to_an_unpickler_that_recurses() -> None:
    """A deep tuple as a key crashes Python's own unpickler, as its hash recurses in C."""
    wide = b"\x8b" + struct.pack("<i", 800) + bytes(799) + b"\1" + b"0"
    with pytest.raises(UnsafeCheckpointError):
        Objects().inert(archive(b"\x80\x02]" + wide + b"})" + b"\x85" * 1_000_000 + b"K\1s."), "x")


def test_names_with_a_lone_surrogate(file_uri: str) -> None:
    state = {"a\ud800b": torch.arange(3.0), "x" * 300 + "\udfff": torch.ones(1), "o\ud801": "text"}
    dcp.save(dict(state), storage_writer=TierStorageWriter(file_uri))
    loaded: dict[str, Any] = {name: torch.zeros_like(value) if name[0] != "o" else "" for name, value in state.items()}
    dcp.load(loaded, storage_reader=TierStorageReader(file_uri))
    assert all(torch.equal(loaded[name], value) for name, value in state.items() if name[0] != "o")
    assert loaded["o\ud801"] == "text"


def quantized(scale: float) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.arange(4.0), scale, 0, torch.qint8)


def test_quantized_tensors_of_stock_dcp_load_only_with_equal_scales(tmp_path: Path) -> None:
    dcp.save({"w": quantized(0.5)}, checkpoint_id=tmp_path / "x")
    loaded = {"w": torch.quantize_per_tensor(torch.zeros(4), 0.5, 0, torch.qint8)}
    dcp.load(loaded, storage_reader=TierStorageReader(str(tmp_path / "x")))
    assert torch.equal(loaded["w"].int_repr(), quantized(0.5).int_repr())
    for other in (quantized(0.25), torch.zeros(4)):
        with pytest.raises(CheckpointException, match="another scale"):
            dcp.load({"w": other}, storage_reader=TierStorageReader(str(tmp_path / "x")))


# --- small input that would use much memory or time ------------------------------------------------------------------


def program(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


META = "torch.distributed.checkpoint.metadata"
SIZED = b"t\x94" + named("torch", "Size") + b"\x94"


def sizes_over_and_over(count: int, dimensions: int) -> bytes:
    """One list of numbers, and as many sizes made of it as fit."""
    return program(b"(", b"K\x01" * dimensions, SIZED, b"(", b"h\x01h\x00\x85R" * count, b"t")


def keys_of_one_size(count: int, dimensions: int) -> bytes:
    keys = (b"h\x03\x8c\x06%06dh\x02N\x87RK\x00" % number for number in range(count))
    size = b"h\x00\x85R\x94" + named(META, "MetadataIndex") + b"\x94"
    return program(b"(", b"K\x01" * dimensions, SIZED, size, b"}(", *keys, b"u")


def entries_of_one_size(count: int, dimensions: int) -> bytes:
    entries = (b"\x8c\x06%06dh\x03Nh\x02]\x87R" % number for number in range(count))
    size = b"h\x00\x85R\x94" + named(META, "TensorStorageMetadata") + b"\x94"
    head = named(META, "Metadata") + b")\x81}\x8c\x13state_dict_metadata}("
    return program(b"(", b"K\x01" * dimensions, SIZED, size, head, *entries, b"usb")


def paths_over_and_over(count: int, parts: int) -> bytes:
    return program(
        b"(", b"\x8c\x01a" * parts, b"t\x94", named("pathlib", "PosixPath"), b"\x94(", b"h\x01h\x00R" * count, b"t"
    )


def a_long_path(count: int, _: int) -> bytes:
    head = named(META, "Metadata") + b")\x81}(\x8c\x13state_dict_metadata}\x8c\x0cplanner_data}\x8c\x01x("
    return program(head, b"\x8c\x01x", b"K\x01" * count, b"tsub")


def long_texts_that_are_equal(count: int, length: int) -> bytes:
    text = b"X" + length.to_bytes(4, "little") + b"a" * length + b"\x94"
    return program(text, text, b"}(", b"h\x00K\x00h\x01K\x00" * count, b"u")


ATTACKS = [
    sizes_over_and_over,
    keys_of_one_size,
    entries_of_one_size,
    paths_over_and_over,
    a_long_path,
    long_texts_that_are_equal,
]


def seconds_to_read(data: bytes) -> float:
    begun = time.thread_time()
    with contextlib.suppress(UnsafeCheckpointError):
        read(data)
    return time.thread_time() - begun


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("dimensions", [64, None])
def test_decoding_time_is_linear_in_size(attack: Callable[[int, int], bytes], dimensions: int | None) -> None:
    """Four times the size takes about four times as long (a quadratic decoder: sixteen). Best of several tries."""
    short, long = (attack(count, dimensions or count) for count in (3_000, 12_000))
    tries: list[float] = []
    while not tries or (min(tries) >= 10 and len(tries) < 8):
        tries.append(seconds_to_read(long) / (seconds_to_read(short) + 0.0002))
    assert min(tries) < 10, tries


def deflated(tensor: torch.Tensor) -> bytes:
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(tensor, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        for record in source.infolist():
            made.writestr(record.filename, source.read(record))
    return packed.getvalue()


def test_compressed_items_are_rejected_before_decompression() -> None:
    data = deflated(torch.zeros(16 << 20, dtype=torch.uint8))
    assert len(data) < 1 << 18
    for unpack in (lambda: load_tensor(io.BytesIO(data), "w"), lambda: Objects().inert(data, "w")):
        with pytest.raises(UnsafeCheckpointError, match=r"w is refused: 1677\d+ bytes would come of its"):
            unpack()
    small = deflated(torch.arange(4.0))  # compressed, but small
    assert torch.equal(load_tensor(io.BytesIO(small), "w"), torch.arange(4.0))


@pytest.mark.parametrize("kind", ["builtins bytearray", "torch Tensor"])
def test_lengths_instead_of_data_are_rejected(kind: str) -> None:
    data = archive(b"\x80\x02c" + kind.replace(" ", "\n").encode() + b"\nJ\0\0\0\x10\x85R.")
    with pytest.raises(UnsafeCheckpointError, match="much more would come of its"):
        Objects().inert(data, "x")


class Endless(Flipped):
    """A stream extension whose output exceeds its input, like a decompressor; here it is endless."""

    @staticmethod
    def from_descriptor(version: str) -> Endless:
        return Endless()

    def transform_from(self, source: IO[bytes]) -> IO[bytes]:
        return cast(IO[bytes], EndlessReader())


class EndlessReader(io.RawIOBase):
    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return len(buffer)


@pytest.mark.parametrize("name", ["weight", "text"])
def test_output_of_extensions_is_bounded(name: str, file_uri: str) -> None:
    state: dict[str, Any] = {"weight": torch.ones(1000), "text": "x"}
    dcp.save(dict(state), storage_writer=TierStorageWriter(file_uri, _extensions=[Flipped()]))
    fine, endless = ExtensionRegistry(), ExtensionRegistry()
    fine.register(Flipped)
    endless.register(Endless)
    loaded = {name: torch.zeros(1000) if name == "weight" else ""}
    dcp.load(loaded, storage_reader=TierStorageReader(file_uri, fine))
    assert torch.equal(loaded["weight"], state["weight"]) if name == "weight" else loaded["text"] == "x"
    with pytest.raises(CheckpointException, match=f"{name} is refused: more than"):
        dcp.load(loaded, storage_reader=TierStorageReader(file_uri, endless))
