"""A Hugging Face Hub of our own: revisions, trees in pages, a resolver that redirects to signed URLs, limits, refusals.

It counts requests by kind, client and token. Two ports are two hosts: the Hub, and its CDN.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS_BYTES_MIN = 1000
PIECE_BYTES = 64 << 10
TOKEN = "hf_" + "a1B2c3D4" * 4
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Repository:
    """Commits by name, and the current revisions."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: dict[str, bytes], revision: str = "main") -> str:
        name = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[name] = dict(files)
        self.revisions[revision] = name
        return name


def oid(data: bytes) -> str:
    """As the tree has it: the SHA-256 of an LFS file, the git blob of any other."""
    if len(data) >= LFS_BYTES_MIN:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class FakeHub:
    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self.repositories: dict[str, Repository] = {}
        self.calls: Counter[str] = Counter()
        """Requests to the Hub, by kind."""
        self.sent: Counter[str] = Counter()
        """Bytes of files that went out, by path."""
        self.cdn_requests = 0
        self.cdn_authorizations: set[str] = set()
        self.page = 1000
        self.limited: list[dict[str, str]] = []
        """Headers of the answers 429 that come next."""
        self.refused: list[int] = []
        """Statuses of the answers that come next."""
        self.cdn_refused: list[int] = []
        """Statuses of the answers of its CDN that come next."""
        self.damaged: set[str] = set()
        self.lost: set[str] = set()
        """Paths of missing objects; with ``pointers`` the resolver sends the pointer."""
        self.pointers = False
        self.seconds_per_answer = 0.0
        self.bytes_per_second = 0.0
        """What files go out at, all together; 0: as fast as they can."""
        self._free_at = 0.0
        self.on_resolve = lambda: None
        self.on_piece: Callable[[], object] = lambda: None
        """Called before each piece of a file goes out, by the threads of all requests."""
        self.leads_to = ""
        """Where the resolver redirects, instead of to its CDN."""
        self.ignores_ranges = False
        """Whether a request for a range is answered with 200 and the whole file."""
        self.is_mirror = False
        """Whether the resolver sends large files itself."""
        self.xet = False
        """Whether large files are kept by Xet: the resolver redirects to its bridge, and the answers say so."""
        self.bridged: dict[str, tuple[str, str, str]] = {}
        """Objects of the bridge: commit, path and the signed query, by the path of the URL."""
        self.listing = b""
        """Answer of the tree API that replaces the real list."""
        self.epoch = 0
        self.expires_after = 0
        """At this request to the CDN every URL that was signed so far expires."""
        self._lock = threading.Lock()
        self._servers = [self._server(self._hub), self._server(self._cdn)]
        self.endpoint, self.cdn = (f"http://{host}:{server.server_port}" for server in self._servers)

    @property
    def requests(self) -> int:
        return sum(self.calls.values())

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _server(self, answer: Any) -> ThreadingHTTPServer:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                try:
                    answer(self)
                except ConnectionError:  # the client left
                    self.close_connection = True

            do_HEAD = do_POST = do_GET

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer((self._host, 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return server

    # --- the Hub -------------------------------------------------------------------------------------------------

    def _hub(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        parts = [unquote(part) for part in url.path.split("/") if part]
        if parts[0] == "datasets":  # a resolver's; a dataset is kept here as a model is
            parts.pop(0)
        kind = "api" if parts[:1] == ["api"] else "resolve"
        with self._lock:
            self.calls[parts[4] if kind == "api" and len(parts) > 4 else kind] += 1
            limit = self.limited.pop(0) if self.limited else None
            status = self.refused.pop(0) if self.refused else 0
        if limit is not None:
            return self._say(request, 429, b"", limit)
        if status:
            return self._say(request, status, b"", {})
        name = "/".join(parts[2:4] if kind == "api" else parts[:2])
        repository = self.repositories.get(name)
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository is None:
            code = 404 if token else 401
            return self._say(request, code, b"", {"X-Error-Code": "RepoNotFound"})
        if repository.gated and token != TOKEN:
            return self._say(request, 403 if token else 401, b"", {"X-Error-Code": "GatedRepo"})
        if kind == "api":
            query = parse_qs(url.query)
            if request.command == "POST":
                query |= parse_qs(request.rfile.read(int(request.headers["Content-Length"])).decode())
            what, revision = [*parts[4:6], "main"][:2] if len(parts) > 4 else ("revision", "main")
            return self._api(request, repository, what, revision, query)
        return self._resolve(request, repository, parts[3], "/".join(parts[4:]))

    def _api(
        self, request: BaseHTTPRequestHandler, repository: Repository, what: str, revision: str, query: Any
    ) -> None:
        commit = revision if revision in repository.commits else repository.revisions.get(revision)
        if commit is None:
            return self._say(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = repository.commits[commit]
        if what == "revision":
            body: Any = {"id": "/".join(urlsplit(request.path).path.split("/")[3:5]), "private": False, "tags": []}
            body |= {
                "sha": commit,
                "downloads": 0,
                "likes": 0,
                "siblings": [{"rfilename": path} for path in sorted(files)],
            }
            return self._say(request, 200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        if self.listing:
            return self._say(request, 200, self.listing, {"Content-Type": "application/json"})
        begin = int(query.get("cursor", ["0"])[0])
        items = [{"type": "directory", "path": "sub", "oid": "0" * 40, "size": 0}]
        chosen = sorted(files)[begin : begin + self.page]
        if what == "paths-info":
            asked = query.get("paths", [])
            folders = [path for path in asked if any(file.startswith(f"{path}/") for file in files)]
            items = [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]
            chosen = [path for path in asked if path in files]
        elif query.get("recursive", ["true"])[0].lower() != "true":
            below = "".join(f"{part}/" for part in unquote(urlsplit(request.path).path).split("/")[7:])
            inside = [path.removeprefix(below) for path in sorted(files) if path.startswith(below)]
            folders = sorted({f"{below}{path.partition('/')[0]}" for path in inside if "/" in path})
            items = [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]
            chosen = [below + path for path in inside if "/" not in path]
        for path in chosen:
            data = files[path]
            item: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": "1" * 40}
            if len(data) >= LFS_BYTES_MIN:
                item["lfs"] = {"oid": oid(data), "size": len(data), "pointerSize": 134}
                item |= {"xetHash": self.xet_hash(data)} if self.xet else {}
            else:
                item["oid"] = oid(data)
            items.append(item)
        headers = {"Content-Type": "application/json"}
        if what == "tree" and len(chosen) == self.page and begin + self.page < len(files):
            following = f"{self.endpoint}{urlsplit(request.path).path}?recursive=true&cursor={begin + self.page}"
            headers["Link"] = f'<{following}>; rel="next"'
        return self._say(request, 200, json.dumps(items).encode(), headers)

    def _resolve(self, request: BaseHTTPRequestHandler, repository: Repository, revision: str, path: str) -> None:
        self.on_resolve()
        commit = revision if revision in repository.commits else repository.revisions.get(revision, "")
        data = repository.commits.get(commit, {}).get(path)
        if data is None or (path in self.lost and not self.pointers):
            return self._say(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{oid(data)}"'}
        if path in self.lost:
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid(data)}\nsize {len(data)}\n"
            return self._say(request, 200, pointer.encode(), headers)
        if len(data) < LFS_BYTES_MIN or self.is_mirror:
            return self._send(request, path, data, headers)
        name = f"{commit}/{path}"
        signed = self.leads_to or f"{self.cdn}/{quote(name)}?Expires={self.epoch}&Signature={self._signature(name)}"
        headers |= {"Location": signed, "X-Linked-Etag": f'"{oid(data)}"', "X-Linked-Size": str(len(data))}
        if self.xet:
            headers |= self._xet_headers(commit, path, data)
        return self._say(request, 302, b"", headers)

    # --- Xet -----------------------------------------------------------------------------------------------------

    @staticmethod
    def xet_hash(data: bytes) -> str:
        return hashlib.blake2b(data, digest_size=32).hexdigest()

    def _xet_headers(self, commit: str, path: str, data: bytes) -> dict[str, str]:
        """As the Hub answers for a file kept by Xet: a client without Xet support follows ``Location``."""
        name, disposition = path.rpartition("/")[2], "response-content-disposition=inline%3B+filename*%3DUTF-8%27%27"
        at, signature = f"/xet-bridge-us/{commit[:24]}/{oid(data)}", self._signature(f"{commit}/{path}")
        query = (
            "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=cas%2F20261125%2Fus-east-1%2Fs3%2Faws4_request&"
            f"X-Xet-Cas-Uid=public&{disposition}{name}%3B&x-id=GetObject&Expires={self.epoch}&"
            f"Policy=eyJTdGF0ZW1lbnQi__&Signature={signature[:20]}~-%7E{signature[20:]}__&Key-Pair-Id=K2"
        )
        self.bridged[at] = commit, path, query
        auth, info = f"{self.endpoint}/api/models/x/xet-read-token/{commit}", f"{self.cdn}/reconstructions/1"
        return {
            "Location": f"{self.cdn}{at}?{query}",
            "X-Xet-Hash": self.xet_hash(data),
            "Link": f'<{auth}>; rel="xet-auth", <{info}>; rel="xet-reconstruction-info"',
        }

    # --- its CDN -------------------------------------------------------------------------------------------------

    def _signature(self, name: str) -> str:
        return hashlib.sha256(f"{self.epoch} {name}".encode()).hexdigest()

    def _cdn(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        commit, _, path = unquote(url.path).lstrip("/").partition("/")
        with self._lock:
            self.cdn_requests += 1
            self.epoch += self.cdn_requests == self.expires_after
            status = self.cdn_refused.pop(0) if self.cdn_refused else 0
            self.cdn_authorizations.add(request.headers.get("Authorization", ""))
        if status:
            return self._say(request, status, b"", {})
        if url.path in self.bridged:  # the signature is of the query as it was written
            commit, path, signed = self.bridged[url.path]
            is_signed = url.query == signed and f"Expires={self.epoch}&" in signed
        else:
            is_signed = parse_qs(url.query).get("Signature") == [self._signature(f"{commit}/{path}")]
        if not is_signed:
            return self._say(request, 403, b"expired", {})
        data = next(files.commits[commit][path] for files in self.repositories.values() if commit in files.commits)
        if path in self.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        time.sleep(self.seconds_per_answer)
        return self._send(request, path, data, {})

    def _send(self, request: BaseHTTPRequestHandler, path: str, data: bytes, headers: dict[str, str]) -> None:
        wanted = None if self.ignores_ranges else _RANGE.fullmatch(request.headers.get("Range", ""))
        start, stop = (int(wanted[1]), min(int(wanted[2]) + 1, len(data))) if wanted else (0, len(data))
        if wanted:
            headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        self._begin(request, 206 if wanted else 200, stop - start, headers)
        for at in range(start, stop if request.command == "GET" else start, PIECE_BYTES):
            piece = data[at : min(at + PIECE_BYTES, stop)]
            self.on_piece()
            with self._lock:  # before the write: a client that disconnects has been served
                self.sent[path] += len(piece)
                wait = self._paced(len(piece))
            time.sleep(wait)
            request.wfile.write(piece)

    def _paced(self, size_bytes: int) -> float:
        """How long so many bytes wait for those before them."""
        if not self.bytes_per_second:
            return 0.0
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + size_bytes / self.bytes_per_second
        return self._free_at - now

    def _say(self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._begin(request, status, len(body), headers)
        if request.command != "HEAD":
            request.wfile.write(body)

    def _begin(self, request: BaseHTTPRequestHandler, status: int, length: int, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(length))
        request.end_headers()


def fake_hub() -> closing[FakeHub]:
    """``with fake_hub() as hub``."""
    return closing(FakeHub())
