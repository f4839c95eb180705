"""How a bucket is reached: endpoint, options and credentials, from the environment variables each cloud's tools use.

Missing credentials are found here, before the first request: left to itself a client asks the instance metadata
service, which on a machine that has none costs minutes and ends in a timeout that names nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigError, PermissionDeniedError
from ..home import home
from ..redaction import printable

METADATA_TIMEOUT_SECONDS = 1.0
METADATA_ADDRESSES = {
    "s3": ("169.254.169.254", 80),
    "az": ("169.254.169.254", 80),
    "gs": ("metadata.google.internal", 80),
}
"""Where each cloud's machines find their own role."""

_ROLE_PATH = "/latest/meta-data/iam/security-credentials/"

_AWS_HOSTS = ("amazonaws.com", "amazonaws.com.cn")

_S3_HINT = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (with boto3 installed), "
    "or AWS_SKIP_SIGNATURE to true for a public bucket"
)
CREDENTIAL_LIFETIME = timedelta(minutes=15)
"""How long the client may use one answer of boto3 before it asks again; boto3 renews what expires."""


_OF_CLOUDS = ("AWS_", "AZURE_", "GOOGLE_")


def cloud_environment() -> dict[str, str]:
    """What this process's environment says of clouds, secrets among it: for memory that only this user can open."""
    return {name: value for name, value in os.environ.items() if name.startswith(_OF_CLOUDS)}


@dataclass(frozen=True, slots=True)
class Access:
    """``options`` and ``provider`` go to the client as they are; ``endpoint`` is '' for the cloud's own.

    ``keys`` tells plain keys from newer ones (a digest of them); '' when a service issues the credentials, so that
    asking again may always bring newer ones.
    """

    endpoint: str
    options: dict[str, Any] = field(repr=False)
    provider: Callable[[], dict[str, Any]] | None = None
    keys: str = ""
    hosts: tuple[str, ...] = ()
    """Where requests may lead (and to what is below these), because they carry what others could use. (): they carry
    nothing that a client does not leave out by itself where it follows a redirect."""

    def is_newer_than(self, other: Access) -> bool:
        """True when requests that ``other`` was refused may pass with this one."""
        return not self.keys or self.keys != other.keys


def s3_access(bucket: str) -> Access:
    """Read AWS_*. Without keys in the environment boto3, where installed, searches profiles and roles.

    Raises:
        PermissionDeniedError: no credentials anywhere. Cost: at most about two seconds to find out.
    """
    endpoint = _first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    # The manifest's digests cover every byte, so the payload is not hashed once more for the signature: that hash
    # is most of the CPU cost of a put.
    options: dict[str, Any] = {"unsigned_payload": _first("AWS_UNSIGNED_PAYLOAD") or "true"}
    if endpoint:
        options["endpoint"] = _check_endpoint(endpoint, "AWS_ENDPOINT_URL")
    region = _first("AWS_REGION", "AWS_DEFAULT_REGION")
    provider = None
    if not _s3_environment_has_credentials():
        provider, profile_region = _ask_boto3(bucket)
        if provider is None and not _metadata_service_answers("s3"):
            raise _no_credentials(f"s3://{bucket}", endpoint, _S3_HINT)
        region = region or profile_region
    options["region"] = region or "us-east-1"
    keys = (_first("AWS_ACCESS_KEY_ID"), _first("AWS_SECRET_ACCESS_KEY"), _first("AWS_SESSION_TOKEN", "AWS_TOKEN"))
    digest = _digest(*keys) if keys[0] and keys[1] else ""
    return Access(endpoint, options, provider, digest, _s3_hosts(endpoint, provider))


