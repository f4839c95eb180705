"""Random histories of a run on one or two nodes: the job goes back, saves, is killed, pruned and started again.

Each start of the job is a process of its own, which prints the steps that it restored and the saves that were
acknowledged. The tiers are read between the starts. A model with only the tree of starts and steps predicts the step of
a restart, the abandoned steps, and the steps that retention may remove.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.fault.runner import Job, start
from tests.fault.scenario_tools import before, die
from tierckpt.checkpoint import branches, local_commit
from tierckpt.checkpoint.branches import Branch
from tierckpt.checkpoint.prune import Pruner
from tierckpt.checkpoint.retention import Policy
from tierckpt.client import get_client
from tierckpt.config import Settings
from tierckpt.drain.drainer import Drainer, DrainResult
from tierckpt.errors import OperationTimeoutError, TierckptError
from tierckpt.format.layout import BRANCHES_DIR, local_dir, parse_uri, step_of
from tierckpt.format.manifest import Manifest
from tierckpt.types import Tier

LIFE_SECONDS = 120.0
EXITS_AT_ONCE = True
"""Many processes: the end of Python takes longer than the scenario."""
LIVES_MIN, LIVES_MAX, SAVES_MAX = 4, 8, 3
SHARED = "shared"


# --- the model ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Line:
    """A line of steps: the first of the run, or one that began when a job went back to ``base`` of ``parent``."""

    parent: Line | None = None
    base: int = 0

    def holds(self, other: Line, step: int) -> bool:
        line: Line | None = self
        limit = sys.maxsize
        while line is not None:
            if line is other:
                return step <= limit
            line, limit = line.parent, min(limit, line.base)
        return False


@dataclass(frozen=True)
class Saved:
    """A checkpoint. ``life`` is the number of the start of the job."""

    step: int
    life: int
    line: Line
    value: float
    attempt: str


@dataclass
class Model:
    tiers: dict[str, dict[int, Saved]]
    noted: dict[str, dict[Line, int]]
    """The lines that a tier has branch records of, and the last start that committed there."""

    def seen(self, node: str) -> dict[int, Saved]:
        """The checkpoints that a job on ``node`` finds. Of two saves of one step, the later start's counts."""
        found: dict[int, Saved] = {}
        for tier in (SHARED, node):
            for step, one in self.tiers[tier].items():
                if step not in found or found[step].life <= one.life:
                    found[step] = one
        return found

    def current(self, node: str) -> Line | None:
        starts: dict[Line, int] = {}
        for tier in (SHARED, node):
            for line, life in self.noted[tier].items():
                starts[line] = max(life, starts.get(line, 0))
        if not starts:
            return None
        line = max(starts, key=lambda one: starts[one])
        life = starts[line]
        while True:
            seen = self.seen(node).values()
            newest = max((one.step for one in seen if line.holds(one.line, one.step)), default=-1)
            later = [
                one for one in seen if one.step > newest and one.life > life and not line.holds(one.line, one.step)
            ]
            if not later:
                return line
            last = max(later, key=lambda one: one.life)
            line, life = last.line, last.life

    def alive(self, node: str) -> dict[int, Saved]:
        line, seen = self.current(node), self.seen(node)
        return {step: one for step, one in seen.items() if line is None or line.holds(one.line, step)}


# --- one start of the job -------------------------------------------------------------------------------------------


@dataclass
class Plan:
    node: str
    asked: int | None
    saves: list[int]
    keep_last: int
    drains: bool
    end: str
    """How it ends: "close", or killed after the "restore", after the last "save" is acknowledged, or "during" it."""
    life: int = 0

    def __str__(self) -> str:
        back = f"restore({'' if self.asked is None else self.asked})"
        drained = "" if self.drains else ", not drained"
        return f"{self.node}: {back}, saves {self.saves}, keep_last={self.keep_last}{drained}, ends by {self.end}"


