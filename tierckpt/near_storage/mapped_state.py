"""An optimizer's state as file-backed tensors, for saves and restores."""

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
from ..replay.optimizers import Parameter, local_shard, shard_like
from ..save.shard_plan import Fetch
from .blocks import MASTER, BlockLayout
from .state_file import END_SECONDS, NewState, StateFile, Tensors, begin_state, current_state, directory_lock
from .updater_process import UpdaterProcess

SAVED_MASTER = "master"

State = dict[torch.Tensor, dict[str, torch.Tensor]]


class MappedState:
    def __init__(self, directory: Path, layout: BlockLayout, tensors: Mapping[str, torch.Tensor]) -> None:
        self.stepped: set[str] = set()
        self.view: State | None = None
        """State by parameter and name, sharded like the parameter."""
        self.saved: StateFile | None = None
        self._directory, self._layout, self._tensors = directory, layout, tensors
        self._new: NewState | None = None

    def exists(self) -> bool:
        return current_state(self._directory, self._layout) is not None

    def begin(self, values: Tensors, step: int) -> None:
        with directory_lock(self._directory, os.getpid()):
            begin_state(self._directory, self._layout, values, step)
        self.update_stepped([0] * len(self._layout.blocks))

    def update_stepped(self, versions: Sequence[int]) -> None:
        file = self._opened()
        found = [file.present(block, version) for block, version in zip(self._layout.blocks, versions, strict=True)]
        self.stepped = {key for block in found for key, names in block.items() if names - {MASTER}}

    @contextmanager
    def to_save(self, parameters: Iterable[Parameter]) -> Iterator[None]:
        self.saved = self._opened()
        with self._viewed(self.saved, parameters, lambda key, name: name == MASTER or key in self.stepped):
            yield

    @contextmanager
    def to_load(self, parameters: Iterable[Parameter]) -> Iterator[None]:
        """Give ``view`` a new state's tensors; ``commit`` makes it current."""
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
                name or SAVED_MASTER: shard_like(tensor, one.tensor)
                for name, tensor in tensors[one.key].items()
                if is_wanted(one.key, name)
            }
        try:
            yield
        finally:
            self.view = None

    @torch.no_grad()
    def commit(self, loaded: Mapping[str, Mapping[str, Any]], step: int) -> None:
        """Make the loaded state current. Missing masters are copied from the parameters."""
        assert self._new is not None
        new, self._new = self._new, None
        filled = {local_shard(one).data_ptr() for state in loaded.values() for one in state.values()}
        present = {}
        for key, tensors in new.file.all_tensors().items():
            present[key] = {name for name, tensor in tensors.items() if tensor.data_ptr() in filled} | {MASTER}
            if tensors[MASTER].data_ptr() not in filled:
                tensors[MASTER].copy_(local_shard(self._tensors[key].detach()))
        try:
            with directory_lock(self._directory, os.getpid()):
                new.commit(present, step)
        except BaseException:
            new.discard()
            raise
        self.update_stepped([0] * len(self._layout.blocks))

    def discard(self) -> None:
        if self._new is not None:
            self._new.discard()
        self._new = None

    def _opened(self) -> StateFile:
        found = current_state(self._directory, self._layout)
        assert found is not None
        return StateFile(found, self._layout)


class StateHold:
    """The state of a step, kept unchanged by the updater until ``release``. A ``dcp.stager.Source``."""

    def __init__(self, file: StateFile, process: UpdaterProcess, answer: Future[dict[str, Any]]) -> None:
        self._file, self._process, self._answer = file, process, answer
        self._lock = threading.Lock()
        self._is_released = False
        self._timeout_seconds = END_SECONDS

    def is_current(self, tensor: torch.Tensor) -> bool:
        return self._file.owns(tensor)

    def wait(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._result(self._answer, "recorded")

    def reader(self, tensor: torch.Tensor) -> Fetch:
        return self._file.reader(tensor, self._answer.result(0)["versions"])

    def release(self) -> None:
        """Raises UpdaterLostError: the state does not match its record, or may have been overwritten."""
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
        if not self._answer.done():
            self._answer.add_done_callback(self._give_up)
        elif self._answer.exception() is None:
            hold = self._answer.result()
            answer = self._process.ask({"op": "release", "hold": hold["number"]})
            if self._result(answer, "checked")["pid"] != hold["pid"]:
                raise UpdaterLostError(
                    f"the process of the optimizer in {self._file.directory} ended while its state was saved",
                    hint="The process was restarted. Save again",
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
                hint="Check whether its disk hangs",
                waited_seconds=self._timeout_seconds,
            ) from None

    def _give_up(self, answer: Future[dict[str, Any]]) -> None:
        with contextlib.suppress(TierckptError):  # the hold ended with the process
            self._process.ask({"op": "release", "hold": answer.result()["number"]})
