"""A malicious peer for tests of the client. Counts the attacks, the errors and the accepted answers.

Each attack is an answer as raw bytes. By default the peer knows the cluster's secret, so that the proof does not hide a
missing defence.
"""

from __future__ import annotations

import asyncio
import gzip
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.peer_node import CHUNK, SECRET, begin, bytes_of, freeze, settings_of
from tierckpt.cache.file_set import FileSet
from tierckpt.errors import TierckptError
from tierckpt.format.manifest import digest_of
from tierckpt.peer.auth import response_proof
from tierckpt.peer.membership import Member
from tierckpt.peer.peer_client import PeerClient

MANY_HEADERS = 1_000_000
SLOW_SECONDS = 0.15

Writer = asyncio.StreamWriter
Attack = Callable[["Request", Writer], Awaitable[None]]


@dataclass(frozen=True)
class Request:
    """One request, and the correct chunk."""

    nonce: str
    correct: bytes
    forbidden_address: str
    """Address of a server that must receive no request."""

    def head(self, status: int = 200, body: bytes | None = None, length: int | None = None, **fields: str) -> bytes:
        """Return the head of an answer with a valid proof."""
        known = {"X-Tierckpt-Digest": digest_of(self.correct), "X-Tierckpt-Held": "10;whole"}
        headers = {"Content-Length": str(len(self.correct) if length is None else length), **known}
        headers |= {name.replace("_", "-"): value for name, value in fields.items()}
        proof = response_proof(SECRET.encode(), self.nonce, status, headers, body)
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "X-Tierckpt-Proof": proof}.items())
        return f"HTTP/1.1 {status} Whatever\r\n{lines}\r\n".encode()


async def endless(request: Request, writer: Writer) -> None:
    writer.write(request.head(length=1 << 50))
    while not writer.is_closing():
        writer.write(os.urandom(CHUNK))
        await writer.drain()


