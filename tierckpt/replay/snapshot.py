"""What a window of a multi-step save comes to, and how it is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import CheckpointError
from .apply import Key
from .redo import Conditions, Exact, Redo
from .tree import fill, like


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A training state in host memory, all of one version. Nothing in it shares memory with training."""

    state: Any
    """What ``take`` returned, its tensors in host memory."""
    steps: int
    """Optimizer steps since the window was opened: the state is that after the last of them."""
    moved_bytes: int
    blocked_seconds: float
    """How long training waited, in all calls and steps of the window."""
    fallback: str = ""
    """Why the state was copied whole. '' when it was copied in parts."""
    waited_bytes: int = 0
    """What forward and backward passes did not hide: training waited until these were copied."""
    inexact: str = ""
    """What was not as in training when steps were made again, so that the last bits differ. '' for bit for bit."""
    conditions: Conditions | None = None
    """What training was on, when steps were made again or are to be."""
    redo: Redo | None = None
    """The parts, still at several versions: ``redo.fold()`` brings them to the last one. ``state`` has none of them."""
    tree: Any = None
    """With ``redo``: what ``take`` returned, with gaps where the optimizer's tensors were (``tree.gaps``)."""
    held: Mapping[Key, torch.Tensor] = field(default_factory=dict, repr=False)

    def fold(self, exact: Exact = "required") -> Snapshot:
        """Return this with ``state``, all of one version: itself, unless its parts are still at several.

        Raises what ``Redo.fold`` raises, and takes what that takes. Not while something else folds ``redo``.
        """
        if self.redo is None:
            return self
        inexact = self.redo.fold(exact)
        state = put(self.tree, self.held, self.redo.tensors)
        return replace(self, state=state, inexact=inexact, redo=None, tree=None, held={})


class SnapshotFuture(Future[Snapshot]):
    """Of a window. Whoever waits for it on the thread that trains is not waiting for a step that would copy whole what
    could not be brought to one version: that is done here."""

    def __init__(self, end_of_step: Callable[[], None]) -> None:
        super().__init__()
        self.sealed: Future[None] | None = None
        """Done when the parts are at one version, or cannot be."""
        self._end_of_step, self._thread = end_of_step, threading.get_ident()

    def result(self, timeout: float | None = None) -> Snapshot:
        sealed, is_here = self.sealed, threading.get_ident() == self._thread and not self.done()
        if is_here and sealed is None and timeout != 0:
            raise CheckpointError(
                "a window is waited for by the thread that is to make the rest of its steps",
                hint="Call end_of_step after each of them, and result() then",
            )
        if is_here and sealed is not None and futures.wait([sealed], timeout).done and not self.done():
            self._end_of_step()
        return super().result(timeout)


def put(tree: Any, held: Mapping[Key, torch.Tensor], copies: Mapping[Key, torch.Tensor]) -> Any:
    """Return ``tree`` with ``copies`` in its gaps, each as the kind of tensor that ``held`` has for it."""
    return fill(tree, {place: like(tensor, copies[place]) for place, tensor in held.items() if place in copies})
