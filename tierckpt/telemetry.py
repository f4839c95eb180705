"""Loggers, and progress that nobody has to listen to. The library never configures logging."""

from __future__ import annotations

import logging

from .types import Progress


def logger(name: str) -> logging.Logger:
    return logging.getLogger(f"tierckpt.{name}")


def ignore_progress(progress: Progress, /) -> None:
    """The listener used when nobody listens."""
