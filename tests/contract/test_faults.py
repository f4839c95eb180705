"""The fault-injecting store: each configured fault fires, and is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.faults import Fault, FaultyStore, Kind
from tests.contract.places import DirectoryPlace
from tests.contract.store_contract import Pieces, Place, StoreContract, keys_of
from tierckpt.errors import PermissionDeniedError, StoreUnavailableError
from tierckpt.stores.base import Store
from tierckpt.stores.local import LocalStore
from tierckpt.types import ByteRange


class TestFaultlessIsAStore(StoreContract):
    """With an empty script it keeps the contract of the store inside."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        class Wrapped(DirectoryPlace):
            def open(self) -> Store:
                return FaultyStore(super().open())

        return Wrapped(tmp_path / "root")


@pytest.fixture
def inner(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


async def test_unavailable_happens_as_often_as_told(inner: LocalStore) -> None:
    store = FaultyStore(inner, [Fault("put", times=2)])
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            await store.put("key", b"1")
        assert await keys_of(store) == []
    await store.put("key", b"1")
    assert store.fired == {"put:unavailable": 2}


async def test_faults_choose_their_keys_and_their_turn(inner: LocalStore) -> None:
    store = FaultyStore(inner, [Fault("put", key="*.json", skip=1)])
    await store.put("a.bin", b"1")
    await store.put("a.json", b"1")
    with pytest.raises(StoreUnavailableError):
        await store.put("b.json", b"1")
    await store.put("c.json", b"1")
    assert store.fired.total() == 1


async def test_a_lost_answer_is_a_put_that_happened(inner: LocalStore) -> None:
    store = FaultyStore(inner, [Fault("put", Kind.LOST_ANSWER)])
    with pytest.raises(StoreUnavailableError):
        await store.put("key", b"data")
    assert await inner.get("key") == b"data"


async def test_any_error_can_be_asked_for(inner: LocalStore) -> None:
    error = PermissionDeniedError("revoked")
    store = FaultyStore(inner, [Fault("list", error=error)])
    with pytest.raises(PermissionDeniedError) as caught:
        await keys_of(store)
    assert caught.value is error


async def test_truncate_and_corrupt(inner: LocalStore) -> None:
    data = bytes(range(200))
    await inner.put("key", data)
    script = [Fault("get_range", Kind.TRUNCATE), Fault("get_range", Kind.CORRUPT), Fault("get", Kind.CORRUPT)]
    store = FaultyStore(inner, script)
    short = await store.get_range("key", ByteRange(0, 200))
    assert len(short) < 200
    assert data.startswith(bytes(short))
    for spoiled in (await store.get_range("key", ByteRange(0, 200)), await store.get("key")):
        differing = [left ^ right for left, right in zip(bytes(spoiled), data, strict=True) if left != right]
        assert len(differing) == 1
        assert differing[0].bit_count() == 1
    assert bytes(await store.get_range("key", ByteRange(0, 200))) == data
    assert store.fired == {"get_range:truncate": 1, "get_range:corrupt": 1, "get:corrupt": 1}


@pytest.mark.parametrize("after_bytes", [0, 5, 10, 25, 30, 1000])
async def test_a_cut_transfer_leaves_nothing(inner: LocalStore, tmp_path: Path, after_bytes: int) -> None:
    store = FaultyStore(inner, [Fault("put_stream", Kind.CUT, after_bytes=after_bytes)])
    source = Pieces([b"x" * 10] * 3)
    with pytest.raises(StoreUnavailableError):
        await store.put_stream("key", source.iterate(), 30)
    assert source.closed
    assert DirectoryPlace(tmp_path).raw_keys() == set()
    await store.put_stream("key", Pieces([b"x" * 10] * 3).iterate(), 30)
    assert await inner.get("key") == b"x" * 30


async def test_random_faults_repeat_with_their_seed(inner: LocalStore) -> None:
    await inner.put("key", b"1")

    async def run(seed: int) -> list[bool]:
        store = FaultyStore(inner, probabilities={"get": 0.3, "get:corrupt": 0.2}, seed=seed)
        outcomes = []
        for _ in range(100):
            try:
                outcomes.append(await store.get("key") == b"1")
            except StoreUnavailableError:
                outcomes.append(False)
        assert store.fired["get:unavailable"] > 10
        assert store.fired["get:corrupt"] > 5
        assert outcomes.count(False) == store.fired.total()
        return outcomes

    assert await run(1) == await run(1)
    assert await run(1) != await run(2)


@pytest.mark.parametrize(("verb", "kind"), [("nothing", Kind.DELAY), ("put", Kind.TRUNCATE), ("get", Kind.CUT)])
def test_a_fault_that_cannot_happen_is_refused(verb: str, kind: Kind) -> None:
    with pytest.raises(ValueError, match=verb):
        Fault(verb, kind)
