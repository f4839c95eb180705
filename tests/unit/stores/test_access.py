"""Values of environment variables: credentials of Azure and Google, empty ones, and names of certificates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tierckpt.errors import ConfigError, PermissionDeniedError
from tierckpt.redaction import redact
from tierckpt.stores.access import Found, azure_access, certificates, gcs_access, tls_context, variable

ACCOUNT = {"AZURE_STORAGE_ACCOUNT_NAME": "me"}
SAS = "sv=2024-11-04&sig=abc"
OTHER = {"AZURE_STORAGE_ACCOUNT_NAME": "other"}
PRINCIPAL = {"AZURE_CLIENT_ID": "c", "AZURE_TENANT_ID": "t", "AZURE_CLIENT_SECRET": "s"}
EMULATOR_STRING = f"BlobEndpoint=http://127.0.0.1:10000/acct;SharedAccessSignature={SAS}"
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
        ({"AZURE_STORAGE_SAS_TOKEN": SAS} | PRINCIPAL, "sas_token", {"sas_key": SAS}),
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
            {"AZURE_STORAGE_CONNECTION_STRING": EMULATOR_STRING},
            "sas_token",
            {"account_name": "acct", "endpoint": "http://127.0.0.1:10000/acct"},
        ),
        (PRINCIPAL, "client_secret", {"client_id": "c", "tenant_id": "t", "client_secret": "s"}),
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


# --- empty variables, and certificates ------------------------------------------------------------------------------


def test_the_first_nonempty_variable_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AWS_ONE": "", "AWS_TWO": " \n", "AWS_THREE": " x\r\n"}.items():
        monkeypatch.setenv(name, value)
    found = variable("AWS_ONE", "AWS_TWO", "AWS_THREE")
    assert (found, found.source) == ("x", "AWS_THREE")
    assert not variable("AWS_ONE", "AWS_NOT_SET")


def test_empty_variables_are_removed_from_the_process_environment() -> None:
    """In a child process: the C library's environment changes, which the client reads."""
    code = (
        "import os, subprocess\n"
        "from tierckpt.stores.access import drop_empty\n"
        "drop_empty()\n"
        "print(subprocess.run(['env'], capture_output=True, text=True).stdout)\n"
    )
    empty = ("AWS_CHECKSUM_ALGORITHM", "AZURE_STORAGE_ENCRYPTION_KEY", "GOOGLE_SERVICE_ACCOUNT", "SSL_CERT_FILE")
    environment = {"PATH": os.environ["PATH"], "AWS_REGION": "eu-west-1", "OTHER": "", **dict.fromkeys(empty, " ")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    left = {line.partition("=")[0] for line in done.stdout.splitlines()}
    assert {"AWS_REGION", "OTHER"} <= left
    assert not left & set(empty)


def test_certificates_from_every_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authorities = [Authority(tmp_path, name) for name in ("aws", "profile", "requests", "system")]
    aws, profile, requests, system = (authority.path.read_text().strip() for authority in authorities)
    assert certificates() == ""
    monkeypatch.setenv("SSL_CERT_FILE", str(authorities[3].path))
    assert certificates() == system
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authorities[2].path))
    assert certificates() == f"{requests}\n{system}"
    of_aws, of_profile = Found(str(authorities[0].path), "AWS_CA_BUNDLE"), Found(str(authorities[1].path), "ca_bundle")
    assert certificates(Found(), of_profile) == f"{profile}\n{system}"
    assert certificates(of_aws, of_profile) == f"{aws}\n{system}"
    before = len(tls_context("").get_ca_certs())
    assert len(tls_context(certificates(of_aws)).get_ca_certs()) >= before + 1


def test_a_bundle_with_comments_and_a_directory(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pem = authority.path.read_text()
    bundle = tmp_path / "bundle"
    bundle.write_text(f"# Autorité privée\n{pem}\n# noch eine\n{pem}", encoding="latin-1")
    assert certificates(Found(str(bundle), "AWS_CA_BUNDLE")).count("BEGIN") == 2
    directory = tmp_path / "directory"
    directory.mkdir()
    (directory / "1.pem").write_text(pem)
    assert certificates(Found(str(directory), "AWS_CA_BUNDLE")) == pem.strip()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        ("no certificate", "no certificates in PEM"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "no certificates in PEM"),
    ],
)
@pytest.mark.parametrize("name", ["AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_invalid_bundles_are_rejected(
    content: str | None, said: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bundle.pem"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(name, str(path))
    with pytest.raises(ConfigError, match=said) as caught:
        certificates(variable("AWS_CA_BUNDLE"))
    assert name in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_key_is_redacted_without_its_line_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients and their messages use the value without the line feed."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canarySecret0123456789\n")
    assert "canarySecret0123456789" not in redact("signed with canarySecret0123456789 today")
