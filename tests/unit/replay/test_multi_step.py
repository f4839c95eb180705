"""A state copied over several steps equals the state after the last one."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.replay.test_apply import IMPLEMENTATIONS, KINDS, backward, groups_of, matrix
from tierckpt.errors import CheckpointError
from tierckpt.planning.transfer_times import Traffic, best_steps, split_parts, weights_of
from tierckpt.poll import Poll
from tierckpt.replay import link as links
from tierckpt.replay import multi_step
from tierckpt.replay.link import GRADIENTS, PARTS, Link, TensorCopy
from tierckpt.replay.multi_step import MultiStepStager
from tierckpt.replay.redo import Snapshot

SECONDS = 60.0


class Job:
    """A training loop with a schedule, a buffer and clipped gradients."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(*(nn.Linear(13, 13) for _ in range(6)))
        self.model.register_buffer("seen", torch.zeros(()))
        self.optimizer = make(groups_of(self.model), **options)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.number = 0
        self.set_to_none = True

    def train(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        backward(self.model, self.number)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizer.step()
        self.schedule.step()
        self.model.seen += 1  # type: ignore[operator]
        self.number += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "number": self.number,
        }


@pytest.fixture
def job() -> Job:
    """A loop that has made a step."""
    job = Job()
    job.train()
    return job


@pytest.fixture
def slow_link() -> Iterator[Link]:
    link = Link(bytes_per_second=2e6)
    yield link
    link.close()


