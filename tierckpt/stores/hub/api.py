"""The HTTP API of a Hugging Face Hub that reading a repository needs: revision, tree, resolver.

Promises:
    A1  The token is sent to the Hub's own host and to no other, and is never printed.
    A2  After a rate limit (429) all requests wait for the requested time, within a deadline.
    A3  No request is sent while ``HF_HUB_OFFLINE`` is set.
    A4  A response slower than ``BYTES_PER_SECOND_MIN`` is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urljoin, urlsplit

from ...config import Settings
from ...errors import (
    BucketNotFoundError,
    ConfigError,
    EndpointError,
    HubOfflineError,
    IntegrityError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreError,
    StoreUnavailableError,
)
from ...format.layout import Location
from ...format.manifest import is_safe_path
from ...home import cache_home
from ...redaction import redact
from ...telemetry import logger
from ...types import ByteRange, Tier
from ..access import path_of, variable
from ..base import no_such_name, proxy_refused, retries_spent, untrusted
from ..http_client import describe_error
from ..http_reader import ANSWER_SECONDS_MAX, REDIRECTS_MAX, opener, range_header
from ..obstore_errors import body_kind
from ..proxies import proxy_for, routed
from ..retry import PROBE_SECONDS_MAX, Retries
from ..signed_requests import MAY_PASS

log = logger("stores.hub")

BODY_BYTES_MAX: Final = 64 << 20
"""Git holds no larger files."""
PAGES_MAX: Final = 10_000
TREES_MAX: Final = 4
RATE_LIMIT_SECONDS_MAX: Final = 600.0
"""Two of the Hub's five-minute windows."""
RATE_LIMIT_SECONDS: Final = 30.0
REASON_MAX: Final = 200
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_MAY_PASS = MAY_PASS - {429}  # A2
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""In a URL other characters may mean something else."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RATE_LIMIT = re.compile(r";\s*t=(\d+)")
_NEXT = re.compile(r'<([^>]+)>\s*;\s*rel="next"')
_KINDS = ("datasets", "spaces", "models")


@dataclass(frozen=True, slots=True)
class Repository:
    kind: str
    name: str
    revision: str = "main"
    path: str = ""

    @property
    def page(self) -> str:
        return self.name if self.kind == "models" else f"{self.kind}/{self.name}"

    @property
    def folder(self) -> str:
        return f"{self.kind}--{self.name.replace('/', '--')}"

    @property
    def is_commit(self) -> bool:
        return _COMMIT.fullmatch(self.revision) is not None


def repository_of(location: Location) -> Repository | None:
    """Parse ``hf://org/name[@revision][/path]`` or ``hf://datasets/org/name...``; None: no repository."""
    kind, parts = "models", [part for part in (location.authority, *location.path.split("/")) if part]
    if parts and parts[0] in _KINDS:
        kind = parts.pop(0)
    if len(parts) < 2:
        return None
    name, _, revision = parts[1].partition("@")
    if not (NAME.fullmatch(parts[0]) and NAME.fullmatch(name)):
        return None
    rest = parts[2:]
    if revision == "refs" and len(rest) >= 2:  # @refs/pr/1 contains slashes
        revision, rest = "/".join([revision, *rest[:2]]), rest[2:]
    return Repository(kind, f"{parts[0]}/{name}", unquote(revision) or "main", "/".join(rest))


@dataclass(frozen=True, slots=True)
class HubFile:
    path: str
    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str
    is_more: bool = False

    @property
    def reason(self) -> str:
        text: Any = self.headers.get("x-error-message", "")
        if not text:
            with contextlib.suppress(ValueError, RecursionError):
                found = json.loads(self.body)
                text = found.get("error") or found.get("message") if isinstance(found, dict) else ""
        return redact(" ".join(text.split())[:REASON_MAX]) if isinstance(text, str) else ""

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise not_a_hub(self.url, body_kind(self.body.decode("utf-8", "replace"))) from None


