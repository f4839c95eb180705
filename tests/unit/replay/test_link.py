"""Copies of gradients: joined, narrowed if no bit is lost, and after the update if possible."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from tierckpt.replay import link as links
from tierckpt.replay.capture import Step
from tierckpt.replay.frame import Frame, decode, encode
from tierckpt.replay.link import GRADIENTS, JOINED_GRADIENT_BYTES, Link


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link()
    yield made
    made.close()


def rounded(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16().float()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


GRADIENTS_OF_ALL_KINDS = {
    "small": lambda: [rounded(n % 7 + 1, 3) for n in range(50)],
    "one that has all its bits": lambda: [rounded(4), torch.randn(5), rounded(6)],
    "a scalar, an empty one": lambda: [rounded(3), rounded(), torch.empty(0, 4), rounded(2, 0), rounded(5)],
    "not contiguous": lambda: [rounded(4, 6).t(), rounded(8)[::2], rounded(2, 3, 4).permute(2, 0, 1)],
    "other types": lambda: [rounded(4), torch.randn(4).double(), torch.randn(4).bfloat16(), rounded(2), rounded(3)],
    "odd lengths, and a sign of zero": lambda: [torch.tensor([-0.0]), torch.tensor([0.0, -0.0, float("inf")])],
    "not a number": lambda: [torch.tensor([-4194304, 2143289344], dtype=torch.int32).view(torch.float32), rounded(3)],
    "large": lambda: [rounded(9), rounded(JOINED_GRADIENT_BYTES // 4 + 7), rounded(3), rounded(4), torch.randn(3)],
}


@pytest.mark.parametrize("kind", GRADIENTS_OF_ALL_KINDS)
def test_gradients_keep_every_bit(link: Link, kind: str) -> None:
    torch.manual_seed(1)
    wanted = GRADIENTS_OF_ALL_KINDS[kind]()
    copied = link.copy(wanted, GRADIENTS)
    copied.done.result(10)
    assert [one.shape for one in copied.result] == [one.shape for one in wanted]
    assert all(bits(found.to(one.dtype)) == bits(one) for found, one in zip(copied.result, wanted, strict=True))
    gradients = {str(number): one for number, one in enumerate(copied.result)}
    head, views, _ = encode(Frame(1, {"": Step(1, [{}], gradients)}, {"": "layout"}, b"behind"))
    data = memoryview(b"".join([head, *views]))
    frame = decode(lambda at, count: data[at : at + count], where="memory")
    assert frame.attachment == b"behind" and frame.steps[""].gradients.keys() == gradients.keys()
    for key, one in frame.steps[""].gradients.items():
        assert one.dtype is gradients[key].dtype and one.shape == gradients[key].shape
        assert bits(one) == bits(gradients[key])


def test_small_gradients_are_narrow_together_and_full_when_one_of_them_is(link: Link) -> None:
    several = [rounded(8) for _ in range(4)]
    narrow = link.copy(several, GRADIENTS)
    mixed = link.copy([*several, torch.full((8,), 0.1)], GRADIENTS)
    mixed.done.result(10)
    assert {one.dtype for one in narrow.result} == {torch.bfloat16} and narrow.size_bytes == 4 * 8 * 2
    assert [one.dtype for one in mixed.result] == [*[torch.bfloat16] * 4, torch.float32]
    assert len({one.untyped_storage()._cdata for one in narrow.result}) == 1
    step = Step(1, [{}], {str(number): one for number, one in enumerate(narrow.result)})
    frame = Frame(1, {"": step}, {"": "layout"})
    assert [len(view) for view in encode(frame)[1]] == [4 * 8 * 2, 0]  # adjacent tensors are one piece


def test_a_yielding_copy_waits_for_the_update_and_not_for_one_that_raised(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "UPDATE_TIMEOUT_SECONDS", 600.0)
    link.update_begins()
    waiting = link.copy([rounded(8)], GRADIENTS, yields_to_update=True)
    time.sleep(0.05)
    assert not waiting.done.done()
    link.update_ends()
    waiting.done.result(60)
    link.update_begins()
    needed = link.copy([rounded(8)], GRADIENTS, yields_to_update=True)
    assert link.wait(needed) and needed.done.done()  # ``wait`` ends the pause
    monkeypatch.setattr(links, "UPDATE_TIMEOUT_SECONDS", 0.01)
    link.update_begins()  # without ``update_ends``
    link.copy([rounded(8)], GRADIENTS, yields_to_update=True).done.result(60)
