"""A peer that lies, and what it does to who asks it: a harness that counts what fired and what came through.

Each wile is an answer as raw bytes. The peer knows the secret of the cluster unless said otherwise, so that nothing
is kept out by the proof that another defence should have kept out.
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
from tierckpt.peer.auth import prove
from tierckpt.peer.membership import Member
from tierckpt.peer.peer_client import PeerClient

HEADERS_MANY = 1_000_000
SLOW_SECONDS = 0.15

Writer = asyncio.StreamWriter
Wile = Callable[["Asked", Writer], Awaitable[None]]


@dataclass(frozen=True)
class Asked:
    """One request, and the chunk that would have been right."""

    nonce: str
    right: bytes
    elsewhere: str
    """An address at which nothing may ever be asked."""

    def head(self, status: int = 200, body: bytes | None = None, length: int | None = None, **said: str) -> bytes:
        """The head of an answer that is proven, whatever it says."""
        known = {"X-Tierckpt-Digest": digest_of(self.right), "X-Tierckpt-Held": "10;whole"}
        headers = {"Content-Length": str(len(self.right) if length is None else length), **known}
        headers |= {name.replace("_", "-"): value for name, value in said.items()}
        proof = prove(SECRET.encode(), self.nonce, status, headers, body)
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "X-Tierckpt-Proof": proof}.items())
        return f"HTTP/1.1 {status} Whatever\r\n{lines}\r\n".encode()


async def wrong_bytes(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head() + os.urandom(len(asked.right)))


async def one_bit(asked: Asked, writer: Writer) -> None:
    wrong = bytearray(asked.right)
    wrong[len(wrong) // 2] ^= 1
    writer.write(asked.head() + wrong)


async def wrong_bytes_and_their_digest(asked: Asked, writer: Writer) -> None:
    wrong = os.urandom(len(asked.right))
    writer.write(asked.head(X_Tierckpt_Digest=digest_of(wrong)) + wrong)


async def another_chunk(asked: Asked, writer: Writer) -> None:
    wrong = asked.right[::-1]
    writer.write(asked.head(X_Tierckpt_Digest=digest_of(wrong)) + wrong)


async def truncated(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head() + asked.right[:-1000])


async def too_short(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(length=len(asked.right) - 1) + asked.right[:-1])


async def too_long(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(length=len(asked.right) + 1) + asked.right + b"x")


async def huge_length(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(length=1 << 50) + asked.right)


async def more_than_announced(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head() + asked.right + os.urandom(CHUNK))


async def endless(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(length=1 << 50))
    while not writer.is_closing():
        writer.write(os.urandom(CHUNK))
        await writer.drain()


async def endless_head(asked: Asked, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(HEADERS_MANY):
        writer.write(f"X-{number}: y\r\n".encode())
        if number % 1000 == 0:
            await writer.drain()
    writer.write(b"\r\n")


async def one_long_header(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(X_Long="y" * 100_000) + asked.right)


async def slow_drip(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head())
    for byte in asked.right:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(SLOW_SECONDS / 4)


async def slow_head(asked: Asked, writer: Writer) -> None:
    for byte in asked.head():
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(SLOW_SECONDS / 4)


async def silence(asked: Asked, writer: Writer) -> None:
    await asyncio.sleep(20 * SLOW_SECONDS)


async def hang_up(asked: Asked, writer: Writer) -> None:
    writer.transport.abort()


async def redirect(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(302, b"", 0, Location="http://169.254.169.254/latest/meta-data/"))


async def redirect_to_a_listener(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(307, b"", 0, Location=f"http://{asked.elsewhere}/v1/members"))


async def redirect_to_a_file(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(301, b"", 0, Location="file:///etc/passwd"))


async def gzip_bomb(asked: Asked, writer: Writer) -> None:
    bomb = gzip.compress(bytes(16 << 20))
    writer.write(asked.head(length=len(bomb), Content_Encoding="gzip") + bomb)


async def gzip_of_the_right_length(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(Content_Encoding="gzip") + asked.right)


async def in_pieces(asked: Asked, writer: Writer) -> None:
    head = asked.head(Transfer_Encoding="chunked")
    writer.write(
        head + f"{len(asked.right):x}\r\n".encode() + asked.right + b"\r\n0\r\n" + b"X: y\r\n" * 1000 + b"\r\n"
    )


async def two_lengths(asked: Asked, writer: Writer) -> None:
    head = asked.head().replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n")
    writer.write(head + asked.right)


async def garbage(asked: Asked, writer: Writer) -> None:
    writer.write(os.urandom(3000) + b"\r\n\r\n" + asked.right)


async def another_protocol(asked: Asked, writer: Writer) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")


async def negative_length(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(length=-1) + asked.right)


async def wrong_digest(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(X_Tierckpt_Digest="0" * 32) + asked.right)


async def no_digest(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(X_Tierckpt_Digest="") + asked.right)


async def a_path_for_a_digest(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(X_Tierckpt_Digest="../../../../etc/passwd") + asked.right)


async def holdings_that_cannot_be(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(X_Tierckpt_Held="99999999999;1;1;1") + asked.right)


async def a_stranger(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head().replace(b"X-Tierckpt-Proof: ", b"X-Tierckpt-Proof: 0") + asked.right)


async def a_proof_of_another_answer(asked: Asked, writer: Writer) -> None:
    other = Asked("0" * 32, asked.right, asked.elsewhere)
    writer.write(other.head() + asked.right)


async def answers_ahead(asked: Asked, writer: Writer) -> None:
    """Two answers to one request: the second would be taken for that to the next request on the connection."""
    writer.write((asked.head() + asked.right) * 2)


WILES: tuple[Wile, ...] = (
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
    hang_up,
    redirect,
    redirect_to_a_listener,
    redirect_to_a_file,
    gzip_bomb,
    gzip_of_the_right_length,
    in_pieces,
    two_lengths,
    garbage,
    another_protocol,
    negative_length,
    wrong_digest,
    no_digest,
    a_path_for_a_digest,
    holdings_that_cannot_be,
    a_stranger,
    a_proof_of_another_answer,
    answers_ahead,
)


async def no_json(asked: Asked, writer: Writer) -> None:
    body = b"<html>" + os.urandom(100)
    writer.write(asked.head(200, body, len(body)) + body)


async def json_without_an_end(asked: Asked, writer: Writer) -> None:
    writer.write(asked.head(200, b"", 1 << 40))
    while not writer.is_closing():
        writer.write(b"[" * CHUNK)
        await writer.drain()


async def json_too_deep(asked: Asked, writer: Writer) -> None:
    body = b'{"new":' + b"[" * 1_000_000
    writer.write(asked.head(200, body, len(body)) + body)


async def holdings_of_everything(asked: Asked, writer: Writer) -> None:
    body = b'{"total":5,"landed":9,"next":9,"new":["7"],"fetching":[],"whole":false,"interested":[]}'
    writer.write(asked.head(200, body, len(body)) + body)


async def more_lines_than_may_be(asked: Asked, writer: Writer) -> None:
    body = b'{"total":5,"landed":9,"next":9,"new":[' + b'"1",' * 100_000
    body += b'"1"],"fetching":[],"whole":false,"interested":[]}'
    writer.write(asked.head(200, body, len(body)) + body)


async def a_stranger_s_list(asked: Asked, writer: Writer) -> None:
    body = b'{"total":5,"landed":0,"next":0,"new":[],"fetching":[],"whole":true,"interested":[]}'
    writer.write(asked.head(200, b"another body", len(body)) + body)


LISTS: tuple[Wile, ...] = (
    no_json,
    json_without_an_end,
    json_too_deep,
    holdings_of_everything,
    more_lines_than_may_be,
    a_stranger_s_list,
    redirect_to_a_listener,
    gzip_bomb,
    silence,
)
"""What is done to who asks for a list."""
HARMLESS = frozenset({"wrong_digest", "no_digest", "a_path_for_a_digest", "answers_ahead", "more_than_announced"})
"""Where the manifest knows the digest the bytes are right, and may be taken."""


@dataclass
class Report:
    """What became of a run. ``wrong`` is what must never be."""

    fired: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Elsewhere:
    """Listens where nobody may ever ask."""

    def __init__(self) -> None:
        self.asked = 0

    async def __aenter__(self) -> Elsewhere:
        self._server = await asyncio.start_server(self._count, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    def _count(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self.asked += 1
        writer.transport.abort()


class EvilPeer:
    """Answers every request for a chunk with ``wile``."""

    def __init__(self, frozen: FileSet, data: Mapping[str, bytes], elsewhere: str, fired: Counter[str]) -> None:
        self._frozen, self._data, self._elsewhere, self._fired = frozen, data, elsewhere, fired
        self.wile: Wile = wrong_bytes
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
            self._fired[self.wile.__name__] += 1
            await self.wile(Asked(nonce, bytes_of(self._frozen, self._data, ordinal), self._elsewhere), writer)
            await writer.drain()
        except (OSError, EOFError):
            pass  # it was hung up on
        finally:
            writer.close()


async def run(folder: Path, *, known: bool, wiles: Sequence[Wile] = WILES, rounds: int = 1) -> Report:
    """Ask an evil peer for chunks and land what comes in the node's cache, wile after wile.

    ``known``: the manifest has the digests. Else the peer's word is all there is, and what it gives must be what it
    says; whether to believe it is decided by who asks (he asks others too).
    """
    data = {"model.bin": os.urandom(3 * CHUNK)}
    frozen, report = freeze(data, known=known), Report()
    settings = settings_of(folder)
    filling = begin(folder, frozen)
    before = _outside(folder)
    async with Elsewhere() as elsewhere, EvilPeer(frozen, data, elsewhere.address, report.fired) as peer:
        client = PeerClient(settings, "good")
        for _ in range(rounds):
            for wile in wiles:
                peer.wile = wile
                await _try(client, peer.member, filling, data, report, wile.__name__)
        await client.close()
        if elsewhere.asked:
            report.wrong.append("a redirect was followed")
    if known and filling.has(0, 1):
        landed = (filling.incoming / "model.bin").read_bytes()[CHUNK : 2 * CHUNK]
        if digest_of(landed) != digest_of(bytes_of(frozen, data, 1)):
            report.wrong.append("wrong bytes have landed")
    if _outside(folder) != before:
        report.wrong.append("something was written outside the cache")
    filling.close()
    return report


def _outside(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if folder / "cache" not in path.parents}


async def _try(
    client: PeerClient, member: Member, filling: PartialEntry, data: Mapping[str, bytes], report: Report, name: str
) -> None:
    frozen = filling.frozen
    right = bytes_of(frozen, data, 1)
    into = memoryview(bytearray(len(right)))
    expected = digest_of(right) if frozen.files[0].digests else ""
    try:
        async with asyncio.timeout(60):
            answer = await client.chunk(member, frozen.version, CHUNK, 1, into, expected=expected)
            filling.land(0, 1, into, answer.digest)
    except TierckptError as error:
        report.refused[f"{name}: {type(error).__name__}"] += 1
        return
    except BaseException as error:
        report.wrong.append(f"{name}: {type(error).__name__} is no error of ours")
        return
    report.taken[name] += 1
    if digest_of(into) != answer.digest:
        report.wrong.append(f"{name}: the digest is not of what came")
    if expected and digest_of(into) != expected:
        report.wrong.append(f"{name}: wrong bytes")


async def run_lists(folder: Path) -> Report:
    """Ask an evil peer what it holds, wile after wile."""
    data = {"model.bin": os.urandom(3 * CHUNK)}
    frozen, report = freeze(data), Report()
    settings = settings_of(folder)
    async with Elsewhere() as elsewhere, EvilPeer(frozen, data, elsewhere.address, report.fired) as peer:
        client = PeerClient(settings, "good")
        for wile in LISTS:
            peer.wile = wile
            try:
                async with asyncio.timeout(60):
                    await client.chunk_report(peer.member, frozen.version, CHUNK)
                report.wrong.append(f"{wile.__name__}: it was believed")
            except TierckptError as error:
                report.refused[f"{wile.__name__}: {type(error).__name__}"] += 1
            except BaseException as error:
                report.wrong.append(f"{wile.__name__}: {type(error).__name__} is no error of ours")
        await client.close()
        if elsewhere.asked:
            report.wrong.append("a redirect was followed")
    return report
