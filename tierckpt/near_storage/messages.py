"""Messages between trainer and updater: JSON and a payload, over a socket pair."""

from __future__ import annotations

import json
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from ..errors import CheckpointError, TierckptError


def send(connection: Connection, message: Mapping[str, Any], payload: bytes = b"") -> None:
    """Send a message. Raises OSError if the other end is closed."""
    connection.send_bytes(json.dumps(message, default=str).encode() + b"\n" + payload)


def receive(connection: Connection) -> tuple[dict[str, Any], bytes]:
    """Return the next message. Raises EOFError or OSError if the other end is closed."""
    head, _, payload = connection.recv_bytes().partition(b"\n")
    return json.loads(head), payload


def to_message(error: BaseException) -> dict[str, Any]:
    """Return ``error`` as JSON for ``errors.from_json``."""
    if not isinstance(error, TierckptError):
        error = CheckpointError(f"{type(error).__name__}: {error}")
    return error.to_json()
