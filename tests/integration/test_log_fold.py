"""A gradient log is made into a checkpoint beside training, and the job goes on from that (``training/log_fold``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn.parallel import DistributedDataParallel

import tierckpt
from tests.fault.step_log_scenarios import Job
from tierckpt import Checkpointer
from tierckpt.agent import log_folds
from tierckpt.agent.log_folds import LogFolds, due
from tierckpt.checkpoint.local_commit import read_local_manifest, remove_local
from tierckpt.cli import info
from tierckpt.cli.ui.app import run as main
from tierckpt.config import Settings
from tierckpt.drain.rate_limiter import RateLimiter
from tierckpt.errors import CommitAbandonedError, IntegrityError, StateMismatchError, TierckptError
from tierckpt.format.layout import GRADIENTS_DIR, epoch_file, local_dir, parse_uri
from tierckpt.poll import Poll
from tierckpt.replay import log as logs
from tierckpt.replay.apply import Replay
from tierckpt.replay.capture import Step
from tierckpt.save import log_segments
from tierckpt.training import log_fold
from tierckpt.training.codec.template import template_of
from tierckpt.training.log_fold import fold

Runs = Callable[..., Checkpointer]
STEPS = 10


@pytest.fixture
def settings(local_root: Path) -> Settings:
    return Settings(local_root=local_root)


@pytest.fixture
def run(file_uri: str, settings: Settings, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setattr(log_segments, "FOLD_BYTES_MIN", 70_000)  # a segment has two steps
    monkeypatch.setattr(logs, "CHECK_SHARE", 1e9)  # every step has a digest of the parameters

    def opened(uri: str = file_uri, **options: Any) -> Checkpointer:
        made = Checkpointer(uri, gradient_log=True, settings=settings, **options)
        request.addfinalizer(made.close)
        return made

    return opened


def train(checkpointer: Checkpointer, job: Any, steps: int) -> dict[int, str]:
    """Train to step ``steps``. Returns what each step came to."""
    digests: dict[int, str] = {}
    while job.state["step"] < steps:
        number = job.train()
        digests[number] = job.digest()
        saved = checkpointer.step(number, job.state)
        if saved is not None:
            saved.result(60)
    return digests


def log_of(local_root: Path, uri: str) -> Path:
    return local_dir(local_root, parse_uri(uri)) / GRADIENTS_DIR / "rank-0"


def due_at(local_root: Path, step: int) -> log_folds.Fold:
    """What is due once the frame behind ``step`` is in its file."""
    for _ in Poll(60):
        if [one.step for one in due(local_root)] == [step]:
            break
    [one] = due(local_root)
    assert one.step == step
    return one


def is_committed(local_root: Path, uri: str) -> bool:
    return read_local_manifest(local_dir(local_root, parse_uri(uri))) is not None


def saved_in(local_root: Path, uri: str) -> dict[str, Any]:
    """What stock PyTorch reads there."""
    reader = FileSystemReader(local_dir(local_root, parse_uri(uri)))
    found = {
        name: torch.zeros(one.size, dtype=one.properties.dtype) if isinstance(one, TensorStorageMetadata) else ""
        for name, one in reader.read_metadata().state_dict_metadata.items()
    }
    load(found, storage_reader=reader, no_dist=True)
    return found


def same(one: Any, other: Any) -> bool:
    is_tensor = isinstance(one, torch.Tensor)
    return torch.equal(one, other) and one.dtype == other.dtype if is_tensor else bool(one == other)


def test_the_agent_folds_while_training_goes_on_and_the_job_resumes_behind_it(
    run: Runs, settings: Settings, file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    checkpointer, job = run(), Job()
    digests = train(checkpointer, job, STEPS)
    assert due_at(local_root, STEPS - 1).base == 1

    async def fold_beside() -> None:
        monkeypatch.setattr(log_folds, "LOOK_SECONDS", 0.05)
        working = asyncio.create_task(LogFolds(settings, RateLimiter(None, 4)).run())
        for _ in range(2000):
            digests.update(await asyncio.to_thread(train, checkpointer, job, job.state["step"] + 1))
            if not working.done() and is_committed(local_root, f"{file_uri}/step-9"):
                break
            await asyncio.sleep(0.1)
        working.cancel()

    asyncio.run(fold_beside())
    last = job.state["step"]
    checkpointer.close()
    for status, said in (((None, None), "no agent runs"), (({}, None), "by the agent")):
        monkeypatch.setattr(info, "agent_status", lambda settings, status=status: status)
        assert main(["info", file_uri, "--local-root", str(local_root)]) == 0
        assert said in " ".join(capsys.readouterr().out.split())
    again = Job()
    resumed = run()
    assert resumed.restore(again.state) == last
    assert again.digest() == digests[last]
    assert resumed.restore(again.state, step=STEPS - 1) == STEPS - 1  # the checkpoint alone
    assert again.digest() == digests[STEPS - 1]


class WithExtra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> int:
        return 1


class Rich:
    """Two optimizers, tied and frozen weights, statistics, named groups, values of many kinds."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 16))
        self.model[2].weight = self.model[0].weight
        self.model[3].weight.requires_grad_(False)
        self.head = nn.Linear(16, 4, bias=False)
        bias = [(name, one) for name, one in self.model.named_parameters() if name.endswith("bias")]
        weights = [(name, one) for name, one in self.model.named_parameters() if name.endswith("weight")]
        self.optimizers = [
            torch.optim.AdamW([{"params": bias, "lr": 0.02}, {"params": weights}], amsgrad=True),
            torch.optim.SGD(self.head.parameters(), lr=torch.tensor(0.1), momentum=0.9, foreach=False),
        ]
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizers[0], 50)
        self.wrapped = wrap(self.model)
        self.state: dict[str, Any] = {
            "optimizer": self.optimizers[0], "model": self.wrapped, "head": self.head, "sgd": self.optimizers[1],
            "schedule": self.schedule, "rng": tierckpt.RngState(), "step": 0,
            "seen": {"tokens": 0, "shape": (1, [2, {3: torch.zeros(2)}])},
        }  # fmt: skip

    def train(self) -> int:
        self.head(self.wrapped(torch.randn(8, 16))).square().mean().backward()
        for one in self.optimizers:
            one.step()
            one.zero_grad()
        self.schedule.step()
        self.state["step"] += 1
        self.state["seen"]["tokens"] += 128
        self.state["seen"]["shape"][1][1][3] += 0.5
        return int(self.state["step"])

    def digest(self) -> str:
        return ""


