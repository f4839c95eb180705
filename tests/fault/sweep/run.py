"""Runs the sweeps: ``python -m tests.fault.sweep.run WHAT FOLDER [SHARE OF]`` writes FOLDER/outcome.json.

kills    a kill before each call of every phase on files of the test
errnos   an injected error for each of these calls; short writes
pairs    two errors in one run
bugs     each seeded bug with its harness

SHARE OF: this process takes every OF-th point from SHARE on. TIERCKPT_TEST_SWEEP=full takes every call of
every phase with every error: a night. Otherwise a fixed sample is taken, with each phase and each kind of call in it;
``long`` is the sample of ``make torture``.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.fault.sweep import bugs
from tests.fault.sweep.bench import Bench
from tests.fault.sweep.calls import Call, injections_for
from tests.fault.sweep.child import Ended
from tests.fault.sweep.phases import BY_NAME, PHASES, Phase

LENGTH = os.environ.get("TIERCKPT_TEST_SWEEP", "part")
KILLS, ERRNOS, HALVES, PAIRS = {
    "quick": (20, 60, 4, 0),
    "part": (50, 120, 20, 0),
    "long": (500, 1200, 200, 250),
    "full": (0, 0, 0, 2500),
}[LENGTH]
"""Points over all phases. A full sweep takes every point, and draws its pairs."""
TRIES = 3
"""Runs to wait for a call that happens only with some timings."""
KILL_AGAIN_EVERY = 3
"""After every third kill, the next process is killed too."""
FILES = (".tmp", ".distcp", ".json", ".metadata")
_RANDOM = re.compile(r"[0-9a-f]{8,}")
T = TypeVar("T")


def is_full() -> bool:
    return LENGTH == "full"


@dataclass
class Outcome:
    """Counts of planned and injected faults, and the violations."""

    planned: int = 0
    fired: int = 0
    by_phase: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def note(self, phase: Phase, kind: str, fired: bool, end: str, wrong: Iterable[str]) -> None:
        self.planned += 1
        self.fired += fired
        self.by_phase[phase.name] += fired
        self.by_kind[kind] += fired
        self.ends[end] += 1
        self.missed += [] if fired else [f"{phase.name}, {kind}"]
        self.violations += [f"{phase.name}, {kind}: {text}" for text in wrong if text]


def sample_evenly(items: Sequence[T], count: int) -> list[T]:
    """Return ``count`` evenly spaced ``items``; all of them in a full sweep."""
    if is_full() or len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def distinct_sites(points: Sequence[tuple[Phase, Call]]) -> list[tuple[Phase, Call]]:
    """Return one point for each call name and file; all points in a full sweep."""
    if is_full():
        return list(points)
    by_site = {(call.name, call.creates, _RANDOM.sub("*", call.paths[-1])): (phase, call) for phase, call in points}
    return list(by_site.values())


class Sweep:
    """One process's share of a sweep."""

    def __init__(self, folder: Path, share: int, of: int) -> None:
        self.bench = Bench(folder)
        self.share, self.of = share, of
        self.outcome = Outcome()

    def own_share(self, points: Iterable[T]) -> Iterator[T]:
        return itertools.islice(points, self.share, None, self.of)

    def calls(self) -> dict[str, list[Call]]:
        """Return the calls of each phase, after a check that it works without a fault."""
        return {phase.name: self._stable_calls(phase) for phase in PHASES}

    def _stable_calls(self, phase: Phase) -> list[Call]:
        """Return the calls of ``phase`` that happen in every run: waits for locks vary in number."""
        calls = self.bench.record_checked(phase)
        if not any(call.name == "flock" and call.failed for call in calls):
            return calls
        last = {call.name: call.number for call in calls}
        for _ in range(TRIES - 1):
            for name, number in {call.name: call.number for call in self.bench.record_checked(phase)}.items():
                last[name] = min(last.get(name, number), number)
        return [call for call in calls if call.number <= last[call.name]]

    def kills(self) -> None:
        points = [(phase, call) for phase, call in _points(self.calls()) if call.changes or is_full()]
        for number, (phase, call) in enumerate(self.own_share(sample_evenly(points, KILLS))):
            for _ in range(TRIES):
                ended = self.bench.kill(phase, call)
                if ended.code == -9 and number % KILL_AGAIN_EVERY == 0:
                    again = self.bench.kill_again(phase, call)
                    self.outcome.ends["killed again"] += again.code == -9
                wrong = self.bench.judge(phase)
                if ended.code == -9 or wrong:
                    break
            self.outcome.note(phase, f"{call.name} {call.number}", ended.code == -9, str(ended.code), [wrong])

    def errnos(self) -> None:
        recorded = self.calls()
        points = []
        for number, (phase, call) in enumerate(distinct_sites(_points(recorded))):
            kinds = injections_for(call)
            wanted = kinds if is_full() else kinds[number % len(kinds) :][:1]
            points += [(phase, call, kind) for kind in wanted]
        chosen = sample_mostly_changing(points, ERRNOS)
        there = {phase.name for phase, _, _ in chosen}
        rest = {phase.name: (phase, call) for phase, call in _points(recorded) if call.changes}
        chosen += [(phase, call, injections_for(call)[0]) for name, (phase, call) in rest.items() if name not in there]
        for phase, call, kind in self.own_share(chosen):
            self.inject(phase, [f"{call.name}:{kind}:when={call.number}"], f"{call.name} {call.number} {kind}")
        short_writes = [
            (BY_NAME[name], number + 1)
            for name, calls in recorded.items()
            for number in range(sum(call.name in ("write", "pwrite64") for call in calls))
        ]
        for phase, number in self.own_share(sample_evenly(short_writes, HALVES)):
            ended = self.bench.short_write(phase, number)
            wrong = "" if ended.code == 0 else f"a short write was not continued: {ended.text}"
            self.outcome.note(phase, f"half of write {number}", True, str(ended.code), [wrong, self.bench.judge(phase)])

    def pairs(self) -> None:
        rng = random.Random("pairs")
        recorded = self.calls()
        points = []
        while len(points) < PAIRS:
            name = rng.choice(sorted(recorded))
            first, second = sorted(rng.sample(range(len(recorded[name])), 2))
            pair = [(recorded[name][at], rng.choice(injections_for(recorded[name][at]))) for at in (first, second)]
            if pair[0][0].name != pair[1][0].name:  # strace takes one injection for each call name
                points.append((BY_NAME[name], pair))
        for phase, pair in self.own_share(points):
            injections = [f"{call.name}:{kind}:when={call.number}" for call, kind in pair]
            self.inject(phase, injections, " and ".join(injections))

    def inject(self, phase: Phase, injections: Sequence[str], kind: str) -> None:
        for _ in range(TRIES):
            ended, calls, strayed = self.bench.inject(phase, injections)
            fired = any(call.is_injected for call in calls)
            # After a first error the numbers of calls change, and the second may hit an import: its error is Python's.
            wrong = ["" if strayed else _exit_problem(ended), fsync_violation(calls), self.bench.judge(phase)]
            if fired or any(wrong):
                break
        self.outcome.note(phase, kind, fired, ended.error or str(ended.code), wrong)

    def bugs(self) -> dict[str, bool]:
        """Return, for each seeded bug, whether its sweep finds it. Stops at the first violation."""
        for name in {bug.phase for bug in bugs.BUGS.values()}:
            self.bench.record_checked(BY_NAME[name])
        found = {}
        for name in self.own_share(bugs.BUGS):
            self.bench.bug, phase = name, BY_NAME[bugs.BUGS[name].phase]
            calls = self.bench.record(phase)
            find = self._kills_find if bugs.BUGS[name].harness == bugs.KILLS else self._errnos_find
            found[name] = find(phase, calls)
        self.bench.bug = ""
        return found

    def _kills_find(self, phase: Phase, calls: Sequence[Call]) -> bool:
        for call in calls:
            if call.changes:
                self.bench.kill(phase, call)
                if self.bench.judge(phase):
                    return True
        return False

    def _errnos_find(self, phase: Phase, calls: Sequence[Call]) -> bool:
        writes = sum(call.name in ("write", "pwrite64") for call in calls)
        for number in range(1, writes + 1):
            if self.bench.short_write(phase, number).code != 0 or self.bench.judge(phase):
                return True
        for call in calls:
            if call.name in ("fsync", "write", "pwrite64"):
                ended, seen, _ = self.bench.inject(phase, [f"{call.name}:error=EIO:when={call.number}"])
                if _exit_problem(ended) or fsync_violation(seen) or self.bench.judge(phase):
                    return True
        return False


