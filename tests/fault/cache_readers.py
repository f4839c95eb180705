"""Many processes of one node that want one cold model.

Half of them fill the cache. The other half read ranges through it, each in an order of its own, while it is being
filled. The store is a directory that logs every request in a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fault import runner
from tierckpt.cache.partial_entry import PartialEntry
from tierckpt.config import Settings
from tierckpt.disk.file_lock import Claims
from tierckpt.format.layout import parse_uri
from tierckpt.format.manifest import digest_of
from tierckpt.mover import Mover
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
EXITS_AT_ONCE = True
"""Many processes: the end of Python takes longer than the scenario."""


class CountingStore(LocalStore):
    """A slow directory that logs the process and the range of each request. A logged request is a chunk on its way."""

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
    """The journal lists a chunk before its bytes are written."""
    real = PartialEntry.store_chunk

    def land(self: PartialEntry, index: int, chunk: int, data: Buffer, digest: str = "", **more: Any) -> None:
        self.prepare(index)
        self.append_line(f"{index} {chunk} {digest}")
        time.sleep(0.2)
        real(self, index, chunk, data, digest, **more)

    PartialEntry.store_chunk = land  # type: ignore[method-assign]


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

    def requests_of(self, pid: int) -> int:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return sum(line.startswith(f"{pid} ") for line in lines)

    def mover(self) -> Mover:
        mover = Mover(self.settings)
        mover.node_cache.store_at = lambda location: CountingStore(Path(location.path), self.log)
        return mover


def read(folder: Path, number: int, answers: int | None, bug: str) -> list[str]:
    """Fill the cache or only read ranges through it. Returns the names of files with wrong bytes.

    ``answers``: how many requests have an answer; None for all.
    """
    if bug:
        BUGS[bug]()
    CountingStore.answers_left = math.inf if answers is None else answers
    return asyncio.run(_read(Node(folder.parent), number))


async def _read(node: Node, number: int) -> list[str]:
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


def run(folder: Path, readers: int, killed: int, bug: str = "") -> dict[str, Any]:
    """Start ``readers``, each a moment after the one before; kill the first ``killed`` with chunks on their way."""
    node, jobs = Node(folder), []
    node.prepare()
    for number in range(readers):
        answers = ANSWERED if number < killed else None
        job = runner.start(read, folder / f"reader-{number}", number=number, answers=answers, bug=bug)
        jobs.append(job)
        time.sleep(STAGGER_SECONDS)
        if number < killed:  # its claims remain
            job.until(lambda: node.requests_of(job.pids[0]) > ANSWERED, "requests without an answer")  # noqa: B023
            job.kill()
    ends = dict(Counter(code for job in jobs for code in job.codes(LIMIT_SECONDS)))  # JSON, for the report
    wrong = [name for job in jobs for names in job.results().values() for name in names]
    requests = [line.split()[1:] for line in node.log.read_text().splitlines()]
    cache = folder / "local" / "cache"
    directories = [path for path in cache.iterdir() if not path.name.startswith(".") and path.is_dir()]
    return {
        "ends": ends,
        "wrong": wrong,
        "chunks": sum(-(-size // CHUNK_BYTES) for size in FILES.values()),
        "requests": len(requests),
        "distinct": len({tuple(request) for request in requests}),
        "directories": len(directories),
        "whole": all(same(directory, name) for directory in directories for name in FILES),
        "left": [path.name for path in cache.glob(".*.incoming")],
    }
