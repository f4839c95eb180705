"""Prepares phases, injects a fault, and judges the result."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fault.sweep import bugs, calls, checker, child
from tests.fault.sweep.calls import Call
from tests.fault.sweep.child import Ended
from tests.fault.sweep.phases import Phase, World, disable_links


@dataclass
class Bench:
    """Runs phases with faults, each from a copy of the same initial state."""

    folder: Path
    bug: str = ""
    golden: dict[str, list[str]] = field(default_factory=dict)

    @property
    def world(self) -> World:
        return World(self.folder / "world")

    def act(self, phase: Phase, *, again: bool = False) -> Callable[[], None]:
        def act() -> None:
            if not phase.links:
                disable_links()
            (phase.again if again else phase.act)(self.world)

        return self._with_bug(act)

    def _with_bug(self, act: Callable[[], None]) -> Callable[[], None]:
        def seeded() -> None:
            bugs.seed(self.bug)
            act()

        return seeded

    def set_up(self, phase: Phase) -> None:
        """Create the world of ``phase`` as it is before the fault."""
        template = self.folder / f"prepared {phase.name} {self.bug}".strip()
        if not template.exists():
            shutil.rmtree(self.world.root, ignore_errors=True)
            prepared = child.run(self._with_bug(lambda: phase.prepare(self.world)), f"prepare {phase.name}")
            if prepared.code != 0:
                raise RuntimeError(f"cannot prepare {phase.name}: {prepared.text}")
            copy_tree(self.world.root, template)
        shutil.rmtree(self.world.root, ignore_errors=True)
        copy_tree(template, self.world.root)
        self.world.acknowledgements.unlink(missing_ok=True)

    def record(self, phase: Phase) -> list[Call]:
        """Return the calls of ``phase`` on files of the test, without a fault."""
        self.set_up(phase)
        log = self.folder / "trace"
        ended = child.trace(self.act(phase), "act", log)
        if ended.code != 0:
            raise RuntimeError(f"{phase.name} fails without a fault: {ended.text}")
        return calls.read(log, self.world.root)

    def kill(self, phase: Phase, call: Call) -> Ended:
        """Kill ``phase`` before ``call``."""
        self.set_up(phase)
        return self._kill(self.act(phase), call.name, call.number)

    def kill_again(self, phase: Phase, call: Call) -> Ended:
        """Kill the next process too, before one of its first calls of that name, if it makes one."""
        return self._kill(self.act(phase, again=True), call.name, 1 + call.number % 5)

    def _kill(self, act: Callable[[], None], name: str, number: int) -> Ended:
        return child.trace(act, "act", self.folder / "trace", [f"{name}:signal=KILL:when={number}"], name)

    def inject(self, phase: Phase, injections: Sequence[str]) -> tuple[Ended, list[Call], bool]:
        """Run ``phase`` with injected results of system calls. True: one of them hit a file that is not the test's."""
        self.set_up(phase)
        log = self.folder / "trace"
        ended = child.trace(self.act(phase), "act", log, injections)
        return ended, calls.read(log, self.world.root), calls.strayed(log, self.world.root)

    def short_write(self, phase: Phase, number: int) -> Ended:
        """Run ``phase`` with a short ``number``-th write. The answer is True if there was such a write."""
        self.set_up(phase)
        act = self.act(phase)

        def act_with_short_write() -> bool:
            was_short = shorten_write(number, str(self.world.root))
            act()
            return was_short()

        return child.run(act_with_short_write, "act")

    def judge(self, phase: Phase) -> str:
        """Return the first problem that a fresh process finds, or ""."""

        def check() -> list[str]:
            if not phase.links:
                disable_links()
            checker.check_after(self.world, phase)
            return checker.check_restart(self.world, phase, self.golden.get(phase.name))

        ended = child.run(check, "again")
        if ended.code != 0:
            return f"{ended.error or ended.code}: {ended.text}"
        self.golden.setdefault(phase.name, ended.answer)
        return ""

    def record_checked(self, phase: Phase) -> list[Call]:
        """Return the calls of ``phase`` after a check that it works without a fault and leaks no files."""
        bug, self.bug = self.bug, ""
        found, problem = self.record(phase), self.judge(phase)
        self.bug = bug
        if problem:
            raise RuntimeError(f"{phase.name} leaves a problem without a fault: {problem}")
        return found


def shorten_write(number: int, root: str) -> Callable[[], bool]:
    """Make the ``number``-th write below ``root`` write half of its data."""
    count = 0

    def shortening(real: Callable[..., int]) -> Callable[..., int]:
        def write(fd: int, data: Any, *offset: int) -> int:
            nonlocal count
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{root}/"):  # noqa: PTH115
                count += 1
                if count == number and len(data) > 1:
                    return real(fd, memoryview(data).cast("B")[: len(data) // 2], *offset)
            return real(fd, data, *offset)

        return write

    os.write, os.pwrite = shortening(os.write), shortening(os.pwrite)  # type: ignore[assignment]
    return lambda: count >= number


def copy_tree(source: Path, target: Path) -> None:
    """Copy with hard links: the local and the shared tier share files."""
    copied: dict[int, str] = {}
    for folder, _, names in os.walk(source):
        to = os.path.join(target, os.path.relpath(folder, source))  # noqa: PTH118
        os.makedirs(to, exist_ok=True)  # noqa: PTH103
        for name in names:
            path, new = f"{folder}/{name}", f"{to}/{name}"
            status = os.lstat(path)
            if status.st_ino in copied:
                os.link(copied[status.st_ino], new)
            else:
                shutil.copyfile(path, new)
                copied[status.st_ino] = new
