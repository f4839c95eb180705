"""``s3_access`` resolves variables and profiles as botocore does."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.services import S3Server
from tierckpt.errors import ConfigError, MissingExtraError, PermissionDeniedError
from tierckpt.stores.access import Access
from tierckpt.stores.aws import s3_access

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
CONFIG = """
[default]
region = eu-west-3

[profile plain]
endpoint_url = https://plain.example
region = eu-central-1

[profile lab]
region = eu-north-1
endpoint_url = https://all.example
services = lab services

[services "lab services"]
s3 =
  endpoint_url = https://s3.example:9000
dynamodb =
  endpoint_url = https://dynamo.example

[profile "other service"]
[profile dynamo]
services = dynamo
endpoint_url = https://all.example
[services dynamo]
dynamodb =
  endpoint_url = https://dynamo.example

[profile ignores]
endpoint_url = https://all.example
ignore_configured_endpoint_urls = true

[profile china]
region = cn-north-1

[profile dual]
region = us-west-2
use_dualstack_endpoint = true

[profile virtual]
endpoint_url = https://oss.example
s3 =
  addressing_style = virtual

[profile keys]
aws_access_key_id = of-config
aws_secret_access_key = config-secret

[profile role]
role_arn = arn:aws:iam::123456789012:role/trainer
source_profile = keys

[profile sso]
sso_session = corp
sso_account_id = 123456789012
sso_role_name = trainer
[sso-session corp]
sso_region = us-east-1
sso_start_url = https://corp.awsapps.com/start