def _s3_hosts(endpoint: str, provider: object) -> tuple[str, ...]:
    """A session token goes along in a header of S3's own, which a client that follows redirects takes for harmless.

    Where the client finds credentials by itself, the services that issue them belong to it.
    """
    has_keys = bool(_first("AWS_ACCESS_KEY_ID") and _first("AWS_SECRET_ACCESS_KEY"))
    if _is_true("AWS_SKIP_SIGNATURE") or (has_keys and not _first("AWS_SESSION_TOKEN", "AWS_TOKEN")):
        return ()
    hosts = [_host(endpoint)] if endpoint else list(_AWS_HOSTS)
    if provider is None and not has_keys:
        services = map(_first, ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_ENDPOINT_URL_STS", "AWS_METADATA_ENDPOINT"))
        hosts += [*_AWS_HOSTS, "169.254.0.0/16", "fd00:ec2::/32", *(_host(url) for url in services if url)]
    return tuple(hosts)


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


def _digest(*values: str) -> str:
    return hashlib.sha256("\0".join(values).encode()).hexdigest() if any(values) else ""


def _s3_environment_has_credentials() -> bool:
    return (
        _is_true("AWS_SKIP_SIGNATURE")
        or bool(_first("AWS_ACCESS_KEY_ID") and _first("AWS_SECRET_ACCESS_KEY"))
        or bool(_first("AWS_WEB_IDENTITY_TOKEN_FILE") and _first("AWS_ROLE_ARN"))
        or bool(_first("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"))
    )


def _ask_boto3(bucket: str) -> tuple[Callable[[], dict[str, Any]] | None, str]:
    """Return what boto3 finds in profiles, SSO and instance roles, and the profile's region."""
    try:
        import boto3
        from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]
    except ImportError:
        return None, ""
    try:
        session = boto3.Session()
        found = session.get_credentials()
    except BotoCoreError as error:  # no such profile, half a key pair, a broken file
        raise PermissionDeniedError(
            f"no credentials found for s3://{bucket}: boto3 says: {error}", hint=_S3_HINT, uri=f"s3://{bucket}"
        ) from printable(error)
    if found is None:
        return None, ""

    def provide() -> dict[str, Any]:
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + CREDENTIAL_LIFETIME,
        }

    return provide, session.region_name or ""


def azure_access(container: str) -> Access:
    """Read AZURE_STORAGE_*, a connection string included (it wins over single variables).

    Raises:
        PermissionDeniedError: no account or no credentials for it.
        ConfigError: a connection string that names no account.
    """
    options = _azure_options()
    if _is_true("AZURE_STORAGE_USE_EMULATOR") or options.get("use_emulator"):
        return Access("http://127.0.0.1:10000", {"use_emulator": True})
    endpoint = str(options.get("endpoint", ""))
    if "account_name" not in options:
        raise _no_credentials(
            f"az://{container}", endpoint, "Set AZURE_STORAGE_ACCOUNT_NAME, or AZURE_STORAGE_CONNECTION_STRING"
        )
    if endpoint:
        _check_endpoint(endpoint, "AZURE_STORAGE_ENDPOINT")
    has_secret = bool({"account_key", "sas_key"} & options.keys()) or _azure_environment_has_identity()
    if not has_secret and not _metadata_service_answers("az"):
        raise _no_credentials(
            f"az://{container}",
            endpoint or f"account {options['account_name']}",
            "Set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, "
            "the AZURE_CLIENT_ID family, or AZURE_USE_AZURE_CLI=true after `az login`",
        )
    keys = (
        ""
        if _azure_environment_has_identity()
        else _digest(*(str(options.get(n, "")) for n in ("account_key", "sas_key")))
    )
    # A signature of Azure's is in the URL, and the target of a redirect would get it as Referer.
    hosts = (_host(endpoint) if endpoint else "core.windows.net",) if "sas_key" in options else ()
    return Access(endpoint, options, keys=keys, hosts=hosts)


