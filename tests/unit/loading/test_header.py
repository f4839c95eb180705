"""Safetensors headers are checked before any allocation; errors name file and tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tierckpt
from tests.safetensors_files import Fields, encode, raw, tensor, write
from tierckpt.errors import IntegrityError, StateMismatchError
from tierckpt.loading import fill, safetensors

GOOD: Fields = {"a": tensor("F32", [2, 3], 0, 24), "b": tensor("U8", [4], 24, 28)}


@pytest.fixture
def forbid_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the tensors were about to be read")

    monkeypatch.setattr(safetensors, "fill", refuse)


def _with(name: str, **changes: Any) -> bytes:
    return encode({**GOOD, name: {**GOOD[name], **changes}}, raw(28))


ONE = b'{"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}'
WRONG: dict[str, tuple[bytes, str, str | None]] = {
    "no bytes": (b"", "has 0 bytes", None),
    "seven bytes": (b"\2\0\0\0\0\0\0", "has 7 bytes", None),
    "a header longer than the file": ((1 << 20).to_bytes(8, "little") + b"{}", "should end at byte", None),
    "a header of exabytes": (b"\xff" * 8 + b"{}", "no length of a header", None),
    "no JSON": (encode(b"{", b""), "JSON", None),
    "not UTF-8": (encode(b'{"\xff": 1}', b""), "JSON", None),
    "JSON as deep as the stack": (encode(b"[" * 100_000, b""), "JSON", None),
    "a number no number is": (encode(b'{"a": NaN}', b""), "no dtype, shape", "a"),
    "a number of many digits": (encode(b'{"a": ' + b"9" * 5000 + b"}", b""), "JSON", None),
    "a list": (encode([], b""), "no JSON object", None),
    "metadata that is no text": (encode({"__metadata__": {"a": 1}}, b""), "metadata", None),
    "metadata twice": (encode(b'{"__metadata__": {}, "__metadata__": {}}', b""), "a field twice", None),
    "one field twice": (encode(b'{"a": {"dtype": "U8", ' + ONE[1:] + b"}", b"1234"), "a field twice", None),
    "half a character": (encode(b'{"\\ud800": ' + ONE + b"}", b"1234"), "surrogates not allowed", None),
    "minus nothing": (_with("b", data_offsets=[-0.0, 4]), "range", "b"),
    "a tensor without a shape": (encode({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, b"x"), "no dtype, shape", "a"),
    "a tensor that is a number": (encode({"a": 7}, b""), "no dtype, shape", "a"),
    "an unknown dtype": (_with("b", dtype="U9"), "unknown dtype", "b"),
    "a dtype that is a list": (_with("b", dtype=["U8"]), "unknown dtype", "b"),
    "a negative size": (_with("b", shape=[-4]), "shape", "b"),
    "a fraction of a size": (_with("b", shape=[4.0]), "shape", "b"),
    "a size that is true": (_with("b", shape=[4, True]), "shape", "b"),
    "a shape that is text": (_with("b", shape="4"), "shape", "b"),
    "more bytes than the range": (_with("b", shape=[5]), "4 bytes", "b"),
    "fewer bytes than the range": (_with("b", shape=[3]), "4 bytes", "b"),
    "half a byte": (_with("b", dtype="F4", shape=[7]), "4 bytes", "b"),
    "a size beyond 64 bits": (_with("b", shape=[1 << 64]), "shape", "b"),
    "a size that no tensor has": (_with("b", shape=[1 << 63]), "more elements", "b"),
    "a product beyond 64 bits": (_with("b", shape=[1 << 40, 1 << 40]), "more elements", "b"),
    "no elements of a shape beyond 64 bits": (_with("b", shape=[1 << 40, 1 << 40, 0]), "more elements", "b"),
    "a range that ends before it begins": (_with("b", data_offsets=[28, 24]), "-4 bytes", "b"),
    "a range of three": (_with("b", data_offsets=[24, 26, 28]), "range", "b"),
    "a range past the end": (encode({"a": tensor("U8", [5], 0, 5)}, b"1234"), "should have", "a"),
    "an overlap": (encode({"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 2, 6)}, b"123456"), "overlaps", "b"),
    "two tensors of the same bytes": (
        encode({"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 0, 4)}, b"1234"),
        "overlaps",
        "b",
    ),
    "a hole": (encode({"a": tensor("U8", [1], 0, 1), "b": tensor("U8", [1], 2, 3)}, b"123"), "hole", "b"),
    "a first tensor that is not the first": (encode({"a": tensor("U8", [1], 1, 2)}, b"12"), "hole", "a"),
    "bytes of nobody at the end": (encode(GOOD, raw(29)), "should have", None),
    "a byte too few": (encode(GOOD, raw(27)), "should have", "b"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.usefixtures("forbid_allocation")
def test_invalid_headers_are_rejected_before_any_allocation(wrong: str, tmp_path: Path) -> None:
    content, said, named = WRONG[wrong]
    file = write(tmp_path / "m.safetensors", content)
    with pytest.raises(IntegrityError, match=said) as caught:
        tierckpt.load_safetensors(file)
    assert caught.value.context.get("file") == "m.safetensors"
    assert caught.value.context.get("tensor") == named


@pytest.mark.parametrize(
    ("wrong", "hint"),
    {
        "a byte too few": "fetch it again",
        "a header longer than the file": "fetch it again",
        "no JSON": "Compare its digest",
        "a hole": "convert it",
        "bytes of nobody at the end": "convert it",
    }.items(),
)
def test_only_truncated_files_have_the_hint_to_fetch_again(wrong: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError) as caught:
        tierckpt.load_safetensors(write(tmp_path / "m.safetensors", WRONG[wrong][0]))
    assert hint in caught.value.hint


@pytest.mark.usefixtures("forbid_allocation")
def test_a_header_longer_than_the_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {f"tensor.{index}": tensor("U8", [1], index, index + 1) for index in range(4000)}
    file = write(tmp_path / "m.safetensors", encode(fields, raw(4000)))
    assert len(json.dumps(fields)) > 128 << 10
    assert list(tierckpt.load_safetensors(file, lazy=True)) == list(fields)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": ' + ONE + b', "a": ' + ONE + b"}",
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": ' + ONE + b"}",
        b'{"__metadata__": {"x": "1", "x": "2"}, "a": ' + ONE + b"}",
        b'{"a": ["U8", [4], [0, 4]]}',
    ],
    ids=["a tensor twice", "two tensors of one name", "metadata twice", "an array of the fields"],
)
def test_headers_that_only_other_writers_make(header: bytes, tmp_path: Path) -> None:
    file = write(tmp_path / "m.safetensors", encode(header, b"1234"))
    assert tierckpt.load_safetensors(file)["a"].tolist() == load_file(file)["a"].tolist() == [*b"1234"]


def test_every_torch_dtype_loads(tmp_path: Path) -> None:
    kinds = {"F8_E8M0": torch.float8_e8m0fnu, "U64": torch.uint64, "C64": torch.complex64, "BOOL": torch.bool}
    for name, dtype in kinds.items():
        size_bytes = 6 * dtype.itemsize
        content = encode({"x": tensor(name, [2, 3], 0, size_bytes)}, b"\1" * size_bytes)
        loaded = tierckpt.load_safetensors(write(tmp_path / f"{name}.safetensors", content))["x"]
        assert (loaded.dtype, tuple(loaded.shape)) == (dtype, (2, 3))
    packed = write(tmp_path / "f4.safetensors", encode({"x": tensor("F4", [2, 6], 0, 6)}, raw(6)))
    loaded = tierckpt.load_safetensors(packed)["x"]
    assert (loaded.dtype, tuple(loaded.shape)) == (torch.float4_e2m1fn_x2, (2, 3))


def test_unsupported_dtypes_are_named_and_can_be_excluded(tmp_path: Path) -> None:
    content = encode({"odd": tensor("F6_E2M3", [4], 0, 3), "x": tensor("U8", [1], 3, 4)}, raw(4))
    file = write(tmp_path / "m.safetensors", content)
    with pytest.raises(StateMismatchError, match="F6_E2M3"):
        tierckpt.load_safetensors(file)
    assert tierckpt.load_safetensors(file, names=["x"])["x"].tolist() == [3]


def _model(directory: Path, weight_map: object) -> Path:
    directory.mkdir()
    write(directory / "one.safetensors", encode(GOOD, raw(28)))
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(text)
    return directory


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": "../one.safetensors"},
        {"a": "/one.safetensors"},
        {"a": "x/../one.safetensors"},
        {"a": 3},
        {"a": ["one.safetensors"]},
        ["one.safetensors"],
        '{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}',
        '{"weight_map": {"a": "\\u0000"}}',
        "[" * 100_000,
    ],
)
@pytest.mark.usefixtures("forbid_allocation")
def test_invalid_indexes_are_rejected(weight_map: object, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"model\.safetensors\.index\.json"):
        tierckpt.load_safetensors(_model(tmp_path / "m", weight_map))


def test_an_index_may_name_files_in_subdirectories(tmp_path: Path) -> None:
    directory = _model(tmp_path / "m", {"a": "below/one.safetensors"})
    (directory / "below").mkdir()
    (directory / "one.safetensors").rename(directory / "below/one.safetensors")
    assert list(tierckpt.load_safetensors(directory)) == ["a", "b"]
    (directory / "below/one.safetensors").unlink()
    (directory / "below/one.safetensors").mkdir()
    with pytest.raises(IntegrityError, match=r"below/one\.safetensors, which is not there"):
        tierckpt.load_safetensors(directory)


def test_a_file_that_changes_during_a_load_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "m.safetensors", encode(GOOD, raw(28)))
    lazy = tierckpt.load_safetensors(file, lazy=True)
    assert lazy["b"].tolist() == list(raw(28)[24:])
    write(tmp_path / "other", encode(GOOD, bytes(28))).replace(file)
    with pytest.raises(IntegrityError, match="changed while it was read"):
        lazy["b"]
    monkeypatch.setattr(fill.FileFill, "finish", lambda self: None)  # control: without the final check
    assert lazy["b"].tolist() == [0, 0, 0, 0]
