"""``EveryStep(gradient_log=...)``: what is logged, what a restore makes of it, and when it says no."""

from __future__ import annotations

import contextlib
import json
import logging
import random
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
from tests.fault.redo_log_job import Deferring
from tests.fault.step_log_scenarios import Job
from tierckpt import Checkpointer, EveryStep
from tierckpt.cli.ui.app import run as main
from tierckpt.errors import ConfigError
from tierckpt.format.layout import GRADIENTS_DIR, local_dir, parse_uri
from tierckpt.replay import guard
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
        made = Checkpointer(file_uri, **options)
        request.addfinalizer(made.close)
        return made

    return opened


def directory(local_root: Path, uri: str, rank: int = 0) -> Path:
    return local_dir(local_root, parse_uri(uri)) / GRADIENTS_DIR / f"rank-{rank}"


def train(checkpointer: Checkpointer, job: Job, steps: int) -> str:
    """Train to step ``steps``, have all of it on the disk, and return what it came to."""
    while job.state["step"] < steps:
        number = job.train()
        saved = checkpointer.step(number, job.state)
        if saved is not None:
            saved.result(60)
    checkpointer.close()
    return job.digest()


def resumed(checkpointer: Checkpointer) -> tuple[Job, int | None]:
    job = Job()
    return job, checkpointer.restore(job.state)


@pytest.mark.parametrize("asked", [True, "3 steps", "20 ms"])
def test_a_job_goes_on_where_it_was_cut_off(run: Runs, asked: bool | str) -> None:
    wanted = train(run(gradient_log=asked), Job(), 7)
    checkpointer = run(gradient_log=asked)
    job, step = resumed(checkpointer)
    assert (step, job.state["step"], job.digest()) == (7, 7, wanted)
    wanted = train(checkpointer, job, 12)
    job, step = resumed(run())
    assert (step, job.digest()) == (12, wanted)
    reference = Job()
    while reference.state["step"] < 12:
        reference.train()
    assert reference.digest() == wanted


def test_status_and_report_tell_of_it(
    run: Runs, file_uri: str, local_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run(interval=5), Job(), 8)
    checkpointer = run()
    job, _ = resumed(checkpointer)
    train(checkpointer, job, 9)

    def told(*arguments: str) -> Any:
        capsys.readouterr()
        assert main([*arguments, "--json", "--local-root", str(local_root)]) == 0
        return json.loads(capsys.readouterr().out)

    [log] = told("status")["gradient_logs"]
    assert (log["uri"], log["rank"], log["newest_step"]) == (file_uri, 0, 9) and log["size_bytes"] > 4096
    assert told("report", file_uri)["replayed_steps"] == 3
    assert main(["report", file_uri, "--local-root", str(local_root)]) == 0
    assert "3 steps that no checkpoint had" in capsys.readouterr().out


def windowed(made: Checkpointer, job: Job, steps: int) -> dict[int, str]:
    """Go on from where the run is to step ``steps``, and die. Returns what each step came to."""
    digests: dict[int, str] = {}
    with contextlib.suppress(KeyboardInterrupt), made as checkpointer:
        checkpointer.restore(job.state)
        while job.state["step"] < steps:
            number = job.train()
            digests[number] = job.digest()
            checkpointer.step(number, job.state)
            if number == 6:  # the first window is whole
                checkpointer.wait("local")
        raise KeyboardInterrupt
    return digests


@pytest.mark.parametrize("is_deferred", [False, True], ids=["on the CPU", "as on an accelerator"])
def test_steps_behind_windows_are_logged_and_the_gradients_copied_once(
    run: Runs, monkeypatch: pytest.MonkeyPatch, file_uri: str, local_root: Path, is_deferred: bool
) -> None:
    """Frames lead on from the last step of a window; while the next is open, from that of the one before."""
    if is_deferred:
        monkeypatch.setattr(window, "MultiStepStager", Deferring)
    copied: list[int] = []

    def copy(this: Link, sources: Any, priority: int, **more: Any) -> TensorCopy:
        copied.append(priority)
        return original(this, sources, priority, **more)

    original = Link.copy
    monkeypatch.setattr(Link, "copy", copy)
    options: dict[str, Any] = {"window_steps": 4, "interval": 10}
    digests = windowed(run(**options), Job(), 12)  # the first window is of steps 1 to 4, the second begins at 10
    assert copied.count(GRADIENTS) == 3 + 8, "three steps of the first window, and each step behind it once"
    job, step = resumed(run(**options))
    assert step == 12 and job.digest() == digests[12]
    digests |= windowed(run(**options), Job(), 25)
    job, step = resumed(run(**options))
    assert step == 25 and job.digest() == digests[25]


