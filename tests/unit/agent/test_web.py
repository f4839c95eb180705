"""The page's server: access, read-only routes, and the times at which it builds documents."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests import loop_thread
from tierckpt.agent import web
from tierckpt.agent.web import Documents, WebServer
from tierckpt.config import Settings
from tierckpt.errors import ConfigError

PATIENCE_SECONDS = 60.0


class Made:
    """Documents as the test wants them, counted."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = {"step": 1}
        self.count = 0
        self.made = threading.Condition()

    def __call__(self) -> dict[str, Any]:
        with self.made:
            self.count += 1
            self.made.notify_all()
            return {**self.document, "lag_seconds": float(self.count)}

    def wait(self, count: int) -> None:
        with self.made:
            assert self.made.wait_for(lambda: self.count >= count, PATIENCE_SECONDS)


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.fixture
def serve(made: Made, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WebServer]]:
    monkeypatch.setattr(web, "PERIOD_SECONDS", 0.01)
    servers: list[WebServer] = []

    def start(**options: Any) -> WebServer:
        settings = Settings.load()
        servers.append(WebServer(settings, documents=Documents(settings, options.pop("make", made)), **options))
        loop_thread.run(servers[-1].start())
        return servers[-1]

    yield start
    for server in servers:
        loop_thread.run(server.close())


def ask(
    server: WebServer, path: str = "/", method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


class Stream:
    """A page that is open: the events of one connection."""

    def __init__(self, server: WebServer, query: str = "") -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_SECONDS)
        self.connection.request("GET", f"/events{query}")
        self.answer = self.connection.getresponse()

    def next(self) -> dict[str, Any]:
        while line := self.answer.readline():
            if line.startswith(b"data: "):
                return dict(json.loads(line[6:]))
        raise AssertionError("the stream has ended")

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


# --- access ---------------------------------------------------------------------------------------------------------


PATHS = ("/", "/events", "/status.json", "/history.json", "/run.json", "/checkpoint.json", "/cluster.json")


