"""Tests that need a framework on top of PyTorch: where all must be installed, one that is skipped has failed."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

REQUIRED = os.environ.get("TIERCKPT_TEST_REQUIRE_FRAMEWORKS") == "1"
NOT_BESIDE_THE_OTHERS = {"verl": "verl 0.9 takes transformers below 5.11"}
"""Frameworks that `make compat-frameworks` does not install, and why: their tests may be skipped."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "frameworks: needs a framework installed (make compat-frameworks)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if REQUIRED and report.skipped and item.get_closest_marker("frameworks"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        if not any(f"{name} is not installed" in reason for name in NOT_BESIDE_THE_OTHERS):
            report.outcome = "failed"
            report.longrepr = f"TIERCKPT_TEST_REQUIRE_FRAMEWORKS=1 and {reason}"
    return report
