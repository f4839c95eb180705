"""Deferred tensors: operations read only the part of the file that they use."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.reads import asked
from tierckpt.config import Settings
from tierckpt.disk.file_io import PAGE_BYTES, Resident
from tierckpt.disk.io_tuner import SHARED_READ_MODES
from tierckpt.errors import IntegrityError
from tierckpt.loading.safetensors import Deferral, DeferredTensor, WantedTensors
from tierckpt.loading.tensor_parts import Parts

SHAPE = (8, 128, 512)
WHOLE_BYTES = 2 << 20
NOISE_BYTES = 16 << 10
"""Whole blocks are read."""


@pytest.fixture
def plain() -> Tensor:
    return torch.randn(SHAPE)


@pytest.fixture
def deferral() -> Deferral:
    return Deferral()


@pytest.fixture
def deferred(plain: Tensor, deferral: Deferral, tmp_path: Path) -> Tensor:
    return opened(plain, deferral, tmp_path)


def opened(plain: Tensor, deferral: Deferral, tmp_path: Path) -> Tensor:
    save_file({"a": torch.ones(1000), "w": plain}, tmp_path / "model.safetensors")
    settings = Settings(local_root=tmp_path / "root")
    wanted = WantedTensors(tmp_path / "model.safetensors", "cpu", None, "", Parts(), settings)
    tensors = dict(wanted.stream(1 << 30, deferral))
    assert type(tensors["a"]) is Tensor
    assert type(tensors["w"]) is DeferredTensor
    return tensors["w"]


VIEWS: dict[str, tuple[Callable[[Tensor], Any], float]] = {
    "narrow": (lambda t: t.narrow(0, 2, 3), 3 / 8),
    "rows of rows": (lambda t: t[3].narrow(0, 32, 32), 1 / 32),
    "an index from the end": (lambda t: t[-1], 1 / 8),
    "a chunk": (lambda t: t.chunk(4, dim=0)[1], 1 / 4),
    "a chunk of what was cut": (lambda t: torch.chunk(t[2:6], 2)[1], 1 / 4),
    "experts one by one": (lambda t: [one.narrow(0, 64, 64) for one in t.unbind()], 1 / 2),
    "a single expert": (lambda t: t[5].unsqueeze(0).unbind()[0], 1 / 8),
    "transposed": (lambda t: t[1].t().narrow(1, 10, 20), 20 / 1024),
    "permuted": (lambda t: t.permute(2, 0, 1)[:, 7], 1 / 8),
    "detached": (lambda t: t.detach().data[0:1], 1 / 8),
    "nothing": (lambda t: t[8:], 0),
    "never used": (lambda t: (t[0].shape, t.dtype, t.device, t.ndim, t.numel(), t.is_contiguous(), len(t)), 0),
    "columns, which read whole rows": (lambda t: t[4].narrow(1, 0, 8), 1 / 8),
    "each second row, which reads all": (lambda t: t[::2], 1),
    "a reshaped one": (lambda t: t.view(-1)[:100], 1),
    "rows of a tensor that is whole here": (lambda t: (t + 0, t[0], t[1])[1:], 1),
    "an index of tensors": (lambda t: t[torch.tensor([1, 3])], 1),
    "converted": (lambda t: t[0].to(torch.bfloat16).contiguous(), 1 / 8),
    "arithmetic": (lambda t: (2 * t[0] + torch.ones(()), torch.stack([t[1], t[2]])), 3 / 8),
    "numbers": (lambda t: (t[0, 0].sum().item(), t[0, 0].tolist(), t[0, 0, 0].item()), 1 / 8),
    "numpy": (lambda t: torch.from_numpy(t[0].numpy().copy()), 1 / 8),
    "a dispatched operation": (lambda t: torch.ops.aten.relu.default(t[0]), 1 / 8),
    "a copy": (lambda t: (copy.deepcopy(t[0]), pickle.loads(pickle.dumps(t[1]))), 1 / 4),
    "text": (lambda t: str(t[0]), 1 / 8),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_equal_the_tensor_and_read_only_their_part(
    name: str, plain: Tensor, deferred: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    use, share = VIEWS[name]
    with asked(monkeypatch) as read:
        found = [one + 0 if isinstance(one, Tensor) else one for one in listed(use(deferred))]
    for one, other in zip(found, listed(use(plain)), strict=True):
        if isinstance(one, Tensor):
            assert type(one) is Tensor
            assert one.dtype == other.dtype
            assert torch.equal(one, other + 0)
        else:
            assert one == other
    assert read["files"] <= share * WHOLE_BYTES + NOISE_BYTES * len(found)


def listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, list | tuple) else [found]


def test_repeated_copies_read_once(plain: Tensor, deferred: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.nn.Parameter(torch.zeros(2, *SHAPE[1:]), requires_grad=False)
    with asked(monkeypatch) as read:
        part = deferred.narrow(0, 4, 2)
        for _ in range(3):
            target.data.copy_(part)
        torch.zeros(2, *SHAPE[1:], device="meta").copy_(deferred[0:2])  # a count of the expected bytes
    assert torch.equal(target.data, plain[4:6])
    assert read["files"] <= WHOLE_BYTES / 4 + NOISE_BYTES


def written_below(tensor: Tensor) -> Tensor:
    tensor[3] += 1
    return tensor


def written_above(tensor: Tensor) -> Tensor:
    part, other = tensor[3].narrow(0, 8, 8), tensor[3]
    part.sum()
    tensor.mul_(2)
    other[9, 1:3] = 7
    return part


@pytest.mark.parametrize("use", [written_below, written_above])
def test_writes_to_a_view_are_visible_in_others(
    use: Callable[[Tensor], Tensor], plain: Tensor, deferred: Tensor
) -> None:
    assert torch.equal(use(deferred) + 0, use(plain.clone()))


def test_deferred_tensors_have_no_storage(deferred: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="data pointer"):
        deferred.data_ptr()


def test_kept_tensors_are_read_before_the_file_is_closed(
    plain: Tensor, deferral: Deferral, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = opened(plain, deferral, tmp_path)[6]
    gc.collect()  # since Python 3.13 the first use in a process leaves the tensor to the collector
    with asked(monkeypatch) as read:
        deferral.settle()
    assert 0 < read["files"] <= WHOLE_BYTES / 8 + NOISE_BYTES
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(kept * 1, plain[6])


def opened_beside(plain: Tensor, path: Path, ranks: int) -> Tensor:
    """Save a tensor and open it as one of ``ranks`` of this node that read it together."""
    save_file({"w": plain}, path)
    modes = (replace(SHARED_READ_MODES[0], ranks=ranks),)
    wanted = WantedTensors(path, "cpu", None, "", Parts(), Settings(local_root=path.parent / "root"), modes)
    ((_, tensor),) = wanted.stream(1 << 30, Deferral())
    return tensor


@pytest.mark.parametrize("ranks", [1, 4], ids=["others elsewhere", "all on this node"])
def test_column_shards_read_only_their_pieces(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes between the pieces are read only if other ranks of this node need them."""
    plain, path = torch.randn(64, 16384), tmp_path / "model.safetensors"
    tensor = opened_beside(plain, path, ranks)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with asked(monkeypatch) as read:
            part = tensor.narrow(1, 4096, 4096) + 0
        assert torch.equal(part, plain[:, 4096:8192])
        assert read["files"] == part.nbytes
        pages = Resident(file.fileno()).pages(0, path.stat().st_size).count(b"\1")
    # Each piece may end within a page at either end; some columns may still be in flight.
    least, most = (1, 1.5) if ranks == 1 else (2, 4.1)
    assert least * part.nbytes <= pages * PAGE_BYTES <= most * part.nbytes


def test_a_file_truncated_between_reads_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensor = opened_beside(torch.randn(64, 16384), path, 4)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(IntegrityError, match="became shorter"):
        tensor.narrow(1, 4096, 4096) + 0
