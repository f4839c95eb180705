"""Authentication of peers: signatures, rejections, and addresses without a listener (tierckpt/peer/auth.py)."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.peer_node import SECRET, secret_file, settings_of
from tests.users import as_user
from tierckpt.errors import ConfigError
from tierckpt.peer import auth
from tierckpt.peer.auth import (
    Crowded,
    OtherTime,
    RejectedRequest,
    Signer,
    Verifier,
    check_listen,
    read_secret,
    tls_context,
)
from tierckpt.peer.peer_http import DIGEST, HELD, ME, PROOF

TARGET = f"/v1/chunk/{'a' * 32}/65536/3?after=0&wait=0.000"
KEY = SECRET.encode()


def signed(target: str = TARGET, *, key: bytes = KEY, to: str = "server", about_me: str = "") -> dict[str, str]:
    headers = {"authorization": Signer(key, "node-1").sign("GET", target, to, about_me)[0]}
    return headers | ({ME: about_me} if about_me else {})


def verifier() -> Verifier:
    return Verifier(KEY, "server")


@pytest.mark.parametrize(
    ("what", "method", "target", "extra"),
    [
        ("the method", "HEAD", TARGET, {}),
        ("the chunk", "GET", TARGET.replace("/3?", "/4?"), {}),
        ("the version", "GET", TARGET.replace("a" * 32, "b" * 32), {}),
        ("the query", "GET", TARGET.replace("wait=0.000", "wait=9.000"), {}),
        ("a range", "GET", TARGET, {"range": "bytes=0-1"}),
        ("what is said of who asks", "GET", TARGET, {ME: '{"name":"other"}'}),
    ],
)
def test_a_proof_is_of_one_request_only(what: str, method: str, target: str, extra: dict[str, str]) -> None:
    with pytest.raises(RejectedRequest, match="wrong proof"):
        verifier().check(method, target, {**signed(), **extra})


def test_a_proof_is_good_for_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    checks, old = verifier(), signed()
    node.passes(auth.LIFETIME_SECONDS + 1)
    with pytest.raises(RejectedRequest, match="another time"):
        checks.check("GET", TARGET, old)
    node.wall += 10 * auth.EXPIRY_SECONDS_MAX  # signed by a clock far ahead: it would be good for too long
    with pytest.raises(RejectedRequest, match="another time"):
        checks.check("GET", TARGET, signed())


def test_more_requests_than_can_be_remembered_are_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "NONCES_MAX", 3)
    checks = verifier()
    for _ in range(3):
        checks.check("GET", TARGET, signed())
    with pytest.raises(Crowded, match="too many"):
        checks.check("GET", TARGET, signed())
    with pytest.raises(RejectedRequest, match="wrong proof"):  # a non-member does not learn the reason
        checks.check("GET", TARGET, signed(key=b"the secret of another job"))


@pytest.mark.parametrize("changed", ["status", DIGEST, HELD, "content-length", "body", "nonce", "secret"])
def test_an_answer_is_proven_to_be_of_a_member(changed: str) -> None:
    said = {DIGEST: "a" * 32, HELD: "3;whole", "content-length": "4"}
    headers = {**said, **verifier().prove("n" * 32, 200, said, b"body")}
    signer = Signer(KEY, "node-1")
    assert PROOF in headers
    assert signer.is_proven("n" * 32, 200, headers, b"body")
    other = Signer(b"the secret of another job", "node-1") if changed == "secret" else signer
    assert not other.is_proven(
        "m" * 32 if changed == "nonce" else "n" * 32,
        404 if changed == "status" else 200,
        {**headers, changed: "other"} if changed in said else headers,
        b"b0dy" if changed == "body" else b"body",
    )


# --- secrets and certificates --------------------------------------------------------------------------------------


def test_a_secret_comes_from_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    assert read_secret(settings_of(tmp_path, peer_secret_file=secret_file(tmp_path))) == KEY
    assert read_secret(settings_of(tmp_path, peer_secret_file=None)) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_secret_that_others_can_read_is_none(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="owner"):
        read_secret(settings_of(tmp_path, peer_secret_file=secret_file(tmp_path, mode=mode)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(("mode", "is_read"), [(0o440, True), (0o400, False), (0o444, False), (0o460, False)], ids=str)
def test_a_secret_of_root_may_be_read_by_the_group_of_a_pod(shared_tmp: Path, mode: int, is_read: bool) -> None:
    path = secret_file(shared_tmp, mode=mode)
    os.chown(path, 0, 1000)

    def work() -> None:
        assert read_secret(settings_of(shared_tmp, peer_secret_file=path)) == KEY

    said = as_user(1000, work)
    assert not said if is_read else said.startswith("ConfigError")


def test_a_secret_behind_a_link_or_too_short_is_refused(tmp_path: Path) -> None:
    path = secret_file(tmp_path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(settings_of(tmp_path, peer_secret_file=tmp_path / "link"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(settings_of(tmp_path, peer_secret_file=tmp_path / "none"))
    with pytest.raises(ConfigError, match="shorter"):
        read_secret(settings_of(tmp_path, peer_secret_file=secret_file(tmp_path, "short")))


@pytest.mark.parametrize("listen", ["0.0.0.0:7117", "[::]:7117", "10.0.0.1:7117", "node-1:7117"])
def test_nothing_listens_beyond_loopback_without_a_secret_or_certificates(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigError, match="without authentication"):
        check_listen(settings_of(tmp_path, peer_secret_file=None, peer_listen=listen))
    check_listen(settings_of(tmp_path, peer_listen=listen))


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:7117", "localhost:7117"])
def test_on_loopback_neither_is_needed(tmp_path: Path, listen: str) -> None:
    check_listen(settings_of(tmp_path, peer_secret_file=None, peer_listen=listen))


@pytest.mark.parametrize("listen", ["", "node", "node:x", "node:70000", ":1", "a b:1", "http://x:1"])
def test_what_is_no_address_is_refused(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigError):
        check_listen(settings_of(tmp_path, peer_listen=listen))


def test_certificates_must_be_there(tmp_path: Path) -> None:
    for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        with pytest.raises(ConfigError, match="cannot be used") as caught:
            tls_context(settings_of(tmp_path, peer_tls_dir=tmp_path / "none"), side)
        assert "ca.crt" in caught.value.hint
        assert tls_context(settings_of(tmp_path), side) is None


# --- clocks ----------------------------------------------------------------------------------------------------------


class Node:
    """A wall clock that is set, and seconds since boot that only go on."""

    def __init__(self, patch: pytest.MonkeyPatch, wall: float = 1.7e9) -> None:
        self.wall, self.boot = wall, 1000.0
        patch.setattr(auth.time, "time", lambda: self.wall)
        patch.setattr(auth, "boot_seconds", lambda: self.boot)

    def passes(self, seconds: float) -> None:
        self.wall, self.boot = self.wall + seconds, self.boot + seconds


def test_a_wall_clock_that_is_set_back_an_hour_puts_nobody_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "NONCES_MAX", 100)
    node = Node(monkeypatch)
    checks, signer = verifier(), Signer(KEY, "node-1")
    node.wall -= 3600
    for _ in range(500):  # a minute's worth of them, each few minutes
        checks.check("GET", TARGET, {"authorization": signer.sign("GET", TARGET, "server")[0]})
        node.passes(1)


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("pass"), st.floats(0.1, 100)),
            st.tuples(st.just("set"), st.floats(-90_000, 90_000)),
            st.tuples(st.just("ask"), st.floats(-40, 40)),
            st.tuples(st.just("replay"), st.integers(0, 1000)),
        ),
        max_size=60,
    )
)
def test_property_fresh_requests_pass_and_replays_never(events: list[tuple[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        node = Node(patch)
        checks, signer = verifier(), Signer(KEY, "node-1")
        made: list[dict[str, str]] = []
        for what, value in events:
            if what == "pass":
                node.passes(value)
            elif what == "set":
                node.wall += value
            elif what == "ask":
                signer = Signer(KEY, "node-1") if value > 30 else signer  # a process that begins now, whatever the hour
                try:
                    checks.check("GET", TARGET, sign := {"authorization": signer.sign("GET", TARGET, "server")[0]})
                except OtherTime as told:
                    told_ahead = int(told.now) - signer.clock()
                    proof = signer.sign("GET", TARGET, "server", ahead_seconds=told_ahead)[0]
                    checks.check("GET", TARGET, sign := {"authorization": proof})
                made.append(sign)
            elif made:
                with pytest.raises(RejectedRequest):
                    checks.check("GET", TARGET, made[value % len(made)])
