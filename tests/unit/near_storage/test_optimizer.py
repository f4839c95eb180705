"""The near-storage optimizer: bit-identical to one in the trainer, keeps no state there, rejects invalid input."""

from __future__ import annotations

import copy
import shutil
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load, save

import tierckpt
from tests.services import in_full
from tests.states import flip
from tierckpt.arena.memory import Memory
from tierckpt.errors import (
    CheckpointError,
    ConfigError,
    IntegrityError,
    ManifestError,
    PreconditionFailedError,
    StateMismatchError,
    UpdaterLostError,
)
from tierckpt.near_storage import optimizer as near_optimizer
from tierckpt.near_storage.optimizer import NearStorageOptimizer, StateHold
from tierckpt.near_storage.state_file import StateFile, TrainerParameter, begin_state, current_state, layout_of
from tierckpt.near_storage.updater import GradientFiles, LiveBlock, Updater, read_frames
from tierckpt.replay.capture import Step
from tierckpt.replay.frame import Frame
from tierckpt.save import log_segments

STEPS = 20
KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {"kind": torch.optim.AdamW, "lr": 0.01},
    "AdamW, foreach": {"kind": torch.optim.AdamW, "lr": 0.01, "foreach": True},
    "AdamW, fused": {"kind": torch.optim.AdamW, "lr": 0.01, "fused": True},
    "Adam, amsgrad and decay": {"kind": torch.optim.Adam, "amsgrad": True, "weight_decay": 0.1},
    "SGD, momentum": {"kind": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "dampening": 0.1},
    "SGD, Nesterov, fused": {"kind": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "nesterov": True, "fused": True},
    "SGD": {"kind": torch.optim.SGD, "lr": 0.1},
    "Adagrad": {"kind": torch.optim.Adagrad, "lr": 0.1, "initial_accumulator_value": 0.1},
    "RMSprop": {"kind": torch.optim.RMSprop, "momentum": 0.9, "centered": True},
    "NAdam": {"kind": torch.optim.NAdam},
}


class Model(nn.Module):
    """Three layers; one is used only in every other step. One parameter is larger than a block."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(13, 33), nn.Linear(33, 5)
        self.sometimes = nn.Linear(33, 33)
        self.large = nn.Parameter(torch.randn(700_000) / 100)
        self.register_buffer("seen", torch.zeros(()))
        self.to(dtype)

    def backward(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(8, 13, generator=generator).to(self.large.dtype)
        hidden = torch.tanh(self.first(inputs))
        if number % 2:
            hidden = torch.tanh(self.sometimes(hidden))
        out = self.last(hidden) + (self.large * (1 + number % 3)).square().mean()
        out.square().mean().backward()

    def groups(self) -> list[dict[str, Any]]:
        named = list(self.named_parameters())
        return [{"params": named[:3], "weight_decay": 0.2}, {"params": named[3:]}]


class Trainer:
    """A training with an optimizer near storage."""

    optimizer: Any

    def __init__(self, directory: Path, optimizer: str = "AdamW", **options: Any) -> None:
        self.model = Model()
        options = {"persist_every": 4} | KINDS[optimizer] | options
        self.optimizer = NearStorageOptimizer(self.model.groups(), options.pop("kind"), directory=directory, **options)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def train(self, *numbers: int) -> None:
        for number in numbers:
            self.model.backward(number)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            if number != 4:  # a GradScaler skips this step
                self.step()
            for one in self.model.parameters():
                one.grad = None
            self.schedule.step()

    def step(self) -> None:
        self.optimizer.step()


class Reference(Trainer):
    """The same training with float32 masters and an optimizer in this process."""

    def __init__(self, *numbers: int, optimizer: str = "AdamW") -> None:
        self.model = Model()
        self.named = dict(self.model.named_parameters())
        self.masters = {name: one.detach().float() for name, one in self.named.items()}
        options = dict(KINDS[optimizer])
        groups = [
            group | {"params": [self.masters[name] for name, _ in group["params"]]} for group in self.model.groups()
        ]
        self.optimizer = options.pop("kind")(groups, **options)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.train(*numbers)

    def step(self) -> None:
        for name, one in self.named.items():
            self.masters[name].grad = one.grad.float() if one.grad is not None else None
            one.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for name, one in self.named.items():
                one.copy_(self.masters[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors by their names in a checkpoint."""
        found = {f"model.{name}": one.detach() for name, one in self.named.items()}
        for name, master in self.masters.items():
            found[f"optimizer.state.{name}.master"] = master
            found |= {f"optimizer.state.{name}.{key}": one for key, one in self.optimizer.state[master].items()}
        return found


