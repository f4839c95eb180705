"""Replica policy: which node keeps which fresh checkpoints, for how long, and the messages about it. Pure.

Each member's shards are on ``replicas`` members, itself included, in groups that hold each other's (Gemini, Wang et
al., SOSP 2023), in different failure domains. Holders pull.

    R1  A node holds a save if every file of it is there under its name; a file gets its name after it is whole,
        verified and durable. A report therefore stays true, no matter when a node is killed.
    R2  A copy is removed only if a newer checkpoint of its run is on all holders of each save in it.
    R3  Rows from other nodes are validated: a URI names a directory below the local root, and a token a file in it.
        Invalid rows are dropped.
    R4  A copy of a gradient log counts up to its last step with whole, verified and durable frames.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..checkpoint.select import age_of
from ..format.layout import Location, local_dir, location_at, parse_uri
from ..format.manifest import RANKS_MAX, digest_of, is_int, is_token, is_unix_seconds
from ..types import Json
from .membership import Member, is_member_name

FRESH_MAX = 64
TOKENS_MAX = 65536
LOGS_MAX = 4096
SEGMENTS_MAX = 1024
BASES_MAX = 256
BASE_CHARACTERS_MAX = 256
_SEGMENT = re.compile(r"\d{12,18}-[0-9a-f]{8}\.gradients")


@dataclass(frozen=True, slots=True)
class FreshCheckpoint:
    uri: str
    attempt: str
    created_unix_seconds: float
    own: frozenset[str]
    """Tokens of saves by ranks of this node."""
    held: frozenset[str]
    """Tokens of other nodes' saves that are whole on this node."""
    is_safe: bool = False
    """All holders of the own saves have reported them."""
    made_by: Mapping[str, str] = field(default_factory=dict)
    """Member that made each copied save, complete or not. Not sent."""

    @property
    def age(self) -> tuple[tuple[bool, int], float]:
        """Larger is newer: by step, else by time."""
        return age_of(self.uri), self.created_unix_seconds

    @property
    def location(self) -> Location:
        return parse_uri(self.uri)

    @property
    def run(self) -> str:
        return self.location.parent.uri

    def to_json(self) -> Json:
        return {
            "uri": self.uri,
            "attempt": self.attempt,
            "created_unix_seconds": self.created_unix_seconds,
            "own": sorted(self.own),
            "held": sorted(self.held),
            "safe": self.is_safe,
        }


@dataclass(frozen=True, slots=True)
class LogRow:
    uri: str
    rank: int
    of: str
    """Owner of the log, if this is a copy; '': this node."""
    step: int
    """Newest whole step (R4); -1 for none."""
    segments: tuple[tuple[str, int], ...]
    """Names in order, and the bytes of whole frames in each."""
    bases: tuple[str, ...] = ()
    """Names of the saves that it continues."""

    @property
    def log(self) -> tuple[str, int]:
        return self.uri, self.rank

    @property
    def location(self) -> Location:
        return parse_uri(self.uri)

    def after(self, step: int) -> list[tuple[str, int]]:
        following = (int(name.partition("-")[0]) for name, _ in self.segments[1:])
        return [one for one, begins in zip_longest(self.segments, following) if begins is None or begins > step]

    def to_json(self) -> Json:
        return {name: getattr(self, name) for name in self.__slots__}

    def identity(self, segment: str) -> str:
        return digest_of(f"{self.uri} {self.rank} {self.of} {segment}".encode())[-32:]


def logs_of(answer: Any) -> list[LogRow]:
    """Return the valid logs in an answer of ``/v1/fresh`` (R3)."""
    rows = answer.get("logs") if isinstance(answer, dict) else None
    found = (_log_row(row) for row in rows[:LOGS_MAX]) if isinstance(rows, list) else ()
    return [row for row in found if row is not None]


