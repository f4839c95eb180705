"""One rank of four is killed in each phase of a save and of a restore: the others return, and the job restarts.

Invariants: docs/internals/commit.md 4. ``TIERCKPT_TEST_RANK_DEATHS`` sets the repetitions (``make torture``: 10).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fault import rank_scenarios
from tests.fault.rank_scenarios import COORDINATOR_PHASES, RESTORE_PHASES, SAVE_PHASES
from tests.fault.runner import Job, start

RANKS = 4
LAST = RANKS - 1
RETURN_SECONDS_MAX = 60.0
TIMES = int(os.environ.get("TIERCKPT_TEST_RANK_DEATHS", "1"))
PARALLEL_JOBS = 7
"""Jobs that run in parallel: most of their time is waiting."""

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300 * TIMES)]


@dataclass(frozen=True)
class Death:
    way: str
    phase: str
    victim: int
    bug: str = ""

    def __str__(self) -> str:
        return f"{self.way}: rank {self.victim} in {self.phase} {self.bug}".strip()


DEATHS = [
    *(Death("Checkpointer", phase, LAST) for phase in (*SAVE_PHASES, *RESTORE_PHASES)),
    *(Death("Checkpointer", phase, 0) for phase in COORDINATOR_PHASES),
    Death("Checkpointer", "flush", 0),
    Death("dcp.save", "flush", LAST),
    Death("dcp.save", "commit", 0),
]
MORE_DEATHS = [
    *(Death("Checkpointer", phase, 0) for phase in (*SAVE_PHASES, *RESTORE_PHASES)),
    *(Death("dcp.save", phase, victim) for phase in ("local plan", "flush", "written") for victim in (0, LAST)),
    *(Death("dcp.save", phase, 0) for phase in COORDINATOR_PHASES),
]
BUGS = [
    Death("Checkpointer", "flush", LAST, "wait for ever"),
    Death("Checkpointer", "flush", LAST, "commit without the dead"),
]
"""Seeded bugs that must be found."""


def lose_ranks(folder: Path, deaths: list[Death]) -> list[str]:
    """Run each of ``deaths`` in a job of its own and return the problems."""

    def begin(scenario: Callable[..., Any], number: int, **options: Any) -> Job:
        home = folder / str(number)
        environment = {"TIERCKPT_LOCAL_ROOT": str(home / "local")}
        return start(scenario, home, RANKS, env=environment, uri=f"file://{home}/shared", **options)

    jobs = [begin(rank_scenarios.lose_a_rank, number, **asdict(death)) for number, death in enumerate(deaths)]
    problems, restarted = [], []
    for number, (death, job) in enumerate(zip(deaths, jobs, strict=True)):
        job.until(partial(_all_have_begun, job.folder), f"all ranks to begin, {death}", 120)
        codes = job.codes(RETURN_SECONDS_MAX)
        job.kill()
        problems += [f"{death}: {text}" for text in _problems(death, codes, job)]
        restarted.append(begin(rank_scenarios.come_back, number))
    for death, job in zip(deaths, restarted, strict=True):
        codes = job.codes(60)
        job.kill()
        problems += [f"{death}, then: {text}" for text in _problems_after(codes, job)]
    return problems


def _all_have_begun(home: Path) -> bool:
    return len([*home.glob("begun-*")]) == RANKS


def _outcomes(home: Path) -> dict[int, tuple[str, float]]:
    return {int(path.name[5:]): tuple(json.loads(path.read_text())) for path in home.glob("told-*")}


def _problems(death: Death, codes: list[int | None], job: Job) -> Iterator[str]:
    if codes[death.victim] != -9:
        yield f"no rank died there: {codes}"
    outcomes = _outcomes(job.folder)
    for rank in set(range(RANKS)) - {death.victim}:
        if rank not in outcomes:
            yield f"rank {rank} has not returned ({codes[rank]})\n{job.output()[-2000:]}"


def _problems_after(codes: list[int | None], job: Job) -> Iterator[str]:
    if codes != [0] * RANKS:
        yield f"the job does not restart: {codes}\n{job.output()[-3000:]}"
        return
    found, outcomes = [*job.results().values()], _outcomes(job.folder)
    steps = {step for step, _ in found}
    saved = any(outcome.startswith("saved") for outcome, _ in outcomes.values())
    if len(steps) != 1 or not steps <= {1, 2} or not all(whole for _, whole in found):
        yield f"restored {found}"
    elif saved and steps != {2}:
        yield f"restored step 1, although a rank reported step 2 as saved: {outcomes}"


@pytest.mark.slow
def test_other_ranks_return_and_the_job_restarts(tmp_path: Path, record_property: Any) -> None:
    problems = []
    deaths = BUGS + (DEATHS[::3] if TIMES == 1 else (DEATHS + MORE_DEATHS) * TIMES)
    for at in range(0, len(deaths), PARALLEL_JOBS):
        problems += lose_ranks(tmp_path / str(at), deaths[at : at + PARALLEL_JOBS])
    record_property("deaths", len(deaths) - len(BUGS))
    found = [problem for problem in problems if any(bug.bug in problem for bug in BUGS)]
    assert any("wait for ever: rank" in problem and "has not returned" in problem for problem in found), found
    assert any("commit without the dead, then:" in problem for problem in found), found
    assert found == problems, "\n".join(problem for problem in problems if problem not in found)
