"""The contract on S3: moto and a real server (Ceph RGW) through obstore, moto through s3fs."""

from __future__ import annotations

import pytest

from tests.contract.places import S3fsPlace, S3Place
from tests.contract.store_contract import Place, StoreContract
from tests.services import S3Server

pytestmark = pytest.mark.server


class TestMoto(StoreContract):
    @pytest.fixture
    def place(self, moto: S3Server, s3_uri: str) -> Place:
        return S3Place(moto, s3_uri)


class TestRgw(StoreContract):
    @pytest.fixture
    def place(self, rgw: S3Server, rgw_uri: str) -> Place:
        return S3Place(rgw, rgw_uri)


@pytest.mark.slow
class TestS3fs(StoreContract):
    @pytest.fixture
    def place(self, moto: S3Server, s3_uri: str) -> Place:
        return S3fsPlace(moto, s3_uri)
