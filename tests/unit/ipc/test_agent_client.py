"""Communication with the agent: framing, descriptors, and errors without an agent."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

from tests.agents import listening
from tests.open_files import open_files
from tests.services import REPOSITORY
from tierckpt.agent.agent_server import Connection
from tierckpt.config import Settings
from tierckpt.errors import OperationTimeoutError, PermissionDeniedError, TierckptError
from tierckpt.format.layout import agent_dir
from tierckpt.ipc import agent_client as contacts
from tierckpt.ipc.agent_client import SOCKET, AgentClient, AgentUnavailableError, encode, take_message
from tierckpt.types import Json

# --- framing --------------------------------------------------------------------------------------------------------


def test_a_message_is_taken_when_its_last_byte_is_there_and_not_before() -> None:
    data, buffer = encode({"op": "submit", "token": "ä" * 100}), bytearray()
    for byte in data[:-1]:
        buffer.append(byte)
        assert take_message(buffer) is None
    buffer.append(data[-1])
    assert take_message(buffer) == {"op": "submit", "token": "ä" * 100}
    assert buffer == b""


def test_messages_that_came_together_are_taken_in_order() -> None:
    messages = [{"op": str(number)} for number in range(5)]
    buffer = bytearray(b"".join(map(encode, messages)) + encode({"op": "half"})[:-3])
    assert [take_message(buffer) for _ in range(6)] == [*messages, None]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!I", (1 << 20) + 1),  # too long for one of our messages: refused before it arrives
        struct.pack("!I", 0xFFFFFFFF) + b"x",
        struct.pack("!I", 4) + b"\xff\xfe\x00\x01",
        struct.pack("!I", 3) + b"{]}",
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 0),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # of any kind: the connection is of no use then
        take_message(bytearray(data))


# --- descriptors ----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Connection]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.setblocking(False)
    connection = Connection(theirs, os.getpid())
    yield ours, connection
    ours.close()
    connection.close()
    os.close(connection.pidfd)


def _files(count: int, folder: Path) -> list[int]:
    return [os.open(folder / str(number), os.O_CREAT | os.O_RDWR) for number in range(count)]


def test_descriptors_come_in_order_though_their_messages_are_cut_anywhere(
    pair: tuple[socket.socket, Connection], tmp_path: Path
) -> None:
    ours, connection = pair
    files = _files(5, tmp_path)
    first, second = encode({"op": "first", "descriptors": 2}), encode({"op": "second", "descriptors": 3})
    socket.send_fds(ours, [first[:5]], files[:2])
    assert connection.read()
    assert take_message(connection.buffer) is None
    ours.sendall(first[5:])
    socket.send_fds(ours, [second[:1]], files[2:])
    while connection.read() and len(connection.descriptors) < 5:
        pass
    assert take_message(connection.buffer) == {"op": "first", "descriptors": 2}
    ours.sendall(second[1:])
    assert connection.read()
    assert take_message(connection.buffer) == {"op": "second", "descriptors": 3}
    names = [Path(f"/proc/self/fd/{descriptor}").readlink().name for descriptor in connection.descriptors]
    assert names == ["0", "1", "2", "3", "4"]
    for file in files:
        os.close(file)


def test_more_descriptors_than_fit_end_the_connection_and_none_is_kept(
    pair: tuple[socket.socket, Connection], tmp_path: Path
) -> None:
    ours, connection = pair
    files = _files(contacts.DESCRIPTORS_MAX + 20, tmp_path)
    socket.send_fds(ours, [b"x"], files)
    assert connection.read() is False
    connection.close()
    assert sorted(open_files(tmp_path)) == sorted(files)
    for file in files:
        os.close(file)


def test_the_end_of_the_other_side_is_seen_after_its_last_word(pair: tuple[socket.socket, Connection]) -> None:
    ours, connection = pair
    ours.sendall(encode({"op": "last"}))
    ours.close()
    assert connection.read()
    assert take_message(connection.buffer) == {"op": "last"}
    assert connection.read() is False


# --- asking ---------------------------------------------------------------------------------------------------------


@contextmanager
def agent_that(*answers: Callable[[_Recording], None], root: Path) -> Iterator[list[Json]]:
    """Stands in for an agent. Each connection is served by the next of ``answers``; yields the messages received."""
    received: list[Json] = []
    with listening(root) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection, suppress(OSError):  # some go away before the answer
                    answer(_Recording(connection, received))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield received
        thread.join(60)


class _Recording:
    """A connection that notes the messages read from it."""

    def __init__(self, connection: socket.socket, received: list[Json]) -> None:
        self._connection, self._received = connection, received
        self.sendall = connection.sendall

    def message(self) -> Json | None:
        buffer = bytearray()
        while (found := take_message(buffer)) is None:
            data = self._connection.recv(1 << 16)
            if not data:
                return None
            buffer += data
        self._received.append(found)
        return found


def answers(*values: Json) -> Callable[[_Recording], None]:
    def serve(connection: _Recording) -> None:
        for value in values:
            connection.message()
            connection.sendall(encode(value))
        connection.message()

    return serve


def hangs_up(connection: _Recording) -> None:
    connection.message()


@pytest.fixture
def contact(local_root: Path) -> Iterator[AgentClient]:
    with closing(AgentClient(Settings.load(local_root=local_root, mover="agent"))) as made:
        yield made


def test_without_an_agent_asking_one_that_must_not_be_started_raises(contact: AgentClient, local_root: Path) -> None:
    with pytest.raises(AgentUnavailableError, match="no agent runs"):
        contact.ask({"op": "status"}, start=False)
    with agent_that(root=local_root):
        pass
    (agent_dir(local_root) / SOCKET).touch()  # left by a killed agent: no process listens there
    with pytest.raises(AgentUnavailableError, match="no agent runs"):
        contact.ask({"op": "status"}, start=False)


def test_an_answer_may_come_in_pieces_and_an_error_of_the_agent_is_raised(
    contact: AgentClient, local_root: Path
) -> None:
    def in_pieces(connection: _Recording) -> None:
        connection.message()
        for byte in encode({"ok": [1, 2]}):
            connection.sendall(bytes([byte]))
        connection.message()
        connection.sendall(encode({"error": "ValueError: no such operation"}))
        connection.message()
        connection.sendall(encode({"ok": "still here"}))

    with agent_that(in_pieces, root=local_root) as received:
        assert contact.ask({"op": "one"}, start=False) == [1, 2]
        with pytest.raises(TierckptError, match="no such operation"):
            contact.ask({"op": "two"}, start=False)
        assert contact.ask({"op": "three"}, start=False) == "still here"
    assert [message["op"] for message in received] == ["one", "two", "three"]


def test_an_agent_that_went_away_is_asked_for_again_once(contact: AgentClient, local_root: Path) -> None:
    with agent_that(hangs_up, answers({"ok": 2}), hangs_up, hangs_up, root=local_root) as received:
        assert contact.ask({"op": "one"}, start=False) == 2
        contact.close()
        with pytest.raises(AgentUnavailableError, match="went away"):
            contact.ask({"op": "two"}, start=False)
    assert [message["op"] for message in received] == ["one", "one", "two", "two"]


@pytest.mark.slow
def test_an_answer_that_comes_too_late_is_not_taken_for_that_to_the_next_message(
    contact: AgentClient, local_root: Path
) -> None:
    was_given_up = threading.Event()

    def late(connection: _Recording) -> None:
        connection.message()
        was_given_up.wait()
        connection.sendall(encode({"ok": "late"}))

    with agent_that(late, answers({"ok": "in time"}), root=local_root):
        with pytest.raises(OperationTimeoutError, match="has not answered"):
            contact.ask({"op": "one"}, start=False, timeout_seconds=0.1)
        was_given_up.set()
        assert contact.ask({"op": "two"}, start=False) == "in time"
        contact.close()


def test_an_answer_that_drips_does_not_put_off_the_deadline(contact: AgentClient, local_root: Path) -> None:
    def drips(connection: _Recording) -> None:
        connection.message()
        for byte in encode({"ok": "x" * 100}):
            connection.sendall(bytes([byte]))
            time.sleep(0.02)

    with agent_that(drips, root=local_root), pytest.raises(OperationTimeoutError):
        contact.ask({"op": "one"}, start=False, timeout_seconds=0.2)


def test_a_forked_child_neither_uses_the_connection_nor_keeps_it_open(contact: AgentClient, local_root: Path) -> None:
    settings = contact.settings
    with agent_that(answers({"ok": 1}), root=local_root):
        ours = contacts.shared_client(settings)
        assert ours.ask({"op": "one"}, start=False) == 1
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            own = contacts.shared_client(settings)
            sockets = [f for f in os.listdir("/proc/self/fd") if _is_connected_socket(int(f))]  # noqa: PTH208
            said = [own is ours, own.connection is None, ours.connection is None, sockets]
            os.write(writer, json.dumps(said).encode())
            os._exit(0)
        os.waitpid(child, 0)
        is_same, own_is_new, parents_is_dropped, sockets = json.loads(os.read(reader, 1000))
        assert (is_same, own_is_new, parents_is_dropped) == (False, True, True)
        assert ours.connection is not None  # and the parent's is as it was
        ends = [fd for fd in os.listdir("/proc/self/fd") if _is_connected_socket(int(fd))]  # noqa: PTH208
        assert len(ends) == len(sockets) + 1  # the server's end is in this process too, and stays with the child
        contacts.close_clients()
        os.close(reader)
        os.close(writer)


def _is_connected_socket(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            return found.family == socket.AF_UNIX and bool(found.getpeername() is not None)
    except OSError:
        return False


def test_a_directory_that_is_a_link_is_not_used(contact: AgentClient, local_root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    local_root.mkdir()
    agent_dir(local_root).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionDeniedError):
        contact.ask({"op": "status"}, start=False)


def test_where_the_disk_does_not_let_an_agent_be_started_there_is_said_to_be_none(
    contact: AgentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(contacts, "try_lock", full)
    with pytest.raises(AgentUnavailableError, match="could not be started"):
        contact.ask({"op": "status"})


def test_an_agent_that_cannot_be_started_is_said_to_be_none(
    contact: AgentClient, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(AgentUnavailableError, match="exit code 1"):
        contact.ask({"op": "status"})


# --- the log --------------------------------------------------------------------------------------------------------

FLOODED_AGENT = """
import os, signal, sys, threading
from tierckpt.agent import __main__ as main, agent_server
from tierckpt.ipc import agent_client
from tierckpt.poll import Poll
agent_client.LOG_BYTES_MAX, agent_server.LOG_CHECK_SECONDS = 64 << 10, 0.02
def flood():
    for _ in range(25):
        print("line", "x" * 40_000, file=sys.stderr, flush=True)
        assert any(os.fstat(2).st_size <= 64 << 10 for _ in Poll(60.0))
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=flood).start()
sys.exit(main.main(90.0))
"""


@pytest.mark.slow
def test_an_agent_keeps_its_log_small_while_it_runs(tmp_path: Path) -> None:
    directory = tmp_path / "agent"
    directory.mkdir(mode=0o700)
    with (directory / contacts.LOG).open("ab") as output:
        settings = f'{{"local_root": "{tmp_path}"}}'.encode()
        command = [sys.executable, "-c", FLOODED_AGENT]
        subprocess.run(command, input=settings, stdout=output, stderr=output, cwd=REPOSITORY, timeout=120, check=True)
    sizes = [path.stat().st_size for path in directory.glob(f"{contacts.LOG}*")]
    assert len(sizes) == 2 and sum(sizes) < 500_000, "of a megabyte"
    assert "SIGTERM: the agent drains" in (directory / contacts.LOG).read_text()


@pytest.mark.parametrize("has_room", [True, False])
def test_a_full_log_is_emptied_and_copied_if_there_is_room(
    tmp_path: Path, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contacts, "LOG_BYTES_MAX", 100)
    contacts.keep_log_small(tmp_path)  # no log, no error
    if not has_room:
        (tmp_path / f"{contacts.LOG}.1").mkdir()
    with (tmp_path / contacts.LOG).open("ab") as output:
        for text, size_bytes in ((b"x" * 100, 100), (b"y", 0), (b"z", 1)):
            output.write(text)
            output.flush()
            contacts.keep_log_small(tmp_path)
            assert (tmp_path / contacts.LOG).stat().st_size == size_bytes
    if has_room:
        assert (tmp_path / f"{contacts.LOG}.1").read_bytes() == b"x" * 100 + b"y"
