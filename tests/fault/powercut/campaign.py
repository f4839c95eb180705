"""Many cuts, and the figures."""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tests.fault.powercut import machine, writelog
from tests.fault.powercut.events import REST, Event
from tests.fault.powercut.judge import Verdict, events_on, judge
from tests.fault.powercut.machine import FILE_SYSTEM_BYTES, Frozen, MachineError
from tests.fault.powercut.writelog import Request

BUG_KILLS = 6
BUG_REPLAYS = 30
"""Cuts within which a seeded bug must be found: so many kills, and so many replays of each."""
_NEW_MOUNTS = 0x00020000

SECONDS = (0.5, 9.0)
"""How long a machine runs before its power goes, from and to."""
EXAMPLES = 5


@dataclass
class Figures:
    """What happened. ``kills`` and ``replays`` count cuts in the middle of something only."""

    file_system: str
    bug: str = ""
    kills: int = 0
    replays: int = 0
    at_rest: int = 0
    unheard: int = 0
    acknowledged: int = 0
    """Over all cuts: places, of a checkpoint and a tier, that had to hold one certain save."""
    wrong: Counter[str] = field(default_factory=Counter)
    by_way: Counter[str] = field(default_factory=Counter)
    between: int = 0
    """Cuts that left stock metadata of one save beside our manifest of another, both whole."""
    blocks_lost: int = 0
    """What the disk's cache had and a replay threw away."""
    first_found: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def cuts(self) -> int:
        return self.kills + self.replays

    def add(self, way: str, verdict: Verdict) -> None:
        self.acknowledged += verdict.acknowledged
        self.between += verdict.is_between
        if verdict.wrong:
            self.wrong[verdict.wrong] += 1
            self.by_way[way] += 1
            self.first_found.setdefault("kill" if way == "kill" else "replay", self.cuts)
            if len(self.examples) < EXAMPLES:
                self.examples.append(f"{way}: {verdict.wrong}: {verdict.text.strip()[-1500:]}")

    def merge(self, other: Figures) -> None:
        for name in ("kills", "replays", "at_rest", "unheard", "acknowledged", "between", "blocks_lost", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wrong += other.wrong
        self.by_way += other.by_way
        self.examples = (self.examples + other.examples)[:EXAMPLES]
        for way, cuts in other.first_found.items():
            self.first_found.setdefault(way, cuts)

    def line(self) -> str:
        wrong = ", ".join(f"{count} {name}" for name, count in sorted(self.wrong.items())) or "nothing wrong"
        return (
            f"{self.file_system}, {self.bug or 'as it is'}: {self.kills} kills + {self.replays} replays in the middle "
            f"of something ({self.at_rest} at rest), {self.acknowledged} acknowledged places, {wrong}, "
            f"{self.between} between stock and our commit, "
            f"{self.blocks_lost} blocks lost in the cache, {self.seconds:.0f} s"
        )

    def to_json(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass
class Campaign:
    """Cuts of one frozen machine. ``folder`` should be on tmpfs: each cut writes some hundred MiB."""

    frozen: Frozen
    folder: Path
    mount: Path
    """The same path as in the guest: places on the local tier are named after it."""
    replays: int
    seed: str

    def run(self, kills: int, *, bug: str = "", until_found: bool = False) -> Figures:
        """Cut until ``kills`` have met the guest in the middle of something, or, ``until_found``, until one is bad."""
        figures = Figures(self.frozen.file_system, bug)
        made = random.Random(f"{self.seed}/{self.frozen.file_system}/{bug}")
        began = time.monotonic()
        for _ in range(2 * kills + 10):
            if figures.kills >= kills or (until_found and figures.wrong):
                break
            for _ in self.one(figures, made, bug):
                if until_found and figures.wrong:
                    break
            figures.seconds = time.monotonic() - began
        return figures

    def one(self, figures: Figures, made: random.Random, bug: str) -> Iterator[None]:
        """One kill and its replays; yields after each that was judged."""
        order = {"seed": made.randrange(1 << 30), "bug": bug}
        left = machine.cut(self.frozen, self.folder / "cut", made.uniform(*SECONDS), order)
        said = events_on(left.disk)
        if not left.heard:
            figures.unheard += 1
            return
        self._check_line(left.heard, said)
        if said[-1].kind == REST:
            figures.at_rest += 1
        else:
            figures.kills += 1
            figures.add("kill", judge(left.disk, self.frozen.file_system, self.mount))
            yield
        requests = writelog.read(left.log)
        for _ in range(self.replays):
            self._replay(left, requests, figures, made)
            yield

    @staticmethod
    def _check_line(heard: list[Event], said: list[Event]) -> None:
        """Two ways for an acknowledgement to come out of the machine, and they agree."""
        if not set(heard) <= set(said):
            raise MachineError(f"heard on the serial line and not on the disk: {set(heard) - set(said)}")

    def _replay(self, left: machine.Cut, requests: list[Request], figures: Figures, made: random.Random) -> None:
        """Build the disk that a volatile cache would have left at a random point of the log, and judge it."""
        point = made.randrange(1, len(requests) + 1)
        way = made.choice(writelog.WAYS)
        disk = self.folder / "replayed"
        machine.copy_disk(self.frozen.disk, disk)
        _, lost = writelog.replay(disk, left.log, requests[:point], way, made, kept_from=FILE_SYSTEM_BYTES)
        if events_on(disk)[-1].kind == REST:
            figures.at_rest += 1
            return
        figures.replays += 1
        figures.blocks_lost += lost
        figures.add(way, judge(disk, self.frozen.file_system, self.mount))


def own_mounts() -> None:
    """Mounts of this process are seen by nobody else, and gone with it however it ends."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def work(
    frozen: Frozen, folder: Path, mount: Path, options: argparse.Namespace, bug: str, kills: int, number: int
) -> Figures:
    replays = max(options.replays, BUG_REPLAYS) if bug else options.replays
    place = folder / f"worker {os.getpid()}"
    campaign = Campaign(frozen, place, mount, replays, f"{options.seed}/{number}")
    return campaign.run(kills, bug=bug, until_found=bool(bug))
