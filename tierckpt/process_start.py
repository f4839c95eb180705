"""Start of our processes: usable standard streams, and signal handling for a process that is PID 1.

S1  Descriptors 0, 1 and 2 are open, so that no file of ours gets their number.
S2  A write to standard error neither raises nor waits for long. A write to standard output raises only OutputError.
S3  As process 1 of a container, a signal ends the command, and no zombie stays.
S4  The command ends ``END_SECONDS`` after its work or after Ctrl-C, whatever its threads wait for; at once after a
    second Ctrl-C.
S5  A child runs only our code: it gets an absolute executable, ``-P``, root's working directory, and no relative or
    world-writable directory in its environment. Otherwise a user with write access to the working directory, or to a
    relative entry of PYTHONPATH, could run code as this user.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import select
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from .poll import Poll
from .types import Json

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


DIRECTORY = "/"
DROPPED_VARIABLES = frozenset({"PYTHONPATH", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT", "PYTHONWARNINGS"})
"""They make Python import modules, or wait at a prompt. LD_PRELOAD stays, as torch may need it."""


def start_python(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    if not Path(sys.executable or "").is_absolute():
        raise FileNotFoundError(f"sys.executable is {sys.executable!r}, which does not say where Python is")
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.Popen(command, cwd=DIRECTORY, env=clean_environment(os.environ), **options)


def start_with_order(module: str, order: Json, descriptors: Sequence[int] = ()) -> tuple[subprocess.Popen[bytes], int]:
    """Start ``module`` with ``order`` as JSON on stdin. Raises OSError.

    Returns the process, and our end of the pipe ``order["life"]``: closing it ends the process.
    """
    child_end, own_end = os.pipe()
    with os.fdopen(child_end), tempfile.TemporaryFile() as file:  # not a pipe, to avoid waiting for the reader
        file.write(json.dumps({**order, "life": child_end}).encode())
        file.seek(0)
        try:
            return start_python(module, stdin=file, pass_fds=(child_end, *descriptors)), own_end
        except BaseException:
            os.close(own_end)
            raise


async def ended(process: subprocess.Popen[bytes], timeout_seconds: float) -> None:
    """Wait for ``process`` to end with code 0; kill it after the timeout. Raises RuntimeError."""
    async for _ in Poll(timeout_seconds):
        if process.poll() is not None:
            break
    else:
        process.kill()
        await asyncio.to_thread(process.wait)
        raise RuntimeError(f"the process that executes it had not ended after {timeout_seconds:g} s")
    if process.returncode != 0:
        raise RuntimeError(f"the process that executes it ended with code {process.returncode}")


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if name not in DROPPED_VARIABLES}
    path = [*_search_path(environment.get("PYTHONPATH", ""))]
    return kept | {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


def _search_path(search_path: str) -> Iterator[str]:
    home = str(Path(__file__).resolve().parent.parent)
    for entry in search_path.split(os.pathsep):
        if entry != home and Path(entry).is_absolute() and not _is_open_to_all(Path(entry)):
            yield entry
    if home not in {*site.getsitepackages(), site.getusersitepackages()}:
        yield home


def _is_open_to_all(directory: Path) -> bool:
    """True also for a missing directory, which others could make. Its owner is trusted."""
    try:
        return bool(directory.stat().st_mode & 0o002)
    except OSError:
        return True


PIPE_BYTES = select.PIPE_BUF
"""A pipe that polls as writable takes this many bytes at once."""
MESSAGE_SECONDS = 0.2
LAST_MESSAGE_SECONDS = 5.0
"""The main thread has no other work to hold up."""
END_SECONDS = 5.0
INTERRUPTED = 128 + signal.SIGINT
SI_KERNEL = 0x80


class OutputError(Exception):
    """Not an ``OSError``: typer exits silently on a closed pipe."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror)
        self.cause = cause