def _points(recorded: dict[str, list[Call]]) -> list[tuple[Phase, Call]]:
    return [(BY_NAME[name], call) for name, calls in recorded.items() for call in calls]


def sample_mostly_changing(points: list[Any], count: int) -> list[Any]:
    """Return ``count`` points, four in five of them calls that change the disk."""
    changing = [point for point in points if point[1].changes]
    others = [point for point in points if not point[1].changes]
    return sample_evenly(changing, count * 4 // 5) + sample_evenly(others, count // 5)


def _exit_problem(ended: Ended) -> str:
    """Return "" if the child succeeded or raised a TierckptError, else the problem."""
    if ended.code == 0 or (ended.code == 1 and ended.is_typed):
        return ""
    return f"ended with {ended.code} {ended.error}: {ended.text[-1500:]}"


def fsync_violation(calls: Sequence[Call]) -> str:
    """Return the violation if a file is fsynced again or renamed after its fsync failed, else ""."""
    failed: set[str] = set()
    for call in calls:
        if call.name == "fsync" and call.path in failed:
            return f"{call.path} was fsynced again after it had failed"
        if call.name in ("rename", "link") and call.path in failed:
            return f"{call.path} became {call.paths[-1]} after its fsync had failed"
        # EINTR says nothing about the pages; Python retries by itself (PEP 475).
        is_answer = call.is_injected and call.failed and "EINTR" not in call.result
        if call.name == "fsync" and is_answer and call.path.endswith(FILES):
            failed.add(call.path)
    return ""


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    share, of = (int(word) for word in sys.argv[3:5]) if len(sys.argv) > 3 else (0, 1)
    folder.mkdir(parents=True, exist_ok=True)
    gc.freeze()
    begun = time.monotonic()
    sweep = Sweep(folder, share, of)
    found = getattr(sweep, what)()
    sweep.outcome.seconds = time.monotonic() - begun
    (folder / "outcome.json").write_text(json.dumps({**vars(sweep.outcome), "found": found}))


if __name__ == "__main__":
    main()
