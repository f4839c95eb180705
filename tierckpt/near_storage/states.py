"""Which state of a directory counts (N5), and who may have it: one trainer at a time."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..disk.durable import durable_write, fsync_dir, make_dirs, read_whole, remove_tree
from ..disk.file_lock import try_lock
from ..errors import (
    ManifestError,
    ObjectNotFoundError,
    OperationTimeoutError,
    PreconditionFailedError,
    StateMismatchError,
)
from ..poll import LOCAL, Poll
from .blocks import Layout
from .state_file import LOST, StateFile, Tensors

LOCK, CURRENT = "lock", "current.json"
CURRENT_BYTES_MAX = 1 << 16
END_SECONDS = 45.0
"""How long an updater goes on when its trainer is gone: what is under way is finished, or given up."""
LOCK_SECONDS = 60.0
"""How long a new one waits for it: longer."""


@contextmanager
def directory_lock(directory: Path, trainer: int) -> Iterator[None]:
    """Hold ``directory`` for the process ``trainer``. One that is left by a trainer that has ended is waited for.

    Raises:
        PreconditionFailedError: another trainer has it.
        OperationTimeoutError: the process of a trainer that has ended does not end.
    """
    make_dirs(directory)
    path = directory / LOCK
    for _ in Poll(LOCK_SECONDS, LOCAL):
        with try_lock(path) as hold:
            if hold:
                os.ftruncate(hold.descriptor, 0)
                os.pwrite(hold.descriptor, str(trainer).encode(), 0)
                yield
                return
        other = path.read_text()
        if other and Path(f"/proc/{other}").exists():  # a process that the trainer itself has ended holds nothing
            raise PreconditionFailedError(
                f"{directory} belongs to an optimizer of the process {other}, which is running",
                hint="Give each optimizer (of each rank of a job) a directory of its own, or close that one",
                path=directory,
            )
    raise OperationTimeoutError(
        f"the process of an optimizer near storage has {directory} since its trainer ended, {LOCK_SECONDS:g} s ago",
        hint="Look for a disk that hangs, and for a process `python -m tierckpt.near_storage`",
        path=directory,
    )


def current_state(directory: Path, layout: Layout) -> Path | None:
    """Return where the state of ``directory`` lies, None when there is none.

    Raises:
        StateMismatchError: it is of another optimizer, or of other parameters.
    """
    try:
        found = json.loads(read_whole(directory / CURRENT, CURRENT_BYTES_MAX))
        token, made_of, kind = (str(found[name]) for name in ("token", "layout", "kind"))
    except ObjectNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(directory / CURRENT, repr(error)) from None
    if made_of != layout.digest:
        raise StateMismatchError(
            f"the optimizer's state in {directory} is of {kind} with other parameters, types or options",
            hint="Build the optimizer as it was, or give it an empty directory",
            path=directory,
        )
    if not (directory / token).is_dir():
        raise _damaged(directory / CURRENT, f"the state {token} that it names is not there")
    return directory / token


def _damaged(path: Path, problem: str) -> ManifestError:
    return ManifestError(f"{path} is damaged: {problem}", hint=LOST, path=path)


class NewState:
    """A state that is being begun in ``directory``. Nothing counts before ``commit`` (N5).

    Raises:
        CapacityError: the disk has no room for it.
    """

    def __init__(self, directory: Path, layout: Layout) -> None:
        self._directory, self._token = directory, secrets.token_hex(8)
        try:
            self.file = StateFile(directory / self._token, layout, create=True)
        except BaseException:
            remove_tree(directory / self._token, ignore_errors=True)
            raise

    def commit(self, present: Mapping[str, Container[str]], step: int) -> None:
        """Make it the state of ``directory``, in the place of whatever is there. It is held."""
        layout = self.file.layout
        for block in layout.blocks:
            self.file.mark(block, 0, present)
            self.file.record(block, 0, step, self.file.digest(block, 0, is_trainers=True))
        found = {"token": self._token, "layout": layout.digest, "kind": layout.kind}
        durable_write(self._directory / CURRENT, json.dumps(found).encode())
        for other in self._directory.iterdir():
            if other.is_dir() and other.name != self._token:
                remove_tree(other)
        fsync_dir(self._directory)

    def discard(self) -> None:
        """Remove it: it was not committed. Raises nothing."""
        remove_tree(self._directory / self._token, ignore_errors=True)


def begin_state(directory: Path, layout: Layout, values: Tensors, step: int) -> None:
    """Begin a state of ``values``, in the place of whatever is there. It is held. What cannot be filled is removed."""
    new = NewState(directory, layout)
    try:
        for key, tensors in new.file.all_tensors().items():
            for name in tensors.keys() & values[key].keys():
                tensors[name].copy_(values[key][name])
        new.commit(values, step)
    except BaseException:
        new.discard()
        raise
