"""A FUSE mount of a directory with a restricted file system: real system calls, real refusals.

    with mounted(tmp_path, no=("symlink", "link")) as mount: ...

The server is a process of its own, which speaks to /dev/fuse itself: no library, no package. Needs root and /dev/fuse.

Options (``FuseMount.set`` changes them while it is mounted):
    no         calls that are refused, each with the error of ``NUMBERS`` or ``numbers``
    numbers    another error for a call: {"symlink": errno.EPERM}
    inodes     "changing": another inode number at each look
    zeros      st_nlink, st_blocks and st_blksize are 0
    space      "unknown": statvfs has no blocks at all
    step_ns    times are cut to so many nanoseconds (vfat: 2 seconds)
    fold       names differ by more than case, and hold none of ``:?*"<>|``
    room       bytes that can be written from now on; then ``full`` is the error
    full       ENOSPC, EDQUOT, EFBIG, EROFS: of writes without room
    read_only  every change is refused with EROFS
"""

# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108, PTH110, PTH112, PTH115, PTH116, PTH208, PTH211
from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NUMBERS = {
    "symlink": errno.EOPNOTSUPP,
    "link": errno.EPERM,
    "direct": errno.EINVAL,
    "direct_io": errno.EINVAL,
    "flock": errno.ENOLCK,
    "lock": errno.ENOLCK,
    "tmpfile": errno.EOPNOTSUPP,
    "fallocate": errno.EOPNOTSUPP,
    "rename2": errno.EINVAL,
    "fsyncdir": errno.EINVAL,
    "chmod": errno.EPERM,
    "chown": errno.EPERM,
    "utime": errno.EPERM,
    "mknod": errno.EPERM,
    "mmap": errno.ENODEV,
}
"""``direct``: open with O_DIRECT is refused; ``direct_io``: the first read or write is. ``mmap``: shared mappings.
``lock``: locks on bytes."""
EVERYTHING = tuple(call for call in NUMBERS if call != "direct_io")
WRITING = {"SETATTR", "SYMLINK", "MKNOD", "MKDIR", "UNLINK", "RMDIR", "RENAME", "LINK", "WRITE", "CREATE", "RENAME2"}
WRITING |= {"FALLOCATE", "TMPFILE"}
CODES = {
    1: "LOOKUP", 2: "FORGET", 3: "GETATTR", 4: "SETATTR", 5: "READLINK", 6: "SYMLINK", 8: "MKNOD", 9: "MKDIR",
    10: "UNLINK", 11: "RMDIR", 12: "RENAME", 13: "LINK", 14: "OPEN", 15: "READ", 16: "WRITE", 17: "STATFS",
    18: "RELEASE", 20: "FSYNC", 25: "FLUSH", 26: "INIT", 27: "OPENDIR", 28: "READDIR", 29: "RELEASEDIR",
    30: "FSYNCDIR", 31: "GETLK", 32: "SETLK", 33: "SETLKW", 35: "CREATE", 38: "DESTROY", 42: "BATCH_FORGET",
    43: "FALLOCATE", 45: "RENAME2", 51: "TMPFILE",
}  # fmt: skip
POSIX_LOCKS, FLOCK_LOCKS, BIG_WRITES = 1 << 1, 1 << 10, 1 << 5
DIRECT_IO = RENAME_NOREPLACE = 1
WRITE_BYTES = 128 << 10
FORBIDDEN = set(':?*"<>|')
LIBC = ctypes.CDLL(None, use_errno=True)


class FuseMount:
    """A mounted directory, and what its file system lacks."""

    def __init__(self, base: Path, control: dict[str, Any], backing: Path | None = None) -> None:
        self.path, self.backing = base / "mount", base / "backing"
        self.server: subprocess.Popen[str] | None = None
        self._control, self._said = base / "control.json", control
        self.path.mkdir()
        self.backing.symlink_to(backing) if backing else self.backing.mkdir()
        self.set()

    def kill(self) -> None:
        """The server dies: every call fails with ENOTCONN."""
        assert self.server is not None
        self.server.kill()
        self.server.wait()

    def set(self, **control: Any) -> None:
        """Lack something else from the next call on."""
        self._said = {**self._said, **control}
        new = self._control.with_suffix(".new")
        new.write_text(json.dumps(self._said))
        new.replace(self._control)