def check(found: Any, wanted: Any, where: str = "") -> None:
    assert type(found) is type(wanted) or isinstance(wanted, dict), where
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found.cpu(), wanted.cpu()), where
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key, one in wanted.items():
            check(found[key], one, f"{where}/{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for number, one in enumerate(wanted):
            check(found[number], one, f"{where}/{number}")
    else:
        assert found == wanted, where


def windowed(
    job: Job, stager: MultiStepStager, steps: int, change: Callable[[], None] | None = None, changed_step: int = 1
) -> tuple[Snapshot, dict[int, Any]]:
    """Open a window and train until it is done. Return its snapshot and the states after each step."""
    begun, states = job.number, {}
    pending = stager.begin(job.state)
    for number in range(1, steps + 4):
        states[job.number - begun] = copy.deepcopy(job.state())
        job.train()
        if change is not None and number == changed_step:
            change()
        stager.end_of_step()
        if change is not None:
            time.sleep(0.02)  # the copies go on beside training
    states[job.number - begun] = copy.deepcopy(job.state())
    return pending.result(SECONDS), states


@pytest.mark.parametrize(("kind", "implementation", "begun"), matrix())
def test_every_optimizer_is_brought_to_one_version(kind: str, implementation: str, begun: int) -> None:
    job = Job(KINDS[kind], **IMPLEMENTATIONS[implementation])
    for _ in range(begun):
        job.train()
    with MultiStepStager(job.optimizer, window_steps=4) as stager:
        snapshot, states = windowed(job, stager, 4)
        assert snapshot.steps == 3
        check(snapshot.state, states[snapshot.steps])
        again, states = windowed(job, stager, 4)
    check(again.state, states[again.steps])


def test_bytes_moved_are_the_state_and_the_gradients_of_parts_that_wait() -> None:
    """1 + r (K - 1) / 2, with r = 1/3 here: gradients are float32."""
    weights = [nn.Parameter(torch.randn(1 << 12)) for _ in range(140)]
    optimizer = torch.optim.AdamW(weights)

    def train() -> None:
        for one in weights:
            one.grad = torch.randn_like(one)
        optimizer.step()

    train()
    with MultiStepStager(optimizer, window_steps=7) as stager:
        pending = stager.begin(optimizer.state_dict)
        for _ in range(6):
            train()
            stager.end_of_step()
        snapshot = pending.result(SECONDS)
    state_bytes = 140 * ((1 << 14) * 3 + 4)
    assert snapshot.steps == 6 and snapshot.moved_bytes == pytest.approx(state_bytes * (1 + (1 / 3) * 6 / 2), rel=0.01)


def test_parts_are_equal_where_no_bandwidth_is_known() -> None:
    state = 2_400_000_000
    traffic = Traffic(state, state // 6, 0.0, 0.0)
    assert traffic.falling_share(7) == 0 and traffic.best_steps() == 6


def test_a_step_waits_for_its_part_and_for_nothing_else(slow_link: Link) -> None:
    weights = [nn.Parameter(torch.randn(50_000)) for _ in range(8)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for one in weights:
        one.grad = torch.randn_like(one)
    optimizer.step()
    before = [one.detach().clone() for one in weights]
    with MultiStepStager(optimizer, window_steps=2, link=slow_link) as stager:
        pending = stager.begin(optimizer.state_dict)
        assert all(torch.equal(one, other) for one, other in zip(weights, before, strict=True))
        optimizer.step()
        stager.end_of_step()
        optimizer.step()
        snapshot = pending.result(SECONDS)
    assert snapshot.blocked_seconds > 0.2 * snapshot.moved_bytes / slow_link.bytes_per_second


def hold(patched: pytest.MonkeyPatch, call: str, which: Callable[[TensorCopy], object] = bool) -> threading.Event:
    """Until the event that is returned is set, a copy stays in ``call``."""
    go_on, real = threading.Event(), getattr(TensorCopy, call)

    def late(copy: TensorCopy, *given: Any) -> Any:
        if which(copy):
            go_on.wait(SECONDS)
        return real(copy, *given)

    patched.setattr(TensorCopy, call, late)
    return go_on


def test_gradients_overtake_parts(slow_link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[TensorCopy] = []
    go_on = hold(monkeypatch, "next_chunk")
    hold(monkeypatch, "end", ended.append)  # which returns None
    part = slow_link.copy([torch.ones(1 << 16)], PARTS)
    more = slow_link.copy([torch.ones(1 << 16)], PARTS)
    gradient = slow_link.copy([torch.full((10,), 3.0)], GRADIENTS)
    go_on.set()
    more.done.result(SECONDS)
    assert ended == [gradient, part, more] and torch.equal(gradient.result[0], torch.full((10,), 3.0))
    assert torch.equal(more.result[0], torch.ones(1 << 16))


def test_gradients_in_buffers_that_are_used_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """zero_grad(set_to_none=False), DDP's bucket views: detected; steps of the next window wait."""
    job.set_to_none = False
    with contextlib.closing(Link(bytes_per_second=2e4)) as link, MultiStepStager(job.optimizer, 4, link=link) as stager:
        with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="overwritten"):
            overwritten = hold(patched, "end", lambda copy: copy._allocate is None)  # private: of gradients alone
            zero_grad, calls = job.optimizer.zero_grad, itertools.count(1)

            def note(*given: Any, **named: Any) -> None:
                zero_grad(*given, **named)
                if next(calls) == 2:  # the first is before there are any
                    overwritten.set()

            patched.setattr(job.optimizer, "zero_grad", note)
            windowed(job, stager, 4)
        second, states = windowed(job, stager, 4)
    check(second.state, states[second.steps])


def changes() -> dict[str, Callable[[Job], None]]:
    def edited(job: Job) -> None:
        next(job.model.parameters()).data.mul_(0.5)

    def loaded(job: Job) -> None:
        job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))

    def grown(job: Job) -> None:
        job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})

    return {"outside the optimizer": edited, "load_state_dict": loaded, "groups or parameters changed": grown}


@pytest.mark.parametrize("reason", changes())
def test_what_breaks_a_window_is_the_error_of_its_future(reason: str, job: Job) -> None:
    job.train()
    with MultiStepStager(job.optimizer, window_steps=4) as stager:
        with pytest.raises(CheckpointError, match=reason):
            windowed(job, stager, 4, functools.partial(changes()[reason], job), changed_step=2)
        after, states = windowed(job, stager, 4)
        check(after.state, states[after.steps])


