"""The verl adapter with a released verl: callback, handler, and save and load of its PPO trainer.

Two nodes with separate directories and local tiers stand for the cluster; work on a node runs in its directory.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tierckpt
from tests.engine_wheels import imported, wheel_python
from tests.services import unavailable
from tierckpt.client import close_all
from tierckpt.errors import ConfigError
from tierckpt.integrations.directories import Directories

REAL_MODULES = (
    "verl.trainer.ppo.checkpoint_callback",
    "verl.trainer.ppo.v1.trainer_base",
    "verl.utils.checkpoint",
    "verl.utils.import_utils",
    "verl.utils.fs",
)
STUBBED_MODULES = ("ray", "omegaconf", "transformers", "tensordict", "transfer_queue", "torchdata", "filelock", "hydra")
NODES = ("node-a", "node-b")


class Config(dict[str, Any]):
    """Like OmegaConf: attributes and ``get``."""

    __getattr__ = dict.__getitem__


class Cluster:
    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.monkeypatch = place, monkeypatch

    def on_nodes(self, work: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        return {node: self.on(node, call) for node, call in work.items()}

    def on(self, node: str, call: Callable[[], Any]) -> Any:
        (self.place / node).mkdir(exist_ok=True)
        with self.monkeypatch.context() as here:
            here.chdir(self.place / node)
            here.setenv("TIERCKPT_LOCAL_ROOT", str(self.place / node / "local"))
            return call()

    # Calls of verl on its worker group; each node writes and reads its own files.

    def save_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        for rank, node in enumerate(NODES):
            self.on(node, lambda rank=rank: write(Path(local_path, f"model_rank_{rank}.pt"), f"{rank} {local_path}"))

    def load_checkpoint(self, local_path: str, **_: Any) -> None:
        place = os.path.relpath(local_path)  # verl's driver passes an absolute path; these nodes differ in theirs
        self.loaded = [
            self.on(node, lambda rank=rank: Path(place, f"model_rank_{rank}.pt").read_text())
            for rank, node in enumerate(NODES)
        ]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


@pytest.fixture
def verl(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    wheel = wheel_python("verl")
    if not Path(wheel, "verl/trainer/ppo/checkpoint_callback.py").exists():
        unavailable(f"{wheel.name}, the newest verl for this Python, has no checkpoint callbacks")
    with imported(wheel, REAL_MODULES, STUBBED_MODULES, {}):
        adapter = import_module("tierckpt.integrations.verl")
        monkeypatch.setattr(adapter, "alive_nodes", lambda: NODES)
        monkeypatch.setattr(adapter, "on_nodes", cluster.on_nodes)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
        build = import_module("verl.trainer.ppo.checkpoint_callback").build_checkpoint_callback
        trainer = import_module("verl.trainer.ppo.v1.trainer_base").PPOTrainer
        yield SimpleNamespace(adapter=adapter, build=build, trainer=trainer)
    for name in ("tierckpt.integrations.verl", "tierckpt.integrations.ray"):  # they hold stand-ins
        sys.modules.pop(name, None)


def configured(uri: str | None, **trainer: Any) -> Config:
    actor = Config(checkpoint=Config(async_save=trainer.pop("async_save", False)))
    given = {
        "default_local_dir": "out",
        "default_hdfs_dir": None,
        "resume_mode": "auto",
        "del_local_ckpt_after_load": False,
        "checkpoint_uri": uri,
    }
    callback = "tierckpt.integrations.verl.TierCheckpointCallback"
    return Config(
        trainer=Config(given | {"checkpoint_callback_class": callback} | trainer),
        actor_rollout_ref=Config(actor=actor),
        critic=None,
    )


def trainer_of(verl: SimpleNamespace, cluster: Cluster, config: Config) -> Any:
    loader = SimpleNamespace(state_dict=lambda: {"seen": 7}, load_state_dict=lambda state: None)
    return SimpleNamespace(
        config=config,
        checkpoint_callback=verl.build(config),
        actor_rollout_wg=cluster,
        use_critic=False,
        trainer_mode="sync",
        train_dataloader=loader,
    )


def test_ppo_saves_from_every_node_and_resumes_on_new_nodes(
    verl: SimpleNamespace, cluster: Cluster, s3_uri: str, tmp_path: Path
) -> None:
    def save() -> None:
        trainer = trainer_of(verl, cluster, configured(f"{s3_uri}/run"))
        verl.trainer._load_checkpoint(trainer)
        assert trainer.global_steps == 0
        for trainer.global_steps in (1, 2):
            verl.trainer._save_checkpoint(trainer)

    def resume() -> None:
        trainer = trainer_of(verl, cluster, configured(f"{s3_uri}/run"))
        verl.trainer._load_checkpoint(trainer)
        assert trainer.global_steps == 2

    cluster.on("node-a", save)  # verl's driver runs on one node
    for node in NODES:
        cluster.on(node, lambda: tierckpt.wait(f"{s3_uri}/run/global_step_2", timeout_seconds=60))
    close_all()
    for node in NODES:
        shutil.rmtree(tmp_path / node)
    cluster.on("node-b", resume)
    assert cluster.loaded == ["0 out/global_step_2/actor", "1 out/global_step_2/actor"]


def test_directory_shared_by_all_nodes_is_adopted_once(
    verl: SimpleNamespace, cluster: Cluster, s3_uri: str, tmp_path: Path
) -> None:
    shared = tmp_path / "nfs"
    callback = verl.build(configured(f"{s3_uri}/run", default_local_dir=str(shared)))
    write(shared / "global_step_3/actor/model.pt", "weights")
    callback.on_save(trainer=None, global_step=3, checkpoint_dir=str(shared / "global_step_3"))
    cluster.on("node-a", lambda: tierckpt.wait(f"{s3_uri}/run/global_step_3", timeout_seconds=60))
    assert not list((tmp_path / "node-b/local").glob("journal/*"))


def test_sft_handler_saves_prunes_and_resumes(verl: SimpleNamespace, s3_uri: str, tmp_path: Path) -> None:
    loaded: list[str] = []
    engine = SimpleNamespace(
        is_mp_src_rank_with_outputs=lambda: True,
        get_data_parallel_rank=lambda: 0,
        save_checkpoint=lambda local_path, **_: write(Path(local_path, "model.pt"), local_path),
        load_checkpoint=loaded.append,
    )
    loader = SimpleNamespace(state_dict=lambda: {"seen": 7}, load_state_dict=lambda state: loaded.append(state))
    out = tmp_path / "out"

    def handler(uri: str | None = f"{s3_uri}/run") -> Any:
        return verl.adapter.TierCheckpointHandler(
            engine, loader, default_local_dir=str(out), default_hdfs_dir=uri, resume_mode="auto"
        )

    first = handler()
    assert first.load_checkpoint() == 0
    first.save_checkpoint(5)
    tierckpt.wait(f"{s3_uri}/run/global_step_5", timeout_seconds=60)
    close_all()
    shutil.rmtree(out)
    shutil.rmtree(os.environ["TIERCKPT_LOCAL_ROOT"])
    assert handler().load_checkpoint() == 5
    assert loaded == [str(out / "global_step_5"), {"seen": 7}]
    with pytest.raises(ConfigError, match=r"trainer\.default_hdfs_dir is not set"):
        handler(None)


@pytest.mark.parametrize("trainer", ["ppo", "sft"])
def test_step_rewritten_in_place_leaves_the_adopted_copy(
    trainer: str, verl: SimpleNamespace, cluster: Cluster, s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run returns to an earlier step and is killed while writing it."""
    monkeypatch.setenv("TIERCKPT_DRAIN", "false")
    out, weights, uri = tmp_path / "out", ["first"], f"{s3_uri}/run"

    def save(local_path: str, **_: Any) -> None:
        write(Path(local_path, "model.pt"), weights.pop())

    def save_step() -> None:
        if trainer == "sft":
            handler.save_checkpoint(5)
            return
        save(str(out / "global_step_5"))
        callback.on_save(trainer=None, global_step=5, checkpoint_dir=str(out / "global_step_5"))

    engine = SimpleNamespace(
        is_mp_src_rank_with_outputs=lambda: False, get_data_parallel_rank=lambda: 0, save_checkpoint=save
    )
    callback = verl.build(configured(uri, default_local_dir=str(out)))
    handler = verl.adapter.TierCheckpointHandler(engine, None, default_local_dir=str(out), default_hdfs_dir=uri)
    save_step()
    weights.append("again")
    monkeypatch.setattr(verl.adapter, "adopt", killed)
    monkeypatch.setattr(Directories, "save", killed)
    with pytest.raises(InterruptedError):
        save_step()
    assert (out / "global_step_5" / "model.pt").read_text() == "again"

    def restore() -> Path | None:
        return Directories(uri, drain=False).restore(tmp_path / "back")

    found = cluster.on("node-a", restore) if trainer == "ppo" else restore()
    assert found is not None
    assert (found / "model.pt").read_text() == "first"


def killed(*_: Any, **__: Any) -> Any:
    raise InterruptedError


def test_unsupported_configuration_is_refused_before_training(verl: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=r"\+trainer.checkpoint_uri is not set"):
        verl.build(configured(None))
    with pytest.raises(ConfigError, match="async_save calls before"):
        verl.build(configured("s3://bucket/run", async_save=True))