def _azure_options() -> dict[str, Any]:
    options = {
        "account_name": _first("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
        "account_key": _first("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_KEY"),
        "sas_key": _first("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"),
        "endpoint": _first("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    }
    text = _first("AZURE_STORAGE_CONNECTION_STRING")
    if text:
        options = parse_connection_string(text)
    return {key: value for key, value in options.items() if value}


def parse_connection_string(text: str) -> dict[str, Any]:
    """Return the client's options for an Azure connection string.

    Raises:
        ConfigError: it names no account. The message never repeats the string, which holds a key.
    """
    pairs = (part.partition("=") for part in text.split(";") if part.strip())
    fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if fields.get("usedevelopmentstorage", "").lower() == "true":
        return {"use_emulator": True}
    account = fields.get("accountname", "")
    endpoint = fields.get("blobendpoint", "").rstrip("/")
    if not account and endpoint:  # a SAS connection string names the account in its endpoint only
        account = endpoint.partition("://")[2].partition(".")[0]
    if not account:
        raise ConfigError("AZURE_STORAGE_CONNECTION_STRING names no AccountName and no BlobEndpoint")
    if not endpoint and fields.get("endpointsuffix"):
        endpoint = f"{fields.get('defaultendpointsprotocol', 'https')}://{account}.blob.{fields['endpointsuffix']}"
    return {
        "account_name": account,
        "account_key": fields.get("accountkey", ""),
        "sas_key": fields.get("sharedaccesssignature", "").lstrip("?"),
        "endpoint": endpoint,
    }


def _azure_environment_has_identity() -> bool:
    return (
        _is_true("AZURE_SKIP_SIGNATURE")
        or _is_true("AZURE_USE_AZURE_CLI")
        or bool(_first("AZURE_STORAGE_TOKEN", "AZURE_MSI_ENDPOINT", "AZURE_IDENTITY_ENDPOINT", "IDENTITY_ENDPOINT"))
        or bool(_first("AZURE_FEDERATED_TOKEN_FILE"))
        or bool(_first("AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET"))
    )


def gcs_access(bucket: str) -> Access:
    """Read GOOGLE_*, and the file `gcloud auth application-default login` leaves.

    Raises:
        PermissionDeniedError: no credentials anywhere.
    """
    endpoint = _first("GOOGLE_BASE_URL")
    found = (
        _is_true("GOOGLE_SKIP_SIGNATURE")
        or bool(_first("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BEARER_TOKEN"))
        or bool(_first("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY"))
        or os.path.exists(home() / ".config/gcloud/application_default_credentials.json")  # noqa: PTH110  # denied: False
    )
    if not found and not _metadata_service_answers("gs"):
        raise _no_credentials(
            f"gs://{bucket}",
            endpoint,
            "Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or GOOGLE_SKIP_SIGNATURE to true for a public bucket",
        )
    return Access(endpoint, {"base_url": _check_endpoint(endpoint, "GOOGLE_BASE_URL")} if endpoint else {})


def _metadata_service_answers(scheme: str) -> bool:
    """True on a cloud machine, whose role the client can then use. Elsewhere nobody listens there.

    Of AWS the role itself is asked for: on a machine without one the client takes the service's 404 for the bucket's.
    """
    if _is_true("AWS_EC2_METADATA_DISABLED"):
        return False
    host, port = METADATA_ADDRESSES[scheme]
    connection = HTTPConnection(host, port, timeout=METADATA_TIMEOUT_SECONDS)
    try:
        connection.connect()
        if scheme != "s3":
            return True
        connection.request("PUT", "/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        answer = connection.getresponse()
        token = answer.read().decode("latin-1").strip()
        headers = {"X-aws-ec2-metadata-token": token} if answer.status == 200 else {}
        connection.request("GET", _ROLE_PATH, headers=headers)
        return connection.getresponse().status == 200
    except (OSError, HTTPException, ValueError):
        return False
    finally:
        connection.close()


def _no_credentials(uri: str, endpoint: str, hint: str) -> PermissionDeniedError:
    return PermissionDeniedError(f"no credentials found for {uri}", hint=hint, uri=uri, endpoint=endpoint or None)


def _check_endpoint(endpoint: str, variable: str) -> str:
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"{variable}={endpoint!r} is not a URL", hint="Write http://HOST:PORT or https://HOST")
    return endpoint.rstrip("/")


def _first(*names: str) -> str:
    return next((value for name in names if (value := os.environ.get(name, "").strip())), "")


def _is_true(name: str) -> bool:
    return _first(name).lower() in {"1", "true", "yes", "on"}
