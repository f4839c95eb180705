"""Empty variables, and certificates named by variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.certificates import Authority
from tierckpt.errors import ConfigError
from tierckpt.redaction import redact
from tierckpt.stores.access import Found, certificates, tls_context, variable


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