def test_info_shows_the_logs_of_a_run_and_those_behind_a_checkpoint(
    run: Runs, file_uri: str, local_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run(interval=5), Job(), 8)
    checkpointer = run()
    assert checkpointer.restore(Job().state, step=5) == 5  # another history begins here
    again = Job()
    checkpointer.restore(again.state, step=5)
    train(checkpointer, again, 7)

    def told(*arguments: str) -> Any:
        capsys.readouterr()
        assert main(["info", *arguments, "--json", "--local-root", str(local_root)]) == 0
        return json.loads(capsys.readouterr().out)

    document = told(file_uri)
    assert document["kind"] == "run" and document["checkpoints"] >= 2
    [log] = document["gradient_logs"]  # the first step saved, and no checkpoint that counts needs what was given up
    assert (log["rank"], log["base_step"], log["newest_step"], log["steps"], log["ended"]) == (0, 5, 7, 2, "")
    assert log["verified_step"] >= 6 and log["size_bytes"] > 4096
    assert [one["base_step"] for one in told(f"{file_uri}/step-5")["gradient_logs"]] == [5]
    [*_, newest] = log_segments.paths_in(directory(local_root, file_uri))
    data = newest.read_bytes()
    newest.write_bytes(data[:-4096])
    for step in (5, 6):
        shutil.rmtree(local_dir(local_root, parse_uri(file_uri)) / f"step-{step}")
    document = told(file_uri)
    log, *_ = document["gradient_logs"]
    assert log["newest_step"] == 6 and "cut short" in log["ended"] and "is missing" in log["ended"]
    assert main(["info", file_uri, "--local-root", str(local_root)]) == 0
    assert "is missing" in " ".join(capsys.readouterr().out.split())


def test_what_is_asked_for_is_a_number_of_steps_or_a_time(run: Runs) -> None:
    asked: Any
    for asked in ("often", "0 steps", "5 s", "steps", 5, None):
        with pytest.raises(ConfigError, match="gradient_log is"):
            run(gradient_log=asked)


def test_an_optimizer_that_cannot_be_replayed_is_refused_at_the_first_step(run: Runs) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="LBFGS"):
        run().step(1, {"model": model, "optimizer": torch.optim.LBFGS(model.parameters())})
    with pytest.raises(ConfigError, match="no optimizer"):
        run().step(1, {"model": model})


def test_a_checkpoint_that_is_lost_leaves_the_one_before_and_all_steps(
    run: Runs, file_uri: str, local_root: Path
) -> None:
    wanted = train(run(interval=5), Job(), 13)
    shutil.rmtree(local_dir(local_root, parse_uri(file_uri)) / "step-10")
    job, step = resumed(run())
    assert (step, job.digest()) == (13, wanted)


def test_segments_that_no_checkpoint_needs_are_removed(run: Runs, file_uri: str, local_root: Path) -> None:
    train(run(interval=4), Job(), 18)
    begins = [log_segments.step_of_path(path) for path in log_segments.paths_in(directory(local_root, file_uri))]
    assert begins == [12, 16]


