"""``tierckpt agent``."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer
from typer import Option

from ..agent.agent_server import run
from ..agent.options import AgentOptions
from ..config import Settings
from ..disk.file_lock import try_lock
from ..errors import OperationTimeoutError
from ..format.layout import agent_dir
from ..ipc.agent_client import IDLE_SECONDS, LOCK, AgentClient, AgentUnavailableError
from ..poll import LOCAL, Poll
from ..telemetry import log_to
from ..types import Json
from .ui.output import Report
from .ui.session import Session, rate_of

STOP_SECONDS_EXTRA = 10.0


def agent(
    session: Session,
    context: typer.Context,
    leave_when_idle: Annotated[
        bool, Option(help="Exit after --idle-seconds without work, as an agent started on demand.")
    ] = False,
    idle_seconds: Annotated[float, Option(min=0.0, help="Seconds without work after which it is idle.")] = IDLE_SECONDS,
    metrics_port: Annotated[
        int | None, Option(min=0, max=65535, help="Serve Prometheus metrics on this port of 127.0.0.1.")
    ] = None,
    hf_proxy: Annotated[
        int | None,
        Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="Serve HF_ENDPOINT through the node cache on this port of 127.0.0.1: read-only, with this agent's "
            "token, to every user of this node.",
        ),
    ] = None,
    advertise: Annotated[
        str | None, Option(metavar="HOST[:PORT]", help="Address of this node for the others. Default: detected.")
    ] = None,
    network_bytes_per_second: Annotated[
        str | None, Option(metavar="RATE", help="Speed of this node's network. Default: from the kernel.")
    ] = None,
    serve_bytes_per_second: Annotated[
        str | None, Option(metavar="RATE", help="Rate limit for all peers together.")
    ] = None,
    stop: Annotated[bool, Option(help="Stop the running agent within its grace period, and wait.")] = False,
) -> Report:
    """Run the agent of this node's local root until SIGTERM. Exit 0, or 3 if checkpoints are still to drain."""
    settings = session.settings()
    if stop:
        return _stop(settings)
    options = AgentOptions(
        stay=not leave_when_idle,
        idle_seconds=idle_seconds,
        metrics_port=metrics_port,
        hf_proxy_port=hf_proxy,
        advertise=advertise,
        network_bytes_per_second=rate_of("--network-bytes-per-second", network_bytes_per_second),
        serve_bytes_per_second=rate_of("--serve-bytes-per-second", serve_bytes_per_second),
    )
    stop_logging = log_to(sys.stderr, context.obj.log_format, "info", is_sparing=True)
    try:
        code = run(settings, options)
    finally:
        stop_logging()
    document: Json = {"local_root": str(settings.local_root), "exit_code": code}
    return Report(document, ["The agent has ended."], code)


def _stop(settings: Settings) -> Report:
    with contextlib.closing(AgentClient(settings)) as contact:
        try:
            pid = contact.ask({"op": "status"}, start=False)["pid"]
            contact.ask({"op": "stop"}, start=False)
        except AgentUnavailableError:
            return Report({"stopped": False}, ["No agent runs for this local root."])
    for _ in Poll(settings.grace_seconds + STOP_SECONDS_EXTRA, LOCAL):
        with try_lock(agent_dir(settings.local_root) / LOCK) as is_free:  # a pid means nothing in another container
            if is_free:
                return Report({"stopped": True, "pid": pid}, [f"The agent (process {pid}) has ended."])
    raise OperationTimeoutError(f"the agent (process {pid}) has not ended", hint="Its log may say why")