def save_step(run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Save with a Checkpointer, and load the tensors with plain PyTorch."""
    with tierckpt.Checkpointer(run) as checkpointer:
        checkpointer.save(step, {"model": model, "optimizer": optimizer}).result()
    return stock(run / f"step-{step}")


def equal_all(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def stock(directory: Path) -> dict[str, torch.Tensor]:
    """Load with plain PyTorch."""
    found = FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in found.items() if hasattr(one, "size")
    }
    load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    return state


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Except buffers, which no reference has."""
    is_all = found.keys() - {"model.seen"} == wanted.keys()
    return is_all and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "kind",
    [
        "AdamW",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("Adam, amsgrad and decay", "SGD, Nesterov, fused")),
        *in_full([name for name in KINDS if name not in ("AdamW", "Adam, amsgrad and decay", "SGD, Nesterov, fused")]),
    ],
)
def test_steps_are_bit_identical_to_the_reference_optimizer(kind: str, tmp_path: Path) -> None:
    reference, trainer = Reference(optimizer=kind), Trainer(tmp_path / "near", kind, persist_every=3)
    with trainer.optimizer as optimizer:
        for number in range(1, STEPS + 1):
            trainer.train(number)
            reference.train(number)
            assert equal_all(trainer.model.parameters(), reference.model.parameters()), number
        assert optimizer.steps == STEPS - 1
        assert equal(save_step(tmp_path / "run", STEPS, trainer.model, optimizer), reference.state())
    with pytest.raises(CheckpointError, match="closed"):
        optimizer.step()