def live(folder: Path, run: str, fields: dict[str, Any], bug: str) -> None:
    """Start the job as planned. Print each result."""
    seed_bug(bug)
    plan = Plan(**fields)

    def tell(**line: Any) -> None:
        print(json.dumps(line), flush=True)

    if not plan.drains:

        async def hang(self: Drainer, *_: Any, **__: Any) -> Any:
            await asyncio.sleep(3600)

        async def wait(self: Drainer, token: str) -> DrainResult:
            return DrainResult(token, "", "waiting")

        Drainer.drain, Drainer.commit_if_complete = hang, wait  # type: ignore[method-assign]
    keep: Any = {"keep_last": plan.keep_last} if plan.keep_last else {}
    checkpointer = tierckpt.Checkpointer(run, exit_timeout_seconds=30 if plan.drains else 0.01, **keep)
    state = {"w": torch.zeros(4)}
    reached = checkpointer.restore(state, step=plan.asked)
    tell(what="restored", step=reached, value=state["w"][0].item())
    if plan.end == "restore":
        die()
    delay_seconds = random.Random(plan.life).random() * 0.05
    for step in plan.saves:
        if plan.end == "during" and plan.life % 2 and step == plan.saves[-1]:
            before(branches, "note_local", die)  # committed, without its branch record
            delay_seconds = LIFE_SECONDS
        value = float(plan.life * 1000 + step)
        tell(what="begun", step=step, value=value)
        future = checkpointer.save(step, {"w": torch.full((4,), value)})
        if plan.end == "during" and step == plan.saves[-1]:
            time.sleep(delay_seconds)
            die()
        future.result()
        if plan.drains:
            checkpointer.wait("shared", 30)
        standing = local_commit.read_local_manifest(
            local_dir(checkpointer.settings.local_root, parse_uri(f"{run}/step-{step}"))
        )
        tell(what="saved", step=step, attempt=standing.attempt if standing else "")
    if plan.end == "save":
        die()
    with contextlib.suppress(OperationTimeoutError):
        checkpointer.close()


def prune_abandoned(folder: Path, run: str, bug: str) -> None:
    seed_bug(bug)
    client = get_client(Settings.load())
    policy = Policy(abandoned=frozenset({Tier.LOCAL, Tier.SHARED}))
    client.run(client.mover.pruner.prune(parse_uri(run), policy))


def is_noted(run: Path, manifest: Manifest) -> bool:
    """False for a commit that was killed before it wrote its branch record. An acknowledged one still counts (B2)."""
    branch = branches.parse(manifest.notes.get(branches.NOTE))
    return branch is not None and any((run / BRANCHES_DIR).glob(f"*{branch.order}-{branch.id}.json"))


# --- a history ------------------------------------------------------------------------------------------------------


