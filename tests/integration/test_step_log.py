"""``Checkpointer(gradient_log=...)``: what is logged, what a restore makes of it, and when it says no."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tests.fault.redo_log_job import Deferring
from tests.fault.step_log_scenarios import Job
from tierckpt import Checkpointer
from tierckpt.cli.ui.app import run as main
from tierckpt.errors import ConfigError
from tierckpt.format.layout import GRADIENTS_DIR, local_dir, parse_uri
from tierckpt.replay import log as logs
from tierckpt.replay.link import GRADIENTS, Copy, Link
from tierckpt.replication.log_copies import COPIES
from tierckpt.save import log_segments
from tierckpt.training.every_step import step_log, window
from tierckpt.training.every_step.step_log import agreed_step

Runs = Callable[..., Checkpointer]


@pytest.fixture
def run(file_uri: str, local_root: Path, request: pytest.FixtureRequest) -> Runs:
    def opened(**options: Any) -> Checkpointer:
        options = {"gradient_log": True, "drain": False, "local_root": local_root} | options
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

    def copy(this: Link, sources: Any, priority: int, **more: Any) -> Copy:
        copied.append(priority)
        return original(this, sources, priority, **more)

    original = Link.copy
    monkeypatch.setattr(Link, "copy", copy)
    options: dict[str, Any] = {"mode": "multi_step", "window_steps": 4, "interval": 10}
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


def test_what_is_done_to_a_parameter_beside_the_optimizer_ends_the_log(
    run: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer, job = run(), Job()
    with caplog.at_level(logging.WARNING):
        for number in range(1, 6):
            job.train()
            if number == 4:
                with torch.no_grad():
                    job.model[0].weight.clamp_(-0.1, 0.1)
            checkpointer.step(number, job.state)
    assert "changed beside the optimizer" in caplog.text
    checkpointer.close()
    assert resumed(run())[1] == 3


def test_an_edit_that_leaves_no_trace_takes_a_restore_to_the_step_before_it(
    run: Runs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "CHECK_SHARE", 1e9)
    checkpointer, job = run(), Job()
    for number in range(1, 9):
        if number == 6:
            wanted = job.digest()
            job.model[0].weight.data.mul_(1.01)
        checkpointer.step(job.train(), job.state)
    checkpointer.close()
    with caplog.at_level(logging.WARNING):
        again, step = resumed(run())
    assert (step, again.state["step"], again.digest()) == (5, 5, wanted)
    assert "after step 6" in caplog.text and "verified at step 5" in caplog.text


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
    assert resumed(run())[1] == 8  # the checkpoint that is newer is still there, and its steps were given up


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
