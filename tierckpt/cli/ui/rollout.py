"""A rollout as it goes: which node has which chunks of one version, and where its bytes come from. Pure.

What a node got from peers is what the peers say they gave it; all other bytes came from shared storage. Both
are counted from the moment somebody began to watch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...peer.messages import CHUNKS_MAX, ChunkReport
from ...types import Json
from .output import human_bytes, human_seconds, plain

RATE_SECONDS = 5.0
ROWS_MAX = 32
SHADES = "░▒▓█"
EMPTY, ASKED = "·", "▸"


@dataclass
class Node:
    """One node of a rollout."""

    name: str
    chunks: bytearray = field(default_factory=bytearray)
    """For each chunk 1 when it is here."""
    has: int = 0
    fetching: frozenset[int] = frozenset()
    """Chunks that it reads from shared storage now."""
    after: int = 0
    """Ask for holdings from this line on."""
    is_whole: bool = False
    is_silent: bool = False
    """It did not answer the last time."""
    landed_bytes: int = 0
    from_peers_bytes: int = 0
    from_shared_bytes: int = 0
    served_bytes: int = 0
    history: deque[tuple[float, int, int, int]] = field(default_factory=deque)
    """(time, from peers, from shared storage, served), for rates."""
    before: tuple[int, int, int] | None = None
    """Landed, got and served when the watching began."""

    @property
    def is_part(self) -> bool:
        """True when it has, or wants, something of the version."""
        return self.is_whole or bool(self.chunks)

    def share(self) -> float:
        return 1.0 if self.is_whole else self.has / max(1, len(self.chunks))

    def rates(self) -> tuple[float, float, float]:
        """Bytes per second from peers, from shared storage, and served."""
        if len(self.history) < 2:
            return 0.0, 0.0, 0.0
        first, last = self.history[0], self.history[-1]
        seconds = max(last[0] - first[0], 1e-3)
        return tuple((last[at] - first[at]) / seconds for at in (1, 2, 3))  # type: ignore[return-value]


class Rollout:
    """One version on its way to many nodes, as they tell it."""

    def __init__(self, uri: str, version: str, chunk_size_bytes: int, now: float) -> None:
        self.uri, self.version, self.chunk_size_bytes = uri, version, chunk_size_bytes
        self.size_bytes = self.total = 0
        self.nodes: dict[str, Node] = {}
        self.begun = self.now = now

    def node(self, name: str) -> Node:
        return self.nodes.setdefault(name, Node(name))

    @property
    def part(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_part]

    @property
    def is_done(self) -> bool:
        return bool(self.part) and all(node.is_whole for node in self.part)

    # --- what nodes tell -------------------------------------------------------------------------------------------

    def take(self, held: Mapping[str, ChunkReport | None], statuses: Mapping[str, Json | None], now: float) -> None:
        """Take in one look at all nodes; None for one that did not answer."""
        self.now = now
        for name, found in held.items():
            self._take_held(self.node(name), found)
        got = _given(statuses)
        for name, status in statuses.items():
            if status is not None:
                self._take_status(self.node(name), status, got)

    def remember(self, statuses: Mapping[str, Json | None]) -> None:
        """What nodes said when none of them was filling it yet."""
        got = _given(statuses)
        for name, status in statuses.items():
            if status is not None:
                self._take_status(self.node(name), status, got)

    def _take_held(self, node: Node, held: ChunkReport | None) -> None:
        node.is_silent = held is None
        if held is None or not held.total or held.total > CHUNKS_MAX:
            return
        self.total = held.total
        if len(node.chunks) != held.total or held.landed < node.after:  # it has begun anew
            node.chunks, node.has, node.after = bytearray(held.total), 0, 0
        if held.whole:
            node.chunks, node.has = bytearray(b"\1") * held.total, held.total
        for ordinal, _ in held.new:
            node.has += not node.chunks[ordinal]
            node.chunks[ordinal] = 1
        node.after, node.is_whole, node.fetching = held.next, held.whole, held.fetching

    def _take_status(self, node: Node, status: Json, got: Mapping[str, int]) -> None:
        for fill in rows(status.get("fills")):
            if fill.get("version") == self.version:
                self.size_bytes = _count(fill.get("size_bytes")) or self.size_bytes
                node.landed_bytes = max(node.landed_bytes, _count(fill.get("landed_bytes")))
        if node.is_whole:
            node.landed_bytes = max(node.landed_bytes, self.size_bytes)
        now = (node.landed_bytes, got.get(node.name, 0), sum(_amounts(status.get("served_bytes")).values()))
        if not node.is_part:
            node.before = (0, *now[1:])  # should it begin before the next look, it has begun at nothing
            return
        if node.before is None:
            node.before = now
        landed, from_peers, served = (max(0, here - before) for here, before in zip(now, node.before, strict=True))
        node.from_peers_bytes = max(node.from_peers_bytes, min(from_peers, landed))
        node.from_shared_bytes = landed - node.from_peers_bytes
        node.served_bytes = max(node.served_bytes, served)
        node.history.append((self.now, node.from_peers_bytes, node.from_shared_bytes, node.served_bytes))
        while len(node.history) > 2 and node.history[1][0] <= self.now - RATE_SECONDS:
            node.history.popleft()

    # --- what it comes to ------------------------------------------------------------------------------------------

    def share(self) -> float:
        """Of all chunks on all nodes that want them."""
        part = self.part
        return sum(node.share() for node in part) / len(part) if part else 0.0

    def to_json(self) -> Json:
        rates = [node.rates() for node in self.part]
        return {
            "uri": self.uri,
            "version": self.version,
            "size_bytes": self.size_bytes,
            "chunks": self.total,
            "seconds": self.now - self.begun,
            "done": self.is_done,
            "share": self.share(),
            "bytes_by_source": {
                "peer": sum(node.from_peers_bytes for node in self.part),
                "shared": sum(node.from_shared_bytes for node in self.part),
            },
            "bytes_per_second": {
                "peer": sum(one[0] for one in rates),
                "shared": sum(one[1] for one in rates),
            },
            "nodes": [
                {
                    "name": node.name,
                    "chunks": node.has,
                    "share": node.share(),
                    "whole": node.is_whole,
                    "answers": not node.is_silent,
                    "from_peers_bytes": node.from_peers_bytes,
                    "from_shared_bytes": node.from_shared_bytes,
                    "served_bytes": node.served_bytes,
                }
                for node in sorted(self.part, key=lambda node: node.name)
            ],
        }

    def cells(self, node: Node, width: int) -> list[tuple[float, bool]]:
        """``width`` parts of the version: how much of each is here, and whether some of it is being read from shared
        storage."""
        found = []
        for at in range(width):
            start, stop = _span(at, width, self.total)
            here = sum(node.chunks[start:stop]) / (stop - start) if node.chunks else 0.0
            asked = any(start <= ordinal < stop for ordinal in node.fetching)
            found.append((1.0 if node.is_whole else here, asked))
        return found

    def anywhere(self, width: int) -> list[tuple[float, bool]]:
        """The same of what at least one node has: what need not be read from shared storage any more."""
        part = self.part
        if any(node.is_whole for node in part):
            return [(1.0, False)] * width
        union = bytearray(self.total)
        if part and self.total:
            joined = 0
            for node in part:
                joined |= int.from_bytes(node.chunks, "little")
            union = bytearray(joined.to_bytes(self.total, "little"))
        return self.cells(Node("", union, fetching=frozenset().union(*(node.fetching for node in part))), width)


def _span(at: int, width: int, total: int) -> tuple[int, int]:
    """Which chunks cell ``at`` stands for: at least one."""
    start = min(at * total // width, max(0, total - 1))
    return start, max(start + 1, (at + 1) * total // width)


# --- the picture ---------------------------------------------------------------------------------------------------


def line(rollout: Rollout) -> str:
    """The rollout in a line, for a log."""
    now, part = rollout.to_json(), rollout.part
    slowest = min(part, key=Node.share, default=None)
    rates, sizes = now["bytes_per_second"], now["bytes_by_source"]
    text = (
        f"{now['seconds']:.0f} s: {100 * now['share']:.0f} % on {len(part)} nodes, "
        f"{human_bytes(sizes['peer'])} from peers ({human_bytes(rates['peer'])}/s), "
        f"{human_bytes(sizes['shared'])} from shared storage ({human_bytes(rates['shared'])}/s)"
    )
    if slowest is not None and not rollout.is_done:
        text += f", slowest {slowest.name} at {100 * slowest.share():.0f} %"
    return text


def picture(rollout: Rollout, width: int) -> RenderableType:
    """Nodes and chunks filling. ``width`` is the terminal's."""
    part = sorted(rollout.part, key=lambda node: node.name)
    shown, hidden = part, []
    if len(part) > ROWS_MAX:
        by_share = sorted(part, key=Node.share)
        shown = sorted(by_share[: ROWS_MAX - 1], key=lambda node: node.name)
        hidden = by_share[ROWS_MAX - 1 :]
    names = max((len(node.name) for node in shown), default=8)
    cells = max(8, min(96, width - min(names, 28) - 52, rollout.total or 8))
    table = Table.grid(padding=(0, 2))
    table.add_column(max_width=28, no_wrap=True, overflow="ellipsis")
    table.add_column(no_wrap=True)
    for _ in range(4):
        table.add_column(justify="right", no_wrap=True)
    heads = ("node", "chunks", "", "peers", "shared", "serves")
    table.add_row(*(Text(head, style="bold") for head in heads))
    for node in shown:
        table.add_row(*_row(rollout, node, cells, _is_slow(node, part)))
    if hidden:
        shares = [node.share() for node in hidden]
        text = f"{len(hidden)} others, {100 * min(shares):.0f} to {100 * max(shares):.0f} %"
        table.add_row(Text("..."), Text(text, style="dim"))
    table.add_row(Text("anywhere", style="dim"), _bar(rollout.anywhere(cells)))
    return Group(_title(rollout), table, _sum(rollout))


