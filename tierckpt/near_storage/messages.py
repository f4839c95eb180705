"""Messages between trainer and updater: one JSON object each, with bytes behind it, over a pair of sockets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from ..errors import CheckpointError, TierckptError


def send(connection: Connection, message: Mapping[str, Any], payload: bytes = b"") -> None:
    """Raises OSError when the other end is gone."""
    connection.send_bytes(json.dumps(message, default=str).encode() + b"\n" + payload)


def receive(connection: Connection) -> tuple[dict[str, Any], bytes]:
    """Raises EOFError or OSError when the other end is gone."""
    head, _, payload = connection.recv_bytes().partition(b"\n")
    return json.loads(head), payload


def to_message(error: BaseException) -> dict[str, Any]:
    """Return what ``errors.from_json`` makes an error of."""
    if not isinstance(error, TierckptError):
        error = CheckpointError(f"{type(error).__name__}: {error}")
    return error.to_json()