@dataclass
class History:
    seed: int
    folder: Path
    bug: str = ""
    random: random.Random = field(init=False)
    model: Model = field(init=False)
    told: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.run = str(self.folder / "run")
        self.nodes = ["one"] if self.random.random() < 0.5 else ["one", "two"]
        self.tiers = {"one": self._local("one"), "two": self._local("two"), SHARED: Path(self.run)}
        self.model = Model({tier: {} for tier in self.tiers}, {tier: {} for tier in self.tiers})
        self.attempts: dict[str, Saved] = {}
        self.acknowledged = set[tuple[str, str]]()
        """Tier and attempt of each acknowledged save."""
        self.values: dict[tuple[int, int], float] = {}
        self.root = Line()

    def _local(self, node: str) -> Path:
        return local_dir(self.folder / node, parse_uri(self.run))

    def _run_on(self, node: str, scenario: Callable[..., None], name: str, **options: Any) -> tuple[Job, int | None]:
        """Run ``scenario`` in a process on ``node``; return its job and exit code."""
        env = {"TIERCKPT_LOCAL_ROOT": str(self.folder / node), "TIERCKPT_MOVER": "inline"}
        job = start(scenario, self.folder / name, env=env, run=self.run, bug=self.bug, **options)
        [code] = job.codes(LIFE_SECONDS)
        job.kill()
        return job, code

    def play(self) -> None:
        lives = self.random.randint(LIVES_MIN, LIVES_MAX)
        for life in range(1, lives + 1):
            if life > 2 and self.random.random() < 0.2:
                self._prune_abandoned(self.random.choice(self.nodes))
            self._live(self._plan(life))
            if self.wrong:
                return

    def _plan(self, life: int) -> Plan:
        rng = self.random
        if life == 1:  # one line from the beginning, and on shared storage: the other node begins with it
            return Plan("one", None, [10, 20, 30], 0, True, "close", life)
        node = rng.choice(self.nodes)
        seen = self.model.seen(node)
        asked = rng.choice(sorted(seen)) if seen and rng.random() < 0.5 else None
        base = asked if asked is not None else max(self.model.alive(node), default=0)
        steps = sorted(
            {base + rng.choice((1, 2, 5, 10, 20)) * count for count in range(1, rng.randint(2, SAVES_MAX + 1))}
        )
        end = rng.choice(("close", "save", "save", "during", "restore"))
        return Plan(node, asked, steps, rng.choice((0, 1, 2, 3)), rng.random() < 0.6, end, life)

    def _live(self, plan: Plan) -> None:
        self.told.append(str(plan))
        alive, current = self.model.alive(plan.node), self.model.current(plan.node)
        seen = self.model.seen(plan.node)
        expected = seen.get(plan.asked) if plan.asked is not None else alive.get(max(alive, default=-1))
        job, code = self._run_on(plan.node, live, f"life-{plan.life}", fields=asdict(plan))
        lines = [json.loads(line) for line in job.lines()]
        killed = plan.end != "close"
        if code != (-signal.SIGKILL if killed else 0) or not lines:
            self.wrong.append(f"it ended with {code}: {job.output()[-1500:]}")
            return
        got = (lines[0]["step"], lines[0]["value"] if lines[0]["step"] is not None else None)
        if got != ((expected.step, expected.value) if expected is not None else (None, None)):
            self.wrong.append(f"restored {got} and not {expected and (expected.step, expected.value)}")
            return
        line = self._line_of(plan, expected, current, alive)
        before = {step: one for step, one in self.model.tiers[plan.node].items() if one is seen[step]}
        for told in lines:
            if told["what"] == "begun":
                self.values[plan.life, told["step"]] = told["value"]
            if told["what"] == "saved":
                self.acknowledged |= {
                    (tier, told["attempt"]) for tier in (plan.node, *([SHARED] if plan.drains else []))
                }
        self._look(plan, line)
        self._check_kept(plan, [told["step"] for told in lines if told["what"] == "saved"], before, line)

    def _line_of(self, plan: Plan, restored: Saved | None, current: Line | None, alive: dict[int, Saved]) -> Line:
        """The line that the saves of this start belong to."""
        if restored is None:
            return current or self.root
        is_alive = current is None or current.holds(restored.line, restored.step)
        if plan.asked is not None and (not is_alive or any(step > restored.step for step in alive)):
            return Line(current if current is not None and is_alive else restored.line, restored.step)
        return current or restored.line

    def _look(self, plan: Plan | None, line: Line | None) -> None:
        """Read the checkpoints on the tiers."""
        for tier, directory in self.tiers.items():
            standing: dict[int, Saved] = {}
            for path in directory.glob("step-*"):
                manifest = local_commit.read_local_manifest(path)
                step = step_of(path.name)
                if manifest is None or step is None:
                    continue
                if manifest.attempt not in self.attempts:
                    if plan is None or line is None:
                        self.wrong.append(f"{path} appeared from nowhere")
                        continue
                    value = self.values.get((plan.life, step), -1.0)
                    self.attempts[manifest.attempt] = Saved(step, plan.life, line, value, manifest.attempt)
                standing[step] = self.attempts[manifest.attempt]
                is_told = (tier, manifest.attempt) in self.acknowledged
                if standing[step].line.parent is not None and (is_told or is_noted(directory, manifest)):
                    noted = self.model.noted[tier]
                    noted[standing[step].line] = max(standing[step].life, noted.get(standing[step].line, 0))
            self.model.tiers[tier] = standing

    def _check_kept(self, plan: Plan, saved: list[int], before: dict[int, Saved], line: Line) -> None:
        """Acknowledged saves are there; so are another branch's, except steps that were saved again."""
        local, shared = self.model.tiers[plan.node], self.model.tiers[SHARED]
        for tier, standing in ((plan.node, local), *(((SHARED, shared),) if plan.drains else ())):
            # A save that was killed before its acknowledgement may have committed: retention counts it.
            late = [step for step in plan.saves if step not in saved and step in standing]
            own = list(dict.fromkeys(reversed([*saved, *(step for step in late if standing[step].life == plan.life)])))
            for step in own[: plan.keep_last or len(own)]:
                if step not in standing or standing[step].life != plan.life:
                    self.wrong.append(f"the acknowledged step {step} does not stand on {tier}")
        for step, one in before.items():
            if line.holds(one.line, step) or (plan.life, step) in self.values:
                continue
            if one.line.parent is not None and not any(one.line in noted for noted in self.model.noted.values()):
                continue  # killed before its record: the line counts as not begun (B2)
            if step not in local and (step not in shared or shared[step].life < one.life):
                self.wrong.append(f"retention removed the abandoned step {step}")

    def _prune_abandoned(self, node: str) -> None:
        self.told.append(f"{node}: prune --abandoned")
        self._look(None, None)
        line, busy = self.model.current(node), set[int]()
        doomed = {
            tier: {step for step, one in self.model.tiers[tier].items() if line and not line.holds(one.line, step)}
            for tier in (node, SHARED)
        }
        kept = {tier: self.model.tiers[tier].keys() - steps for tier, steps in doomed.items()}
        for path in (self.folder / node / "journal").glob("*.json"):
            with contextlib.suppress(ValueError):
                busy.add(step_of(json.loads(path.read_text())["uri"]) or 0)

        job, code = self._run_on(node, prune_abandoned, "prune")
        if code != 0:
            self.wrong.append(f"prune failed: {job.output()[-1500:]}")
        self._look(None, None)
        for tier, steps in doomed.items():
            standing = self.model.tiers[tier].keys()
            if kept[tier] - standing:
                self.wrong.append(f"prune --abandoned removed {sorted(kept[tier] - standing)} on {tier}")
            if kept[tier] and (left := (steps & standing) - busy):
                self.wrong.append(f"prune --abandoned left {sorted(left)} on {tier}")


