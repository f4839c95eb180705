"""Exchanges the write results of dead ranks between nodes, as JSON objects on the shared tier (W6).

Each node's executor writes the staged state of its ranks to its own SSD, then one record of results per rank. The
executor of the coordinator's node reads the records of the others and commits. A record states that its rank ended with
durable shards. A live rank, which may still abandon the save, has none, so there is no commit. No content of shared
storage is executed (P9).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch.distributed.checkpoint.storage import WriteResult

from ...checkpoint import shared_commit
from ...checkpoint.journal import JournalEntry
from ...client import Client
from ...errors import ManifestError, ObjectNotFoundError, OperationTimeoutError, TierckptError
from ...format import manifest as manifests
from ...format.layout import HANDOFF_DIR, Location
from ...poll import SHARED, Poll
from ...telemetry import logger
from ..save_session import decode_results, encode_results

log = logger("agent")

WAIT_SECONDS = 30.0
"""The job's ranks end within seconds of each other, or not at all."""
RECORD_BYTES_MAX = 256 << 20

_FIELDS = frozenset({"save", "rank", "chunk_size_bytes", "results", "files", "parts"})


@dataclass(frozen=True)
class ResultExchange:
    """The result exchange of the executors of one save. Blocking."""

    client: Client
    location: Location
    save: str
    chunk_size_bytes: int
    wait_seconds: float

    def write(self, rank: int, results: list[WriteResult]) -> None:
        data = self._encode(rank, results)
        self.client.run(self.client.mover.store(self.location).put(self._key(rank), data))

    def read(self, ranks: Collection[int]) -> dict[int, list[WriteResult]]:
        """Return the records of ``ranks``, once all of them exist.

        Raises:
            OperationTimeoutError: some are missing. Their ranks may live, or had not staged their part.
            ManifestError: a record is damaged.
        """
        heard: dict[int, list[WriteResult]] = {}
        for _ in Poll(self.wait_seconds, SHARED):
            for rank in set(ranks) - heard.keys():
                with contextlib.suppress(ObjectNotFoundError):
                    heard[rank] = self._decode(rank, self._get(self._key(rank)))
            if len(heard) == len(ranks):
                return heard
        raise OperationTimeoutError(
            f"{self.location.uri}: nobody says what ranks {sorted(set(ranks) - heard.keys())} had written of it when "
            "the job ended",
            hint="They still run, or had not staged it; the previous checkpoint is unchanged",
            waited_seconds=self.wait_seconds,
        )

    def await_commit(self, entry: JournalEntry) -> bool:
        """Whether a committed or pending manifest on the shared tier names the files in time."""
        polls = Poll(self.wait_seconds, SHARED)
        return any(self.client.run(self.client.mover.drains.is_named(entry)) for _ in polls)

    def remove(self, ranks: Iterable[int]) -> None:
        """Never fails: a leftover does no harm."""
        keys = [self._key(rank) for rank in ranks]
        try:
            self.client.run(shared_commit.discard(self.client.mover.store(self.location), keys))
        except TierckptError as error:
            log.warning("%s: records of ended ranks may be left over: %s", self.location.uri, error)

    def _get(self, key: str) -> bytes:
        return self.client.run(self.client.mover.store(self.location).get(key))

    def _key(self, rank: int) -> str:
        name = hashlib.blake2b(self.save.encode(), digest_size=8).hexdigest()
        return f"{HANDOFF_DIR}/{name}-{rank}.json"

    def _encode(self, rank: int, results: list[WriteResult]) -> bytes:
        body = {"save": self.save, "rank": rank, "chunk_size_bytes": self.chunk_size_bytes, **encode_results(results)}
        return manifests.seal(body)

    def _decode(self, rank: int, data: bytes) -> list[WriteResult]:
        where = f"{self.location.uri}: record of rank {rank} of a save of dead trainers"
        body = manifests.unseal(data, _FIELDS, where=where, size_bytes_max=RECORD_BYTES_MAX)
        mine = {"save": self.save, "rank": rank, "chunk_size_bytes": self.chunk_size_bytes}
        if {name: body[name] for name in mine} != mine:
            raise ManifestError(
                f"{where}: it is of another save", hint="Save again with the same settings on all nodes"
            )
        return decode_results(body, self.chunk_size_bytes, where=where)
