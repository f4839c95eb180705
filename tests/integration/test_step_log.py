"""``EveryStep(gradient_log=...)``: logged steps, restores from the log, and errors."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import tierckpt
from tests.command_line import CommandLine
from tests.fault.step_log_scenarios import Job
from tests.fault.training_jobs import Deferring
from tests.states import flip
from tierckpt import Checkpointer, EveryStep
from tierckpt.errors import ConfigError
from tierckpt.format.layout import GRADIENTS_DIR, local_dir, parse_uri
from tierckpt.replay import checksum
from tierckpt.replay.link import GRADIENTS, Link, TensorCopy
from tierckpt.replication.log_copies import COPIES
from tierckpt.save import log_segments
from tierckpt.training.every_step import step_log, window
from tierckpt.training.every_step.step_log import agreed_step

Runs = Callable[..., Checkpointer]


@pytest.fixture
def run(file_uri: str, local_root: Path, request: pytest.FixtureRequest) -> Runs:
    def opened(gradient_log: bool | str = True, window_steps: int | None = None, **options: Any) -> Checkpointer:
        every_step = EveryStep(gradient_log=gradient_log, window_steps=window_steps)
        options = {"drain": False, "local_root": local_root, "every_step": every_step} | options
        checkpointer_of_run = Checkpointer(file_uri, **options)
        request.addfinalizer(checkpointer_of_run.close)
        return checkpointer_of_run

    return opened


def directory(local_root: Path, uri: str, rank: int = 0) -> Path:
    return local_dir(local_root, parse_uri(uri)) / GRADIENTS_DIR / f"rank-{rank}"


def advance(
    checkpointer: Checkpointer, job: Job, steps: int, beside: Callable[[int], object] = lambda number: None
) -> dict[int, str]:
    """Train to step ``steps``; call ``beside`` after each step. Returns the digest after each step."""
    digests: dict[int, str] = {}
    while job.state["step"] < steps:
        number = job.train()
        digests[number] = job.digest()
        saved = checkpointer.step(number, job.state)
        if saved is not None:
            saved.result(60)
        beside(number)
    return digests


def train(checkpointer: Checkpointer, job: Job, steps: int) -> str:
    """Train to step ``steps``, flush the log and return the digest of the state."""
    advance(checkpointer, job, steps)
    checkpointer.close()
    return job.digest()


def reference(steps: int) -> dict[int, str]:
    """The digests of a job without interruptions."""
    job = Job()
    return {job.train(): job.digest() for _ in range(steps)}


def resumed(checkpointer: Checkpointer) -> tuple[Job, int | None]:
    job = Job()
    return job, checkpointer.restore(job.state)


@pytest.mark.parametrize("setting", [True, "3 steps", "20 ms"])
def test_killed_job_resumes_at_its_last_logged_step(run: Runs, setting: bool | str) -> None:
    expected = train(run(gradient_log=setting), Job(), 7)
    checkpointer = run(gradient_log=setting)
    job, step = resumed(checkpointer)
    assert (step, job.state["step"], job.digest()) == (7, 7, expected)
    expected = train(checkpointer, job, 12)
    job, step = resumed(run())
    assert (step, job.digest()) == (12, expected)
    assert reference(12)[12] == expected


def test_status_and_report_show_the_log(run: Runs, file_uri: str, cli: CommandLine) -> None:
    train(run(interval=5), Job(), 8)
    checkpointer = run()
    job, _ = resumed(checkpointer)
    train(checkpointer, job, 9)
    [log] = cli.answer("status")["gradient_logs"]
    assert (log["uri"], log["rank"], log["newest_step"]) == (file_uri, 0, 9) and log["size_bytes"] > 4096
    assert cli.answer("report", file_uri)["replayed_steps"] == 3
    assert "3 steps without a checkpoint" in cli.text("report", file_uri).out


def train_with_window(checkpointer_of_run: Checkpointer, job: Job, steps: int) -> dict[int, str]:
    """Resume, train to step ``steps`` and stop without a final save. Returns the digest after each step."""
    digests: dict[int, str] = {}
    with contextlib.suppress(KeyboardInterrupt), checkpointer_of_run as checkpointer:
        checkpointer.restore(job.state)
        while job.state["step"] < steps:
            number = job.train()
            digests[number] = job.digest()
            checkpointer.step(number, job.state)
            if number == 6:  # the first window is complete
                checkpointer.wait("local")
        raise KeyboardInterrupt
    return digests


@pytest.mark.parametrize("is_deferred", [False, True], ids=["on the CPU", "as on an accelerator"])
def test_steps_after_a_window_are_logged_with_one_gradient_copy(
    run: Runs, monkeypatch: pytest.MonkeyPatch, file_uri: str, is_deferred: bool
) -> None:
    """Frames start at the last step of a complete window; while a window is open, at the previous window's."""
    if is_deferred:
        monkeypatch.setattr(window, "MultiStepStager", Deferring)
    copied: list[int] = []

    def copy(this: Link, sources: Any, priority: int, **more: Any) -> TensorCopy:
        copied.append(priority)
        return original(this, sources, priority, **more)

    original = Link.copy
    monkeypatch.setattr(Link, "copy", copy)
    options: dict[str, Any] = {"window_steps": 4, "interval": 10}
    digests = train_with_window(run(**options), Job(), 12)  # windows: steps 1 to 4, then from step 10
    assert copied.count(GRADIENTS) == 3 + 8, "three steps in the first window, and each later step once"
    job, step = resumed(run(**options))
    assert step == 12 and job.digest() == digests[12]
    digests |= train_with_window(run(**options), Job(), 25)
    job, step = resumed(run(**options))
    assert step == 25 and job.digest() == digests[25]