def play(seed: int, bug: str = "") -> History:
    with tempfile.TemporaryDirectory(prefix="history-") as folder:
        history = History(seed, Path(folder), bug)
        try:
            history.play()
        except TierckptError as error:
            history.wrong.append(f"{error!r}")
        if history.wrong and (kept := os.environ.get("TIERCKPT_TEST_HISTORY_KEPT")):
            shutil.copytree(folder, Path(kept) / str(seed))
        return history


# --- bugs -----------------------------------------------------------------------------------------------------------


async def _never(*_: Any) -> None:
    return None


def seed_bug(name: str) -> None:
    """Seed a bug of ``BUGS``."""
    if name:
        setattr(*BUGS[name])


def _counting_all(judge: Callable[..., Any]) -> Callable[..., Any]:
    async def copies(self: Pruner, seen: Any, branch: Branch | None) -> Any:
        return await judge(self, seen, None)

    return copies


BUGS: dict[str, tuple[Any, str, Any]] = {
    "steps alone decide": (Branch, "holds", lambda *_: True),
    "retention counts abandoned steps": (Pruner, "copies_of", _counting_all(Pruner.copies_of)),
    "the local tier notes no branch": (branches, "note_local", lambda *_: None),
    "the shared tier notes no branch": (branches, "note_shared", _never),
}


# --- the tests --------------------------------------------------------------------------------------------------------

HISTORIES = int(os.environ.get("TIERCKPT_TEST_HISTORIES", "4"))
HISTORIES_OF_BUGS = 40
SECONDS = 60 + 40 * HISTORIES  # longer than a slow run takes

pytestmark = pytest.mark.timeout(max(SECONDS, 600) + 30)


def play_until_wrong(first: int, count: int, bug: str = "") -> list[History]:
    histories: list[History] = []
    for seed in range(first, first + count):
        histories.append(play(seed, bug))
        print(seed, histories[-1].wrong, histories[-1].told)
        if histories[-1].wrong:
            break
    return histories


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_histories_find_each_seeded_bug(bug: str) -> None:
    assert any(one.wrong for one in play_until_wrong(0, HISTORIES_OF_BUGS, bug)), "it was not found"


@pytest.mark.slow
def test_histories_lose_no_acknowledged_checkpoint() -> None:
    histories = play_until_wrong(0, HISTORIES)
    assert not [one for one in histories if one.wrong], histories[-1].told
    assert len(histories) == HISTORIES