[profile astray]
services = nowhere
"""
CREDENTIALS = """
[keys]
aws_access_key_id = of-credentials
aws_secret_access_key = b
aws_session_token = t
[in credentials only]
aws_access_key_id = c
aws_secret_access_key = d
endpoint_url = https://credentials.example
"""


@pytest.fixture(autouse=True)
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in {"AWS_CONFIG_FILE": CONFIG, "AWS_SHARED_CREDENTIALS_FILE": CREDENTIALS}.items():
        path = tmp_path / variable
        path.write_text(text)
        monkeypatch.setenv(variable, str(path))


def resolved(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Access:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return s3_access("bucket")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"AWS_PROFILE": "plain"},
        {"AWS_DEFAULT_PROFILE": "plain"},
        {"AWS_DEFAULT_PROFILE": "plain", "AWS_PROFILE": "lab"},
        {"AWS_PROFILE": ""},
        {"AWS_PROFILE": "lab"},
        {"AWS_PROFILE": "other service"},
        {"AWS_PROFILE": "dynamo"},
        {"AWS_PROFILE": "ignores"},
        {"AWS_PROFILE": "china"},
        {"AWS_PROFILE": "dual"},
        {"AWS_PROFILE": "in credentials only", "AWS_DEFAULT_REGION": "us-west-1"},
        {"AWS_PROFILE": "lab", "AWS_ENDPOINT_URL": "https://variable.example"},
        {"AWS_ENDPOINT_URL": "https://variable.example", "AWS_ENDPOINT_URL_S3": "https://s3.variable.example"},
        {"AWS_ENDPOINT_URL": "https://variable.example", "AWS_ENDPOINT_URL_S3": ""},
        {"AWS_ENDPOINT_URL": "https://variable.example", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
        {"AWS_PROFILE": "lab", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
        {"AWS_PROFILE": "plain", "AWS_DEFAULT_REGION": "ap-south-1"},
        {"AWS_DEFAULT_REGION": "us-gov-west-1", "AWS_USE_FIPS_ENDPOINT": "true"},
    ],
    ids=lambda environment: " ".join(f"{name[4:]}={value}" for name, value in environment.items()) or "nothing",
)
def test_endpoint_and_region_match_botocore(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    access = resolved(KEYS | environment, monkeypatch)
    botocore_session = pytest.importorskip("botocore.session")
    for name, value in environment.items():
        if not value:
            monkeypatch.delenv(name)
    session = botocore_session.Session()
    theirs = session.create_client("s3", region_name=session.get_config_variable("region"))
    url = theirs.meta.endpoint_url.replace("https://s3.amazonaws.com", "https://s3.us-east-1.amazonaws.com")
    assert access.options["endpoint"] == url
    assert access.options["region"] == (session.get_config_variable("region") or "us-east-1")
    assert access.options["endpoint"] == access.options["aws_endpoint_url_s3"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "us-east-2"}, "eu-west-1"),
        ({"AWS_REGION": "", "AWS_DEFAULT_REGION": "us-east-2"}, "us-east-2"),
        ({"AWS_REGION": " eu-west-1\n"}, "eu-west-1"),
        ({"AWS_CONFIG_FILE": "/nonexistent"}, "us-east-1"),
    ],
)
def test_aws_region_takes_precedence_over_aws_default_region(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolved(KEYS | environment, monkeypatch).options["region"] == expected


def keys_of(access: Access) -> dict[str, Any]:
    assert access.provider is not None
    return access.provider()


@pytest.mark.parametrize(
    ("environment", "key", "token"),
    [
        (KEYS, "a", None),
        (KEYS | {"AWS_SESSION_TOKEN": ""}, "a", None),
        (KEYS | {"AWS_SESSION_TOKEN": "t\n"}, "a", "t"),
        (KEYS | {"AWS_PROFILE": "keys"}, "a", None),
        (KEYS | {"AWS_PROFILE": "there is none"}, "a", None),
        ({"AWS_PROFILE": "keys"}, "of-credentials", "t"),
        ({"AWS_PROFILE": "in credentials only", "AWS_SESSION_TOKEN": "of another key"}, "c", None),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_PROFILE": "keys"}, "of-credentials", "t"),
    ],
)
@pytest.mark.parametrize("has_botocore", [True, False])
def test_plain_keys(
    environment: dict[str, str], key: str, token: str | None, has_botocore: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_botocore:
        monkeypatch.setitem(sys.modules, "botocore.session", None)
    access = resolved(environment, monkeypatch)
    found = keys_of(access)
    assert (found["access_key_id"], found["token"], found["expires_at"]) == (key, token, None)
    assert access.keys
    assert bool(access.hosts) == bool(token), "requests with a session token are limited to the store's hosts"


@pytest.mark.parametrize("profile", ["role", "sso"])
def test_profiles_that_need_botocore_name_the_extra(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(MissingExtraError, match=f"profile '{profile}'") as caught:
        resolved({"AWS_PROFILE": profile}, monkeypatch)
    assert "tierckpt[s3]" in caught.value.hint


def test_sso_session_without_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("botocore.session")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(PermissionDeniedError, match="SSO"):
        resolved({"AWS_PROFILE": "sso"}, monkeypatch)


def test_credential_process_keys_are_renewed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("botocore.session")
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    answer = tmp_path / "answer"
    answer.write_text(
        f'{{"Version": 1, "AccessKeyId": "p", "SecretAccessKey": "q", "SessionToken": "r", "Expiration": "{soon}"}}'
    )
    config = tmp_path / "config"
    config.write_text(f"[profile process]\ncredential_process = cat {answer}\n")
    access = resolved({"AWS_CONFIG_FILE": str(config), "AWS_PROFILE": "process"}, monkeypatch)
    found = keys_of(access)
    assert (found["access_key_id"], found["token"]) == ("p", "r")
    assert found["expires_at"] > datetime.now(UTC)
    assert access.keys == "", "expiring keys must not be cached"


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"])
def test_a_line_feed_in_a_value_names_the_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        resolved(KEYS | {name: "begin\nend"}, monkeypatch)
    assert "begin" not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "“quoted”"}, "AWS_SECRET_ACCESS_KEY"),
        ({"AWS_REGION": "eu west"}, "AWS_REGION"),
        ({"AWS_ENDPOINT_URL": "https://"}, "AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "http://host:port"}, "AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "http://[::1"}, "AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL_S3": "https://host with spaces"}, "AWS_ENDPOINT_URL_S3"),
        ({"AWS_PROFILE": "astray"}, "services nowhere"),
    ],
)
def test_invalid_values_name_the_variable(
    environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=said):
        resolved(KEYS | environment, monkeypatch)


@pytest.mark.parametrize("has_botocore", [True, False])
def test_web_identity_without_its_token_file(has_botocore: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_botocore:
        monkeypatch.setitem(sys.modules, "botocore.session", None)
    role = {"AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/trainer", "AWS_WEB_IDENTITY_TOKEN_FILE": "/nonexistent"}
    with pytest.raises(ConfigError, match="AWS_WEB_IDENTITY_TOKEN_FILE"):
        resolved(role, monkeypatch)


@pytest.mark.server
@pytest.mark.parametrize("way", ["profile", "web identity"])
def test_assumed_role(way: str, moto: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The endpoint from the profile or a variable also applies to STS."""
    pytest.importorskip("botocore.session")
    (tmp_path / "token").write_text("x.y.z")
    arn = "arn:aws:iam::123456789012:role/trainer"
    if way == "profile":
        path = tmp_path / "AWS_CONFIG_FILE"
        path.write_text(CONFIG.replace("[profile role]", f"[profile role]\nendpoint_url = {moto.endpoint}"))
        environment = {"AWS_PROFILE": "role"}
    else:
        environment = {"AWS_ENDPOINT_URL": moto.endpoint, "AWS_ROLE_ARN": arn}
        environment["AWS_WEB_IDENTITY_TOKEN_FILE"] = str(tmp_path / "token")
    access = resolved(environment, monkeypatch)
    found = keys_of(access)
    assert found["token"]
    assert found["expires_at"] is not None
    assert access.endpoint == moto.endpoint
    assert access.hosts == ("127.0.0.1",)


def test_unparsable_profile_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("[default\nregion\n")
    with pytest.raises(ConfigError, match="bad is not an AWS profile file"):
        resolved(KEYS | {"AWS_CONFIG_FILE": str(tmp_path / "bad")}, monkeypatch)


def test_virtual_hosted_addressing(monkeypatch: pytest.MonkeyPatch) -> None:
    options = resolved(KEYS | {"AWS_PROFILE": "virtual"}, monkeypatch).options
    assert options["endpoint"] == "https://bucket.oss.example"
    assert options["virtual_hosted_style_request"] is True
    options = resolved({"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false"}, monkeypatch).options
    assert options["endpoint"] == "https://oss.example"
    # Read by the client: its host name includes the bucket.
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    options = resolved({"AWS_ENDPOINT_URL": "https://bucket.oss.example"}, monkeypatch).options
    assert options["endpoint"] == "https://bucket.oss.example"


def test_sources_name_variables_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    access = resolved({"AWS_PROFILE": "keys", "AWS_DEFAULT_REGION": "eu-west-1"}, monkeypatch)
    said = str(dict(access.sources))
    assert "AWS_DEFAULT_REGION" in said
    assert "'keys'" in access.sources["credentials"]
    assert "of-credentials" not in said + repr(access)
