"""Tests of the power-cut harness: reading and replaying a log of writes, and the states that events allow.

The harness (tests/fault/powercut) needs virtual machines and is not part of this suite.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fault.powercut import events, writelog
from tests.fault.powercut.events import BEGIN, DONE, LOCAL, REMOVABLE, SHARED, Event
from tests.fault.powercut.writelog import DISCARD, FLUSH, SECTOR_BYTES

BLOCKS = 8
FLUSHED = (0, b"", FLUSH)


def block(letter: str) -> bytes:
    return letter.encode() * SECTOR_BYTES


def log_of(path: Path, requests: Sequence[tuple[int, bytes, int]], *, superblock: bool = True) -> Path:
    """Write a log as QEMU does: for each request a header sector and the data."""
    super_data = struct.pack("<QQQI", 0x6A736677736872, 1, 0, SECTOR_BYTES) if superblock else b""
    with path.open("wb") as file:
        file.write(super_data.ljust(SECTOR_BYTES, b"\0"))
        for at, data, flags in requests:
            sectors = len(data) // SECTOR_BYTES
            file.write(struct.pack("<QQQQ", at, sectors, flags, 0).ljust(SECTOR_BYTES, b"\0"))
            if not flags & DISCARD:
                file.write(data)
    return path


def after_cut(tmp_path: Path, requests: Sequence[tuple[int, bytes, int]], way: str, seed: int = 0) -> str:
    """Return the first letter of each block of a disk of dots, after a cut that follows the last request."""
    disk = tmp_path / "disk"
    disk.write_bytes(block(".") * BLOCKS)
    log = log_of(tmp_path / "log", requests)
    durable_from = (BLOCKS - 1) * SECTOR_BYTES
    writelog.replay(disk, log, writelog.read(log), way, random.Random(seed), durable_from=durable_from)
    data = disk.read_bytes()
    return "".join(chr(data[at]) for at in range(0, len(data), SECTOR_BYTES))


def test_read_stops_at_a_torn_request(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log", [(1, block("a") * 2, 0), FLUSHED, (5, block("b"), 0)])
    whole = writelog.read(log)
    assert [(one.offset // SECTOR_BYTES, one.size_bytes // SECTOR_BYTES, one.is_flush) for one in whole] == [
        (1, 2, False),
        (0, 0, True),
        (5, 1, False),
    ]
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 1)
    assert writelog.read(log) == whole[:2]
    with log.open("ab") as file:
        file.truncate(log.stat().st_size + 3 * SECTOR_BYTES)  # space for a request that was never written
    assert writelog.read(log)[:2] == whole[:2]


REQUESTS = [(0, block("a"), 0), (1, block("b"), 0), FLUSHED, (1, block("c"), 0), (2, block("d") * 2, 0)]


def test_only_flushed_writes_survive_the_loss_of_the_cache(tmp_path: Path) -> None:
    assert after_cut(tmp_path, REQUESTS, "nothing") == "ab......"


def test_all_writes_survive_if_the_cache_was_written_back(tmp_path: Path) -> None:
    assert after_cut(tmp_path, REQUESTS, "all") == "acdd...."


@pytest.mark.parametrize(
    ("way", "states"),
    [
        ("writes", {"ab......", "ac......", "abdd....", "acdd...."}),
        ("blocks", {f"a{one}{two}{three}...." for one in "bc" for two in ".d" for three in ".d"}),
    ],
)
def test_any_unflushed_write_or_block_may_be_lost(tmp_path: Path, way: str, states: set[str]) -> None:
    assert {after_cut(tmp_path, REQUESTS, way, seed) for seed in range(60)} == states


def test_event_blocks_always_survive(tmp_path: Path) -> None:
    last = BLOCKS - 1
    assert after_cut(tmp_path, [(0, block("a"), 0), (last, block("!"), 0)], "nothing") == ".......!"


def test_discarded_block_reads_as_zeros(tmp_path: Path) -> None:
    assert after_cut(tmp_path, [(0, block("a") * 2, 0), (1, block("x"), DISCARD), FLUSHED], "nothing") == "a\0......"


def test_events_allow_old_and_new_save_until_acknowledgement() -> None:
    local, shared = ("step-1", LOCAL), ("step-1", SHARED)
    recorded = [Event(0, BEGIN, "step-1", label="a")]
    assert events.allowed(recorded) == {local: {None, "a"}, shared: {None, "a"}}
    recorded.append(Event(1, DONE, "step-1", LOCAL, "a"))
    recorded.append(Event(2, BEGIN, "step-1", label="b"))
    assert events.allowed(recorded) == {local: {"a", "b"}, shared: {None, "a", "b"}}
    recorded.append(Event(3, DONE, "step-1", LOCAL, "b"))
    assert events.acknowledged(recorded) == {local: "b"}
    recorded.append(Event(4, REMOVABLE, "step-1", LOCAL))
    assert events.allowed(recorded)[local] == {None, "b"}
    assert events.acknowledged(recorded) == {}