def test_info_shows_the_logs_of_a_run_and_of_a_checkpoint(
    run: Runs, file_uri: str, local_root: Path, cli: CommandLine
) -> None:
    train(run(interval=5), Job(), 8)
    checkpointer = run()
    assert checkpointer.restore(Job().state, step=5) == 5  # a new history begins here
    again = Job()
    checkpointer.restore(again.state, step=5)
    train(checkpointer, again, 7)
    document = cli.answer("info", file_uri)
    assert document["kind"] == "run" and document["checkpoints"] >= 2
    [log] = document["gradient_logs"]  # from the first saved step; no valid checkpoint needs the abandoned log
    assert (log["rank"], log["base_step"], log["newest_step"], log["steps"], log["ended"]) == (0, 5, 7, 2, "")
    assert log["verified_step"] >= 6 and log["size_bytes"] > 4096
    assert [one["base_step"] for one in cli.answer("info", f"{file_uri}/step-5")["gradient_logs"]] == [5]
    [*_, newest] = log_segments.paths_in(directory(local_root, file_uri))
    data = newest.read_bytes()
    newest.write_bytes(data[:-4096])
    for step in (5, 6):
        shutil.rmtree(local_dir(local_root, parse_uri(file_uri)) / f"step-{step}")
    log, *_ = cli.answer("info", file_uri)["gradient_logs"]
    assert log["newest_step"] == 6 and "cut short" in log["ended"] and "is missing" in log["ended"]
    assert "is missing" in " ".join(cli.text("info", file_uri).out.split())


def test_gradient_log_accepts_only_a_step_count_or_a_duration(run: Runs) -> None:
    setting: Any
    for setting in ("often", "0 steps", "5 s", "steps", 5, None):
        with pytest.raises(ConfigError, match="gradient_log is"):
            run(gradient_log=setting)


def test_unreplayable_optimizer_is_refused_at_the_first_step(run: Runs) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="LBFGS"):
        run().step(1, {"model": model, "optimizer": torch.optim.LBFGS(model.parameters())})
    with pytest.raises(ConfigError, match="no optimizer"):
        run().step(1, {"model": model})


def test_lost_checkpoint_falls_back_to_the_previous_one_and_its_log(run: Runs, file_uri: str, local_root: Path) -> None:
    expected = train(run(interval=5), Job(), 13)
    shutil.rmtree(local_dir(local_root, parse_uri(file_uri)) / "step-10")
    job, step = resumed(run())
    assert (step, job.digest()) == (13, expected)


def test_segments_that_no_checkpoint_needs_are_removed(run: Runs, file_uri: str, local_root: Path) -> None:
    train(run(interval=4), Job(), 18)
    begins = [log_segments.step_of_path(path) for path in log_segments.paths_in(directory(local_root, file_uri))]
    assert begins == [12, 16]


