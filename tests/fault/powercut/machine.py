"""QEMU: a machine is booted once and frozen; each cut thaws it on a copy of its disk and kills it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.fault.powercut.events import BLOCK_BYTES, EVENT_BLOCKS, Event, decode
from tests.fault.powercut.initrd import MissingDependencyError

QEMU = "qemu-system-x86_64"
MEMORY_MIB = 512
FILE_SYSTEM_BYTES = 320 << 20
"""The minimum of xfs is 300 MiB."""
DISK_BYTES = FILE_SYSTEM_BYTES + EVENT_BLOCKS * BLOCK_BYTES
BOOT_SECONDS = 300.0
FREEZE_SECONDS = 120.0
THAW_SECONDS = 120.0

MKFS = {
    "ext4": ("mkfs.ext4", "-q", "-b", "4096", "{disk}", f"{FILE_SYSTEM_BYTES // 4096}"),
    "xfs": ("mkfs.xfs", "-q", "-s", "size=4096", "-d", f"size={FILE_SYSTEM_BYTES}", "{disk}"),
}


class MachineError(Exception):
    """The machine failed the harness; this is no verdict on the tested code."""


@dataclass(frozen=True)
class Frozen:
    """A machine that waits for its order: memory, disk, and boot files."""

    file_system: str
    kernel: Path
    initrd: Path
    disk: Path
    memory: Path


@dataclass(frozen=True)
class Cut:
    """The remains of a machine: disk, log of writes, and events received on the serial line."""

    disk: Path
    log: Path
    received: list[Event]


class Machine:
    """A running QEMU on ``folder/disk``, with a log of the writes in ``folder/log``."""

    def __init__(self, folder: Path, file_system: str, kernel: Path, initrd: Path, memory: Path | None = None) -> None:
        if shutil.which(QEMU) is None:
            raise MissingDependencyError("apt-get install --no-install-recommends qemu-system-x86")
        self.folder = folder
        self.log = folder / "log"
        self.log.write_bytes(b"")
        self._control = folder / "control"
        self._control.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [*self._command(file_system, kernel, initrd), *(["-incoming", f"exec:cat {memory}"] if memory else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "errors").open("wb"),
            start_new_session=True,
        )
        self._received = b""

    def _command(self, file_system: str, kernel: Path, initrd: Path) -> list[str]:
        file = "driver=file,cache.direct=off,cache.no-flush=on"
        drives = (
            f"{file},node-name=disk,filename={self.folder / 'disk'}",
            f"{file},node-name=log,filename={self.log}",
            f"driver=blklogwrites,node-name=logged,file=disk,log=log,log-sector-size={BLOCK_BYTES}",
        )
        disk = f"drive=logged,write-cache=on,logical_block_size={BLOCK_BYTES},physical_block_size={BLOCK_BYTES}"
        return [
            *("setpriv", "--pdeathsig", "KILL"),  # ends with this process
            *(QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-machine", "pc", "-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", f"{MEMORY_MIB}"),
            *("-kernel", str(kernel), "-initrd", str(initrd)),
            *("-append", f"console=ttyS0 quiet panic=-1 random.trust_cpu=on file_system={file_system}"),
            *("-serial", f"file:{self.folder / 'console'}"),
            *("-chardev", "stdio,id=line,signal=off", "-serial", "chardev:line"),
            *("-qmp", f"unix:{self._control},server=on,wait=off"),
            *(word for drive in drives for word in ("-blockdev", drive)),
            *("-device", f"virtio-blk-pci,{disk}"),
        ]

    # --- the serial line ---------------------------------------------------------------------------------------

    def send(self, instructions: dict[str, Any]) -> None:
        line = self._pipe(self._process.stdin)
        line.write(json.dumps(instructions).encode() + b"\n")
        line.flush()

    def wait_for(self, word: str, timeout_seconds: float) -> None:
        """Wait until the guest sends ``word``. Raises MachineError if it fails or times out."""
        end = time.monotonic() + timeout_seconds
        while f"\n{word}\n".encode() not in b"\n" + self._received:
            if b"\nfailed " in b"\n" + self._received:
                raise MachineError(f"the guest failed: {self._last_line()}")
            if time.monotonic() > end or not self._receive(end - time.monotonic()):
                raise MachineError(f"timeout waiting for {word!r} of the guest; console:\n{self.console()}")

    def _receive(self, seconds: float) -> bool:
        """Read the guest's output for at most ``seconds``. False: the guest ended."""
        out = self._pipe(self._process.stdout)
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            if not selector.select(max(0.0, seconds)):
                return True
        data = os.read(out.fileno(), 1 << 16)
        self._received += data
        return bool(data)

    def _last_line(self) -> str:
        return self._received.decode(errors="replace").strip().rpartition("\nfailed ")[2].replace("\\n", "\n")

    def console(self) -> str:
        texts = [self.folder / name for name in ("console", "errors")]
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in texts if path.exists())

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise MachineError("no serial line")
        return pipe

    # --- the end -----------------------------------------------------------------------------------------------

    def freeze(self, memory: Path) -> None:
        """Write the machine's memory to a file and quit; memory and disk belong together."""
        with self._connect() as control:
            control.do("migrate", uri=f"exec:cat > {memory}")
            end = time.monotonic() + FREEZE_SECONDS
            while (status := control.do("query-migrate").get("status")) != "completed":
                if status in {"failed", "cancelled"} or time.monotonic() > end:
                    raise MachineError(f"cannot freeze the machine: {status}")
                time.sleep(0.2)
            control.do("quit")
        self._process.wait(30)

    def wait_until_thawed(self) -> None:
        with self._connect() as control:
            end = time.monotonic() + THAW_SECONDS
            while (status := control.do("query-status")["status"]) != "running":
                if time.monotonic() > end:
                    raise MachineError(f"the machine is {status}: {self.console()}")
                time.sleep(0.05)

    def run_for(self, seconds: float) -> None:
        """Run for ``seconds``. Raises MachineError if the machine ends by itself."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self._receive(left):
                raise MachineError(f"the machine ended by itself: {self.console()}")

    def cut(self) -> list[Event]:
        """Kill the machine. Returns the events received on the serial line."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._received += self._pipe(self._process.stdout).read()
        if b"\nfailed " in b"\n" + self._received:
            raise MachineError(f"the guest failed before the cut: {self._last_line()}")
        whole = self._received[: self._received.rfind(b"\n") + 1]  # the cut may tear a line
        return [event for line in whole.splitlines() if (event := decode(line)) is not None]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                self._pipe(pipe).close()

    @contextlib.contextmanager
    def _connect(self) -> Iterator[_Control]:
        end = time.monotonic() + 30
        with socket.socket(socket.AF_UNIX) as link:
            while True:
                try:
                    link.connect(str(self._control))
                    break
                except OSError:
                    if self._process.poll() is not None or time.monotonic() > end:
                        raise MachineError(f"QEMU does not answer: {self.console()}") from None
                    time.sleep(0.05)
            with link.makefile("rwb") as stream:
                yield _Control(stream)


