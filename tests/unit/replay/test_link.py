"""Copies of gradients: joined, narrowed if no bit is lost, and after the update if possible. Copies from CUDA."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tierckpt import torch_internals
from tierckpt.dcp import staging
from tierckpt.replay import link as links
from tierckpt.replay.capture import Step
from tierckpt.replay.frame import Frame, decode, encode
from tierckpt.replay.link import GRADIENTS, JOINED_GRADIENT_BYTES, PARTS, Link, PinnedMemory
from tierckpt.replay.tree import detach, gaps


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
    copied.done.result(SECONDS)
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
    mixed.done.result(SECONDS)
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


# --- from a device --------------------------------------------------------------------------------------------------
# Side streams, events, page-locked memory, no waiting thread: on fake streams that record calls.

SECONDS = 60.0
DEVICE = torch.device("cuda", 0)


class OnDevice(torch.Tensor):
    """A tensor in host memory that claims to be on a device."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    def record_stream(self, stream: Any) -> None:
        stream.does("keeps a source")


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.device = stream, DEVICE
        self.reached = threading.Event()

    def synchronize(self) -> None:
        assert threading.current_thread() is not threading.main_thread(), "the trainer waits for the device"
        assert self.reached.wait(SECONDS)


class Stream:
    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.priority = priority
        self.done: list[Any] = []
        self.events: list[Event] = []

    def does(self, what: Any) -> None:
        self.done.append(what)

    def wait_stream(self, other: Stream) -> None:
        self.done.append(("waits for", other))

    def wait_event(self, event: Event) -> None:
        self.done.append(("waits for", event.stream))

    def record_event(self) -> Event:
        self.events.append(Event(self))
        return self.events[-1]


class Device:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trains = Stream(DEVICE)
        self.streams: list[Stream] = []
        self.current = [self.trains]
        monkeypatch.setattr(staging, "streams", {})
        monkeypatch.setattr(torch.cuda, "Stream", self.stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.current[-1])
        monkeypatch.setattr(torch.cuda, "stream", self.entered)
        real = torch_internals.foreach_copy

        def copy(targets: Any, sources: Any, non_blocking: bool = False) -> None:
            if any(isinstance(one, OnDevice) for one in sources):
                assert non_blocking and self.current[-1] is not self.trains
                self.current[-1].does("copies")
            real(targets, [one.as_subclass(torch.Tensor) for one in sources])

        monkeypatch.setattr(torch_internals, "foreach_copy", copy)

    def stream(self, device: torch.device, priority: int = 0) -> Stream:
        self.streams.append(Stream(device, priority))
        return self.streams[-1]

    @contextlib.contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def reach(self) -> None:
        for stream in self.streams:
            for event in stream.events:
                event.reached.set()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_a_part_is_queued_behind_training_and_training_waits_on_the_device(device: Device, link: Link) -> None:
    source, counter = torch.randn(5, 7), torch.tensor(3.0)
    copy = link.copy([on_device(source), counter], PARTS)
    assert torch.equal(copy.result[1], counter)  # in host memory: copied at once, so training may change it
    [beside] = device.streams
    assert beside.done == [("waits for", device.trains), "copies", "keeps a source"]
    copy.fence()  # this is the main thread: Event.synchronize would fail
    assert device.trains.done == [("waits for", beside)] and not copy.done.done()
    device.reach()
    copy.done.result(SECONDS)
    assert torch.equal(copy.result[0], source) and copy.remaining_bytes == 0 and not copy.was_overwritten


def test_gradients_have_a_stream_of_their_own_that_goes_first(device: Device, link: Link) -> None:
    part = link.copy([on_device(torch.randn(4))], PARTS)
    gradient = torch.randn(4)
    first = link.copy([on_device(gradient)], GRADIENTS)
    parts, gradients = device.streams
    assert gradients.priority < parts.priority == 0 and gradients is not parts
    for event in gradients.events:
        event.reached.set()
    first.done.result(SECONDS)
    assert not part.done.done() and torch.equal(first.result[0], gradient)
    device.reach()
    part.done.result(SECONDS)


def test_a_source_that_is_written_over_is_seen_unless_training_waits(device: Device, link: Link) -> None:
    for waits in (False, True):
        source = torch.randn(4)
        copy = link.copy([on_device(source)], GRADIENTS)
        if waits:
            copy.fence()
        source.zero_()
        device.reach()
        copy.done.result(SECONDS)
        assert copy.was_overwritten is not waits


def test_page_locked_memory_is_used_again_when_nothing_refers_to_it() -> None:
    memory = PinnedMemory()
    sources = [torch.randn(3, 5), torch.tensor(2.0), torch.ones(7, dtype=torch.bfloat16), torch.empty(0)]
    first = memory.tensors(sources)
    assert [(one.shape, one.dtype) for one in first] == [(one.shape, one.dtype) for one in sources]
    for target, source in zip(first, sources, strict=True):
        target.copy_(source)
    second = memory.tensors(sources)
    assert all(torch.equal(one, other) for one, other in zip(first, sources, strict=True))
    places = {first[0].data_ptr(), second[0].data_ptr()}
    assert len(places) == 2
    del first, second, target
    assert {memory.tensors(sources)[0].data_ptr()} <= places
    memory.close()


def test_the_rest_of_a_state_comes_from_the_device_before_training_goes_on(device: Device, link: Link) -> None:
    weight, buffer = torch.randn(4), torch.randn(3)
    state = {"weight": on_device(weight), "seen": on_device(buffer), "count": torch.tensor(2), "name": "x"}
    tree, copy = detach(state, {"held": state["weight"]}, link)
    assert copy is not None and not copy.done.done()
    assert device.trains.done == [("waits for", device.streams[0])]  # later writes to the buffer follow the copy
    assert list(gaps(tree)) == [(("weight",), "held")]
    device.reach()
    copy.done.result(SECONDS)
    assert torch.equal(tree["seen"], buffer) and not tree["seen"].is_cuda
