"""A silent node that may have the newest checkpoint: wait for it, name it, or raise (N4).

Agents are real processes. Step 1 is on shared storage; step 2 only on node 1, which does not drain.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.peer_node import secret_file
from tests.servers.fleet import Fleet
from tests.servers.nodes import Node, Nodes, cluster
from tests.services import free_port
from tierckpt import Checkpointer
from tierckpt.checkpoint import peer_copies
from tierckpt.checkpoint.catalog import Checkpoint
from tierckpt.checkpoint.select import Selector
from tierckpt.client import close_all
from tierckpt.config import Settings
from tierckpt.errors import CheckpointNotFoundError, PermissionDeniedError, StoreUnavailableError
from tierckpt.format.layout import Location
from tierckpt.stores import retry

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet.running(tmp_path_factory.mktemp("agents"), "tests.servers.nodes") as fleet:
        yield fleet


@pytest.fixture
def nodes(fleet: Fleet, tmp_path: Path) -> Iterator[Nodes]:
    with cluster(fleet, tmp_path / "nodes", 2, drain=False) as nodes:
        yield nodes
        close_all()


@pytest.fixture
def uri(nodes: Nodes, tmp_path: Path) -> str:
    uri = str(tmp_path / "shared" / "run")
    for step, settings in ((1, Settings.load(local_root=tmp_path / "drained")), (2, nodes[1].settings)):
        with Checkpointer(uri, settings=settings) as checkpointer:
            checkpointer.save(step, {"w": torch.full((4,), float(step))}).result(60)
        close_all()
    return uri


def signal_to(node: Node, number: int) -> None:
    assert node.process is not None
    node.process.send(signal.Signals(number))


def restored(uri: str, node: Node, **changed: Any) -> tuple[int | None, float]:
    state = {"w": torch.zeros(4)}
    settings = node.settings.model_copy(update=changed)
    with Checkpointer(uri, settings=settings) as checkpointer:
        return checkpointer.restore(state), float(state["w"][0])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "starts late"])
def test_late_peer_is_waited_for(how: str, nodes: Nodes, uri: str, caplog: pytest.LogCaptureFixture) -> None:
    back: Callable[[], None]
    if how == "stopped":
        signal_to(nodes[1], signal.SIGSTOP)
        back = lambda: signal_to(nodes[1], signal.SIGCONT)  # noqa: E731
    else:
        nodes[1].kill()
        back = nodes[1].start
    later = threading.Timer(7.0, back)
    later.start()
    try:
        assert restored(uri, nodes[0], store_wait_seconds=90.0) == (2, 2.0)
        assert "to say which checkpoints of" in caplog.text
        assert nodes[1].settings.peer_listen in caplog.text
    finally:
        later.join()


@pytest.mark.slow
def test_silent_peer_is_named_with_the_restored_step(nodes: Nodes, uri: str, caplog: pytest.LogCaptureFixture) -> None:
    nodes[1].kill()
    assert restored(uri, nodes[0]) == (1, 1.0)
    warnings = [line for line in caplog.messages if "a newer one may be on" in line]
    assert len(warnings) == 1
    assert "step-1" in warnings[0]
    assert nodes[1].settings.peer_listen in warnings[0]
    with pytest.raises(CheckpointNotFoundError) as caught:
        restored_step_2 = Checkpointer(uri, settings=nodes[0].settings)
        restored_step_2.restore({"w": torch.zeros(4)}, step=2)
    assert nodes[1].settings.peer_listen in str(caught.value.context["not_heard"])


def test_no_wait_if_all_peers_answer(nodes: Nodes, uri: str, caplog: pytest.LogCaptureFixture) -> None:
    assert restored(uri, nodes[0]) == (2, 2.0)
    assert "may be on" not in caplog.text


def test_step_replaced_by_a_peer_after_the_listing(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent still lists a removed step for a moment, and not yet the next one."""
    uri = str(tmp_path / "shared" / "peers alone")

    def save(step: int) -> None:
        with Checkpointer(uri, settings=nodes[1].settings, keep_last=1) as checkpointer:
            checkpointer.save(step, {"w": torch.full((4,), float(step))}).result(60)

    save(1)
    nodes.until(lambda: tierckpt.latest(uri, settings=nodes[0].settings) is not None, "step 1 to be found")
    find, left = Selector.find, [2]

    async def after_the_next(self: Selector, location: Location) -> Checkpoint:
        if location.name == "step-1" and left:
            await asyncio.to_thread(save, left.pop())
        return await find(self, location)

    monkeypatch.setattr(Selector, "find", after_the_next)
    assert tierckpt.latest(uri, settings=nodes[0].settings) == f"{uri}/step-2"
    assert not left


@pytest.mark.slow
def test_other_secret_error_names_the_peer_and_the_setting(
    nodes: Nodes, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_copies, "DENIED_SECONDS", 1.0)
    new, other = nodes[0], secret_file(tmp_path, "another secret than theirs, of a new node")
    new.lose()
    new.settings = new.settings.model_copy(update={"peer_secret_file": other})
    new.env["TIERCKPT_PEER_SECRET_FILE"] = str(other)
    new.start()
    caplog.set_level(logging.INFO)
    with pytest.raises(PermissionDeniedError) as caught:
        restored(uri, new)
    assert nodes[1].settings.peer_listen in str(caught.value)
    assert "peer_secret_file" in str(caught.value)
    with pytest.raises(PermissionDeniedError):
        tierckpt.latest(uri, settings=new.settings)


@pytest.mark.slow
def test_outage_error_names_the_peers_step_and_the_call_to_restore_it(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other nodes may have continued from it; only the user can exclude that."""
    monkeypatch.setattr(retry, "RETRIES_MAX", 1)
    away = {"ENDPOINT_URL": f"http://127.0.0.1:{free_port()}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    for name, value in away.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    run = "s3://bucket/run"
    for step in (1, 2):
        with Checkpointer(run, settings=nodes[1].settings) as checkpointer:
            checkpointer.save(step, {"w": torch.full((4,), float(step))}).result(60)
    close_all()
    for call in (lambda: restored(run, nodes[0]), lambda: tierckpt.latest(run, settings=nodes[0].settings)):
        with pytest.raises(StoreUnavailableError) as caught:
            call()
        assert "Other nodes have step-2 complete" in str(caught.value)
        assert "restore(state, step=2)" in str(caught.value)
    state = {"w": torch.zeros(4)}
    with Checkpointer(run, settings=nodes[0].settings) as checkpointer:
        assert checkpointer.restore(state, step=2) == 2
    assert state["w"][0] == 2