class _Control:
    """QEMU's machine protocol (QMP): one JSON object a line."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        stream.readline()  # its greeting
        self.do("qmp_capabilities")

    def do(self, command: str, **arguments: Any) -> dict[str, Any]:
        self._stream.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        self._stream.flush()
        while True:
            answer = json.loads(self._stream.readline())
            if "error" in answer:
                raise MachineError(f"{command}: {answer['error']}")
            if "return" in answer:
                return dict(answer["return"])


def boot(folder: Path, file_system: str, kernel: Path, initrd: Path) -> Frozen:
    """Boot a machine on a new disk with ``file_system``, and freeze it after its first checkpoint."""
    folder.mkdir(parents=True)
    disk = folder / "disk"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    make = [word.format(disk=disk) for word in MKFS[file_system]]
    if shutil.which(make[0]) is None:
        raise MissingDependencyError("apt-get install e2fsprogs xfsprogs")
    subprocess.run(make, check=True, capture_output=True)
    machine = Machine(folder, file_system, kernel, initrd)
    try:
        machine.wait_for("ready", BOOT_SECONDS)
        machine.freeze(folder / "memory")
    finally:
        machine.close()
    return Frozen(file_system, kernel, initrd, disk, folder / "memory")


def cut(frozen: Frozen, folder: Path, seconds: float, instructions: dict[str, Any]) -> Cut:
    """Thaw the machine on a copy of its disk, send ``instructions``, and kill it after ``seconds``."""
    folder.mkdir(parents=True, exist_ok=True)
    copy_disk(frozen.disk, folder / "disk")
    machine = Machine(folder, frozen.file_system, frozen.kernel, frozen.initrd, frozen.memory)
    try:
        machine.wait_until_thawed()
        machine.send(instructions)
        machine.run_for(seconds)
        return Cut(folder / "disk", folder / "log", machine.cut())
    finally:
        machine.close()


def copy_disk(source: Path, target: Path) -> None:
    """Copy a sparse disk image."""
    subprocess.run(["cp", "--sparse=always", source, target], check=True)
