"""The state of an optimizer near storage as tensors of the trainer's, in files: what a save writes, a restore fills.

A save plans with tensors in version 0 of each block. Which version has the step is known when the process has recorded
it; until the save has read it the process leaves it alone (``Hold``).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import OperationTimeoutError, TierckptError, UpdaterLostError
from ..replay.optimizers import Parameter, local, sharded
from ..save.shard_plan import Fetch
from .blocks import MASTER, Layout
from .state_file import StateFile, Tensors
from .states import END_SECONDS, NewState, begin_state, current_state, directory_lock
from .updater_process import UpdaterProcess

SAVED_MASTER = "master"
"""What a master parameter is called beside the state of its parameter in a checkpoint."""

State = dict[torch.Tensor, dict[str, torch.Tensor]]


class MappedState:
    """The state that counts in ``directory``, and the one that is being loaded there.

    Args:
        tensors: the trainer's parameters, by key.
    """

    def __init__(self, directory: Path, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        self.stepped: set[str] = set()
        """Keys of parameters that have a state, beside their values."""
        self.view: State | None = None
        """By parameter and name, sharded as the parameter is, while a save or a restore looks at it."""
        self.saved: StateFile | None = None
        """In whose version 0 the tensors lie that ``to_save`` has given last."""
        self._directory, self._layout, self._tensors = directory, layout, tensors
        self._new: NewState | None = None

    def exists(self) -> bool:
        return current_state(self._directory, self._layout) is not None

    def begin(self, values: Tensors, step: int) -> None:
        """Begin another state."""
        with directory_lock(self._directory, os.getpid()):
            begin_state(self._directory, self._layout, values, step)
        self.look([0] * len(self._layout.blocks))

    def look(self, versions: Sequence[int]) -> None:
        """See which parameters have a state in the versions that count."""
        file = self._opened()
        found = [file.present(block, version) for block, version in zip(self._layout.blocks, versions, strict=True)]
        self.stepped = {key for block in found for key, names in block.items() if names - {MASTER}}

    @contextmanager
    def to_save(self, parameters: Iterable[Parameter]) -> Iterator[None]:
        """Within, ``view`` has what is to be saved."""
        self.saved = self._opened()
        with self._viewed(self.saved, parameters, lambda key, name: name == MASTER or key in self.stepped):
            yield

    @contextmanager
    def to_load(self, parameters: Iterable[Parameter]) -> Iterator[None]:
        """Within, ``view`` has the tensors of a new state, which ``commit`` makes the one that counts."""
        self.discard()
        self._new = NewState(self._directory, self._layout)
        with self._viewed(self._new.file, parameters, lambda *_: True):
            yield

    @contextmanager
    def _viewed(
        self, file: StateFile, parameters: Iterable[Parameter], is_wanted: Callable[[str, str], bool]
    ) -> Iterator[None]:
        tensors, self.view = file.all_tensors(), {}
        for one in parameters:
            self.view[one.tensor] = {
                name or SAVED_MASTER: sharded(tensor, one.tensor)
                for name, tensor in tensors[one.key].items()
                if is_wanted(one.key, name)
            }
        try:
            yield
        finally:
            self.view = None

    @torch.no_grad()
    def commit(self, loaded: Mapping[str, Mapping[str, Any]], step: int) -> None:
        """Make what was loaded the state. Masters that were not loaded become what the parameters are."""
        assert self._new is not None
        new, self._new = self._new, None
        filled = {local(one).data_ptr() for state in loaded.values() for one in state.values()}
        present = {}
        for key, tensors in new.file.all_tensors().items():
            present[key] = {name for name, tensor in tensors.items() if tensor.data_ptr() in filled} | {MASTER}
            if tensors[MASTER].data_ptr() not in filled:
                tensors[MASTER].copy_(local(self._tensors[key].detach()))
        try:
            with directory_lock(self._directory, os.getpid()):
                new.commit(present, step)
        except BaseException:
            new.discard()
            raise
        self.look([0] * len(self._layout.blocks))

    def discard(self) -> None:
        """Remove what was not committed."""
        if self._new is not None:
            self._new.discard()
        self._new = None

    def _opened(self) -> StateFile:
        found = current_state(self._directory, self._layout)
        assert found is not None
        return StateFile(found, self._layout)


class Hold:
    """The state of a step, which the process leaves as it is until ``release``. A ``dcp.stager.Source``."""

    def __init__(self, file: StateFile, process: UpdaterProcess, answer: Future[dict[str, Any]]) -> None:
        self._file, self._process, self._answer = file, process, answer
        self._lock = threading.Lock()
        self._is_released = False
        self._timeout_seconds = END_SECONDS

    def has(self, tensor: torch.Tensor) -> bool:
        return self._file.owns(tensor)

    def wait(self, timeout_seconds: float) -> None:
        """Return when the state is recorded.

        Raises:
            UpdaterLostError: the process has ended.
        """
        self._timeout_seconds = timeout_seconds
        self._result(self._answer, "recorded")

    def reader(self, tensor: torch.Tensor) -> Fetch:
        return self._file.reader(tensor, self._answer.result(0)["versions"])

    def release(self) -> None:
        """Raises UpdaterLostError: the state is not what was recorded; or another process has been begun meanwhile, and
        may have written over it."""
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
        if not self._answer.done():  # it is given up, and let go as soon as it is there
            self._answer.add_done_callback(self._give_up)
        elif self._answer.exception() is None:
            held = self._answer.result()
            answer = self._process.ask({"op": "release", "hold": held["number"]})
            if self._result(answer, "checked")["pid"] != held["pid"]:
                raise UpdaterLostError(
                    f"the process of the optimizer in {self._file.directory} has ended while its state was saved",
                    hint="It has been begun again. Save again",
                    directory=str(self._file.directory),
                )

    def _result(self, answer: Future[dict[str, Any]], what: str) -> dict[str, Any]:
        try:
            return answer.result(self._timeout_seconds)
        except TimeoutError as error:
            if isinstance(error, TierckptError):
                raise
            raise OperationTimeoutError(
                f"the state in {self._file.directory} was not {what}",
                hint="Look for a disk that hangs below it",
                waited_seconds=self._timeout_seconds,
            ) from None

    def _give_up(self, answer: Future[dict[str, Any]]) -> None:
        with contextlib.suppress(TierckptError):  # what it held ended with it
            self._process.ask({"op": "release", "hold": answer.result()["number"]})
