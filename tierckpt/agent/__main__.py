"""``python -m tierckpt.agent IDLE_SECONDS``, with settings as JSON on stdin."""

from __future__ import annotations

import sys

from ..config import Settings
from ..ipc.agent_client import IDLE_SECONDS
from ..process_start import begin_command, end_command
from ..telemetry import log_to
from .agent_server import run
from .options import AgentOptions


def main(idle_seconds: float = IDLE_SECONDS) -> int:
    begin_command()
    settings = Settings.received(sys.stdin.read())
    log_to(sys.stderr, "text", "info", is_sparing=True)
    return run(settings, AgentOptions(idle_seconds=idle_seconds))


if __name__ == "__main__":
    end_command(main(*map(float, sys.argv[1:])))
