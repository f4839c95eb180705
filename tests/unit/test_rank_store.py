"""Messages of ranks through a rendezvous store: values, errors, deadlines, deletion; with a real TCPStore too."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import Any, TypeVar

import pytest
from torch.distributed import HashStore, TCPStore

from tests.services import REPOSITORY
from tierckpt import rank_store
from tierckpt.errors import CapacityError, CommitAbandonedError, OperationTimeoutError, StoreError, from_json
from tierckpt.rank_store import RankStore
from tierckpt.types import Tier

T = TypeVar("T")

WORLD = 3
SECONDS = 20.0
HOST = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared() -> Any:
    return HashStore()


def on_all(shared: Any, work: Callable[[RankStore], T], timeout_seconds: float = SECONDS) -> list[T | Exception]:
    """Return the result or error of ``work`` on each rank: a thread with a store of its own."""

    def run(rank: int) -> T | Exception:
        try:
            return work(RankStore("tierckpt/test", timeout_seconds, (rank, WORLD), connect=lambda: shared))
        except Exception as error:
            return error

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(run, range(WORLD)))


def test_every_rank_gets_the_values_of_all_by_rank(shared: Any) -> None:
    found = on_all(shared, lambda store: store.all_gather("size", {"of": [store.rank, None, "x"]}, "late"))
    assert found == [[{"of": [rank, None, "x"]} for rank in range(WORLD)]] * WORLD


def test_rank_0_alone_works_for_all(shared: Any) -> None:
    calls: list[int] = []

    def find() -> str:
        calls.append(1)
        return "step-7"

    assert on_all(shared, lambda store: store.broadcast("found", find, "late")) == ["step-7"] * WORLD
    assert calls == [1]


def test_an_error_of_rank_0_is_the_same_error_on_all(shared: Any) -> None:
    def fail() -> str:
        raise StoreError("the store refuses", hint="Ask again", tier=Tier.SHARED, waited_seconds=1.5)

    for error in on_all(shared, lambda store: store.broadcast("found", fail, "late")):
        assert type(error) is StoreError
        assert (error.message, error.hint, error.context["waited_seconds"]) == ("the store refuses", "Ask again", 1.5)
        assert str(error.context["tier"]) == "shared"


def test_an_error_of_another_class_is_quoted(shared: Any) -> None:
    def fail() -> str:
        raise KeyError("absent")

    first, *others = on_all(shared, lambda store: store.broadcast("found", fail, "late"))
    assert isinstance(first, KeyError)
    assert {(type(error), str(error)) for error in others} == {(CommitAbandonedError, "KeyError: 'absent'")}


def test_errors_come_back_from_json_and_unknown_ones_by_name() -> None:
    error = CapacityError("no room", hint="Delete", needed_bytes=7)
    made = from_json(json.loads(json.dumps(error.to_json())))
    assert (type(made), made.message, made.hint, made.context) == (type(error), "no room", "Delete", error.context)
    assert str(from_json({"error": "TierckptErrorX", "message": "odd"})) == "TierckptErrorX: odd"
    assert str(from_json({"error": "Any", "message": "odd"})) == "Any: odd"  # a name there, and no error


def test_a_wait_ends_at_its_deadline_and_names_who_is_missing(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put, both = RankStore.put, Barrier(2)

    def put_and_meet(*given: Any) -> None:
        put(*given)
        both.wait(SECONDS)

    def meet(store: RankStore) -> Any:
        return store.all_gather("size", 1, "not every rank has come", "Wait") if store.rank != 1 else None

    monkeypatch.setattr(RankStore, "put", put_and_meet)
    monkeypatch.setattr(rank_store, "ANSWER_MARGIN_SECONDS", 60.0)

    first, _, last = on_all(shared, meet, 0.2)
    for rank, error in ((0, first), (2, last)):
        assert isinstance(error, OperationTimeoutError)
        assert (error.message, error.hint) == ("not every rank has come", "Wait")
        assert (error.context["rank"], error.context["missing"]) == (rank, ["size/1"])


def test_nothing_that_is_received_is_executed(shared: Any) -> None:
    shared.set("tierckpt/test/found", pickle.dumps("step-7"))
    error = on_all(shared, lambda store: store.wait(["found"], "late") if store.rank else None)[1]
    assert isinstance(error, OperationTimeoutError)
    assert isinstance(error.__cause__, ValueError)


def test_peek_returns_at_once(shared: Any) -> None:
    store = RankStore("tierckpt/test", SECONDS, (0, 1), connect=lambda: shared)
    assert store.peek(["a", "b"]) is None
    store.put("a", 1)
    assert store.peek(["a", "b"]) is None
    store.put("b", 2)
    assert store.peek(["a", "b"]) == [1, 2]
    store.delete("a")
    assert store.peek(["a"]) is None


def test_each_use_of_a_prefix_has_its_own_keys_and_removes_the_last(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_store, "own_store", lambda: shared)
    for value in range(4):
        store = RankStore.numbered("tierckpt/uses", SECONDS, (0, 1))
        assert store.prefix == f"tierckpt/uses/{value + 1}"
        assert store.all_gather("size", value, "late") == [value]
    kept = [use for use in range(1, 5) if shared.check([f"tierckpt/uses/{use}/size/0"])]
    assert kept == [4]


def test_values_are_appended(shared: Any) -> None:
    store = RankStore("tierckpt/peers", SECONDS, (0, 1), connect=lambda: shared)
    assert store.append("job", "a,") == "a,"
    assert store.append("job", "b,") == "a,b,"


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_stopped_host_of_the_store_costs_the_deadline_and_no_more() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOST], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as host:
        try:
            assert host.stdout is not None
            port = int(host.stdout.readline())
            tcp = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=300), wait_for_workers=False)
            store = RankStore("tierckpt/test", SECONDS, (1, 2), connect=lambda: tcp)
            store.put("mine", 1)
            store.timeout_seconds = 1.0
            host.send_signal(signal.SIGSTOP)
            for request in (lambda: store.wait(["other"], "late"), lambda: store.append("y", "z")):
                with pytest.raises(OperationTimeoutError):
                    request()
            store.delete("mine")
        finally:
            host.kill()
