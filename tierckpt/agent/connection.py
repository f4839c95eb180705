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
    """Connection to one process of the job. Reads without blocking.

    ``pidfd`` reports the end of the process. Without one (-1: an old kernel and a process of another container), the
    end of the connection counts, and locks are not taken over, since their owner may be alive.
    """

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.socket = sock
        self.owner = ClientProcess(pid)
        self.pidfd = _pidfd_of(sock, pid)
        self.buffer = bytearray()
        self.descriptors: list[int] = []

    def read(self) -> bool:
        """False at the end of the connection."""
        size = DESCRIPTORS_MAX * array.array("i").itemsize
        data, ancillary, flags, _ = self.socket.recvmsg(1 << 16, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(content[: len(content) - len(content) % received.itemsize])
                self.descriptors.extend(received)
        if flags & socket.MSG_CTRUNC:
            return False  # descriptors were lost, so later messages cannot be assigned theirs
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
    """Return a descriptor that becomes readable when the process ends; -1 if there is none."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
