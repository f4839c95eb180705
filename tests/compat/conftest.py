"""The marker of the tests that need a framework on top of PyTorch."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "frameworks: needs Accelerate and Lightning installed")
