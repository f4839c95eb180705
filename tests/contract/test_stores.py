"""The contract on each store: directly, and through fsspec."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.places import AzurePlace, DirectoryPlace, FsspecDirectoryPlace, MemoryPlace, S3fsPlace, S3Place
from tests.contract.store_contract import Place, StoreContract
from tests.services import AzureServer, S3Server


class TestLocal(StoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return DirectoryPlace(tmp_path / "root")


class TestFsspecDirectory(StoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return FsspecDirectoryPlace(tmp_path / "root")


class TestMemory(StoreContract):
    @pytest.fixture
    def place(self) -> Iterator[Place]:
        place = MemoryPlace(f"test-{secrets.token_hex(4)}/run")
        yield place
        place.fs.store.clear()
        place.fs.pseudo_dirs[:] = [""]


@pytest.mark.server
class TestMoto(StoreContract):
    @pytest.fixture
    def place(self, moto: S3Server, s3_uri: str) -> Place:
        return S3Place(moto, s3_uri)


@pytest.mark.server
class TestRgw(StoreContract):
    """Ceph: a real server."""

    @pytest.fixture
    def place(self, rgw: S3Server, rgw_uri: str) -> Place:
        return S3Place(rgw, rgw_uri)


@pytest.mark.server
@pytest.mark.slow
class TestS3fs(StoreContract):
    test_errors_are_in_no_reference_cycle = None  # fsspec's own ``sync`` names an error in a frame of its traceback

    @pytest.fixture
    def place(self, moto: S3Server, s3_uri: str) -> Place:
        return S3fsPlace(moto, s3_uri)


@pytest.mark.server
class TestAzurite(StoreContract):
    @pytest.fixture
    def place(self, azurite: AzureServer, az_uri: str) -> Place:
        return AzurePlace(azurite, az_uri)
