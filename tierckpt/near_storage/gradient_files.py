"""The frames behind the blocks: a gradient log whose segments have some steps each, so that what no block needs can go
(N3). Going back to an earlier step begins a segment there (S2 of ``save.log_segments``): nothing is cut off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..disk.durable import fsync_file, translated
from ..errors import IntegrityError
from ..replay.frame import Frame, decode, encode
from ..save import log_segments
from ..save.log_segments import Place, SegmentFile
from ..telemetry import logger

log = logger("replay")


def read_frames(directory: Path, layout: str, step: int) -> Iterator[Frame]:
    """Yield the frames that follow ``step``, each once and in order, to the end of the log or to what is damaged."""
    if (paths := log_segments.paths_in(directory)) and log_segments.step_of_path(paths[0]) > step:
        log.warning("the gradients of step %d are missing: %s and what follows is of no use", step + 1, paths[0])
    for place in _places(directory, step):
        where, number = place.where, place.number
        if place.layouts != {"": layout} or number > step + 1:
            log.warning("the frame of step %d in %s does not follow step %d: it is of no use", number, where, step)
            return
        if number == step + 1:
            try:
                yield decode(place.read, where=where)
            except IntegrityError as error:
                log.warning("%s", error.message)
                return
            step = number


def _places(directory: Path, step: int) -> Iterator[Place]:
    """The frames of the newest segment that begins at ``step`` or before, and of those that continue it."""
    found, ended = log_segments.segments_in(directory)
    first = next((one for one in reversed(found) if one.step <= step), None)
    for place in log_segments.walk_from(found, first, ended):
        if isinstance(place, Place):
            yield place
        elif place:
            log.warning("%s", place)


class GradientFiles:
    """Appends frames behind ``step``. What lies there of later steps counts no more, and segments of it are removed."""

    def __init__(self, directory: Path, step: int) -> None:
        self._directory = directory
        self._file: SegmentFile | None = None
        self._previous = next((one.digest for one in _places(directory, step - 1) if one.number == step), "")
        log_segments.remove_from(directory, step)
        with translated(directory):
            for path in log_segments.paths_in(directory):
                fsync_file(path)  # a process may have ended before it had (N3)
        self.begin(step)

    def begin(self, step: int) -> None:
        """Begin the segment of the steps behind ``step``."""
        self.close()
        fields = {"bases": [], "previous": self._previous, "owner": {}}
        self._file = SegmentFile(self._directory, step, fields, is_cached=True)
        self._previous = self._file.digest

    def append(self, frame: Frame) -> None:
        """Write ``frame`` behind the one before it. It outlives this process then, and a power cut after ``sync``."""
        assert self._file is not None
        head, views, self._previous = encode(frame, self._previous)
        with translated(self._directory):
            self._file.append([memoryview(head), *views])

    def sync(self) -> None:
        assert self._file is not None
        with translated(self._directory):
            self._file.sync()

    def trim(self, step: int) -> None:
        """Remove the segments of which no frame is behind ``step``, where every block is or later."""
        log_segments.remove_before(self._directory, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
