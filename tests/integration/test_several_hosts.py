"""Several hosts, or containers of one host, prefetch into one directory that all of them have mounted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import container, needs_namespaces, other_host
from tierckpt.poll import LOCAL, Poll

pytestmark = needs_namespaces

KINDS = pytest.mark.parametrize("kind", ["container", "host"])
FILES, FILE_BYTES = 4, 24 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for number in range(FILES):
        (directory / f"{number}.bin").write_bytes(os.urandom(1 << 20) * (FILE_BYTES >> 20))
    return directory


class Node:
    """A prefetch on a host or in a container of its own."""

    def __init__(self, kind: str, number: int, model: Path, to: Path) -> None:
        there = model.parent / f"node-{number}"
        there.mkdir()
        wrap = container() if kind == "container" else other_host(there)
        command = ["prefetch", str(model), "--to", str(to), "--json"]
        self.process = subprocess.Popen(
            [*wrap, sys.executable, "-m", "tierckpt", *command],
            env={**os.environ, "TIERCKPT_LOCAL_ROOT": str(there / "local"), "TIERCKPT_CONCURRENCY": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self) -> dict[str, Any]:
        out, said = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, said
        return dict(json.loads(out))


def check_whole(model: Path, to: Path) -> None:
    for number in range(FILES):
        assert (to / f"{number}.bin").read_bytes() == (model / f"{number}.bin").read_bytes()
    assert not list(to.parent.glob("*.incoming")) and not list(to.parent.glob(".*.incoming"))


@KINDS
def test_two_at_once_fetch_each_byte_once(model: Path, kind: str) -> None:
    to = model.parent / "to"
    nodes = [Node(kind, number, model, to) for number in range(2)]
    fetched = [node.result()["fetched_bytes"] for node in nodes]
    check_whole(model, to)
    assert sum(fetched) == FILES * FILE_BYTES
    assert kind == "container" or 0 in fetched, "one host fills it, the other waits"


@KINDS
@pytest.mark.slow
def test_another_goes_on_when_the_one_that_fills_is_killed(model: Path, kind: str) -> None:
    to = model.parent / "to"
    first = Node(kind, 0, model, to)
    for _ in Poll(60, LOCAL):
        if any(path.stat().st_size for path in model.parent.glob(".to.*.incoming/.tierckpt/filling/progress-*")):
            break
    first.process.kill()
    first.process.communicate()
    Node(kind, 1, model, to).result()
    check_whole(model, to)
