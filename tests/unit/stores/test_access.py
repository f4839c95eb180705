"""Values that ``azure_access`` and ``gcs_access`` resolve from environment variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierckpt.errors import ConfigError, PermissionDeniedError
from tierckpt.stores.access import azure_access, gcs_access

ACCOUNT = {"AZURE_STORAGE_ACCOUNT_NAME": "me"}
SAS = "sv=2024-11-04&sig=abc"
OTHER = {"AZURE_STORAGE_ACCOUNT_NAME": "other"}
KEY_STRING = "AccountName=me;AccountKey=a2V5MQ==;EndpointSuffix=core.windows.net"
STRING = f"BlobEndpoint=https://me.blob.core.windows.net/;SharedAccessSignature=?{SAS}"


def options(access: Any, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found: dict[str, Any] = access("container").options
    return found


@pytest.mark.parametrize(
    ("environment", "kind", "expected"),
    [
        ({"AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}, "access_key", {"account_key": "a2V5"}),
        ({"AZURE_STORAGE_KEY": " a2V5\n"}, "access_key", {"account_key": "a2V5"}),
        ({"AZURE_STORAGE_SAS_TOKEN": SAS, "AZURE_STORAGE_ACCOUNT_KEY": ""}, "sas_token", {"sas_key": SAS}),
        ({"AZURE_STORAGE_SAS_TOKEN": f"?{SAS}\n"}, "sas_token", {"sas_key": SAS}),
        (
            {
                "AZURE_STORAGE_SAS_TOKEN": SAS,
                "AZURE_CLIENT_ID": "c",
                "AZURE_TENANT_ID": "t",
                "AZURE_CLIENT_SECRET": "s",
            },
            "sas_token",
            {"sas_key": SAS},
        ),
        (
            OTHER | {"AZURE_STORAGE_CONNECTION_STRING": STRING, "AZURE_STORAGE_ACCOUNT_KEY": "b3RoZXI="},
            "sas_token",
            {"account_name": "me", "sas_key": SAS, "endpoint": "https://me.blob.core.windows.net"},
        ),
        (
            OTHER | {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{KEY_STRING}"},
            "access_key",
            {"account_name": "me", "account_key": "a2V5MQ==", "endpoint": "http://me.blob.core.windows.net"},
        ),
        (
            {
                "AZURE_STORAGE_CONNECTION_STRING": f"BlobEndpoint=http://127.0.0.1:10000/acct;SharedAccessSignature={SAS}"
            },
            "sas_token",
            {"account_name": "acct", "endpoint": "http://127.0.0.1:10000/acct"},
        ),
        (
            {"AZURE_CLIENT_ID": "c", "AZURE_TENANT_ID": "t", "AZURE_CLIENT_SECRET": "s"},
            "client_secret",
            {"client_id": "c", "tenant_id": "t", "client_secret": "s"},
        ),
        (
            {"AZURE_CLIENT_ID": "c", "IDENTITY_ENDPOINT": "http://169.254.129.1/msi"},
            "managed_identity",
            {"client_id": "c", "msi_endpoint": "http://169.254.129.1/msi"},
        ),
        ({"AZURE_USE_AZURE_CLI": "true"}, "azure_cli", {}),
        ({"AZURE_SKIP_SIGNATURE": "true", "AZURE_STORAGE_ACCOUNT_KEY": ""}, "bearer_token", {"skip_signature": "true"}),
        (
            {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5", "AZURE_STORAGE_ENDPOINT": ""},
            "access_key",
            {"endpoint": "https://me.blob.core.windows.net"},
        ),
    ],
)
def test_azure_sets_exactly_one_credential(
    environment: dict[str, str], kind: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the client uses the first variable that it finds, empty or not."""
    found = options(azure_access, ACCOUNT | environment, monkeypatch)
    assert found["credential_type"] == kind
    assert found | expected == found


def test_azure_workload_identity_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = {"AZURE_CLIENT_ID": "c", "AZURE_TENANT_ID": "t", "AZURE_FEDERATED_TOKEN_FILE": str(tmp_path / "token")}
    with pytest.raises(ConfigError, match="AZURE_FEDERATED_TOKEN_FILE"):
        options(azure_access, ACCOUNT | pod, monkeypatch)
    (tmp_path / "token").write_text("jwt")
    assert options(azure_access, {}, monkeypatch)["credential_type"] == "workload_identity"


@pytest.mark.parametrize(
    "environment",
    [{}, {"AZURE_STORAGE_ACCOUNT_KEY": "", "AZURE_STORAGE_SAS_TOKEN": " "}, {"AZURE_CLIENT_SECRET": "no tenant"}],
)
def test_azure_without_credentials(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PermissionDeniedError, match="no credentials found"):
        options(azure_access, ACCOUNT | environment, monkeypatch)


@pytest.mark.parametrize("name", ["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_ID"])
def test_azure_rejects_a_line_feed_in_a_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=name):
        options(azure_access, ACCOUNT | {name: "one\ntwo"}, monkeypatch)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("not json", "no JSON"),
        ("[]", "no JSON"),
        ('{"type": "external_account"}', "type 'external_account', which is not supported"),
    ],
)
def test_gcs_credentials_file(content: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=said) as caught:
        options(gcs_access, {"GOOGLE_APPLICATION_CREDENTIALS": str(path)}, monkeypatch)
    assert "GOOGLE_APPLICATION_CREDENTIALS" in str(caught.value)
    assert str(path) in str(caught.value)


def test_gcs_service_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key.json"
    path.write_text(json.dumps({"type": "service_account"}))
    assert options(gcs_access, {"GOOGLE_APPLICATION_CREDENTIALS": f"{path}\n"}, monkeypatch) == {
        "application_credentials": str(path)
    }
    path.write_text(json.dumps({"gcs_base_url": "http://127.0.0.1:4443", "disable_oauth": True}))
    assert options(gcs_access, {"GOOGLE_SERVICE_ACCOUNT": str(path)}, monkeypatch) == {"service_account": str(path)}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"STORAGE_EMULATOR_HOST": "localhost:4443"}, {"base_url": "http://localhost:4443", "skip_signature": "true"}),
        ({"STORAGE_EMULATOR_HOST": "http://gcs:4443/"}, {"base_url": "http://gcs:4443", "skip_signature": "true"}),
        (
            {"GOOGLE_BASE_URL": "https://gcs.example", "STORAGE_EMULATOR_HOST": "", "GOOGLE_SKIP_SIGNATURE": "true"},
            {"base_url": "https://gcs.example", "skip_signature": "true"},
        ),
        ({"GOOGLE_BEARER_TOKEN": " ya29\n"}, {"bearer_token": "ya29"}),
    ],
)
def test_gcs_variables(environment: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert options(gcs_access, environment, monkeypatch) == expected


def test_gcs_default_credentials_follow_cloudsdk_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("HOME")
    with pytest.raises(PermissionDeniedError):
        options(gcs_access, {}, monkeypatch)
    (tmp_path / "application_default_credentials.json").write_text('{"type": "authorized_user"}')
    assert options(gcs_access, {}, monkeypatch)["application_credentials"].startswith(str(tmp_path))
