"""``Checkpointer`` restores the exact state to the user's objects, over real files and ranks."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.optim import lr_scheduler

from tests.compat.worker import launch
from tests.exact import check_same
from tests.fault.scenario_tools import of_each_rank
from tests.integration.state_objects import Loader, job, loss_of
from tierckpt import Checkpointer, PerRank, RngState, load_model
from tierckpt.errors import StateMismatchError

DATA = Path(__file__).parent.parent / "data"


def save(uri: str, state: dict[str, Any], step: int = 1) -> None:
    with Checkpointer(uri) as checkpointer:
        checkpointer.save(step, state)


def restore(uri: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    with Checkpointer(uri) as checkpointer:
        assert checkpointer.restore(state, **options) is not None
    return state


# --- the objects of a training job ------------------------------------------------------------------------------------


def test_model_of_another_precision(file_uri: str) -> None:
    """``load_state_dict`` of torch would cast ``mu_product`` too, which NAdam keeps in float32."""
    jobs = []
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Linear(5, 3, dtype=dtype)
        jobs.append(job(model=model, optimizer=torch.optim.NAdam(model.parameters()), loss=loss_of(model, 5)))
    jobs[0].step(0)
    save(file_uri, jobs[0].state)
    restore(file_uri, jobs[1].state)
    dtypes = {name: one.dtype for name, one in jobs[1].state["optimizer"].state[jobs[1].state["model"].weight].items()}
    wanted = {"step": torch.float32, "mu_product": torch.float32, "exp_avg": torch.bfloat16}
    assert dtypes == wanted | {"exp_avg_sq": torch.bfloat16}
    jobs[1].step(1)


def test_stock_dcp_reads_the_tensors_and_the_model(file_uri: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    seen = {1: {"a", "b"}, (1, 2): [], "table": {1: torch.ones(3)}}
    generator = torch.Generator().manual_seed(1)
    saved = {"model": model, "seen": seen, "generator": generator, "rng": RngState(), "step": 1}
    save(file_uri, saved)
    loaded: dict[str, Any] = {
        "model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()},
        "seen": {"table": {"1": torch.zeros(3)}},
        "step": 0,
    }
    dcp.load(loaded, checkpoint_id=f"{file_uri}/step-1")
    check_same(loaded["model"], dict(model.state_dict()))
    assert loaded["step"] == 1 and loaded["seen"]["table"]["1"].sum() == 3
    assert load_model(file_uri).keys() == model.state_dict().keys()
    save(file_uri, {"model": model, "step": 2, "table": {2: torch.ones(1)}}, 2)
    assert load_model(file_uri, prefix="").keys() == {*(f"model.{name}" for name in loaded["model"]), "step", "table.2"}


def test_unchanged_structure_is_planned_once(file_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    plan = DefaultSavePlanner.create_local_plan
    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", lambda self: (planned.append(1), plan(self))[1])
    state = {"model": torch.nn.Linear(2, 2), "step": 0, "notes": {"loss": 1.5, 3: (1,), "table": torch.ones(2)}}
    with Checkpointer(file_uri) as checkpointer:
        for step in range(4):
            state["step"], state["notes"]["loss"] = step, step / 3
            checkpointer.save(step, state).result()
        assert len(planned) == 1
        assert checkpointer.restore(state, step=2) == 2
    assert (state["step"], state["notes"]["loss"], state["notes"][3]) == (2, 2 / 3, (1,))


def test_a_checkpoint_without_structures_still_loads(file_uri: str) -> None:
    """``tests/data`` has one saved by 0.2."""
    shutil.copytree(DATA / "run_without_structure", file_uri)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": lr_scheduler.StepLR(optimizer, 3, 0.5),
        "rng": RngState(),
        "loader": PerRank(Loader(None)),
        "epoch": 0,
        "notes": None,
        "pair": None,
    }
    restore(file_uri, state)
    assert model.bias.tolist() == [0.14254729449748993, -0.23476631939411163, -0.07643356174230576]
    assert (state["scheduler"].last_epoch, optimizer.param_groups[0]["lr"]) == (5, 0.005)
    assert (np.random.rand(), torch.rand(1, device="cpu").item()) == (0.417022004702574, 0.4549863338470459)
    assert state["loader"].stateful.state == {"seen": [1, 2, 3], "workers": {"0": {"at": 7, "name": "w"}}}
    notes = {"name": "x", "history": [1.5, 2.5], "table": torch.arange(3), "deep": [{"a": 1}, torch.ones(2)]}
    check_same(state["notes"], notes)
    assert (state["epoch"], state["pair"]) == (3, (1, "two"))


@pytest.mark.skipif(importlib.util.find_spec("torchmetrics") is None, reason="torchmetrics is not installed")
def test_a_metric_of_torchmetrics(file_uri: str) -> None:
    from torchmetrics import CatMetric, MeanMetric

    saved: dict[str, Any] = {"mean": MeanMetric(), "all": CatMetric()}
    for value in saved.values():
        value.persistent(True)
        value.update(torch.arange(3.0))
        value.update(torch.ones(2))
    save(file_uri, saved)
    fresh: dict[str, Any] = {"mean": MeanMetric(), "all": CatMetric()}
    for value in fresh.values():
        value.persistent(True)
    restore(file_uri, fresh)
    for name, value in saved.items():
        check_same(value.compute(), fresh[name].compute())


@pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed")
def test_a_stateful_data_loader(file_uri: str) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        return StatefulDataLoader(list(range(40)), batch_size=4, shuffle=True, num_workers=2)

    torch.manual_seed(1)
    first = loader()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    save(file_uri, {"loader": PerRank(first)})
    rest = [batch.tolist() for batch in batches]
    second = loader()
    restore(file_uri, {"loader": PerRank(second)})
    assert [batch.tolist() for batch in second] == rest


# --- several ranks ----------------------------------------------------------------------------------------------------


def ranks(uri: str, again: bool) -> dict[str, Any]:
    """Save, or restore with another number of ranks: sharded tensors, and values of each rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(24.0).reshape(6, 4)
    placements = [Shard(1)] if again else [Shard(0)]
    table = distribute_tensor(whole * (0 if again else 1), mesh, placements)
    copy = distribute_tensor(whole * (0 if again else 1), mesh, [Replicate()])
    own = Loader(None if again else {"rank": rank, rank: [torch.full((rank + 1,), float(rank))], "none": {}})
    inner = Loader({"ema": [table.clone()], "at": (rank,)})
    state: dict[str, Any] = {
        "values": {"table": (table, {"copy": copy}), 1: "x"},
        "bare": table.clone(),
        "own": PerRank(own),
        "stateful": inner,
        "rng": RngState(),
    }
    with Checkpointer(uri, timeout_seconds=60) as checkpointer:
        if not again:
            checkpointer.save(1, state).result()
            return {}
        assert checkpointer.restore(state) == 1
    for found in (state["values"]["table"][0], state["bare"], inner.state["ema"][0]):
        assert type(found) is DTensor and list(found.placements) == placements, found
        assert found.to_local().shape == (6, 4 // world)
        assert torch.equal(found.full_tensor(), whole)
    found = state["values"]["table"][1]["copy"]
    assert type(found) is DTensor and found.placements[0].is_replicate() and torch.equal(found.full_tensor(), whole)
    assert state["values"][1] == "x"
    assert own.state is None or (
        own.state["rank"] == rank and own.state[rank][0].tolist() == [float(rank)] * (rank + 1)
    )
    return {"own": own.state is not None}


def one_rank_cannot(uri: str) -> list[str]:
    """Rank 1 has an unsaveable value: all ranks raise, and the next save succeeds."""
    import torch.distributed as dist

    state: dict[str, Any] = {"values": {"a": torch.ones(2), "hook": (lambda: 0) if dist.get_rank() == 1 else 1}}
    with Checkpointer(uri, timeout_seconds=60) as checkpointer:
        try:
            checkpointer.save(1, state)
            message = "saved"
        except StateMismatchError as error:
            message = str(error)
        errors = of_each_rank(message)
        state["values"]["hook"] = 2
        checkpointer.save(2, state).result()
        assert checkpointer.restore(state) == 2
    return errors


HERE = "tests.integration.test_exact_state"


@pytest.mark.slow
@pytest.mark.distributed
def test_sharded_values_take_the_destinations_placement(tmp_path: Path) -> None:
    uri, env = str(tmp_path / "run"), {"TIERCKPT_LOCAL_ROOT": str(tmp_path / "local"), "TIERCKPT_MOVER": "inline"}
    launch(f"{HERE}:ranks", 2, env=env, uri=uri, again=False)
    for world in (2, 1):
        assert launch(f"{HERE}:ranks", world, env=env, uri=uri, again=True) == {"own": True}


@pytest.mark.slow
@pytest.mark.distributed
def test_unsaveable_value_of_one_rank_raises_on_all(tmp_path: Path) -> None:
    env = {"TIERCKPT_LOCAL_ROOT": str(tmp_path / "local"), "TIERCKPT_MOVER": "inline"}
    for message in launch(f"{HERE}:one_rank_cannot", 2, env=env, uri=str(tmp_path / "run")):
        assert "'values.hook' is a builtins.function" in message and "rank=1" in message
