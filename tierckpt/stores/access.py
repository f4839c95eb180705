"""Credentials and endpoints of buckets and containers, resolved once and passed to the client.

They are found before the first request: a client would query the metadata service for minutes. An empty environment
variable counts as unset.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import ssl
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ..errors import ConfigError, PermissionDeniedError
from ..home import expand_user

_PREFIXES: Final = ("AWS_", "AZURE_", "AZURITE_", "GOOGLE_", "HF_", "HUGGING_FACE_", "REQUESTS_CA_", "SSL_CERT_")
_NAMES: Final = {
    "CLOUDSDK_CONFIG",
    "CURL_CA_BUNDLE",
    "IDENTITY_ENDPOINT",
    "IDENTITY_HEADER",
    "MSI_ENDPOINT",
    "SERVICE_ACCOUNT",
    "STORAGE_EMULATOR_HOST",
}
_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class Found(str):
    """A configuration value with its variable or profile. Empty: not set."""

    source: str

    def __new__(cls, text: str = "", source: str = "") -> Found:
        """Raises ConfigError, without the value, if it cannot be sent in a header."""
        found = super().__new__(cls, text.strip())
        found.source = source if found else ""
        if any(character < " " or character == "\x7f" for character in found):
            hint = "Write its value as one line; of a mounted secret, look at the file with `cat -A`"
            raise ConfigError(f"{source} holds a line feed or another control character", hint=hint)
        return found

    @property
    def is_true(self) -> bool:
        return self.lower() in {"1", "true", "yes", "on"}


def variable(*names: str) -> Found:
    return next((Found(value, name) for name in names if (value := os.environ.get(name, "")).strip()), Found())


def secret(*names: str) -> Found:
    """``variable`` for HTTP headers. Raises ConfigError if it is not ASCII: Rust would panic."""
    return ascii_only(variable(*names))


def ascii_only(found: Found) -> Found:
    if not found.isascii():
        hint = "Copy the value again; quotation marks of a word processor are a frequent cause"
        raise ConfigError(f"{found.source} holds characters that no HTTP header can carry", hint=hint)
    return found


def cloud_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _is_read_by_libraries(name)}


def _is_read_by_libraries(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _NAMES


def drop_empty() -> None:
    """Remove empty variables from the environment, as some libraries use them.

    Thread-safe: the C library only moves pointers. Setting a variable could reallocate, so this module never does.
    """
    for name in list(os.environ):
        if _is_read_by_libraries(name) and not os.environ.get(name, "").strip():
            os.environ.pop(name, None)


def certificates(*bundles: Found) -> str:
    """Return the PEM certificates of the first set variable of ``bundles``, and of SSL_CERT_FILE.

    Raises ConfigError: a file is missing or invalid.
    """
    first = next(filter(None, (*bundles, variable("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))), Found())
    return "\n".join(_read_bundle(found) for found in (first, variable("SSL_CERT_FILE")) if found)


def _read_bundle(found: Found) -> str:
    path = path_of(found)
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        text = b"\n".join(file.read_bytes() for file in files if file is path or file.is_file())
        pem = "\n".join(block.decode("ascii") for block in _CERTIFICATE.findall(text))
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem)
    except (OSError, ValueError) as error:
        is_read = isinstance(error, ssl.SSLError | ValueError)
        fault = (
            "holds no certificates in PEM format" if is_read else f"cannot be read: {getattr(error, 'strerror', '')}"
        )
        hint = f"Correct {found.source}, or remove it to trust the certificates of the system"
        raise ConfigError(f"{found.source} names {str(path)!r}, which {fault}", hint=hint) from None
    return pem


def existing_file(found: Found) -> str:
    """Raises ConfigError if the file is missing."""
    path = path_of(found)
    if not path.is_file():
        raise ConfigError(f"{found.source} names {str(path)!r}, which is not a file", hint=f"Correct {found.source}")
    return str(path)


def path_of(text: str) -> Path:
    return Path(expand_user(text))


def tls_context(pem: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    # Python 3.13 rejects authorities that cloud tools accept.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if pem:
        context.load_verify_locations(cadata=pem)
    return context


METADATA_TIMEOUT_SECONDS = 1.0
METADATA_ADDRESSES = {
    "s3": ("169.254.169.254", 80),
    "az": ("169.254.169.254", 80),
    "gs": ("metadata.google.internal", 80),
}

_ROLE_PATH = "/latest/meta-data/iam/security-credentials/"


@dataclass(frozen=True, slots=True)
class Access:
    """The client's ``options`` and ``provider``; ``endpoint`` is '' for the cloud's own.

    ``keys`` is a digest of plain keys; '' for issued credentials, which a new request may renew.
    """

    endpoint: str
    options: dict[str, Any] = field(repr=False)
    provider: Callable[[], dict[str, Any]] | None = None
    keys: str = ""
    hosts: tuple[str, ...] = ()
    """Hosts (with subdomains) that may get credentials. (): a redirect drops them."""
    trusted: str = field(default="", repr=False)
    sources: Mapping[str, str] = field(default_factory=dict)
    """Each setting's source. No secret."""


