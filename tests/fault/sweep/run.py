"""Runs the sweeps: ``python -m tests.fault.sweep.run WHAT FOLDER [SHARE OF]`` writes FOLDER/outcome.json.

kills    before each call on our files, of every phase
errnos   each call on our files answered with an error; writes done by half
pairs    two errors in one run
bugs     each seeded bug, and which of the harnesses finds it

SHARE OF: this process takes every OF-th point, from the SHARE-th on. The environment says how much of it there is:
TIERCKPT_TEST_SWEEP=full takes every call of every phase with every answer; otherwise a part of them is taken, the
same each time, with each phase and each kind of call in it.
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
from tests.fault.sweep.calls import Call, answers
from tests.fault.sweep.child import Ended
from tests.fault.sweep.phases import BY_NAME, PHASES, Phase

LENGTH = os.environ.get("TIERCKPT_TEST_SWEEP", "part")
KILLS, ERRNOS, HALVES = (40, 60, 4) if LENGTH == "quick" else (50, 120, 20)
TRIES = 3
"""A call that comes with some timings only is waited for in so many runs."""
TWICE = 3
"""After every third kill the next process is killed, too."""
PAIRS = int(os.environ.get("TIERCKPT_TEST_SWEEP_PAIRS", "2500"))
"""Of a sweep that is not full (PAIRS: of a full one). All phases together."""

FILES = (".tmp", ".distcp", ".json", ".metadata")
_RANDOM = re.compile(r"[0-9a-f]{8,}")
T = TypeVar("T")


def is_full() -> bool:
    return LENGTH == "full"


@dataclass
class Outcome:
    """What was planned, what really happened, and what must never be."""

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


def thinned(items: Sequence[T], count: int) -> list[T]:
    """``count`` of ``items``, evenly; all of them in a full sweep."""
    if is_full() or len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def distinct(points: Sequence[tuple[Phase, Call]]) -> list[tuple[Phase, Call]]:
    """One call of each name on each file, in one phase or another. A full sweep takes every one."""
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

    def mine(self, points: Iterable[T]) -> Iterator[T]:
        return itertools.islice(points, self.share, None, self.of)

    def calls(self) -> dict[str, list[Call]]:
        """The calls of each phase; it works undisturbed, or nothing below means anything."""
        return {phase.name: self._learned(phase) for phase in PHASES}

    def _learned(self, phase: Phase) -> list[Call]:
        """Its calls; where it waited for a lock, those that a run comes to which waits less."""
        calls = self.bench.learn(phase)
        if not any(call.name == "flock" and call.failed for call in calls):
            return calls
        last = {call.name: call.number for call in calls}
        for _ in range(TRIES - 1):
            for name, number in {call.name: call.number for call in self.bench.learn(phase)}.items():
                last[name] = min(last.get(name, number), number)
        return [call for call in calls if call.number <= last[call.name]]

    def kills(self) -> None:
        points = [(phase, call) for phase, call in _points(self.calls()) if call.changes or is_full()]
        for number, (phase, call) in enumerate(self.mine(thinned(points, KILLS))):
            for _ in range(TRIES):
                ended = self.bench.kill(phase, call)
                if ended.code == -9 and number % TWICE == 0:
                    again = self.bench.kill_again(phase, call)
                    self.outcome.ends["killed again"] += again.code == -9
                wrong = self.bench.judge(phase)
                if ended.code == -9 or wrong:
                    break
            self.outcome.note(phase, f"{call.name} {call.number}", ended.code == -9, str(ended.code), [wrong])

    def errnos(self) -> None:
        recorded = self.calls()
        points = []
        for number, (phase, call) in enumerate(distinct(_points(recorded))):
            kinds = answers(call)
            wanted = kinds if is_full() else kinds[number % len(kinds) :][:1]
            points += [(phase, call, kind) for kind in wanted]
        chosen = _mostly_changing(points, ERRNOS)
        there = {phase.name for phase, _, _ in chosen}
        rest = {phase.name: (phase, call) for phase, call in _points(recorded) if call.changes}
        chosen += [(phase, call, answers(call)[0]) for name, (phase, call) in rest.items() if name not in there]
        for phase, call, kind in self.mine(chosen):
            self.answer(phase, [f"{call.name}:{kind}:when={call.number}"], f"{call.name} {call.number} {kind}")
        halves = [
            (BY_NAME[name], number + 1)
            for name, calls in recorded.items()
            for number in range(sum(call.name in ("write", "pwrite64") for call in calls))
        ]
        for phase, number in self.mine(thinned(halves, HALVES)):
            ended = self.bench.halve(phase, number)
            wrong = "" if ended.code == 0 else f"a short write was not gone on with: {ended.text}"
            self.outcome.note(phase, f"half of write {number}", True, str(ended.code), [wrong, self.bench.judge(phase)])

    def pairs(self) -> None:
        chance = random.Random("pairs")
        recorded = self.calls()
        points = []
        for _ in range(PAIRS):
            name = chance.choice(sorted(recorded))
            first, second = sorted(chance.sample(range(len(recorded[name])), 2))
            pair = [(recorded[name][at], chance.choice(answers(recorded[name][at]))) for at in (first, second)]
            if pair[0][0].name != pair[1][0].name:  # strace injects one thing into calls of one name
                points.append((BY_NAME[name], pair))
        for phase, pair in self.mine(points):
            injections = [f"{call.name}:{kind}:when={call.number}" for call, kind in pair]
            self.answer(phase, injections, " and ".join(injections))

    def answer(self, phase: Phase, injections: Sequence[str], kind: str) -> None:
        for _ in range(TRIES):
            ended, calls = self.bench.answer(phase, injections)
            fired = any(call.is_injected for call in calls)
            wrong = [_end(ended), fsyncs(calls), self.bench.judge(phase)]
            if fired or any(wrong):
                break
        self.outcome.note(phase, kind, fired, ended.error or str(ended.code), wrong)

    def bugs(self) -> dict[str, bool]:
        """Return whether its sweep finds each seeded bug: the same sweep, until one violation."""
        for name in {bug.phase for bug in bugs.BUGS.values()}:
            self.bench.learn(BY_NAME[name])
        found = {}
        for name in self.mine(bugs.BUGS):
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
            if self.bench.halve(phase, number).code != 0 or self.bench.judge(phase):
                return True
        for call in calls:
            if call.name in ("fsync", "write", "pwrite64"):
                ended, seen = self.bench.answer(phase, [f"{call.name}:error=EIO:when={call.number}"])
                if _end(ended) or fsyncs(seen) or self.bench.judge(phase):
                    return True
        return False


def _points(recorded: dict[str, list[Call]]) -> list[tuple[Phase, Call]]:
    return [(BY_NAME[name], call) for name, calls in recorded.items() for call in calls]


def _mostly_changing(points: list[Any], count: int) -> list[Any]:
    """``count`` of them: four in five change something."""
    changing = [point for point in points if point[1].changes]
    others = [point for point in points if not point[1].changes]
    return thinned(changing, count * 4 // 5) + thinned(others, count // 5)


def _end(ended: Ended) -> str:
    """An error is one of ours; anything else ends well, and all of it ends."""
    if ended.code == 0 or (ended.code == 1 and ended.is_typed):
        return ""
    return f"ended with {ended.code} {ended.error}: {ended.text[-1500:]}"


def fsyncs(calls: Sequence[Call]) -> str:
    """After a failed fsync of a file: no other fsync of it, and it gets no other name."""
    failed: set[str] = set()
    for call in calls:
        if call.name == "fsync" and call.path in failed:
            return f"{call.path} was fsynced again after it had failed"
        if call.name in ("rename", "link") and call.path in failed:
            return f"{call.path} became {call.paths[-1]} after its fsync had failed"
        # EINTR is no answer about the pages: Python asks again by itself (PEP 475).
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