def _log_row(row: Any) -> LogRow | None:
    try:
        uri, rank, of, step, parts = (row[name] for name in ("uri", "rank", "of", "step", "segments"))
        segments = tuple((str(name), size) for name, size in parts[:SEGMENTS_MAX])
        bases = tuple(str(base)[:BASE_CHARACTERS_MAX] for base in row["bases"][-BASES_MAX:])
    except (TypeError, KeyError, ValueError):
        return None
    is_known = is_place(uri) and (of == "" or is_member_name(of))
    if not (is_known and all(map(is_int, (rank, step))) and 0 <= rank < RANKS_MAX and -1 <= step < 1 << 53):
        return None
    if any(not _SEGMENT.fullmatch(name) or not is_int(size) or not 0 <= size < 1 << 53 for name, size in segments):
        return None
    if not segments or sorted(dict(segments).items()) != [*segments]:
        return None
    return LogRow(uri, rank, of, step, segments, bases)


def fresh_of(answer: Any) -> list[FreshCheckpoint]:
    """Return the valid checkpoints in an answer of ``/v1/fresh`` (R3)."""
    rows = answer.get("fresh") if isinstance(answer, dict) else None
    found = (_row(row) for row in rows[:FRESH_MAX]) if isinstance(rows, list) else ()
    return [row for row in found if row is not None]


def _row(row: Any) -> FreshCheckpoint | None:
    if not isinstance(row, dict):
        return None
    uri, attempt, created = row.get("uri"), row.get("attempt"), row.get("created_unix_seconds")
    own, held, safe = row.get("own"), row.get("held"), row.get("safe")
    if not (is_place(uri) and is_token(attempt) and is_unix_seconds(created) and isinstance(safe, bool)):
        return None
    if not all(isinstance(some, list) and len(some) <= TOKENS_MAX and all(map(is_token, some)) for some in (own, held)):
        return None
    return FreshCheckpoint(
        str(uri), str(attempt), float(str(created)), frozenset(own or ()), frozenset(held or ()), safe
    )


def is_place(uri: Any) -> bool:
    """True for a ``Location.uri`` with a directory below the local root (R3)."""
    try:
        if not isinstance(uri, str) or len(uri) > 4096 or "\0" in uri or parse_uri(uri).uri != uri:
            return False
        uri.encode()
        location = parse_uri(uri)
        directory, names = local_dir(Path("/root"), location), location.path.strip("/").split("/")
        return not {"", ".", ".."} & {*names} and location_at(Path("/root"), directory) == location
    except ValueError:
        return False


# --- placement -------------------------------------------------------------------------------------------------------


def holders(members: Iterable[Member], replicas: int) -> Mapping[str, tuple[str, ...]]:
    """Return the holders of each member's saves, itself first. All members if there are too few."""
    known = sorted({member.name: member.domain for member in members}.items())
    return _holders(tuple(known), replicas)


@lru_cache(maxsize=8)
def _holders(known: tuple[tuple[str, str], ...], replicas: int) -> Mapping[str, tuple[str, ...]]:
    if not known:
        return {}
    names = [name for name, _ in known]
    from ..planning.replica_placement import spread_placement  # planning is a tenth of a command's start time

    placed = spread_placement([domain for _, domain in known], min(replicas, len(known)))
    return {names[node]: tuple(names[other] for other in held) for node, held in enumerate(placed)}


def sources(placed: Mapping[str, Sequence[str]], me: str) -> list[str]:
    return [name for name, held in placed.items() if me in held and name != me]


# --- removal ---------------------------------------------------------------------------------------------------------


def outdated(
    mine: Sequence[FreshCheckpoint], told: Mapping[str, Sequence[FreshCheckpoint]], draining: Collection[str] = ()
) -> list[FreshCheckpoint]:
    """Return the entries of ``mine`` that are only copies of others' saves, and may be removed (R2).

    The last copies of a lost member stay, because it reports nothing newer.

    ``told``: reports of the live members. ``draining``: URIs that this node still has to drain.
    """

    def is_replaced(old: FreshCheckpoint, name: str) -> bool:
        rows = told.get(name, ())
        return any(row.is_safe and row.run == old.run and row.age > old.age for row in rows)

    return [
        old
        for old in mine
        if old.made_by
        and not old.own
        and old.held <= old.made_by.keys()
        and old.uri not in draining
        and all(is_replaced(old, name) for name in old.made_by.values())
    ]