def test_log_is_not_replayed_on_another_checkpoint_of_the_same_step(run: Runs, file_uri: str, local_root: Path) -> None:
    """Another job saved the same step."""
    train(run(interval=5), Job(), 8)
    logs = directory(local_root, file_uri)
    kept = shutil.copytree(logs, logs.with_name("kept"))
    job = Job()
    torch.manual_seed(77)
    expected = train(run(interval=5), job, 5)
    shutil.rmtree(logs)
    kept.rename(logs)
    job, step = resumed(run())
    assert (step, job.digest()) == (5, expected)


def test_checkpoint_newer_than_the_log_is_restored_without_it(run: Runs, file_uri: str, local_root: Path) -> None:
    train(run(interval=5), Job(), 8)
    logs = directory(local_root, file_uri)
    [*_, newest] = log_segments.paths_in(logs)
    newest.unlink()
    job, step = resumed(run())
    assert step == 5 == job.state["step"]


def test_log_without_its_checkpoint_is_ignored(run: Runs, file_uri: str, local_root: Path) -> None:
    train(run(), Job(), 4)
    shutil.rmtree(local_dir(local_root, parse_uri(file_uri)) / "step-1")
    assert resumed(run())[1] is None


def flip_frame(local_root: Path, uri: str, number: int) -> None:
    """Flip a bit in the middle of a frame of the only segment."""
    [path] = log_segments.paths_in(directory(local_root, uri))
    data = path.read_bytes()
    frame = (len(data) - 4096) // data.count(log_segments.FRAME)
    flip(path, 4096 + number * frame + frame // 2)


def test_damaged_frame_restores_the_previous_step_with_a_warning(
    run: Runs, file_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digests = reference(8)
    train(run(), Job(), 8)
    flip_frame(local_root, file_uri, 4)
    checkpointer = run()
    job, step = resumed(checkpointer)
    assert step == 5 and job.digest() == digests[5]
    assert "cannot be used" in caplog.text
    assert train(checkpointer, job, 8) == digests[8]  # and logging resumes there
    assert resumed(run())[1] == 8


def test_full_disk_ends_the_log_and_the_next_checkpoint_starts_a_new_one(
    run: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer, job = run(), Job()
    for _ in range(3):
        checkpointer.step(job.train(), job.state)
    checkpointer.wait("local")
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(step_log, "room_bytes", lambda settings: 0)
        patched.setattr(step_log, "has_room", lambda *_: False)
        for _ in range(3):
            checkpointer.step(job.train(), job.state)
        assert "has no room for a frame" in caplog.text and "until the next checkpoint" in caplog.text
    checkpointer.save(6, job.state).result(60)
    expected = train(checkpointer, job, 9)
    again, step = resumed(run())
    assert (step, again.digest()) == (9, expected)


def clamp(job: Job) -> None:
    with torch.no_grad():
        job.model[0].weight.clamp_(-0.1, 0.1)


def clamp_data(job: Job) -> None:
    job.model[0].weight.data[3, 5] += 1e-3


def clamp_numpy(job: Job) -> None:
    job.model[0].weight.detach().numpy()[3, 5] += 1e-3


def step_fused(job: Job) -> None:
    """By an optimizer outside the state, without state of its own."""
    for one in job.model.parameters():
        one.grad = torch.ones_like(one)
    torch.optim.SGD(job.model.parameters(), lr=0.1, fused=True).step()


def reset_momentum(job: Job) -> None:
    """Replace the tensor by one with the same version counter."""
    state = job.optimizer.state[job.model[0].weight]
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def reset_momentum_data(job: Job) -> None:
    job.optimizer.state[job.model[0].weight]["exp_avg"].data.zero_()


EDITS = {
    clamp: "changed outside the optimizer",
    clamp_data: "version counters do not show",
    clamp_numpy: "version counters do not show",
    step_fused: r"another optimizer \(SGD\) stepped its parameters",
    reset_momentum: "its state was",
    reset_momentum_data: "version counters do not show",
}


class Fused(Job):
    """The fused update does not change version counters."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.state |= {"optimizer": self.optimizer, "schedule": self.schedule}


@pytest.mark.parametrize("where", ["before the end of the step", "before the next update"])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_edit_outside_the_optimizer_ends_the_log_and_saves_the_next_step(
    run: Runs,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[Job], None],
    where: str,
) -> None:
    """A warning gives the reason. Each step logged or saved before the edit restores bit for bit."""
    monkeypatch.setattr(checksum, "CHECK_SHARE", 1e9)  # on machines of any speed
    checkpointer, job, digests = run(), Fused(), dict[int, str]()
    with caplog.at_level(logging.WARNING):
        for number in range(1, 8):
            if number == 5 and where == "before the next update":
                edit(job)
            job.train()
            if number == 4 and where != "before the next update":
                edit(job)
            digests[number] = job.digest()
            checkpointer.step(number, job.state)
            checkpointer.wait("local")
    [ended] = [record.getMessage() for record in caplog.records if "is logged until" in record.getMessage()]
    assert re.search(EDITS[edit], ended)
    [_, saved] = [record.step for record in checkpointer.stats]
    assert saved in ([5] if "next" in where else [4, 5])  # the digest thread detects it in time, or at the next step
    checkpointer.close()
    again = Fused()
    assert run().restore(again.state) == 7 and again.digest() == digests[7]


def jobs_in(directory: Path) -> set[str]:
    """Return the names of the jobs that wrote the segments in ``directory``."""
    found = [log_segments.Tail(path) for path in log_segments.paths_in(directory)]
    for tail in found:
        tail.read_new()
    return {tail.segment.owner["job"] for tail in found if tail.segment}


def test_loop_that_rewinds_logs_a_new_history(run: Runs, file_uri: str, local_root: Path) -> None:
    """In one process, with other data from that step on. A rank without log frames since is not mistaken for one
    that has them. A node that was disconnected still has the abandoned history, which is longer (G4)."""
    checkpointer, job = run(interval=5), Job()
    advance(checkpointer, job, 9)
    log = directory(local_root, file_uri)
    given_up = jobs_in(log)
    shutil.copytree(log, log.parent / COPIES / "other-node" / log.name)
    assert checkpointer.restore(job.state, step=5) == 5
    torch.manual_seed(99)
    train(checkpointer, job, 7)
    assert len(given_up) == len(jobs_in(log) - given_up) == 1
    again, step = resumed(run())
    assert (step, again.digest()) == (7, job.digest())


def test_checkpoint_before_any_update_serves_when_the_next_is_lost(run: Runs, file_uri: str, local_root: Path) -> None:
    """Gradients accumulate, so two checkpoints hold the same parameters with no frame between them."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    checkpointer = run(interval=2)
    for number in range(1, 4):
        model(torch.ones(2, 4) * number).square().mean().backward()
        if number == 3:
            optimizer.step()
        state["step"] = number
        checkpointer.step(number, state)
    expected = model.weight.detach().clone()
    checkpointer.close()
    shutil.rmtree(local_dir(local_root, parse_uri(file_uri)) / "step-2")
    torch.nn.init.zeros_(model.weight)
    assert run().restore(state) == 3 == state["step"]
    assert torch.equal(model.weight, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_step_skipped_by_grad_scaler_changes_only_the_scaler(run: Runs, fused: bool) -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scaler": scaler}
    checkpointer = run()
    for number in range(1, 7):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean() * (torch.inf if number == 4 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        checkpointer.step(number, state)
    expected = (
        model.weight.detach().clone(),
        scaler.state_dict(),
        optimizer.state_dict()["state"][0]["exp_avg"].clone(),
    )
    checkpointer.close()
    torch.nn.init.zeros_(model.weight)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 1.0})
    assert run().restore(state) == 6
    assert torch.equal(model.weight, expected[0]) and scaler.state_dict() == expected[1] and scaler.get_scale() == 4.0
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], expected[2])


def test_alternating_optimizers_and_an_averaged_model(run: Runs) -> None:
    """Each step runs one optimizer or both; averaged weights have none; frozen parameters stay."""
    torch.manual_seed(2)
    one, two, frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    average = torch.optim.swa_utils.AveragedModel(one, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    state: dict[str, Any] = {
        "one": one,
        "two": two,
        "frozen": frozen,
        "average": average,
        "untraced": (untraced := nn.Linear(4, 4)),
        "first": torch.optim.AdamW(one.parameters()),
        "second": torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    }
    checkpointer = run()
    for number in range(1, 8):
        frozen(two(one(torch.randn(3, 4)))).square().mean().backward()
        for name in ("first", "second") if number == 5 else ("first",) if number % 2 else ("second",):
            state[name].step()
        for name in ("first", "second"):
            state[name].zero_grad()
        average.update_parameters(one)
        for mean, weight in zip(untraced.parameters(), one.parameters(), strict=True):
            mean.data.mul_(0.9).add_(weight.data, alpha=0.1)
        checkpointer.step(number, state)
    checkpointer.close()
    modules = [one, two, frozen, average, untraced]
    expected = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
    for module in modules:
        for value in module.state_dict().values():
            value.zero_()
    assert run().restore(state) == 7
    for module, values in zip(modules, expected, strict=True):
        assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())


def test_undetected_edit_of_a_parameter_without_optimizer_ends_the_log_once(
    run: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    """None of its 64 sampled elements changes. From the next checkpoint on, each frame logs the parameter."""
    torch.manual_seed(2)
    model, copy = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)
    state: dict[str, Any] = {"model": model, "copy": copy, "optimizer": torch.optim.AdamW(model.parameters())}
    checkpointer = run()
    with caplog.at_level(logging.WARNING):
        for number in range(1, 10):
            copy(model(torch.randn(3, 64))).square().mean().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            if number >= 4:
                copy.weight.data[1, 1] += 1.0
            checkpointer.step(number, state)
            checkpointer.wait("local")
    [ended] = [record.getMessage() for record in caplog.records if "is logged until" in record.getMessage()]
    assert "no step after 3 is logged" in ended and "copy.weight, which no optimizer" in ended
    [_, saved] = [record.step for record in checkpointer.stats]
    assert saved in (4, 5)
    checkpointer.close()
    expected = [one.clone() for one in (model.weight, copy.weight)]
    for one in (model.weight, copy.weight):
        one.data.zero_()
    assert run().restore(state) == 9
    assert torch.equal(model.weight, expected[0]) and torch.equal(copy.weight, expected[1])


def test_repeatedly_ending_logs_lead_to_fewer_checkpoints(run: Runs) -> None:
    checkpointer, job = run(), Job()
    for number in range(1, 40):
        job.train()
        clamp(job)
        checkpointer.step(number, job.state)
        checkpointer.wait("local")
    assert [record.step for record in checkpointer.stats] == [1, 2, 4, 8, 16, 32]


def test_restore_of_an_earlier_step(run: Runs) -> None:
    train(run(interval=4), Job(), 10)
    job = Job()
    assert run().restore(job.state, step=4) == 4
    assert resumed(run())[1] == 10  # restoring without training changes nothing
    checkpointer = run()
    assert checkpointer.restore(job.state, step=4) == 4
    assert train(checkpointer, job, 6) == reference(6)[6]
    assert resumed(run())[1] == 6  # the checkpoint of step 8 exists, but is abandoned


def test_abandoned_base_checkpoint_of_a_log_is_listed_and_pruned(run: Runs, file_uri: str, cli: CommandLine) -> None:
    train(run(interval=4, drain=True), Job(), 9)
    job, second = Job(), run(drain=True)
    assert second.restore(job.state, step=4) == 4
    train(second, job, 6)
    listed = {one["step"]: one.get("abandoned", False) for one in cli.answer("ls", file_uri)["checkpoints"]}
    assert listed[8] and not listed[4]
    cli.answer("prune", file_uri, "--abandoned", "--yes")
    assert 8 not in [one["step"] for one in cli.answer("ls", file_uri)["checkpoints"]]
    assert resumed(run())[1] == 6


@pytest.mark.parametrize(
    ("chains", "expected"),
    [
        ([[], []], None),
        ([[("a", 0, 5)], []], None),
        ([[("a", 0, 5)], [("a", 0, 4)]], 4),
        ([[("a", 0, 5), ("a", 5, 9)], [("a", 0, 5), ("a", 5, 8)]], 8),
        ([[("a", 0, 5), ("b", 5, 9)], [("a", 0, 6)]], 5),  # job b resumed at step 5
        ([[("a", 0, 5), ("b", 5, 9)], [("a", 0, 5), ("c", 5, 9)]], 5),
        ([[("b", 0, 9)], [("a", 0, 9)]], None),
    ],
)
def test_ranks_agree_on_a_step_of_one_history(chains: list[list[tuple[str, int, int]]], expected: int | None) -> None:
    assert agreed_step(chains) == expected


def test_values_of_many_types_are_restored(run: Runs) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": tierckpt.RngState(), "seen": {}}
    checkpointer = run()
    for number in range(1, 4):
        optimizer.zero_grad()
        model(torch.randn(2, 2)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"].mul_(0.5)
        state["seen"] = {"set": {1, number}, "tensor": torch.full((3,), float(number), dtype=torch.bfloat16), "t": (1,)}
        checkpointer.step(number, state)
    checkpointer.close()
    drawn = torch.rand(3)
    state["seen"], optimizer.param_groups[0]["lr"] = {}, torch.tensor(9.0)
    assert run().restore(state) == 3
    assert torch.equal(torch.rand(3), drawn) and optimizer.param_groups[0]["lr"].item() == pytest.approx(0.0125)
    assert state["seen"]["set"] == {1, 3} and state["seen"]["t"] == (1,)
    assert torch.equal(state["seen"]["tensor"], torch.full((3,), 3.0, dtype=torch.bfloat16))


def end_log(checkpointer: Checkpointer) -> None:
    """Close the log without a final save, as if the job were killed after flushing it."""
    checkpointer._step_log.close()  # private: close() saves


def save_beside(how: str, job: Job, step: int, uri: str, folder: Path, **options: Any) -> None:
    """Save ``job`` through another writer of the same run."""
    if how == "Checkpointer":
        with Checkpointer(uri, **options) as other:
            other.save(step, job.state).result(60)
    elif how == "dcp.save":
        state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
        dcp.save(state, storage_writer=tierckpt.TierStorageWriter(f"{uri}/step-{step}", **options), no_dist=True)
    else:
        torch.save(job.model.state_dict(), folder / "model.pt")
        tierckpt.adopt(folder, f"{uri}/step-{step}", **options)


@pytest.mark.parametrize("how", ["Checkpointer", "dcp.save", "adopt"])
def test_save_by_another_writer_hides_no_logged_step(
    how: str, run: Runs, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    """A save by another Checkpointer that prunes all but its newest, too."""
    folder, job, options = tmp_path / "files", Job(), {"drain": False, "local_root": local_root}
    folder.mkdir()
    checkpointer = run()
    if how == "Checkpointer":
        options["keep_last"] = 1

    def beside(number: int) -> None:
        if number in (8, 12):
            save_beside(how, job, number, file_uri, folder, **options)

    digests = advance(checkpointer, job, 20, beside)
    end_log(checkpointer)
    continued = run()
    again, step = resumed(continued)
    assert step == 20 and again.digest() == digests[20]
    again.train()
    assert continued.step(21, again.state) is None, "the log must continue"
    end_log(continued)
    last, step = resumed(run())
    assert step == 21 and last.digest() == again.digest()


@pytest.mark.parametrize(
    ("damage", "reached"),
    [("a frame behind the save", 11), ("a frame before the save", 8), ("the base", 8), ("the log is older", 8)],
)
def test_save_is_restored_when_the_log_ends_before_it(
    damage: str, reached: int, run: Runs, file_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, checkpointer = Job(), run()

    def beside(number: int) -> None:
        if number == 8:
            save_beside("Checkpointer", job, 8, file_uri, Path(), drain=False, local_root=local_root)

    digests = advance(checkpointer, job, 8 if "older" in damage else 14, beside)
    end_log(checkpointer)
    if "frame" in damage:
        flip_frame(local_root, file_uri, 3 if "before" in damage else 10)
    if damage == "the base":
        for one in local_dir(local_root, parse_uri(f"{file_uri}/step-1")).glob("*.distcp"):
            one.write_bytes(bytes(one.stat().st_size))
    again, step = resumed(run())
    assert step == reached, caplog.text
    assert again.digest() == digests[reached]