class TestTraining:
    @pytest.fixture
    def trainer(self, tmp_path: Path) -> Iterator[Trainer]:
        trainer = Trainer(tmp_path / "near")
        yield trainer
        trainer.optimizer.close()

    @pytest.mark.slow
    def test_a_rank_rolls_back_to_the_newest_common_step(self, trainer: Trainer, tmp_path: Path) -> None:
        """Later steps reuse the numbers and count."""
        reference = Reference(1, 2, 3, 5, 6, 7, 8)
        trainer.train(1, 2, 3, 5, 6, 7, 8, 9)
        trainer.optimizer.close()
        again = Trainer(tmp_path / "near")
        with pytest.raises(ConfigError, match="resume"):
            again.optimizer.step()
        with pytest.raises(CheckpointError, match="resume"), again.optimizer.mapped():
            pass
        assert again.optimizer.resume() == 8
        with pytest.raises(IntegrityError, match="newer than step 1"):
            again.optimizer.resume(1)
        assert again.optimizer.resume() == 8  # the failed rollback changed nothing
        assert again.optimizer.resume(7) == 7
        assert equal_all(again.model.parameters(), reference.model.parameters())
        for group, other in zip(again.optimizer.param_groups, reference.optimizer.param_groups, strict=True):
            group["lr"] = other["lr"]
        again.train(11)
        reference.train(11)
        again.optimizer.close()
        last = Trainer(tmp_path / "near")
        with last.optimizer as optimizer:
            assert optimizer.resume() == 8
            assert equal_all(last.model.parameters(), reference.model.parameters())

    @pytest.mark.slow
    def test_the_trainer_holds_four_bytes_per_parameter(self, trainer: Trainer) -> None:
        trainer.train(1)
        count = sum(one.numel() for one in trainer.model.parameters())
        parameters = sum(one.nbytes for one in trainer.model.parameters())
        assert all(not state for state in trainer.optimizer.state.values())
        opened = Path(f"/proc/{trainer.optimizer.process_id}/fd").iterdir()  # only the trainer's memory
        shared = {one.stat().st_ino: one.stat().st_size for one in opened if "memfd:" in str(one.readlink())}
        assert parameters == 2 * count and 2 * count <= sum(shared.values()) <= 2 * count + (2 << 20)
        gradients_up, parameters_down = 2 * count, 2 * count
        unused = 2 * sum(one.numel() for one in trainer.model.sometimes.parameters())
        trainer.train(2)
        assert trainer.optimizer.moved_bytes == 2 * (gradients_up + parameters_down) - unused

    @pytest.mark.slow
    def test_restore_into_an_empty_directory(self, trainer: Trainer, tmp_path: Path) -> None:
        trainer.train(1, 2)
        save_step(tmp_path / "run", 2, trainer.model, trainer.optimizer)
        trainer.train(3)
        other = Trainer(tmp_path / "other")
        with other.optimizer as optimizer, tierckpt.Checkpointer(tmp_path / "run") as checkpointer:
            assert checkpointer.restore({"model": other.model, "optimizer": optimizer}) == 2
            assert optimizer.steps == 2
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.81)
            other.train(3)
            assert equal_all(other.model.parameters(), trainer.model.parameters())
        model = Model()
        with tierckpt.Checkpointer(tmp_path / "run") as checkpointer:
            assert checkpointer.restore({"model": model}, only="model") == 2
        assert equal_all(model.parameters(), Reference(1, 2).model.parameters())

    @pytest.mark.slow
    def test_a_mismatched_checkpoint_changes_nothing(self, trainer: Trainer, tmp_path: Path) -> None:
        """It takes no disk space either."""
        trainer.train(1)
        had = sorted((tmp_path / "near").iterdir())
        job = {"model": trainer.model, "optimizer": trainer.optimizer}
        save({"model": {"first": torch.ones(3)}}, checkpoint_id=tmp_path / "run/step-1", no_dist=True)
        with pytest.raises(StateMismatchError), tierckpt.Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.restore(job, step=1)
        trainer.train(2)
        assert trainer.optimizer.steps == 2
        assert sorted((tmp_path / "near").iterdir()) == had

    @pytest.mark.slow
    def test_saves_copy_no_state_files(self, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer.train(1)
        staged, stage = list[Any](), near_optimizer.stage
        monkeypatch.setattr(near_optimizer, "stage", lambda *given: staged.append(stage(*given)) or staged[-1])
        job = {"model": trainer.model, "optimizer": trainer.optimizer}
        full = Reference(1)
        with tierckpt.Checkpointer(tmp_path / "run") as checkpointer:
            saved = checkpointer.save(1, job)
            trainer.train(2)  # during the save
            saved.result()
            wanted = [one.detach().clone() for one in trainer.model.parameters()]
            assert checkpointer.restore(job) == 1
            assert trainer.optimizer.steps == 1
            assert equal_all(trainer.model.parameters(), full.model.parameters())
            trainer.train(2)
            assert equal_all(trainer.model.parameters(), wanted)
        found = stock(tmp_path / "run/step-1")
        in_files = {index.fqn for index in staged[0].in_files}
        assert in_files == {name for name in found if name.startswith("optimizer.state.")}  # not copied
        for name, one in full.state().items():
            assert torch.equal(found[name], one)

    @pytest.mark.slow
    def test_state_dict_has_groups_and_no_state(self, trainer: Trainer, tmp_path: Path) -> None:
        """Loaded without state, it is incomplete."""
        trainer.train(1, 2)
        state = trainer.optimizer.state_dict()
        assert not any(state["state"].values())
        assert trainer.optimizer.resume() == 2
        trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
        state = trainer.optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.25
        trainer.optimizer.load_state_dict(state)
        assert trainer.optimizer.param_groups[0]["lr"] == 0.25
        trainer.train(3)
        with pytest.raises(StateMismatchError, match="step 2"):
            trainer.optimizer.load_state_dict(state)
        full = Reference(1)
        trainer.optimizer.load_state_dict(full.optimizer.state_dict())
        found, wanted = save_step(tmp_path / "run", 9, trainer.model, trainer.optimizer), full.state()
        moments = [name for name in wanted if name.startswith("optimizer.state") and not name.endswith("master")]
        assert len(moments) == len([name for name in found if ".exp_avg" in name or name.endswith("step")])
        assert all(torch.equal(found[name], wanted[name]) for name in moments)

    @pytest.mark.slow
    def test_one_trainer_per_directory(self, trainer: Trainer, tmp_path: Path) -> None:
        with pytest.raises(PreconditionFailedError, match="running"):
            Trainer(tmp_path / "near")

    @pytest.mark.slow
    def test_parameter_groups_and_gradient_dtypes_are_fixed(self, trainer: Trainer) -> None:
        with pytest.raises(ConfigError, match="cannot be added"):
            trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]})
        trainer.model.large.grad_dtype = torch.float32
        trainer.model.large.grad = torch.ones_like(trainer.model.large, dtype=torch.float32)
        with pytest.raises(ConfigError, match="float32"):
            trainer.optimizer.step()
        trainer.model.large.grad = None
        trainer.model.large.grad_dtype = torch.bfloat16
        with pytest.raises(ConfigError, match="cannot be copied"):
            copy.deepcopy(trainer.optimizer)
        with torch.no_grad():
            trainer.model.large.fill_(0.5)  # weights loaded before the first step
        trainer.train(1)
        assert trainer.optimizer.steps == 1
        kept = trainer.model.large.detach().clone()
        assert kept.float().sub(0.5).abs().max() < 0.1
        with torch.no_grad():
            trainer.model.large.zero_()
        with pytest.raises(StateMismatchError, match="large was changed"):
            trainer.train(2)
        with torch.no_grad():
            trainer.model.large.copy_(kept)
        trainer.train(2)
        assert trainer.optimizer.steps == 2


