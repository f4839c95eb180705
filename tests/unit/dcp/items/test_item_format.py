"""The bytes of an item, as read by torch.load and zip readers (invariants W1 to W3 of
dcp/items/item_format.py)."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
from zlib_ng import zlib_ng

from tierckpt.dcp.items import item_format

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
]
SHAPES = [(), (1,), (0,), (3, 0, 2), (2, 3), (7, 5, 3), (1, 255, 1), (256,), (2, 2, 2, 2), (70_000,), (1,) * 20]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def item(tensor: torch.Tensor) -> bytes:
    frame = item_format.frame(tensor.dtype, tuple(tensor.shape))
    raw = raw_bytes(tensor)
    return frame.head + raw + frame.tail_with(zlib_ng.crc32(raw))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_load_returns_the_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 5).to(dtype)
    data = item(tensor)
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded.dtype == dtype and loaded.shape == tensor.shape and loaded.is_contiguous()
    assert raw_bytes(loaded) == raw_bytes(tensor)
    assert len(data) == item_format.frame(dtype, shape).total_bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_archive_and_its_crc_are_valid_and_its_records_have_the_names_of_torch(dtype: torch.dtype) -> None:
    tensor, stock = (torch.rand(33, 3) * 5).to(dtype), io.BytesIO()
    torch.save(tensor, stock)
    data = item(tensor)
    assert set(zipfile.ZipFile(io.BytesIO(data)).namelist()) <= set(zipfile.ZipFile(stock).namelist())
    assert len(item_format.frame(dtype, (33, 3)).head) % item_format.ALIGNMENT_BYTES == 0
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    damaged = bytearray(data)
    damaged[len(item_format.frame(dtype, (33, 3)).head) + 5] ^= 1
    assert zipfile.ZipFile(io.BytesIO(bytes(damaged))).testzip() == "archive/data/0"


def test_zip64_frames_are_made_by_torch() -> None:
    frame = item_format.frame(torch.uint8, (5 << 30,))
    assert frame.size_bytes == 5 << 30
    assert b"PK\x06\x06" in frame.tail, "the zip64 end of central directory"
    first, second = frame.crc_at
    tail = frame.tail_with(0x01020304)
    assert tail[first : first + 4] == tail[second : second + 4] == b"\x04\x03\x02\x01"
