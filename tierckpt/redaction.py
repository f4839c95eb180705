"""Removes secrets from everything that is printed, logged or written: by value and by shape.

By value: credentials in this process's environment. By shape: signatures in a query, bearer tokens, passwords in a URL,
keys with a cloud's prefix.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

MASK = "***"
VALUE_LENGTH_MIN = 8
"""Masking shorter values would tear words apart."""

PREFIX_LENGTH = 12
"""This much of a secret at the end of a cut text is masked."""

_CLOUD_VARIABLE = re.compile(
    r"^(AWS|AZURE|GOOGLE|GCS|HF|HUGGING_FACE|FSSPEC|TIERCKPT)_.*(KEY|SECRET|TOKEN|SAS|PASSWORD|CONNECTION_STRING|CREDENTIAL)"
    r"|SECRET|PASSWORD"
)
_NAMES_A_PLACE = re.compile(r"(FILE|URI|URL|ENDPOINT|PATH|PROFILE|CREDENTIALS|DISABLED)$")
_SECRET_FIELD = re.compile(
    r"secret|passw(or)?d|authorization|bearer|signature|private_?key|(access|account|sas|api|storage)_?key|"
    r"(session|security|access|refresh|sas|id)_?token|connection_?string",
    re.IGNORECASE,
)
_VALUE = r"[^&;,\s\"'<>)\]}\\]+"
_PARAMETER = re.compile(
    r"(?i)(?:(?<![a-z0-9])|(?<=%3f)|(?<=%26))(x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature|x-goog-credential|"
    r"sig|signature|credential|awsaccesskeyid|accountkey|sharedaccesssignature|access_token|refresh_token|"
    rf"client_secret|aws_secret_access_key|aws_session_token|secret_access_key|password)(=|%3d)({_VALUE})"
)
_SHAPES: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = (
    (("sig", "credential", "key", "token", "secret", "password"), _PARAMETER, rf"\1\2{MASK}"),
    (("bearer ", "basic "), re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/-]{8,}=*"), rf"\1 {MASK}"),
    (
        ("security-token", "source-authorization"),
        re.compile(r"(?i)(x-amz-security-token|x-ms-copy-source-authorization)(\"?'?\s*:\s*\"?'?)[^\s\"',}]+"),
        rf"\1\2{MASK}",
    ),
    (("sharedkey ",), re.compile(r"(?i)(\bSharedKey\s+[^\s:]+:)[A-Za-z0-9+/=]+"), rf"\1{MASK}"),
    (("akia", "asia"), re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), MASK),
    (
        ("<",),
        re.compile(r"(?i)<(AWSAccessKeyId|Token-\d+|StringToSign\w*|CanonicalRequest\w*|Signature\w*)>[^<]*"),
        rf"<\1>{MASK}",
    ),
    (("@",), re.compile(r"(://[^/\s:@]*:)[^/\s@]+@"), rf"\1{MASK}@"),
    (("eyj",), re.compile(r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}"), MASK),
    (("hf_",), re.compile(r"\bhf_[A-Za-z0-9]{20,}"), MASK),
)
"""Lower-case words that every match contains, the shape, and its replacement. A search for the words is cheap."""
_CARRIES_CREDENTIAL = re.compile(r"(?i)[?&](x-amz-signature|x-goog-signature|sig|signature)=|://[^/\s:@]*:[^/\s@]+@")


def redact(text: str) -> str:
    """Replace every known or recognizable secret by ``***``. Never raises. Cost: about 20 microseconds for a line."""
    if not text:
        return text
    values = _pattern(_candidates(os.environ))
    if values is not None:
        text = values.sub(MASK, text)
    lowered = text.lower()
    for words, shape, replacement in _SHAPES:
        if any(word in lowered for word in words):
            text = shape.sub(replacement, text)
    return text


def printable(error: BaseException) -> BaseException | None:
    """Return None if the error's text has a secret, which a traceback would print."""
    link: BaseException | None = error
    while link is not None:
        text = f"{link}\n{link!r}"
        if redact(text) != text:
            return None
        link = link.__cause__ or link.__context__
    return error


def redact_all(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {
            key: MASK if isinstance(item, str) and item and _SECRET_FIELD.search(str(key)) else redact_all(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_all(item) for item in value]
    return value


def carries_credential(uri: str) -> bool:
    """True for a presigned URL, or a password: it would end up in journals, paths and logs."""
    return bool(_CARRIES_CREDENTIAL.search(uri))


def _candidates(environment: Mapping[str, str]) -> tuple[str, ...]:
    values = (environment.get(name, "").strip() for name in environment if _names_a_secret(name))
    return tuple(value for value in values if len(value) >= VALUE_LENGTH_MIN)


@functools.lru_cache(maxsize=4096)
def _names_a_secret(variable: str) -> bool:
    return bool(_CLOUD_VARIABLE.search(variable)) and not _NAMES_A_PLACE.search(variable)


@functools.lru_cache(maxsize=8)
def _pattern(values: tuple[str, ...]) -> re.Pattern[str] | None:
    """Match each value as it is, percent-encoded and decoded; of a connection string also signature and key."""
    inner = {match[3] for value in values for match in _PARAMETER.finditer(value)}
    forms = {
        form
        for value in {*values, *inner}
        for form in (value, quote(value, safe=""), unquote(value))
        if len(form) >= VALUE_LENGTH_MIN
    }
    whole = [re.escape(form) for form in sorted(forms, key=len, reverse=True)]
    # A cut message may end in the middle of one.
    begun = [re.escape(form[:PREFIX_LENGTH]) + _VALUE for form in sorted(forms) if len(form) > PREFIX_LENGTH]
    return re.compile("|".join(whole + begun)) if forms else None
