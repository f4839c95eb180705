"""The cluster page: drains of three real agents, a stopped agent, and a rollout at the top."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.browser import CHROMIUM, MISSING, PATIENCE_SECONDS, Browser
from tests.integration.test_peers_agent import address
from tests.peer_node import secret_file
from tests.states import save
from tierckpt.client import close_all
from tierckpt.drain.rate_limiter import change_control
from tierckpt.poll import Poll

DETECTION_SECONDS = 10.0


@dataclass
class Node:
    process: subprocess.Popen[str]
    root: Path
    url: str

    def cluster(self) -> dict[str, Any]:
        """Return the nodes by address."""
        with urllib.request.urlopen(f"{self.url}cluster.json", timeout=PATIENCE_SECONDS) as answer:
            return {row["address"]: row for row in json.load(answer)["nodes"]}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[str, Node]]:
    """Three agents with pages, by the address of their peer server."""
    addresses = [address() for _ in range(3)]
    secret = secret_file(tmp_path, "canary-of-the-cluster-page-63f1")
    started: dict[str, Node] = {}
    try:
        for number, place in enumerate(addresses):
            root = tmp_path / f"n{number}"
            own = {"LOCAL_ROOT": root, "PEERS": ",".join(addresses), "PEER_LISTEN": place, "PEER_SECRET_FILE": secret}
            environment = os.environ | {f"TIERCKPT_{name}": str(value) for name, value in own.items()}
            process = subprocess.Popen(
                [sys.executable, "-m", "tierckpt", "agent", "--metrics-port", "0"],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
            )  # fmt: skip
            assert process.stderr is not None
            url = next(line.split()[-1] for line in process.stderr if "metrics on" in line).removesuffix("metrics")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            started[place] = Node(process, root, url)
        yield started
    finally:
        for node in started.values():
            node.process.kill()
            node.process.wait(PATIENCE_SECONDS)


def until(holds: Callable[[], Any], what: str) -> Any:
    for _ in Poll(PATIENCE_SECONDS):
        if found := holds():
            return found
    raise AssertionError(f"not in {PATIENCE_SECONDS} s: {what}")


def waiting_step(root: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the node at ``root`` that its agent may not drain."""
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(root))
    change_control(root, paused=True)
    save(uri, {"w": torch.ones(1 << 16)})
    close_all()


def prefetch(uri: str, nodes: dict[str, Node], place: str) -> subprocess.Popen[bytes]:
    """Start to fetch ``uri`` to the node at ``place``, in small chunks without concurrency."""
    root = nodes[place].root
    own = {
        "LOCAL_ROOT": root, "PEERS": ",".join(nodes), "PEER_LISTEN": place, "CHUNK_SIZE_BYTES": "1MiB",
        "PEER_SECRET_FILE": next(root.parent.glob("secret-*")), "CONCURRENCY": 1,
    }  # fmt: skip
    environment = os.environ | {f"TIERCKPT_{name}": str(value) for name, value in own.items()}
    command = [sys.executable, "-m", "tierckpt", "prefetch", uri, "--json"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_cluster_page_shows_drains_and_a_silent_node(
    nodes: dict[str, Node], s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, observer), (second, _), (third, stopped) = nodes.items()
    waiting_step(nodes[second].root, f"{s3_uri}/run/step-7", monkeypatch)

    def is_reported() -> Any:
        found = observer.cluster()
        return found if len(found) == 3 and (found[second]["drains"] or {}).get("entries") else None

    found = until(is_reported, "the backlog of the second node")
    drains = found[second]["drains"]
    assert (drains["state"], drains["entries"]) == ("paused", 1) and drains["lag_bytes"] > 1 << 18
    (run,) = drains["runs"]
    assert (run["run"], run["newest_step"], run["safe_step"]) == (f"{s3_uri}/run", 7, None)
    assert found[first]["is_this"] and found[first]["drains"]["state"] == "nothing to drain"
    assert all(row["answers"] for row in found.values())

    stopped.process.send_signal(signal.SIGSTOP)
    begun = time.time()
    row = until(lambda: row if not (row := observer.cluster()[third])["answers"] else None, "the stopped node")
    assert time.time() - begun <= DETECTION_SECONDS
    assert begun - DETECTION_SECONDS <= row["silent_since_unix_seconds"] <= time.time()
    assert row["drains"]["state"] == "nothing to drain"  # from its last answer
    assert next(iter(observer.cluster())) == third  # sorted first
    stopped.process.send_signal(signal.SIGCONT)
    until(lambda: observer.cluster()[third]["answers"], "return of the stopped node")
    stopped.process.terminate()
    until(lambda: observer.cluster()[third]["state"] == "left", "departure of the stopped node")
    assert observer.cluster()[third]["silent_since_unix_seconds"] is None


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (420, "dark")])
async def test_browser_shows_a_stopped_node_first(nodes: dict[str, Node], width: int, theme: str) -> None:
    """Saves screenshots to the directory SCREENSHOTS, if set."""
    observer, _, stopped = nodes.values()
    async with Browser(width=width) as browser:
        await browser.emulate_theme(theme)
        await browser.open(f"{observer.url}#/cluster")
        await browser.until("document.querySelectorAll('#nodes tbody tr').length === 3")
        stopped.process.send_signal(signal.SIGSTOP)
        await browser.until("document.querySelector('#cluster .alarm')?.textContent.includes('does not answer')")
        first = await browser.value("document.querySelector('#nodes tbody tr').textContent")
        assert "silent for" in first
        await browser.until("document.querySelector('#nav').textContent.includes('1 node silent')")
        assert await browser.value("document.documentElement.scrollWidth") <= width
        picture = await browser.screenshot()
        assert browser.errors == []
    if folder := os.environ.get("SCREENSHOTS"):
        await asyncio.to_thread(Path(folder, f"cluster-{width}-{theme}.png").write_bytes, picture)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
async def test_running_rollout_is_at_the_top_of_the_page(
    nodes: dict[str, Node], s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its end it moves below the runs."""
    observer = next(iter(nodes.values()))
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(observer.root))
    model = f"{s3_uri}/model"
    await asyncio.to_thread(save, f"{model}/step-1", {"w": torch.ones(24 << 20)}, drain=True)
    await asyncio.to_thread(tierckpt.wait, f"{model}/step-1", timeout_seconds=PATIENCE_SECONDS)
    await asyncio.to_thread(close_all)
    async with Browser() as browser:
        await browser.open(observer.url)
        await browser.until("document.querySelector('#peers')?.parentElement.id === 'idle'")
        fetching = await asyncio.to_thread(lambda: [prefetch(f"{model}/step-1", nodes, place) for place in nodes])
        await browser.until("document.querySelector('#active').children.length > 0")
        order = "[...document.querySelectorAll('#active, #steps')].map(node => node.id).join()"
        assert await browser.value(order) == "active,steps"
        assert await browser.value("document.querySelector('#active').getBoundingClientRect().top") < 200
        picture = await browser.screenshot()
        assert [await asyncio.to_thread(process.wait, PATIENCE_SECONDS) for process in fetching] == [0, 0, 0]
        await browser.until("document.querySelector('#active').children.length === 0")
        assert browser.errors == []
    if folder := os.environ.get("SCREENSHOTS"):
        await asyncio.to_thread(Path(folder, "rollout.png").write_bytes, picture)
