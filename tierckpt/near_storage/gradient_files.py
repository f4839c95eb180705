"""The frames behind the blocks: files of some steps each, so that what no block needs any more can go (N3)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import xxhash

from ..disk.durable import fsync_dir, fsync_file, matching, translated, write_all
from ..disk.file_io import open_file, pread_all
from ..errors import IntegrityError
from ..replay.frame import Frame, decode, encode
from ..telemetry import logger
from ..types import ByteRange

log = logger("replay")

SUFFIX = ".gradients"


def _first(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.name.encode())


def _step_of(path: Path) -> int:
    return int(path.name.removesuffix(SUFFIX))


def read_frames(directory: Path, layout: str, step: int) -> Iterator[Frame]:
    """Yield the frames that follow ``step``, each once and in order, to the end of the log or to what is damaged."""
    for path in matching(directory, f"*{SUFFIX}"):
        if _step_of(path) > step:
            log.warning("the gradients of step %d are missing: %s and what follows is of no use", step + 1, path)
            return
        for frame, _ in _frames_of(path, layout):
            if frame.number == step + 1:
                step = frame.number
                yield frame


def _frames_of(path: Path, layout: str) -> Iterator[tuple[Frame, int]]:
    """Yield the frames of a file, and where each ends."""
    file = open_file(path)
    try:
        size_bytes, previous, at = os.fstat(file).st_size, _first(path), 0

        def read(offset: int, size: int) -> memoryview:
            begin = min(at + offset, size_bytes)
            return memoryview(pread_all(file, ByteRange(begin, min(begin + size, size_bytes)), path))

        while at < size_bytes:
            try:
                frame, length = decode(read, where=str(path))
            except IntegrityError as error:
                log.warning("%s", error.message)
                return
            if (frame.previous, frame.layout) != (previous, layout):
                log.warning("the frame of step %d in %s does not follow the one before it", frame.number, path)
                return
            previous, at = frame.digest, at + length
            yield frame, at
    finally:
        os.close(file)


def cut_after(directory: Path, layout: str, step: int) -> None:
    """Remove the frames of later steps: others will take their numbers."""
    for path in matching(directory, f"*{SUFFIX}"):
        ends = [end for frame, end in _frames_of(path, layout) if frame.number <= step]
        with translated(path):
            os.truncate(path, max(ends, default=0))
            fsync_file(path)


class GradientFiles:
    """Appends frames behind ``step``. What lies there of later steps is of no use, and is removed."""

    def __init__(self, directory: Path, step: int) -> None:
        self._directory = directory
        self._file = -1
        self._begun_at = -1
        self._previous = ""
        for path in matching(directory, f"*{SUFFIX}"):
            if _step_of(path) >= step:
                path.unlink()
        self.begin(step)

    def begin(self, step: int) -> None:
        """Begin the file of the steps behind ``step``."""
        path = self._directory / f"{step:016d}{SUFFIX}"
        with translated(path):
            self.close()
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            fsync_dir(self._directory)
        self._begun_at, self._previous = step, _first(path)

    def append(self, frame: Frame) -> None:
        """Write ``frame`` behind the one before it. It outlives this process then, and a power cut after ``sync``."""
        head, views, self._previous = encode(replace(frame, previous=self._previous))
        with translated(self._directory):
            for view in (memoryview(head), *views):
                write_all(self._file, view)

    def sync(self) -> None:
        with translated(self._directory):
            os.fdatasync(self._file)

    def trim(self, step: int) -> None:
        """Remove the files of which no frame is behind ``step``, where every block is or later."""
        paths = matching(self._directory, f"*{SUFFIX}")
        for path, following in pairwise(paths):
            if _step_of(following) <= step:
                path.unlink()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
