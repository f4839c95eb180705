"""The drains of a cluster: answers of other nodes are checked, and requests to them are bounded."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tierckpt.agent import page_documents
from tierckpt.agent.node_document import node_document
from tierckpt.agent.page_documents import ClusterDrains, checked, summary
from tierckpt.config import Settings
from tierckpt.errors import ObjectNotFoundError, PeerError
from tierckpt.peer.membership import Member
from tierckpt.types import Json

STATUS: Json = {"bytes_per_second": 0.0, "drains": [], "stores": [], "replicas": None}


@pytest.fixture
def answer(local_root: Path) -> Json:
    local_root.mkdir(parents=True, exist_ok=True)
    return summary(node_document(Settings.load(), agent=STATUS))


def test_what_a_node_answers_passes_the_check_of_another(answer: Json) -> None:
    run = {"run": "s3://b/run", "newest_step": 7, "safe_step": None, "if_this_node_dies": "all 1 steps are lost"}
    answer |= {"runs": [run], "runs_of_node": 1}
    assert checked(answer) == answer


@pytest.mark.parametrize(
    "change",
    [
        {"lag_bytes": "many"}, {"lag_bytes": -1}, {"lag_bytes": float("nan")}, {"entries": None}, {"runs": None},
        {"runs": [1]}, {"runs": [{"run": "x"}]}, {"bytes_per_second": float("inf")}, {"runs_of_node": []},
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(answer: Json, change: Json) -> None:
    with pytest.raises(ValueError):
        checked(answer | change)
    for other in (None, [], "x", {}):
        with pytest.raises(ValueError):
            checked(other)


def test_long_texts_and_many_runs_are_cut(answer: Json) -> None:
    run = {"run": "r" * 10**6, "newest_step": 1, "safe_step": 1, "if_this_node_dies": "x" * 10**6}
    found = checked(answer | {"cause": "c" * 10**6, "runs": [run] * 1000, "extra": "e" * 10**6})
    assert len(str(found)) < 50_000 and "extra" not in found


class Peers:
    """600 other nodes: one refuses, one runs another version, one gives a wrong answer."""

    gossip = None
    problem = ""

    def __init__(self, answer: Json) -> None:
        self.asked: Counter[str] = Counter()
        self.answer = answer
        self._members = [Member(f"n-{n:03}", f"10.0.0.{n % 250}:7117") for n in range(600)]

    def members(self) -> list[tuple[Member, str, float]]:
        return [(member, "live", 0.1) for member in self._members]

    def unreachable_nodes(self) -> list[str]:
        return ["10.0.0.9:7117", "10.9.9.9:7117"]

    async def ask_drains(self, member: Member) -> Any:
        self.asked[member.name] += 1
        if member.name == "n-001":
            raise PeerError("peer n-001: no answer")
        if member.name == "n-002":
            raise ObjectNotFoundError("peer n-002 does not have it")
        return {"lag_bytes": "lies"} if member.name == "n-003" else self.answer


async def test_512_nodes_are_asked_once_in_a_while(answer: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASK_SECONDS", "ANSWER_SECONDS"):
        monkeypatch.setattr(page_documents, name, 3600.0)
    peers = Peers(answer)
    drains = ClusterDrains(Settings.load(), lambda: STATUS, peers)  # type: ignore[arg-type]
    for _ in range(3):
        document = await drains.document()
    assert max(peers.asked.values()) == 1  # none twice within ASK_SECONDS
    assert len(peers.asked) == page_documents.NODES_MAX
    assert len(document["nodes"]) == page_documents.NODES_MAX + 1
    nodes = {node["name"]: node for node in document["nodes"]}
    assert [node["name"] for node in document["nodes"][:2]] == ["n-001", "n-003"]  # silent ones first
    assert not nodes["n-001"]["answers"] and nodes["n-001"]["silent_since_unix_seconds"] is not None
    assert nodes["n-002"]["answers"] and "version" in nodes["n-002"]["problem"]
    assert nodes["n-004"]["drains"] == answer
    assert document["unreachable"] == ["10.9.9.9:7117"]


class SilentPeers(Peers):
    async def ask_drains(self, member: Member) -> Any:
        self.asked[member.name] += 1
        await asyncio.sleep(60)


async def test_silent_nodes_hold_a_document_up_for_two_seconds(answer: Json) -> None:
    peers = SilentPeers(answer)
    drains = ClusterDrains(Settings.load(), lambda: STATUS, peers)  # type: ignore[arg-type]
    async with asyncio.timeout(50):
        await drains.document()
        first = set(peers.asked)
        await drains.document()
    assert 0 < len(first) < page_documents.NODES_MAX  # 64 a second
    assert set(peers.asked) > first and max(peers.asked.values()) == 1  # the rest is asked first
