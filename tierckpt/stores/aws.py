"""Access to S3 buckets: environment variables, profiles and roles, by the rules of the AWS SDKs.

Without botocore: profile keys, web identity, containers and EC2. Unlike botocore, AWS_REGION overrides
AWS_DEFAULT_REGION, as in all other AWS SDKs, and a missing profile is an error only if its keys are needed.
"""

from __future__ import annotations

import configparser
import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ..errors import ConfigError, MissingExtraError, PermissionDeniedError, StoreUnavailableError
from ..redaction import printable
from .access import (
    Access,
    Found,
    ascii_only,
    certificates,
    check_endpoint,
    digest,
    existing_file,
    host_of,
    metadata_service_answers,
    no_credentials,
    path_of,
    secret,
    tls_context,
    variable,
)
from .proxies import direct_opener, routed

CREDENTIAL_LIFETIME: Final = timedelta(minutes=15)
"""The client asks botocore again after this time."""
REGION_TIMEOUT_SECONDS: Final = 5.0

_HINT: Final = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or AWS_SKIP_SIGNATURE to true for a public bucket"
)
_DOMAINS: Final = {"cn-": "amazonaws.com.cn", "eusc-": "amazonaws.eu"}
_CLIENT_OPTIONS: Final = (
    "checksum_algorithm",
    "conditional_put",
    "copy_if_not_exists",
    "disable_bulk_delete",
    "disable_tagging",
    "request_payer",
    "s3_express",
    "server_side_encryption",
    "sse_bucket_key_enabled",
    "sse_customer_key_base64",
    "sse_kms_key_id",
)
_NEEDS_BOTOCORE: Final = ("role_arn", "sso_session", "sso_start_url", "login_session", "credential_process")
_REGION: Final = re.compile(r"[A-Za-z0-9-]{1,64}")

regions: dict[tuple[str, str], str] = {}


