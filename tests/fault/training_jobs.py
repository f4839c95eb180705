"""Training jobs that are killed: with a gradient log, with redo logs, and with saves over several steps."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierckpt
from tests.fault.log_bugs import seed_log_bug
from tests.fault.scenario_tools import after, before, die
from tierckpt.dcp.reader import TierStorageReader
from tierckpt.dcp.save_session import SaveSession
from tierckpt.replay import frame, redo
from tierckpt.replay.apply import Replay
from tierckpt.replay.checksum import checksum
from tierckpt.replay.link import PARTS, Link, TensorCopy
from tierckpt.replay.log import GradientLog, Recovered, roll_forward
from tierckpt.replay.multi_step import MultiStepStager
from tierckpt.replay.tree import fill
from tierckpt.save.flush import ShardFile
from tierckpt.training import restore_state
from tierckpt.training.every_step import redo_log, window

BASE = "base-0"


class Job:
    """A model and its optimizer. Each step depends on its number and on the state before it, and on nothing else."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(*(nn.Linear(21, 21) for _ in range(8)))
        self.model.register_buffer("seen", torch.zeros(()))
        self.optimizer = make(self.model.parameters(), **{"lr": 0.01, **options})
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.scaler: torch.amp.GradScaler | None = None
        self.step = 0

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "rng": tierckpt.RngState(),
            "step": self.step,
        }

    def train(self) -> None:
        self.step += 1
        self.optimizer.zero_grad()
        torch.manual_seed(self.step)
        loss = self.model(torch.randn(4, 21)).square().mean()
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
        if self.scaler is not None:
            if self.step % 3 == 0:  # inf: the scaler has the optimizer skip the step
                self.model[0].weight.grad.view(-1)[0] = torch.inf
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            self.optimizer.step()
        self.schedule.step()
        self.model.seen += 1  # type: ignore[operator]

    def train_to(self, step: int) -> Job:
        while self.step < step:
            self.train()
        assert self.step == step
        return self

    def values(self) -> dict[str, Any]:
        """A copy of the state."""
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "rng": torch.get_rng_state(),
                "step": self.step,
            }
        )

    def checksum(self) -> list[int]:
        """Checksums of the parameters and of the optimizer's state."""
        states = [self.optimizer.state[one] for one in self.model.parameters()]
        tensors: list[Any] = [*self.model.parameters(), *(one for state in states for one in state.values())]
        return [int(checksum(one).item()) for one in tensors]

    def others(self) -> bytes:
        """The part of the state that a gradient log has as an attachment."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return json.dumps({"schedule": self.schedule.state_dict(), "rates": rates}).encode()

    def resume(self, directory: Path) -> Recovered:
        """Roll forward by the gradient log in ``directory``."""
        attachments: list[bytes] = []
        found = roll_forward(self.optimizer, directory, BASE, on_attachment=attachments.append)
        if found.steps:
            others = json.loads(attachments[-1])
            self.schedule.load_state_dict(others["schedule"])
            for group, rate in zip(self.optimizer.param_groups, others["rates"], strict=True):
                group["lr"] = rate
            self.step = found.step
        return found


def restored(uri: Path, job: Job, step: int | None = None) -> int | None:
    """Restore into ``job``. Returns the step."""
    state = job.state
    with tierckpt.Checkpointer(uri) as checkpointer:
        found = checkpointer.restore(state, step)
    job.step = state["step"]
    return found


# --- with a gradient log ----------------------------------------------------------------------------------------------


def log_steps(folder: Path, directory: str, steps: int, bug: str = "") -> None:
    """Resume by the log in ``directory`` and train to ``steps``. Print "step N" when step N is durable."""
    seed_log_bug(bug)
    job = Job()
    found = job.resume(Path(directory))
    with GradientLog(job.optimizer, Path(directory)) as log:
        log.begin(BASE, found if found.steps else None)
        print(f"resumed {job.step}", flush=True)
        while job.step < steps:
            job.train()
            log.end_of_step(job.step, job.others())
            print(f"step {log.durable_step}", flush=True)


# --- with redo logs ---------------------------------------------------------------------------------------------------

REDO_POINTS: dict[str, tuple[Any, str]] = {
    "pack": (redo_log, "pack"),
    "write": (SaveSession, "write"),
    "commit": (SaveSession, "commit"),
    "drain": (SaveSession, "hand_over"),
    "read": (TierStorageReader, "read_alone"),
    "replay": (redo.Redo, "fold"),
    "save": (redo_log, "fold"),
    "load": (restore_state, "restore_into"),
}
PLAIN, REDO, REDO_STEPS = 1, 4, 3
"""Step 1 is saved as a checkpoint, and step 4 as a redo log of 3 steps."""


class Deferring(MultiStepStager):
    """Replays at the next restore, as on an accelerator."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options, defers=True)


