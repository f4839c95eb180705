"""A socket is reported readable once the expected bytes have arrived, or at end of stream."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Iterator

import pytest

from tierckpt.stores.http_client import WATERMARK_BYTES, Watermark


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The sending and the receiving end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver:
        yield sender, receiver


def is_readable(sock: socket.socket, seconds: float = 0.1) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def test_fewer_bytes_than_expected_do_not_wake_the_reader(ends: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = ends
    Watermark(receiver).expect(1000)
    sender.sendall(bytes(999))
    assert not is_readable(receiver)
    sender.sendall(b"1")
    assert is_readable(receiver, 60.0)
    assert len(receiver.recv(4096)) == 1000


def test_end_of_stream_wakes_the_reader(ends: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = ends
    Watermark(receiver).expect(1000)
    sender.sendall(b"1")
    sender.close()
    assert is_readable(receiver, 60.0)
    assert receiver.recv(4096) == b"1"
    assert receiver.recv(4096) == b""


def test_buffered_bytes_count_when_the_threshold_drops(ends: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = ends
    watermark = Watermark(receiver)
    watermark.expect(1000)
    sender.sendall(b"1")
    assert not is_readable(receiver)
    watermark.expect(1)
    assert is_readable(receiver, 60.0)


@pytest.mark.parametrize(
    ("missing", "most", "wanted"),
    [(10 * WATERMARK_BYTES, WATERMARK_BYTES, WATERMARK_BYTES), (9000, 700, 700), (0, 700, 1), (9000, 0, 1)],
)
def test_the_threshold_never_exceeds_the_remaining_bytes(
    ends: tuple[socket.socket, socket.socket], missing: int, most: int, wanted: int
) -> None:
    Watermark(ends[1], most).expect(missing)
    assert ends[1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == wanted


def test_every_tls_packet_wakes_the_reader(ends: tuple[socket.socket, socket.socket]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    with context.wrap_socket(ends[1].dup(), do_handshake_on_connect=False) as wrapped:
        Watermark(wrapped).expect(1000)
        assert wrapped.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
