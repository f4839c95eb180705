"""Many processes of one node that want one cold model.

``python -m tests.fault.cache_readers FOLDER READERS KILLED [BUG]`` writes FOLDER/outcome.json. The readers are forked
from one process that has everything imported, each a moment after the one before. Half of them fill the cache, half
read ranges through it, in an order of their own, while it is being filled. The store is a directory that notes every
request in a file. KILLED of the readers are killed with chunks on their way. BUG is a mistake put in on purpose, one of
BUGS.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierckpt.cache.partial_entry import PartialEntry
from tierckpt.config import Settings
from tierckpt.disk.claims import Claims
from tierckpt.format.layout import parse_uri
from tierckpt.format.manifest import digest_of
from tierckpt.mover import Mover
from tierckpt.poll import BRIEF, Poll
from tierckpt.stores.local import LocalStore
from tierckpt.types import Buffer, ByteRange

CHUNK_BYTES = 64 * 1024
FILES = {"model-1.bin": 30 * CHUNK_BYTES + 5, "model-2.bin": 17 * CHUNK_BYTES, "tokenizer/vocab.txt": 1000, "empty": 0}
REQUEST_SECONDS = 0.01
STAGGER_SECONDS = 0.01
ANSWERED = 2
"""Requests of a reader that is killed that have an answer. The next ones are on their way until it is."""
READS = 6
LIMIT_SECONDS = 120


class CountingStore(LocalStore):
    """A directory that takes its time, and notes who asked for what. A request that was noted is a chunk on its way."""

    answers_left = math.inf

    def __init__(self, root: Path, log: Path) -> None:
        super().__init__(root)
        self._file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        os.write(self._file, f"{os.getpid()} {self.root.name}/{key} {byte_range.start} {byte_range.stop}\n".encode())
        CountingStore.answers_left -= 1
        await asyncio.sleep(REQUEST_SECONDS if CountingStore.answers_left >= 0 else LIMIT_SECONDS)
        return await super().get_range(key, byte_range, if_match=if_match)


def no_ownership() -> None:
    """Whoever wants a chunk fetches it."""
    Claims.take = lambda self, at: True  # type: ignore[method-assign]


def no_second_look() -> None:
    """A process that gets a claim does not look whether the chunk has landed before."""
    real = PartialEntry.claimed

    @contextlib.contextmanager
    def claimed(self: PartialEntry, index: int, chunk: int) -> Any:
        time.sleep(5 * REQUEST_SECONDS)  # between the look before and the claim others get on
        has, self.has = self.has, lambda *_: False  # type: ignore[method-assign]
        with real(self, index, chunk) as turn:
            self.has = has  # type: ignore[method-assign]
            yield turn

    PartialEntry.claimed = claimed  # type: ignore[method-assign]


def line_first() -> None:
    """A chunk is said to be here before its bytes are."""
    real = PartialEntry.land

    def land(self: PartialEntry, index: int, chunk: int, data: Buffer, digest: str = "", **more: Any) -> None:
        self.prepare(index)
        self.append_line(f"{index} {chunk} {digest}")
        time.sleep(0.2)
        real(self, index, chunk, data, digest, **more)

    PartialEntry.land = land  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {
    "no ownership": no_ownership,
    "no second look": no_second_look,
    "the line before the bytes": line_first,
}


def content(name: str) -> bytes:
    return random.Random(name).randbytes(FILES[name])


def same(directory: Path, name: str) -> bool:
    return digest_of((directory / name).read_bytes()) == digest_of(content(name))


class Node:
    """One node: a local root, the shared directory with the model, and the log of requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "shared" / "model"
        self.log = folder / "requests"
        self.settings = Settings.load(
            local_root=folder / "local", chunk_size_bytes=CHUNK_BYTES, concurrency=2, mover="inline"
        )

    def prepare(self) -> None:
        for name in FILES:
            (self.model / name).parent.mkdir(parents=True, exist_ok=True)
            (self.model / name).write_bytes(content(name))

    def mover(self) -> Mover:
        mover = Mover(self.settings)
        mover.node_cache.store_at = lambda location: CountingStore(Path(location.path), self.log)
        return mover


async def read(node: Node, number: int) -> list[str]:
    """What one reader does. Returns the names of what was not what it should be."""
    mover, chance = node.mover(), random.Random(number)
    cached = await mover.node_cache.open_at(parse_uri(node.model), kind="directory")
    wrong = []
    try:
        if number % 2:
            await cached.fill()
            if cached.directory is None:
                return ["the directory is not there"]
            wrong += [name for name in FILES if not same(cached.directory, name)]
        for _ in range(READS):
            name = chance.choice([name for name, size in FILES.items() if size])
            start, stop = sorted(chance.randrange(FILES[name] + 1) for _ in range(2))
            stop = min(stop, start + 3 * CHUNK_BYTES)
            if digest_of(await cached.read(name, ByteRange(start, stop))) != digest_of(content(name)[start:stop]):
                wrong.append(f"{name} {start}-{stop}")
    finally:
        await cached.close()
        await mover.close()
    return wrong


def run(folder: Path, readers: int, killed: int, bug: str | None) -> dict[str, Any]:
    node = Node(folder)
    node.prepare()
    if bug:
        BUGS[bug]()
    pids: dict[int, int] = {}
    for number in range(readers):
        pid = os.fork()
        if pid == 0:
            CountingStore.answers_left = ANSWERED if number < killed else math.inf
            _live(node, number)
        pids[pid] = number
        time.sleep(STAGGER_SECONDS)
        if number < killed:
            _kill_in_flight(node, pid)
    ends, wrong = Counter[str](), []
    for pid, number in pids.items():
        ends[str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))] += 1
        answer = folder / f"answer-{number}"
        if answer.exists():
            wrong += json.loads(answer.read_text())
    requests = [line.split()[1:] for line in node.log.read_text().splitlines()]
    chunks = sum(-(-size // CHUNK_BYTES) for size in FILES.values())
    directories = [
        path for path in (folder / "local" / "cache").iterdir() if not path.name.startswith(".") and path.is_dir()
    ]
    whole = [same(directory, name) for directory in directories for name in FILES]
    return {
        "ends": ends,
        "wrong": wrong,
        "chunks": chunks,
        "requests": len(requests),
        "distinct": len({tuple(request) for request in requests}),
        "directories": len(directories),
        "whole": all(whole),
        "left": [path.name for path in (folder / "local" / "cache").glob(".*.incoming")],
    }


def _kill_in_flight(node: Node, pid: int) -> None:
    """Kill ``pid`` when it has asked for what it will have no answer to: its claims stay behind."""
    for _ in Poll(60.0, BRIEF):
        asked = node.log.read_text().splitlines() if node.log.exists() else []
        if sum(line.startswith(f"{pid} ") for line in asked) > ANSWERED:
            break
    os.kill(pid, signal.SIGKILL)


def _live(node: Node, number: int) -> None:
    signal.alarm(LIMIT_SECONDS)
    code = 0
    try:
        wrong = asyncio.run(read(node, number))
        (node.folder / f"answer-{number}").write_text(json.dumps(wrong))
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def main() -> None:
    folder, readers, killed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    begun = time.monotonic()
    outcome = run(folder, readers, killed, sys.argv[4] if len(sys.argv) > 4 else None)
    outcome["seconds"] = time.monotonic() - begun
    (folder / "outcome.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