@pytest.fixture(params=["alone", "DDP"])
def rich(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Rich]]:
    if request.param == "alone":
        yield Rich
        return
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield lambda: Rich(DistributedDataParallel)
    dist.destroy_process_group()


def test_it_is_the_checkpoint_that_training_would_have_saved(
    run: Runs, rich: Callable[[], Rich], settings: Settings, file_uri: str, local_root: Path
) -> None:
    """Names, values, types and bits: beside one of the same step that a job has saved itself."""
    train(run(), rich(), 16)
    one = due_at(local_root, 15)
    made = saved_in(local_root, fold(settings, one))
    other = Checkpointer(f"{file_uri}-saved", settings=settings, drain=False)
    job = rich()
    while job.train() < one.step:
        pass
    other.save(one.step, job.state).result(60)
    other.close()
    wanted = saved_in(local_root, f"{file_uri}-saved/step-{one.step}")
    assert made.keys() == wanted.keys()
    assert [name for name in made if not same(made[name], wanted[name])] == []


def test_the_log_stays_short_and_the_checkpoint_before_the_newest_leads_to_all(
    run: Runs, settings: Settings, file_uri: str, local_root: Path
) -> None:
    checkpointer, job = run(), Job()
    directory, digests, sizes = log_of(local_root, file_uri), {}, []
    made: list[log_folds.Fold] = []
    for steps in range(8, 41, 8):
        digests |= train(checkpointer, job, steps)
        one = due_at(local_root, steps - 1)
        fold(settings, one)
        made.append(one)
        sizes.append(sum(path.stat().st_size for path in log_segments.paths_in(directory)))
        assert steps - 1 not in [one.base for one in due(local_root)], "what is folded is not folded again"
    assert [one.base for one in made] == [1, *(one.step for one in made[:-1])]
    assert max(sizes[2:]) < 1.5 * sizes[1] and sizes[-1] < 0.6 * sum(sizes) / 2
    train(checkpointer, job, 42)
    checkpointer.close()
    assert remove_local(local_dir(local_root, parse_uri(f"{file_uri}/step-39")))
    again = Job()
    assert run().restore(again.state) == 42
    assert again.digest() == job.digest()


