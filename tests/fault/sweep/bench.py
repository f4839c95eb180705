"""A place where one phase after the other is prepared, disturbed, and judged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fault.sweep import bugs, calls, checker, child, order
from tests.fault.sweep.calls import Call
from tests.fault.sweep.child import Ended
from tests.fault.sweep.phases import Phase, World, cannot_link


@dataclass
class Bench:
    """Keeps what each phase begins with as a copy, so that each fault meets the same."""

    folder: Path
    bug: str = ""
    golden: dict[str, list[str]] = field(default_factory=dict)

    @property
    def world(self) -> World:
        return World(self.folder / "world")

    def act(self, phase: Phase) -> Callable[[], None]:
        def act() -> None:
            if not phase.links:
                cannot_link()
            phase.act(self.world)

        return self._as_seeded(act)

    def _as_seeded(self, act: Callable[[], None]) -> Callable[[], None]:
        def seeded() -> None:
            bugs.seed(self.bug)
            act()

        return seeded

    def set_up(self, phase: Phase) -> None:
        """Make the world of ``phase`` as it is before the fault."""
        template = self.folder / f"prepared {phase.name} {self.bug}".strip()
        if not template.exists():
            shutil.rmtree(self.world.root, ignore_errors=True)
            prepared = child.run(self._as_seeded(lambda: phase.prepare(self.world)), f"prepare {phase.name}")
            if prepared.code != 0:
                raise RuntimeError(f"{phase.name} cannot be prepared: {prepared.text}")
            copy_tree(self.world.root, template)
        shutil.rmtree(self.world.root, ignore_errors=True)
        copy_tree(template, self.world.root)
        self.world.acknowledgements.unlink(missing_ok=True)

    def record(self, phase: Phase) -> tuple[list[Call], list[str]]:
        """The calls of ``phase`` on our files when nothing goes wrong, and what is wrong with their order."""
        self.set_up(phase)
        standing = [str(path) for path in self.world.root.rglob("*") if path.is_file()]
        log = self.folder / "trace"
        ended = child.trace(self.act(phase), "act", log)
        if ended.code != 0:
            raise RuntimeError(f"{phase.name} does not work undisturbed: {ended.text}")
        acknowledged = self.world.acknowledgements
        seen = calls.read(log, self.world.root, acknowledged)
        ours = [call for call in seen if call.path != str(acknowledged)]
        return ours, order.problems(seen, standing, str(acknowledged))

    def kill(self, phase: Phase, call: Call) -> Ended:
        """Kill ``phase`` before ``call``."""
        self.set_up(phase)
        injection = f"{call.name}:signal=KILL:when={call.number}"
        return child.trace(self.act(phase), "act", self.folder / "trace", [injection], call.name)

    def answer(self, phase: Phase, injections: Sequence[str]) -> tuple[Ended, list[Call]]:
        """Run ``phase`` while the kernel answers as told."""
        self.set_up(phase)
        log = self.folder / "trace"
        ended = child.trace(self.act(phase), "act", log, injections)
        return ended, calls.read(log, self.world.root)

    def halve(self, phase: Phase, number: int) -> Ended:
        """Run ``phase`` with the ``number``-th write done by half. The answer says whether there was one."""
        self.set_up(phase)
        act = self.act(phase)

        def act_by_half() -> bool:
            halves = half_write(number, str(self.world.root))
            act()
            return halves()

        return child.run(act_by_half, "act")

    def judge(self, phase: Phase) -> str:
        """What is wrong with the world, in a fresh process; nothing when all is well."""

        def look() -> list[str]:
            if not phase.links:
                cannot_link()
            checker.check_after(self.world, phase)
            return checker.check_restart(self.world, phase, self.golden.get(phase.name))

        ended = child.run(look, "again")
        if ended.code != 0:
            return f"{ended.error or ended.code}: {ended.text}"
        self.golden.setdefault(phase.name, ended.answer)
        return ""

    def learn(self, phase: Phase) -> list[Call]:
        """The calls of ``phase``. Sees to it that it works without a fault, in the right order, and leaves nothing."""
        bug, self.bug = self.bug, ""
        found, wrong = self.record(phase)
        problem = self.judge(phase) or "; ".join(wrong)
        self.bug = bug
        if problem:
            raise RuntimeError(f"{phase.name} goes wrong undisturbed: {problem}")
        return found


def half_write(number: int, root: str) -> Callable[[], bool]:
    """Let the ``number``-th write below ``root`` write half of what it is asked to."""
    count = 0

    def halving(real: Callable[..., int]) -> Callable[..., int]:
        def write(fd: int, data: Any, *offset: int) -> int:
            nonlocal count
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{root}/"):  # noqa: PTH115
                count += 1
                if count == number and len(data) > 1:
                    return real(fd, memoryview(data).cast("B")[: len(data) // 2], *offset)
            return real(fd, data, *offset)

        return write

    os.write, os.pwrite = halving(os.write), halving(os.pwrite)  # type: ignore[assignment]
    return lambda: count >= number


def copy_tree(source: Path, target: Path) -> None:
    """Copy with hard links kept: the local and the shared tier share files."""
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
