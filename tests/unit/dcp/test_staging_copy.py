"""The copy into staging memory equals the tensor for any size and layout, and is complete when it returns."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tierckpt.dcp import staging
from tierckpt.dcp.staging import MOVE_BYTES_MAX, MOVE_BYTES_MIN, Copies

LARGE = MOVE_BYTES_MIN // 4
SOURCES = {
    "small": lambda: torch.randn(1000),
    "empty": lambda: torch.empty(0),
    "just large": lambda: torch.randn(LARGE),
    "of several pieces": lambda: torch.arange(MOVE_BYTES_MAX * 2 + 12345, dtype=torch.int32).to(torch.uint8),
    "a view of a larger one": lambda: torch.randn(2 * LARGE)[LARGE // 2 :][:LARGE],
    "transposed": lambda: torch.randn(1024, LARGE // 1024).t(),
    "every other one": lambda: torch.randn(2 * LARGE)[::2],
    "conjugated": lambda: torch.randn(LARGE, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(LARGE, dtype=torch.complex64).conj().imag,
    "expanded": lambda: torch.randn(1).expand(LARGE),
    "wants a gradient": lambda: torch.randn(LARGE, requires_grad=True),
    "bfloat16": lambda: torch.randn(2 * LARGE).to(torch.bfloat16),
}


def target_of(source: torch.Tensor) -> torch.Tensor:
    return torch.full(source.shape, 7, dtype=source.dtype)


@pytest.mark.parametrize("kind", SOURCES)
def test_copies_equal_the_tensor(kind: str) -> None:
    torch.manual_seed(1)
    source = SOURCES[kind]()
    target = target_of(source)
    Copies([target], [source]).run()
    assert torch.equal(target, source.detach())


def test_many_copies_on_any_number_of_threads() -> None:
    sources = [torch.randn(LARGE + number) for number in range(9)] + [torch.randn(10)]
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            targets = [target_of(source) for source in sources]
            Copies(targets, sources).run()
            assert all(map(torch.equal, targets, sources))
    finally:
        torch.set_num_threads(before)


def test_an_interrupt_leaves_no_writing_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller reuses the memory right after the call."""
    moved: list[int] = []
    was_interrupted = threading.Event()

    class Interrupted:
        def memmove(self, *piece: int) -> None:
            if threading.current_thread() is threading.main_thread():
                was_interrupted.set()
                raise KeyboardInterrupt
            was_interrupted.wait()
            time.sleep(0.05)
            moved.append(piece[2])

    monkeypatch.setattr(staging, "ctypes", Interrupted())
    sources = [torch.randn(LARGE) for _ in range(20)]
    with pytest.raises(KeyboardInterrupt):
        staging.move_all([(target_of(source), source) for source in sources], 2)
    assert len(moved) < len(sources)
    assert not [thread for thread in threading.enumerate() if thread.name == "tierckpt-stage"]
