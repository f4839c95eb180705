"""A malicious peer for tests of the client. Counts the attacks, the errors and the accepted answers.

Each attack is an answer as raw bytes. By default the peer knows the cluster's secret, so that the proof does not hide a
missing defence.
"""

from __future__ import annotations

import asyncio
import gzip
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.peer_node import CHUNK, SECRET, begin, bytes_of, freeze, settings_of
from tierckpt.cache.file_set import FileSet
from tierckpt.cache.partial_entry import PartialEntry
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


async def wrong_bytes(request: Request, writer: Writer) -> None:
    writer.write(request.head() + os.urandom(len(request.correct)))


async def one_bit(request: Request, writer: Writer) -> None:
    wrong = bytearray(request.correct)
    wrong[len(wrong) // 2] ^= 1
    writer.write(request.head() + wrong)


async def wrong_bytes_and_their_digest(request: Request, writer: Writer) -> None:
    wrong = os.urandom(len(request.correct))
    writer.write(request.head(X_Tierckpt_Digest=digest_of(wrong)) + wrong)


async def another_chunk(request: Request, writer: Writer) -> None:
    wrong = request.correct[::-1]
    writer.write(request.head(X_Tierckpt_Digest=digest_of(wrong)) + wrong)


async def truncated(request: Request, writer: Writer) -> None:
    writer.write(request.head() + request.correct[:-1000])


async def too_short(request: Request, writer: Writer) -> None:
    writer.write(request.head(length=len(request.correct) - 1) + request.correct[:-1])


async def too_long(request: Request, writer: Writer) -> None:
    writer.write(request.head(length=len(request.correct) + 1) + request.correct + b"x")


async def huge_length(request: Request, writer: Writer) -> None:
    writer.write(request.head(length=1 << 50) + request.correct)


async def more_than_announced(request: Request, writer: Writer) -> None:
    writer.write(request.head() + request.correct + os.urandom(CHUNK))


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


async def one_long_header(request: Request, writer: Writer) -> None:
    writer.write(request.head(X_Long="y" * 100_000) + request.correct)


async def slow_drip(request: Request, writer: Writer) -> None:
    writer.write(request.head())
    for byte in request.correct:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(SLOW_SECONDS / 4)


async def slow_head(request: Request, writer: Writer) -> None:
    for byte in request.head():
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(SLOW_SECONDS / 4)


async def silence(request: Request, writer: Writer) -> None:
    await asyncio.sleep(20 * SLOW_SECONDS)


async def closed_connection(request: Request, writer: Writer) -> None:
    writer.transport.abort()


async def redirect(request: Request, writer: Writer) -> None:
    writer.write(request.head(302, b"", 0, Location="http://169.254.169.254/latest/meta-data/"))


async def redirect_to_a_listener(request: Request, writer: Writer) -> None:
    writer.write(request.head(307, b"", 0, Location=f"http://{request.forbidden_address}/v1/members"))


async def redirect_to_a_file(request: Request, writer: Writer) -> None:
    writer.write(request.head(301, b"", 0, Location="file:///etc/passwd"))


async def gzip_bomb(request: Request, writer: Writer) -> None:
    bomb = gzip.compress(bytes(16 << 20))
    writer.write(request.head(length=len(bomb), Content_Encoding="gzip") + bomb)


async def gzip_of_the_right_length(request: Request, writer: Writer) -> None:
    writer.write(request.head(Content_Encoding="gzip") + request.correct)


async def chunked_encoding(request: Request, writer: Writer) -> None:
    head = request.head(Transfer_Encoding="chunked")
    writer.write(
        head + f"{len(request.correct):x}\r\n".encode() + request.correct + b"\r\n0\r\n" + b"X: y\r\n" * 1000 + b"\r\n"
    )


async def two_lengths(request: Request, writer: Writer) -> None:
    head = request.head().replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n")
    writer.write(head + request.correct)


async def garbage(request: Request, writer: Writer) -> None:
    writer.write(os.urandom(3000) + b"\r\n\r\n" + request.correct)


async def another_protocol(request: Request, writer: Writer) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")


async def negative_length(request: Request, writer: Writer) -> None:
    writer.write(request.head(length=-1) + request.correct)


async def wrong_digest(request: Request, writer: Writer) -> None:
    writer.write(request.head(X_Tierckpt_Digest="0" * 32) + request.correct)


async def no_digest(request: Request, writer: Writer) -> None:
    writer.write(request.head(X_Tierckpt_Digest="") + request.correct)


async def path_as_digest(request: Request, writer: Writer) -> None:
    writer.write(request.head(X_Tierckpt_Digest="../../../../etc/passwd") + request.correct)


async def impossible_holdings(request: Request, writer: Writer) -> None:
    writer.write(request.head(X_Tierckpt_Held="99999999999;1;1;1") + request.correct)


async def wrong_proof(request: Request, writer: Writer) -> None:
    writer.write(request.head().replace(b"X-Tierckpt-Proof: ", b"X-Tierckpt-Proof: 0") + request.correct)


async def proof_of_another_answer(request: Request, writer: Writer) -> None:
    other = Request("0" * 32, request.correct, request.forbidden_address)
    writer.write(other.head() + request.correct)


async def extra_answer(request: Request, writer: Writer) -> None:
    """Two answers to one request: the second must not answer the next request on the connection."""
    writer.write((request.head() + request.correct) * 2)


ATTACKS: tuple[Attack, ...] = (
    wrong_bytes,
    one_bit,
    wrong_bytes_and_their_digest,
    another_chunk,
    truncated,
    too_short,
    too_long,
    huge_length,
    more_than_announced,
    endless,
    endless_head,
    one_long_header,
    slow_drip,
    slow_head,
    silence,
    closed_connection,
    redirect,
    redirect_to_a_listener,
    redirect_to_a_file,
    gzip_bomb,
    gzip_of_the_right_length,
    chunked_encoding,
    two_lengths,
    garbage,
    another_protocol,
    negative_length,
    wrong_digest,
    no_digest,
    path_as_digest,
    impossible_holdings,
    wrong_proof,
    proof_of_another_answer,
    extra_answer,
)


async def no_json(request: Request, writer: Writer) -> None:
    body = b"<html>" + os.urandom(100)
    writer.write(request.head(200, body, len(body)) + body)


async def json_without_an_end(request: Request, writer: Writer) -> None:
    writer.write(request.head(200, b"", 1 << 40))
    while not writer.is_closing():
        writer.write(b"[" * CHUNK)
        await writer.drain()


async def json_too_deep(request: Request, writer: Writer) -> None:
    body = b'{"new":' + b"[" * 1_000_000
    writer.write(request.head(200, body, len(body)) + body)


async def holdings_of_everything(request: Request, writer: Writer) -> None:
    body = b'{"total":5,"landed":9,"next":9,"new":["7"],"fetching":[],"whole":false,"interested":[]}'
    writer.write(request.head(200, body, len(body)) + body)


async def too_many_lines(request: Request, writer: Writer) -> None:
    body = b'{"total":5,"landed":9,"next":9,"new":[' + b'"1",' * 100_000
    body += b'"1"],"fetching":[],"whole":false,"interested":[]}'
    writer.write(request.head(200, body, len(body)) + body)


async def list_with_wrong_proof(request: Request, writer: Writer) -> None:
    body = b'{"total":5,"landed":0,"next":0,"new":[],"fetching":[],"whole":true,"interested":[]}'
    writer.write(request.head(200, b"another body", len(body)) + body)


LIST_ATTACKS: tuple[Attack, ...] = (
    no_json,
    json_without_an_end,
    json_too_deep,
    holdings_of_everything,
    too_many_lines,
    list_with_wrong_proof,
    redirect_to_a_listener,
    gzip_bomb,
    silence,
)
"""Attacks on requests for holdings."""
HARMLESS = frozenset({"wrong_digest", "no_digest", "path_as_digest", "extra_answer", "more_than_announced"})
"""Attacks with a correct chunk: the client may accept it if the manifest has the digest."""


@dataclass
class Report:
    """Counts of one run; ``wrong``: violations."""

    ran: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
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
        self.attack: Attack = wrong_bytes
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
            self._fired[self.attack.__name__] += 1
            await self.attack(Request(nonce, bytes_of(self._frozen, self._data, ordinal), self._elsewhere), writer)
            await writer.drain()
        except (OSError, EOFError):
            pass  # the client closed the connection
        finally:
            writer.close()


async def run(folder: Path, *, known: bool, attacks: Sequence[Attack] = ATTACKS, rounds: int = 1) -> Report:
    """Request chunks from an evil peer, attack by attack, and write accepted ones to the node's cache.

    ``known``: the manifest has digests. Otherwise the client can only check a chunk against the peer's own digest;
    comparing several peers is up to the caller.
    """
    data = {"model.bin": os.urandom(3 * CHUNK)}
    frozen, report = freeze(data, known=known), Report()
    settings = settings_of(folder)
    partial = begin(folder, frozen)
    before = _outside(folder)
    async with (
        ForbiddenServer() as forbidden_address,
        EvilPeer(frozen, data, forbidden_address.address, report.ran) as peer,
    ):
        client = PeerClient(settings, "good")
        for _ in range(rounds):
            for attack in attacks:
                peer.attack = attack
                await _try(client, peer.member, partial, data, report, attack.__name__)
        await client.close()
        if forbidden_address.request:
            report.wrong.append("a redirect was followed")
    if known and partial.has(0, 1):
        landed = (partial.incoming / "model.bin").read_bytes()[CHUNK : 2 * CHUNK]
        if digest_of(landed) != digest_of(bytes_of(frozen, data, 1)):
            report.wrong.append("wrong bytes were written to the cache")
    if _outside(folder) != before:
        report.wrong.append("something was written outside the cache")
    partial.close()
    return report


def _outside(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if folder / "cache" not in path.parents}


async def _try(
    client: PeerClient, member: Member, partial: PartialEntry, data: Mapping[str, bytes], report: Report, name: str
) -> None:
    frozen = partial.frozen
    correct = bytes_of(frozen, data, 1)
    into = memoryview(bytearray(len(correct)))
    expected = digest_of(correct) if frozen.files[0].digests else ""
    try:
        async with asyncio.timeout(60):
            answer = await client.chunk(member, frozen.version, CHUNK, 1, into, expected=expected)
            partial.store_chunk(0, 1, into, answer.digest)
    except TierckptError as error:
        report.refused[f"{name}: {type(error).__name__}"] += 1
        return
    except BaseException as error:
        report.wrong.append(f"{name}: {type(error).__name__} is no TierckptError")
        return
    report.accepted[name] += 1
    if digest_of(into) != answer.digest:
        report.wrong.append(f"{name}: the digest does not match the bytes")
    if expected and digest_of(into) != expected:
        report.wrong.append(f"{name}: wrong bytes")


async def run_lists(folder: Path) -> Report:
    """Request an evil peer's holdings, attack by attack."""
    data = {"model.bin": os.urandom(3 * CHUNK)}
    frozen, report = freeze(data), Report()
    settings = settings_of(folder)
    async with (
        ForbiddenServer() as forbidden_address,
        EvilPeer(frozen, data, forbidden_address.address, report.ran) as peer,
    ):
        client = PeerClient(settings, "good")
        for attack in LIST_ATTACKS:
            peer.attack = attack
            try:
                async with asyncio.timeout(60):
                    await client.chunk_report(peer.member, frozen.version, CHUNK)
                report.wrong.append(f"{attack.__name__}: accepted")
            except TierckptError as error:
                report.refused[f"{attack.__name__}: {type(error).__name__}"] += 1
            except BaseException as error:
                report.wrong.append(f"{attack.__name__}: {type(error).__name__} is no TierckptError")
        await client.close()
        if forbidden_address.request:
            report.wrong.append("a redirect was followed")
    return report
