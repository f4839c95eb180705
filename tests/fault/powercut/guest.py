"""What runs in the machine, as its only process: ``python -m tests.fault.powercut.guest FILE_SYSTEM MOUNT``.

It mounts the tested disk, saves a first checkpoint, says that it is ready, and waits for a line with a seed and a bug:
here it is frozen. From then on it saves, drains and prunes without end, and says so.
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
from tests.fault.powercut.events import BEGIN, BLOCK_BYTES, DONE, LOCAL, MARKS, MAY_GO, REST, SHARED, Event
from tests.fault.sweep import checker, phases
from tests.fault.sweep.phases import Job, World
from tierckpt.checkpoint.journal import READY
from tierckpt.checkpoint.retention import Policy, Rule
from tierckpt.stores.local import LocalStore

DISK = "/dev/vda"
LINE = "/dev/ttyS1"
COMMIT_SECONDS = 120.0
"""An emulated processor is slow: no rank is given up because of that."""
_link = LocalStore.link


class GuestWorld(World):
    @property
    def acknowledgements(self) -> Path:
        return Path("/tmp/acknowledged")


class Speaker:
    """Says each thing on the disk behind the file system, without any cache, and then on the serial line."""

    def __init__(self) -> None:
        self.line = os.open(LINE, os.O_RDWR | os.O_NOCTTY)
        tty.setraw(self.line)
        self._disk = os.open(DISK, os.O_RDWR | os.O_DIRECT)
        self._first = os.lseek(self._disk, 0, os.SEEK_END) - MARKS * BLOCK_BYTES
        self._block = mmap.mmap(-1, BLOCK_BYTES)
        self._count = 0

    def say(self, kind: str, name: str = "", tier: str = "", label: str = "") -> None:
        text = Event(self._count, kind, name, tier, label).encode()
        self._block[:] = text.ljust(BLOCK_BYTES, b"\0")
        if os.pwrite(self._disk, self._block, self._first + self._count % MARKS * BLOCK_BYTES) != BLOCK_BYTES:
            raise OSError("short write of a mark")
        self._count += 1
        self.tell(text.decode())

    def tell(self, text: str) -> None:
        data = f"{text}\n".encode()
        while data:
            data = data[os.write(self.line, data) :]

    def hear(self) -> Any:
        data = b""
        while not data.endswith(b"\n"):
            data += os.read(self.line, 1)
        return json.loads(data)


class Trainer(Job):
    """Saves under names of its choice, and acknowledges by what ``speaker`` says."""

    def __init__(self, world: World, speaker: Speaker) -> None:
        super().__init__(world)
        self.speaker = speaker
        self.labels: dict[str, str] = {}
        self.unsent: set[str] = set()
        self.is_evictable: set[tuple[str, str]] = set()

    def acknowledge(self, place: str, tier: str) -> None:
        if tier == LOCAL:
            self.speaker.say(DONE, place, LOCAL, self.labels[place])

    def save_as(self, step: int, label: str, **options: Any) -> None:
        name = f"step-{step}"
        self.speaker.say(BEGIN, name, label=label)
        self.labels[name] = label
        self.unsent.add(name)
        self.save(step, label, **options)
        if options.get("send", True):
            self.acknowledge_sent()

    def acknowledge_sent(self) -> None:
        """The drain has ended without an error and the journal is empty: all is on the shared tier."""
        left = [entry for entry in self.mover.journal.entries() if entry.state == READY]
        if left:
            raise RuntimeError(f"the drain has left {left}")
        for name in sorted(self.unsent):
            self.speaker.say(DONE, name, SHARED, self.labels[name])
        self.unsent.clear()

    def prune(self, local: int, shared: int) -> None:
        steps = sorted(self.labels, key=lambda name: int(name.rpartition("-")[2]))
        for tier, count in ((LOCAL, local), (SHARED, shared)):
            for name in steps[:-count]:
                if (name, tier) not in self.is_evictable:
                    self.is_evictable.add((name, tier))
                    self.speaker.say(MAY_GO, name, tier)
        self.wait(self.mover.pruner.prune(self.world.run, Policy(Rule(local), Rule(shared))))


def live(trainer: Trainer, seed: int) -> None:
    """Save until the power goes."""
    made = random.Random(seed)
    step = 1
    for turn in range(MARKS // 8):
        trainer.speaker.say(REST)
        what = made.choices(("next", "overwrite", "prune"), (6, 3, 2))[0]
        LocalStore.link = _link if made.random() < 0.5 else refuse_link  # type: ignore[method-assign]
        if what == "prune":
            trainer.prune(local=2, shared=3)
            continue
        step += what == "next"
        ranks = made.choice((1, 1, 2))
        alone = ranks > 1 and made.random() < 0.4
        trainer.save_as(step, f"{seed}-{turn}", ranks=ranks, alone=alone, send=made.random() < 0.8)
    trainer.speaker.tell("enough")


async def refuse_link(self: LocalStore, key: str, source: Path) -> bool:
    """The shared tier is on another file system, so that files are copied."""
    return False


def main(kind: str, mount: Path) -> None:
    speaker = Speaker()
    try:
        mount.mkdir(parents=True)
        subprocess.run(["/bin/busybox", "mount", "-t", kind, DISK, str(mount)], check=True)
        phases.WAIT_SECONDS = COMMIT_SECONDS
        world = GuestWorld(mount / "world")
        world.root.mkdir()
        trainer = Trainer(world, speaker)
        trainer.save_as(1, "first", ranks=2)
        checker.committed_in(world.place("step-1", SHARED), may_lack=False)
        os.sync()
        speaker.tell("ready")
        order = speaker.hear()
        bugs.seed(order["bug"])
        live(trainer, order["seed"])
    except BaseException:
        speaker.tell("failed " + json.dumps(traceback.format_exc()))
        raise
    finally:
        speaker.hear()  # the first process must not end


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
