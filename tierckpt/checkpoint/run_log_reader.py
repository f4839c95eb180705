"""Read back what the processes of a run have recorded of their time (``training/run_log.py`` writes it)."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from ..disk.durable import matching, read_whole
from ..errors import ManifestError, ObjectNotFoundError, StoreError
from ..format.layout import HISTORY_DIR
from ..stores.base import Store
from ..telemetry import log_failure, logger

log = logger("history")

FILE_BYTES_MAX = 16 << 20
FILES_MAX = 10_000
TAIL_BYTES = 1 << 16
GETS_AT_ONCE = 16

Lines = list[dict[str, Any]]


async def read_history(directory: Path, store: Store) -> dict[str, Lines]:
    """Return the lines of each start of the run, by the name of its file, from this node and the shared tier together.

    Of a file that both have, the longer one counts: it is only ever appended to, and copied whole. A damaged line is
    left out; so is a file that cannot be read, with a warning.

    Cost: one listing, and one GET for each file that this node does not have whole.
    """
    here = await asyncio.to_thread(local_records, directory)
    try:
        found = {info.key.rpartition("/")[2]: info async for info in store.list(HISTORY_DIR)}
    except StoreError as error:
        log_failure(log, error, "looking on this node only: %s", error, level=logging.WARNING)
        found = {}
    gate = asyncio.Semaphore(GETS_AT_ONCE)

    async def get(name: str) -> bytes | None:
        async with gate:
            try:
                return await store.get(f"{HISTORY_DIR}/{name}")
            except ObjectNotFoundError:
                return None
            except StoreError as error:
                log_failure(log, error, "%s is left out: %s", name, error, level=logging.WARNING)
                return None

    names = sorted(name for name in found if name.endswith(".jsonl"))[-FILES_MAX:]
    wanted = [name for name in names if len(here.get(name, b"")) < found[name].size_bytes <= FILE_BYTES_MAX]
    for name, data in zip(wanted, await asyncio.gather(*map(get, wanted)), strict=True):
        if data is not None:
            here[name] = data
    return {name: parse_lines(data) for name, data in sorted(here.items())}


def local_records(directory: Path) -> dict[str, bytes]:
    found = {}
    for path in matching(directory / HISTORY_DIR, "*.jsonl")[-FILES_MAX:]:
        try:
            found[path.name] = read_whole(path, FILE_BYTES_MAX)
        except (ManifestError, StoreError) as error:
            log.warning("%s is left out: %s", path, error)
    return found


def newest_lines(directory: Path) -> Lines:
    """The last lines of the newest start that this node has records of. Blocking; reads at most ``TAIL_BYTES``."""
    for path in matching(directory / HISTORY_DIR, "*.jsonl")[:-2:-1]:
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                return parse_lines(file.read(TAIL_BYTES))
        except OSError as error:
            log.debug("%s: %s", path, error)
    return []


def parse_lines(data: bytes) -> Lines:
    """The records in ``data``; a line that a crash has torn off is left out."""
    lines = []
    for text in data.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines
