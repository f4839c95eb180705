"""Fixtures of the integration tests."""

from __future__ import annotations

import pytest

from tests.command_line import CommandLine


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)