def _title(rollout: Rollout) -> Text:
    text = f"{rollout.uri}, version {rollout.version[:8]}: "
    sizes = f"{human_bytes(rollout.size_bytes)} in {rollout.total} chunks" if rollout.total else "no chunk yet"
    return Text.assemble((plain(text).plain, "bold"), f"{sizes}, {len(rollout.part)} nodes")


def _row(rollout: Rollout, node: Node, cells: int, is_slow: bool) -> Sequence[Text]:
    name = plain(node.name)
    name.stylize("red" if node.is_silent else "yellow" if is_slow else "")
    state = "silent" if node.is_silent else "whole" if node.is_whole else f"{100 * node.share():.0f} %"
    rates = [
        Text(f"{human_bytes(rate)}/s" if rate >= 1 else "", style="dim" if rate < 1 else "") for rate in node.rates()
    ]
    return [name, _bar(rollout.cells(node, cells)), Text(state, style="green" if node.is_whole else ""), *rates]


def _bar(cells: Sequence[tuple[float, bool]]) -> Text:
    bar = Text()
    for share, is_asked in cells:
        if share >= 1:
            bar.append(SHADES[-1], "green")
        elif is_asked:
            bar.append(ASKED if share == 0 else SHADES[int(share * 3)], "yellow")
        elif share > 0:
            bar.append(SHADES[int(share * 3)], "cyan")
        else:
            bar.append(EMPTY, "dim")
    return bar


