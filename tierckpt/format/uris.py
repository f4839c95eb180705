"""Spelling of locations: a URL, or a path of this node.

As in fsspec, each character after ``SCHEME://BUCKET/`` belongs to the name, ``#``, ``?`` and ``%`` too.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..home import expand_user
from ..redaction import carries_credential, redact

TIER_FORMS = (
    "tierckpt://s3/BUCKET/KEY, tierckpt://az/CONTAINER/KEY, tierckpt://gs/BUCKET/KEY or tierckpt://file/ABS/PATH"
)
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ufffe\uffff]")
"""Listings are XML, which cannot represent them."""

_NOT_OF_A_BUCKET = re.compile(r"[^A-Za-z0-9_.:$\-]")
"""With colons: ``tenant:bucket`` of Ceph, ``arn:...`` of an access point."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_KNOWN = "s3a?|azure|az|abfss?|adl|gcs|gs|file|local|https?|tierckpt|hf|hdfs|sftp|webdavs?|smb"
_MISSPELT = re.compile(rf"(?P<scheme>{_KNOWN})(?::/?|//)(?P<rest>(?:[^/].*)?)$", re.IGNORECASE | re.DOTALL)
"""``s3:/bucket``, ``s3:bucket`` and ``s3//bucket``: they would be paths."""
_CHAINED = re.compile(r"::[A-Za-z][\w+.\-]*://")
"""``simplecache::s3://bucket/key`` of fsspec."""
_ALIASES = {"s3a": "s3", "azure": "az", "abfs": "az", "abfss": "az", "adl": "az", "gcs": "gs", "local": "file"}
_VERSION = {"s3": "?versionId=", "az": "?versionid="}
"""Object versions: s3fs and adlfs would write such a name to another key."""


@dataclass(frozen=True, slots=True)
class Location:
    """A normalised URI: two spellings of one location compare equal.

    ``scheme`` is ``file`` for bare paths; ``authority`` is the bucket or container ('' for files); ``path`` has no
    outer slashes, except the leading one of files.
    """

    scheme: str
    authority: str
    path: str

    @property
    def uri(self) -> str:
        if self.scheme == "file":
            return self.path
        if self.scheme == "memory":
            return f"memory://{self.path}"
        return f"{self.scheme}://{self.authority}{'/' * bool(self.path)}{self.path}"

    def __str__(self) -> str:
        return self.uri

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2] or self.authority

    def child(self, name: str) -> Location:
        return Location(self.scheme, self.authority, f"{self.path.rstrip('/')}/{name}" if self.path else name)

    @property
    def parent(self) -> Location:
        above = self.path.rstrip("/").rpartition("/")[0]
        return Location(self.scheme, self.authority, above or "/" * (self.scheme == "file"))


def parse_uri(uri: object) -> Location:
    """Normalise a URI, bare path or ``os.PathLike``.

    ``s3://bucket/key``, ``az://container/key`` (account from the environment), ``gs://bucket/key``,
    ``file:///mount/key``, a bare path, any fsspec URL, or one of these after ``tierckpt://``. Raises ConfigError:
    misspelt, without a bucket, of another host or account, with a secret, or with a name that its store cannot hold.
    """
    text = text_of(uri, "a checkpoint URI")
    if "\0" in text:
        raise ConfigError(f"{redact(text)!r} holds a NUL byte", hint="No store and no file system has such a name")
    scheme = scheme_of(text)
    if scheme == "tierckpt":
        scheme, text = _inner_uri(text)
    if not text.strip():
        hint = "Give s3://bucket/key, az://container/key, gs://bucket/key, file:///path or a path"
        raise ConfigError("the checkpoint URI is empty", hint=hint)
    if not scheme:
        return Location("file", "", str(absolute(text)))
    scheme = _ALIASES.get(scheme, scheme)
    if scheme != "file" and carries_credential(text):
        raise ConfigError(
            f"{redact(text)} carries a credential, and a URI is written to journals, manifests and logs",
            hint="Give the plain URI, and the credential by the environment variables of the store",
        )
    if found := UNPRINTABLE.search(text):
        hint = f"Write {text.strip()}" if not UNPRINTABLE.search(text.strip()) else "Give it a name without"
        raise ConfigError(f"{text!r} holds the control character {found[0]!r}, which no URL has", hint=hint)
    rest = text.partition("://")[2]
    if scheme == "file":
        return Location("file", "", _file_path(text, rest))
    authority, _, path = rest.partition("/") if scheme != "memory" else ("", "", rest.lstrip("/"))
    location = Location(scheme, _container(text, authority) if scheme == "az" else authority, path.rstrip("/"))
    _check(text, location)
    return location


def scheme_of(text: str) -> str:
    """Return the scheme of ``text``; '' for a path. Raises ConfigError with a corrected hint."""
    trimmed = text.lstrip()
    if _CHAINED.search(trimmed) and re.match(r"[A-Za-z][\w+.\-]*:[:/]", trimmed):
        last = trimmed.rpartition("::")[2]
        hint = f"Write {redact(last)}; a directory of that name is ./{redact(text)}"
        raise ConfigError(f"{redact(text)} chains file systems of fsspec", hint=hint)
    match = _SCHEME.match(trimmed)
    if match is None:
        _refuse_misspelt(trimmed)
        return ""
    if trimmed != text:
        raise ConfigError(f"{redact(text)!r} has spaces before it", hint=f"Write {redact(trimmed)}", uri=trimmed)
    return match[1].lower()


