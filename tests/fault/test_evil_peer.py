"""Peers that lie, and strangers at the door (F20): no wrong byte is taken, nothing gets out, and nothing hangs.

Each harness is given bugs that it must find, and counts what it really tried.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.fault import evil_client, evil_peer
from tests.peer_node import CHUNK, begin, freeze, get, land, publish, secret_file, serving, until
from tierckpt.agent import http_server
from tierckpt.errors import IntegrityError, PeerError, PermissionDeniedError
from tierckpt.peer import chunk_files, inventory, peer_client
from tierckpt.peer.auth import Signer, Verifier
from tierckpt.peer.peer_http import chunk_target
from tierckpt.stores import get_concurrency

WILES = {wile.__name__ for wile in evil_peer.WILES}


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_client, "FIRST_BYTE_SECONDS", 0.5)
    monkeypatch.setattr(get_concurrency, "WINDOW_SECONDS", evil_peer.SLOW_SECONDS)
    monkeypatch.setattr(get_concurrency, "BYTES_PER_SECOND_MIN", CHUNK)


# --- a peer that lies ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("short_patience")
async def test_nothing_that_a_peer_does_makes_a_wrong_byte_land(tmp_path: Path) -> None:
    report = await evil_peer.run(tmp_path, known=True)
    assert report.wrong == []
    assert set(report.fired) == WILES
    assert set(report.taken) <= evil_peer.HARMLESS
    errors = {name.split(": ")[0] for name in report.refused}
    assert errors | set(report.taken) == WILES


@pytest.mark.slow
@pytest.mark.usefixtures("short_patience")
async def test_lists_that_cannot_be_are_not_believed(tmp_path: Path) -> None:
    report = await evil_peer.run_lists(tmp_path)
    assert report.wrong == []
    assert set(report.fired) == {wile.__name__ for wile in evil_peer.LISTS}
    assert report.refused.total() == len(evil_peer.LISTS)


async def test_where_nobody_knows_the_digests_what_a_peer_gives_is_what_it_says(tmp_path: Path) -> None:
    lies = [
        evil_peer.wrong_bytes,
        evil_peer.one_bit,
        evil_peer.wrong_digest,
        evil_peer.no_digest,
        evil_peer.a_path_for_a_digest,
        evil_peer.too_long,
        evil_peer.another_chunk,
    ]
    report = await evil_peer.run(tmp_path, known=False, wiles=lies)
    assert report.wrong == []
    assert set(report.fired) == {wile.__name__ for wile in lies}
    assert set(report.taken) == {"another_chunk"}, "it is what it says; who asks several is told by their disagreement"


async def test_the_harness_finds_a_client_that_verifies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_client, "same_digest", lambda *asked: True)
    monkeypatch.setattr("tierckpt.cache.partial_entry.same_digest", lambda *asked: True)
    report = await evil_peer.run(tmp_path, known=True, wiles=[evil_peer.wrong_bytes, evil_peer.one_bit])
    assert "wrong_bytes: wrong bytes" in report.wrong
    assert "one_bit: wrong bytes" in report.wrong


async def test_the_harness_finds_a_client_that_believes_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Signer, "is_proven", lambda *asked: True)
    strangers = [evil_peer.a_stranger, evil_peer.a_proof_of_another_answer]
    report = await evil_peer.run(tmp_path, known=True, wiles=strangers)
    assert {"a_stranger", "a_proof_of_another_answer"} <= set(report.taken) - evil_peer.HARMLESS


# --- strangers at the door -----------------------------------------------------------------------------------------


async def test_nothing_gets_out_to_strangers_and_nothing_but_chunks_to_members(tmp_path: Path) -> None:
    frozen, _ = evil_client.entry(tmp_path / "node")
    async with serving(tmp_path / "node") as node:
        report = await evil_client.run(node, frozen)
    assert report.wrong == []
    assert report.fired.total() == len(evil_client.attacks(frozen)) + 2
    assert report.fired.total() > 90
    assert report.answers["200"] == 0
    assert min(report.answers[status] for status in ("400", "401", "404", "405")) > 0


async def test_the_harness_finds_a_server_that_lets_everybody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verifier, "check", lambda *asked: ("anybody", "0" * 32))
    frozen, _ = evil_client.entry(tmp_path / "node")
    async with serving(tmp_path / "node", peer_secret_file=secret_file(tmp_path / "secrets", "0" * 16)) as node:
        report = await _run_on(node, frozen)
    assert "no proof: bytes have got out" in report.wrong
    assert "a replay is answered" in report.wrong


async def test_the_harness_finds_a_server_that_follows_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = lambda directory, name: os.open(directory / name, os.O_RDONLY)  # noqa: E731
    monkeypatch.setattr(inventory, "open_beneath", follow)
    monkeypatch.setattr(chunk_files.ChunkSource, "trusts", lambda *asked: True)
    frozen, _ = evil_client.entry(tmp_path / "node")
    async with serving(tmp_path / "node") as node:
        report = await evil_client.run(node, frozen)
    assert report.wrong == ["a link out was followed"]


async def _run_on(node: object, frozen: object) -> evil_client.Report:
    """A run whose last request, of a member, may fail: the server's answers prove another secret."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Signer, "is_proven", lambda *asked: True)
        return await evil_client.run(node, frozen)  # type: ignore[arg-type]


