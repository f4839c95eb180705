"""Errors of a Hub, each from a server that returns it; and the token, as huggingface_hub reads it."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.servers.hub import TOKEN, Repository, fake_hub
from tests.servers.ill_endpoints import Greets, Says
from tierckpt.cli.ui.app import run as cli
from tierckpt.stores.hub import api

HTML = b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>"


Refusal = tuple[int, dict[str, str], bytes, str, int, list[str]]
"""Status, headers, body, token; exit code and message."""
GATED = "Access to model org/model is restricted and you are not in the authorized list."
REFUSALS: dict[str, Refusal] = {
    "gated": (
        403, {"X-Error-Code": "GatedRepo", "X-Error-Message": GATED}, b"", "hf_x", 6, ["gated", GATED, "conditions"],
    ),
    "gated, no token": (
        401, {"X-Error-Code": "GatedRepo"}, json.dumps({"error": GATED}).encode(), "", 6, [GATED, "HF_TOKEN"],
    ),
    "no repository": (404, {"X-Error-Code": "RepoNotFound"}, b"", "hf_x", 4, ["has no repository org/model"]),
    "private, no token": (401, {"X-Error-Code": "RepoNotFound"}, b"", "", 4, ["a private one needs HF_TOKEN"]),
    "no revision": (404, {"X-Error-Code": "RevisionNotFound"}, b"", "", 4, ["no revision 'main'"]),
    "disabled": (
        403, {"X-Error-Message": "Access to this resource is disabled."}, b"", "", 6, ["is disabled", "resource"],
    ),
    "invalid token": (
        401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"", "hf_x", 6,
        ["token of HF_TOKEN", "Invalid credentials", "settings/tokens"],
    ),
    "invalid token, in JSON": (401, {}, b'{"error": "Invalid username or password."}', "hf_x", 6, ["Invalid username"]),
    "no right": (
        403, {}, b'{"error": "Your token lacks the permission: repo.content.read"}', "hf_x", 6, ["repo.content.read"],
    ),
    "legal": (451, {"X-Error-Message": "Unavailable in your country"}, b"", "", 1, ["451", "in your country"]),
    "HTML": (200, {"Content-Type": "text/html"}, HTML, "", 2, ["HTML", "Sign in", "HF_ENDPOINT"]),
    "HTML 404": (404, {"Content-Type": "text/html"}, HTML, "", 2, ["HTML", "HF_ENDPOINT"]),
    "JSON of another API": (200, {}, b'{"status": "ok"}', "", 2, ["HF_ENDPOINT"]),
    "limit": (429, {"Retry-After": "100000"}, b"", "", 7, ["100000 s", "HF_TOKEN"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_raises_at_once_with_the_message_of_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, headers, body, token, exit_code, named = REFUSALS[name]
    server = Says(status, body, headers)
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setenv("HF_TOKEN", token)
    assert cli(["prefetch", "hf://org/model", "--to", str(tmp_path / "to")]) == exit_code
    said = " ".join(capsys.readouterr().err.split())
    assert [word for word in named if word not in said] == [], said
    assert server.requests.total() == 1
    server.close()


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the endpoint for the parameter."""
    kind = request.param
    if kind == "no such name":
        yield "https://hub.invalid"
        return
    tls: ssl.SSLContext | None = None
    if kind in ("unknown authority", "TLS behind http"):
        tls = Authority(tmp_path).server_side()
    found = Greets(b"SSH-2.0-OpenSSH_9.2\r\n") if "SSH" in kind else Says(200, b"{}", tls=tls)
    address = found.address if isinstance(found, Greets) else found.endpoint.partition("://")[2]
    yield f"{'http' if kind.endswith('http') else 'https'}://{address}"
    found.close()


@pytest.mark.parametrize(
    ("server", "named"),
    [
        ("unknown authority", ["certificate", "SSL_CERT_FILE"]),
        ("HTTP behind https", ["does not speak TLS", "HF_ENDPOINT"]),
        ("SSH behind https", ["does not speak TLS", "HF_ENDPOINT"]),
        ("SSH behind http", ["SSH-2.0-OpenSSH_9.2", "HF_ENDPOINT"]),
        ("no such name", ["hub.invalid does not exist", "HF_ENDPOINT"]),
    ],
    indirect=["server"],
)
def test_errors_name_an_endpoint_that_is_not_a_hub(
    server: str, named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server)
    assert cli(["prefetch", "hf://org/model", "--to", str(tmp_path / "to")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert [word for word in named if word not in said] == [], said


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_disable_implicit_token_sends_no_token(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", value)
    with fake_hub() as hub:
        hub.repositories["org/model"] = Repository(gated=True)
        hub.repositories["org/model"].commit({"config.json": b"{}"})
        monkeypatch.setenv("HF_ENDPOINT", f"{hub.endpoint}/")
        assert cli(["prefetch", "hf://org/model", "--to", str(tmp_path / "to")]) == 6
        assert "HF_HUB_DISABLE_IMPLICIT_TOKEN" in capsys.readouterr().err
        monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "0")
        assert cli(["prefetch", "hf://org/model", "--to", str(tmp_path / "to")]) == 0


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "XDG_CACHE_HOME"])
def test_token_from_variable_or_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables and ``~`` in paths are expanded; an empty variable counts as unset."""
    for other in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(other, "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLACE", "place")
    wrapped = f" {TOKEN[:9]}\r\n{TOKEN[9:]}\n"
    values = {"HF_TOKEN_PATH": "~/$PLACE/token", "HF_HOME": "$HOME/${PLACE}", "XDG_CACHE_HOME": str(tmp_path / "place")}
    monkeypatch.setenv(name, values.get(name, wrapped))
    if name in values:
        at = tmp_path / "place" / ("huggingface" if name == "XDG_CACHE_HOME" else "") / "token"
        at.parent.mkdir(parents=True)
        at.write_text(wrapped)
        if name != "HF_TOKEN_PATH":
            assert api.hub_cache() == at.parent / "hub"
    assert api.hub_token() == TOKEN
