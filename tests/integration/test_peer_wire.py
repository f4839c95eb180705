"""One node requests data of another, with real server, client and files (K1 to K3 in tierckpt/agent/peer_server.py)."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.peer_node import (
    CHUNK,
    EVENT_SECONDS,
    Node,
    begin,
    bytes_of,
    commit,
    freeze,
    get,
    land,
    model,
    publish,
    secret_file,
    serving,
    until,
)
from tierckpt.agent import http_server
from tierckpt.agent import peer_server as module
from tierckpt.cache.file_set import FileSet
from tierckpt.drain.rate_limiter import BURST_SECONDS
from tierckpt.errors import ObjectNotFoundError, PeerBusyError, PeerError, PermissionDeniedError
from tierckpt.format.manifest import digest_of
from tierckpt.peer import inventory
from tierckpt.peer.chunk_files import frozen_of
from tierckpt.peer.membership import Member

DATA = model()
FLOOD = int(os.environ.get("TIERCKPT_TEST_PEER_FLOOD", "40"))
"""Connections of nobody; the sweep makes it 10,000."""


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "SCAN_SECONDS", 0.01)


def same(one: bytes, other: bytes) -> bool:
    return digest_of(one) == digest_of(other)


# --- chunks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
async def test_chunks_arrive_in_the_callers_memory(tmp_path: Path, known: bool) -> None:
    frozen = publish(tmp_path, DATA, known=known)
    async with serving(tmp_path) as node:
        client = node.client()
        for ordinal in range(10):
            wanted = bytes_of(frozen, DATA, ordinal)
            into = memoryview(bytearray(len(wanted)))
            answer = await client.chunk(
                node.member, frozen.version, CHUNK, ordinal, into, expected=digest_of(wanted) if known else ""
            )
            assert same(into, wanted)
            assert answer.digest == digest_of(wanted)
            assert answer.held.whole
        assert node.server.counts["chunks"] == 10
        assert node.server.served == {"client": sum(map(len, DATA.values()))}


async def test_connection_is_reused(tmp_path: Path) -> None:
    frozen = publish(tmp_path, DATA)
    async with serving(tmp_path) as node:
        client = node.client()
        for ordinal in range(10):
            await get(client, node.member, frozen, ordinal)
            await client.chunk_report(node.member, frozen.version, CHUNK)
        assert len(node.server.http.connections) == 1


async def test_idle_connection_closed_by_the_peer_is_no_failure(tmp_path: Path) -> None:
    frozen = publish(tmp_path, DATA)
    async with serving(tmp_path) as node:
        client = node.client()
        await get(client, node.member, frozen, 0)
        for task in list(node.server.http.connections):
            task.cancel()
        await until(lambda: not node.server.http.connections)
        assert same(await get(client, node.member, frozen, 1), bytes_of(frozen, DATA, 1))


async def test_waiting_request_gets_a_new_chunk_at_once(tmp_path: Path) -> None:
    frozen = freeze(DATA)
    async with serving(tmp_path) as node:
        waiting = [asyncio.ensure_future(get(node.client(), node.member, frozen, 7, wait_seconds=10)) for _ in range(8)]
        await until(lambda: len(node.server.http.connections) == 8)
        filling = begin(tmp_path, frozen)
        await asyncio.to_thread(land, filling, DATA, [7])
        for one in await asyncio.gather(*waiting):
            assert same(one, bytes_of(frozen, DATA, 7))
        filling.close()


async def test_polling_slows_down_and_all_waiters_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = freeze(DATA)
    filling = begin(tmp_path, frozen)
    land(filling, DATA, [0])
    async with serving(tmp_path) as node:
        scans, locate = [], node.holdings.locate
        monkeypatch.setattr(node.holdings, "locate", lambda *what: scans.append(what) or locate(*what))
        waiting = [get(node.client(), node.member, frozen, 7, wait_seconds=1) for _ in range(4)]
        begun = time.monotonic()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, ObjectNotFoundError)
        assert 1 <= time.monotonic() - begun < EVENT_SECONDS
        assert node.server.serving.total() == 0
        assert 2 <= len(scans) <= 40  # nearly 100 with a constant period of 10 ms
    filling.close()


async def test_answer_lists_other_new_chunks(tmp_path: Path) -> None:
    frozen = freeze(DATA)
    filling = begin(tmp_path, frozen)
    land(filling, DATA, [3])
    land(filling, DATA, [1])
    async with serving(tmp_path) as node:
        client, into = node.client(), memoryview(bytearray(CHUNK))
        answer = await client.chunk(node.member, frozen.version, CHUNK, 3, into)
        assert [at for at, _ in answer.held.new] == [3, 1]
        await asyncio.to_thread(land, filling, DATA, [5])
        answer = await client.chunk(node.member, frozen.version, CHUNK, 3, into, after=answer.held.next)
        assert [at for at, _ in answer.held.new] == [5]
        report = await client.chunk_report(node.member, frozen.version, CHUNK, after=2, interested=True)
        assert [at for at, _ in report.new] == [5]
        assert report.interested == {"client", "server"}, "the node itself fetches it"
    filling.close()


async def test_interest_expires_without_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = freeze(DATA)
    async with serving(tmp_path) as node:
        one, two = node.client("one"), node.client("two")
        await one.chunk_report(node.member, frozen.version, CHUNK, interested=True)
        await two.chunk_report(node.member, frozen.version, CHUNK, interested=False)
        assert await asyncio.to_thread(node.server.interested, frozen.version) == {"one"}
        monkeypatch.setattr(module, "INTEREST_SECONDS", 0.0)
        assert await asyncio.to_thread(node.server.interested, frozen.version) == set()


async def test_file_system_without_sendfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, tried = publish(tmp_path, DATA), []

    async def none(*arguments: object, **how: object) -> int:
        tried.append(1)
        raise asyncio.SendfileNotAvailableError

    async with serving(tmp_path) as node:
        monkeypatch.setattr(asyncio.get_running_loop(), "sendfile", none, raising=False)
        assert same(await get(node.client(), node.member, frozen, 3), bytes_of(frozen, DATA, 3))
        assert tried == [1]


async def test_cancelled_request_writes_nothing_to_its_memory(tmp_path: Path) -> None:
    big = {"big": os.urandom(64 * CHUNK)}
    frozen = publish(tmp_path, big, chunk_size_bytes=64 * CHUNK)
    async with serving(tmp_path, bytes_per_second=16 * CHUNK) as node:
        client, into = node.client(), memoryview(bytearray(64 * CHUNK))
        asking = asyncio.ensure_future(client.chunk(node.member, frozen.version, 64 * CHUNK, 0, into))
        await until(lambda: into[100] != 0 or into[1000] != 0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        into[:] = bytes(len(into))
        await asyncio.sleep(0.3)
        assert same(into, bytes(len(into)))


# --- other requests ------------------------------------------------------------------------------------------------


async def test_peers_speak_ipv6(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine's loopback: {error}")
    frozen = publish(tmp_path, DATA)
    async with serving(tmp_path, peer_listen="[::1]:0") as node:
        assert node.server.address.startswith("[::1]:")
        assert same(await get(node.client(), node.member, frozen, 3), bytes_of(frozen, DATA, 3))


async def test_members_manifests_steps_and_status(tmp_path: Path) -> None:
    manifest = commit(tmp_path, "s3://bucket/run/step-100", DATA)
    async with serving(tmp_path) as node:
        client = node.client()
        assert await client.manifest(node.member, "s3://bucket/run/step-100") == manifest.encode()
        assert await client.steps(node.member, "s3://bucket/run") == {"step-100": manifest.attempt}
        assert await client.steps(node.member, "s3://bucket/other") == {}
        with pytest.raises(ObjectNotFoundError):
            await client.manifest(node.member, "s3://bucket/run/step-200")
        frozen = frozen_of(manifest, "")
        assert (await client.chunk_report(node.member, frozen.version, CHUNK)).whole
        assert await client.fresh(node.member) == {"runs": []}
        assert (await client.status(node.member))["name"] == "server"
        row = {"name": "client", "domain": 'rack "7"'}
        assert (await client.members(node.member, row))["me"]["name"] == "server"
        assert (await client.members(node.server.address))["members"] == []
        assert node.members.heard == [row, None]


# --- bounds --------------------------------------------------------------------------------------------------------


async def test_peer_gets_a_quarter_of_the_slots_and_then_retry_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SERVES_MAX", 8)
    frozen = publish(tmp_path, DATA)
    async with serving(tmp_path) as node:
        node.server.serving["greedy"] = 2
        with pytest.raises(PeerBusyError) as caught:
            await get(node.client("greedy"), node.member, frozen, 0)
        assert caught.value.retry_after_seconds == 1
        assert await get(node.client("modest"), node.member, frozen, 0)
        node.server.serving["other"] = 6
        with pytest.raises(PeerBusyError):
            await get(node.client("modest"), node.member, frozen, 0)
        waiting = asyncio.ensure_future(get(node.client("modest"), node.member, frozen, 0, wait_seconds=10))
        await until(lambda: len(node.server.http.connections) >= 4)
        node.server.serving["other"] = 0
        node.server.freed.set()
        assert await waiting
        assert node.server.counts["busy"] == 2


async def test_total_rate_is_bounded(tmp_path: Path) -> None:
    frozen = publish(tmp_path, DATA)
    rate = 16 * CHUNK
    async with serving(tmp_path, bytes_per_second=rate) as node:
        begun = time.monotonic()
        await asyncio.gather(*(get(node.client(f"c{at}"), node.member, frozen, at) for at in range(10)))
        took = time.monotonic() - begun
        assert sum(map(len, DATA.values())) <= rate * (took + BURST_SECONDS)


async def test_excess_connections_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTIONS_MAX", 16)  # eight for one address
    frozen = publish(tmp_path, DATA)
    async with serving(tmp_path) as node:
        good = node.client()
        await get(good, node.member, frozen, 0)
        host, port = node.server.address.split(":")
        tried = over = 0
        while tried < FLOOD:
            flood = [await asyncio.open_connection(host, int(port)) for _ in range(min(200, FLOOD - tried))]
            tried, over = tried + len(flood), over + len(flood) - 7
            await until(lambda: node.server.counts["overflowed"] >= over)  # noqa: B023
            assert await get(good, node.member, frozen, 1)
            for _, writer in flood:
                writer.transport.abort()
            await until(lambda: len(node.server.http.connections) <= 1)
        assert tried == FLOOD
        await until(lambda: len(node.server.http.connections) <= 1)
        assert await get(node.client(), node.member, frozen, 2)


# --- authentication ------------------------------------------------------------------------------------------------


async def test_impostor_without_the_secret_is_rejected(tmp_path: Path) -> None:
    frozen = publish(tmp_path, DATA)
    async with serving(tmp_path, peer_secret_file=None) as impostor:
        with pytest.raises(PermissionDeniedError, match="not proven"):
            await get(impostor.client(peer_secret_file=secret_file(tmp_path / "secrets")), impostor.member, frozen, 0)


@pytest.mark.parametrize("address", ["node-1:7117", "169.254.169.254:80", "[fe80::1]:80", "0.0.0.0:1", "127.0.0.1"])
async def test_invalid_peer_address_gets_no_request(tmp_path: Path, address: str) -> None:
    node = Node(tmp_path)
    with pytest.raises(PeerError, match="not a valid peer address"):
        await node.client().status(Member("x", address))
    await node.client().close()


async def test_closed_server_refuses_connections(tmp_path: Path) -> None:
    frozen = publish(tmp_path, DATA)
    async with serving(tmp_path) as node:
        client, member = node.client(), node.member
        await get(client, member, frozen, 0)
        waiting = asyncio.ensure_future(get(client, member, freeze(DATA, uri="x", known=True), 0, wait_seconds=10))
        await asyncio.sleep(0.05)
        await node.server.close()
        await node.server.close()
        with pytest.raises(PeerError):
            await waiting
        with pytest.raises(PeerError):
            await get(client, member, frozen, 0)


# --- TLS -----------------------------------------------------------------------------------------------------------


async def test_peers_with_certificates_of_one_authority_need_no_secret(tmp_path: Path) -> None:
    frozen = publish(tmp_path, DATA)
    tls = Authority(tmp_path).peer_settings(tmp_path / "tls")
    async with serving(tmp_path, peer_secret_file=None, **tls) as node:
        client = node.client()
        for ordinal in range(10):
            assert same(await get(client, node.member, frozen, ordinal), bytes_of(frozen, DATA, ordinal))


@pytest.mark.parametrize("wrong", ["authority of the client", "authority of the server", "name", "plain"])
async def test_peer_with_an_invalid_certificate_is_rejected(tmp_path: Path, wrong: str) -> None:
    frozen: FileSet = publish(tmp_path, DATA)
    ours, other = Authority(tmp_path), Authority(tmp_path, "other")
    good = ours.peer_settings(tmp_path / "good")
    believing = other.peer_settings(tmp_path / "believing")  # their certificate, this node's authority
    shutil.copy(ours.path, tmp_path / "believing" / "ca.crt")
    named = ours.peer_settings(tmp_path / "named", "127.0.0.2")
    served = {"authority of the client": good, "authority of the server": believing, "name": named, "plain": good}[
        wrong
    ]
    client_files = believing if wrong == "authority of the client" else good
    async with serving(tmp_path, peer_secret_file=None, **served) as node:
        if wrong == "plain":
            client_files = dict.fromkeys(good)
        with pytest.raises((PermissionDeniedError, PeerError)):
            await get(node.client(**client_files), node.member, frozen, 0)
        assert node.server.counts["chunks"] == 0


# --- clocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [-30, -1, 1, 9000])
async def test_clock_skew_costs_one_more_request(tmp_path: Path, hours: float) -> None:
    frozen = publish(tmp_path, DATA)
    async with serving(tmp_path) as node:
        node.server.verifier.clock = lambda: time.time() + 3600 * hours
        client, into = node.client(), memoryview(bytearray(CHUNK))
        for ordinal in range(3):
            await client.chunk(node.member, frozen.version, CHUNK, ordinal, into)
            assert same(into, bytes_of(frozen, DATA, ordinal))
        assert node.server.counts["other_time"] == 1
        node.server.verifier.clock = lambda: time.time() - 3600 * hours  # as another process there would have
        await client.members(node.member)
        assert node.server.counts["other_time"] == 2


async def test_non_member_neither_learns_nor_sets_the_time(tmp_path: Path) -> None:
    async with serving(tmp_path) as node:
        node.server.verifier.clock = lambda: time.time() + 3600
        stranger = node.client(
            peer_secret_file=secret_file(tmp_path / "secrets", "another secret, of 16 bytes or more")
        )
        with pytest.raises(PermissionDeniedError, match="refuses"):
            await stranger.members(node.member)
        assert node.server.counts["other_time"] == 0
        node.server.verifier.prove = lambda *_: {"x-tierckpt-proof": "0" * 64}  # type: ignore[method-assign]
        with pytest.raises(PermissionDeniedError, match="not proven"):
            await node.client().members(node.member)


async def test_non_member_cannot_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path) as node:
        host, _, port = node.member.address.rpartition(":")
        for number in range(200):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /v1/members HTTP/1.1\r\nHost: x\r\n\r\n" if number % 2 else b"nothing\r\n\r\n")
            await reader.read()
            writer.close()
        assert node.server.counts["refused"] == node.server.counts["malformed"] == 100
    messages = [
        record for record in caplog.records if record.levelno >= logging.INFO and "127.0.0.1" in record.getMessage()
    ]
    assert len(messages) <= 2