async def endless_head(request: Request, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(MANY_HEADERS):
        writer.write(f"X-{number}: y\r\n".encode())
        if number % 1000 == 0:
            await writer.drain()
    writer.write(b"\r\n")


async def drip(data: bytes, writer: Writer) -> None:
    for byte in data:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(SLOW_SECONDS / 4)


async def slow_drip(request: Request, writer: Writer) -> None:
    writer.write(request.head())
    await drip(request.correct, writer)


async def slow_head(request: Request, writer: Writer) -> None:
    await drip(request.head(), writer)


async def silence(request: Request, writer: Writer) -> None:
    await asyncio.sleep(20 * SLOW_SECONDS)


async def closed_connection(request: Request, writer: Writer) -> None:
    writer.transport.abort()


async def json_without_an_end(request: Request, writer: Writer) -> None:
    writer.write(request.head(200, b"", 1 << 40))
    while not writer.is_closing():
        writer.write(b"[" * CHUNK)
        await writer.drain()


def writes(answer: Callable[[Request], bytes]) -> Attack:
    """The attack that sends ``answer`` at once."""

    async def attack(request: Request, writer: Writer) -> None:
        writer.write(answer(request))

    return attack


def chunk(data: Callable[[bytes], bytes], **fields: Any) -> Attack:
    """Send what ``data`` makes of the correct chunk; ``fields`` are those of ``Request.head``."""
    return writes(lambda request: request.head(**fields) + data(request.correct))


def as_it_is(data: bytes) -> bytes:
    return data


def random_bytes(data: bytes) -> bytes:
    return os.urandom(len(data))


def with_one_wrong_bit(data: bytes) -> bytes:
    wrong = bytearray(data)
    wrong[len(wrong) // 2] ^= 1
    return bytes(wrong)


def with_its_digest(data: Callable[[bytes], bytes]) -> Attack:
    """Send wrong bytes and the digest of them."""

    def answer(request: Request) -> bytes:
        wrong = data(request.correct)
        return request.head(X_Tierckpt_Digest=digest_of(wrong)) + wrong

    return writes(answer)


def other_length(request: Request, change: int, data: bytes) -> bytes:
    return request.head(length=len(request.correct) + change) + data


def gzip_answer(request: Request) -> bytes:
    bomb = gzip.compress(bytes(16 << 20))
    return request.head(length=len(bomb), Content_Encoding="gzip") + bomb


def chunked_answer(request: Request) -> bytes:
    head, count = request.head(Transfer_Encoding="chunked"), f"{len(request.correct):x}\r\n".encode()
    return head + count + request.correct + b"\r\n0\r\n" + b"X: y\r\n" * 1000 + b"\r\n"


def with_head_changed(old: bytes, new: bytes) -> Attack:
    return writes(lambda request: request.head().replace(old, new) + request.correct)


def redirects(status: int, location: str) -> Attack:
    return writes(lambda request: request.head(status, b"", 0, Location=location.format(request.forbidden_address)))


def proven_for_another(request: Request) -> bytes:
    return Request("0" * 32, request.correct, request.forbidden_address).head() + request.correct


REDIRECT_TO_A_LISTENER = redirects(307, "http://{}/v1/members")
GZIP_BOMB = writes(gzip_answer)

ATTACKS: dict[str, Attack] = {
    "wrong_bytes": chunk(random_bytes),
    "one_bit": chunk(with_one_wrong_bit),
    "wrong_bytes_and_their_digest": with_its_digest(random_bytes),
    "another_chunk": with_its_digest(lambda data: data[::-1]),
    "truncated": chunk(lambda data: data[:-1000]),
    "too_short": writes(lambda request: other_length(request, -1, request.correct[:-1])),
    "too_long": writes(lambda request: other_length(request, 1, request.correct + b"x")),
    "huge_length": chunk(as_it_is, length=1 << 50),
    "more_than_announced": chunk(lambda data: data + os.urandom(CHUNK)),
    "endless": endless,
    "endless_head": endless_head,
    "one_long_header": chunk(as_it_is, X_Long="y" * 100_000),
    "slow_drip": slow_drip,
    "slow_head": slow_head,
    "silence": silence,
    "closed_connection": closed_connection,
    "redirect": redirects(302, "http://169.254.169.254/latest/meta-data/"),
    "redirect_to_a_listener": REDIRECT_TO_A_LISTENER,
    "redirect_to_a_file": redirects(301, "file:///etc/passwd"),
    "gzip_bomb": GZIP_BOMB,
    "gzip_of_the_right_length": chunk(as_it_is, Content_Encoding="gzip"),
    "chunked_encoding": writes(chunked_answer),
    "two_lengths": with_head_changed(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n"),
    "garbage": writes(lambda request: os.urandom(3000) + b"\r\n\r\n" + request.correct),
    "another_protocol": writes(lambda _: b"SSH-2.0-OpenSSH_9.9\r\n\r\n"),
    "negative_length": chunk(as_it_is, length=-1),
    "wrong_digest": chunk(as_it_is, X_Tierckpt_Digest="0" * 32),
    "no_digest": chunk(as_it_is, X_Tierckpt_Digest=""),
    "path_as_digest": chunk(as_it_is, X_Tierckpt_Digest="../../../../etc/passwd"),
    "impossible_holdings": chunk(as_it_is, X_Tierckpt_Held="99999999999;1;1;1"),
    "wrong_proof": with_head_changed(b"X-Tierckpt-Proof: ", b"X-Tierckpt-Proof: 0"),
    "proof_of_another_answer": writes(proven_for_another),
    # Two answers to one request: the second must not answer the next request on the connection.
    "extra_answer": writes(lambda request: (request.head() + request.correct) * 2),
}


def listing(body: bytes, proven: bytes | None = None) -> Attack:
    """Answer a request for holdings by ``body``, with the proof of ``proven`` if that is given."""
    return writes(lambda request: request.head(200, body if proven is None else proven, len(body)) + body)


def holdings(landed: int, new: bytes, whole: bytes = b"false") -> bytes:
    counts = b'{"total":5,"landed":%d,"next":%d,' % (landed, landed)
    return counts + b'"new":[' + new + b'],"fetching":[],"whole":' + whole + b',"interested":[]}'


LIST_ATTACKS: dict[str, Attack] = {
    "no_json": listing(b"<html>" + os.urandom(100)),
    "json_without_an_end": json_without_an_end,
    "json_too_deep": listing(b'{"new":' + b"[" * 1_000_000),
    "holdings_of_everything": listing(holdings(9, b'"7"')),
    "too_many_lines": listing(holdings(9, b'"1",' * 100_000 + b'"1"')),
    "list_with_wrong_proof": listing(holdings(0, b"", b"true"), b"another body"),
    "redirect_to_a_listener": REDIRECT_TO_A_LISTENER,
    "gzip_bomb": GZIP_BOMB,
    "silence": silence,
}
"""Attacks on requests for holdings."""
HARMLESS = frozenset({"wrong_digest", "no_digest", "path_as_digest", "extra_answer", "more_than_announced"})
"""Attacks with a correct chunk: the client may accept it if the manifest has the digest."""


@dataclass
class Report:
    """Counts of one run: of attacks, errors, answers that were accepted, and status codes; ``wrong``: violations."""

    ran: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class ForbiddenServer:
    """A server that must receive no request."""

    def __init__(self) -> None:
        self.request = 0

    async def __aenter__(self) -> ForbiddenServer:
        self._server = await asyncio.start_server(self._count, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    def _count(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self.request += 1
        writer.transport.abort()


class EvilPeer:
    """Answers every request for a chunk with ``attack``."""

    def __init__(self, frozen: FileSet, data: Mapping[str, bytes], forbidden_address: str, ran: Counter[str]) -> None:
        self._frozen, self._data, self._elsewhere, self._fired = frozen, data, forbidden_address, ran
        self.attack, self.name = silence, ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> EvilPeer:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.member = Member("evil", f"{host}:{port}")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _connected(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        task = asyncio.ensure_future(self._answer(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            nonce = head.split("nonce=")[1].split(";")[0]
            target = head.split(" ")[1].split("?")[0]
            ordinal = int(target.rpartition("/")[2]) if "/chunk/" in target else 0
            self._fired[self.name] += 1
            await self.attack(Request(nonce, bytes_of(self._frozen, self._data, ordinal), self._elsewhere), writer)
            await writer.drain()
        except (OSError, EOFError):
            pass  # the client closed the connection
        finally:
            writer.close()


@asynccontextmanager
async def attacked(
    folder: Path, frozen: FileSet, data: Mapping[str, bytes], report: Report
) -> AsyncIterator[tuple[PeerClient, EvilPeer]]:
    """Yield a client and an evil peer; check that no redirect is followed."""
    async with ForbiddenServer() as forbidden, EvilPeer(frozen, data, forbidden.address, report.ran) as peer:
        client = PeerClient(settings_of(folder), "good")
        yield client, peer
        await client.close()
        if forbidden.request:
            report.wrong.append("a redirect was followed")


@asynccontextmanager
async def judged(report: Report, name: str) -> AsyncIterator[None]:
    """Count the error by which the client refuses the answer of an attack, and any other error as a violation."""
    try:
        async with asyncio.timeout(60):
            yield
    except TierckptError as error:
        report.refused[f"{name}: {type(error).__name__}"] += 1
    except BaseException as error:
        report.wrong.append(f"{name}: {type(error).__name__} is no TierckptError")


async def run(folder: Path, *, known: bool, attacks: Iterable[str] = tuple(ATTACKS)) -> Report:
    """Request chunks from an evil peer, attack by attack, and write accepted ones to the node's cache.

    ``known``: the manifest has digests. Otherwise the client can only check a chunk against the peer's own digest;
    comparing several peers is up to the caller.
    """
    data = {"model.bin": os.urandom(3 * CHUNK)}
    frozen, report = freeze(data, known=known), Report()
    partial = begin(folder, frozen)
    before = _outside(folder)
    correct = bytes_of(frozen, data, 1)
    expected = digest_of(correct) if frozen.files[0].digests else ""
    async with attacked(folder, frozen, data, report) as (client, peer):
        for name in attacks:
            peer.name, peer.attack = name, ATTACKS[name]
            into = memoryview(bytearray(len(correct)))
            async with judged(report, name):
                answer = await client.chunk(peer.member, frozen.version, CHUNK, 1, into, expected=expected)
                partial.store_chunk(0, 1, into, answer.digest)
                report.accepted[name] += 1
                if digest_of(into) != answer.digest:
                    report.wrong.append(f"{name}: the digest does not match the bytes")
                if expected and digest_of(into) != expected:
                    report.wrong.append(f"{name}: wrong bytes")
    if known and partial.has(0, 1):
        landed = (partial.incoming / "model.bin").read_bytes()[CHUNK : 2 * CHUNK]
        if digest_of(landed) != digest_of(correct):
            report.wrong.append("wrong bytes were written to the cache")
    if _outside(folder) != before:
        report.wrong.append("something was written outside the cache")
    partial.close()
    return report


def _outside(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if folder / "cache" not in path.parents}


async def run_lists(folder: Path) -> Report:
    """Request an evil peer's holdings, attack by attack."""
    data = {"model.bin": os.urandom(3 * CHUNK)}
    frozen, report = freeze(data), Report()
    async with attacked(folder, frozen, data, report) as (client, peer):
        for name, attack in LIST_ATTACKS.items():
            peer.name, peer.attack = name, attack
            async with judged(report, name):
                await client.chunk_report(peer.member, frozen.version, CHUNK)
                report.wrong.append(f"{name}: accepted")
    return report
