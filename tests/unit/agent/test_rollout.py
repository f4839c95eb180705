"""A rollout as it goes: right numbers, whatever nodes say, in a line for people and in cells for the page."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from tierckpt.agent import rollout as module
from tierckpt.agent.peer_service import survival
from tierckpt.agent.rollout import DRAWN_MAX, Rollout, line
from tierckpt.cli.ui.output import plain
from tierckpt.peer.membership import Member
from tierckpt.peer.peer_http import ChunkReport
from tierckpt.peer.replica_policy import holders
from tierckpt.planning.replica_placement import survival_probability

CHUNK, TOTAL = 1 << 20, 40
SIZE = CHUNK * TOTAL
VERSION = "ab" * 16


def held(*ordinals: int, after: int = 0, total: int = TOTAL, fetching: frozenset[int] = frozenset()) -> ChunkReport:
    """A node with ``ordinals`` in its list, requested from line ``after`` on."""
    new = tuple((ordinal, "") for ordinal in ordinals[after:])
    return ChunkReport(total, len(ordinals), len(ordinals), new, fetching)


def status(chunks: int, **served: int) -> dict[str, Any]:
    fill = {"version": VERSION, "size_bytes": SIZE, "landed_bytes": chunks * CHUNK}
    return {"fills": [fill], "served_bytes": {name: count * CHUNK for name, count in served.items()}}


@pytest.fixture
def rollout() -> Rollout:
    return Rollout("s3://models/tiny", VERSION, CHUNK, 100.0)


def cells(rollout: Rollout) -> dict[str, str]:
    return {row["name"]: row["cells"] for row in rollout.to_json()["nodes"]}


def test_what_peers_gave_and_what_came_from_shared_storage_is_told_apart(rollout: Rollout) -> None:
    whole = ChunkReport(TOTAL, TOTAL, TOTAL, whole=True)
    rollout.take({"a": held(), "b": held()}, {"a": status(0, b=7), "b": status(0)}, 101.0)  # 7: of another time
    rollout.take({"a": held(*range(10)), "b": held(*range(20))}, {"a": status(10, b=15), "b": status(20, a=4)}, 103.0)
    now = rollout.to_json()
    assert now["bytes_by_source"] == {"peer": 12 * CHUNK, "shared": 18 * CHUNK}
    assert now["bytes_per_second"] == {"peer": 6 * CHUNK, "shared": 9 * CHUNK}
    assert now["share"] == 30 / 80
    assert not rollout.is_done
    rollout.take({"a": whole, "b": whole}, {"a": status(40, b=27), "b": status(40, a=24)}, 105.0)
    assert rollout.is_done
    assert rollout.to_json()["bytes_by_source"] == {"peer": 44 * CHUNK, "shared": 36 * CHUNK}


def test_what_begins_under_our_eyes_has_begun_at_nothing(rollout: Rollout) -> None:
    rollout.take({}, {"a": {"served_bytes": {"b": CHUNK}}, "b": {"fills": []}}, rollout.now)
    rollout.take({"a": held(*range(10)), "b": ChunkReport()}, {"a": status(10, b=4), "b": {"fills": []}}, 101.0)
    assert rollout.to_json()["bytes_by_source"] == {"peer": 0, "shared": 10 * CHUNK}
    rollout.take({"b": held(*range(5))}, {"a": status(10, b=6), "b": status(5)}, 102.0)
    assert rollout.to_json()["bytes_by_source"] == {"peer": 2 * CHUNK, "shared": 13 * CHUNK}


def test_a_node_that_wants_nothing_of_it_is_no_part(rollout: Rollout) -> None:
    rollout.take({"a": held(1), "b": ChunkReport()}, {"a": status(1), "b": {"fills": []}}, 101.0)
    assert [node.name for node in rollout.part] == ["a"]


def test_the_cells_are_the_chunks(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout.take({"a": held(*range(20), 39, fetching=frozenset({25})), "b": held(38)}, {}, 101.0)
    assert cells(rollout)["a"] == "9" * 20 + "0" * 5 + "a" + "0" * 13 + "9"
    monkeypatch.setattr(module, "CELLS_MAX", 4)
    assert cells(rollout)["a"] == "99a0"


def test_a_list_that_has_begun_anew_is_taken_anew(rollout: Rollout) -> None:
    rollout.take({"a": held(*range(20))}, {}, 101.0)
    assert rollout.node("a").after == 20
    rollout.take({"a": held(5)}, {}, 102.0)
    assert rollout.node("a").has == 1


def test_a_person_sees_who_is_slow_silent_and_whole(rollout: Rollout) -> None:
    whole = ChunkReport(TOTAL, TOTAL, TOTAL, whole=True)
    rollout.take({"quick": whole, "slow": held(1, 2), "lost": held(3)}, {"quick": status(40), "slow": status(2)}, 101.0)
    rollout.take({"lost": None}, {}, 102.0)
    rows = {row["name"]: row for row in rollout.to_json()["nodes"]}
    assert (rows["quick"]["whole"], rows["slow"]["whole"]) == (True, False)
    assert rows["slow"]["share"] == 2 / TOTAL
    assert (rows["slow"]["answers"], rows["lost"]["answers"]) == (True, False)
    assert rows["quick"]["cells"] == "9" * TOTAL
    assert "slowest lost at 2 %" in line(rollout)


def test_of_thousands_of_nodes_the_slowest_are_drawn(rollout: Rollout) -> None:
    nodes = {f"n{number:04}": held(*range(1 + number % 30)) for number in range(2000)}
    rollout.take(nodes, {}, 101.0)
    shown = {name for name, text in cells(rollout).items() if text}
    assert len(shown) == DRAWN_MAX
    assert "n0000" in shown
    assert "n0029" not in shown
    assert len(line(rollout)) < 200


@pytest.mark.parametrize(
    "lie",
    [
        None,
        {},
        {"fills": 3},
        {"fills": [1, {"version": VERSION, "size_bytes": "x"}]},
        {"served_bytes": {"a": -5, "b": "x", "c": float("nan")}},
        {"served_bytes": []},
    ],
)
def test_a_status_that_cannot_be_changes_nothing(rollout: Rollout, lie: Any) -> None:
    rollout.take({"a": held(1)}, {"a": lie}, 101.0)
    assert rollout.to_json()["bytes_by_source"] == {"peer": 0, "shared": 0}
    assert "a" in cells(rollout)


@pytest.mark.parametrize("text", ["\x1b[31mred", "line\nfeed"])
def test_a_name_does_not_command_the_terminal(rollout: Rollout, text: str) -> None:
    rollout.uri = text
    rollout.take({text: held(1)}, {}, 101.0)
    assert text not in plain(line(rollout)).plain


# --- losses that are survived (tierckpt status --peers) -------------------------------------------------------------


def cluster(nodes: int, domains: int = 1) -> list[Member]:
    return [Member(f"n{at:02}", f"10.0.0.{at + 1}:7117", domain=f"rack{at % domains}") for at in range(nodes)]


@pytest.mark.parametrize(
    ("nodes", "replicas", "domains"),
    [*((nodes, replicas, 1) for nodes, replicas in [(2, 2), (4, 2), (8, 2), (12, 3), (16, 2), (9, 3)]),
     *((nodes, replicas, 2) for nodes, replicas in [(5, 2), (7, 3), (3, 2)])],
)  # fmt: skip
def test_the_odds_shown_are_those_of_the_formula_and_of_brute_force(nodes: int, replicas: int, domains: int) -> None:
    members = cluster(nodes, domains)
    placed = holders(members, replicas)
    shown = survival(members, replicas)
    assert list(shown) == [str(lost) for lost in range(1, min(replicas + 1, nodes) + 1)]
    for lost, value in ((int(lost), value) for lost, value in shown.items()):
        fine = sum(
            all(set(held) - set(gone) for held in placed.values()) for gone in itertools.combinations(placed, lost)
        )
        assert value == pytest.approx(fine / math.comb(nodes, lost))
        if nodes % replicas == 0:  # elsewhere there is no formula
            assert value == pytest.approx(survival_probability(nodes, replicas, lost))


def test_odds_of_very_many_nodes_and_of_too_few() -> None:
    assert survival(cluster(1), 3) == {"1": 0.0}
    assert survival([], 2) == {}
    assert survival(cluster(1000), 2)["2"] == pytest.approx(survival_probability(1000, 2, 2))
