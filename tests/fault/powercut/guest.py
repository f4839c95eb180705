"""The only process of the guest: ``python -m tests.fault.powercut.guest FILE_SYSTEM MOUNT``.

It mounts the tested disk, saves a first checkpoint, reports that it is ready, and waits for a line with a seed and a
bug; there it is frozen. After the thaw it saves, drains and prunes in a loop and records events.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import subprocess
import sys
import traceback
import tty
from pathlib import Path
from typing import Any

from tests.fault.powercut import bugs
from tests.fault.powercut.events import BEGIN, BLOCK_BYTES, DONE, EVENT_BLOCKS, LOCAL, REMOVABLE, REST, SHARED, Event
from tests.fault.sweep import checker, phases
from tests.fault.sweep.phases import Job, World
from tests.fault.sweep.saver import link_fails
from tierckpt.checkpoint.journal import READY
from tierckpt.checkpoint.retention import Policy, Rule
from tierckpt.stores.local import LocalStore

DISK = "/dev/vda"
SERIAL_LINE = "/dev/ttyS1"
COMMIT_SECONDS = 120.0
"""Commit timeout, long enough for an emulated processor."""
_link = LocalStore.link


class GuestWorld(World):
    @property
    def acknowledgements(self) -> Path:
        return Path("/tmp/acknowledged")


class EventRecorder:
    """Records events in blocks after the file system, uncached, and then on the serial line."""

    def __init__(self) -> None:
        self.line = os.open(SERIAL_LINE, os.O_RDWR | os.O_NOCTTY)
        tty.setraw(self.line)
        self._disk = os.open(DISK, os.O_RDWR | os.O_DIRECT)
        self._first = os.lseek(self._disk, 0, os.SEEK_END) - EVENT_BLOCKS * BLOCK_BYTES
        self._block = mmap.mmap(-1, BLOCK_BYTES)
        self._count = 0

    def record(self, kind: str, name: str = "", tier: str = "", label: str = "") -> None:
        text = Event(self._count, kind, name, tier, label).encode()
        self._block[:] = text.ljust(BLOCK_BYTES, b"\0")
        if os.pwrite(self._disk, self._block, self._first + self._count % EVENT_BLOCKS * BLOCK_BYTES) != BLOCK_BYTES:
            raise OSError("short write of a mark")
        self._count += 1
        self.send(text.decode())

    def send(self, text: str) -> None:
        data = f"{text}\n".encode()
        while data:
            data = data[os.write(self.line, data) :]

    def receive(self) -> Any:
        data = b""
        while not data.endswith(b"\n"):
            data += os.read(self.line, 1)
        return json.loads(data)


class Trainer(Job):
    """Saves under given names and records acknowledgements with ``recorder``."""

    def __init__(self, world: World, recorder: EventRecorder) -> None:
        super().__init__(world)
        self.recorder = recorder
        self.labels: dict[str, str] = {}
        self.unsent: set[str] = set()
        self.is_evictable: set[tuple[str, str]] = set()

    def acknowledge(self, place: str, tier: str) -> None:
        if tier == LOCAL:
            self.recorder.record(DONE, place, LOCAL, self.labels[place])

    def save_as(self, step: int, label: str, **options: Any) -> None:
        name = f"step-{step}"
        self.recorder.record(BEGIN, name, label=label)
        self.labels[name] = label
        self.unsent.add(name)
        self.save(step, label, **options)
        if options.get("send", True):
            self.acknowledge_sent()

    def acknowledge_sent(self) -> None:
        """Record all unsent saves as shared. Requires that the drain ended without an error; checks the journal."""
        left = [entry for entry in self.mover.journal.entries() if entry.state == READY]
        if left:
            raise RuntimeError(f"not drained: {left}")
        for name in sorted(self.unsent):
            self.recorder.record(DONE, name, SHARED, self.labels[name])
        self.unsent.clear()

    def prune(self, local: int, shared: int) -> None:
        steps = sorted(self.labels, key=lambda name: int(name.rpartition("-")[2]))
        for tier, count in ((LOCAL, local), (SHARED, shared)):
            for name in steps[:-count]:
                if (name, tier) not in self.is_evictable:
                    self.is_evictable.add((name, tier))
                    self.recorder.record(REMOVABLE, name, tier)
        self.wait(self.mover.pruner.prune(self.world.run, Policy(Rule(local), Rule(shared))))


def save_until_killed(trainer: Trainer, seed: int) -> None:
    """Save until the machine is killed."""
    rng = random.Random(seed)
    step = 1
    for turn in range(EVENT_BLOCKS // 8):
        trainer.recorder.record(REST)
        what = rng.choices(("next", "overwrite", "prune"), (6, 3, 2))[0]
        LocalStore.link = _link if rng.random() < 0.5 else link_fails  # type: ignore[method-assign]
        if what == "prune":
            trainer.prune(local=2, shared=3)
            continue
        step += what == "next"
        ranks = rng.choice((1, 1, 2))
        alone = ranks > 1 and rng.random() < 0.4
        trainer.save_as(step, f"{seed}-{turn}", ranks=ranks, alone=alone, send=rng.random() < 0.8)
    trainer.recorder.send("enough")


def main(kind: str, mount: Path) -> None:
    recorder = EventRecorder()
    try:
        mount.mkdir(parents=True)
        subprocess.run(["/bin/busybox", "mount", "-t", kind, DISK, str(mount)], check=True)
        phases.WAIT_SECONDS = COMMIT_SECONDS
        world = GuestWorld(mount / "world")
        world.root.mkdir()
        trainer = Trainer(world, recorder)
        trainer.save_as(1, "first", ranks=2)
        checker.committed_label(world.place("step-1", SHARED), may_lack=False)
        os.sync()
        recorder.send("ready")
        instructions = recorder.receive()
        bugs.seed(instructions["bug"])
        save_until_killed(trainer, instructions["seed"])
    except BaseException:
        recorder.send("failed " + json.dumps(traceback.format_exc()))
        raise
    finally:
        recorder.receive()  # keep the guest's first process alive


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