def die_at(point: str, when: str) -> None:
    """Die before or after the first call of ``point``."""
    if point:
        (after if when == "after" else before)(*REDO_POINTS[point])


def save_redo_log(folder: Path, run: str, point: str = "", when: str = "before", bug: str = "") -> None:
    """Save a checkpoint, then a redo log; die at ``point`` of the second save."""
    seed_redo_bug(bug)
    job = Job().train_to(PLAIN)
    with tierckpt.Checkpointer(run) as plain:
        plain.save(job.step, job.state).result(60)
    die_at(point, when)
    window.MultiStepStager = Deferring  # type: ignore[misc]
    with tierckpt.Checkpointer(run, every_step=tierckpt.EveryStep(window_steps=REDO_STEPS)) as checkpointer:
        job.train()
        saved = checkpointer.save(job.step, job.state)
        while not saved.done():
            job.train()
            checkpointer.step(job.step, job.state)
        saved.result(60)


def restore_redo_log(folder: Path, run: str, point: str = "", when: str = "before") -> None:
    """Restore the newest step; die at ``point``."""
    die_at(point, when)
    job = Job()
    assert job.step == (restored(Path(run), job) or 0)


def seed_redo_bug(name: str) -> None:
    """Write redo logs with one mistake from now on, which a test must find."""
    to_json, pack, first = frame.to_json, redo_log.pack, list[Any]()

    def stored(tree: Any, redos: Any) -> Any:
        copies = {(number, *key): one for number, log in redos.items() for key, one in log.tensors.items()}
        return fill(tree, copies), {}

    def stale(value: Any) -> Any:
        if isinstance(value, dict) and "betas" in value:
            first.append(to_json(value))
            return first[0]
        return to_json(value)

    def without_a_step(log: Any, names: Any) -> Any:
        del log.steps[0]
        return pack(log, names)

    if name == "a mixed version as a checkpoint":
        window.stored, window.WINDOWS_DIR = stored, "."
    if name == "a stale hyperparameter":
        frame.to_json = stale
    if name == "a missing step":
        redo_log.pack = without_a_step


# --- with saves over several steps ------------------------------------------------------------------------------------

WINDOW = 4
FIRST, SECOND = 8, 16
"""The first steps of windows."""


class WindowKill:
    """Kills this process at ``point``, once it is armed."""

    def __init__(self, point: str) -> None:
        self.point, self.parts, self.is_armed = point, 0, False
        before(Link, "copy", self.on_copy)
        before(TensorCopy, "next_chunk", lambda *_: self.reach(f"part {self.parts - 1}"))
        before(Replay, "apply", lambda *_: self.reach("replay"))
        before(SaveSession, "commit", lambda *_: self.reach("before the commit"))
        before(ShardFile, "write", lambda *_: self.reach("write"))

    def on_copy(self, _: Link, sources: list[torch.Tensor], priority: int) -> None:
        self.parts += priority == PARTS and self.is_armed

    def reach(self, point: str) -> None:
        if self.is_armed and point == self.point:
            die()


def save_in_windows(folder: Path, run: str, point: str) -> None:
    """Train 40 steps; die at ``point`` of the second window, of steps 16 to 19."""
    kill, job, saved = WindowKill(point), Job(), None
    every_step = tierckpt.EveryStep(window_steps=WINDOW)
    with tierckpt.Checkpointer(run, every_step=every_step, interval=FIRST) as checkpointer:
        while job.step < 40:
            job.train()
            kill.is_armed = kill.is_armed or job.step == SECOND
            saved = checkpointer.step(job.step, job.state) or saved
            if job.step == FIRST + WINDOW and saved is not None:
                checkpointer.wait("local")  # writes the parts that are incomplete, which a later step would do
                saved.result(120)
                print("committed", flush=True)
    print("not killed", flush=True)
