"""Training in a framework that saves through its adapter: killed, its node lost, it resumes bit for bit."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch

import tierckpt
from tests.compat import worker
from tests.compat.adapter_drivers import (
    ALONE,
    SAVE_EVERY,
    STEPS,
    Model,
    lightning_trainer,
    tierckpt_url,
    training_arguments,
)
from tests.services import free_port
from tierckpt.cli.ui.app import run as run_cli
from tierckpt.client import close_all
from tierckpt.drain import rate_limiter
from tierckpt.errors import CapacityError, CheckpointError, ConfigError
from tierckpt.integrations.directories import Directories
from tierckpt.integrations.fsspec import TierFileSystem

KILL_AT = 6
ROWS = [{"x": torch.ones(8), "labels": torch.ones(1)}] * 32
EACH_STEP = {"save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}

pytestmark = [pytest.mark.frameworks, pytest.mark.server, pytest.mark.timeout(600), pytest.mark.slow]


def framework(name: str, driver: str | None = None) -> Any:
    absent = importlib.util.find_spec(name) is None
    return pytest.param(driver or name, marks=pytest.mark.skipif(absent, reason=f"{name} is not installed"))


FRAMEWORKS = [
    framework(name) for name in ("transformers", "lightning", "accelerate", "deepspeed", "torchtitan", "verl")
]


def train(name: str, uri: str, folder: Path, log: Path, kill_at: int = 0, *, ranks: int = 1, nodes: int = 1) -> str:
    """Run a driver until it ends, or until rank 0 kills itself. Returns the output of the ranks."""
    port, processes = str(free_port()), []
    for rank in range(ranks):
        node, local = divmod(rank, ranks // nodes)
        place = folder / f"node-{node}"
        place.mkdir(parents=True, exist_ok=True)
        env = {"TIERCKPT_LOCAL_ROOT": str(place / "local")}
        if ranks > 1:  # as torchrun
            env |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks // nodes)}
            env |= {"LOCAL_RANK": str(local), "GROUP_RANK": str(node), "TORCHELASTIC_RUN_ID": "compat"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        driver = [sys.executable, "-m", "tests.compat.adapter_drivers", name, uri, str(place), str(log), str(kill_at)]
        processes.append(worker.start(driver, folder / f"rank-{rank}.log", env))
    try:
        if kill_at:
            assert processes[0].wait(300) == -signal.SIGKILL, said(folder)
    finally:
        if kill_at:
            worker.kill(processes)
    if not kill_at:
        worker.finish(processes, folder, 300)
    return said(folder)


def said(folder: Path) -> str:
    return "".join(log.read_text(errors="replace") for log in sorted(folder.glob("rank-*.log")))


def lose(folder: Path) -> None:
    """Lose every node of a drained run. Nodes commit together if each has a part."""
    drain = [sys.executable, "-m", "tierckpt", "drain", "--wait", "--local-root"]
    roots = sorted(folder.glob("node-*/local"))
    worker.finish([worker.start([*drain, str(root)], folder / "drain.log", {}) for root in roots], folder, 120)
    shutil.rmtree(folder)


def noted(log: Path, key: str) -> list[Any]:
    return [note[key] for note in map(json.loads, log.read_text().splitlines()) if key in note]


def losses(log: Path) -> dict[int, str]:
    notes = map(json.loads, log.read_text().splitlines())
    return {note["step"]: note["loss"] for note in notes if "step" in note}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_killed_it_resumes_bit_for_bit_at_the_last_acknowledged_step(name: str, s3_uri: str, tmp_path: Path) -> None:
    """On its node; then it is killed again, and its node is lost."""
    whole, log, then = tmp_path / "whole.log", tmp_path / "killed.log", KILL_AT + SAVE_EVERY
    train(name, f"{s3_uri}/whole", tmp_path / "a", whole)
    train(name, f"{s3_uri}/run", tmp_path / "b", log, KILL_AT)
    train(name, f"{s3_uri}/run", tmp_path / "b", log, then)
    lose(tmp_path / "b")
    train(name, f"{s3_uri}/run", tmp_path / "b", log)
    assert_resumed(log, whole, KILL_AT, then)


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The log of an undisturbed run, which is the same on one node and on two."""

    @functools.cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        train(name, f"{folder}/run", folder, folder / "whole.log", ranks=2)
        return folder / "whole.log"

    return run