@contextlib.contextmanager
def mounted(base: Path, backing: Path | None = None, **control: Any) -> Iterator[FuseMount]:
    """Mount a new directory below ``base``, or ``backing``. Skips the test where that cannot be done."""
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse")
    mount = FuseMount(base, control, backing)
    mount.server = server = subprocess.Popen(
        [sys.executable, __file__, str(base)], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    try:
        assert server.stdout is not None
        if (answer := server.stdout.readline().strip()) != "mounted":
            pytest.skip(f"cannot mount FUSE here: {answer}")
        yield mount
    finally:
        LIBC.umount2(str(mount.path).encode(), 2)
        server.kill()
        server.wait()


class Server:
    """The passthrough to ``backing``. A node is a file of it, by whatever names."""

    def __init__(self, base: Path) -> None:
        self.backing, self._control, self._stamp = str(base / "backing"), base / "control.json", (0, 0)
        self.said: dict[str, Any] = {}
        self._names: dict[int, list[str]] = {1: [""]}
        self._nodes: dict[int, int] = {}
        self._next, self._inode, self._used = 2, 1000, 0
        self.open: set[int] = set()
        self.direct: set[int] = set()
        self.locks: dict[int, Any] = {}

    def look_at_control(self) -> None:
        status = self._control.stat()
        if self._stamp != (status.st_mtime_ns, status.st_ino):
            self._stamp = (status.st_mtime_ns, status.st_ino)
            before, self.said = self.said.get("room"), json.loads(self._control.read_text())
            if self.said.get("room") != before:
                self._used = 0

    def refuse(self, call: str) -> None:
        if call in self.said.get("no", ()):
            raise OSError(self.said.get("numbers", {}).get(call, NUMBERS[call]), call)

    # --- nodes ---------------------------------------------------------------------------------------------------

    def path(self, node: int) -> str:
        names = self._names.get(node)
        if not names:
            raise OSError(errno.ESTALE, "gone")
        return f"{self.backing}/{names[-1]}"

    def child(self, node: int, name: bytes) -> str:
        text = os.fsdecode(name)
        if self.said.get("fold"):
            if FORBIDDEN & set(text):
                raise OSError(errno.EINVAL, "name")
            there = os.listdir(self.path(node))
            text = next((one for one in there if one.lower() == text.lower()), text)
        return f"{self.path(node)}/{text}"

    def node_of(self, path: str) -> int:
        inode, name = os.lstat(path).st_ino, os.path.relpath(path, self.backing)
        node = self._nodes.get(inode)
        if node is None:
            node = self._nodes[inode] = self._next
            self._next += 1
        names = self._names.setdefault(node, [])
        if name not in names:
            names.append(name)
        return node

    def forget_name(self, path: str) -> None:
        name, inode = os.path.relpath(path, self.backing), os.lstat(path).st_ino
        node = self._nodes.get(inode)
        if node is not None:
            self._names[node] = [one for one in self._names[node] if one != name]
            if os.lstat(path).st_nlink == 1 or not self._names[node] or os.path.isdir(path):
                del self._nodes[inode]

    def renamed(self, old: str, new: str) -> None:
        before, after = (os.path.relpath(path, self.backing) for path in (old, new))
        for node, names in self._names.items():
            self._names[node] = [
                after + name[len(before) :] if name == before or name.startswith(before + "/") else name
                for name in names
            ]

    def attr(self, status: os.stat_result) -> bytes:
        step, zeros = self.said.get("step_ns", 1), self.said.get("zeros")
        times = [at // step * step for at in (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)]
        inode = status.st_ino
        if self.said.get("inodes") == "changing":
            self._inode += 1
            inode = self._inode
        return struct.pack(
            "<6Q10I",
            inode, status.st_size, 0 if zeros else status.st_blocks,
            *(at // 10**9 for at in times), *(at % 10**9 for at in times),
            status.st_mode, 0 if zeros else status.st_nlink, status.st_uid, status.st_gid,
            0, 0 if zeros else 4096, 0,
        )  # fmt: skip

    def entry(self, path: str) -> bytes:
        return struct.pack("<QQQQII", self.node_of(path), 0, 0, 0, 0, 0) + self.attr(os.lstat(path))

    def opened(self, file: int, flags: int) -> bytes:
        self.open.add(file)
        if flags & os.O_DIRECT:
            self.direct.add(file)
        return struct.pack("<QII", file, DIRECT_IO if "mmap" in self.said.get("no", ()) else 0, 0)

    def answer(self, code: str, node: int, owner: tuple[int, int], body: bytes) -> bytes:
        if self.said.get("read_only") and code in WRITING:
            raise OSError(errno.EROFS, code)
        if code in ("", "TMPFILE"):
            raise OSError(errno.ENOSYS, "no such call")
        return getattr(self, code.lower())(node, owner, body)  # type: ignore[no-any-return]

    # --- calls ---------------------------------------------------------------------------------------------------

    def init(self, node: int, owner: Any, body: bytes) -> bytes:
        _, minor, ahead, _ = struct.unpack_from("<IIII", body)
        refused = self.said.get("no", ())
        flags = BIG_WRITES | FLOCK_LOCKS * ("flock" in refused) | POSIX_LOCKS * ("lock" in refused)
        return struct.pack("<IIIIHHIIHHI28x", 7, min(minor, 31), ahead, flags, 12, 9, WRITE_BYTES, 1, 32, 0, 0)

    def lookup(self, node: int, owner: Any, body: bytes) -> bytes:
        return self.entry(self.child(node, body.rstrip(b"\0")))

    def getattr(self, node: int, owner: Any, body: bytes) -> bytes:
        flags, _, file = struct.unpack_from("<IIQ", body)
        status = os.fstat(file) if flags & 1 and file in self.open else os.lstat(self.path(node))
        return struct.pack("<QII", 0, 0, 0) + self.attr(status)

    def setattr(self, node: int, owner: Any, body: bytes) -> bytes:
        valid, _, file, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid = struct.unpack_from(
            "<IIQQQQQQIIIIIII", body
        )
        path = f"/proc/self/fd/{file}" if valid & 64 and file in self.open else self.path(node)
        if valid & 1:
            self.refuse("chmod")
            os.chmod(path, stat.S_IMODE(mode))
        if valid & 6:
            self.refuse("chown")
            os.chown(path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            os.truncate(path, size)
        if valid & (16 | 32):
            self.refuse("utime")
            now, status = time.time_ns(), os.stat(path)
            at = now if valid & 128 else atime * 10**9 + atime_ns if valid & 16 else status.st_atime_ns
            changed = now if valid & 256 else mtime * 10**9 + mtime_ns if valid & 32 else status.st_mtime_ns
            os.utime(path, ns=(at, changed))
        return struct.pack("<QII", 0, 0, 0) + self.attr(os.stat(path))

    def readlink(self, node: int, owner: Any, body: bytes) -> bytes:
        return os.fsencode(os.readlink(self.path(node)))

    def symlink(self, node: int, owner: tuple[int, int], body: bytes) -> bytes:
        self.refuse("symlink")
        name, target = body.split(b"\0")[:2]
        path = self.child(node, name)
        os.symlink(target, os.fsencode(path))
        return self.entry(path)

    def mknod(self, node: int, owner: tuple[int, int], body: bytes) -> bytes:
        self.refuse("mknod")
        mode, device, _, _ = struct.unpack_from("<IIII", body)
        path = self.child(node, body[16:].rstrip(b"\0"))
        os.mknod(path, mode, device)
        return self.entry(path)

    def mkdir(self, node: int, owner: tuple[int, int], body: bytes) -> bytes:
        path = self.child(node, body[8:].rstrip(b"\0"))
        os.mkdir(path, struct.unpack_from("<I", body)[0])
        os.chown(path, *owner)
        return self.entry(path)

    def unlink(self, node: int, owner: Any, body: bytes) -> bytes:
        path = self.child(node, body.rstrip(b"\0"))
        self.forget_name(path)
        os.unlink(path)
        return b""

    def rmdir(self, node: int, owner: Any, body: bytes) -> bytes:
        path = self.child(node, body.rstrip(b"\0"))
        if not os.listdir(path):
            self.forget_name(path)
        os.rmdir(path)
        return b""

    def _rename(self, node: int, to: int, names: bytes) -> bytes:
        one, other = names.split(b"\0")[:2]
        old, new = self.child(node, one), f"{self.path(to)}/{os.fsdecode(other)}"
        gone = os.path.lexists(new) and os.lstat(new).st_ino
        if gone == os.lstat(old).st_ino:
            return b""  # two names of one file: no operation
        os.rename(old, new)
        name = os.path.relpath(new, self.backing)
        if gone and (left := self._nodes.get(gone)) is not None:
            self._names[left] = [one for one in self._names[left] if one != name]
            if not self._names[left]:
                del self._nodes[gone]
        self.renamed(old, new)
        return b""

    def rename(self, node: int, owner: Any, body: bytes) -> bytes:
        return self._rename(node, struct.unpack_from("<Q", body)[0], body[8:])

    def rename2(self, node: int, owner: Any, body: bytes) -> bytes:
        to, flags, _ = struct.unpack_from("<QII", body)
        if flags:
            self.refuse("rename2")
            _, other = body[16:].split(b"\0")[:2]
            if flags != RENAME_NOREPLACE:
                raise OSError(errno.EINVAL, "flags")
            if os.path.lexists(self.child(to, other)):
                raise OSError(errno.EEXIST, "there")
        return self._rename(node, to, body[16:])

    def link(self, node: int, owner: Any, body: bytes) -> bytes:
        self.refuse("link")
        [old] = struct.unpack_from("<Q", body)
        path = self.child(node, body[8:].rstrip(b"\0"))
        os.link(self.path(old), path, follow_symlinks=False)
        return self.entry(path)

    def opendir(self, node: int, owner: Any, body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0)

    def readdir(self, node: int, owner: Any, body: bytes) -> bytes:
        _, start, size = struct.unpack_from("<QQI", body)
        answer = b""
        for at, name in list(enumerate(sorted(os.listdir(os.fsencode(self.path(node))))))[start:]:
            piece = struct.pack("<QQII", at + 1, at + 1, len(name), 0) + name
            piece = piece.ljust(24 + -(-len(name) // 8) * 8, b"\0")
            if len(answer) + len(piece) > size:
                break
            answer += piece
        return answer

    def open_(self, path: str, flags: int, mode: int = 0) -> bytes:
        if flags & os.O_DIRECT:
            self.refuse("direct")
        if self.said.get("read_only") and flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, path)
        return self.opened(os.open(path, flags & ~(os.O_DIRECT | os.O_NOFOLLOW | os.O_APPEND), mode), flags)

    def open_file(self, node: int, owner: Any, body: bytes) -> bytes:
        return self.open_(self.path(node), struct.unpack_from("<I", body)[0])

    def fsyncdir(self, node: int, owner: Any, body: bytes) -> bytes:
        self.refuse("fsyncdir")
        return b""

    def create(self, node: int, owner: tuple[int, int], body: bytes) -> bytes:
        flags, mode, _, _ = struct.unpack_from("<IIII", body)
        path = self.child(node, body[16:].rstrip(b"\0"))
        answer = self.open_(path, flags | os.O_CREAT, stat.S_IMODE(mode))
        os.chown(path, *owner)
        return self.entry(path) + answer

    def read(self, node: int, owner: Any, body: bytes) -> bytes:
        file, start, size = struct.unpack_from("<QQI", body)
        if file in self.direct:
            self.refuse("direct_io")
        return os.pread(file, size, start)

    def write(self, node: int, owner: Any, body: bytes) -> bytes:
        file, start, size = struct.unpack_from("<QQI", body)
        if file in self.direct:
            self.refuse("direct_io")
        if (room := self.said.get("room")) is not None:
            if self._used + size > room:
                raise OSError(self.said.get("full", errno.ENOSPC), "full")
            self._used += size
        return struct.pack("<II", os.pwrite(file, body[40 : 40 + size], start), 0)

    def statfs(self, node: int, owner: Any, body: bytes) -> bytes:
        blocks = 0 if self.said.get("space") == "unknown" else 1 << 24
        return struct.pack("<QQQQQIIII24x", blocks, blocks, blocks, 1 << 20, 1 << 20, 4096, 255, 4096, 0)

    def release(self, node: int, owner: Any, body: bytes) -> bytes:
        [file] = struct.unpack_from("<Q", body)
        os.close(file)
        self.open.discard(file)
        self.direct.discard(file)
        return b""

    def fsync(self, node: int, owner: Any, body: bytes) -> bytes:
        return b""

    def fallocate(self, node: int, owner: Any, body: bytes) -> bytes:
        self.refuse("fallocate")
        file, start, size, mode, _ = struct.unpack_from("<QQQII", body)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "mode")
        os.posix_fallocate(file, start, size)
        return b""

    def setlk(self, node: int, owner: Any, body: bytes) -> bytes:
        [flags] = struct.unpack_from("<I", body, 40)
        self.refuse("flock" if flags & 1 else "lock")
        raise OSError(errno.ENOSYS, "lock")

    getlk = setlk

    def nothing(self, node: int, owner: Any, body: bytes) -> bytes:
        return b""

    releasedir = destroy = flush = nothing
    getlk = setlkw = setlk


def serve(device: int, server: Server) -> None:
    """Answer the kernel until it has unmounted."""
    while True:
        try:
            request = os.read(device, WRITE_BYTES + (1 << 13))
        except OSError as error:
            if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                continue
            return
        _, number, unique, node, uid, gid = struct.unpack_from("<IIQQII", request)
        code, body, error_number = CODES.get(number, ""), b"", 0
        if code in ("FORGET", "BATCH_FORGET"):
            continue
        try:
            server.look_at_control()
            body = server.answer("open_file" if code == "OPEN" else code, node, (uid, gid), request[40:])
        except OSError as error:
            error_number = -(error.errno or errno.EIO)
        with contextlib.suppress(OSError):
            os.write(device, struct.pack("<IiQ", 16 + len(body), error_number, unique) + body)


def main(base: Path) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions".encode()
    if LIBC.mount(b"tierckpt-test", str(base / "mount").encode(), b"fuse", 6, options):  # MS_NOSUID, MS_NODEV
        print(os.strerror(ctypes.get_errno()), flush=True)
        return
    print("mounted", flush=True)
    os.umask(0)
    serve(device, Server(base))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