def test_a_step_is_of_one_checkpoint_and_not_of_another_with_its_number(
    run: Runs, file_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another job has saved the same step: its log would lead from a state that is not there."""
    train(run(interval=5), Job(), 8)
    logs = directory(local_root, file_uri)
    kept = shutil.copytree(logs, logs.with_name("kept"))
    job = Job()
    torch.manual_seed(77)
    wanted = train(run(interval=5), job, 5)
    shutil.rmtree(logs)
    kept.rename(logs)
    job, step = resumed(run())
    assert (step, job.digest()) == (5, wanted)


def test_a_checkpoint_that_is_newer_than_the_log_is_restored_alone(run: Runs, file_uri: str, local_root: Path) -> None:
    train(run(interval=5), Job(), 8)
    logs = directory(local_root, file_uri)
    [*_, newest] = log_segments.paths_in(logs)
    newest.unlink()
    job, step = resumed(run())
    assert step == 5 == job.state["step"]


def test_a_log_without_its_checkpoint_is_of_no_use(run: Runs, file_uri: str, local_root: Path) -> None:
    train(run(), Job(), 4)
    shutil.rmtree(local_dir(local_root, parse_uri(file_uri)) / "step-1")
    assert resumed(run())[1] is None


def test_damage_to_any_frame_leads_to_the_step_before_and_is_said(
    run: Runs, file_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = Job()
    digests = {reference.train(): reference.digest() for _ in range(8)}
    train(run(), Job(), 8)
    run_directory = local_dir(local_root, parse_uri(file_uri))
    kept = shutil.copytree(run_directory, run_directory.with_name("kept"))
    chosen, ended = random.Random(4), 0
    for _ in range(12):
        shutil.rmtree(run_directory)
        shutil.copytree(kept, run_directory)
        [path] = log_segments.paths_in(directory(local_root, file_uri))
        data = bytearray(path.read_bytes())
        places = [at for at in range(4096, len(data)) if data[at]]  # not what fills the last block of a frame
        data[chosen.choice(places)] ^= 1 << chosen.randrange(8)
        path.write_bytes(data)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            checkpointer = run()
            job, step = resumed(checkpointer)
        assert step is not None and job.digest() == digests[step]
        assert "cannot be used" in caplog.text
        ended += step < 8
        assert train(checkpointer, job, 8) == digests[8]  # and the log goes on from there
        assert resumed(run())[1] == 8
    assert ended == 12


def test_a_full_disk_ends_the_log_and_the_next_checkpoint_begins_another(
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
    wanted = train(checkpointer, job, 9)
    again, step = resumed(run())
    assert (step, again.digest()) == (9, wanted)


def clamp(job: Job) -> None:
    with torch.no_grad():
        job.model[0].weight.clamp_(-0.1, 0.1)


def clamp_data(job: Job) -> None:
    job.model[0].weight.data[3, 5] += 1e-3


def clamp_numpy(job: Job) -> None:
    job.model[0].weight.detach().numpy()[3, 5] += 1e-3


def step_fused(job: Job) -> None:
    """By an optimizer that the state does not have, and which has no state of its own."""
    for one in job.model.parameters():
        one.grad = torch.ones_like(one)
    torch.optim.SGD(job.model.parameters(), lr=0.1, fused=True).step()


def reset_momentum(job: Job) -> None:
    """Another tensor, of the same version."""
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
    """The update leaves no trace in version counters."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.state |= {"optimizer": self.optimizer, "schedule": self.schedule}


@pytest.mark.parametrize("where", ["before the end of the step", "before the next update"])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edit_beside_the_optimizer_ends_the_log_and_the_next_step_is_saved(
    run: Runs,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[Job], None],
    where: str,
) -> None:
    """With the reason in a warning, at the step before the edit. Each step that was logged or saved has its bits."""
    monkeypatch.setattr(guard, "CHECK_SHARE", 1e9)  # however slow the machine is
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
    assert saved in ([5] if "next" in where else [4, 5])  # the digest thread sees it in time, or at the next step
    checkpointer.close()
    again = Fused()
    assert run().restore(again.state) == 7 and again.digest() == digests[7]


@pytest.mark.parametrize("edit", [clamp_data, reset_momentum_data], ids=lambda edit: edit.__name__)
def test_an_edit_that_leaves_no_trace_takes_a_restore_to_the_step_before_it(
    run: Runs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, edit: Callable[[Job], None]
) -> None:
    """Where digests on the thread that trains cost too much, the digest of the frame sees it."""
    monkeypatch.setattr(guard, "CHECK_SHARE", 0.0)
    monkeypatch.setattr(guard, "FREE_SECONDS", -1.0)
    checkpointer, job = run(), Fused()
    wanted = {}
    for number in range(1, 9):
        wanted[number - 1] = job.digest()
        if number == 6:
            edit(job)
        checkpointer.step(job.train(), job.state)
    checkpointer.close()
    with caplog.at_level(logging.WARNING):
        again = Fused()
        step = run().restore(again.state)
    # The edit may come before the digest of step 5, which is taken beside what follows the step.
    assert step in (4, 5) and (again.state["step"], again.digest()) == (step, wanted[step])
    assert f"after step {step + 1}" in caplog.text and f"verified at step {step}" in caplog.text


def jobs_in(directory: Path) -> set[str]:
    """Return the names of the jobs that wrote the segments in ``directory``."""
    found = [log_segments.Tail(path) for path in log_segments.paths_in(directory)]
    for tail in found:
        tail.look()
    return {tail.segment.owner["job"] for tail in found if tail.segment}