def _sum(rollout: Rollout) -> Text:
    now = rollout.to_json()
    rates, sizes = now["bytes_per_second"], now["bytes_by_source"]
    times = f" ({sizes['shared'] / rollout.size_bytes:.2f}x the size)" if rollout.size_bytes else ""
    text = (
        f"{100 * now['share']:.0f} %, {human_seconds(now['seconds'])}: "
        f"{human_bytes(sizes['peer'])} from peers at {human_bytes(rates['peer'])}/s, "
        f"{human_bytes(sizes['shared'])}{times} from shared storage at {human_bytes(rates['shared'])}/s"
    )
    left = sum(rollout.size_bytes - min(node.landed_bytes, rollout.size_bytes) for node in rollout.part)
    rate = rates["peer"] + rates["shared"]
    if left and rate >= 1:
        text += f"; about {human_seconds(left / rate)} left"
    return Text(text)


def _is_slow(node: Node, part: Sequence[Node]) -> bool:
    shares = sorted(other.share() for other in part)
    return not node.is_whole and node.share() < shares[len(shares) // 2] / 2


# --- what strangers tell -------------------------------------------------------------------------------------------


def _given(statuses: Mapping[str, Json | None]) -> dict[str, int]:
    """Bytes that each node got, as those who gave them say."""
    got: dict[str, int] = {}
    for status in statuses.values():
        for name, size in _amounts((status or {}).get("served_bytes")).items():
            got[name] = got.get(name, 0) + size
    return got


def _amounts(value: Any) -> dict[str, int]:
    return {str(name): _count(size) for name, size in value.items()} if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and 0 <= value < 1e18 else 0


def rows(value: Any) -> list[Json]:
    """The objects of a list; none where it is no list."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []
