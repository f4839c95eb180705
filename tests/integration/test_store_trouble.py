"""A store that is down, silent or refusing shows within ten seconds everywhere, with cause and pending work."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tierckpt
from tests.agents import agent_with_page, get, until
from tests.browser import CHROMIUM, MISSING, Browser
from tests.command_line import CommandLine
from tests.servers.faultproxy import FaultProxy, Kind, Plan
from tests.services import S3Server
from tests.states import save, save_drained
from tierckpt.agent import node_document as documents
from tierckpt.agent.node_document import node_document
from tierckpt.client import close_all
from tierckpt.config import Settings
from tierckpt.drain import rate_limiter
from tierckpt.drain.rate_limiter import change_control
from tierckpt.format.layout import local_dir, parse_uri

DETECTION_SECONDS = 10.0
REASON = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied here</Message></Error>"
FORBIDDEN = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%s" % (len(REASON), REASON)
QUOTA = b"<?xml version='1.0'?><Error><Code>QuotaExceeded</Code></Error>"  # as Ceph answers a PUT
FULL = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%s" % (len(QUOTA), QUOTA)


def reset(proxy: FaultProxy, bucket: str) -> None:
    proxy.plans[bucket] = Plan(Kind.RESET, 1.0)


def silent(proxy: FaultProxy, bucket: str) -> None:
    proxy.plans[bucket] = Plan(Kind.HANG, 1.0)


def overloaded(proxy: FaultProxy, bucket: str) -> None:
    proxy.plans[bucket] = Plan(Kind.SLOW_DOWN, 1.0)


def forbidden(proxy: FaultProxy, bucket: str) -> None:
    proxy.answer = lambda verb, path, head: FORBIDDEN


def full(proxy: FaultProxy, bucket: str) -> None:
    proxy.answer = lambda verb, path, head: FULL if verb in ("PUT", "POST") else None


CASES: dict[Callable[[FaultProxy, str], None], tuple[str, str]] = {
    reset: ("waiting for the store", "cannot be reached"),
    silent: ("waiting for the store", "has not answered for"),
    overloaded: ("waiting for the store", "503"),
    forbidden: ("refused", "was refused"),
    full: ("refused", "full"),
}
"""Fault: the expected state of the drains, and words of the cause."""


def waiting_step(uri: str, local_root: Path) -> None:
    """Save two steps: one drained, one pending."""
    save_drained(f"{uri}/step-1", {"w": torch.ones(1 << 16)})
    change_control(local_root, paused=True)
    save(f"{uri}/step-2", {"w": torch.ones(1 << 16)})
    close_all()


@pytest.mark.parametrize(
    "fault",
    [fault if fault is reset else pytest.param(fault, marks=pytest.mark.slow) for fault in CASES],
    ids=lambda fault: fault.__name__,
)
def test_store_failure_is_shown_everywhere(
    fault: Callable[[FaultProxy, str], None], moto: S3Server, s3_uri: str, local_root: Path, cli: CommandLine
) -> None:
    state, says = CASES[fault]
    waiting_step(s3_uri, local_root)
    bucket, proxy = s3_uri.split("/")[2], FaultProxy(moto.endpoint)
    with proxy.running() as endpoint, agent_with_page(AWS_ENDPOINT_URL=endpoint) as url:
        fault(proxy, bucket)
        change_control(local_root, paused=False)
        begun = time.monotonic()
        (row,) = until(
            lambda: [row for row in node_document(Settings.load())["stores"] if says in row["cause"]], "the failure"
        )
        assert documents.IDLE_SECONDS + rate_limiter.CONTROL_CHECK_SECONDS < DETECTION_SECONDS
        assert time.monotonic() - begun <= 2 * DETECTION_SECONDS  # on a busy machine
        assert (row["store"], row["state"], row["entries"]) == (f"s3://{bucket}", state, 1)
        assert 0 <= time.time() - row["since_unix_seconds"] < 60 and row["size_bytes"] > 0 and row["runs"] == [s3_uri]

        document = node_document(Settings.load())
        (item,), (of_run,) = document["journal"], document["runs"]
        assert (item["drain"]["state"], document["steps"][0]["shared"]) == (state, state)
        assert (of_run["newest_step"], of_run["safe_step"], of_run["lag_steps"]) == (2, 1, 1)
        assert "step 2 is lost" in of_run["if_this_node_dies"] and "step 1" in of_run["if_this_node_dies"]

        shown = " ".join(cli.text("status").out.split())
        assert f"s3://{bucket} {state}" in shown and "step 2 is lost" in shown
        assert f"waiting for s3://{bucket} for" in " ".join(cli.text("doctor").out.split())
        assert json.loads(get(f"{url}status.json"))["stores"][0]["state"] == state
        of_run = json.loads(get(f"{url}run.json?uri={s3_uri}"))
        can_read = fault is full
        assert bool(of_run["problem"]) is not can_read
        tiers = {row["step"]: (row["local"], row["shared"]) for row in of_run["checkpoints"]}
        not_there = None if can_read else "unknown"  # to this node
        assert tiers == {2: ("committed", not_there), 1: ("committed", "committed")}
        until(
            lambda: f'tierckpt_store_waiting_bytes{{store="s3://{bucket}"}}' in get(f"{url}metrics"), "the metrics", 20
        )
        assert 'tierckpt_queue_entries{state="failed"} 1.0' in get(f"{url}metrics")

        proxy.plans.clear()
        proxy.answer = None
        if state == "refused":
            return
        until(lambda: not node_document(Settings.load())["journal"], "resumption of the drain")
        assert node_document(Settings.load())["stores"] == []
        (of_run,) = node_document(Settings.load())["runs"]
        assert of_run["if_this_node_dies"] == "nothing is lost: step 2 is on shared storage"


@pytest.mark.slow
def test_evicted_drained_step_is_still_the_safe_step(s3_uri: str, local_root: Path) -> None:
    """Retention and eviction may remove the newest shared step's local copy before newer steps drain."""
    with tierckpt.Checkpointer(s3_uri, keep_last=2) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(10)}).result()
        checkpointer.wait()
        change_control(local_root, paused=True)
        time.sleep(1.5 * rate_limiter.CONTROL_CHECK_SECONDS)
        for step in (2, 3, 4):
            checkpointer.save(step, {"w": torch.ones(10)}).result()
        until(lambda: not (local_dir(local_root, parse_uri(s3_uri)) / "step-1/.tierckpt").exists(), "pruning", 20)
        (row,) = node_document(Settings.load())["runs"]
        assert (row["newest_step"], row["safe_step"], row["lag_steps"]) == (4, 1, 3)
        assert row["if_this_node_dies"].startswith("3 steps up to 4 are lost")
        assert row["if_this_node_dies"].endswith("step 1 is the newest on shared storage")
        change_control(local_root, paused=False)


@pytest.mark.slow
def test_paused_or_throttled_drain_does_not_count_as_waiting_for_its_store(s3_uri: str, local_root: Path) -> None:
    """Paused or rate-limited: the pause in sending exceeds the timeout of a silent store."""
    waiting_step(s3_uri, local_root)
    with agent_with_page():
        until(lambda: node_document(Settings.load())["journal"][0]["drain"]["bytes_per_second"] == 0, "the pause", 20)
        time.sleep(documents.IDLE_SECONDS + 2)
        document = node_document(Settings.load())
        assert ([row["drain"]["state"] for row in document["journal"]], document["stores"]) == (["queued"], [])
        change_control(local_root, paused=False, bytes_per_second=1)
        time.sleep(documents.IDLE_SECONDS + 2)
        document = node_document(Settings.load())
        assert document["stores"] == [] and document["journal"][0]["drain"]["state"] in ("queued", "sending")


@pytest.mark.slow
def test_control_silent_store_mistaken_for_busy_is_detected(
    monkeypatch: pytest.MonkeyPatch, local_root: Path, s3_uri: str
) -> None:
    """Seeded bug: a silent store counts as one in use."""
    monkeypatch.setattr(documents, "IDLE_SECONDS", 1e9)
    waiting_step(s3_uri, local_root)
    bucket, proxy = s3_uri.split("/")[2], FaultProxy(os.environ["AWS_ENDPOINT_URL"])
    with proxy.running() as endpoint, agent_with_page(AWS_ENDPOINT_URL=endpoint):
        silent(proxy, bucket)
        change_control(local_root, paused=False)
        time.sleep(DETECTION_SECONDS - 2)
        assert node_document(Settings.load())["stores"] == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
@pytest.mark.parametrize("width", [1400, 420])
async def test_page_shows_the_failure_at_the_top(width: int, moto: S3Server, s3_uri: str, local_root: Path) -> None:
    await asyncio.to_thread(waiting_step, s3_uri, local_root)
    proxy = FaultProxy(moto.endpoint)
    with proxy.running() as endpoint, agent_with_page(AWS_ENDPOINT_URL=endpoint) as url:
        reset(proxy, s3_uri.split("/")[2])
        change_control(local_root, paused=False)
        async with Browser(width=width) as browser:
            await browser.open(url)
            await browser.until("!document.querySelector('#stores').hidden")
            text = await browser.value("document.querySelector('#stores').innerText")
            assert "does not answer" in text and "step 2 is lost" in text and "cannot be reached" in text
            top = await browser.value("document.querySelector('#stores').getBoundingClientRect().top")
            assert top < 200  # above everything else
            assert await browser.value("document.documentElement.scrollWidth") <= width
            await browser.until("document.querySelector('#steps .chip.fail')?.textContent === 'waiting for the store'")
            await browser.screenshot(f"trouble-{width}.png")
            assert browser.errors == []