def test_a_loop_that_goes_back_logs_another_history(run: Runs, file_uri: str, local_root: Path) -> None:
    """In one process, and with other data from there on. By its name nobody takes a rank that has not logged a step
    since for one that has. A node that was cut off has what was given up, which leads further (G4)."""
    checkpointer, job = run(interval=5), Job()
    for at in (9, 7):
        while job.state["step"] < at:
            number = job.train()
            if (saved := checkpointer.step(number, job.state)) is not None:
                saved.result(60)
        if at == 9:
            log = directory(local_root, file_uri)
            given_up = jobs_in(log)
            shutil.copytree(log, log.parent / COPIES / "other-node" / log.name)
            assert checkpointer.restore(job.state, step=5) == 5
            torch.manual_seed(99)
    checkpointer.close()
    assert len(given_up) == len(jobs_in(log) - given_up) == 1
    again, step = resumed(run())
    assert (step, again.digest()) == (7, job.digest())


def test_steps_without_an_update_are_made_again(run: Runs) -> None:
    """Gradients are accumulated over two steps."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    checkpointer = run()
    for number in range(1, 8):
        model(torch.ones(2, 4) * number).square().mean().backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            wanted = model.weight.detach().clone()
        state["step"] = number
        checkpointer.step(number, state)
    checkpointer.close()
    torch.nn.init.zeros_(model.weight)
    assert run().restore(state) == 6 == state["step"]
    assert torch.equal(model.weight, wanted)


def test_a_checkpoint_before_any_update_leads_on_when_the_one_after_it_is_lost(
    run: Runs, file_uri: str, local_root: Path
) -> None:
    """Gradients are accumulated, and two checkpoints have the same parameters: no frame lies between them."""
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
    wanted = model.weight.detach().clone()
    checkpointer.close()
    shutil.rmtree(local_dir(local_root, parse_uri(file_uri)) / "step-2")
    torch.nn.init.zeros_(model.weight)
    assert run().restore(state) == 3 == state["step"]
    assert torch.equal(model.weight, wanted)


def scaled(run: Runs, *, fused: bool) -> None:
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
    wanted = (model.weight.detach().clone(), scaler.state_dict(), optimizer.state_dict()["state"][0]["exp_avg"].clone())
    checkpointer.close()
    torch.nn.init.zeros_(model.weight)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 1.0})
    assert run().restore(state) == 6
    assert torch.equal(model.weight, wanted[0]) and scaler.state_dict() == wanted[1] and scaler.get_scale() == 4.0
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], wanted[2])


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_changes_the_scaler_alone(run: Runs, fused: bool) -> None:
    scaled(run, fused=fused)


def test_two_optimizers_that_take_turns_and_a_copy_that_follows(run: Runs) -> None:
    """An optimizer is stepped in each step, or both; averages of the weights are no optimizer's; frozen ones rest."""
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
    wanted = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
    for module in modules:
        for value in module.state_dict().values():
            value.zero_()
    assert run().restore(state) == 7
    for module, values in zip(modules, wanted, strict=True):
        assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())


