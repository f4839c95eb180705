"""Training in a framework that saves through its adapter: killed, its node lost, it resumes bit for bit."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.compat.adapter_drivers import STEPS
from tests.services import free_port
from tierckpt.cli.ui.app import run as run_cli
from tierckpt.client import close_all
from tierckpt.integrations.directories import Directories

KILL_AT = 6

pytestmark = [pytest.mark.frameworks, pytest.mark.server, pytest.mark.timeout(400), pytest.mark.slow]


def framework(name: str) -> Any:
    absent = importlib.util.find_spec(name) is None
    return pytest.param(name, marks=pytest.mark.skipif(absent, reason=f"{name} is not installed"))


FRAMEWORKS = [
    framework(name) for name in ("transformers", "lightning", "accelerate", "deepspeed", "torchtitan", "verl")
]


def train(name: str, uri: str, folder: Path, log: Path, kill_at: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.compat.adapter_drivers", name, uri, str(folder), str(log), str(kill_at)]
    env = {**os.environ, "TIERCKPT_LOCAL_ROOT": str(folder / "local"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, timeout=300, check=False, capture_output=True, text=True)
    assert done.returncode == (-signal.SIGKILL if kill_at else 0), done.stdout + done.stderr


def noted(log: Path, key: str) -> list[Any]:
    return [note[key] for note in map(json.loads, log.read_text().splitlines()) if key in note]


def losses(log: Path) -> dict[int, str]:
    notes = map(json.loads, log.read_text().splitlines())
    return {note["step"]: note["loss"] for note in notes if "step" in note}


@pytest.mark.parametrize("loses", ["process", "node"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_killed_it_resumes_bit_for_bit_at_the_last_acknowledged_step(
    name: str, loses: str, s3_uri: str, tmp_path: Path
) -> None:
    whole, log = tmp_path / "whole.log", tmp_path / "killed.log"
    train(name, f"{s3_uri}/whole", tmp_path / "a", whole)
    train(name, f"{s3_uri}/run", tmp_path / "b", log, KILL_AT)
    if loses == "node":
        assert run_cli(["drain", "--wait", "--local-root", str(tmp_path / "b" / "local")]) == 0
        shutil.rmtree(tmp_path / "b")
    train(name, f"{s3_uri}/run", tmp_path / "b", log)
    assert [step for step in noted(log, "resumed") if step] == [KILL_AT]
    assert losses(log) == losses(whole)
    assert len(losses(log)) == STEPS
    assert noted(log, "weights") == noted(whole, "weights")


def train_on_ray(config: dict[str, str]) -> None:
    from ray import train

    from tierckpt.integrations.ray import upload

    for step in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "model").write_text(f"step {step}")
            made = train.Checkpoint.from_directory(folder)
            train.report({"step": step}, checkpoint=made, checkpoint_upload_fn=upload(config["uri"]))


def test_ray_train_reports_what_comes_back_and_every_node_has_the_model(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("ray.train", reason="ray[train] is not installed")
    from ray.train import RunConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from tierckpt.integrations.ray import prefetch, restore

    uri = f"{tmp_path}/storage/experiment"
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        run = RunConfig(storage_path=f"{tmp_path}/storage", name="experiment")
        DataParallelTrainer(train_on_ray, train_loop_config={"uri": uri}, run_config=run).fit()
        assert run_cli(["drain", "--wait"]) == 0
        found = restore(uri, tmp_path / "back")
        assert found is not None
        assert (found / "model").read_text() == "step 2"
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "weights").write_bytes(b"weights")
        places = prefetch(str(tmp_path / "model"), timeout_seconds=120)
        assert [Path(place, "weights").read_bytes() for place in places.values()] == [b"weights"] * len(ray.nodes())
    finally:
        ray.shutdown()


def test_megatron_finalizes_by_adopting_and_loads_what_comes_back(tmp_path: Path) -> None:
    from tierckpt.integrations.megatron import TRACKER, MegatronRun

    (tmp_path / "out" / "iter_0000010").mkdir(parents=True)
    (tmp_path / "out" / "iter_0000010" / "__0_0.distcp").write_bytes(b"shard")
    run = MegatronRun(tmp_path / "run")
    run.finalize(tmp_path / "out" / "iter_0000010")()
    assert run.restore(tmp_path / "back") == str(tmp_path / "back")
    assert (tmp_path / "back" / TRACKER).read_text() == "10"
    assert (tmp_path / "back" / "iter_0000010" / "__0_0.distcp").read_bytes() == b"shard"


def test_two_threads_of_a_host_save_at_once_and_its_retention_takes_nothing_undrained(
    s3_uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Directories(f"{s3_uri}/run")
    assert run_cli(["drain", "--pause"]) == 0

    def save(step: int) -> None:
        place = tmp_path / f"step-{step}"
        place.mkdir()
        (place / "model").write_text(f"{step}")
        run.save(place)
        shutil.rmtree(place)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, range(6)))
    assert "is not drained yet: tierckpt keeps it" in caplog.text
    assert run_cli(["drain", "--resume"]) == 0
    for step in range(6):
        tierckpt.wait(f"{s3_uri}/run/step-{step}", timeout_seconds=60)
    close_all()
    shutil.rmtree(tmp_path / "local")
    found = run.restore(tmp_path / "back")
    assert found is not None
    assert (found / "model").read_text() == "5"


GUIDE = Path(__file__).parents[2] / "docs/guide/frameworks.md"
PROGRAMS = ("transformers", "lightning", "accelerate", "deepspeed")
MEGATRON = """
import pathlib, types
pathlib.Path("out/iter_0001000").mkdir(parents=True)
pathlib.Path("out/iter_0001000/common.pt").touch()
request = types.SimpleNamespace(add_finalize_fn=lambda call: call())
"""
"""What stands before the lines of the guide. Ray's are run by the tests above; verl's need `torchrun`."""


def blocks_of_the_guide() -> dict[str, str]:
    found = re.findall(r"^```py\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return {block.partition("tierckpt.integrations.")[2].split()[0]: block for block in found}


def test_the_guide_has_at_most_three_lines_for_each_framework() -> None:
    blocks = blocks_of_the_guide()
    assert blocks.keys() == {*PROGRAMS, "megatron", "ray", "verl"}
    for name, block in blocks.items():
        lines = [line for line in block.split("\n") if line]
        (ours,) = (line for line in lines if line.startswith("from tierckpt"))
        names = {"tierckpt://", *ours.partition(" import ")[2].split(", ")}
        names |= {line.split()[0] for line in lines if any(f"= {one}(" in line for one in names)}
        assert 0 < sum(any(one in line for one in names) for line in lines if line != ours) <= 3, name
        assert len(block.splitlines()) <= 30, name


@pytest.mark.parametrize("name", [*map(framework, PROGRAMS), "megatron"])
def test_the_programs_of_the_guide_run_and_run_again(name: str, s3_uri: str, tmp_path: Path) -> None:
    block = blocks_of_the_guide()[name].replace("s3://bucket", s3_uri).replace("s3/bucket", f"s3/{s3_uri[5:]}")
    alone = (
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"} if name == "deepspeed" else {}
    )
    env = {**os.environ, **alone, "PYTHONPATH": str(GUIDE.parents[2]), "CUDA_VISIBLE_DEVICES": ""}
    program = (MEGATRON if name == "megatron" else "") + block
    for directory in ("first", "second"):
        (tmp_path / directory).mkdir()
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=env | {"MASTER_PORT": str(free_port())},
            cwd=tmp_path / directory,
            timeout=300,
            check=False,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr.decode()
    if name != "lightning":  # a file of its own, and no directory
        assert tierckpt.latest(f"{s3_uri}/run") is not None
