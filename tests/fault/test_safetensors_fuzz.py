"""Randomly damaged safetensors files: a typed error is raised, or the result equals that of the format's own reader.

Seeded. TIERCKPT_TEST_FUZZ_SECONDS sets the duration; the default is a few hundred files. Controls remove one check: the
harness must then find a wrongly accepted file.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import tierckpt
from tests.safetensors_files import bytes_of, encode, tensor
from tierckpt.errors import IntegrityError, StateMismatchError
from tierckpt.loading import fill, header
from tierckpt.loading.header import DTYPE_BITS

FILES = 400
Mutation = Callable[[random.Random, dict[str, Any], bytes], tuple[bytes, bytes]]


def valid_file(generator: random.Random) -> tuple[dict[str, Any], bytes]:
    """Return header and data of a valid file with a few tensors."""
    fields: dict[str, Any] = {}
    position = 0
    for index in range(generator.randint(1, 5)):
        dtype = generator.choice(["F32", "BF16", "U8", "I64", "BOOL"])
        shape = [generator.choice([0, 1, 2, 5]) for _ in range(generator.randint(0, 3))]
        size_bytes = torch.Size(shape).numel() * DTYPE_BITS[dtype] // 8
        fields[f"t{index}"] = tensor(dtype, shape, position, position + size_bytes)
        position += size_bytes
    return fields, bytes(generator.choice([0, 1]) for _ in range(position))


def _split(fields: dict[str, Any], data: bytes) -> tuple[bytes, bytes]:
    return json.dumps(fields).encode(), data


def flip_bits(generator: random.Random, fields: dict[str, Any], data: bytes) -> tuple[bytes, bytes]:
    text = bytearray(json.dumps(fields).encode())
    for _ in range(generator.randint(1, 3)):
        text[generator.randrange(len(text))] ^= 1 << generator.randrange(8)
    return bytes(text), data


def change_a_number(generator: random.Random, fields: dict[str, Any], data: bytes) -> tuple[bytes, bytes]:
    entry = fields[generator.choice(list(fields))]
    numbers = entry[generator.choice(["shape", "data_offsets"])] or entry["data_offsets"]
    index = generator.randrange(len(numbers))
    numbers[index] = generator.choice([numbers[index] + 1, numbers[index] - 1, 0, 1 << 40, 1 << 63, 1 << 64, -1, 1e3])
    return _split(fields, data)


def change_a_field(generator: random.Random, fields: dict[str, Any], data: bytes) -> tuple[bytes, bytes]:
    entry = fields[generator.choice(list(fields))]
    field = generator.choice(list(entry))
    entry[field] = generator.choice([None, "F32", "F64", "U8", [], [1], [0, 0], {}, True, "x" * 300, [[1]]])
    return _split(fields, data)


def swap_ranges(generator: random.Random, fields: dict[str, Any], data: bytes) -> tuple[bytes, bytes]:
    """Swap the ranges of two tensors; harmless if they have the same size."""
    one, other = generator.choice(list(fields)), generator.choice(list(fields))
    a, b = fields[one], fields[other]
    a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]
    return _split(fields, data)


def share_a_range(generator: random.Random, fields: dict[str, Any], data: bytes) -> tuple[bytes, bytes]:
    name = generator.choice(list(fields))
    fields[f"{name}.copy"] = dict(fields[name])
    return _split(fields, data)


def drop_a_tensor(generator: random.Random, fields: dict[str, Any], data: bytes) -> tuple[bytes, bytes]:
    del fields[generator.choice(list(fields))]
    return _split(fields, data)


def cut_or_add(generator: random.Random, fields: dict[str, Any], data: bytes) -> tuple[bytes, bytes]:
    if generator.random() < 0.5 and data:
        return _split(fields, data[: generator.randrange(len(data))])
    return _split(fields, data + bytes(generator.randint(1, 9)))


def duplicate_a_name(generator: random.Random, fields: dict[str, Any], data: bytes) -> tuple[bytes, bytes]:
    name = generator.choice(list(fields))
    text = json.dumps(fields)
    return f'{{"{name}": {json.dumps(fields[name])}, {text[1:]}'.encode(), data


MUTATIONS: list[Mutation] = [
    flip_bits,
    change_a_number,
    change_a_field,
    swap_ranges,
    share_a_range,
    drop_a_tensor,
    cut_or_add,
    duplicate_a_name,
]


def damaged_file(generator: random.Random) -> tuple[str, bytes]:
    mutate = generator.choice(MUTATIONS)
    content = encode(*mutate(generator, *valid_file(generator)))
    if generator.random() < 0.1:  # change the header length too
        length = generator.choice([0, 1, len(content), 1 << 27, 1 << 63, int.from_bytes(content[:8], "little") + 1])
        content = length.to_bytes(8, "little") + content[8:]
    return mutate.__name__, content


def check_file(path: Path, content: bytes) -> str:
    """Return ``refused`` or ``accepted``; raises AssertionError if the result is wrong."""
    path.write_bytes(content)
    try:
        found = tierckpt.load_safetensors(path)
    except (IntegrityError, StateMismatchError) as error:
        assert error.exit_code, error
        return "refused"
    except Exception as error:
        raise AssertionError(f"ended in {type(error).__name__}: {error}") from error
    tensor_bytes = sum(value.nbytes for value in found.values())
    assert tensor_bytes <= len(content), f"{tensor_bytes} bytes of tensors out of a file of {len(content)}"
    try:
        expected = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise AssertionError(f"accepted, but the format's own reader rejects it: {error}") from error
    except (KeyError, RuntimeError, TypeError):
        return "accepted"  # a dtype or alignment that only tierckpt supports
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (value.dtype, value.shape) == (found[name].dtype, found[name].shape), name
        assert bytes_of(value) == bytes_of(found[name]), name
    return "accepted"


def run(folder: Path, seed: int, files: int = FILES, seconds: float = 0.0) -> Counter[str]:
    generator, counted = random.Random(seed), Counter[str]()
    end = time.monotonic() + seconds
    while counted["tried"] < files or time.monotonic() < end:
        kind, content = damaged_file(generator)
        try:
            outcome = check_file(folder / "m.safetensors", content)
        except AssertionError as error:
            raise AssertionError(f"{kind}, file {counted['tried']} of seed {seed}: {error}") from error
        counted.update(["tried", kind, outcome])
    return counted


@pytest.mark.slow
def test_damaged_files_are_rejected_or_harmless(tmp_path: Path) -> None:
    counted = run(tmp_path, seed=11, seconds=float(os.environ.get("TIERCKPT_TEST_FUZZ_SECONDS", 0)))
    assert counted["tried"] >= FILES
    assert all(counted[mutation.__name__] >= FILES / len(MUTATIONS) / 3 for mutation in MUTATIONS), counted
    assert counted["refused"] >= FILES / 2, counted
    assert counted["accepted"] >= FILES / 40, "too few accepted files to compare"


@pytest.mark.parametrize("check", ["check_cover", "check_size"])
def test_control_missing_check_is_found(check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, check, lambda *_: None)
    with pytest.raises(AssertionError):
        run(tmp_path, seed=11)


def test_rejection_reads_only_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "Memory", None)
    monkeypatch.setattr(fill.WorkerThreads, "run", None)
    generator, refused = random.Random(5), 0
    while refused < 50:
        _, content = damaged_file(generator)
        (tmp_path / "m.safetensors").write_bytes(content)
        try:
            tierckpt.load_safetensors(tmp_path, lazy=True)
        except IntegrityError:
            refused += 1
        except StateMismatchError:
            pass


# --- headers, compared with the format's own reader ---------------------------------------------------------------

HEADERS = 200_000 if float(os.environ.get("TIERCKPT_TEST_FUZZ_SECONDS", 0)) >= 60 else 4000
NAMES = ["a", "b", "", "__metadata__", "w.\\ud83d\\ude00", "\\ud800", "x\\udc00", "é", "a\\/b"]
NAMES += ["a\tb", "\\x"]
ODD_NUMBERS = ["-1", "1.0", "4e0", "true", "null", '"4"', "1e999", "18446744073709551615", "18446744073709551616",
               "9223372036854775808", "01", "+1", "1.", "[]", "{}", "9" * 310, "NaN", "-0.0", "1E0"]  # fmt: skip
ODD_VALUES = ["null", "{}", "[]", "1", '"x"', "-0", "[" * 124 + "]" * 124, '"\\ud800"', "1e-999", '{"a":[{"x":1}]}']


def header_text(rng: random.Random) -> tuple[bytes, int]:
    """Return the JSON of a header, randomly with odd constructs, and the size of its data."""
    position, parts = 0, []
    for name in rng.sample(NAMES[:2] if rng.random() < 0.6 else NAMES, rng.randint(1, 2)):
        dtype = rng.choice(["F32", "U8", "F4", "BF16", "C64"])
        shape = [rng.choice([0, 1, 2, 4]) for _ in range(2)]
        size_bytes = torch.Size(shape).numel() * DTYPE_BITS[dtype] // 8
        tensor_json = tensor_text(rng, dtype, [str(one) for one in shape], [str(position), str(position + size_bytes)])
        parts.append(f'"{name}"{_space(rng)}:{tensor_json}')
        position += size_bytes
    if rng.random() < 0.3:
        values = ["null", "{}", "[]", '{"x":"1"}', '{"x":null}', '{"x":1}', '{"":"\\udfff"}']
        parts.insert(rng.randint(0, len(parts)), f'"__metadata__":{rng.choice(values)}')
    text = f"{_space(rng)}{{{_space(rng)}{','.join(parts)}}}{_space(rng)}"
    if rng.random() < 0.05:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice([*' ,:[]{}"0\0\x0c', "\ufeff", ""]) + text[at + rng.randint(0, 1) :]
    return text.encode(), position


def tensor_text(rng: random.Random, dtype: str, shape: list[str], offsets: list[str]) -> str:
    if rng.random() < 0.12:
        numbers = rng.choice([shape, offsets])
        numbers[rng.randrange(len(numbers))] = rng.choice(ODD_NUMBERS)
    shown = rng.choice([f'"{dtype}"'] * 30 + [f'["{dtype}"]', f'"{dtype.lower()}"'])
    values = [shown, f"[{','.join(shape)}]", f"[{','.join(offsets)}]"]
    fields = [f'"{name}":{value}' for name, value in zip(("dtype", "shape", "data_offsets"), values, strict=True)]
    if rng.random() < 0.2:
        fields.insert(rng.randint(0, 3), f'"{rng.choice(["x", "Dtype"])}":{rng.choice(ODD_VALUES)}')
    if rng.random() < 0.03:
        fields.pop(rng.randrange(len(fields)))
    rng.shuffle(fields)
    return f"{{{_space(rng)}{','.join(fields)}}}"


def _space(rng: random.Random) -> str:
    return rng.choice(["", "", "", " ", "\n\t\r"])


def read_by_safetensors(content: bytes) -> set[tuple[str, str, tuple[int, ...], bytes]] | None:
    """Return name, dtype, shape and data of each tensor; None if safetensors or torch rejects the file."""
    try:
        found = safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return None
    tensors = {(name, one["dtype"], tuple(one["shape"]), bytes(one["data"])) for name, one in found}
    return None if any(size >= 1 << 63 for _, _, shape, _ in tensors for size in shape) else tensors


def read_by_tierckpt(content: bytes) -> set[tuple[str, str, tuple[int, ...], bytes]] | None:
    length = int.from_bytes(content[:8], "little")
    try:
        found = header.parse_header(content[8 : 8 + length], len(content))
    except header.Malformed:
        return None
    return {(one.name, one.dtype, one.shape, content[one.start : one.stop]) for one in found.entries}


def compare_headers(seed: int, count: int) -> Counter[bool]:
    rng, counted = random.Random(seed), Counter[bool]()
    for number in range(count):
        text, size_bytes = header_text(rng)
        content = len(text).to_bytes(8, "little") + text + rng.randbytes(size_bytes)
        expected = read_by_safetensors(content)
        assert read_by_tierckpt(content) == expected, f"header {number} of seed {seed}: {text!r}"
        counted[expected is not None] += 1
    return counted


def test_headers_are_read_like_the_formats_own_reader() -> None:
    counted = compare_headers(23, HEADERS)
    assert min(counted[True], counted[False]) > HEADERS / 5, counted


def _integers(value: object) -> bool:
    """Accepts what is not a count: True, and negative numbers."""
    return isinstance(value, list) and all(isinstance(one, int) for one in value)


@pytest.mark.parametrize(("check", "wrong"), [("check_size", lambda *_: None), ("_are_counts", _integers)])
def test_control_missing_rule_of_the_format_is_found(
    check: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, check, wrong)
    with pytest.raises(AssertionError, match="header"):
        compare_headers(23, HEADERS)
