"""The store opened for each URI, and the error if there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tierckpt.config import Settings
from tierckpt.errors import ConfigError, MissingExtraError, PermissionDeniedError, StoreUnavailableError
from tierckpt.format.layout import parse_uri
from tierckpt.stores import open_store, retry
from tierckpt.stores.access import azure_access, parse_connection_string
from tierckpt.stores.base import Store


def open_uri(uri: str) -> Store:
    return open_store(parse_uri(uri), Settings.load())


@pytest.mark.parametrize(
    ("uri", "kind"),
    [
        ("/mount/run", "LocalStore"),
        ("file:///mount/run", "LocalStore"),
        ("s3://bucket/run", "RemoteStore"),
        ("s3a://bucket/run", "RemoteStore"),
        ("az://container/run", "RemoteStore"),
        ("abfss://container@account.dfs.core.windows.net/run", "RemoteStore"),
        ("gs://bucket/run", "RemoteStore"),
        ("memory://run", "UniversalStore"),
    ],
)
def test_scheme_to_store(uri: str, kind: str) -> None:
    assert type(open_uri(uri)).__name__ == kind


def test_unknown_scheme() -> None:
    with pytest.raises(ConfigError) as caught:
        open_uri("nosuch://place/run")
    assert "'nosuch'" in caught.value.message
    assert "s3://" in caught.value.hint


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    with pytest.raises(MissingExtraError) as caught:
        open_uri("sftp://host/run")
    assert "sftp" in caught.value.message and "paramiko" in caught.value.message


def test_importing_stores_imports_no_client() -> None:
    code = (
        "import sys, tierckpt.stores, tierckpt.stores.base, tierckpt.stores.local\n"
        "heavy = {'obstore', 'fsspec', 's3fs', 'adlfs', 'boto3', 'azure', 'torch', 'aiohttp', 'tenacity'}\n"
        "found = heavy & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_development_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "UseDevelopmentStorage=true")
    access = azure_access("container")
    assert access.endpoint.startswith("http://127.0.0.1:10000")
    assert access.options == {"use_emulator": True}
    assert open_uri("az://container/run").uri == "az://container/run"


def test_a_connection_string_without_an_account_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_connection_string("AccountKey=secret")
    assert "secret" not in str(caught.value)


async def test_the_emulator_address_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """UseDevelopmentStorage reaches a local address over plain HTTP: refused here, not denied, not https."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "UseDevelopmentStorage=true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(retry, "RETRIES_MAX", 0)
    store = open_store(parse_uri("az://container/run"), Settings.load())
    with pytest.raises(StoreUnavailableError):
        await store.head("key")


async def test_public_buckets_need_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_uri("s3://bucket/run")
    with pytest.raises(PermissionDeniedError):
        await store.head("key")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(retry, "RETRIES_MAX", 0)
    store = open_store(parse_uri("s3://bucket/run"), Settings.load())
    with pytest.raises(StoreUnavailableError):
        await store.head("key")
