"""Messages between the ranks of a job, through the rendezvous store of ``torch.distributed``.

Needs no collective, so any thread may call it (P8). Imports no torch: ``adoption`` also runs without it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

from . import torch_internals
from .errors import CommitAbandonedError, OperationTimeoutError, TierckptError, from_json
from .resources import start_thread

T = TypeVar("T")

ANSWER_MARGIN_SECONDS = 0.5
"""Extra wait for the store's answer after the caller's timeout."""
_MIN_SECONDS = 0.001  # the store treats 0 as no timeout

_uses: dict[str, int] = {}


class RankStore:
    """JSON messages under one prefix of the store, which is used once. No received value is executed (P9).

    Each request runs on its own thread, and the caller abandons it after ``timeout_seconds``, even if the process that
    hosts the store is stopped. A private connection blocks no other user of the store. A rank deletes its own values,
    once a later message shows that every reader has them. Values of ``broadcast``, about a hundred bytes each, stay
    until the job ends.
    """

    def __init__(
        self,
        prefix: str,
        timeout_seconds: float,
        ranks: tuple[int, int] | None = None,
        connect: Callable[[], Any] | None = None,
    ) -> None:
        self.prefix, self.timeout_seconds = prefix, timeout_seconds
        self.rank, self.world_size = ranks or ranks_of_job() or (0, 1)
        self._previous = ""
        self._connect = connect or own_store
        self._store: Any = None

    @classmethod
    def numbered(cls, prefix: str, timeout_seconds: float, ranks: tuple[int, int] | None = None) -> RankStore:
        """The n-th call of each rank for ``prefix`` has the same keys."""
        count = _uses[prefix] = _uses.get(prefix, 0) + 1
        store = cls(f"{prefix}/{count}", timeout_seconds, ranks)
        store._previous = f"{prefix}/{count - 1}" if count > 1 else ""
        return store

    def put(self, name: str, value: Any) -> None:
        """Write JSON, or an exception. Raises OperationTimeoutError."""
        body = {"error": portable(value).to_json()} if isinstance(value, BaseException) else {"value": value}
        data = json.dumps(body, default=str)
        self._ask(lambda store: store.set(f"{self.prefix}/{name}", data), f"cannot write {name} for the other ranks")

    def wait(
        self, names: Sequence[str], message: str, hint: str = "", timeout_seconds: float | None = None
    ) -> list[Any]:
        """Return the values of ``names``. Raises OperationTimeoutError with ``message`` and the ``missing`` names."""
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        keys = {name: f"{self.prefix}/{name}" for name in names}
        missing: list[str] = []

        def request(store: Any) -> list[Any]:
            try:
                store.wait(list(keys.values()), timedelta(seconds=max(seconds, _MIN_SECONDS)))
            except Exception:
                missing.extend(name for name, key in keys.items() if not store.check([key]))
                raise
            return [_decoded(store.get(key)) for key in keys.values()]

        return self._ask(request, message, hint, seconds, missing)

    def peek(self, names: Sequence[str]) -> list[Any] | None:
        """Return None if a value is missing. Has no deadline."""
        store = self._store = self._store or self._connect()
        keys = [f"{self.prefix}/{name}" for name in names]
        return [_decoded(store.get(key)) for key in keys] if store.check(keys) else None

    def append(self, name: str, text: str) -> str:
        """Append ASCII ``text``; return the text of all ranks, in order of arrival."""
        key = f"{self.prefix}/{name}"

        def request(store: Any) -> str:
            store.append(key, text)
            return bytes(store.get(key)).decode("ascii", "replace")

        return self._ask(request, f"cannot add to {name} for the other ranks")

    def delete(self, name: str, prefix: str | None = None) -> None:
        """Never fails: the store may be gone with rank 0."""
        key = f"{self.prefix if prefix is None else prefix}/{name}"
        with contextlib.suppress(OperationTimeoutError):
            self._ask(lambda store: store.delete_key(key), "", seconds=0.0)

    def broadcast(self, name: str, work: Callable[[], T], message: str, hint: str = "") -> T:
        """Run ``work`` on rank 0; return its value, or raise its error, on every rank."""
        if self.rank == 0:
            try:
                value = work()
            except Exception as error:
                self.put(name, error)
                raise
            self.put(name, value)
            return value
        [received] = self.wait([name], message, hint)
        if isinstance(received, TierckptError):
            raise received
        return received  # type: ignore[no-any-return]

    def all_gather(self, name: str, value: Any, message: str, hint: str = "") -> list[Any]:
        """Return the values by rank. Raises OperationTimeoutError."""
        self.put(f"{name}/{self.rank}", value)
        values = self.wait([f"{name}/{rank}" for rank in range(self.world_size)], message, hint)
        if self._previous:  # every rank has written here
            self.delete(f"{name}/{self.rank}", self._previous)
        return values

    def _ask(
        self,
        request: Callable[[Any], T],
        message: str,
        hint: str = "",
        seconds: float | None = None,
        missing: Sequence[str] = (),
    ) -> T:
        answer: Future[T] = Future()

        def run() -> None:
            try:
                if self._store is None:
                    self._store = self._connect()
                answer.set_result(request(self._store))
            except BaseException as error:
                answer.set_exception(error)

        seconds = self.timeout_seconds if seconds is None else seconds
        start_thread(Thread(target=run, name="tierckpt-ranks", daemon=True))
        try:
            return answer.result(seconds + ANSWER_MARGIN_SECONDS)
        except Exception as error:  # errors of the store are RuntimeErrors
            raise OperationTimeoutError(
                message,
                hint=hint,
                rank=self.rank,
                missing=list(missing) or None,
                waited_seconds=seconds,
                store=f"{type(error).__name__}: {error}".split("\n")[0][:200],
            ) from error


def _decoded(data: bytes) -> Any:
    body = json.loads(data)
    return from_json(body["error"]) if "error" in body else body["value"]


def portable(error: BaseException) -> TierckptError:
    """Quote ``error``: another rank may lack its class."""
    if isinstance(error, TierckptError):
        return error
    return CommitAbandonedError(f"{type(error).__name__}: {error}")


def ranks_of_job() -> tuple[int, int] | None:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def own_store() -> Any:
    store: Any = torch_internals.get_default_store()
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store
