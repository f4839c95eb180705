"""Another process, as the agent will be: opens the arena by name and flushes. Run by test_flush.py."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass

from tierckpt.arena.memory import Memory
from tierckpt.disk.io_tuner import IoShape
from tierckpt.save.flush import flush
from tierckpt.save.shard_plan import Image, Shard


@dataclass(frozen=True)
class Frame:
    """The part of ``wire.Frame`` that a flush knows: a tail that holds the CRC-32 of the data, twice."""

    tail: bytes
    size_bytes: int

    def tail_with(self, crc: int) -> bytes:
        value = crc.to_bytes(4, "little")
        return (value * 2 + self.tail[8:])[: len(self.tail)]


def main() -> None:
    job = pickle.loads(sys.stdin.buffer.read())
    reserved = [Memory.allocate(64 << 20)]  # so that the arena does not come to lie where its owner has it
    arena = Memory.open(job["name"])
    image = None
    if job["image_at"] is not None:
        image = Image(arena, arena.address + job["image_at"], job["image_bytes"])
    slots = [Memory.allocate(2 << 20) for _ in range(3)]
    (flushed,) = flush(
        [Shard(job["path"], job["records"], image)],
        slots=slots,
        shape=IoShape(3, 8192),
        chunk_size_bytes=4096,
        base=arena.address,
    )
    sys.stdout.buffer.write(pickle.dumps((flushed, "torch" in sys.modules, arena.address)))
    del reserved


if __name__ == "__main__":
    main()
