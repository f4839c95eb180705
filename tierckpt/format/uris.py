"""How a place is spelt: as a URL, or as a path of this node. Pure functions over strings."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ConfigError
from ..redaction import redact

SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*)://")
_KNOWN = "s3a?|azure|az|abfss?|adl|gcs|gs|file|https?|tierckpt|hf|hdfs|sftp|webdavs?|smb"
_MISSPELT = re.compile(rf"^(?P<scheme>{_KNOWN})(?::/?|//)(?P<rest>(?:[^/].*)?)$", re.IGNORECASE | re.DOTALL)
"""``s3:/bucket``, ``s3:bucket`` and ``s3//bucket``: as paths they would name directories called ``s3:`` and ``s3``."""


def scheme_of(text: str) -> str:
    """The scheme of the URL ``text``, in small letters; '' for a path.

    Raises:
        ConfigError: it is neither: a URL with a slash too few, or with spaces around it; the hint spells it.
    """
    trimmed = text.strip()
    match = SCHEME.match(trimmed)
    if match is None:
        _refuse_misspelt(trimmed)
        return ""
    if trimmed != text:
        raise ConfigError(f"{redact(text)!r} has spaces around it", hint=f"Write {redact(trimmed)}", uri=trimmed)
    return match[1].lower()


def text_of(value: object, what: str) -> str:
    """Return the text or path ``value`` as text. Raises ConfigError: it is neither; ``what`` it was to be is said."""
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise ConfigError(f"{what} is text or a path, not {type(value).__name__}")
    return text


def local_path(value: str | os.PathLike[str], what: str) -> Path:
    """Return the path ``value`` of this node, absolute.

    Raises:
        ConfigError: it is a URL, spelt well or not, empty, or no text. ``what`` it was to be is said.
    """
    text = text_of(value, what).strip()
    if not text or "\0" in text:
        raise ConfigError(f"{what} is {'empty' if not text else repr(text)}", hint="Give a path of this node")
    match = SCHEME.match(text) or _MISSPELT.match(text)
    if match is None:
        return absolute(os.fspath(value))
    below = re.sub(r"^/+", "/", text[match.end(1) + 1 :])
    raise ConfigError(
        f"{what} is {redact(text)}, a URL: it has to be a directory of this node",
        hint=f"Give its path: {below}" if match[1].lower() == "file" else "Give a path, like /mnt/ssd/dir",
    )


def absolute(path: str) -> Path:
    """Return ``path``, absolute; ``~`` is the home directory, also where no shell has seen to that (``--to=~/x``)."""
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111  # Path would fold "./~" to "~" first


def _refuse_misspelt(text: str) -> None:
    match = _MISSPELT.match(text)
    if match is None:
        return
    scheme, rest = match["scheme"].lower(), match["rest"]
    meant = f"a path (/{rest}) or file:///{rest}" if scheme == "file" else f"{scheme}://{rest}"
    raise ConfigError(
        f"{redact(text)} looks like a misspelt URL",
        hint=f"Write {redact(meant)}, as text (a Path folds its slashes); a directory of that name is ./{redact(text)}",
    )