def s3_access(bucket: str) -> Access:
    """Resolve endpoint, region, certificates and credentials of ``bucket``.

    Raises PermissionDeniedError: no credentials, after at most two seconds. ConfigError. MissingExtraError: needs
    botocore.
    """
    profile = AwsProfile.load()
    endpoint = _configured_endpoint(profile)
    region = variable("AWS_REGION", "AWS_DEFAULT_REGION") or profile.get("region") or Found("us-east-1", "default")
    if not _REGION.fullmatch(region):
        raise ConfigError(f"{region.source}={str(region)!r} is not a region", hint="Write one like eu-central-1")
    if bucket_region := regions.get((endpoint, bucket)):
        region = Found(bucket_region, "the answer of the server")
    style = variable("AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
    is_virtual = style.is_true if style else profile.get("s3", "addressing_style") == "virtual"
    url = str(endpoint) or _cloud_url(region, profile)
    scheme, _, host = url.partition("://")
    if is_virtual and not host.startswith(f"{bucket}."):
        url = f"{scheme}://{bucket}.{host}"
    options: dict[str, Any] = {
        name: str(value) for name in _CLIENT_OPTIONS if (value := variable(f"AWS_{name.upper()}"))
    }
    if endpoint or not variable("AWS_S3_EXPRESS").is_true:
        options |= {"endpoint": url, "aws_endpoint_url_s3": url}  # the second takes precedence
    options |= {
        "region": str(region),
        "virtual_hosted_style_request": is_virtual,
        # Do not hash the payload again for the signature, most of a put's CPU cost: the manifest's digests cover it.
        "unsigned_payload": str(variable("AWS_UNSIGNED_PAYLOAD") or "true"),
        "skip_signature": variable("AWS_SKIP_SIGNATURE").is_true,
    }
    bundle = variable("AWS_CA_BUNDLE") or profile.get("ca_bundle")
    trusted = certificates(bundle) if url.startswith("https:") else ""
    found = _credentials(profile, f"s3://{bucket}", endpoint, region)
    sources = {
        "endpoint": f"{endpoint or url} ({endpoint.source or 'default'})",
        "region": f"{region} ({region.source})",
        "credentials": found.source,
    } | ({"certificates": bundle.source} if bundle and trusted else {})
    options |= found.options
    hosts = (host_of(endpoint) if endpoint else _domain(region), *found.services) if found.has_token else ()
    return Access(str(endpoint), options, found.provider, found.keys, hosts, trusted, sources)


def _configured_endpoint(profile: AwsProfile) -> Found:
    """Return the configured endpoint in AWS's documented order; '': AWS's own."""
    ignored = variable("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") or profile.get("ignore_configured_endpoint_urls")
    if ignored.is_true:
        return Found()
    found = (
        variable("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
        or profile.service_endpoint()
        or profile.get("endpoint_url")
    )
    return Found(check_endpoint(found), found.source) if found else found


def _domain(region: str) -> str:
    return next((domain for start, domain in _DOMAINS.items() if region.startswith(start)), "amazonaws.com")


def _cloud_url(region: str, profile: AwsProfile) -> str:
    fips = variable("AWS_USE_FIPS_ENDPOINT") or profile.get("use_fips_endpoint")
    dualstack = (
        variable("AWS_USE_DUALSTACK_ENDPOINT")
        or profile.get("s3", "use_dualstack_endpoint")
        or profile.get("use_dualstack_endpoint")
    )
    service = f"s3{'-fips' * fips.is_true}{'.dualstack' * dualstack.is_true}"
    return f"https://{service}.{region}.{_domain(region)}"


def fetch_region(bucket: str, access: Access) -> str:
    url = access.options.get("endpoint", "")
    url = url if access.options["virtual_hosted_style_request"] else f"{url}/{bucket}"
    try:
        request = routed(urllib.request.Request(url, method="HEAD"))
        with direct_opener(tls_context(access.trusted)).open(request, timeout=REGION_TIMEOUT_SECONDS) as answer:
            headers = answer.headers
    except (OSError, ValueError):
        return ""
    region = str(headers.get("x-amz-bucket-region", "")).strip()
    return region if _REGION.fullmatch(region) else ""


@dataclass(frozen=True, slots=True)
class AwsProfile:
    name: Found
    values: dict[str, Any] = field(repr=False)
    services: dict[str, Any] = field(repr=False)
    is_there: bool
    files: tuple[str, str]

    @classmethod
    def load(cls) -> AwsProfile:
        files = (
            str(path_of(variable("AWS_CONFIG_FILE") or "~/.aws/config")),
            str(path_of(variable("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials")),
        )
        profiles: dict[str, dict[str, Any]] = {}
        services: dict[str, dict[str, Any]] = {}
        for section, values in _parse(files[0]).items():
            kind, *names = _words(section)
            if kind == "profile" and len(names) == 1:
                profiles[names[0]] = values
            elif kind == "services" and len(names) == 1:
                services[names[0]] = values
            elif section == "default":
                profiles.setdefault(section, values)
        for section, values in _parse(files[1]).items():
            profiles.setdefault(section, {}).update(values)
        name = variable("AWS_DEFAULT_PROFILE", "AWS_PROFILE") or Found("default", "default")
        return cls(name, profiles.get(name, {}), services, name in profiles or name.source == "default", files)

    def get(self, *keys: str) -> Found:
        value: Any = self.values
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return Found(value, f"{keys[-1]} of profile {self.name!r}") if isinstance(value, str) else Found()

    def service_endpoint(self) -> Found:
        section = self.get("services")
        if not section:
            return section
        if section not in self.services:
            raise ConfigError(
                f"{section.source} in {self.files[0]} names a section [services {section}] that is not there",
                hint="Add the section, or remove that line",
            )
        block = self.services[section].get("s3")
        url = block.get("endpoint_url", "") if isinstance(block, dict) else ""
        return Found(url, f"[services {section}] of profile {self.name!r}")


def _words(section: str) -> list[str]:
    try:
        return shlex.split(section) or [""]
    except ValueError:
        return [""]


def _parse(path: str) -> dict[str, dict[str, Any]]:
    parser = configparser.RawConfigParser(default_section="")
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        hint = "Correct it; `aws configure list` reads it too"
        raise ConfigError(f"{path} is not an AWS profile file: {type(error).__name__}", hint=hint) from None
    found = {
        section: {key: _nested(value) if value.startswith("\n") else value for key, value in parser.items(section)}
        for section in parser.sections()
    }
    for section in (*parser.values(), parser):
        vars(section).clear()  # a reference cycle would wait for a garbage collection
    return found


def _nested(block: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in block.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


@dataclass(frozen=True, slots=True)
class _Credentials:
    source: str
    provider: Callable[[], dict[str, Any]] | None = field(default=None, repr=False)
    keys: str = ""
    has_token: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    services: tuple[str, ...] = ()


def _plain(key_id: Found, secret_key: Found, token: Found, source: str) -> _Credentials:
    """Static keys, from a provider: the client then reads no others from its environment."""
    key_id, secret_key, token = map(ascii_only, (key_id, secret_key, token))
    credential = {
        "access_key_id": str(key_id),
        "secret_access_key": str(secret_key),
        "token": str(token) or None,
        "expires_at": None,
    }
    return _Credentials(source, lambda: credential, digest(key_id, secret_key, token), bool(token))


def _credentials(profile: AwsProfile, uri: str, endpoint: str, region: str) -> _Credentials:
    if variable("AWS_SKIP_SIGNATURE").is_true:
        anonymous = Found("anonymous", "AWS_SKIP_SIGNATURE")
        return _plain(anonymous, anonymous, Found(), "none (AWS_SKIP_SIGNATURE)")
    key_id, secret_key = secret("AWS_ACCESS_KEY_ID"), secret("AWS_SECRET_ACCESS_KEY")
    if key_id and secret_key:
        token = secret("AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN", "AWS_TOKEN")
        return _plain(key_id, secret_key, token, "AWS_ACCESS_KEY_ID")
    if key_id:
        raise no_credentials(uri, endpoint, f"AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY is not. {_HINT}")
    if not profile.is_there:
        where = " nor in ".join(profile.files)
        raise no_credentials(uri, endpoint, f"{profile.name.source}={profile.name} is neither in {where}. {_HINT}")
    if variable("AWS_ROLE_ARN") and (token_file := variable("AWS_WEB_IDENTITY_TOKEN_FILE")):
        existing_file(token_file)
    try:
        from botocore.session import Session  # type: ignore[import-untyped]
    except ImportError:
        found = _without_botocore(profile)
    else:
        found = _by_botocore(Session(), profile, uri, region)
    found = found or _role_of_machine()
    if found is None:
        raise no_credentials(uri, endpoint, _HINT)
    return found


def _by_botocore(session: Any, profile: AwsProfile, uri: str, region: str) -> _Credentials | None:
    from botocore.credentials import RefreshableCredentials  # type: ignore[import-untyped]
    from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError  # type: ignore[import-untyped]

    session.set_config_variable("region", str(region))
    try:
        found = session.get_credentials()
        first = found.get_frozen_credentials() if found is not None else None
    except (ConnectionError, HTTPClientError) as error:
        hint = f"{_HINT}, or try again later"
        message = f"the service that issues credentials for {uri} cannot be reached: {type(error).__name__}"
        raise StoreUnavailableError(message, hint=hint, uri=uri) from printable(error)
    except (BotoCoreError, ClientError, OSError, ValueError) as error:
        message = f"no credentials found for {uri}: botocore says: {error}"
        raise PermissionDeniedError(message, hint=_HINT, uri=uri) from printable(error)
    if found is None or first is None:
        return None
    source = f"{found.method} of profile {profile.name!r}" if profile.values else str(found.method)
    if not isinstance(found, RefreshableCredentials):
        key_id, secret_key, token = (
            Found(value or "", source) for value in (first.access_key, first.secret_key, first.token)
        )
        return _plain(key_id, secret_key, token, source)

    def provide() -> dict[str, Any]:
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + CREDENTIAL_LIFETIME,
        }

    return _Credentials(source, provide)


def _without_botocore(profile: AwsProfile) -> _Credentials | None:
    role, token_file = variable("AWS_ROLE_ARN"), variable("AWS_WEB_IDENTITY_TOKEN_FILE")
    if role and token_file:
        options = {"role_arn": str(role), "web_identity_token_file": str(token_file)}
        if session_name := variable("AWS_ROLE_SESSION_NAME"):
            options["role_session_name"] = str(session_name)
        if sts := variable("AWS_ENDPOINT_URL_STS"):
            options["aws_endpoint_url_sts"] = check_endpoint(sts)
        return _Credentials(token_file.source, options=options, services=("amazonaws.com", *_hosts(sts)))
    for key in _NEEDS_BOTOCORE:
        if profile.get(key):
            raise _needs_botocore(f"{key} of profile {profile.name!r}")
    key_id, secret_key = profile.get("aws_access_key_id"), profile.get("aws_secret_access_key")
    if key_id and secret_key:
        return _plain(key_id, secret_key, profile.get("aws_session_token"), f"profile {profile.name!r}")
    relative, full = (variable(f"AWS_CONTAINER_CREDENTIALS_{kind}_URI") for kind in ("RELATIVE", "FULL"))
    if relative:
        options = {"container_credentials_relative_uri": str(relative)}
        return _Credentials(relative.source, options=options, services=("169.254.0.0/16",))
    if full:
        token_file = variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
        if not token_file:
            raise _needs_botocore(f"{full.source} without AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
        options = {
            "container_credentials_full_uri": check_endpoint(full),
            "container_authorization_token_file": str(token_file),
        }
        return _Credentials(full.source, options=options, services=_hosts(full))
    return None


def _needs_botocore(what: str) -> MissingExtraError:
    hint = "Run `pip install 'tierckpt[s3]'`"
    return MissingExtraError(f"{what} needs a package that is not installed: botocore", hint=hint)


def _role_of_machine() -> _Credentials | None:
    """The object-store client requests the role, since botocore gives up after one second."""
    if not metadata_service_answers("s3"):
        return None
    service = variable("AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_METADATA_ENDPOINT")
    options = {"metadata_endpoint": check_endpoint(service)} if service else {}
    return _Credentials(
        "the role of this machine", options=options, services=("169.254.0.0/16", "fd00:ec2::/32", *_hosts(service))
    )


def _hosts(url: str) -> tuple[str, ...]:
    return (host_of(url),) if url else ()
