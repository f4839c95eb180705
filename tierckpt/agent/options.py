"""Options of ``tierckpt agent`` that are no settings."""

from __future__ import annotations

from dataclasses import dataclass

from ..ipc.agent_client import IDLE_SECONDS


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of one agent."""

    stay: bool = False
    """Runs until a signal. Else it leaves after ``idle_seconds`` with nothing to drain and nobody connected."""
    idle_seconds: float = IDLE_SECONDS
    metrics_port: int | None = None
    """Where Prometheus metrics are served, on the loopback address only. 0: any free port. None: nowhere."""
    hf_proxy_port: int | None = None
    """Where a Hugging Face Hub is served through the node cache, as ``metrics_port``."""
    advertise: str | None = None
    """``host[:port]`` by which the other nodes reach this one. None: ``peer_listen``, or found out from the route."""
    network_bytes_per_second: int | None = None
    """Speed of this node's network, which decides its part of the work. None: what the kernel says."""
    serve_bytes_per_second: int | None = None
    """Most that this node serves to all peers together. None: what the network takes."""
