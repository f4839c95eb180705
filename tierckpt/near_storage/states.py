"""Selects the current state of a directory (N5), and locks it for one trainer."""

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
from .blocks import BlockLayout
from .state_file import LOST, StateFile, Tensors

LOCK, CURRENT = "lock", "current.json"
CURRENT_BYTES_MAX = 1 << 16
END_SECONDS = 45.0
"""Maximum time an updater continues after its trainer ended, to finish or abandon pending work."""
LOCK_SECONDS = 60.0
"""Maximum wait of a new trainer for the lock; longer than ``END_SECONDS``."""


@contextmanager
def directory_lock(directory: Path, trainer: int) -> Iterator[None]:
    """Hold ``directory`` for the process ``trainer``. Waits for the updater of an ended trainer.

    Raises:
        PreconditionFailedError: another trainer uses it.
        OperationTimeoutError: the updater of an ended trainer does not end.
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
        if other and Path(f"/proc/{other}").exists():  # an ended process holds nothing
            raise PreconditionFailedError(
                f"{directory} is in use by an optimizer of process {other}, which is running",
                hint="Use a separate directory for each optimizer and rank, or close that optimizer",
                path=directory,
            )
    raise OperationTimeoutError(
        f"an optimizer process still holds {directory} {LOCK_SECONDS:g} s after its trainer ended",
        hint="Look for a hanging disk, and for a process `python -m tierckpt.near_storage`",
        path=directory,
    )


def current_state(directory: Path, layout: BlockLayout) -> Path | None:
    """Return the path of the current state of ``directory``, or None.

    Raises:
        StateMismatchError: the state is of another optimizer or other parameters.
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
            hint="Build the optimizer with its earlier settings, or use an empty directory",
            path=directory,
        )
    if not (directory / token).is_dir():
        raise _damaged(directory / CURRENT, f"it names state {token}, which does not exist")
    return directory / token


def _damaged(path: Path, problem: str) -> ManifestError:
    return ManifestError(f"{path} is damaged: {problem}", hint=LOST, path=path)


class NewState:
    """A new state in ``directory``, not current before ``commit`` (N5).

    Raises:
        CapacityError: the disk has no room for it.
    """

    def __init__(self, directory: Path, layout: BlockLayout) -> None:
        self._directory, self._token = directory, secrets.token_hex(8)
        try:
            self.file = StateFile(directory / self._token, layout, create=True)
        except BaseException:
            remove_tree(directory / self._token, ignore_errors=True)
            raise

    def commit(self, present: Mapping[str, Container[str]], step: int) -> None:
        """Make it the current state of ``directory``. The caller holds the directory."""
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
        """Remove it, uncommitted. Raises nothing."""
        remove_tree(self._directory / self._token, ignore_errors=True)


def begin_state(directory: Path, layout: BlockLayout, values: Tensors, step: int) -> None:
    """Replace the state of ``directory``, which the caller holds, by ``values``. Removed again on an error."""
    new = NewState(directory, layout)
    try:
        for key, tensors in new.file.all_tensors().items():
            for name in tensors.keys() & values[key].keys():
                tensors[name].copy_(values[key][name])
        new.commit(values, step)
    except BaseException:
        new.discard()
        raise