def host_of(url: str) -> str:
    return urlsplit(url).hostname or ""


def digest(*values: str) -> str:
    return hashlib.sha256("\0".join(values).encode()).hexdigest() if any(values) else ""


def check_endpoint(endpoint: Found) -> str:
    try:
        is_url = endpoint.startswith(("http://", "https://")) and bool(host_of(endpoint)) and endpoint.isascii()
        _ = urlsplit(endpoint).port
    except ValueError:
        is_url = False
    if not is_url or " " in endpoint:
        raise ConfigError(
            f"{endpoint.source}={str(endpoint)!r} is not a URL", hint="Write http://HOST:PORT or https://HOST"
        )
    return endpoint.rstrip("/")


def no_credentials(uri: str, endpoint: str, hint: str) -> PermissionDeniedError:
    return PermissionDeniedError(f"no credentials found for {uri}", hint=hint, uri=uri, endpoint=endpoint or None)


def metadata_service_answers(scheme: str) -> bool:
    if variable("AWS_EC2_METADATA_DISABLED").is_true:
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


_CONNECTION_STRING: Final = "AZURE_STORAGE_CONNECTION_STRING"
_AZURE_HINT: Final = (
    "Set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, "
    "the AZURE_CLIENT_ID family, or AZURE_USE_AZURE_CLI=true after `az login`"
)


def azure_access(container: str) -> Access:
    """Read AZURE_STORAGE_*; a connection string overrides single variables.

    Raises PermissionDeniedError: no account or no credentials. ConfigError.
    """
    uri = f"az://{container}"
    text = secret(_CONNECTION_STRING)
    options = parse_connection_string(text) if text else {}
    if options.get("use_emulator") or (not text and variable("AZURE_STORAGE_USE_EMULATOR").is_true):
        endpoint = variable("AZURITE_BLOB_STORAGE_URL") or Found("http://127.0.0.1:10000", "default")
        return Access(check_endpoint(endpoint), {"use_emulator": True}, sources={"endpoint": str(endpoint)})
    account = Found(options.get("account_name", ""), text.source) or secret(
        "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"
    )
    if text:
        endpoint = Found(options["endpoint"], text.source)
    else:
        endpoint = variable("AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_SERVICE_ENDPOINT", "AZURE_ENDPOINT")
    if not account:
        raise no_credentials(uri, endpoint, f"Set AZURE_STORAGE_ACCOUNT_NAME, or {_CONNECTION_STRING}")
    url = check_endpoint(endpoint) if endpoint else f"https://{account}.blob.core.windows.net"
    kind, found, source = _azure_credential(options, text.source)
    if not kind and not metadata_service_answers("az"):
        raise no_credentials(uri, endpoint or f"account {account}", _AZURE_HINT)
    found = {name: str(value) for name, value in found.items()}
    trusted = certificates() if url.startswith("https:") else ""
    keys = digest(found.get("account_key", ""), found.get("sas_key", ""))
    # The signature is in the URL, which a redirect target would get as Referer.
    hosts = (host_of(endpoint) or "core.windows.net",) if kind == "sas_token" else ()
    return Access(
        str(endpoint),
        # the client would prefer the environment's kind
        {"account_name": str(account), "endpoint": url, "credential_type": kind or "managed_identity", **found},
        keys=keys,
        hosts=hosts,
        trusted=trusted,
        sources={
            "account": f"{account} ({account.source})",
            "endpoint": f"{url} ({endpoint.source or 'default'})",
            "credentials": source or "the managed identity of this machine",
        },
    )


def _azure_credential(options: dict[str, Any], text: str) -> tuple[str, dict[str, Any], str]:
    if variable("AZURE_SKIP_SIGNATURE").is_true:
        return "bearer_token", {"token": "anonymous", "skip_signature": "true"}, "none (AZURE_SKIP_SIGNATURE)"
    if key := Found(options.get("account_key", ""), text):
        return "access_key", {"account_key": key}, text
    if sas := Found(options.get("sas_key", ""), text):
        return "sas_token", {"sas_key": sas}, text
    if key := secret("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_KEY"):
        return "access_key", {"account_key": key}, key.source
    if sas := secret("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"):
        return "sas_token", {"sas_key": sas.lstrip("?")}, sas.source
    client = secret("AZURE_CLIENT_ID", "AZURE_STORAGE_CLIENT_ID")
    tenant = secret("AZURE_TENANT_ID", "AZURE_STORAGE_TENANT_ID")
    authority = variable("AZURE_AUTHORITY_HOST")
    identity = {"client_id": client} if client else {}
    application = identity | {"tenant_id": tenant}
    if authority:
        application["authority_host"] = Found(check_endpoint(authority))
    if client and tenant and (file := variable("AZURE_FEDERATED_TOKEN_FILE")):
        return "workload_identity", application | {"federated_token_file": existing_file(file)}, file.source
    if client and tenant and (password := secret("AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET")):
        return "client_secret", application | {"client_secret": password}, password.source
    if token := secret("AZURE_STORAGE_TOKEN"):
        return "bearer_token", {"token": token}, token.source
    if (cli := variable("AZURE_USE_AZURE_CLI")).is_true:
        return "azure_cli", {}, cli.source
    if service := variable("AZURE_MSI_ENDPOINT", "AZURE_IDENTITY_ENDPOINT", "IDENTITY_ENDPOINT", "MSI_ENDPOINT"):
        return "managed_identity", identity | {"msi_endpoint": check_endpoint(service)}, service.source
    return "", identity, ""