def test_what_is_not_the_state_of_that_step_is_never_committed(
    run: Runs, settings: Settings, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded: a fold that is a frame short, one that leaves a step out, another frame, a job that was started again."""
    checkpointer, job = run(), Job()
    train(checkpointer, job, STEPS)
    checkpointer.close()
    [one] = due(local_root)
    roll_forward, apply = log_fold.roll_forward, Replay.apply

    def a_frame_short(*given: Any, last_step: int, **more: Any) -> Any:
        return roll_forward(*given, last_step=last_step - 1, **more)

    def a_step_left_out(this: Replay, step: Step) -> None:
        if this.version == 3:
            this.version = step.version
        else:
            apply(this, step)

    def started_again(*given: Any, **more: Any) -> Any:
        epoch_file(local_root, parse_uri(one.run)).write_bytes(b"f" * 16)
        return roll_forward(*given, **more)

    with pytest.raises(IntegrityError, match=r"leads to step"):
        fold(settings, replace(one, step=one.step - 1))
    seeded: list[tuple[Any, str, Any, type[TierckptError], str]] = [
        (log_fold, "roll_forward", a_frame_short, IntegrityError, f"leads to step {one.step - 1}"),
        (Replay, "apply", a_step_left_out, IntegrityError, "other parameters than training had"),
        (log_fold, "roll_forward", started_again, CommitAbandonedError, "started again"),
    ]
    for where, name, bug, error, said in seeded:
        with monkeypatch.context() as patched, pytest.raises(error, match=said):
            patched.setattr(where, name, bug)
            fold(settings, one)
        assert not is_committed(local_root, f"{one.run}/step-{one.step}")
    again = Job()
    assert run().restore(again.state) == STEPS and again.digest() == job.digest()


def test_a_step_that_the_job_saves_is_left_to_it(run: Runs, local_root: Path) -> None:
    checkpointer, job = run(), Job()
    train(checkpointer, job, 8)
    checkpointer.save(8, job.state).result(60)
    train(checkpointer, job, 9)
    assert remove_local(local_dir(local_root, parse_uri(f"{checkpointer.location.uri}/step-8")))
    assert due_at(local_root, 7)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (lambda: {"m": WithExtra()}, "other names"),
        (lambda: {"o": torch.optim.SGD([nn.Parameter(torch.ones(2))])}, "of no module"),
        (lambda: {"m": nn.Linear(2, 2, device="meta")}, "is on meta"),
        (lambda: {"m": (m := nn.Linear(2, 2)), "o": type("Mine", (torch.optim.SGD,), {})(m.parameters())}, "a Mine"),
    ],
)
def test_what_cannot_be_made_without_the_code_of_the_job_is_said(state: Any, why: str) -> None:
    with pytest.raises(StateMismatchError, match=why):
        template_of(state())


def test_a_log_that_is_not_folded_says_why(
    run: Runs, file_uri: str, local_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointer = run(drain=False)
    train(checkpointer, Job(), STEPS)
    checkpointer.close()
    assert not list(due(local_root))
    assert main(["info", file_uri, "--local-root", str(local_root)]) == 0
    assert "not drained" in " ".join(capsys.readouterr().out.split())
