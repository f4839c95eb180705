"""Nodes that share: each a local root, an agent, and a prefetch of one model; and what came of it, judged from outside.

Nothing here reads tierckpt's internals. Bytes read from the store are the store's own count, and files of a node are
read from its directory and compared with digests taken when the model was created.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.peer_node import secret_file
from tests.servers.fleet import Ended, Fleet, Process
from tests.servers.origin import Origin
from tierckpt.checkpoint.catalog import file_size
from tierckpt.poll import BRIEF, Poll

MiB = 1 << 20
READY_SECONDS = 60.0
SECRET = "not a secret: this cluster lives for one test"


@dataclass(frozen=True)
class Model:
    """Files of noise in a directory that an origin serves, and their digests."""

    bucket: Path
    name: str
    digests: Mapping[str, str]
    size_bytes: int

    @classmethod
    def make(cls, bucket: Path, name: str, sizes: Mapping[str, int], seed: int = 0) -> Model:
        noise, digests = random.Random(f"{name} {seed}"), {}
        for path, size in sizes.items():
            data = noise.randbytes(size)
            (bucket / name / path).parent.mkdir(parents=True, exist_ok=True)
            (bucket / name / path).write_bytes(data)
            digests[path] = hashlib.blake2b(data).hexdigest()
        return cls(bucket, name, digests, sum(sizes.values()))

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket.name}/{self.name}"

    def problems(self, directory: Path) -> list[str]:
        """Return the files missing or different in ``directory``; [] if every byte is right."""
        found = []
        for path, digest in self.digests.items():
            file = directory / path
            if not file.is_file():
                found.append(f"{file} is missing")
            elif hash_of(file) != digest:
                found.append(f"{file} has wrong bytes")
        return found


def hash_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, hashlib.blake2b).hexdigest()


@dataclass
class Node:
    """One node. ``address``: of its agent's server; ``namespace``: its network, if it has its own."""

    name: str
    local_root: Path
    address: str
    env: dict[str, str]
    namespace: str = ""
    agent: Process | None = None
    fetch: Process | None = None

    def log(self) -> str:
        told = [
            f"--- {self.name}, {what}\n{one.log()}"
            for what, one in (("agent", self.agent), ("fetch", self.fetch))
            if one
        ]
        return "\n".join(told)


@dataclass
class Result:
    """What came of one node's prefetch."""

    node: str
    code: int | None
    """None: it had not ended when the time was up."""
    seconds: float
    cpu_seconds: float
    answer: dict[str, Any]
    problems: list[str]

    @property
    def is_right(self) -> bool:
        return self.code == 0 and not self.problems

    def source(self, name: str) -> int:
        """Bytes by source, as the prefetch itself reports."""
        return int(self.answer.get("bytes_by_source", {}).get(name, 0))


