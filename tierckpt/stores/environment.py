"""Reads environment variables for every store: a variable that is set and empty counts as not set."""

from __future__ import annotations

import os
import re
import ssl
from pathlib import Path
from typing import Final

from ..errors import ConfigError
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
    """A configuration value, and the variable or profile that sets it. Empty: not set."""

    source: str

    def __new__(cls, text: str = "", source: str = "") -> Found:
        """Raises ConfigError when the value cannot be sent in a header. The message never repeats the value."""
        found = super().__new__(cls, text.strip())
        found.source = source if found else ""
        if any(character < " " or character == "\x7f" for character in found):
            raise ConfigError(
                f"{source} holds a line feed or another control character",
                hint="Write its value as one line; of a mounted secret, look at the file with `cat -A`",
            )
        return found

    @property
    def is_true(self) -> bool:
        return self.lower() in {"1", "true", "yes", "on"}


def variable(*names: str) -> Found:
    """Return the first of the variables ``names`` that is set and not empty, without white space at its ends."""
    return next((Found(value, name) for name in names if (value := os.environ.get(name, "")).strip()), Found())


def secret(*names: str) -> Found:
    """``variable`` of a value that HTTP headers carry: ASCII.

    Raises:
        ConfigError: it holds other characters. The client would end the process (a panic in Rust).
    """
    return ascii_only(variable(*names))


def ascii_only(found: Found) -> Found:
    if not found.isascii():
        raise ConfigError(
            f"{found.source} holds characters that no HTTP header can carry",
            hint="Copy the value again; quotation marks of a word processor are a frequent cause",
        )
    return found


def cloud_environment() -> dict[str, str]:
    """Variables that reach stores, secrets among them: for memory that only this user can open."""
    return {name: value for name, value in os.environ.items() if _is_read_by_libraries(name)}


def _is_read_by_libraries(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _NAMES


def drop_empty() -> None:
    """Remove variables that are set and empty from the environment of this process.

    obstore, botocore and the libraries behind fsspec read the environment by themselves, and some take an empty
    variable for a value. Removing a variable is safe while threads run: the C library only moves pointers in place. It
    reallocates memory when a variable is set, so this module never sets one.
    """
    for name in list(os.environ):
        if _is_read_by_libraries(name) and not os.environ.get(name, "").strip():
            os.environ.pop(name, None)


def certificates(*bundles: Found) -> str:
    """Return the certificates (PEM) of the first of ``bundles`` that is set, and of SSL_CERT_FILE. '': the system's.

    Every store trusts them in addition to the system's.

    Raises:
        ConfigError: a file is missing or holds no certificate; the message names the file and its variable.
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
    except (OSError, ValueError) as error:  # SSLError is an OSError
        reason = error.strerror if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else ""
        raise ConfigError(
            f"{found.source} names {str(path)!r}, which "
            f"{f'cannot be read: {reason}' if reason else 'holds no certificates in PEM format'}",
            hint=f"Correct {found.source}, or remove it to trust the certificates of the system",
        ) from None
    return pem


def existing_file(found: Found) -> str:
    """Return the path ``found``. Raises ConfigError, which names its variable, when there is no such file."""
    path = path_of(found)
    if not path.is_file():
        raise ConfigError(f"{found.source} names {str(path)!r}, which is no file", hint=f"Correct {found.source}")
    return str(path)


def path_of(text: str) -> Path:
    """Return ``text`` as a path; ``~`` is the home directory."""
    return Path(expand_user(text))


def tls_context(pem: str) -> ssl.SSLContext:
    """A TLS context that trusts the system's certificates and those in ``pem``."""
    context = ssl.create_default_context()
    # Python 3.13 refuses authorities without key identifiers, which the clouds' own tools and the library believe.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if pem:
        context.load_verify_locations(cadata=pem)
    return context
