"""Malicious peers and clients (F20): no wrong byte is accepted, no byte leaks, no connection hangs.

Both harnesses count the attacks that ran, and find seeded bugs.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.fault import evil_client, evil_peer
from tests.peer_node import CHUNK, get, publish, secret_file, serving, until
from tierckpt.agent import http_server
from tierckpt.peer import chunk_files, inventory, peer_client
from tierckpt.peer.auth import Signer, Verifier
from tierckpt.peer.peer_http import chunk_target
from tierckpt.stores import get_concurrency

PEER_ATTACKS = set(evil_peer.ATTACKS)


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_client, "FIRST_BYTE_SECONDS", 0.5)
    monkeypatch.setattr(get_concurrency, "WINDOW_SECONDS", evil_peer.SLOW_SECONDS)
    monkeypatch.setattr(get_concurrency, "BYTES_PER_SECOND_MIN", CHUNK)


# --- malicious peers -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("short_timeouts")
async def test_no_malicious_peer_gets_wrong_bytes_into_the_cache(tmp_path: Path) -> None:
    report = await evil_peer.run(tmp_path, known=True)
    assert report.wrong == []
    assert set(report.ran) == PEER_ATTACKS
    assert set(report.accepted) <= evil_peer.HARMLESS
    errors = {name.split(": ")[0] for name in report.refused}
    assert errors | set(report.accepted) == PEER_ATTACKS


@pytest.mark.slow
@pytest.mark.usefixtures("short_timeouts")
async def test_client_rejects_invalid_holdings(tmp_path: Path) -> None:
    report = await evil_peer.run_lists(tmp_path)
    assert report.wrong == []
    assert set(report.ran) == set(evil_peer.LIST_ATTACKS)
    assert report.refused.total() == len(evil_peer.LIST_ATTACKS)


async def test_chunk_without_a_known_digest_must_match_the_peers_digest(tmp_path: Path) -> None:
    answers = {"wrong_bytes", "one_bit", "wrong_digest", "no_digest", "path_as_digest", "too_long", "another_chunk"}
    report = await evil_peer.run(tmp_path, known=False, attacks=answers)
    assert report.wrong == []
    assert set(report.ran) == answers
    assert set(report.accepted) == {"another_chunk"}, "consistent with its digest; only other peers can contradict it"


async def test_harness_finds_a_client_without_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_client, "same_digest", lambda *asked: True)
    monkeypatch.setattr("tierckpt.cache.partial_entry.same_digest", lambda *asked: True)
    report = await evil_peer.run(tmp_path, known=True, attacks=["wrong_bytes", "one_bit"])
    assert "wrong_bytes: wrong bytes" in report.wrong
    assert "one_bit: wrong bytes" in report.wrong


async def test_harness_finds_a_client_that_accepts_any_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Signer, "is_proven", lambda *asked: True)
    wrong_proofs = {"wrong_proof", "proof_of_another_answer"}
    report = await evil_peer.run(tmp_path, known=True, attacks=wrong_proofs)
    assert wrong_proofs <= set(report.accepted) - evil_peer.HARMLESS


# --- malicious clients ---------------------------------------------------------------------------------------------


async def test_server_leaks_nothing_and_serves_only_chunks_to_members(tmp_path: Path) -> None:
    frozen = evil_client.entry(tmp_path / "node")
    async with serving(tmp_path / "node") as node:
        report = await evil_client.run(node, frozen)
    assert report.wrong == []
    assert report.ran.total() == len(evil_client.attacks(frozen)) + 2
    assert report.ran.total() > 90
    assert report.answers["200"] == 0
    assert min(report.answers[status] for status in ("400", "401", "404", "405")) > 0


async def test_harness_finds_a_server_without_authentication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Verifier, "check", lambda *asked: ("anybody", "0" * 32))
    frozen = evil_client.entry(tmp_path / "node")
    async with serving(tmp_path / "node", peer_secret_file=secret_file(tmp_path / "secrets", "0" * 16)) as node:
        report = await run_with_any_proof(node, frozen)
    assert "no proof: bytes leaked" in report.wrong
    assert "a replay is answered" in report.wrong


async def test_harness_finds_a_server_that_follows_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = lambda directory, name: os.open(directory / name, os.O_RDONLY)  # noqa: E731
    monkeypatch.setattr(inventory, "open_beneath", follow)
    monkeypatch.setattr(chunk_files.ChunkSource, "trusts", lambda *asked: True)
    frozen = evil_client.entry(tmp_path / "node")
    async with serving(tmp_path / "node") as node:
        report = await evil_client.run(node, frozen)
    assert report.wrong == ["a link out of the cache was followed"]


async def run_with_any_proof(node: object, frozen: object) -> evil_client.Report:
    """Run the client. The member's last request is proven by another secret, which the client accepts here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Signer, "is_proven", lambda *asked: True)
        return await evil_client.run(node, frozen)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_slow_connections_time_out_and_do_not_block_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 3.0)
    frozen = evil_client.entry(tmp_path)
    async with serving(tmp_path) as node:
        dribbling = asyncio.ensure_future(evil_client.dribble(node, 60))
        await until(lambda: len(node.server.http.connections) == 60)
        assert await get(node.client(), node.member, frozen, 1)
        assert await dribbling < http_server.IDLE_SECONDS  # earlier than aiohttp's idle timeout
        assert node.server.counts["chunks"] == 1


