"""A malicious client of a node's peer server: raw requests, and the answers that are allowed.

``allowed`` holds the status codes that may answer a request; "" means that the connection closes without an answer. The
bytes of every chunk, and of a file outside the cache, begin with ``MARK``, so that any answer shows a leak.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from tests.fault.evil_peer import Report
from tests.peer_node import CHUNK, SECRET, Node, get, publish
from tierckpt.cache.file_set import FileSet
from tierckpt.peer.auth import Signer
from tierckpt.peer.peer_http import chunk_target

MARK = b"confidential chunk bytes"
ANSWER_SECONDS = 60.0
REJECTED = frozenset({"400", "401", "404", "405", ""})


def marked(chunks: int = 4) -> dict[str, bytes]:
    return {"a/model.bin": b"".join(MARK + os.urandom(CHUNK - len(MARK)) for _ in range(chunks))}


@dataclass(frozen=True)
class Attack:
    name: str
    request: bytes
    allowed: frozenset[str] = REJECTED


def signed(
    target: str, *, method: str = "GET", key: bytes = SECRET.encode(), to: str = "server", extra: Iterable[str] = ()
) -> bytes:
    """Return a request with a valid proof, or with one for another key or server."""
    authorization, _ = Signer(key, "mallory").sign(method, target, to)
    return raw(f"{method} {target} HTTP/1.1", f"Authorization: {authorization}", *extra)


def raw(first: str, *lines: str) -> bytes:
    return "\r\n".join([first, "Host: server", *lines, "", ""]).encode("latin-1")


def attacks(frozen: FileSet) -> list[Attack]:
    good = chunk_target(frozen.version, CHUNK, 1, 0, 0.0)
    other = chunk_target(frozen.version, CHUNK, 2, 0, 0.0)
    proof = signed(good).split(b"\r\n")[2].decode()
    found = [
        Attack("no proof", raw(f"GET {good} HTTP/1.1"), frozenset({"401"})),
        Attack("an empty proof", raw(f"GET {good} HTTP/1.1", "Authorization: "), frozenset({"401"})),
        Attack("a bearer", raw(f"GET {good} HTTP/1.1", "Authorization: Bearer x"), frozenset({"401"})),
        Attack("the secret of another job", signed(good, key=b"of another job entirely"), frozenset({"401"})),
        Attack("a proof for another node", signed(good, to="other"), frozenset({"401"})),
        Attack("a proof without a node", signed(good, to=""), frozenset({"401"})),
        Attack("a proof of another chunk", raw(f"GET {other} HTTP/1.1", proof), frozenset({"401"})),
        Attack("a proof of another method", raw(f"HEAD {good} HTTP/1.1", proof), frozenset({"401"})),
        Attack("a range added", raw(f"GET {good} HTTP/1.1", proof, "Range: bytes=0-9"), frozenset({"401"})),
        Attack("an unknown path without a proof", raw("GET /v1/nothing HTTP/1.1"), frozenset({"401"})),
        Attack("many ranges", signed(good, extra=["Range: bytes=" + ",".join(["0-1"] * 500)])),
        Attack("too many headers", signed(good, extra=[f"X-{number}: y" for number in range(100)])),
        Attack("an endless head", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100_000),
        Attack("a long line", b"GET /" + b"x" * 100_000),
        Attack("garbage", os.urandom(5000) + b"\r\n\r\n"),
        Attack("TLS to a plain server", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(64) + b"\r\n\r\n"),
        Attack("HTTP/0.9", b"GET /v1/members\r\n\r\n"),
        Attack("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        Attack("a proxy request", signed("/x").replace(b"GET /x", b"GET http://169.254.169.254/x")),
        Attack("two requests in one", signed("/x", extra=["Content-Length: 0", "Transfer-Encoding: chunked"])),
        Attack("a body", signed(good, extra=["Content-Length: 10"]) + b"0123456789"),
        Attack("line feeds alone", signed(good).replace(b"\r\n", b"\n") + b"\r\n\r\n"),
        Attack("a header in a header", signed(good, extra=["X: a\rAuthorization: b"])),
    ]
    found += [Attack(f"method {name}", signed(good, method=name)) for name in METHODS]
    return found + [Attack(f"path {path!r}", signed(path), frozenset({"400", "404"})) for path in paths(frozen)]


METHODS = ("POST", "PUT", "DELETE", "TRACE", "OPTIONS", "CONNECT", "PATCH", "PROPFIND", "get")


def paths(frozen: FileSet) -> list[str]:
    """Return paths outside of the cache, for members that know the secret."""
    base, version = "/v1/chunk", frozen.version
    outs = ("..", "%2e%2e", "..%2f", "..%5c", "..\\", "%00", "....//", "%c0%ae%c0%ae", "..;", "~root", "C:")
    found = [f"{base}/{out}/{out}/etc/passwd" for out in outs]
    found += [f"{base}/{version}/{CHUNK}/{out}?after=0&wait=0" for out in outs]
    found += [f"{base}/{version}{out}/{CHUNK}/1?after=0&wait=0" for out in outs]
    found += [f"/v1/{kind}/{out}" for kind in ("manifest", "slow") for out in outs]
    found += [f"/{out}/outside" for out in outs]
    found += [f"/v1/segment/{span}" for span in (f"{version}/0/0", f"{version}/0/100000000", f"{version}/-1/4096")]
    found += ["/v1/members/", "/v1/members?x=1", "/v2/members", "//v1/members", "/v1/../v1/members", "/v1/%6dembers"]
    found += [
        "/",
        f"/v1/slow/{version}/",
        f"{base}/{version.upper()}/{CHUNK}/1?after=0&wait=0",
        f"{base}/{version}/{CHUNK}/01?after=0&wait=0",
        f"{base}/{version}/{CHUNK}/1?after=0&wait=1e9",
        f"{base}/{version}/{CHUNK}/1",
        f"{base}/{version}/{CHUNK}/1?wait=0&after=0",
        f"{base}/{version[:-1]}/{CHUNK}/1?after=0&wait=0",
        "/outside",
        "/v1/chunk/",
        "/static/outside",
        f"{base}/{version}/{CHUNK}/1?after=0&wait=0&path=/etc/passwd",
        f"{base}/{version}/{CHUNK}/-1?after=0&wait=0",
        f"{base}/{version}/{CHUNK}/9999999999?after=0&wait=0",
        f"{base}/{version}/{CHUNK}/4?after=0&wait=0",
        f"{base}/{version}/1/1?after=0&wait=0",
        f"{base}/{version}/999999999999/0?after=0&wait=0",
        f"{base}/{version}/4096/4194305?after=0&wait=0",
        f"{base}/{'0' * 32}/{CHUNK}/1?after=0&wait=0",
        f"{base}/{version}/{CHUNK}/1?after=0&wait=99999",
    ]
    return found


async def connect(node: Node, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = node.server.address.split(":")
    return await asyncio.open_connection(host, int(port), **options)


async def send(node: Node, request: bytes) -> bytes:
    """Send a request and return the whole answer."""
    reader, writer = await connect(node)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            writer.write(request)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            return head + await reader.readexactly(0 if request.startswith(b"HEAD") else length)
    except asyncio.IncompleteReadError as error:
        return error.partial
    except OSError:
        return b""
    finally:
        writer.transport.abort()


async def run(node: Node, frozen: FileSet) -> Report:
    """Send every attack, then check that the server still serves a member."""
    report, missing = Report(), set()
    for attack in attacks(frozen):
        answer = await send(node, attack.request)
        status = answer[9:12].decode("latin-1")
        report.ran[attack.name] += 1
        report.answers[status] += 1
        if MARK in answer:
            report.wrong.append(f"{attack.name}: bytes leaked")
        if status not in attack.allowed:
            report.wrong.append(f"{attack.name}: answered with {status or 'nothing'}")
        if status == "404":
            missing.add(b"\r\n".join(line for line in answer.split(b"\r\n") if b"proof" not in line.lower()))
    await _replay(node, frozen, report)
    await _swap_in_links(node, frozen, report)
    if len(missing) > 1:
        report.wrong.append("rejections differ between existing and missing paths")
    if not await get(node.client(), node.member, frozen, 3):
        report.wrong.append("a member is no longer served")
    return report


async def _replay(node: Node, frozen: FileSet, report: Report) -> None:
    request = signed(chunk_target(frozen.version, CHUNK, 1, 0, 0.0))
    first, again = await send(node, request), await send(node, request)
    report.ran["replay"] += 1
    if not first.startswith(b"HTTP/1.1 200") or MARK not in first:
        report.wrong.append("a valid request is rejected")
    if not again.startswith(b"HTTP/1.1 401") or MARK in again:
        report.wrong.append("a replay is answered")


async def _swap_in_links(node: Node, frozen: FileSet, report: Report) -> None:
    """Replace a cached file by a link to a file outside, as a local attacker may."""
    outside = node.root.parent / "outside"
    outside.write_bytes(MARK + bytes(5 * CHUNK))
    path = node.root / "cache" / frozen.name / frozen.files[0].path
    kept = path.with_name("kept")
    path.rename(kept)
    path.symlink_to(outside)
    answer = await send(node, signed(chunk_target(frozen.version, CHUNK, 0, 0, 0.0)))
    report.ran["a link swapped in"] += 1
    if MARK in answer or not answer.startswith(b"HTTP/1.1 404"):
        report.wrong.append("a link out of the cache was followed")
    path.unlink()
    kept.rename(path)


async def dribble(node: Node, connections: int) -> float:
    """Open connections that send one byte at a time. Returns the seconds until the server closed the last one."""
    begun = time.monotonic()

    async def one() -> None:
        reader, writer = await connect(node)
        head = chain(b"GET /v1/members HTTP/1.1\r\nX: ", repeat(ord("y")))
        try:
            while not reader.at_eof() and not writer.is_closing():
                writer.write(bytes([next(head)]))
                await writer.drain()
                try:
                    if not await asyncio.wait_for(reader.read(1), 0.02):
                        return
                except TimeoutError:
                    continue
        except OSError:
            return
        finally:
            writer.transport.abort()

    async with asyncio.timeout(ANSWER_SECONDS):
        await asyncio.gather(*(one() for _ in range(connections)))
    return time.monotonic() - begun


def entry(root: Path) -> FileSet:
    return publish(root, marked())
