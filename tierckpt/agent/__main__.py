"""``python -m tierckpt.agent``: how the first process of a job starts the agent. Its settings come as JSON on stdin."""

from __future__ import annotations

import sys

from ..config import Settings
from ..telemetry import log_to
from .server import run


def main() -> int:
    settings = Settings.model_validate_json(sys.stdin.read())
    log_to(sys.stderr, settings.log_format, "info", is_sparing=True)
    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