def test_a_parameter_of_no_optimizer_that_is_edited_unseen_ends_the_log_once(
    run: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 64 sampled elements none changes. From the next checkpoint on the log has it with each step."""
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
    wanted = [one.clone() for one in (model.weight, copy.weight)]
    for one in (model.weight, copy.weight):
        one.data.zero_()
    assert run().restore(state) == 9
    assert torch.equal(model.weight, wanted[0]) and torch.equal(copy.weight, wanted[1])


def test_logs_that_end_as_soon_as_they_begin_are_followed_by_fewer_and_fewer_checkpoints(run: Runs) -> None:
    checkpointer, job = run(), Job()
    for number in range(1, 40):
        job.train()
        clamp(job)
        checkpointer.step(number, job.state)
        checkpointer.wait("local")
    assert [record.step for record in checkpointer.stats] == [1, 2, 4, 8, 16, 32]


def test_a_certain_checkpoint_can_be_gone_back_to(run: Runs) -> None:
    train(run(interval=4), Job(), 10)
    reference = Job()
    while reference.state["step"] < 6:
        reference.train()
    job = Job()
    assert run().restore(job.state, step=4) == 4
    assert resumed(run())[1] == 10  # a look at it costs nothing
    checkpointer = run()
    assert checkpointer.restore(job.state, step=4) == 4
    assert train(checkpointer, job, 6) == reference.digest()
    assert resumed(run())[1] == 6  # the checkpoint of step 8 is still there, and abandoned


def test_an_abandoned_base_of_a_log_is_listed_and_pruned(
    run: Runs, file_uri: str, local_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(interval=4, drain=True)
    train(first, Job(), 9)
    first.close()
    job = Job()
    second = run(drain=True)
    assert second.restore(job.state, step=4) == 4
    train(second, job, 6)
    second.close()
    assert main(["ls", file_uri, "--json", "--local-root", str(local_root)]) == 0
    listed = {one["step"]: one.get("abandoned", False) for one in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert listed[8] and not listed[4]
    assert main(["prune", file_uri, "--abandoned", "--yes", "--local-root", str(local_root)]) == 0
    capsys.readouterr()
    assert main(["ls", file_uri, "--json", "--local-root", str(local_root)]) == 0
    assert 8 not in [one["step"] for one in json.loads(capsys.readouterr().out)["checkpoints"]]
    assert resumed(run())[1] == 6


@pytest.mark.parametrize(
    ("chains", "wanted"),
    [
        ([[], []], None),
        ([[("a", 0, 5)], []], None),
        ([[("a", 0, 5)], [("a", 0, 4)]], 4),
        ([[("a", 0, 5), ("a", 5, 9)], [("a", 0, 5), ("a", 5, 8)]], 8),
        ([[("a", 0, 5), ("b", 5, 9)], [("a", 0, 6)]], 5),  # the job b has gone on at step 5
        ([[("a", 0, 5), ("b", 5, 9)], [("a", 0, 5), ("c", 5, 9)]], 5),
        ([[("b", 0, 9)], [("a", 0, 9)]], None),
    ],
)
def test_ranks_agree_on_a_step_of_one_history(chains: list[list[tuple[str, int, int]]], wanted: int | None) -> None:
    assert agreed_step(chains) == wanted


def test_values_of_many_kinds_come_back(run: Runs) -> None:
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
    """As if the job were killed here: what it logged is on the disk, and it saves nothing at its end."""
    checkpointer._step_log.close()  # private: close() saves


def save_beside(how: str, job: Job, step: int, uri: str, folder: Path, **options: Any) -> None:
    """Save ``job`` as another writer of the run does."""
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
def test_a_save_of_another_writer_hides_no_step_of_the_log(
    how: str, run: Runs, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    """Of another Checkpointer, which removes all but its newest, too."""
    folder, job, options = tmp_path / "files", Job(), {"drain": False, "local_root": local_root}
    folder.mkdir()
    checkpointer = run()
    digests = {}
    for _ in range(20):
        number = job.train()
        digests[number] = job.digest()
        saved = checkpointer.step(number, job.state)
        if saved is not None:
            saved.result(60)
        if number in (8, 12):
            keep = {"keep_last": 1} if how == "Checkpointer" else {}
            save_beside(how, job, number, file_uri, folder, **options, **keep)
    end_log(checkpointer)
    again, resumed = Job(), run()
    assert resumed.restore(again.state) == 20
    assert again.digest() == digests[20]
    again.train()
    saved = resumed.step(21, again.state)
    assert saved is None, "the log goes on"
    digests[21] = again.digest()
    end_log(resumed)
    last = Job()
    assert run().restore(last.state) == 21 and last.digest() == digests[21]


def killed_beside(run: Runs, file_uri: str, steps: int, **options: Any) -> dict[int, str]:
    """Log ``steps``, of which another Checkpointer saves the eighth."""
    job, digests, checkpointer = Job(), {}, run()
    for number in range(1, steps + 1):
        job.train()
        digests[number] = job.digest()
        saved = checkpointer.step(number, job.state)
        if saved is not None:
            saved.result(60)
        if number == 8:
            save_beside("Checkpointer", job, 8, file_uri, Path(), **options)
    end_log(checkpointer)
    return digests


@pytest.mark.parametrize(
    ("damage", "reached"),
    [("a frame behind the save", 11), ("a frame before the save", 8), ("the base", 8), ("the log is older", 8)],
)
def test_where_the_log_does_not_lead_beyond_a_save_that_is_restored(
    damage: str, reached: int, run: Runs, file_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = 8 if "older" in damage else 14
    digests = killed_beside(run, file_uri, steps, drain=False, local_root=local_root)
    [path] = log_segments.paths_in(directory(local_root, file_uri))
    data = bytearray(path.read_bytes())
    frame = (len(data) - 4096) // data.count(log_segments.FRAME)
    if "frame" in damage:
        at = (3 if "before" in damage else 10) * frame + frame // 2
        data[4096 + at] ^= 1
        path.write_bytes(data)
    if damage == "the base":
        for one in local_dir(local_root, parse_uri(f"{file_uri}/step-1")).glob("*.distcp"):
            one.write_bytes(bytes(one.stat().st_size))
    again = Job()
    assert run().restore(again.state) == reached, caplog.text
    assert again.digest() == digests[reached]