def test_a_change_between_two_parts_is_seen_though_no_step_was_made(job: Job) -> None:
    """An optimizer that bypasses the hooks: its parameters change without a step."""
    with MultiStepStager(job.optimizer, window_steps=2) as stager:
        pending = stager.begin(job.state)
        stager.link.copy([torch.ones(1)], PARTS).done.result(SECONDS)  # after the first part
        next(job.model.parameters()).data.mul_(0.5)
        stager.end_of_step()
        with pytest.raises(CheckpointError, match="outside the optimizer"):
            pending.result(SECONDS)
        assert not stager.is_open


def test_a_change_of_the_last_part_while_it_is_copied_is_seen(
    slow_link: Link, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MultiStepStager(job.optimizer, window_steps=2, link=slow_link) as stager:
        pending = stager.begin(job.state)
        job.train()
        go_on = hold(monkeypatch, "end")
        stager.end_of_step()
        with torch.no_grad():
            list(job.model.parameters())[-1].mul_(0.5)
        go_on.set()
        with pytest.raises(CheckpointError, match="while it was being copied"):
            pending.result(SECONDS)


@pytest.mark.parametrize("when", [0, 2, 5])
def test_host_memory_that_runs_out(when: int, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1000))

    def refuses(original: Callable[..., Any]) -> Callable[..., Any]:
        def taken(*given: Any) -> Any:
            if next(calls) == when:
                raise MemoryError
            return original(*given)

        return taken

    for owner, name in ((links, "host_memory"), (links.PinnedMemory, "tensors")):
        monkeypatch.setattr(owner, name, refuses(getattr(owner, name)))
    with (
        MultiStepStager(job.optimizer, window_steps=4) as stager,
        pytest.raises(CheckpointError, match="host memory ran out"),
    ):
        windowed(job, stager, 4)


@pytest.mark.parametrize("where", ["the last part", "a step made again"])
def test_memory_that_runs_out_at_the_end_of_a_window_needs_no_step_behind_it(
    where: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuses(*_: Any) -> Any:
        raise MemoryError

    with MultiStepStager(job.optimizer, window_steps=3) as stager, monkeypatch.context() as patched:
        pending = stager.begin(job.state)
        job.train()
        stager.end_of_step()
        if where == "a step made again":
            patched.setattr(multi_step.Replay, "apply", refuses)
        job.train()
        if where == "the last part":
            patched.setattr(stager.link, "copy", refuses)
        stager.end_of_step()
        assert where != "the last part" or pending.done()
        with pytest.raises(CheckpointError, match="host memory ran out"):
            pending.result(SECONDS)
        assert not stager.is_open


def first_moment(job: Job) -> torch.Tensor:
    moment: torch.Tensor = job.optimizer.state[next(job.model.parameters())]["exp_avg"]
    return moment


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda job: first_moment(job).data.mul_(0.5), "exp_avg of parameter .* outside the optimizer"),
        (lambda job: first_moment(job).zero_(), "or its state was"),
        (lambda job: job.optimizer.state.clear(), "or its state was"),
    ],
    ids=["without a trace", "in place", "replaced"],
)
def test_a_change_of_the_state_alone_is_seen(edit: Callable[[Job], None], reason: str, job: Job) -> None:
    """At the last step: no later step has an effect on parameters."""
    with MultiStepStager(job.optimizer, window_steps=2) as stager:
        pending = stager.begin(job.state)
        job.train()
        edit(job)
        stager.end_of_step()
        with pytest.raises(CheckpointError, match=reason):
            pending.result(SECONDS)