@pytest.mark.parametrize("path", [*PATHS, "/nothing"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "", "["]
)
def test_a_name_that_is_not_this_machines_is_refused(serve: Callable[..., WebServer], path: str, host: str) -> None:
    """B2: the request of a page of another site after its DNS points its name here."""
    status, body, _ = ask(serve(), path, Host=host)
    assert (status, b"step" in body) == (403, False)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:{port}", "localhost", "localhost:9", "[::1]:{port}", "10.1.2.3", "{me}:80"]
)
def test_addresses_and_names_of_this_machine_are_served(serve: Callable[..., WebServer], host: str) -> None:
    server = serve()
    assert ask(server, Host=host.format(port=server.port, me=socket.gethostname()))[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", [*PATHS, "/metrics"])
def test_nothing_can_be_written(serve: Callable[..., WebServer], made: Made, method: str, path: str) -> None:
    server = serve(routes={"/metrics": lambda accept: (b"x 1\n", "text/plain")})
    status, _, headers = ask(server, path, method, body=b"{}")
    assert (status, headers["Allow"], made.count) == (405, "GET, HEAD", 0)


def test_beyond_loopback_only_with_the_token(serve: Callable[..., WebServer]) -> None:
    server = serve(host="0.0.0.0", routes={"/metrics": lambda accept: (b"x 1\n", "text/plain")})
    (token,) = parse_qs(urlsplit(server.url).query)["token"]
    assert len(token) >= 32
    assert {*PATHS} == {"/", "/events", "/status.json", *server.pages.paths}
    for path in (*PATHS, "/metrics"):
        for wrong in ("", "?token=", f"?token={token[:-1]}", "?token=%C3%A9"):
            assert ask(server, path + wrong)[0] == 401, path + wrong
        assert ask(server, path, Cookie=f"token={token}")[0] == 401, path
    for path in ("/", "/history.json", "/cluster.json"):
        assert ask(server, f"{path}?token={token}")[0] == 200
    assert ask(server, "/status.json", Authorization=f"Bearer {token}")[0] == 200
    assert ask(server, f"/?token={token}", Host="evil.example")[0] == 403
    assert serve(host="0.0.0.0").token != token
    assert serve(host="127.0.0.1").token == serve(host="localhost").token == ""
    for host in ("example.org", "", "300.1.1.1"):
        with pytest.raises(ConfigError, match="not an address"):
            serve(host=host)


def test_another_route_is_handed_the_accept_header_and_any_host(serve: Callable[..., WebServer]) -> None:
    server = serve(routes={"/metrics": lambda accept: (f"x{accept}".encode(), "text/plain")})
    assert ask(server, "/metrics", Host="agent.monitoring.svc", Accept="a/b")[:2] == (200, b"xa/b")
    assert ask(server, "/other")[0] == 404


def test_the_page_is_one_file_and_says_so_to_the_browser(serve: Callable[..., WebServer], made: Made) -> None:
    status, body, headers = ask(serve())
    assert (status, headers["Content-Type"], made.count) == (200, "text/html; charset=utf-8", 0)
    text = body.decode()
    assert re.findall(r"""<[^>]*\b(?:src|href|action)=["']?([^"'> ]*)""", text) == ["data:,"]
    assert "innerHTML" not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Access-Control-Allow-Origin"] is None
    assert (headers["Referrer-Policy"], headers["Cache-Control"]) == ("no-referrer", "no-store")
    assert ask(serve(), method="HEAD")[1] == b""


# --- times of documents -----------------------------------------------------------------------------------------------


def test_documents_are_made_only_while_somebody_listens(serve: Callable[..., WebServer], made: Made) -> None:
    server = serve()
    assert made.count == 0
    stream = Stream(server)
    assert stream.next()["step"] == 1
    made.wait(3)
    stream.close()
    for _ in range(100):  # a failed send shows the server that the page has closed
        before = made.count
        with made.made:
            if not made.made.wait_for(lambda: made.count > before, 1.0):  # noqa: B023
                break
    else:
        raise AssertionError("a document was built without a page")


def test_news_is_told_to_each_page(serve: Callable[..., WebServer], made: Made) -> None:
    server = serve()
    one, other = Stream(server), Stream(server)
    first = one.next()
    assert other.next()["step"] == first["step"] == 1
    assert first["sent_unix_seconds"] > 1e9
    made.document = {"step": 2}
    for stream in (one, other):
        while stream.next()["step"] != 2:
            pass
    late = Stream(server)
    assert late.next()["step"] == 2
    for stream in (one, other, late):
        stream.close()


def test_a_document_that_cannot_be_made_is_told_and_made_again(serve: Callable[..., WebServer], made: Made) -> None:
    answers: list[Any] = [OSError("disk"), ZeroDivisionError(), {"step": 3}]

    def make() -> dict[str, Any]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    server = serve(make=make)
    assert "disk" in json.loads(ask(server, "/status.json")[1])["problem"]
    answers.insert(0, OSError("disk"))
    stream = Stream(server)
    assert "disk" in stream.next()["problem"]
    assert "ZeroDivisionError" in stream.next()["problem"]
    assert stream.next()["step"] == 3
    stream.close()


def test_a_secret_in_an_error_is_not_told(serve: Callable[..., WebServer], made: Made, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY")
    made.document = {"errors": ["key wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY refused"]}
    stream = Stream(serve())
    assert "EXAMPLEKEY" not in json.dumps(stream.next())
    stream.close()


def test_too_many_pages_are_asked_to_come_again(
    serve: Callable[..., WebServer], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "LISTENERS_MAX", 1)
    server = serve()
    stream = Stream(server)
    stream.next()
    status, _, headers = ask(server, "/events")
    assert (status, headers["Retry-After"]) == (503, "10")
    stream.close()


async def test_what_takes_long_is_made_less_often(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """B4: the interval between documents is the time to build one, divided by the allowed share of a core."""
    monkeypatch.setattr(web, "PERIOD_SECONDS", 0.0)
    monkeypatch.setattr(web, "CPU_SHARE", 1e-9)  # any work asks for a minute
    documents = Documents(Settings.load(), made)
    assert documents.listen()
    number, text = await documents.after(0, PATIENCE_SECONDS)
    assert (number, json.loads(text)["step"]) == (1, 1)
    made.document = {"step": 2}
    assert await documents.after(1, 0.5) == (1, b"")
    assert made.count == 1
    await documents.close()
