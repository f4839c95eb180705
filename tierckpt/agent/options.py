"""Options of ``tierckpt agent`` that are not settings."""

from __future__ import annotations

from dataclasses import dataclass

from ..ipc.agent_client import IDLE_SECONDS


@dataclass(frozen=True, slots=True)
class AgentOptions:
    stay: bool = False
    """Run until a signal. Otherwise exit after ``idle_seconds`` without connections and drains."""
    idle_seconds: float = IDLE_SECONDS
    metrics_port: int | None = None
    """Port on the loopback address. 0: any free port. None: no metrics."""
    hf_proxy_port: int | None = None
    """Port of a Hugging Face Hub served through the node cache, as ``metrics_port``."""
    advertise: str | None = None
    """Address ``host[:port]`` of this node for the others. None: ``peer_listen``, or derived from the route."""
    network_bytes_per_second: int | None = None
    """Determines this node's share of the work. None: as the kernel reports."""
    serve_bytes_per_second: int | None = None
    """Limit for all peers together. None: no limit."""