def text_of(value: object, what: str) -> str:
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise ConfigError(f"{what} is text or a path, not {type(value).__name__}")
    return text


def local_path(value: str | os.PathLike[str], what: str) -> Path:
    """Raises ConfigError for a URL."""
    text = text_of(value, what).strip()
    if not text or "\0" in text:
        raise ConfigError(f"{what} is {'empty' if not text else repr(text)}", hint="Give a path of this node")
    match = _SCHEME.match(text) or _MISSPELT.match(text)
    if match is None:
        return absolute(os.fspath(value))
    below = re.sub(r"^/+", "/", text[match.end(1) + 1 :])
    hint = f"Give its path: {below}" if match[1].lower() == "file" else "Give a path, like /mnt/ssd/dir"
    raise ConfigError(f"{what} is {redact(text)}, a URL: it has to be a directory of this node", hint=hint)


def absolute(path: str) -> Path:
    """Return ``path``, absolute: one result for all spellings.

    ``..`` goes up from a link's target. Other links stay, as their targets may change. Raises ConfigError for a
    relative path in a removed working directory.
    """
    try:
        whole = Path(expand_user(path)).absolute()
    except FileNotFoundError:
        raise ConfigError(
            f"{redact(path)} is a relative path, and the working directory of this process was removed",
            hint="Give an absolute path, or start in a directory that exists",
        ) from None
    parts = whole.parts[1:]
    if ".." not in parts:
        return Path("/", *parts)
    last_parent = len(parts) - parts[::-1].index("..")
    return Path(os.path.realpath(Path("/", *parts[:last_parent])), *parts[last_parent:])


def _refuse_misspelt(text: str) -> None:
    match = _MISSPELT.match(text)
    if match is None:
        return
    scheme, rest = match["scheme"].lower(), match["rest"]
    meant = f"a path (/{rest}) or file:///{rest}" if scheme in ("file", "local") else f"{scheme}://{rest}"
    hint = f"Write {redact(meant)}, as text (a Path folds its slashes); a directory of that name is ./{redact(text)}"
    raise ConfigError(f"{redact(text)} looks like a misspelt URL", hint=hint)


def _inner_uri(text: str) -> tuple[str, str]:
    scheme, _, rest = text.partition("://")[2].partition("/")
    if not _SCHEME.fullmatch(f"{scheme}://") or scheme.lower() == "tierckpt":
        raise ConfigError(f"{redact(text)} names no store", hint=f"Write {TIER_FORMS}", uri=text)
    if scheme.lower() != "file":
        return scheme.lower(), f"{scheme}://{rest}"
    if {".", ".."} & {*rest.split("/")}:
        raise ConfigError(f"{text} has '.' or '..' in it", hint="Write the path without them", uri=text)
    return "", "/" + rest.lstrip("/")


def _file_path(text: str, rest: str) -> str:
    path = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    if not path.startswith("/"):
        hint = f"Write file:///{rest}, or the path: of this directory, of the home, or of the mounted share"
        message = f"{text} names the host {rest.partition('/')[0]!r}, and a file URL is of this node"
        raise ConfigError(message, hint=hint, uri=text)
    return str(absolute(path))


def _container(text: str, authority: str) -> str:
    """Return the container of ``CONTAINER@ACCOUNT...``. Raises ConfigError if the environment has another account."""
    container, _, host = authority.partition("@")
    account, environment_account = host.partition(".")[0], _azure_account()
    if account and environment_account and account != environment_account:
        hint = f"Set AZURE_STORAGE_ACCOUNT_NAME={account} and its key, or write az://{container}"
        message = f"{text} names the account {account}, and the environment has credentials of {environment_account}"
        raise ConfigError(message, hint=hint, uri=text)
    return container


def _azure_account() -> str:
    in_text = re.search(r"(?i)(?:^|;)\s*AccountName=([^;]+)", os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    names = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
    return in_text[1].strip() if in_text else next((os.environ[name] for name in names if os.environ.get(name)), "")


def _check(text: str, location: Location) -> None:
    scheme, authority, path = location.scheme, location.authority, location.path
    is_bucket = scheme in {"s3", "az", "gs"}
    if (is_bucket and not authority) or authority in {".", "..", "_"}:
        raise _refused(text, " names no bucket, container or host", f"{scheme}://BUCKET/KEY")
    if is_bucket and (found := _NOT_OF_A_BUCKET.search(authority)):
        problem = f": no bucket or container has {found[0]!r} in its name"
        raise _refused(text, problem, f"{scheme}://BUCKET/KEY: '#', '?' and '%' have no meaning of their own")
    invalid_parts = {".", ".."} if scheme in {"http", "https"} else {"", ".", ".."}
    if path and invalid_parts & {*path.split("/")}:
        kept = "/".join(part for part in path.split("/") if part not in {"", ".", ".."})
        raise _refused(text, " has an empty part, '.' or '..' in its key", Location(scheme, authority, kept).uri)
    if scheme == "az" and "\\" in path:
        slashes = Location(scheme, authority, path.replace("\\", "/")).uri
        raise _refused(text, " has a backslash in its key, and Azure makes a slash of it", slashes)
    if (version := _VERSION.get(scheme)) and version in path:
        problem = " names a version of an object, and objects are read as they are now"
        raise _refused(text, problem, Location(scheme, authority, path.partition(version)[0]).uri)


def _refused(text: str, problem: str, instead: str) -> ConfigError:
    return ConfigError(f"{text!r}{problem}", hint=f"Write {instead}", uri=text)
