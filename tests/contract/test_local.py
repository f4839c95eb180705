"""The contract on a directory, directly and through fsspec."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.places import DirectoryPlace, FsspecDirectoryPlace
from tests.contract.store_contract import Place, StoreContract


class TestLocal(StoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return DirectoryPlace(tmp_path / "root")


class TestFsspecDirectory(StoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return FsspecDirectoryPlace(tmp_path / "root")