@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", [*FRAMEWORKS[:-1], framework("lightning", "lightning_sharded")])
def test_ranks_of_a_job_that_are_killed_and_lose_their_nodes_resume_bit_for_bit(
    name: str, nodes: int, s3_uri: str, tmp_path: Path, of_two_ranks: Callable[[str], Path]
) -> None:
    whole, log = of_two_ranks(name), tmp_path / "killed.log"
    train(name, f"{s3_uri}/run", tmp_path / "b", log, KILL_AT, ranks=2, nodes=nodes)
    lose(tmp_path / "b")
    train(name, f"{s3_uri}/run", tmp_path / "b", log, ranks=2, nodes=nodes)
    assert_resumed(log, whole, KILL_AT)


def assert_resumed(log: Path, whole: Path, *steps: int) -> None:
    assert [step for step in noted(log, "resumed") if step] == [*steps]
    assert losses(log) == losses(whole)
    assert len(losses(log)) == STEPS
    assert noted(log, "weights") == noted(whole, "weights")


def train_on_ray(config: dict[str, str]) -> None:
    from ray import train

    from tierckpt.integrations.ray import upload

    assert torch.distributed.is_initialized()
    for step in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "model").write_text(f"step {step}")
            is_first = train.get_context().get_world_rank() == 0
            made = train.Checkpoint.from_directory(folder) if is_first else None
            train.report({}, checkpoint=made, checkpoint_upload_fn=upload(config["uri"], every_rank=False))


