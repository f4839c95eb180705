"""How a container of Azure or a bucket of GCS is reached, from the environment variables each cloud's tools use."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from typing import Any, Final

from ..errors import ConfigError
from .access import Access, check_endpoint, digest, host_of, metadata_service_answers, no_credentials
from .environment import Found, certificates, existing_file, path_of, secret, variable

# --- Azure -------------------------------------------------------------------------------------------------------

_CONNECTION_STRING: Final = "AZURE_STORAGE_CONNECTION_STRING"
_AZURE_HINT: Final = (
    "Set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, "
    "the AZURE_CLIENT_ID family, or AZURE_USE_AZURE_CLI=true after `az login`"
)


def azure_access(container: str) -> Access:
    """Read AZURE_STORAGE_*, a connection string included (it wins over single variables).

    Raises:
        PermissionDeniedError: no account or no credentials for it.
        ConfigError: a connection string that names no account, or a value that cannot work.
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
    domain = "fabric.microsoft.com" if variable("AZURE_USE_FABRIC_ENDPOINT").is_true else "core.windows.net"
    url = check_endpoint(endpoint) if endpoint else f"https://{account}.blob.{domain}"
    kind, found, source = _azure_credential(options, text.source)
    if not kind and not metadata_service_answers("az"):
        raise no_credentials(uri, endpoint or f"account {account}", _AZURE_HINT)
    found = {name: str(value) for name, value in found.items()}
    trusted = certificates() if url.startswith("https:") else ""
    keys = digest(found.get("account_key", ""), found.get("sas_key", ""))
    # A signature of Azure's is in the URL, and the target of a redirect would get it as Referer.
    hosts = (host_of(endpoint) if endpoint else domain,) if kind == "sas_token" else ()
    return Access(
        str(endpoint),
        # Name the kind: the client reads its environment too and would prefer that.
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
    """Return the kind of credential, the client's options for it and their source; the kind is '' when there is none.

    Same order as the Azure CLI: keys, signatures, then identities.
    """
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
    if fabric := secret("AZURE_FABRIC_SESSION_TOKEN"):
        return "auto", {}, fabric.source
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


# --- GCS ---------------------------------------------------------------------------------------------------------

_GCS_HINT: Final = (
    "Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or GOOGLE_SKIP_SIGNATURE to true for a public bucket"
)
_GCS_KINDS: Final = {"service_account", "authorized_user"}


def gcs_access(bucket: str) -> Access:
    """Read GOOGLE_*, STORAGE_EMULATOR_HOST, and the file `gcloud auth application-default login` leaves.

    Raises:
        PermissionDeniedError: no credentials anywhere.
        ConfigError: a variable names a missing file, or credentials that the client does not support.
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
        provider = _anonymous  # or the client would read a file of credentials all the same
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


def _anonymous() -> dict[str, Any]:
    return {"token": "anonymous", "expires_at": None}


def _default_key_file() -> Found:
    path = path_of(variable("CLOUDSDK_CONFIG") or "~/.config/gcloud") / "application_default_credentials.json"
    is_file = os.path.isfile(path)  # noqa: PTH113  # denied: False
    return Found(str(path) if is_file else "", "gcloud auth application-default login")


def _key_file(found: Found, kinds: Collection[str] | None) -> str:
    """Return the path of a file of credentials that the client can use. ``kinds`` None: it need not name its kind."""
    path = path_of(found)
    try:
        document = json.loads(path.read_bytes())
        kind = document["type"] if kinds else ""
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        reason = "is no JSON of a service account or user"
    else:
        if not kinds or kind in kinds:
            return str(path)
        reason = f"holds credentials of type {kind!r}, which is not supported"
    raise ConfigError(
        f"{found.source} names {str(path)!r}, which {reason}",
        hint="Name a key file of a service account, or run `gcloud auth application-default login`",
    )
