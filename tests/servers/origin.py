"""A read-only S3 server with little overhead that records each request's client and range, and counts bytes sent.

    python tests/servers/origin.py DIR [--host 127.0.0.1] [--port 0] [--rate BYTES]

``DIR/bucket/key`` is ``s3://bucket/key``; new files appear at once, so a test writes through the file system. GET with
ranges and ``If-Match`` uses sendfile, HEAD and ListObjectsV2 work, credentials are ignored. ``--rate`` limits all
answers together, for tests without a shaped network.

It is spoken to by lines of JSON on stdin (``Origin`` below): it says its port first, then answers ``counts``, ``sent``,
``reset``, ``rate`` and ``stop``. It ends when its stdin does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import email.utils
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PIECE_BYTES = 256 * 1024
SEND_BUFFER_BYTES = 256 * 1024
"""Small, so that what counts as sent has nearly all arrived when a client hangs up."""
HEAD_BYTES_MAX = 64 * 1024
KEYS_MAX = 1000
START_SECONDS = 60.0
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class Server:
    def __init__(self, root: Path, rate: float | None) -> None:
        self.root, self.rate = root, rate
        self.stop_at: int | None = None
        self.reset()

    def reset(self) -> None:
        self.began = time.monotonic()
        self.sent: Counter[str] = Counter()
        self.requests: list[tuple[float, str, str, int, int]] = []
        """Data requests: time, client, key, start, stop."""
        self.verbs: Counter[str] = Counter()
        self._due = time.monotonic()

    def counts(self) -> dict[str, Any]:
        return {
            "sent_bytes": sum(self.sent.values()),
            "sent_bytes_by_key": dict(self.sent),
            "requests": len(self.requests),
            "ranges": self.requests,
            "verbs": dict(self.verbs),
        }

    async def serve(self, sock: socket.socket) -> None:
        """Answer one connection until its client has done."""
        client, unread = sock.getpeername()[0], b""
        with sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            while (taken := await _head(sock, unread)) is not None:
                head, unread = taken
                await self._answer(sock, client, head)

    async def _answer(self, sock: socket.socket, client: str, head: str) -> None:
        line, *rest = head.split("\r\n")
        verb, target, _ = line.split(" ", 2)
        fields = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in rest)}
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        self.verbs[verb] += 1
        if verb not in ("GET", "HEAD") or not (self.root / bucket).is_dir() or ".." in key.split("/"):
            return await self._error(sock, verb, "404 Not Found" if verb in ("GET", "HEAD") else "405 Not Allowed")
        if not key:
            return await self._list(sock, bucket, query)
        path = self.root / bucket / key
        if not path.is_file():
            return await self._error(sock, verb, "404 Not Found", "NoSuchKey")
        with path.open("rb") as file:
            return await self._object(sock, client, verb, f"{bucket}/{key}", file.fileno(), fields)

    async def _object(
        self, sock: socket.socket, client: str, verb: str, name: str, file: int, fields: dict[str, str]
    ) -> None:
        found = os.fstat(file)
        etag = f'"{found.st_mtime_ns:x}-{found.st_size:x}"'
        if fields.get("if-match", etag).strip('"') != etag.strip('"'):
            return await self._error(sock, verb, "412 Precondition Failed", "PreconditionFailed")
        start, stop, status = 0, found.st_size, "200 OK"
        if match := _RANGE.fullmatch(fields.get("range", "")):
            start, stop = _range_of(match, found.st_size)
            if start >= stop:
                return await self._error(sock, verb, "416 Range Not Satisfiable", "InvalidRange")
            status = f"206 Partial Content\r\nContent-Range: bytes {start}-{stop - 1}/{found.st_size}"
        modified = email.utils.formatdate(found.st_mtime, usegmt=True)
        await _send(
            sock,
            f"HTTP/1.1 {status}\r\nContent-Length: {stop - start}\r\nETag: {etag}\r\nLast-Modified: {modified}\r\n"
            "Accept-Ranges: bytes\r\nContent-Type: application/octet-stream\r\n\r\n",
        )
        if verb == "GET":
            self.requests.append((time.monotonic() - self.began, client, name, start, stop))
            await self._send_file(sock, name, file, start, stop)
        return None

    async def _send_file(self, sock: socket.socket, name: str, file: int, start: int, stop: int) -> None:
        while start < stop:
            piece = min(PIECE_BYTES, stop - start)
            await self._pace(piece)
            try:
                count = os.sendfile(sock.fileno(), file, start, piece)
            except BlockingIOError:
                await _until_writable(sock)
                continue
            if not count:
                raise ConnectionError("the file became shorter")
            self.sent[name] += count
            start += count

    async def _pace(self, size_bytes: int) -> None:
        while self.stop_at is not None and sum(self.sent.values()) >= self.stop_at:  # noqa: ASYNC110 - a command ends it
            await asyncio.sleep(0.01)
        if self.rate:
            self._due = max(self._due, time.monotonic() - 0.05) + size_bytes / self.rate
            await asyncio.sleep(self._due - time.monotonic())

    async def _list(self, sock: socket.socket, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        most = min(int(query.get("max-keys", KEYS_MAX)), KEYS_MAX)
        rows: dict[str, str] = {}
        for key, found in sorted(self._keys(bucket, prefix)):
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                shared = prefix + rest[: rest.index(delimiter) + len(delimiter)]
                rows[shared] = f"<CommonPrefixes><Prefix>{escape(shared)}</Prefix></CommonPrefixes>"
            else:
                rows[key] = _listed(key, found)
        names = [name for name in sorted(rows) if name > after]
        more = f"<NextContinuationToken>{escape(names[most - 1])}</NextContinuationToken>" if len(names) > most else ""
        await _send_body(
            sock,
            "200 OK",
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(names[:most])}</KeyCount>"
            f"<MaxKeys>{most}</MaxKeys><IsTruncated>{'true' if more else 'false'}</IsTruncated>{more}"
            f"{''.join(rows[name] for name in names[:most])}</ListBucketResult>",
        )

    def _keys(self, bucket: str, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        root = self.root / bucket
        for folder, _, files in os.walk(root / os.path.dirname(prefix)):  # noqa: PTH120 - a prefix is not a path
            for name in files:
                path = Path(folder, name)
                key = path.relative_to(root).as_posix()
                if key.startswith(prefix):
                    with contextlib.suppress(FileNotFoundError):
                        yield key, path.stat()

    async def _error(self, sock: socket.socket, verb: str, status: str, code: str = "NoSuchBucket") -> None:
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
        await _send_body(sock, status, body, with_body=verb != "HEAD")


def _range_of(match: re.Match[str], size: int) -> tuple[int, int]:
    if not match[1]:
        return max(0, size - int(match[2] or 0)), size
    return int(match[1]), min(size, int(match[2]) + 1 if match[2] else size)


def _listed(key: str, found: os.stat_result) -> str:
    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.st_mtime))
    etag = f"&quot;{found.st_mtime_ns:x}-{found.st_size:x}&quot;"
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified><ETag>{etag}</ETag>"
        f"<Size>{found.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


async def _head(sock: socket.socket, unread: bytes) -> tuple[str, bytes] | None:
    loop = asyncio.get_running_loop()
    while b"\r\n\r\n" not in unread:
        data = await loop.sock_recv(sock, HEAD_BYTES_MAX)
        if not data or len(unread) > HEAD_BYTES_MAX:
            return None
        unread += data
    head, _, unread = unread.partition(b"\r\n\r\n")
    return head.decode("latin-1"), unread


async def _send(sock: socket.socket, head: str) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, head.encode())


async def _send_body(sock: socket.socket, status: str, body: str, *, with_body: bool = True) -> None:
    data = body.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    await asyncio.get_running_loop().sock_sendall(sock, head + (data if with_body else b""))


async def _until_writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(sock)


async def _listen(listener: socket.socket, server: Server) -> None:
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    while True:
        sock, _ = await loop.sock_accept(listener)
        task = loop.create_task(server.serve(sock))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _run(given: argparse.Namespace) -> None:
    listener = socket.create_server((given.host, given.port), backlog=1024)
    listener.setblocking(False)
    server = Server(given.directory.absolute(), given.rate)
    _say({"port": listener.getsockname()[1]})
    serving = asyncio.create_task(_listen(listener, server))
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    while line := await stdin.readline():
        request = json.loads(line)
        match request["verb"]:
            case "counts":
                _say(server.counts())
            case "sent":
                _say({"sent_bytes": sum(server.sent.values())})
            case "reset":
                server.reset()
                _say({})
            case "rate":
                server.rate = request["rate"]
                _say({})
            case "stop":
                server.stop_at = request["at"]
                _say({})
    serving.cancel()


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


@dataclass
class Origin:
    """The other side: ``with Origin.running(DIR) as origin``. Started ``within`` another command, if need be."""

    process: subprocess.Popen[str]
    endpoint: str

    @classmethod
    @contextlib.contextmanager
    def running(
        cls,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        rate: float | None = None,
        within: Sequence[str] = (),
    ) -> Iterator[Origin]:
        command = [*within, sys.executable, __file__, str(directory), "--host", host, "--port", str(port)]
        process = subprocess.Popen(
            [*command, *(["--rate", str(rate)] if rate else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield cls(process, f"http://{host}:{_answer_of(process)['port']}")
        finally:
            process.kill()
            process.wait(60)

    def environment(self) -> dict[str, str]:
        """Environment variables for an S3 client of this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def counts(self) -> dict[str, Any]:
        """What went out since the last ``reset``: bytes, bytes by key, and each request for data."""
        return self._ask(verb="counts")

    def sent_bytes(self) -> int:
        return int(self._ask(verb="sent")["sent_bytes"])

    def reset(self) -> None:
        self._ask(verb="reset")

    def pace(self, rate: float | None) -> None:
        """Send at most ``rate`` bytes per second from now on."""
        self._ask(verb="rate", rate=rate)

    def stop_at(self, sent_bytes: int | None) -> None:
        """Send no more once so many bytes went out since the last ``reset``."""
        self._ask(verb="stop", at=sent_bytes)

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return _answer_of(self.process)


def _answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the origin exited with {process.wait(START_SECONDS)}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rate", type=float, default=None, help="bytes per second of all answers together")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process closes our stdin
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