@pytest.mark.slow
def test_a_directory_of_a_different_optimizer_is_rejected(tmp_path: Path) -> None:
    Trainer(tmp_path / "near", "SGD").optimizer.close()
    with pytest.raises(StateMismatchError, match="is of SGD"):
        Trainer(tmp_path / "near")


def test_unsupported_models_and_optimizers_are_rejected(tmp_path: Path) -> None:
    model, other = (nn.Linear(2, 2, dtype=torch.bfloat16) for _ in range(2))
    other.weight.main_grad = torch.zeros(2, 2)  # type: ignore[assignment]
    adam, meta = torch.optim.AdamW, nn.Linear(2, 2, dtype=torch.bfloat16, device="meta")
    for match, arguments, options in [
        ("LBFGS", (model.parameters(), torch.optim.LBFGS), {}),
        ("meta", (meta.parameters(), adam), {}),
        (r"is float32.*gradient_log", (nn.Linear(2, 2).parameters(), adam), {}),  # of autocast and a GradScaler
        ("has float32 gradients", (other.parameters(), adam), {}),
        (r"supports only mode=.*gradient_log", (adam(model.parameters()),), {"mode": "shadow"}),
        (r"supports only mode=.*gradient_log", (model.parameters(), adam), {"mode": "shadow"}),
        ("in the trainer", (adam(model.parameters()),), {"mode": "offload"}),
        *(("not an optimizer class", (model.parameters(), one), {}) for one in (None, "AdamW", nn.Linear)),
        ("whole numbers above 0", (model.parameters(), adam), {"workers": 0}),
        ("whole numbers above 0", (model.parameters(), adam), {"workers": "two"}),
        ("whole numbers above 0", (model.parameters(), adam), {"persist_every": 1.5}),
    ]:
        with pytest.raises(ConfigError, match=match):
            NearStorageOptimizer(*arguments, directory=tmp_path, **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


class TestDamage:
    """Flipped bits on disk are neither stepped nor saved; an intact version is used if one exists."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> StateFile:
        layout = layout_of(torch.optim.AdamW, [TrainerParameter("0.0", "weight", (3000,), "bfloat16")], [{"lr": 0.1}])
        begin_state(tmp_path, layout, {"0.0": {"": torch.ones(3000)}}, 0)
        found = current_state(tmp_path, layout)
        assert found is not None
        return StateFile(found, layout)

    @pytest.mark.parametrize("steps", [0, 1, 2, 3])
    @pytest.mark.parametrize("is_counted", [True, False])
    def test_each_step_verifies_block_digests(self, file: StateFile, steps: int, is_counted: bool) -> None:
        """The digest is recorded after the second step, when both versions hold a state; the older is overwritten."""

        def apply() -> None:
            step = Step(live.step + 1, [{"lr": 0.1}], {"0.0": torch.ones(3000)})
            live.apply(step)

        with ThreadPoolExecutor(1) as worker:
            [block] = file.layout.blocks
            live = LiveBlock(file, block, torch.optim.AdamW, worker)
            for number in range(steps):
                apply()
                if number == 1:
                    live.record()
            is_recorded = steps in (0, 2)
            changed = live.counts if is_counted else 1 - live.counts
            had = file.digest(block, 1 - changed)
            flip(file.directory / "state", changed * file.layout.size_bytes + 4096)
            if is_counted == is_recorded:
                with pytest.raises(UpdaterLostError, match=r"block 0 of .*/state .* does not match its digest"):
                    apply()
                assert file.digest(block, 1 - changed) == had, "the other version is unchanged"
            else:
                apply()
                assert live.step == steps + 1
            if is_counted:
                with pytest.raises(UpdaterLostError, match="block 0 of"):
                    live.check()  # like a save after reading it

    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[torch.Tensor]]:
        """The directory of step 8 (first block recorded then); the arguments of its process; the masters."""
        directory = tmp_path_factory.mktemp("trained") / "near"
        trainer = Trainer(directory)
        trainer.train(1, 2, 3, 5, 6, 7, 8, 9)
        order = trainer.optimizer._process.order  # private: the arguments for a process of another directory
        trainer.optimizer.close()
        memory = Memory.allocate(1 << 22, shared=True)
        order |= {"last_step": None, "memory": [memory.fd, str(memory.kind)], "keep": memory}
        step, masters = cls.opened(order, directory)
        assert step == 8
        return directory, order, masters

    @staticmethod
    def opened(order: dict[str, Any], directory: Path) -> tuple[int, list[torch.Tensor]]:
        """Open a directory as its process does."""
        updater = Updater({**order, "directory": str(directory)}, Pipe()[0])
        found = [one.clone() for live in updater._blocks for one in live.masters().values()]  # private: no other access
        return updater.step, found

    @pytest.mark.parametrize(
        ("damage", "outcome"),
        [
            ("the newest version of a block", "whole"),
            ("both versions of a block", IntegrityError),
            ("blocks in each other's place", IntegrityError),
            ("blocks and records in each other's place", IntegrityError),
            ("the versions of a block swapped", IntegrityError),
            ("no records", IntegrityError),
            ("records cut short", IntegrityError),
            ("a record that says a later step", "whole"),
            ("the state cut short", IntegrityError),
            ("a gradient", IntegrityError),
            ("the head of the gradient file", IntegrityError),
            ("no gradient files", IntegrityError),
            ("current.json", ManifestError),
            ("the token", ManifestError),
        ],
    )
    def test_damage_yields_the_newest_step_or_an_error(
        self, damage: str, outcome: Any, trained: tuple[Path, dict[str, Any], list[torch.Tensor]], tmp_path: Path
    ) -> None:
        origin, order, masters = trained
        directory = Path(shutil.copytree(origin, tmp_path / "near"))
        [state], [records] = directory.glob("*/state"), directory.glob("*/records")
        logs = log_segments.paths_in(state.parent)
        data, kept = bytearray(state.read_bytes()), bytearray(records.read_bytes())
        members = [TrainerParameter(one[0], one[1], tuple(one[2]), one[3]) for one in order["members"]]
        layout = layout_of(torch.optim.AdamW, members, [{"lr": 0.1}, {"lr": 0.1}])
        blocks, half = layout.blocks, layout.size_bytes
        assert len(blocks) > 1
        first, second = (struct.unpack_from("<q", kept, 64 * version * len(blocks) + 8)[0] for version in (0, 1))
        newest = int(second > first)

        def swap(into: bytearray, one: int, other: int, count: int) -> None:
            into[one : one + count], into[other : other + count] = into[other : other + count], into[one : one + count]

        match damage:
            case "the newest version of a block":
                data[newest * half + 200] ^= 1
            case "both versions of a block":
                data[200] ^= 1
                data[half + 200] ^= 1
            case "blocks in each other's place" | "blocks and records in each other's place":
                for version in (0, 1):
                    swap(data, version * half, version * half + blocks[1].offset, 8192)
                    if "records" in damage:
                        swap(kept, 64 * version * len(blocks), 64 * (version * len(blocks) + 1), 64)
            case "the versions of a block swapped":
                swap(data, 0, half, blocks[0].size_bytes)
            case "no records":
                kept[:] = bytes(len(kept))
            case "records cut short":
                del kept[10:]
            case "a record that says a later step":
                kept[64 * newest * len(blocks) + 8] += 1
            case "the state cut short":
                del data[half:]
            case "a gradient":
                [log] = [one for one in logs if log_segments.step_of_path(one) == 4]
                flip(log)
            case "the head of the gradient file":
                for log in logs:
                    flip(log, 30)
            case "no gradient files":
                for log in logs:
                    log.unlink()
            case "current.json":
                (directory / "current.json").write_text("[]")
            case "the token":
                flip(directory / "current.json", 14)
        state.write_bytes(data)
        records.write_bytes(kept)
        if isinstance(outcome, type):
            with pytest.raises(outcome) as caught:
                self.opened(order, directory)
            assert str(directory) in caught.value.message and caught.value.hint
        else:
            step, found = self.opened(order, directory)
            assert step == 8 and equal_all(found, masters)

    @pytest.mark.slow
    def test_training_continues_from_the_intact_version(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Damage between steps and during saves. If no version is intact, the next call raises the error."""
        reference, trainer = Reference(), Trainer(tmp_path / "near")
        wait, [path] = StateHold.wait, list((tmp_path / "near").glob("*/state"))

        def counted() -> int:
            data = path.with_name("records").read_bytes()
            first, second = (struct.unpack_from("<q", data, at + 8)[0] for at in (0, len(data) // 2))
            return int(second > first)

        def wait_and_flip(hold: StateHold, seconds: float) -> None:
            wait(hold, seconds)
            flip(path, counted() * path.stat().st_size // 2 + 4096)

        with trainer.optimizer as optimizer, tierckpt.Checkpointer(tmp_path / "run") as checkpointer:
            trainer.train(1, 2, 3, 5, 6)
            reference.train(1, 2, 3, 5, 6)
            state = {"model": trainer.model, "optimizer": optimizer}
            monkeypatch.setattr(StateHold, "wait", wait_and_flip)
            checkpointer.save(6, state)
            with pytest.raises(UpdaterLostError, match=r"block 0 of .*/state .* does not match its digest"):
                checkpointer.wait("local")
            monkeypatch.undo()
            checkpointer.save(6, state).result()
            assert equal(stock(tmp_path / "run/step-6"), reference.state())
            pid, at = optimizer.process_id, path.stat().st_size // 2 + 4096
            for one in (4096, at):  # flipped and flipped back
                flip(path, one)
                flip(path, one)
            versions = path.read_bytes()[4096], path.read_bytes()[at]
            trainer.train(7)
            reference.train(7)
            assert optimizer.process_id == pid and versions
            live = at if path.read_bytes()[at] != versions[1] else 4096
            flip(path, live)
            trainer.train(8)
            reference.train(8)
            assert optimizer.process_id != pid
            assert equal_all(trainer.model.parameters(), reference.model.parameters())
            checkpointer.save(8, state).result()
            for one in (4096, at):
                flip(path, one)
            with pytest.raises(IntegrityError, match=r"both versions of block 0 of .*/state are damaged") as caught:
                trainer.train(9)
            assert "restore the newest checkpoint" in caught.value.hint


def test_discarded_frames_never_return(tmp_path: Path) -> None:
    """After a torn tail, a restart, a rollback, removed segments, or damage."""

    def frame(number: int, value: float) -> Frame:
        step = Step(number, [{}], {"0.0": torch.full((3,), float(value))})
        return Frame(number, {"": step}, {"": "layout"})

    def found(step: int) -> list[tuple[int, float]]:
        return [(one.number, float(one.steps[""].gradients["0.0"][0])) for one in read_frames(tmp_path, "layout", step)]

    files = GradientFiles(tmp_path, 0)
    for number in range(1, 6):
        files.append(frame(number, number))
        if number == 3:
            files.begin(number)
    files.sync()
    files.close()
    with log_segments.paths_in(tmp_path)[-1].open("ab") as torn:
        torn.write(b"TKGRAD02" + bytes(100))
    assert found(0) == [(number, number) for number in range(1, 6)] and found(3) == [(4, 4), (5, 5)]
    again = GradientFiles(tmp_path, 5)
    again.append(frame(6, 6))
    again.close()
    assert found(2) == [(3, 3), (4, 4), (5, 5), (6, 6)]
    back = GradientFiles(tmp_path, 4)
    assert found(0)[-1] == (4, 4)
    back.append(frame(5, 50))
    back.begin(5)
    back.append(frame(6, 60))
    assert found(0)[-3:] == [(4, 4), (5, 50), (6, 60)]
    back.trim(4)
    back.close()
    assert found(4) == [(5, 50), (6, 60)] and found(0) == []
    newest = log_segments.paths_in(tmp_path)[-1]
    data = bytearray(newest.read_bytes())
    data[data.index(torch.full((3,), 60.0).numpy().tobytes())] ^= 1
    newest.write_bytes(data)
    assert found(4) == [(5, 50)] and list(read_frames(tmp_path, "another", 4)) == []
