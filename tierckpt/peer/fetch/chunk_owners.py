"""The owner of each chunk, by weighted rendezvous hashing. Pure.

Each pair of a chunk and a member has a score that anybody can work out; the member with the best one owns the chunk,
the next ones stand in for it, in order (D. Thaler, C. Ravishankar, "Using name-based mappings to increase hit rates",
IEEE/ACM Transactions on Networking 6(1), 1998). Weights enter as the logarithmic method has it (J. Resch, "New hashing
algorithms for data storage", SNIA SDC 2015): the score is ln(u) / weight with u uniform in (0, 1), so a member is
first with a probability in proportion to its weight.

Guarantees:
    W1  The same members give the same ranks on every node, in whatever order they are named.
    W2  When a member comes or goes, only chunks that it gets or had change owner.
    W3  Expected parts are in proportion to the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import nsmallest

import xxhash

from ..membership import Member

OWNERS_MAX = 256
"""Members that share the chunks of one version among them: more would make a node work out more scores, and bring
nothing to a store, which has its rate."""

_ONE = float(1 << 64)


def ranked(key: str, members: Sequence[Member]) -> list[Member]:
    """Return ``members``, the owner of ``key`` first, then who stands in for it, in order."""
    data = key.encode()
    return sorted(members, key=lambda member: (_cost(data, _seed(member.name), member.weight), member.name))


class ChunkOwners:
    """The ranks of the chunks of one version among some members.

    Cost: one hash for each chunk and member, 0.3 microseconds: for all of 100,000 chunks and 16 members half a second.
    """

    def __init__(self, version: str, members: Sequence[Member]) -> None:
        self.version = version
        known = sorted(members, key=lambda member: member.name)
        if len(known) > OWNERS_MAX:  # the same ones on every node, and (W2) nearly the same when one comes or goes
            chosen = nsmallest(OWNERS_MAX, known, key=lambda m: _cost(version.encode(), _seed(m.name), m.weight))
            known = sorted(chosen, key=lambda member: member.name)
        self.members = tuple(known)
        self._seeds = [_seed(member.name) for member in known]
        self._is_even = len({_sane(member.weight) for member in known}) <= 1
        self._ranks: dict[int, tuple[str, ...]] = {}

    def ranks(self, chunk: int) -> tuple[str, ...]:
        """Names, the owner's first."""
        found = self._ranks.get(chunk)
        if found is None:
            found = tuple(member.name for member in ranked(f"{self.version}/{chunk}", self.members))
            self._ranks[chunk] = found
        return found

    def owners(self, total: int) -> list[str]:
        """The owner of each of the chunks 0 to ``total``."""
        names = [member.name for member in self.members]
        if not names:
            raise ValueError("no member to place chunks on")
        if len(names) == 1:
            return names * total
        digest, seeds = xxhash.xxh3_64_intdigest, self._seeds
        keys = (f"{self.version}/{chunk}".encode() for chunk in range(total))
        if self._is_even:  # ln is monotonic: the greatest hash has the least cost, and ties go to the first name
            found = []
            for key in keys:
                scores = [digest(key, seed) for seed in seeds]
                found.append(names[scores.index(max(scores))])
            return found
        pairs = [(seed, member.weight) for seed, member in zip(seeds, self.members, strict=True)]
        found = []
        for key in keys:
            costs = [_cost(key, seed, weight) for seed, weight in pairs]
            found.append(names[costs.index(min(costs))])
        return found


def fraction(text: str) -> float:
    """A number in [0, 1) that is always the same for ``text``, and unlike that of any other."""
    return xxhash.xxh3_64_intdigest(text.encode()) / _ONE


def _seed(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


def _cost(key: bytes, seed: int, weight: float) -> float:
    """The least is first."""
    return -math.log((xxhash.xxh3_64_intdigest(key, seed) + 1) / (_ONE + 2)) / _sane(weight)


def _sane(weight: float) -> float:
    """Weights come from other nodes: one that cannot be counts as the least there is."""
    return weight if 1e-9 <= weight <= 1e18 else 1e-9