async def test_harness_finds_a_server_without_a_head_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 3600.0)
    monkeypatch.setattr(evil_client, "ANSWER_SECONDS", 1.0)
    async with serving(tmp_path) as node:
        with pytest.raises(TimeoutError):
            await evil_client.dribble(node, 2)


async def test_server_closes_connections_of_clients_that_stop_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = {"big": os.urandom(128 * CHUNK)}
    frozen = publish(tmp_path, big, chunk_size_bytes=128 * CHUNK)
    monkeypatch.setattr(get_concurrency, "WINDOW_SECONDS", 0.2)
    monkeypatch.setattr(get_concurrency, "BYTES_PER_SECOND_MIN", 1 << 30)
    async with serving(tmp_path) as node:
        target = chunk_target(frozen.version, 128 * CHUNK, 0, 0, 0.0)
        _, writer = await evil_client.connect(node, limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(evil_client.signed(target))
        await until(lambda: node.server.serving.total() > 0)
        await until(lambda: node.server.serving.total() == 0 and not node.server.http.connections)
        writer.transport.abort()


async def test_server_accepts_a_fragmented_head_within_the_timeout(tmp_path: Path) -> None:
    frozen = evil_client.entry(tmp_path)
    async with serving(tmp_path) as node:
        reader, writer = await evil_client.connect(node)
        for byte in evil_client.signed(chunk_target(frozen.version, CHUNK, 1, 0, 0.0)):
            writer.write(bytes([byte]))
            await writer.drain()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.transport.abort()


# --- TLS -----------------------------------------------------------------------------------------------------------


def rejected_contexts(files: Mapping[str, Path]) -> dict[str, ssl.SSLContext]:
    """Return TLS contexts that a server must reject."""
    trusting, old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (trusting, old):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    old.load_cert_chain(files["peer_tls_dir"] / "tls.crt", files["peer_tls_dir"] / "tls.key")
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    return {"no certificate": trusting, "TLS 1.1": old}


@pytest.mark.parametrize("how", ["no certificate", "TLS 1.1"])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1:DeprecationWarning")
async def test_tls_server_rejects_clients_without_certificate_or_with_old_tls(tmp_path: Path, how: str) -> None:
    frozen = evil_client.entry(tmp_path)
    files = Authority(tmp_path).peer_settings(tmp_path / "tls")
    async with serving(tmp_path, peer_secret_file=None, **files) as node:
        answer = b""
        with pytest.raises((ssl.SSLError, OSError, asyncio.IncompleteReadError)):
            reader, writer = await evil_client.connect(node, ssl=rejected_contexts(files)[how])
            writer.write(evil_client.signed(chunk_target(frozen.version, CHUNK, 1, 0, 0.0)))
            answer = await reader.readexactly(1)
        assert answer == b""
        assert node.server.counts["chunks"] == 0
        assert await get(node.client(), node.member, frozen, 1)
