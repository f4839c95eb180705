"""The gradient log of a state, in segments that are removed when obsolete (N3).

No file is truncated: an earlier step begins a new segment (S2 of ``save.log_segments``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..disk.durable import fsync_file, translated
from ..errors import IntegrityError
from ..replay.frame import Frame, decode, encode
from ..save import log_segments
from ..save.log_segments import FramePosition, SegmentFile
from ..telemetry import logger

log = logger("replay")


def read_frames(directory: Path, layout: str, step: int) -> Iterator[Frame]:
    """Yield the frames after ``step``, up to the first damaged one."""
    if (paths := log_segments.paths_in(directory)) and log_segments.step_of_path(paths[0]) > step:
        log.warning("the gradients of step %d are missing: ignoring %s and later files", step + 1, paths[0])
    for position in _places(directory, step):
        where, number = position.file_text, position.number
        if position.layouts != {"": layout} or number > step + 1:
            log.warning("ignoring the frame of step %d in %s: it does not follow step %d", number, where, step)
            return
        if number == step + 1:
            try:
                yield decode(position.read, where=where)
            except IntegrityError as error:
                log.warning("%s", error.message)
                return
            step = number


def _places(directory: Path, step: int) -> Iterator[FramePosition]:
    found, ended = log_segments.segments_in(directory)
    first = next((one for one in reversed(found) if one.step <= step), None)
    for position in log_segments.walk_from(found, first, ended):
        if isinstance(position, FramePosition):
            yield position
        elif position:
            log.warning("%s", position)


class GradientFiles:
    """Removes segments after ``step``."""

    def __init__(self, directory: Path, step: int) -> None:
        self._directory = directory
        self._file: SegmentFile | None = None
        self._previous = next((one.digest for one in _places(directory, step - 1) if one.number == step), "")
        log_segments.remove_from(directory, step)
        with translated(directory):
            for path in log_segments.paths_in(directory):
                fsync_file(path)  # a previous process may have died before its fsync (N3)
        self.begin(step)

    def begin(self, step: int) -> None:
        self.close()
        fields = {"bases": [], "previous": self._previous, "owner": {}}
        self._file = SegmentFile(self._directory, step, fields, is_cached=True)
        self._previous = self._file.digest

    def append(self, frame: Frame) -> None:
        """It survives this process, and after ``sync`` a power cut."""
        assert self._file is not None
        head, views, self._previous = encode(frame, self._previous)
        with translated(self._directory):
            self._file.append([memoryview(head), *views])

    def sync(self) -> None:
        assert self._file is not None
        with translated(self._directory):
            self._file.sync()

    def trim(self, step: int) -> None:
        log_segments.remove_before(self._directory, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
