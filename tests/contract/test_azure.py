"""The contract on Azure Blob: Azurite through obstore."""

from __future__ import annotations

import pytest

from tests.contract.places import AzurePlace
from tests.contract.store_contract import Place, StoreContract
from tests.services import AzureServer

pytestmark = pytest.mark.server


class TestAzurite(StoreContract):
    @pytest.fixture
    def place(self, azurite: AzureServer, az_uri: str) -> Place:
        return AzurePlace(azurite, az_uri)