@pytest.mark.parametrize("make", [functools.partial(torch.optim.AdamW, fused=True), torch.optim.AdamW])
def test_parameters_that_are_not_contiguous(make: Callable[..., torch.optim.Optimizer]) -> None:
    """A fused step rounds elements at the end of a tensor's memory differently."""
    torch.manual_seed(1)
    sources = [torch.randn(7, 13).t(), torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)]
    weights = [nn.Parameter(one.clone()) for one in sources for _ in range(3)]
    optimizer = make(weights)

    def train() -> None:
        for one in weights:
            one.grad = torch.empty_like(one).copy_(torch.randn(one.shape))
        optimizer.step()

    train()
    with MultiStepStager(optimizer, window_steps=4) as stager:
        pending = stager.begin(lambda: {"weights": list(weights), "optimizer": optimizer.state_dict()})
        for _ in range(3):
            train()
            stager.end_of_step()
        snapshot = pending.result(SECONDS)
    check(snapshot.state["optimizer"], optimizer.state_dict())


def test_waiting_for_steps_that_nobody_makes_is_refused() -> None:
    job = Job()
    with MultiStepStager(job.optimizer, window_steps=3) as stager:
        pending = stager.begin(job.state)
        with pytest.raises(CheckpointError, match="before the last step of its window"):
            pending.result()
        for _ in range(2):
            job.train()
            stager.end_of_step()
        check(pending.result(SECONDS).state, job.state())


def test_a_stager_keeps_no_copied_state_after_its_window(job: Job) -> None:
    """Without a garbage collection: the next window uses the memory again."""
    with MultiStepStager(job.optimizer, 2) as stager:
        gc.collect()
        gc.disable()
        try:
            snapshot, _ = windowed(job, stager, 2)
            tensors = [weakref.ref(one) for one in snapshot.state["model"].values()]
            assert all(one() is not None for one in tensors)
            del snapshot
            # Threads that have just finished hold some.
            assert any(all(one() is None for one in tensors) for _ in Poll(SECONDS))
        finally:
            gc.enable()


def test_a_stager_that_is_closed_ends_its_window_and_leaves_no_hook_and_no_thread() -> None:
    job = Job()
    before = set(threading.enumerate())
    stager = MultiStepStager(job.optimizer, window_steps=4)
    pending = stager.begin(job.state)
    stager.close()
    with pytest.raises(CheckpointError, match="closed before"):
        pending.result(SECONDS)
    job.train()
    assert not job.optimizer._optimizer_step_pre_hooks and not job.optimizer._optimizer_step_post_hooks
    assert set(threading.enumerate()) <= before


def test_nothing_of_a_snapshot_shares_memory_with_training() -> None:
    job = Job(functools.partial(torch.optim.SGD, lr=0.1))
    with MultiStepStager(job.optimizer, window_steps=2) as stager:
        snapshot, _ = windowed(job, stager, 2)
    kept = copy.deepcopy(snapshot.state)
    for _ in range(3):
        job.train()
    check(snapshot.state, kept)


def test_the_number_of_steps_is_that_of_the_published_system() -> None:
    assert best_steps(1 / 7) in (7, 8) and best_steps(1 / 3) in (3, 4) and best_steps(1 / 6) in (6, 7)
    assert best_steps(0) == 7
    state, gradients = 14e9, 2e9
    assert best_steps(1 / 7, steps_bytes=1.01 * state, state_bytes=state) == 1
    assert best_steps(1 / 7, steps_bytes=gradients * 2.2, state_bytes=state) in (4, 5)


@pytest.mark.parametrize("share", [0.0, 1 / 7, 1 / 3])
def test_parts_have_equal_traffic_and_hold_everything_once(share: float) -> None:
    chosen = np.random.default_rng(4)
    sizes = {str(number): int(size) for number, size in enumerate(chosen.integers(1000, 3000, 700))}
    parts = split_parts(sizes, weights_of(share, 7))
    assert [key for part in parts for key in part] == list(sizes)
    moved = [sum(sizes[key] for key in part) for part in parts]
    traffic = [size + share * sum(moved[:number]) for number, size in enumerate(moved)]
    assert max(traffic) <= 1.05 * min(traffic)
    assert len(split_parts({"only": 5}, weights_of(share, 7))) == 1
