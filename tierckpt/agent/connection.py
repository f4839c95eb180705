"""The agent's side of one connection: a process's messages, its file descriptors, and its end."""

from __future__ import annotations

import array
import os
import select
import socket

from ..ipc.agent_client import DESCRIPTORS_MAX
from .handoffs import ClientProcess

_SO_PEERPIDFD = 77


class Connection:
    """One process of the job. Reads without blocking; descriptors are queued until their message is whole.

    Its end is not the process's: a process that got no answer in time closes it and lives on. The kernel tells by
    ``pidfd`` (pidfd_open(2)) when the process ends. Where it does not (-1: an old kernel that sees another container's
    process), the end of the connection has to do, and locks are not taken over: who still holds one is alive.
    """

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.socket = sock
        self.owner = ClientProcess(pid)
        self.pidfd = _pidfd_of(sock, pid)
        self.buffer = bytearray()
        self.descriptors: list[int] = []

    def read(self) -> bool:
        """Take in what has come. False when the other side is gone."""
        size = DESCRIPTORS_MAX * array.array("i").itemsize
        data, ancillary, flags, _ = self.socket.recvmsg(1 << 16, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(content[: len(content) - len(content) % received.itemsize])
                self.descriptors.extend(received)
        if flags & socket.MSG_CTRUNC:
            return False  # descriptors were lost: what comes now cannot be trusted
        self.buffer += data
        return bool(data)

    def close(self) -> None:
        self.socket.close()
        close_all(self.descriptors)

    @property
    def process_has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))


def _pidfd_of(sock: socket.socket, pid: int) -> int:
    """A descriptor that becomes readable when the process on the other side has ended; -1 when there is none."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)  # Linux 6.5; of another container's processes too
    except OSError:
        pass
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def close_all(descriptors: list[int]) -> None:
    """Close them all; the list is empty then."""
    while descriptors:
        os.close(descriptors.pop())