def parse_connection_string(text: str) -> dict[str, Any]:
    """Return the client's options for an Azure connection string.

    Raises ConfigError if it names no account. The message never repeats the string, which holds a key.
    """
    pairs = (part.partition("=") for part in text.split(";") if part.strip())
    fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if fields.get("usedevelopmentstorage", "").lower() == "true":
        return {"use_emulator": True}
    account = fields.get("accountname", "")
    endpoint = fields.get("blobendpoint", "").rstrip("/")
    if not account and endpoint:
        host, _, path = endpoint.partition("://")[2].partition("/")
        account = path.partition("/")[0] or host.partition(".")[0]
    if not account:
        raise ConfigError(f"{_CONNECTION_STRING} names no AccountName and no BlobEndpoint")
    protocol, suffix = fields.get("defaultendpointsprotocol", "https"), fields.get("endpointsuffix", "")
    if not endpoint and (suffix or protocol != "https"):
        endpoint = f"{protocol}://{account}.blob.{suffix or 'core.windows.net'}"
    return {
        "account_name": account,
        "account_key": fields.get("accountkey", ""),
        "sas_key": fields.get("sharedaccesssignature", "").lstrip("?"),
        "endpoint": endpoint,
    }


_GCS_HINT: Final = (
    "Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or GOOGLE_SKIP_SIGNATURE to true for a public bucket"
)
_GCS_KINDS: Final = {"service_account", "authorized_user"}


def gcs_access(bucket: str) -> Access:
    """Read GOOGLE_*, STORAGE_EMULATOR_HOST, and the file of `gcloud auth application-default login`.

    Raises PermissionDeniedError: no credentials. ConfigError: a missing file, or an unsupported kind.
    """
    emulator = variable("STORAGE_EMULATOR_HOST")
    if emulator and "://" not in emulator:
        emulator = Found(f"http://{emulator}", emulator.source)
    endpoint = variable("GOOGLE_BASE_URL") or emulator
    url = check_endpoint(endpoint) if endpoint else ""
    options: dict[str, Any] = {"base_url": url} if url else {}
    provider, source = None, ""
    anonymous = variable("GOOGLE_SKIP_SIGNATURE")
    service_account = variable("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "SERVICE_ACCOUNT")
    if anonymous.is_true or (emulator and endpoint == emulator):
        options["skip_signature"] = "true"
        provider = {"token": "anonymous", "expires_at": None}.copy
        source = f"none ({anonymous.source or emulator.source})"
    elif service_account:
        options["service_account"] = _key_file(service_account, kinds=None)
        source = service_account.source
    elif os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY", "").strip():
        options["service_account_key"] = os.environ["GOOGLE_SERVICE_ACCOUNT_KEY"].strip()
        source = "GOOGLE_SERVICE_ACCOUNT_KEY"
    elif token := secret("GOOGLE_BEARER_TOKEN"):
        options["bearer_token"], source = str(token), token.source
    elif file := variable("GOOGLE_APPLICATION_CREDENTIALS") or _default_key_file():
        options["application_credentials"], source = _key_file(file, _GCS_KINDS), file.source
    elif metadata_service_answers("gs"):
        source = "the service account of this machine"
    else:
        raise no_credentials(f"gs://{bucket}", endpoint, _GCS_HINT)
    trusted = certificates() if not url.startswith("http:") else ""
    sources = {
        "endpoint": f"{url or 'https://storage.googleapis.com'} ({endpoint.source or 'default'})",
        "credentials": source,
    }
    return Access(url, options, provider, trusted=trusted, sources=sources)


def _default_key_file() -> Found:
    path = path_of(variable("CLOUDSDK_CONFIG") or "~/.config/gcloud") / "application_default_credentials.json"
    is_file = os.path.isfile(path)  # noqa: PTH113  # denied: False
    return Found(str(path) if is_file else "", "gcloud auth application-default login")


def _key_file(found: Found, kinds: Collection[str] | None) -> str:
    path = path_of(found)
    try:
        document = json.loads(path.read_bytes())
        kind = document["type"] if kinds else ""
        reason = f"holds credentials of type {kind!r}, which is not supported" if kinds and kind not in kinds else ""
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        reason = "is no JSON of a service account or user"
    if reason:
        hint = "Name a key file of a service account, or run `gcloud auth application-default login`"
        raise ConfigError(f"{found.source} names {str(path)!r}, which {reason}", hint=hint)
    return str(path)
