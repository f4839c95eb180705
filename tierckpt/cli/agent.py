"""``tierckpt agent``: run this node's agent in the foreground, for systemd, a DaemonSet or a Slurm prolog."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from ..agent.server import run
from ..config import Settings
from ..errors import OperationTimeoutError
from ..ipc.client import AgentClient, AgentUnavailableError
from ..poll import LOCAL, Poll
from ..telemetry import log_to
from ..types import Json
from .ui.output import Report
from .ui.session import JsonOption, LocalRootOption, load_settings

STOP_SECONDS_EXTRA = 10.0

WhenIdle = Annotated[
    bool,
    typer.Option(
        "--leave-when-idle", help="End after agent_idle_seconds with nothing to do, as one started on demand."
    ),
]
Stop = Annotated[bool, typer.Option("--stop", help="Ask the agent that runs to finish within its grace, and wait.")]


def agent(
    leave_when_idle: WhenIdle = False,
    stop: Stop = False,
    as_json: JsonOption = False,
    local_root: LocalRootOption = None,
) -> Report:
    """Run the agent of this node's local root until SIGTERM. Exit 0, or 3 when not all is on shared storage then."""
    settings = load_settings(local_root)
    if stop:
        return _stop(settings)
    stop_logging = log_to(sys.stderr, settings.log_format, "info", is_sparing=True)
    try:
        code = run(settings, stay=not leave_when_idle)
    finally:
        stop_logging()
    document: Json = {"local_root": str(settings.local_root), "exit_code": code}
    return Report(document, ["The agent has ended."], code)


def _stop(settings: Settings) -> Report:
    contact = AgentClient(settings)
    try:
        pid = contact.ask({"op": "status"}, start=False)["pid"]
        contact.ask({"op": "stop"}, start=False)
    except AgentUnavailableError:
        return Report({"stopped": False}, ["No agent runs for this local root."])
    finally:
        contact.close()
    if all(_is_alive(pid) for _ in Poll(settings.grace_seconds + STOP_SECONDS_EXTRA, LOCAL)):
        raise OperationTimeoutError(f"the agent (process {pid}) has not ended", hint="Its log may say why")
    return Report({"stopped": True, "pid": pid}, [f"The agent (process {pid}) has ended."])


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIG_DFL)  # signal 0: only asks
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
