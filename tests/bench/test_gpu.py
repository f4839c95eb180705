"""``bench/gpu.py`` needs a GPU; without one these tests check that it runs, and that it compares."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
SMALL = {"layers": 1, "width": 64, "vocabulary": 256, "context": 16, "batch": 1, "steps": 2, "rounds": 1}

pytestmark = pytest.mark.timeout(180)


def run(*given: str, at: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(BENCH / "gpu.py"), "--out", str(at / "gpu.json"), "--dir", str(at / "disk"), *given]
    return subprocess.run(program, capture_output=True, text=True, timeout=150)


@pytest.mark.slow
def test_every_row_saves_is_loaded_back_and_has_its_figures(tmp_path: Path) -> None:
    ended = run("--device", "cpu", *(f"--{name}={value}" for name, value in SMALL.items()), at=tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert {"tierckpt: MultiStepStager, K = 7", "tierckpt: GradientLog, each step"} <= found["gpu"].keys()
    ways = [row for row, figures in found["gpu"].items() if {"call_seconds", "durable_seconds"} <= figures.keys()][:4]
    assert [row for row in ways if row.startswith("tierckpt")] == ways[:2]
    assert not any("error" in figures for figures in found["gpu"].values())
    assert all(found["gpu"][row]["durable_seconds"] >= found["gpu"][row]["call_seconds"] * 0.5 for row in ways)
    assert not list((tmp_path / "disk").iterdir())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    ended = run(at=tmp_path)
    assert (ended.returncode, "no CUDA device" in ended.stderr) == (2, True)
