"""Many cuts and their figures."""

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
"""Limits within which a seeded bug must be found: kills, and replays of each."""
_CLONE_NEWNS = 0x00020000

SECONDS = (0.5, 9.0)
"""Shortest and longest run of a machine before the cut."""
EXAMPLES = 5


@dataclass
class Figures:
    """Counts of one campaign. ``kills`` and ``replays`` include only cuts that interrupted an action."""

    file_system: str
    bug: str = ""
    kills: int = 0
    replays: int = 0
    at_rest: int = 0
    without_events: int = 0
    acknowledged: int = 0
    """Places (checkpoint and tier) that had to hold one known save, over all cuts."""
    wrong: Counter[str] = field(default_factory=Counter)
    by_way: Counter[str] = field(default_factory=Counter)
    between: int = 0
    """Cuts that left stock metadata of one save and tierckpt's manifest of another, both whole."""
    blocks_lost: int = 0
    """Blocks of the disk's cache that replays dropped."""
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
        for one in fields(self):
            if one.type in ("int", "float", "Counter[str]"):
                setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))
        self.examples = (self.examples + other.examples)[:EXAMPLES]
        for way, cuts in other.first_found.items():
            self.first_found.setdefault(way, cuts)

    def line(self) -> str:
        wrong = ", ".join(f"{count} {name}" for name, count in sorted(self.wrong.items())) or "no violation"
        return (
            f"{self.file_system}, {self.bug or 'no seeded bug'}: {self.kills} kills + {self.replays} replays "
            f"during an action ({self.at_rest} at rest), {self.acknowledged} acknowledged places, {wrong}, "
            f"{self.between} between stock metadata and manifest, "
            f"{self.blocks_lost} cached blocks lost, {self.seconds:.0f} s"
        )

    def to_json(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass
class Campaign:
    """Cuts of one frozen machine. ``folder`` should be on tmpfs: each cut writes hundreds of MiB."""

    frozen: Frozen
    folder: Path
    mount: Path
    """The same path as in the guest: names on the local tier contain it."""
    replays: int
    seed: str

    def run(self, kills: int, *, bug: str = "", until_found: bool = False) -> Figures:
        """Cut until ``kills`` have interrupted an action or, with ``until_found``, until a violation."""
        figures = Figures(self.frozen.file_system, bug)
        rng = random.Random(f"{self.seed}/{self.frozen.file_system}/{bug}")
        began = time.monotonic()
        for _ in range(2 * kills + 10):
            if figures.kills >= kills or (until_found and figures.wrong):
                break
            for _ in self.cut_once(figures, rng, bug):
                if until_found and figures.wrong:
                    break
            figures.seconds = time.monotonic() - began
        return figures

    def cut_once(self, figures: Figures, rng: random.Random, bug: str) -> Iterator[None]:
        """One kill and its replays; yields after each verdict."""
        instructions = {"seed": rng.randrange(1 << 30), "bug": bug}
        left = machine.cut(self.frozen, self.folder / "cut", rng.uniform(*SECONDS), instructions)
        recorded = events_on(left.disk)
        if not left.received:
            figures.without_events += 1
            return
        self._check_line(left.received, recorded)
        if recorded[-1].kind == REST:
            figures.at_rest += 1
        else:
            figures.kills += 1
            figures.add("kill", judge(left.disk, self.frozen.file_system, self.mount))
            yield
        requests = writelog.read(left.log)
        for _ in range(self.replays):
            self._replay(left, requests, figures, rng)
            yield

    @staticmethod
    def _check_line(received: list[Event], recorded: list[Event]) -> None:
        """Check that every event of the serial line is on the disk too."""
        if not set(received) <= set(recorded):
            raise MachineError(f"on the serial line but not on the disk: {set(received) - set(recorded)}")

    def _replay(self, left: machine.Cut, requests: list[Request], figures: Figures, rng: random.Random) -> None:
        """Judge the disk that a volatile cache would leave at a random point of the log."""
        point = rng.randrange(1, len(requests) + 1)
        way = rng.choice(writelog.SURVIVAL_MODES)
        disk = self.folder / "replayed"
        machine.copy_disk(self.frozen.disk, disk)
        _, lost = writelog.replay(disk, left.log, requests[:point], way, rng, durable_from=FILE_SYSTEM_BYTES)
        if events_on(disk)[-1].kind == REST:
            figures.at_rest += 1
            return
        figures.replays += 1
        figures.blocks_lost += lost
        figures.add(way, judge(disk, self.frozen.file_system, self.mount))


def unshare_mounts() -> None:
    """Give this process private mounts, which end with it."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def work(
    frozen: Frozen, folder: Path, mount: Path, options: argparse.Namespace, bug: str, kills: int, number: int
) -> Figures:
    replays = max(options.replays, BUG_REPLAYS) if bug else options.replays
    place = folder / f"worker {os.getpid()}"
    campaign = Campaign(frozen, place, mount, replays, f"{options.seed}/{number}")
    return campaign.run(kills, bug=bug, until_found=bool(bug))
