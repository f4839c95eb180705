"""Nodes that keep each other's checkpoints: each a local root and an agent, a real process, on a loopback port."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.peer_node import secret_file
from tests.servers.fleet import OUR_ENV, Fleet, Process
from tests.services import free_port
from tierckpt.config import Settings
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.ipc.agent_client import AgentClient
from tierckpt.peer import membership
from tierckpt.poll import Poll
from tierckpt.replication import replicator

SECRET = "not a secret: this cluster lives for one test"
READY_SECONDS = 90.0
PATIENT: dict[str, Any] = {"store_wait_seconds": 60.0}
"""Settings for nodes that all answer, if late."""


def newest_first() -> None:
    """Run in an agent of a test: rounds are short, and the dead are soon known to be."""
    replicator.ROUND_SECONDS = 0.1
    membership.GossipTiming.__init__.__defaults__ = (0.1, 1.0, 1.0)  # type: ignore[misc]


BUGS: dict[str, Callable[[], None]] = {"none, but hurry": newest_first}


@dataclass
class Node:
    settings: Settings
    fleet: Fleet
    env: dict[str, str]
    bug: str = "none, but hurry"
    process: Process | None = None

    @property
    def root(self) -> Path:
        return self.settings.local_root

    def start(self) -> None:
        outer = {name: value for name, value in os.environ.items() if name.startswith(OUR_ENV)}
        env = {name: value for name, value in outer.items() if not name.startswith("TIERCKPT_")}
        self.process = self.fleet.start(["agent"], {**env, **self.env}, bug=self.bug, name=self.root.name)

    def kill(self) -> None:
        """Kill the agent: no goodbye."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()

    def lose(self) -> None:
        """Lose the node and its disk."""
        self.kill()
        self.root.rename(self.root.with_name(f"{self.root.name}.lost-{time.monotonic_ns()}"))

    def ask(self, op: str) -> Any:
        contact = AgentClient(self.settings)
        try:
            return contact.ask({"op": op}, start=False)
        finally:
            contact.close()

    def replicas(self) -> dict[str, Any]:
        return dict(self.ask("status")["replicas"])

    def knows(self) -> int:
        """How many members it can ask, itself among them; 0 while it does not answer."""
        with contextlib.suppress(Exception):
            return len(self.ask("peers")["live"])
        return 0

    def directory(self, uri: str) -> Path:
        return local_dir(self.root, parse_uri(uri))

    def has_all_replicas(self, uri: str) -> bool:
        newest = self.replicas()["newest"].values()
        return any(row["uri"] == uri and row["has_all_replicas"] for row in newest)


@dataclass
class Nodes:
    nodes: list[Node] = field(default_factory=list)

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def told(self) -> str:
        running = [node for node in self.nodes if node.process is not None]
        return "\n".join(f"--- {node.root.name}\n{node.process.log()}" for node in running if node.process)

    def meet(self, at_least: int) -> None:
        """Wait until every running node knows that many members."""
        running = [node for node in self.nodes if node.process is not None]
        self.until(lambda: all(node.knows() >= at_least for node in running), "the nodes to meet")

    def until(self, is_true: Callable[[], bool], what: str, timeout_seconds: float = READY_SECONDS) -> None:
        if not any(is_true() for _ in Poll(timeout_seconds)):
            raise AssertionError(f"waited {timeout_seconds:g} s for {what}\n{self.told()}")


@contextlib.contextmanager
def cluster(
    fleet: Fleet, folder: Path, count: int, *, domains: Sequence[str] = (), **overrides: Any
) -> Iterator[Nodes]:
    """Run ``count`` nodes that know each other until the block ends. ``overrides`` are settings of all of them."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    nodes = Nodes()
    for number, address in enumerate(addresses):
        given = {
            "local_root": str(folder / f"node-{number}"),
            "mover": "agent",
            "peers": ",".join(addresses),
            "peer_listen": address,
            "peer_secret_file": str(secret_file(folder, SECRET)),
            "peer_domain": domains[number] if domains else "",
            "store_wait_seconds": "3",
            **overrides,
        }
        env = {
            f"TIERCKPT_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
            for name, value in given.items()
        }
        nodes.nodes.append(Node(Settings.load(**given), fleet, env))
    for node in nodes:
        node.start()
    try:
        nodes.meet(count)
        yield nodes
    finally:
        for node in nodes:
            node.kill()
