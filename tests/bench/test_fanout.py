"""What bench/fanout.py compares with what."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCH))
    import fanout

    yield fanout
    for name in [name for name in sys.modules if name == "fanout" or name.split(".")[0] == "fanning"]:
        del sys.modules[name]


def row(nodes: int, rate: float, times_bound: float) -> dict[str, Any]:
    return {
        "case": "shared",
        "nodes": nodes,
        "rate_bytes_per_second": rate,
        "origin_factor": 1.0,
        "times_bound": times_bound,
        "store_times_size": 1.0,
    }


def test_many_nodes_have_slower_links_and_those_they_are_compared_with_too(bench: Any) -> None:
    given = argparse.Namespace(rate_mb=4.0, rate_mb_of_many=2.0)
    assert list(bench.rates(given, [2, 8, 16])) == [(2, 4.0), (8, 4.0), (16, 2.0), (2, 2.0)]
    assert list(bench.rates(given, [2, 8])) == [(2, 4.0), (8, 4.0)]
    given.rate_mb = 1.0
    assert list(bench.rates(given, [2, 16])) == [(2, 1.0), (16, 1.0)]


def test_growth_is_of_medians_at_one_rate(bench: Any) -> None:
    rows = [row(2, 4e6, 1.0), row(2, 2e6, 1.1), row(2, 2e6, 1.0), row(2, 2e6, 1.2), row(16, 2e6, 1.21)]
    [growth] = [found for found in bench.report.verdicts(rows) if found[0].startswith("time of N = 16")]
    assert growth[2] == pytest.approx(1.1)
    assert growth[3]