def test_ray_train_reports_what_comes_back_and_every_node_has_the_model(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("ray.train", reason="ray[train] is not installed")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.torch.torch_trainer import TorchTrainer

    from tierckpt.integrations.ray import prefetch, restore

    uri = f"{tmp_path}/storage/experiment"
    ray.init(num_cpus=4, include_dashboard=False)
    try:
        run = RunConfig(storage_path=f"{tmp_path}/storage", name="experiment")
        two = ScalingConfig(num_workers=2)
        TorchTrainer(train_on_ray, train_loop_config={"uri": uri}, scaling_config=two, run_config=run).fit()
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


def test_two_threads_of_a_host_save_at_once_and_its_retention_takes_nothing_undrained(
    s3_uri: str, tmp_path: Path
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
    assert run_cli(["drain", "--resume"]) == 0
    for step in range(6):
        tierckpt.wait(f"{s3_uri}/run/step-{step}", timeout_seconds=60)
    close_all()
    shutil.rmtree(tmp_path / "local")
    found = run.restore(tmp_path / "back")
    assert found is not None
    assert (found / "model").read_text() == "5"


def no_room(*_: object) -> Any:
    raise CapacityError("the SSD is full", hint="Remove something")


@pytest.fixture
def paused() -> Iterator[None]:
    assert run_cli(["drain", "--pause"]) == 0
    yield
    assert run_cli(["drain", "--resume"]) == 0


def resume_and_restore(uri: str, names: list[str], into: Path) -> Path | None:
    """Restore the newest drained checkpoint of a lost node, all of ``names``."""
    assert run_cli(["drain", "--resume"]) == 0
    for name in names:
        tierckpt.wait(f"{uri}/{name}", timeout_seconds=60)
    close_all()
    shutil.rmtree(os.environ["TIERCKPT_LOCAL_ROOT"])
    return Directories(uri).restore(into)


def test_the_best_model_of_transformers_comes_back_with_the_newest_checkpoint(s3_uri: str, tmp_path: Path) -> None:
    """A node is lost, and ``load_best_model_at_end`` still finds the model of an earlier step."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import Trainer

    from tierckpt.integrations.transformers import TierCallback

    def train(steps: int) -> Model:
        callback, model = TierCallback(f"{s3_uri}/run"), Model()
        args = training_arguments(
            tmp_path / "out", max_steps=steps, save_total_limit=2, metric_for_best_model="worse",
            load_best_model_at_end=True, **EACH_STEP,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=ROWS, eval_dataset=ROWS[:4], callbacks=[callback])
        trainer.evaluate = lambda *_, **__: {"eval_worse": -trainer.state.global_step}
        trainer.train(resume_from_checkpoint=callback.resume(args.output_dir))
        return model

    best = train(3).state_dict()
    assert run_cli(["drain", "--wait"]) == 0
    close_all()
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "local")
    assert all(torch.equal(value, best[name]) for name, value in train(4).state_dict().items())


@pytest.mark.parametrize("named", [False, True])
def test_each_trial_of_a_search_of_transformers_is_a_run_of_its_own(named: bool, s3_uri: str, tmp_path: Path) -> None:
    """Two searches, one after the other: the second writes to the directories of the first, in place."""
    for name in ("transformers", "optuna"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    from transformers import Trainer

    from tierckpt.integrations.transformers import STATE, TierCallback

    args = training_arguments(tmp_path / "out", max_steps=2, logging_steps=1, save_total_limit=1, **EACH_STEP)
    rates: list[float] = []

    def space(trial: Any) -> dict[str, float]:
        rates.append(trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True))
        return {"learning_rate": rates[-1]}

    for _ in range(2):
        trainer = Trainer(
            args=args,
            model_init=Model,
            train_dataset=ROWS,
            eval_dataset=ROWS[:4],
            callbacks=[TierCallback(f"{s3_uri}/search")],
        )
        trainer.hyperparameter_search(
            hp_space=space,
            n_trials=2,
            direction="minimize",
            backend="optuna",
            **({"hp_name": lambda trial: f"rate-{trial.number}"} if named else {}),
        )
    assert run_cli(["drain", "--wait"]) == 0
    close_all()
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "local")
    for number in range(2):
        trial = f"{'rate' if named else 'run'}-{number}"
        found = Directories(f"{s3_uri}/search/{trial}").restore(tmp_path / "back" / trial)
        assert found is not None and found.name == "checkpoint-2"
        state = json.loads((found / STATE).read_text())
        assert state["trial_params"] == {"learning_rate": rates[2 + number]}


def written_again_by_transformers(uri: str, place: Path, *, is_told: bool) -> None:
    """A restarted training, and one that must save the same step again."""
    from transformers import TrainerState

    from tierckpt.integrations.transformers import TierCallback

    args, saved = SimpleNamespace(output_dir=str(place.parent), enable_jit_checkpoint=is_told), TrainerState()
    first, second = TierCallback(uri), TierCallback(f"{uri}-other")
    place.mkdir()
    (place / "model").write_text("first")
    saved.global_step = 1
    first.on_save(args, saved, None)
    if not is_told:
        second.on_train_begin(args, None, None)
        saved.global_step = 0
        second.on_step_begin(args, saved, None)
    (place / "model").write_text("again")


def written_again_by_lightning(uri: str, place: Path) -> None:
    """``last.ckpt``, of a step and of the next."""
    from tierckpt.integrations.lightning_sharded import TierModelParallelStrategy

    strategy = TierModelParallelStrategy(uri, data_parallel_size=1, tensor_parallel_size=1)
    for step in (1, 2):
        strategy.save_checkpoint({"state_dict": {"x": torch.full((9,), step)}, "global_step": step}, place)


def written_again_by_deepspeed(uri: str, place: Path) -> None:
    """A tag that is used again, and a save that is cut short."""
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

    from tierckpt.integrations.deepspeed import TierCheckpointEngine

    engine, info = TierCheckpointEngine(uri), CheckpointCommitInfo(place.name, str(place.parent), True)
    place.mkdir()
    engine.save({"x": 1}, str(place / "model"))
    engine.commit(info)
    engine.save({"x": 2}, str(place / "model"))


def written_again_by_ray(uri: str, place: Path) -> None:
    """One directory for all checkpoints, which Ray keeps by default."""
    from ray import train

    from tierckpt.integrations.ray import upload

    storage = SimpleNamespace(experiment_fs_path=uri, storage_filesystem=None)
    place.mkdir()
    (place / "model").write_text("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "get_context", lambda: SimpleNamespace(get_storage=lambda: storage))
        upload(uri)(train.Checkpoint.from_directory(place), "checkpoint-1")
    (place / "model").write_text("again")


AGAIN: list[Any] = [
    framework("transformers"), framework("transformers", "transformers, told"), framework("lightning"),
    framework("deepspeed"), framework("ray"),
]  # fmt: skip


@pytest.mark.parametrize("name", AGAIN)
def test_a_host_that_writes_in_place_where_it_has_written_before_leaves_what_was_adopted(
    name: str, s3_uri: str, tmp_path: Path, paused: None
) -> None:
    uri, out = f"{s3_uri}/run", tmp_path / "out"
    out.mkdir()
    if name == "lightning":
        written_again_by_lightning(uri, out / "last.ckpt")
        names = ["step-1", "step-2"]
    elif name == "deepspeed":
        written_again_by_deepspeed(uri, out / "step-1")
        names = ["step-1"]
    elif name == "ray":
        written_again_by_ray(uri, out / "mine")
        names = ["checkpoint-1"]
    else:
        written_again_by_transformers(uri, out / "checkpoint-1", is_told=name.endswith("told"))
        names = ["checkpoint-1"]
    found = resume_and_restore(uri, names, tmp_path / "back")
    assert found is not None
    assert name.startswith(("lightning", "deepspeed")) or (found / "model").read_text() == "first"


def test_accelerate_removes_nothing_that_is_not_of_a_save_of_ours(s3_uri: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from tierckpt.integrations.accelerate import TierState

    own = tmp_path / "out/checkpoints/checkpoint_0"
    own.mkdir(parents=True)
    (own / "model").write_text("from before")
    run = TierState(Accelerator(cpu=True, project_dir=str(tmp_path / "out")), f"{s3_uri}/run")
    for name in (str(tmp_path / "out"), "../out", "checkpoints/checkpoint_0", "best", ""):
        with pytest.raises(ConfigError, match="not a checkpoint name"):
            run.save(name)
    named = ProjectConfiguration(str(tmp_path / "out"), automatic_checkpoint_naming=True)
    run = TierState(Accelerator(cpu=True, project_config=named), f"{s3_uri}/run")
    for _ in range(2):
        with pytest.raises(ValueError, match="already exists"):
            run.save()
    assert (own / "model").read_text() == "from before"
    shutil.rmtree(own)
    run.run.save = no_room  # type: ignore[method-assign]
    with pytest.raises(CapacityError):
        run.save()
    assert own.is_dir()
    named.iteration = 0  # in another process
    TierState(Accelerator(cpu=True, project_config=named), f"{s3_uri}/run").save()
    assert tierckpt.latest(f"{s3_uri}/run") == f"{s3_uri}/run/checkpoint_0"


def test_what_accelerate_removes_undrained_is_kept_and_it_goes_on_counting(
    s3_uri: str, tmp_path: Path, paused: None
) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from tierckpt.integrations.accelerate import TierState

    def begun() -> tuple[Any, TierState]:
        named = ProjectConfiguration(str(tmp_path / "out"), automatic_checkpoint_naming=True, total_limit=1)
        accelerator = Accelerator(cpu=True, project_config=named)
        return accelerator, TierState(accelerator, f"{s3_uri}/run")

    accelerator, run = begun()
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    for value in (0.0, 1.0, 2.0):
        torch.nn.init.constant_(model.weight, value)
        run.save()
    assert [path.name for path in (tmp_path / "out/checkpoints").iterdir()] == ["checkpoint_2"]
    with pytest.raises(ConfigError, match="names its checkpoints itself"):
        run.save("step-3")
    names = [f"checkpoint_{number}" for number in range(3)]
    assert resume_and_restore(f"{s3_uri}/run", names, tmp_path / "back") is not None
    shutil.rmtree(tmp_path / "out")
    accelerator, run = begun()
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    assert run.load() == 2
    assert model.weight.unique().tolist() == [2.0]
    run.save()
    assert [path.name for path in (tmp_path / "out/checkpoints").iterdir()] == ["checkpoint_3"]


def test_lightning_saves_in_a_thread_and_what_it_removes_stays_until_newer_ones_are_there(
    s3_uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, paused: None
) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from tierckpt.integrations.lightning import TierCheckpointIO, newest

    url, elsewhere = tierckpt_url(f"{s3_uri}/run"), TierFileSystem(local_root=tmp_path / "elsewhere")
    made = TierCheckpointIO()
    writes = AsyncCheckpointIO(made)

    def save(step: int) -> None:
        writes.save_checkpoint({"global_step": step}, f"{url}/step={step}.ckpt")
        if step > 1:
            writes.remove_checkpoint(f"{url}/step={step - 1}.ckpt")
        writes.teardown()
        made.teardown()  # as at the end of the process

    def on_the_store() -> list[int]:
        return sorted(int(path.partition("=")[2].removesuffix(".ckpt")) for path in elsewhere.ls(url, detail=False))

    for step in (1, 2, 3):
        save(step)
    assert "step=1.ckpt was removed and is not drained yet" in caplog.text
    assert run_cli(["drain", "--resume"]) == 0
    here = fsspec.filesystem("tierckpt")
    here.wait(url)
    assert on_the_store() == [3]
    assert run_cli(["drain", "--pause"]) == 0
    time.sleep(1.5 * rate_limiter.CONTROL_CHECK_SECONDS)  # by then every mover has heard of it
    save(4)
    assert on_the_store() == [3]
    assert run_cli(["drain", "--resume"]) == 0
    here.wait(url)
    assert on_the_store() == [4]
    assert writes.load_checkpoint(newest(url)) == {"global_step": 4}


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_lightning_keeps_exactly_the_best_on_a_slow_store(s3_uri: str, is_async: bool, paused: None) -> None:
    """A separate process; its saves drain after it exits."""
    pytest.importorskip("lightning", reason="lightning is not installed")
    url = tierckpt_url(f"{s3_uri}/run")
    subprocess.run([sys.executable, "-c", BEST_TWO, url, str(int(is_async))], check=True, timeout=300)
    assert run_cli(["drain", "--resume"]) == 0
    assert run_cli(["drain", "--wait"]) == 0
    found = fsspec.filesystem("tierckpt").ls(url, detail=False)
    assert sorted(path.rpartition("/")[2] for path in found) == ["step=5.ckpt", "step=6.ckpt"]


BEST_TWO = """
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from tierckpt.integrations.lightning import TierCheckpointIO

checkpoints = ModelCheckpoint(sys.argv[1], "{step}", monitor="step", mode="max", every_n_train_steps=1, save_top_k=2)
io = TierCheckpointIO()
trainer = Trainer(
    max_steps=6, accelerator="cpu", logger=False, enable_progress_bar=False, limit_val_batches=0,
    callbacks=[checkpoints], plugins=[AsyncCheckpointIO(io) if int(sys.argv[2]) else io],
)
trainer.fit(BoringModel())
"""


def test_lightning_spawns_its_ranks_tunes_and_requeues(s3_uri: str, tmp_path: Path) -> None:
    """The plugin is pickled, and Lightning saves through it next to its checkpoints."""
    pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.tuner import Tuner

    from tierckpt.integrations.lightning import TierCheckpointIO, newest

    class Tuned(BoringModel):  # type: ignore[misc]
        lr = 0.1

    url, spawned = tierckpt_url(f"{s3_uri}/run"), BoringModel()

    def trainer(**options: Any) -> Any:
        checkpoints = ModelCheckpoint(dirpath=url, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        places = {"default_root_dir": tmp_path, "plugins": [TierCheckpointIO()], "callbacks": [checkpoints]}
        return lightning_trainer(limit_val_batches=0, **places, **options)

    trainer(max_steps=2, strategy="ddp_spawn", devices=2).fit(spawned)
    first = TierCheckpointIO().load_checkpoint(newest(url))
    assert first["global_step"] == 2
    assert all(torch.equal(value, first["state_dict"][name]) for name, value in spawned.state_dict().items())

    resumed = trainer(max_steps=4, devices=1)
    Tuner(resumed).lr_find(Tuned(), num_training=5)
    resumed.fit(spawned, ckpt_path=newest(url))
    assert resumed.global_step == 4
    resumed.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    assert TierCheckpointIO().load_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")["global_step"] == 4
    with pytest.raises(ConfigError, match="not on shared storage"):
        resumed.save_checkpoint(tmp_path / "mine.ckpt")


def test_a_tuner_of_lightning_saves_no_step_of_a_sharded_run(s3_uri: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    from tierckpt.integrations.lightning_sharded import ModelParallelStrategy, TierModelParallelStrategy

    saved: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelParallelStrategy, "save_checkpoint", lambda self, made, place, *_: saved.append(place.name))
        strategy = TierModelParallelStrategy(f"{s3_uri}/run")
        strategy.broadcast = lambda value, *_: value  # type: ignore[method-assign]
        strategy.save_checkpoint({"global_step": 0}, tmp_path / ".lr_find_4711.ckpt")
    assert saved == [".lr_find_4711.ckpt"]
    assert tierckpt.latest(f"{s3_uri}/run") is None


def test_what_ray_takes_from_lightning_is_saved_where_its_callback_says(
    s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RayTrainReportCallback and TuneReportCheckpointCallback write to a temporary directory."""
    pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.pytorch.demos.boring_classes import BoringModel

    from tierckpt.integrations.lightning import TierCheckpointIO

    trainer = lightning_trainer(
        devices=1, max_steps=1, enable_checkpointing=False, limit_val_batches=0, plugins=[TierCheckpointIO()]
    )
    trainer.fit(BoringModel())
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(Path(folder, "checkpoint.ckpt"))
        assert TierCheckpointIO().load_checkpoint(Path(folder, "checkpoint.ckpt"))["global_step"] == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="not on shared storage"):
        trainer.save_checkpoint(tmp_path / "checkpoint.ckpt")


def test_a_removal_that_fails_fails_no_save_in_lightning_and_is_made_up_for(
    s3_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    from tierckpt.integrations.lightning import TierCheckpointIO

    url, io, fs = tierckpt_url(f"{s3_uri}/run"), TierCheckpointIO(), fsspec.filesystem("tierckpt")
    io.save_checkpoint({"global_step": 1}, f"{url}/step=1.ckpt")
    io.save_checkpoint({"global_step": 2}, f"{url}/step=2.ckpt")
    fs.wait(url)
    with monkeypatch.context() as patch:
        patch.setattr(TierFileSystem, "rm_behind", no_room)
        io.remove_checkpoint(f"{url}/step=1.ckpt")
    assert "step=1.ckpt is removed later: the SSD is full" in caplog.text
    io.save_checkpoint({"global_step": 3}, f"{url}/step=3.ckpt")
    fs.wait(url)
    assert [path.rpartition("/")[2] for path in sorted(fs.ls(url, detail=False))] == ["step=2.ckpt", "step=3.ckpt"]


def test_the_newest_of_lightning_is_the_latest_version_and_is_not_guessed(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    from tierckpt.integrations.lightning import TierCheckpointIO, newest

    url, io = tierckpt_url(f"{tmp_path}/run"), TierCheckpointIO()
    assert not io.load_checkpoint(newest(url))
    io.save_checkpoint({"global_step": 9}, f"{url}/epoch=9.ckpt")
    with pytest.raises(ConfigError, match="their names do not say"):
        io.load_checkpoint(newest(url))
    names = ["epoch=9-step=10-loss=0.5.ckpt", "epoch=1-step=9.ckpt", "step=10-v2.ckpt", "last.ckpt", "last-v1.ckpt"]
    for number, name in enumerate(names):
        io.save_checkpoint({"global_step": number}, f"{url}/{name}")
        assert io.load_checkpoint(newest(url)) == {"global_step": number if number != 1 else 0}


def load_on_two_nodes(url: str, folder: str) -> dict[str, Any]:
    """Each rank has a node of its own. Rank 0's has a checkpoint on its way; then rank 1's has one that is newer."""
    from tierckpt.integrations.lightning import TierCheckpointIO, newest

    rank = torch.distributed.get_rank()
    root = f"{folder}/{rank}"
    os.environ["TIERCKPT_LOCAL_ROOT"] = root
    run_cli(["drain", "--pause", "--local-root", root])
    io = TierCheckpointIO()

    def steps() -> list[Any]:
        found: list[Any] = [None, None]
        try:
            mine = io.load_checkpoint(newest(url)).get("global_step", "none")
        except CheckpointError as error:
            mine = error.message
        torch.distributed.all_gather_object(found, mine)
        return found

    outcome = {"nothing": steps()}
    if rank == 0:
        io.save_checkpoint({"global_step": 4}, f"{url}/last.ckpt")
        threading.Timer(1.0, run_cli, (["drain", "--resume", "--local-root", root],)).start()
    torch.distributed.barrier()
    outcome["on its way"] = steps()
    if rank == 1:
        io.save_checkpoint({"global_step": 8}, f"{url}/last.ckpt")
    torch.distributed.barrier()
    return outcome | {"newer": steps()}


def test_ranks_of_lightning_load_what_rank_0_finds_or_say_that_they_have_a_newer_one(
    s3_uri: str, tmp_path: Path
) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    url = tierckpt_url(f"{s3_uri}/run")
    found = worker.launch("tests.compat.test_adapters:load_on_two_nodes", 2, url=url, folder=str(tmp_path))
    assert found["nothing"] == ["none", "none"]
    assert found["on its way"] == [4, 4]
    assert found["newer"][0] == 4
    assert "this node has step 8, which is newer than rank 0's, step 4" in found["newer"][1]


GUIDE = [Path(__file__).parents[2] / f"docs/guide/{page}.md" for page in ("frameworks", "more-frameworks")]
PROGRAMS = ("transformers", "lightning", "accelerate", "deepspeed")
BEFORE = {
    "deepspeed": """
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled here, for minutes, or one who does is awaited
""",
    "megatron": """
import pathlib, types
pathlib.Path("out/iter_0001000").mkdir(parents=True)
pathlib.Path("out/iter_0001000/common.pt").touch()
request = types.SimpleNamespace(add_finalize_fn=lambda call: call())
""",
}
"""Code before the lines of the guide. The tests above run Ray's; verl's need `torchrun`."""


def blocks_of_the_guide() -> dict[str, str]:
    found = re.findall(r"^```py\n(.*?)^```$", "".join(page.read_text() for page in GUIDE), re.MULTILINE | re.DOTALL)
    return {block.partition("tierckpt.integrations.")[2].split()[0]: block for block in found}


@pytest.mark.parametrize("name", [*map(framework, PROGRAMS), "megatron"])
def test_the_programs_of_the_guide_run_and_run_again(name: str, s3_uri: str, tmp_path: Path) -> None:
    block = blocks_of_the_guide()[name].replace("s3://bucket", s3_uri).replace("s3/bucket", f"s3/{s3_uri[5:]}")
    alone = ALONE if name == "deepspeed" else {}
    env = {**os.environ, **alone, "PYTHONPATH": str(GUIDE[0].parents[2]), "CUDA_VISIBLE_DEVICES": ""}
    program = BEFORE.get(name, "") + block
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