@dataclass
class Cluster:
    """``count`` nodes of one fleet that know each other; with ``peers=False`` each is alone."""

    fleet: Fleet
    origin: Origin
    model: Model
    root: Path
    nodes: list[Node] = field(default_factory=list)
    deadline_seconds: float = 60.0
    agent_options: tuple[str, ...] = ()
    log_level: str = "warning"
    _judged: dict[Path, Result] = field(default_factory=dict)

    def add(
        self,
        addresses: Sequence[str],
        settings: Mapping[str, str],
        *,
        namespaces: Sequence[str] = (),
        peers: bool = True,
    ) -> None:
        """Make one node for each address (``host:port``)."""
        for number, address in enumerate(addresses):
            env = {
                **self.origin.environment(),
                "AWS_CONFIG_FILE": "/nonexistent",
                "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
                **settings,
                "TIERCKPT_LOCAL_ROOT": str(self.root / f"node-{number}"),
            }
            if peers:
                env |= {
                    "TIERCKPT_PEERS": ",".join(addresses),
                    "TIERCKPT_PEER_LISTEN": address,
                    "TIERCKPT_PEER_SECRET_FILE": str(secret_file(self.root, SECRET)),
                }
            else:
                env["TIERCKPT_MOVER"] = "inline"
            namespace = namespaces[number] if namespaces else ""
            self.nodes.append(Node(f"node-{number}", self.root / f"node-{number}", address, env, namespace))

    def start_agents(
        self, nodes: Sequence[Node] | None = None, *, bug: str = "", timeout_seconds: float = READY_SECONDS
    ) -> None:
        """Start agents, and return when each knows all that run."""
        for node in self.nodes if nodes is None else nodes:
            self.start_agent(node, bug=bug)
        self.await_members(sum(node.agent is not None for node in self.nodes), timeout_seconds)

    def start_agent(self, node: Node, *, bug: str = "") -> None:
        """Start the agent of one node, and do not wait for it."""
        name = f"{node.name}-agent"
        command = ["agent", *self.agent_options]
        node.agent = self.fleet.start(command, node.env, namespace=node.namespace, bug=bug, name=name)

    def await_members(self, count: int, timeout_seconds: float = READY_SECONDS) -> None:
        """Return when every agent that runs knows ``count`` live members. Raises with their logs."""
        for _ in Poll(timeout_seconds, BRIEF):
            if all(not node.agent or len(self.live(node)) >= count for node in self.nodes):
                return
        told = "\n".join(node.log() for node in self.nodes)
        raise TimeoutError(f"after {timeout_seconds:g} s the agents do not know each other\n{told}")

    def live(self, node: Node) -> list[str]:
        """The members that a node's agent believes to be alive, including itself; [] while it is unreachable."""
        answer = self.ask(node, op="peers", version=None, directory=None)
        return [member["name"] for member in answer["live"]] if answer else []

    def ask(self, node: Node, **message: Any) -> Any:
        """Ask a node's agent over its socket. None while there is nobody."""
        from tierckpt.config import Settings
        from tierckpt.errors import TierckptError
        from tierckpt.ipc.agent_client import AgentClient

        contact = AgentClient(Settings.load(local_root=node.local_root, mover="agent"))
        try:
            return contact.ask(message, start=False)
        except (OSError, TierckptError, RuntimeError):
            return None
        finally:
            contact.close()

    def fetch(self, nodes: Sequence[Node] | None = None, *, bug: str = "", more: Sequence[str] = ()) -> None:
        """Begin to prefetch the model on each of ``nodes``, all at once."""
        for node in self.nodes if nodes is None else nodes:
            node.fetch = self.fleet.start(
                ["--log-level", self.log_level, "prefetch", self.model.uri, "--json", *more],
                node.env,
                namespace=node.namespace,
                bug=bug,
                name=f"{node.name}-fetch",
            )

    def results(self, nodes: Sequence[Node] | None = None) -> list[Result]:
        """Wait for their prefetches, then check the files of each."""
        nodes = self.nodes if nodes is None else nodes
        fetches = [node.fetch for node in nodes if node.fetch is not None]
        ended = self.fleet.wait(fetches, self.deadline_seconds)
        return [self._result(node, end) for node, end in zip(nodes, ended, strict=True)]

    def _result(self, node: Node, ended: Ended | None) -> Result:
        """Keep the recorded judgements."""
        fetch = node.fetch
        assert fetch is not None
        if ended is None:
            return Result(node.name, None, self.deadline_seconds, fetch.cpu_seconds, {}, [f"{node.name} has not ended"])
        if fetch.out not in self._judged:
            answer = fetch.answer()
            told = answer.get("directory")
            problems = self.model.problems(Path(told)) if told else [f"{node.name}: {fetch.log() or 'no answer'}"]
            self._judged[fetch.out] = Result(node.name, ended.code, ended.seconds, ended.cpu_seconds, answer, problems)
        return self._judged[fetch.out]

    def crash(self, node: Node) -> None:
        """kill -9 of all of a node. Its disk stays."""
        for process in (node.fetch, node.agent):
            if process is not None:
                process.kill()

    def stop(self, node: Node, *, fetch: bool = True) -> None:
        """Stop all processes of a node with SIGSTOP: it accepts connections, but never answers."""
        for process in (node.fetch if fetch else None, node.agent):
            if process is not None:
                process.send(signal.SIGSTOP)

    def resume(self, node: Node) -> None:
        for process in (node.agent, node.fetch):
            if process is not None:
                process.send(signal.SIGCONT)

    def until_sent(self, share: float, timeout_seconds: float = 60.0) -> int:
        """Wait until the store has sent this share of the model. Returns the bytes sent by then."""
        for _ in Poll(timeout_seconds, BRIEF):
            if (sent := self.origin.sent_bytes()) >= share * self.model.size_bytes:
                return sent
        raise TimeoutError(f"the store has sent {sent} bytes in {timeout_seconds:g} s, of which {share:g} x")

    def until_landed(self, node: Node, timeout_seconds: float = 60.0) -> None:
        """Return when a chunk of the model has landed on a node: its progress has a line, or the whole has a receipt
        (cache/partial_entry.py)."""
        name = self.model.name
        places = f".{name}-*.incoming/.tierckpt/filling/progress-*", f"{name}-*/.tierckpt/prefetched.json"
        for _ in Poll(timeout_seconds, BRIEF):
            if any(file_size(file) > 0 for place in places for file in (node.local_root / "cache").glob(place)):
                return
        raise TimeoutError(f"nothing has landed on {node.name} in {timeout_seconds:g} s\n{node.log()}")

    def agents_cpu_seconds(self) -> float:
        """Return the resources used so far by the running agents."""
        return sum(node.agent.cpu_seconds for node in self.nodes if node.agent is not None and node.agent.pid)

    def close(self) -> None:
        """Stop everything, and remove the nodes' files."""
        for node in self.nodes:
            self.crash(node)
        shutil.rmtree(self.root, ignore_errors=True)


def flip(directory: Path, every_bytes: int, name_part: str = "") -> int:
    """Flip one bit in every ``every_bytes`` of the model's files in ``directory``. Returns how many."""
    flipped = 0
    for file in sorted(path for path in directory.rglob("*") if path.is_file() and name_part in path.name):
        if ".tierckpt" in file.parts:
            continue
        with file.open("r+b") as stream:
            for at in range(every_bytes // 2, file.stat().st_size, every_bytes):
                stream.seek(at)
                byte = stream.read(1)[0]
                stream.seek(at)
                stream.write(bytes([byte ^ 0x10]))
                flipped += 1
    return flipped


def dumped(results: Sequence[Result]) -> str:
    """For a message of a failed test."""
    rows = [
        f"{one.node}: {one.code} {one.seconds:.2f} s {json.dumps(one.answer.get('bytes_by_source'))}" for one in results
    ]
    return "\n".join([*rows, *(problem for one in results for problem in one.problems)])
