"""The client of a node's agent: one Unix socket under the local root, one message at a time.

A message is a length (4 bytes, big-endian) and a JSON object, with descriptors as ancillary data (SCM_RIGHTS). Its
answer is ``{"ok": ...}`` or ``{"error": ...}``, after ``{"busy": ...}`` every ``BUSY_SECONDS``. Messages can be sent
again, also to another agent. The agent acts on a process's promises only after its end and its pending messages.

Only the owner may connect: the directory is 0700, and both sides check credentials.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..config import Settings
from ..disk.durable import closing_file, make_dirs, read_whole
from ..disk.file_lock import try_lock
from ..disk.local_root import use_local_root
from ..disk.quarantine import open_regular
from ..errors import OperationTimeoutError, PermissionDeniedError, TierckptError
from ..format.layout import agent_dir
from ..poll import BRIEF, Pauses, Poll
from ..process_start import is_ready, start_python
from ..resources import start_if_possible
from ..telemetry import logger
from ..types import Json, Tier

log = logger("agent")


LOCK = "agent.lock"
"""Held by the running agent, with its process id."""
PATIENCE_SECONDS = 0.4
STARVED_SECONDS = 2.0
STARVED_SHARE = 0.5
"""Share of the time awake that a starved process waits for a processor."""
HUNG_SECONDS = 20.0
STOPPED_SECONDS = 3.0
PROBE_PAUSES = Pauses(0.5, 60.0)


class AgentAnswer(Enum):
    """``SILENT``: one runs but does not answer."""

    YES, SILENT, FAILED = range(3)


Probe: TypeAlias = Callable[[bool], AgentAnswer]
"""Requests an answer within ``STOPPED_SECONDS``, and starts an agent if told so. If it neither runs nor starts: YES."""


class AgentBreaker:
    """A circuit breaker: a process waits only once for an unresponsive agent, for ``PATIENCE_SECONDS``.

    Then callers do its work themselves, and a thread waits for an answer. That thread kills an agent that is silent for
    ``HUNG_SECONDS``, or stopped for ``STOPPED_SECONDS``: it owns journal entries that no other process may drain, and
    locks that saves wait for. The next agent continues from the journal (P6). An agent of uncertain identity (another
    container's) is left alone, and not used.
    """

    def __init__(self, local_root: Path) -> None:
        self._local_root = local_root
        self._lock = threading.Lock()
        self.is_open = False

    def open(self, reason: str, probe: Probe, *, start: bool) -> None:
        """Log once that the agent does not answer. A thread waits for it, or starts one (``start``)."""
        with self._lock:
            if self.is_open:
                return
            self.is_open = True
        log.warning(
            "the agent of %s does not answer (%s): this process does without it until it does", self._local_root, reason
        )
        waits = threading.Thread(target=self._await, args=(probe, start), name="tierckpt-breaker", daemon=True)
        if not start_if_possible(waits):
            with self._lock:
                self.is_open = False

    def _await(self, probe: Probe, start: bool) -> None:
        poll = Poll(pauses=PROBE_PAUSES)
        started_at = silent_since = time.monotonic()
        while (answer := probe(start)) is not AgentAnswer.YES:
            is_silent = answer is AgentAnswer.SILENT
            if not is_silent:
                silent_since = time.monotonic()
            silent_seconds = time.monotonic() - silent_since
            pid = kill_agent(self._local_root, only_stopped=silent_seconds < HUNG_SECONDS) if is_silent else None
            if pid is None:
                poll.pause()
                continue
            start = True  # it had work to do
            text = "the agent of %s (process %d) did not respond for %.0f s and was killed; the next one continues"
            log.warning(text, self._local_root, pid, silent_seconds)
        self.is_open = False
        log.info("the agent of %s answers after %.1f s", self._local_root, time.monotonic() - started_at)


LOCK_BYTES_MAX = 64


def kill_agent(local_root: Path, *, only_stopped: bool = False) -> int | None:
    """Kill the process that holds the agent's lock. Returns its id; None if uncertain.

    The id in the lock file may be old, or another container's: the process must have that very file open. A pidfd
    protects a process that reuses the id.
    """
    lock = agent_dir(local_root) / LOCK
    with contextlib.suppress(OSError, ValueError, TierckptError):
        pid = int(read_whole(lock, LOCK_BYTES_MAX))
        with closing_file(os.pidfd_open(pid)) as pidfd:
            is_meant = pid != os.getpid() and (not only_stopped or _is_stopped(pid)) and _has_open(pid, lock)
            if is_meant and not is_ready(pidfd, select.POLLIN):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return pid
    return None


def _has_open(pid: int, path: Path) -> bool:
    expected = path.stat()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(file.stat(), expected):
                return True
    return False


def _is_stopped(pid: int) -> bool:
    """True after SIGSTOP or a similar signal. A debugger stops a process differently."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] == "T"


def _waited_seconds(pid: int) -> dict[str, float]:
    waited = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                waited[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return waited if pid > 0 else {}


SOCKET = "agent.sock"
LOG = "agent.log"
START_LOCK = "agent.starting"
HANDOFF_NAME, LOCK_NAME = "handoff", "lock"
LOG_BYTES_MAX = 16 << 20
MESSAGE_BYTES_MAX = 1 << 20
DESCRIPTORS_MAX = 64
ANSWER_SECONDS = 10.0
BUSY_SECONDS = 0.1
START_SECONDS = 20.0
IDLE_SECONDS = 30.0
"""A started agent without drains and connections exits after it."""
STARTS_MAX = 4
"""Successive agents that exited, as one runs that cannot be reached."""

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED


class AgentUnavailableError(TierckptError):
    """No agent answers: the caller does the work in its own process."""


class NotAnsweringError(AgentUnavailableError):
    """The agent is silent, and the log has it: no caller waits again."""


class NoneRunsError(AgentUnavailableError):
    """No agent runs, and none should be started."""


class _DeafError(AgentUnavailableError):
    """One runs but accepts no connections."""


class _Gone(Exception):
    """The connection is unusable."""


class _SilentError(Exception):
    """No byte arrived in time."""


def is_known(error: BaseException) -> bool:
    return isinstance(error, NotAnsweringError)


def encode(message: Json) -> bytes:
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def take_message(buffer: bytearray) -> Json | None:
    """Take the first whole message out of ``buffer``, if any. Raises ValueError if it is malformed."""
    if len(buffer) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack_from(buffer)
    if size > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {size} bytes")
    if len(buffer) < _LENGTH.size + size:
        return None
    message = json.loads(bytes(buffer[_LENGTH.size : _LENGTH.size + size]))
    del buffer[: _LENGTH.size + size]
    if not isinstance(message, dict):
        raise ValueError("a message that is not a JSON object")  # noqa: TRY004  # as above
    return message


def private_directory(local_root: Path) -> Path:
    """Return the agent's directory, made 0700. Raises PermissionDeniedError if another user owns it."""
    directory = agent_dir(local_root)
    make_dirs(directory.parent)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    make_dirs(directory)
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionDeniedError(
            f"{directory} must belong to this user alone (mode 0700)",
            hint="Give each user a local_root of their own, or `chmod 700` it",
            tier=Tier.LOCAL,
        )
    return directory


def has_socket(local_root: Path) -> bool:
    """Return whether an agent runs, or was killed."""
    return (agent_dir(local_root) / SOCKET).exists()


@contextlib.contextmanager
def socket_path(directory: Path) -> Iterator[str]:
    """A path that fits into a socket address (108 bytes, unix(7)), for any depth of the local root."""
    with closing_file(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as file:
        yield f"/proc/self/fd/{file}/{SOCKET}"


def peer_of(connection: socket.socket) -> tuple[int, int]:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


class _Question(NamedTuple):
    message: Json
    descriptors: Sequence[int]
    start: bool
    timeout_seconds: float
    on_busy: Callable[[Any], None]


class AgentClient:
    """This process's connection to the agent of a local root. Thread-safe; connects on first use."""

    def __init__(self, settings: Settings, breaker: AgentBreaker | None = None) -> None:
        use_local_root(settings)
        self.settings = settings
        self._breaker = breaker
        self.connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._outbox: deque[Json] = deque()
        """Its first message is being sent."""
        self._sending: threading.Thread | None = None

    def ask(
        self,
        message: Json,
        descriptors: Sequence[int] = (),
        *,
        start: bool = True,
        timeout_seconds: float = ANSWER_SECONDS,
        on_busy: Callable[[Any], None] = lambda _: None,
    ) -> Any:
        """Return the agent's answer. ``on_busy`` is called with its progress; its exceptions propagate.

        Raises:
            AgentUnavailableError: there is none, or it disappeared twice. The message may have been processed.
            NotAnsweringError: the same, and the log has reported it.
            OperationTimeoutError: no answer within ``timeout_seconds``. The message may have been processed.
            TierckptError: the agent refuses.
        """
        _reap()
        if self._breaker is not None and self._breaker.is_open:
            raise NotAnsweringError(f"the agent of {self.settings.local_root} does not answer")
        try:
            return self._ask_twice(_Question(message, descriptors, start, timeout_seconds, on_busy))
        except (_SilentError, AgentUnavailableError, PermissionDeniedError) as error:
            if self._breaker is None or isinstance(error, NoneRunsError | NotAnsweringError):
                raise
            self._breaker.open(str(error), self._probe, start=start)
            raise NotAnsweringError(f"the agent of {self.settings.local_root} does not answer: {error}") from error

    def _probe(self, start: bool) -> AgentAnswer:
        contact = AgentClient(self.settings)
        start = start and self.settings.drain and self.settings.mover == "agent"
        try:
            contact.ask({"op": "here"}, start=start, timeout_seconds=STOPPED_SECONDS)
        except NoneRunsError:
            return AgentAnswer.YES
        except (OperationTimeoutError, _DeafError):
            return AgentAnswer.SILENT
        except (TierckptError, OSError):
            return AgentAnswer.FAILED
        finally:
            contact.close()
        return AgentAnswer.YES

    def tell(self, message: Json) -> None:
        """Send ``message`` to the running agent, if any, without waiting; ``close`` completes it."""
        with _lock:
            self._outbox.append(message)
            if self._sending is None or not self._sending.is_alive():
                sending = threading.Thread(target=self._send_all, name="tierckpt-tell", daemon=True)
                self._sending = sending if start_if_possible(sending) else None

    def _send_all(self) -> None:
        while True:
            with _lock:
                if not self._outbox:
                    self._sending = None
                    return
                message = self._outbox[0]
            try:
                self.ask(message, start=False)
            except AgentUnavailableError:
                pass
            except (TierckptError, OSError) as error:
                log.warning("could not send the agent of %s %s: %s", self.settings.local_root, message["op"], error)
            finally:
                self._outbox.popleft()

    def _ask_twice(self, question: _Question) -> Any:
        wait_seconds = START_SECONDS if question.start or self._breaker is None else STARVED_SECONDS
        if not self._lock.acquire(timeout=wait_seconds):
            raise NotAnsweringError(f"the agent of {self.settings.local_root} has not answered another thread")
        try:
            try:
                return self._ask(question)
            except _Gone as gone:
                log.info("the agent of %s went away (%s), asking the next one", self.settings.local_root, gone)
            return self._ask(question)
        except _Gone as gone:
            raise AgentUnavailableError(f"the agent of {self.settings.local_root} went away: {gone}") from gone
        finally:
            self._lock.release()

    def _ask(self, question: _Question) -> Any:
        if self.connection is None:
            self.connection = self._connect(question.start)
        try:
            answer = self._exchange(self.connection, question)
        except BaseException as error:
            self._drop()  # the next message must not get a late answer
            if isinstance(error, TierckptError):
                raise
            if isinstance(error, TimeoutError):
                raise OperationTimeoutError(
                    f"the agent of {self.settings.local_root} has not answered",
                    hint=f"Its log is {agent_dir(self.settings.local_root) / LOG}",
                    waited_seconds=question.timeout_seconds,
                ) from error
            if isinstance(error, OSError | ValueError):
                raise _Gone(str(error)) from error
            raise
        if "error" in answer:
            raise TierckptError(f"the agent refused: {answer['error']}")
        return answer.get("ok")

    def _exchange(self, connection: socket.socket, question: _Question) -> Json:
        descriptors, timeout_seconds = question.descriptors, question.timeout_seconds
        listening = _Listening(connection, time.monotonic() + timeout_seconds, is_patient=self._breaker is None)
        data = encode({**question.message, "descriptors": len(descriptors)})
        connection.settimeout(timeout_seconds if self._breaker is None else min(timeout_seconds, PATIENCE_SECONDS))
        try:
            sent = socket.send_fds(connection, [data], list(descriptors)) if descriptors else 0
            connection.sendall(data[sent:])
        except TimeoutError as error:
            if self._breaker is None:
                raise
            raise _SilentError("it does not read from its socket") from error
        while "busy" in (answer := listening.next()):
            question.on_busy(answer["busy"])
        return answer

    def _connect(self, start: bool) -> socket.socket:
        directory = private_directory(self.settings.local_root)
        deadline = time.monotonic() + START_SECONDS
        for _ in Poll(START_SECONDS, BRIEF):
            if (connection := self._reach(directory)) is not None:
                return connection
            if not start:
                raise NoneRunsError(f"no agent runs for {self.settings.local_root}")
            # A start costs half a second of a core: one rank does it.
            try:
                with try_lock(directory / START_LOCK, remove=True) as is_ours:
                    if is_ours:
                        return self._started(directory, deadline)
            except TierckptError:
                raise
            except OSError as error:
                raise AgentUnavailableError(
                    f"the agent of {self.settings.local_root} could not be started: {error}",
                    hint=f"{directory} must be writable, and have room for a log",
                ) from error
        raise AgentUnavailableError(
            f"the agent of {self.settings.local_root} has not started in {START_SECONDS} s",
            hint=f"Its log is {directory / LOG}",
        )

    def _started(self, directory: Path, deadline: float) -> socket.socket:
        process: subprocess.Popen[bytes] | None = None
        starts, ended = 0, None
        for _ in Poll(deadline - time.monotonic(), BRIEF):
            if (connection := self._reach(directory)) is not None:
                return connection
            # One that ended well found another running. If that exits, the next finds none.
            if starts < STARTS_MAX and (process is None or process.poll() == 0):
                process, starts = _start(directory, self.settings), starts + 1
            ended = process.poll() if process is not None else None
            if ended == 0 and starts == STARTS_MAX:
                raise _DeafError(f"the agent of {self.settings.local_root} runs, but does not listen on its socket")
            if ended:
                break
        raise AgentUnavailableError(
            f"the agent of {self.settings.local_root} could not be started (exit code {ended})",
            hint=f"Its log is {directory / LOG}",
        )

    def _reach(self, directory: Path) -> socket.socket | None:
        try:
            return _open(directory)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except PermissionDeniedError:
            raise
        except BlockingIOError as error:
            raise _DeafError(f"the agent of {self.settings.local_root} does not accept connections") from error
        except OSError as error:
            raise AgentUnavailableError(
                f"the agent of {self.settings.local_root} cannot be reached: {error}"
            ) from error

    def _drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def close(self) -> None:
        """Disconnect once the agent has its messages; does not wait for a silent agent."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        for _ in Poll(PATIENCE_SECONDS, BRIEF):
            if not self._outbox:
                break
        if self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._drop()
            self._lock.release()

    def _leave_to_parent(self) -> None:
        """In a forked child: drop the connection silently. It ends with the parent."""
        self._lock = threading.Lock()
        self._drop()


class _Listening:
    """The messages of a connection, until a deadline (monotonic seconds).

    Without ``is_patient``, one must arrive within ``PATIENCE_SECONDS``, or ``STARVED_SECONDS`` if the agent waits for a
    processor.
    """

    def __init__(self, connection: socket.socket, deadline: float, *, is_patient: bool) -> None:
        self._connection, self._deadline, self._is_patient = connection, deadline, is_patient
        self._buffer = bytearray()
        self._received = time.monotonic()
        self._waits_since: tuple[float, dict[str, float]] | None = None
        """When the agent was found late, and for how long its threads had waited for a processor."""

    def next(self) -> Json:
        """Raises TimeoutError at the deadline, _SilentError, ConnectionError, ValueError (malformed)."""
        while (message := take_message(self._buffer)) is None:
            # Shows progress to a watcher of this thread (``Errands``).
            self._connection.settimeout(min(self._seconds_to_wait(), BUSY_SECONDS))
            with contextlib.suppress(TimeoutError):
                received = self._connection.recv(1 << 16)
                if not received:
                    raise ConnectionError("it closed the connection")
                self._buffer += received
        self._received, self._waits_since = time.monotonic(), None
        return message

    def _seconds_to_wait(self) -> float:
        remaining_seconds = self._deadline - time.monotonic()
        if remaining_seconds <= 0:
            raise TimeoutError
        if self._is_patient:
            return remaining_seconds
        silent = time.monotonic() - self._received
        if silent < PATIENCE_SECONDS / 2:
            return min(remaining_seconds, PATIENCE_SECONDS / 2 - silent + 0.001)
        pid, _ = peer_of(self._connection)
        since, before = self._waits_since = self._waits_since or (time.monotonic(), _waited_seconds(pid))
        if silent < PATIENCE_SECONDS:
            return min(remaining_seconds, PATIENCE_SECONDS - silent + 0.001)
        if silent < STARVED_SECONDS:
            limit = STARVED_SHARE * (time.monotonic() - since)
            if any(waited - before.get(task, waited) > limit for task, waited in _waited_seconds(pid).items()):
                return min(remaining_seconds, PATIENCE_SECONDS / 2)
        raise _SilentError(f"no answer in {silent:.1f} s")


def _open(directory: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(ANSWER_SECONDS)
    try:
        with socket_path(directory) as path:
            connection.connect(path)
        _, uid = peer_of(connection)
    except BaseException:
        connection.close()
        raise
    if uid not in (os.getuid(), 0):
        connection.close()
        raise PermissionDeniedError(f"the agent behind {directory} runs as user {uid}", tier=Tier.LOCAL)
    return connection


def _start(directory: Path, settings: Settings) -> subprocess.Popen[bytes]:
    keep_log_small(directory)
    with open(open_regular(directory / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as output:  # noqa: PTH123
        process = start_python(
            "tierckpt.agent",
            str(IDLE_SECONDS),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    _children.append(process)
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # type: ignore[union-attr]
        pipe.write(settings.model_dump_json().encode())
    log.info("started the agent of %s (process %d)", settings.local_root, process.pid)
    return process


def keep_log_small(directory: Path) -> None:
    """Empty a log above ``LOG_BYTES_MAX``, after copying it to ``agent.log.1``. Its writers append to it."""
    log_file = directory / LOG
    with contextlib.suppress(OSError):
        if log_file.stat().st_size > LOG_BYTES_MAX:
            try:
                shutil.copyfile(log_file, directory / f"{LOG}.1")
            finally:  # also on a full disk
                os.truncate(log_file, 0)


def _reap() -> None:
    for child in [child for child in _children if child.poll() is not None]:
        with contextlib.suppress(ValueError):
            _children.remove(child)


_contacts: dict[Path, AgentClient] = {}
_breakers: dict[Path, AgentBreaker] = {}
_children: list[subprocess.Popen[bytes]] = []
"""Started agents, kept to reap those that exit first."""
_lock = threading.Lock()


def shared_client(settings: Settings) -> AgentClient:
    with _lock:
        if settings.local_root not in _contacts:
            _contacts[settings.local_root] = AgentClient(settings, _breaker_of(settings.local_root))
        return _contacts[settings.local_root]


def private_client(settings: Settings) -> AgentClient:
    """Return a client with its own connection: the agent sees it end."""
    with _lock:
        return AgentClient(settings, _breaker_of(settings.local_root))


def _breaker_of(local_root: Path) -> AgentBreaker:
    return _breakers.setdefault(local_root, AgentBreaker(local_root))


def close_clients() -> None:
    with _lock:
        contacts = [*_contacts.values()]
        _contacts.clear()
    for contact in contacts:
        contact.close()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for contact in _contacts.values():
        contact._leave_to_parent()
    _contacts.clear()
    _breakers.clear()
    _children.clear()


os.register_at_fork(after_in_child=_after_fork)
