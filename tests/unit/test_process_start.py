"""The start of a command: standard streams, signals, process 1 of a container (tierckpt/process_start.py)."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.services import ENVIRONMENT, REPOSITORY, init_of, pid_namespace
from tierckpt.poll import LOCAL, Poll

BEGIN = "import os, signal, subprocess, sys, threading, time\nfrom tierckpt.process_start import *\nbegin_command()\n"


def begin(code: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", BEGIN + code], cwd=REPOSITORY, **options)  # type: ignore[call-overload,no-any-return]


def await_file(path: Path) -> None:
    assert any(path.exists() for _ in Poll(60, LOCAL))


def closed(*descriptors: int) -> Callable[[], None]:
    """Code that a child runs first, to start without ``descriptors``."""
    return lambda: [os.close(one) for one in descriptors] and None


def test_no_file_gets_the_number_of_a_standard_stream() -> None:
    code = """
from tempfile import TemporaryFile
child = "import os, sys; sys.exit(2 if os.open(os.devnull, os.O_RDONLY) < 3 else 0)"
sys.exit(1 if TemporaryFile().fileno() < 3 else subprocess.run([sys.executable, "-c", child]).returncode)
"""
    for which in ((0, 1, 2), (2,)):
        assert begin(code, preexec_fn=closed(*which)).wait(60) == 0


def test_the_library_fills_them_for_a_trainer_that_began_without() -> None:
    code = "import os, sys, tierckpt; sys.exit(os.open(os.devnull, os.O_RDONLY) < 3 or bool(tierckpt.__dir__() == []))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, preexec_fn=closed(0, 1, 2), check=False)
    assert done.returncode == 0


def test_messages_without_a_reader_neither_raise_nor_wait() -> None:
    code = """
def say():
    for _ in range(100):
        print("message " * 500, file=sys.stderr)
thread = threading.Thread(target=say)
thread.start()
thread.join()
say()
sys.exit(7)
"""
    full, gone = os.pipe(), os.pipe()
    os.close(gone[0])
    children = [begin(code, stderr=full[1]), begin(code, stderr=gone[1]), begin(code, preexec_fn=closed(2))]
    with open("/dev/full", "wb") as no_room:  # noqa: PTH123
        children.append(begin(code, stderr=no_room))
    try:
        assert [child.wait(60) for child in children] == [7] * 4
    finally:
        for descriptor in (*full, gone[1]):
            os.close(descriptor)


def test_messages_arrive_whole_where_they_are_read() -> None:
    code = "sys.stderr.write('é\\udcff' + 'x' * 1_000_000)\nprint('é', file=sys.stdout)"
    child = begin(
        code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii:strict"}
    )
    output, messages = child.communicate(timeout=60)
    assert output == b"\\xe9\n"
    assert messages == b"\\xe9\\udcff" + b"x" * 1_000_000
    assert child.returncode == 0


def test_output_that_cannot_be_written_is_an_error_of_its_own() -> None:
    code = """
try:
    print("result")
except OutputError as error:
    sys.exit(error.cause.errno)
"""
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as no_room:  # noqa: PTH123
        children = [begin(code, stdout=no_room), begin(code, stdout=writing), begin(code, preexec_fn=closed(1))]
    os.close(writing)
    assert [child.wait(60) for child in children] == [28, 32, 9]


def test_output_waits_for_a_reader_of_a_pipe_that_is_not_blocking() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETFL, os.O_NONBLOCK)
    child = begin("print('x' * 1_000_000)", stdout=writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as output:
        assert len(output.read()) == 1_000_001
    assert child.wait(60) == 0


def test_the_first_interrupt_ends_a_command_whose_threads_hang_and_the_second_at_once(tmp_path: Path) -> None:
    hanging = "threading.Thread(target=lambda: time.sleep(600)).start()\n"
    soon = "import tierckpt.process_start\ntierckpt.process_start.END_SECONDS = 0.1\n"
    at_work = tmp_path / "at-work"
    wait = f"open({str(at_work)!r}, 'w').close()\n"
    waits = f"{hanging}try:\n    {wait}    time.sleep(600)\nexcept KeyboardInterrupt:\n    "
    for code, signals, status in (
        (f"{waits}end_command(130)", 1, 130),
        (f"{soon}{waits}pass", 1, 130),
        (f"{waits}{wait}    time.sleep(600)", 2, -signal.SIGINT),
        (f"{soon}{hanging}end_command(3)", 0, 3),
    ):
        child = begin(code)
        for _ in range(signals):
            await_file(at_work)
            at_work.unlink()
            child.send_signal(signal.SIGINT)
        assert child.wait(60) == status


def begin_as_init(code: str) -> subprocess.Popen[bytes]:
    """``code`` as process 1 of a namespace."""
    return subprocess.Popen([*pid_namespace(), sys.executable, "-c", BEGIN + code], cwd=REPOSITORY)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_process_1(number: signal.Signals, tmp_path: Path) -> None:
    at_work = tmp_path / "at-work"
    end = "try:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    end_command(130)\n"
    inherited = signal.signal(number, signal.SIG_DFL)  # nohup has SIGHUP ignored, which counts
    try:
        child = begin_as_init(f"open({str(at_work)!r}, 'w').close()\n{end}")
    finally:
        signal.signal(number, inherited)
    await_file(at_work)
    os.kill(init_of(child), number)
    assert child.wait(60) == 128 + number


def test_process_1_ends_as_the_command_does_and_leaves_no_zombie() -> None:
    code = """
orphan = subprocess.run(["sh", "-c", "sleep 0.1 & echo $!"], capture_output=True, text=True).stdout.strip()
while os.path.exists(f"/proc/{orphan}"):
    time.sleep(0.01)
end_command(3 if os.getpid() != 1 else 4)
"""
    assert begin_as_init(code).wait(60) == 3
