"""Waking up for many bytes at a time, and not for each packet of a slow link."""

from __future__ import annotations

import socket
import ssl
from typing import Final

WAKE_BYTES: Final = 256 * 1024
"""Measured, a GiB in GETs of 8 MiB from one server on this machine: flat out 0.42 to 0.34 CPU-s (a bare socket, without
a watermark: 0.33), at 100 MB/s 0.95 to 0.49 (0.73). Twice as much gains
another 0.04 and 0.10; what must come in a window (``most_bytes``) is 240 KiB unless set otherwise."""


class Watermark:
    """When the kernel calls a socket readable: once ``expect`` bytes have come, its end or an error at once.

    A sender that is slower than this process wakes it for each packet. SO_RCVLOWAT (socket(7)) is honoured by poll and
    epoll on Linux. Where TLS is in between, what comes has other lengths than what is read, so nothing is set.

    Safe, since never more is waited for than must still come, nor more than must come for the link not to be too slow.
    """

    __slots__ = ("_at", "_most", "_sock")

    def __init__(self, sock: socket.socket | None, most_bytes: int = WAKE_BYTES) -> None:
        """``most_bytes``: what must come in a window of time, where slow links are given up; 0 where none is."""
        self._sock = None if isinstance(sock, ssl.SSLSocket) else sock
        self._most = max(1, min(most_bytes, WAKE_BYTES))
        self._at = 1

    def expect(self, missing_bytes: int) -> None:
        """``missing_bytes`` are still to come; 1 before anything whose length is not known."""
        at = max(1, min(missing_bytes, self._most))
        if self._sock is not None and at != self._at:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at)
            self._at = at
