"""Checkpoints cross between all pairs of torch versions, tierckpt and stock in both roles.

TIERCKPT_TEST_TORCHES names the interpreters, separated by colons; `make matrix` makes them.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest

from tests.compat.test_future_torch import ROOT, python

PYTHONS = [name for name in os.environ.get("TIERCKPT_TEST_TORCHES", "").split(":") if name] or [sys.executable]


def run(interpreter: str, verb: str, directory: Path) -> str:
    return python(["-m", "tests.compat.torch_version", verb], directory, {"PYTHONPATH": str(ROOT)}, interpreter)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {interpreter: tmp_path_factory.mktemp("saved") for interpreter in PYTHONS}
    for interpreter, directory in made.items():
        run(interpreter, "save", directory)
    return made


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first case saves with every version; a CUDA build is slow to import
@pytest.mark.parametrize(("writer", "reader"), itertools.product(PYTHONS, PYTHONS))
def test_every_pair(writer: str, reader: str, saved: dict[str, Path]) -> None:
    """What stock reads of stock, it reads of ours; ours reads all of it."""
    lines = dict(line.split(": ", 1) for line in run(reader, "load", saved[writer]).splitlines())
    expected = dict.fromkeys(lines, "right")
    if lines["stock of stock"] != "right":  # torch before 2.15 cannot read what 2.15 writes
        assert writer != reader
        for name in ("stock of stock", "stock of ours"):
            expected[name] = lines[name]
    assert lines == expected
