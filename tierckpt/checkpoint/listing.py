"""Reads the checkpoints of a listed run, and lists it again if a job removed some of them meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from ..errors import (
    CheckpointNotFoundError,
    IntegrityError,
    ObjectNotFoundError,
    OperationTimeoutError,
    TierckptError,
    UncommittedCheckpointError,
)
from ..format.layout import Location, parse_uri, step_of

T = TypeVar("T")

LISTINGS_MAX = 16
"""Maximum listings of a run that loses checkpoints between listing and reading."""
UNREADABLE = (IntegrityError, ObjectNotFoundError, CheckpointNotFoundError, UncommittedCheckpointError)
"""Errors of a checkpoint that is damaged, or was removed after the listing."""


async def listed_again(
    location: Location,
    names: Callable[[], Awaitable[Collection[str]]],
    look: Callable[[Collection[str]], Awaitable[tuple[T, set[str]]]],
) -> T:
    """Return what ``look`` makes of ``names``; list them again when one that it did not find is no longer there.

    ``look`` returns its result and the names that it did not find.

    Raises OperationTimeoutError: names disappeared in each of ``LISTINGS_MAX`` rounds.
    """
    listed = await names()
    for _ in range(LISTINGS_MAX):
        result, missing = await look(listed)
        if not missing or missing <= {*(listed := await names())}:
            return result
    raise changing(location)


def read_newest(location: Location, newest: Callable[[], str | None], read: Callable[[str], T]) -> T:
    """Return what ``read`` makes of the newest checkpoint at or under ``location``, or of ``location`` where ``newest``
    finds none. One that is removed while it is read, by a job that has committed a newer one, is followed by that.

    Raises OperationTimeoutError: that has happened ``LISTINGS_MAX`` times.
    """
    found = newest()
    for _ in range(LISTINGS_MAX):
        try:
            return read(found or location.uri)
        except UNREADABLE:
            before, found = found, newest()
            if not is_newer(found, before):
                raise
    raise changing(location)


class WalkBack:
    """Walks from the newest checkpoint of a run to older ones while those that it meets are damaged or removed."""

    def __init__(self, run: Location) -> None:
        self._run, self._removed = run, 0
        self.step_max: int | None = None
        """The newest step to look for; None: any."""
        self.lost: list[tuple[Location, TierckptError]] = []
        """The damaged checkpoints, and their errors."""

    def note_removed(self) -> None:
        """One was removed before it was read: look again. Raises OperationTimeoutError after ``LISTINGS_MAX``."""
        self._removed += 1
        if self._removed >= LISTINGS_MAX:
            raise changing(self._run)

    def note_lost(self, damaged: Location, error: TierckptError) -> None:
        """Look for older steps. Raises the first error when no step is older: ``damaged`` has none in its name."""
        self.lost.append((damaged, error))
        step = step_of(damaged.name)
        if step is None:
            raise self.lost[0][1] from None
        self.step_max = step - 1

    def end(self) -> None:
        """No older one was found. Raises the error of the newest that was damaged, if there was one."""
        if self.lost:
            raise self.lost[0][1]


def is_newer(uri: str | None, other: str | None) -> bool:
    """Return True if the step of ``uri`` is later than the step of ``other``. None is older than all."""
    if uri is None or other is None:
        return uri is not None
    step, other_step = (step_of(parse_uri(one).name) for one in (uri, other))
    return step is not None and (other_step is None or step > other_step)


def changing(location: Location) -> OperationTimeoutError:
    return OperationTimeoutError(
        f"{location.uri} was listed {LISTINGS_MAX} times, and its checkpoints were removed before they were read",
        hint="Run it again. A job that keeps more steps (keep_last) leaves time to read them",
        uri=location.uri,
    )