async def test_connections_that_dribble_are_closed_in_time_and_hold_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 3.0)
    frozen, _ = evil_client.entry(tmp_path)
    async with serving(tmp_path) as node:
        dribbling = asyncio.ensure_future(evil_client.dribble(node, 60))
        await until(lambda: len(node.server.http.connections) == 60)
        assert await get(node.client(), node.member, frozen, 1)
        assert await dribbling < http_server.IDLE_SECONDS  # after which aiohttp would close them
        assert node.server.counts["chunks"] == 1


async def test_the_harness_finds_a_server_that_waits_for_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 3600.0)
    monkeypatch.setattr(evil_client, "ANSWER_SECONDS", 1.0)
    async with serving(tmp_path) as node:
        with pytest.raises(TimeoutError):
            await evil_client.dribble(node, 2)


async def test_who_does_not_read_what_it_asked_for_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = {"big": os.urandom(128 * CHUNK)}
    frozen = publish(tmp_path, big, chunk_size_bytes=128 * CHUNK)
    monkeypatch.setattr(get_concurrency, "WINDOW_SECONDS", 0.2)
    monkeypatch.setattr(get_concurrency, "BYTES_PER_SECOND_MIN", 1 << 30)
    async with serving(tmp_path) as node:
        target = chunk_target(frozen.version, 128 * CHUNK, 0, 0, 0.0)
        host, port = node.server.address.split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(evil_client.signed(target))
        await until(lambda: node.server.serving.total() > 0)
        await until(lambda: node.server.serving.total() == 0 and not node.server.http.connections)
        writer.transport.abort()


async def test_a_head_that_comes_in_time_may_come_in_pieces(tmp_path: Path) -> None:
    frozen, _ = evil_client.entry(tmp_path)
    async with serving(tmp_path) as node:
        host, port = node.server.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for byte in evil_client.signed(chunk_target(frozen.version, CHUNK, 1, 0, 0.0)):
            writer.write(bytes([byte]))
            await writer.drain()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.transport.abort()


async def test_a_lie_in_a_progress_file_is_found_by_who_receives(tmp_path: Path) -> None:
    """The server believes lines of this boot. What has rotted since then is found at the other end, every time."""
    data = evil_client.marked()
    frozen = freeze(data, known=True)
    filling = begin(tmp_path, frozen)
    land(filling, data)
    with (filling.incoming / frozen.files[0].path).open("r+b") as stream:
        stream.write(b"rotten")
    async with serving(tmp_path) as node:
        into = memoryview(bytearray(CHUNK))
        with pytest.raises(IntegrityError):
            expected = frozen.files[0].digests[0]
            await node.client().chunk(node.member, frozen.version, CHUNK, 0, into, expected=expected)
    filling.close()


# --- TLS -----------------------------------------------------------------------------------------------------------


def certified(authority: Authority, folder: Path, host: str = "127.0.0.1") -> dict[str, Path]:
    folder.mkdir()
    authority.directory = folder
    certificate, key = authority.issue(host)
    certificate.rename(folder / "tls.crt")
    key.rename(folder / "tls.key")
    shutil.copy(authority.path, folder / "ca.crt")
    return {"peer_tls_dir": folder}


def contexts(files: Mapping[str, Path]) -> dict[str, ssl.SSLContext]:
    """Ways to speak TLS that a server must not answer."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.load_cert_chain(files["peer_tls_dir"] / "tls.crt", files["peer_tls_dir"] / "tls.key")
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    return {"no certificate": trusting, "TLS 1.1": old}


@pytest.mark.parametrize("how", ["no certificate", "TLS 1.1"])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1:DeprecationWarning")
async def test_a_server_with_certificates_does_not_answer(tmp_path: Path, how: str) -> None:
    frozen, _ = evil_client.entry(tmp_path)
    files = certified(Authority(tmp_path), tmp_path / "tls")
    async with serving(tmp_path, peer_secret_file=None, **files) as node:
        host, port = node.server.address.split(":")
        answer = b""
        with pytest.raises((ssl.SSLError, OSError, asyncio.IncompleteReadError)):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=contexts(files)[how])
            writer.write(evil_client.signed(chunk_target(frozen.version, CHUNK, 1, 0, 0.0)))
            answer = await reader.readexactly(1)
        assert answer == b""
        assert node.server.counts["chunks"] == 0
        assert await get(node.client(), node.member, frozen, 1)


async def test_a_node_with_a_certificate_for_another_address_is_not_believed(tmp_path: Path) -> None:
    frozen, _ = evil_client.entry(tmp_path)
    authority = Authority(tmp_path)
    good = certified(authority, tmp_path / "good")
    other = certified(authority, tmp_path / "other", "127.0.0.2")
    async with serving(tmp_path, peer_secret_file=None, **other) as node:
        with pytest.raises((PermissionDeniedError, PeerError)):
            await get(node.client(**good), node.member, frozen, 1)