class Hub:
    def __init__(self, settings: Settings, retries: Retries) -> None:
        self.endpoint = (_environ("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        scheme = ""
        with contextlib.suppress(ValueError):
            scheme, self.host = urlsplit(self.endpoint)[:2]
        if scheme not in ("http", "https") or not self.host or "@" in self.host:  # a password would be printed
            raise ConfigError(f"HF_ENDPOINT is {redact(self.endpoint)!r}", hint="Write https://HOST")
        self._settings, self._retries = settings, retries
        self._breaker = retries.breaker(self.host)
        self._next_request_at = 0.0
        self._trees: dict[tuple[str, str, str], list[HubFile]] = {}
        self._listing = asyncio.Lock()

    async def commit(self, repository: Repository) -> str:
        """Return the current commit of a revision. No request for a commit.

        Raises ObjectNotFoundError; PermissionDeniedError: gated, or private; StoreUnavailableError, also offline.
        """
        if repository.is_commit:
            return repository.revision
        revision = quote(repository.revision, safe="")
        answer = await self._api(f"/api/{repository.kind}/{repository.name}/revision/{revision}", repository)
        found = answer.json()
        commit = found.get("sha") if isinstance(found, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise not_a_hub(answer.url, f"it names no commit for {repository.page}@{repository.revision}")
        return commit

    async def tree(self, repository: Repository, commit: str) -> list[HubFile]:
        """Return every file of a commit, cached for all stores of this Hub. One request per 1000 files."""
        key = repository.kind, repository.name, commit
        async with self._listing:
            if key not in self._trees:
                files = await self._list(repository, commit)
                if len(self._trees) >= TREES_MAX:
                    del self._trees[next(iter(self._trees))]
                self._trees[key] = files
            return self._trees[key]

    async def _list(self, repository: Repository, commit: str) -> list[HubFile]:
        url = f"/api/{repository.kind}/{repository.name}/tree/{commit}?recursive=true&expand=false"
        files = []
        for _ in range(PAGES_MAX):
            answer = await self._api(url, repository)
            found = answer.json()
            if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
                raise StoreError(f"{self.host} lists no files of {repository.page}")
            files += [_file(item, repository) for item in found if item.get("type") == "file"]
            following = _NEXT.search(answer.headers.get("link", ""))
            if following is None:
                return files
            url = urljoin(answer.url, following[1])
        raise StoreError(f"{self.host} lists more than {PAGES_MAX} pages of {repository.page}", tier=Tier.SHARED)

    async def resolve(self, repository: Repository, commit: str, path: str, byte_range: ByteRange) -> str | Answer:
        """Return a temporary URL on another host, or a response with the range (206) or the whole file (200).

        Raises IntegrityError: a response of another commit.
        """
        url = self.path_of(repository, commit, path)
        answer = await self._api(url, repository, range_header(byte_range), path=path)
        other = answer.headers.get("x-repo-commit", commit)
        if other != commit:
            raise IntegrityError(
                f"{self.host} answers with commit {other[:40]} of {path}, not with {commit}", file=path
            )
        if answer.status in (200, 206):
            return answer
        check_http(answer.headers["location"])
        return answer.headers["location"]

    def path_of(self, repository: Repository, commit: str, path: str) -> str:
        prefix = "" if repository.kind == "models" else f"{repository.kind}/"
        return f"/{prefix}{repository.name}/resolve/{commit}/{quote(path)}"

    async def answer(self, path: str, form: bytes | None = None) -> Answer:
        headers = {} if form is None else {"Content-Type": "application/x-www-form-urlencoded"}
        return await self._ask(f"{self.endpoint}{path}", headers, form)

    async def _api(
        self, url: str, repository: Repository, headers: Mapping[str, str] | None = None, path: str = ""
    ) -> Answer:
        """Follows redirects on the Hub's own host. Returns a 2xx, or a 3xx to another host."""
        url = urljoin(f"{self.endpoint}/", url.lstrip("/")) if url.startswith("/") else url
        for _ in range(REDIRECTS_MAX):
            answer = await self._ask(url, headers or {})
            if answer.status < 300:
                return answer
            if answer.status >= 400:
                raise self._refusal(answer, repository, path)
            url = urljoin(url, answer.headers.get("location", ""))
            if not self._is_own(url):
                return Answer(answer.status, {**answer.headers, "location": url}, b"", answer.url)
        raise StoreError(f"{self.host} redirects {repository.page} in a circle", tier=Tier.SHARED)

    async def _ask(self, url: str, headers: Mapping[str, str], form: bytes | None = None) -> Answer:
        if variable("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE").is_true:
            hint = "`tierckpt cache ls` lists the models on this node; unset it to fetch more"
            message = f"{self.host} is not asked: HF_HUB_OFFLINE, or TRANSFORMERS_OFFLINE, is set"
            raise HubOfflineError(message, hint=hint, tier=Tier.SHARED, attempts=0)
        deadline = 0.0

        async def ask() -> Answer:
            nonlocal deadline
            while True:
                await asyncio.sleep(max(0.0, self._next_request_at - time.monotonic()))
                async with self._retries.request(self._breaker, self.probe):
                    answer = await asyncio.to_thread(request, url, {**headers, **self.authorization(url)}, form)
                    if answer.status in _MAY_PASS:
                        raise unavailable(self.host, f"HTTP {answer.status}", status=answer.status)
                if answer.status != 429:
                    return answer
                deadline = deadline or time.monotonic() + RATE_LIMIT_SECONDS_MAX
                self._note_rate_limit(answer, deadline)

        return await self._retries.again(ask, timeout_seconds=self._settings.store_timeout_seconds)

    def _note_rate_limit(self, answer: Answer, deadline: float) -> None:
        """Raises StoreUnavailableError: the wait would end after ``deadline``."""
        seconds = max(1.0, _seconds_to_wait(answer.headers))  # zero would retry without a pause
        if time.monotonic() + seconds > deadline:
            hint = "Try again later; with a token (HF_TOKEN) the limit is higher"
            message = f"{self.host} takes no more requests for {seconds:g} s"
            raise StoreUnavailableError(message, hint=hint, tier=Tier.SHARED, status=429, attempts=1)
        log.warning("%s takes no more requests for %g s: waiting", self.host, seconds)
        self._next_request_at = max(self._next_request_at, time.monotonic() + seconds)

    async def probe(self) -> bool:
        with contextlib.suppress(StoreUnavailableError):
            async with asyncio.timeout(PROBE_SECONDS_MAX):
                answer = await asyncio.to_thread(request, f"{self.endpoint}/robots.txt", {})
            return answer.status not in _MAY_PASS
        return False

    def _is_own(self, url: str) -> bool:
        """A redirect must not take the token out of TLS."""
        return urlsplit(url)[:2] == urlsplit(self.endpoint)[:2]

    def authorization(self, url: str) -> dict[str, str]:
        token = hub_token() if self._is_own(url) else ""  # A1
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _refusal(self, answer: Answer, repository: Repository, path: str) -> StoreError:
        where, page = f"{repository.page}@{repository.revision}", f"{self.endpoint}/{repository.page}"
        code, status, reason = answer.headers.get("x-error-code", ""), answer.status, answer.reason
        unseen = "this token may not see it" if hub_token() else "it is not to be seen without HF_TOKEN"
        says = f": the Hub says: {reason}" if reason else ""
        context: dict[str, Any] = {"tier": Tier.SHARED, "code": code or None, "reason": reason or None}

        def denied(message: str, hint: str) -> StoreError:
            return PermissionDeniedError(f"{message}{says}", hint=hint, **context)

        what = body_kind(answer.body.decode("utf-8", "replace"))
        if not code and status in (404, 405) and what.startswith("it sends an HTML"):
            return not_a_hub(answer.url, what)
        if status == 401 and hub_token() and (not code or "invalid" in reason.lower()):
            hint = f"It is invalid, or has expired: make another at {self.endpoint}/settings/tokens"
            return denied(f"{self.host} refuses the token of {_token_source()}", hint)
        if code == "GatedRepo":
            hint = f"Accept its conditions at {page}, and set {_token_source()}"
            return denied(f"{where} is gated, and {unseen}", hint)
        if code == "DisabledRepo" or reason == "Access to this resource is disabled.":
            return denied(f"{repository.page} is disabled", f"See {page}")
        if code == "RevisionNotFound":
            message = f"{repository.page} has no revision {repository.revision!r}"
            return BucketNotFoundError(
                message, hint=f"Look at {page}/tree/main", tier=Tier.SHARED, revision=repository.revision
            )
        if path and (code == "EntryNotFound" or (status == 404 and not code)):
            return no_object(where, path)
        if code == "RepoNotFound" or status == 404:
            message = f"{self.host} has no repository {repository.page}, or {unseen}"
            return BucketNotFoundError(message, hint="Check the name; a private one needs HF_TOKEN", **context)
        if status in (401, 403):
            hint = f"Set {_token_source()} to a token with the right to read it"
            return denied(f"{self.host} refuses {where} ({unseen})", hint)
        return StoreError(f"{self.host} refuses {where}: HTTP {status}{says}", **context, status=status)


def hub_of(retries: Retries) -> Hub:
    """One per mover. Raises ConfigError: no URL."""
    if retries.hub is None:
        retries.hub = Hub(retries.settings, retries)
    hub: Hub = retries.hub
    return hub


def request(url: str, headers: Mapping[str, str], form: bytes | None = None) -> Answer:
    """Make one request; return any response, also a redirect. Blocking.

    Raises StoreUnavailableError: no complete response. StoreError: no HTTP URL.
    """
    host = check_http(url)
    try:
        request = urllib.request.Request(url, data=form, headers={"User-Agent": "tierckpt", **headers})
        with opener.open(routed(request), timeout=ANSWER_SECONDS_MAX) as reply:
            answer = _answer(reply, url, headers)
    except ConfigError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise _failure(url, reason if isinstance(reason, BaseException) else error) from None
    if answer.status == 407:
        raise proxy_refused(host, url, 407, tier=Tier.SHARED)
    _proven_hosts.add(host)
    return answer


_proven_hosts: set[str] = set()
"""Hosts that have answered this process: their names exist."""
_NOT_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE", "PACKET_LENGTH_TOO_LONG"}
_TUNNEL = re.compile(r"Tunnel connection failed: (\d{3})")


def _failure(url: str, error: BaseException) -> StoreError:
    host, proxy = check_http(url), proxy_for(url)
    if isinstance(error, ssl.SSLCertVerificationError):
        return untrusted(host, host, error.verify_message, "hf", tier=Tier.SHARED)
    if isinstance(error, ssl.SSLError) and error.reason in _NOT_TLS:
        return not_a_hub(url, "it does not speak TLS: is it http://?")
    if (refusal := _TUNNEL.search(str(error))) is not None:
        return proxy_refused(host, url, int(refusal[1]), tier=Tier.SHARED)
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        return not_a_hub(url, f"it says {str(error).strip()[:60]!r}")
    if isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME and host not in _proven_hosts:
        return no_such_name(host, url, "HF_ENDPOINT", tier=Tier.SHARED)
    return unavailable(host, f"{f'{proxy.name}: ' if proxy is not None else ''}{describe_error(error)}")


def not_a_hub(url: str, what: str) -> EndpointError:
    host = urlsplit(url).netloc
    hint = "Set HF_ENDPOINT to the address of a Hub, or to nothing for https://huggingface.co"
    message = f"{host} does not answer as a Hub does{f': {what}' if what else ''}"
    return EndpointError(message, hint=hint, tier=Tier.SHARED)


def check_http(url: str) -> str:
    """Raises StoreError: a Hub must not redirect to local files."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StoreError(f"a Hub redirects to {redact(url)[:100]!r}, which is not an HTTP URL", tier=Tier.SHARED)
    return parts.netloc


def _answer(reply: Any, url: str, request: Mapping[str, str]) -> Answer:
    headers = {name.lower(): value for name, value in reply.headers.items()}
    requested = _RANGE.fullmatch(request.get("Range", "")) if reply.status == 200 else None
    size_bytes_max = int(requested[2]) - int(requested[1]) + 1 if requested is not None else BODY_BYTES_MAX
    length = headers.get("content-length", "")
    is_more = requested is not None and length.isdecimal() and int(length) > size_bytes_max
    body = b"" if is_more or 300 <= reply.status < 400 else reply.read(size_bytes_max + 1)
    if not is_more and len(body) <= size_bytes_max:
        return Answer(reply.status, headers, body, url)
    if requested is not None:
        return Answer(reply.status, headers, b"", url, is_more=True)
    raise StoreError(f"{urlsplit(url).netloc} sends more than {BODY_BYTES_MAX} bytes", tier=Tier.SHARED)


def no_object(where: str, path: str) -> ObjectNotFoundError:
    hint = "Its pointer was committed and its bytes were not: inform the owner of the repository"
    message = f"{where} lists {path}, and has no object for it"
    return ObjectNotFoundError(message, hint=hint, tier=Tier.SHARED, file=path)


def unavailable(host: str, reason: str, **context: object) -> StoreUnavailableError:
    return retries_spent(f"{host} cannot be reached", reason, **context)


def _file(item: Mapping[str, Any], repository: Repository) -> HubFile:
    path, lfs = item.get("path"), item.get("lfs")
    oid = lfs.get("oid") if isinstance(lfs, dict) else item.get("oid")
    size_bytes = lfs.get("size") if isinstance(lfs, dict) else item.get("size")
    is_good = isinstance(oid, str) and (_SHA256 if lfs else _COMMIT).fullmatch(oid) is not None
    if not is_safe_path(path) or not isinstance(size_bytes, int) or size_bytes < 0 or not is_good:
        raise StoreError(f"{repository.page} lists a file that cannot be: {str(path)[:100]!r}", tier=Tier.SHARED)
    return HubFile(path, size_bytes, f"{'sha256' if lfs else 'git'}:{oid}")


def _seconds_to_wait(headers: Mapping[str, str]) -> float:
    if re.fullmatch(r"\d{1,9}(\.\d+)?", after := headers.get("retry-after", "")):
        return float(after)
    left = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    return float(left[1]) if left else RATE_LIMIT_SECONDS


def _environ(*names: str) -> str:
    return next((value for name in names if (value := os.environ.get(name, "").strip())), "")


def _path(default: Path, *names: str) -> Path:
    value = _environ(*names)
    return path_of(os.path.expandvars(value)) if value else default


def hf_home() -> Path:
    return _path(cache_home() / "huggingface", "HF_HOME")


def hub_cache() -> Path:
    return _path(hf_home() / "hub", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")


def hub_token() -> str:
    """'' with ``HF_HUB_DISABLE_IMPLICIT_TOKEN``: no caller here passes a token explicitly."""
    if variable("HF_HUB_DISABLE_IMPLICIT_TOKEN").is_true:
        return ""
    if token := "".join(_environ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN").split()):
        return token
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return "".join(_token_path().read_text().split())
    return ""


def _token_path() -> Path:
    return _path(hf_home() / "token", "HF_TOKEN_PATH")


def _token_source() -> str:
    if variable("HF_HUB_DISABLE_IMPLICIT_TOKEN").is_true:
        return "HF_TOKEN, and unset HF_HUB_DISABLE_IMPLICIT_TOKEN"
    source = next((name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if _environ(name)), "")
    return source or (str(_token_path()) if hub_token() else "HF_TOKEN")
