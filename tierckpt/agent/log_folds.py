"""Gradient logs that grow longer than a checkpoint is made into one, beside training.

The steps of a log are read again by a restore, and made again; and they lie on the SSD until a checkpoint has them. So
when the logs of a run's ranks have as many bytes behind the newest checkpoint as that has itself, processes of their
own, one for each rank, make the next one of all (``training/log_fold``): an ordinary checkpoint of a step that every
rank has logged, which stays on this node. A run with ranks on other nodes is left alone: their logs are there.

Bytes say how long a restore takes, too: making steps again costs about 6 s of processor time a GB of gradients, and
what is never folded, 64 MiB of the smallest frames (8,200 of 8 KiB), 8 s. Time has no trigger of its own.

Nothing is remembered: what is due is seen from the files. Whatever fails is tried again when the log has grown on.
Its bytes go through the rate limit of the drains, and no more than ``FOLD_SHARE`` of the time it runs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..checkpoint.local_commit import read_local_manifest
from ..checkpoint.retention import marked_directories
from ..config import Settings
from ..disk.durable import matching
from ..drain.rate_limiter import RateLimiter
from ..errors import TierckptError
from ..format.layout import GRADIENTS_DIR, location_at, step_of
from ..format.manifest import Manifest
from ..ipc.child_process import ended, start_with_order
from ..save import log_segments
from ..telemetry import logger

log = logger("agent")

LOOK_SECONDS = 10.0
FOLD_SHARE = 0.1
FOLD_SECONDS_MAX = 1800.0
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Fold:
    """A checkpoint that can be made of a log."""

    run: str
    base: int
    """Step of the checkpoint that the log leads on from."""
    called: str
    """What the log calls it."""
    step: int
    """Of the new one. Every rank's frame of it has a digest of all parameters, and the job itself has not saved it."""
    digests: Sequence[str]
    """Of its frames, by rank."""
    size_bytes: int
    """To read and write: twice the checkpoint, and the logs."""


def due(local_root: Path) -> Iterator[Fold]:
    """Yield what is to be folded now. Cost: a look at each log; the headers of those that are as large as a checkpoint.

    A step that another follows in the same history, without a checkpoint of the job between them, is none that the job
    may still save: what it saves is noted in the log before the next step.
    """
    for run in marked_directories(local_root / "checkpoints", GRADIENTS_DIR):
        location = location_at(local_root, run)
        logs = matching(run / GRADIENTS_DIR, "rank-*")
        try:
            base, manifest = _newest(run)
            if location is None or manifest is None or _size_bytes(logs) < (least := _least(manifest)):
                continue
            called = str(manifest.notes.get(log_segments.BASE_NOTE, ""))
            step, digests, size_bytes = _reach(logs, called) if called else (-1, (), 0)
            if step > base and size_bytes >= least:
                yield Fold(location.uri, base, called, step, digests, 2 * manifest.size_bytes + size_bytes)
        except (TierckptError, OSError, KeyError, TypeError) as error:
            log.debug("the gradient logs below %s cannot be looked at: %s", run, error)


def _newest(run: Path) -> tuple[int, Manifest | None]:
    steps = {step: path for path in matching(run, "*") if (step := step_of(path.name)) is not None}
    for step in sorted(steps, reverse=True):
        if (manifest := read_local_manifest(steps[step])) is not None:
            return step, manifest
    return -1, None


def _least(manifest: Manifest) -> int:
    return max(log_segments.FOLD_BYTES_MIN, manifest.size_bytes)


def _size_bytes(logs: Sequence[Path]) -> int:
    return sum(path.stat().st_size for directory in logs for path in log_segments.paths_in(directory))


def _reach(logs: Sequence[Path], called: str) -> tuple[int, Sequence[str], int]:
    """The newest step that can be folded on all ranks, the digests of its frames, and the bytes of all up to it."""
    found = {directory.name: _foldable(directory, called) for directory in logs}
    for one in sorted(found.get("rank-0", ()), reverse=True):
        frames = [found.get(f"rank-{rank}", {}).get(one, ("", 0)) for rank in range(one[2])]
        if all(digest for digest, _ in frames):
            return one[0], [digest for digest, _ in frames], sum(size_bytes for _, size_bytes in frames)
    return -1, (), 0


def _foldable(directory: Path, called: str) -> dict[tuple[int, str, int], tuple[str, int]]:
    """Of each step that can be folded on one rank, with the job that logged it and its number of ranks: the digest of
    its frame, and the bytes of all up to it."""
    found, size_bytes = dict[tuple[int, str, int], tuple[str, int]](), 0
    last: log_segments.Place | None = None
    for place in log_segments.walk(directory, called):
        if isinstance(place, str) or "state" not in place.segment.owner:
            break
        if last is not None and (place.segment.path == last.segment.path or not place.segment.bases):
            owner = last.segment.owner
            found[last.fields["number"], owner["job"], owner["world_size"]] = last.digest, size_bytes
        size_bytes += place.head_bytes + int(place.fields["data_bytes"])
        last = place if place.fields["is_last"] and place.fields.get("parameters") else None
    return found


class LogFolds:
    """Folds the logs of a node, one at a time. On the agent's event loop."""

    def __init__(self, settings: Settings, limiter: RateLimiter) -> None:
        self._settings, self._limiter = settings.model_copy(update={"mover": "agent"}), limiter
        self._again_at_bytes: dict[str, int] = {}
        """Of runs whose log could not be folded: it is tried again when there is twice as much to do."""

    async def run(self) -> None:
        """Look now and then, until cancelled. A process that still folds then ends too."""
        while True:
            begun = time.monotonic()
            try:
                for one in await asyncio.to_thread(lambda: list(due(self._settings.local_root))):
                    if one.size_bytes >= self._again_at_bytes.get(one.run, 0):
                        self._again_at_bytes[one.run] = 2 * one.size_bytes
                        await self._fold(one)
                        del self._again_at_bytes[one.run]
            except Exception as error:
                log.warning("a gradient log is not folded now: %s", error)
            await asyncio.sleep(max(LOOK_SECONDS, (time.monotonic() - begun) * (1 / FOLD_SHARE - 1)))

    async def _fold(self, one: Fold) -> None:
        for at in range(0, one.size_bytes, PIECE_BYTES):
            await self._limiter.spend(min(PIECE_BYTES, one.size_bytes - at))
        order = {"settings": self._settings.model_dump_json(), **asdict(one)}
        process, life = await asyncio.to_thread(start_with_order, "tierckpt.training.log_fold", order)
        try:
            await ended(process, FOLD_SECONDS_MAX)
        finally:
            os.close(life)