def begin_command() -> None:
    open_missing_descriptors()
    if sys.getfilesystemencoding() == "ascii":
        # else model files with UTF-8 names cannot be opened
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    if os.getpid() == 1:
        _run_below_init()
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(sys.__stdout__, _Output(1))
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(sys.__stderr__, _Messages(2))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def end_command(code: int) -> NoReturn:
    """Give threads, which Python joins, at most ``END_SECONDS``."""
    if code == INTERRUPTED:
        os._exit(code)
    end_later(code, END_SECONDS)
    sys.exit(code)


def watch_interrupts() -> None:
    """Repeat Ctrl-C until Python has handled it: a signal just before the main thread waits for a lock is lost."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_repeat_interrupts, args=(reading,), daemon=True).start()


def _repeat_interrupts(reading: int) -> None:
    while number := os.read(reading, 1):
        time.sleep(MESSAGE_SECONDS)
        main_thread = threading.main_thread().ident
        if number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is _interrupt and main_thread is not None:
            signal.pthread_kill(main_thread, signal.SIGINT)


def _interrupt(number: int, frame: object) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_later(INTERRUPTED, END_SECONDS)
    raise KeyboardInterrupt


def end_later(code: int, seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def open_missing_descriptors() -> None:
    """Let a read of 0 and a write to 1 or 2 still fail with EBADF."""
    for number, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(number)
        except OSError:
            with contextlib.suppress(OSError):
                os.set_inheritable(os.open(os.devnull, mode), True)  # the lowest free number


def leave_removed_directory() -> None:
    """MKL ends a process without a working directory."""
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        os.chdir("/")


def is_ready(descriptor: int, events: int, seconds: float | None = 0.0) -> bool:
    """Wait for one of ``events`` (poll(2)), an error, or the end of the other side. None: no limit."""
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def _stream(stream: TextIO | None, descriptor: io.RawIOBase) -> TextIO:
    encoding = "utf-8"
    if stream is not None:
        encoding = stream.encoding
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return io.TextIOWrapper(descriptor, encoding, errors="backslashreplace", write_through=True)  # type: ignore[type-var]


class _Descriptor(io.RawIOBase):
    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True


class _Output(_Descriptor):
    """A parent may have made standard output non-blocking."""

    def write(self, data: ReadableBuffer) -> int:
        view = memoryview(data).cast("B")
        left = view
        while left:
            try:
                left = left[os.write(self._number, left) :]
            except BlockingIOError:
                is_ready(self._number, select.POLLOUT, None)
            except OSError as error:
                raise OutputError(error) from error
        return len(view)


class _Messages(_Descriptor):
    """Drops messages that nobody takes: the exit code tells the result."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._lock, self._is_stuck = threading.Lock(), False

    def write(self, data: ReadableBuffer) -> int:
        view = memoryview(data).cast("B")
        is_main = threading.current_thread() is threading.main_thread()
        seconds = 0.0 if self._is_stuck else LAST_MESSAGE_SECONDS if is_main else MESSAGE_SECONDS
        if self._lock.acquire(timeout=seconds):
            try:
                pieces = range(0, len(view), PIPE_BYTES)
                self._is_stuck = not all(self._put(view[start : start + PIPE_BYTES], seconds) for start in pieces)
            except OSError:
                self._is_stuck = False
            finally:
                self._lock.release()
        return len(view)

    def _put(self, piece: memoryview, seconds: float) -> bool:
        while piece:
            if not is_ready(self._number, select.POLLOUT, seconds):
                return False
            piece = piece[os.write(self._number, piece) :]
        return True


def _run_below_init() -> None:
    """Return in a child that does the work. This process forwards signals, reaps, and ends like the child.

    The kernel drops a signal to process 1 without a handler, and gives it orphans to reap.
    """
    signals = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        received = signal.sigwaitinfo(signals)
        if received.si_signo == signal.SIGCHLD:
            _reap(worker)
        elif received.si_code != SI_KERNEL:  # else the terminal has sent it to the worker too
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, received.si_signo)


def _reap(worker: int) -> None:
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if process == worker:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        if process == 0:
            return
