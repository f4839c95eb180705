"""What peers say to each other is exactly that, or refused (tierckpt/peer/peer_http.py)."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.peer.peer_http import (
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    ChunkReport,
    WireError,
    chunk_target,
    encode_head,
    held_target,
    hub_target,
    parse_headers,
    parse_json,
    parse_response,
    route,
)

VERSION = "0123456789abcdef" * 2
LINES = st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["", "a" * 32, "t" + "b" * 32])), max_size=70)


@given(LINES, st.integers(0, 50), st.sets(st.integers(0, 99), max_size=5), st.sets(st.text("abc", max_size=5)))
def test_holdings_come_back_as_they_were_told(
    lines: list[tuple[int, str]], before: int, fetching: set[int], names: set[str]
) -> None:
    after = before + len(lines)
    held = ChunkReport(100, after, after, tuple(lines), frozenset(fetching), False, frozenset(names))
    assert ChunkReport.of_json(held.to_json()) == held
    short = ChunkReport.of_header(held.to_header())
    assert short.new == held.new[: len(short.new)]
    assert short.next == before + len(short.new)
    assert (short.total, short.landed) == (100, after)


@pytest.mark.parametrize(
    "text", ["", "3", "3;", "x;whole", "3;1;1;3", "3;1;1;0:zz", "3;1;1;0,", "3;-1;0;", "99999999;whole", "3;1;1;0;0"]
)
def test_holdings_that_cannot_be_are_refused(text: str) -> None:
    if text == "3;1;1;0,":  # an empty line at the end is nothing
        assert ChunkReport.of_header(text).new == ((0, ""),)
        return
    with pytest.raises(WireError):
        ChunkReport.of_header(text)


@pytest.mark.parametrize(
    "changed",
    [
        {"total": -1}, {"total": True}, {"total": 1 << 40}, {"new": ["3"]}, {"new": "0"}, {"new": [{}]},
        {"fetching": [3]}, {"interested": None}, {"landed": 1.5}, {"next": "1"},
    ],
)  # fmt: skip
def test_holdings_with_a_lie_in_them_are_refused(changed: dict[str, object]) -> None:
    body = ChunkReport(3, 1, 1, ((0, ""),)).to_json()
    ChunkReport.of_json(body)
    with pytest.raises(WireError):
        ChunkReport.of_json({**body, **changed})


def test_there_are_these_paths_and_no_others() -> None:
    assert route(chunk_target(VERSION, 65536, 7, 3, 1.5)) == ("chunk", (VERSION, "65536", "7", "3", "1.500"))
    assert route(held_target(VERSION, 65536, 3, True)) == ("held", (VERSION, "65536", "3", "1"))
    assert route(f"/v1/manifest/t{VERSION}") == ("manifest", (f"t{VERSION}",))
    assert route(f"/v1/slow/{VERSION}") == ("slow", (VERSION,))
    assert route(f"/v1/segment/{VERSION}/0/4096") == ("segment", (VERSION, "0", "4096"))
    assert route(hub_target("hf://o/n@1/a b", 0, 8)) == ("hub", ("0", "8", "hf%3A%2F%2Fo%2Fn%401%2Fa%20b", "1"))
    for target in ("/v1/members", "/v1/status", "/v1/fresh", "/v1/drains"):
        assert route(target) is not None


def parse(*lines: tuple[bytes, bytes], target: str = "/v1/members") -> dict[str, str]:
    return parse_headers(target, (1, 1), [(b"Host", b"x"), *lines])


@pytest.mark.parametrize(
    "lines",
    [
        [(b"Content-Length", b"5")], [(b"Transfer-Encoding", b"chunked")],
        [(b"Authorization", b"a"), (b"authorization", b"b")], [(b"Host", b"y")], [(b"X ", b"y")], [(b"", b"y")],
        [(b"X", b"\xff")], [(b"X\xff", b"y")], [(b"X", b"a\tb")], [(b"X", b"a\0b")],
        [(b"X-%d" % number, b"y") for number in range(HEADERS_MAX)],
    ],
)  # fmt: skip
def test_headers_that_no_peer_sends_are_refused(lines: list[tuple[bytes, bytes]]) -> None:
    assert parse((b"X", b"y")) == {"host": "x", "x": "y"}
    with pytest.raises(WireError):
        parse(*lines)


@pytest.mark.parametrize("target", ["", "*", "x:1", "http://x/v1/members", "/v1/mem bers", "/\udcff", f"/{'x' * 2000}"])
def test_a_target_that_no_peer_sends_is_refused(target: str) -> None:
    with pytest.raises(WireError):
        parse(target=target)


def test_a_request_without_a_host_or_of_http_1_0_is_refused() -> None:
    with pytest.raises(WireError):
        parse_headers("/v1/members", (1, 1), [])
    with pytest.raises(WireError):
        parse_headers("/v1/members", (1, 0), [(b"Host", b"x")])


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n",
        b"HTTP/1.1 999 OK\r\nContent-Length: 1\r\n\r\n", b"ICY 200 OK\r\nContent-Length: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0x10\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Encoding: gzip\r\n\r\n", b"\x16\x03\x01\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_answer_of_a_peer_is_refused(head: bytes) -> None:
    with pytest.raises(WireError):
        parse_response(head)


@given(st.binary(max_size=300))
def test_whatever_comes_is_an_answer_or_refused(data: bytes) -> None:
    for head in (data, data + b"\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + data + b"\r\n\r\n"):
        with suppress(WireError):
            parse_response(head)


@given(st.text(max_size=50), st.lists(st.tuples(st.binary(max_size=50), st.binary(max_size=50))))
def test_whatever_comes_is_a_request_or_refused(target: str, lines: list[tuple[bytes, bytes]]) -> None:
    for wanted in (target, f"/{target}"):
        with suppress(WireError):
            parse(*lines, target=wanted)


@given(st.binary(max_size=200))
def test_whatever_comes_is_json_or_refused(data: bytes) -> None:
    for body in (data, b'{"a":' + data + b"}", b"[" * 5000):
        with suppress(WireError):
            parse_json(body)


def test_what_is_sent_can_be_read() -> None:
    answer = parse_response(encode_head("HTTP/1.1 404 Not Found", {"Content-Length": "0", "X-A": "b c"}))
    assert (answer.status, answer.length, answer.headers["x-a"]) == (404, 0, "b c")
    assert (
        len(encode_head("HTTP/1.1 200 OK", {"X": ChunkReport(1 << 22, 64, 64, LONGEST).to_header()})) < HEAD_BYTES_MAX
    )


LONGEST = tuple((4_000_000 + number, "t" + "a" * 32) for number in range(64))
