"""The contract on fsspec's memory://."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.contract.places import MemoryPlace
from tests.contract.store_contract import Place, StoreContract


class TestMemory(StoreContract):
    @pytest.fixture
    def place(self) -> Iterator[Place]:
        place = MemoryPlace(f"test-{secrets.token_hex(4)}/run")
        yield place
        place.fs.store.clear()
        place.fs.pseudo_dirs[:] = [""]
