"""``python -m tierckpt.dcp.handoff.finish``: writes a dead trainer's staged checkpoint to the local tier.

The agent starts it, with the ranks' memory as inherited descriptors and its order as JSON on stdin: ``{"save": its
name, "descriptions": [{"descriptors": {name: descriptor}, "has_begun": a journal entry exists}, one of each rank of
this node], "life": a pipe; this process ends with the pipe's other end}``. It writes the missing shards, then commits
as the coordinator would, or informs the coordinator's node; not if the job has been restarted.

Exit code 0: the checkpoint is committed on the local tier, or was settled before. Otherwise it is not, and its files
are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch.distributed.checkpoint.storage import WriteResult

from ...arena.memory import Memory
from ...checkpoint import epoch, local_commit, shared_commit
from ...checkpoint.journal import Journal, JournalEntry
from ...client import Client, get_client
from ...config import Settings
from ...errors import ManifestError, ObjectNotFoundError, OperationTimeoutError, TierckptError
from ...format import manifest as manifests
from ...format.layout import HANDOFF_DIR, Location, blocks_file, local_dir, parse_uri
from ...format.manifest import FileEntry
from ...ipc.agent_client import HANDOFF_NAME, LOCK_NAME
from ...poll import SHARED, Poll
from ...process_start import begin_command
from ...resources import start_thread
from ...telemetry import log_to, logger
from ...types import Json
from ..save_planning import SaveDescription
from ..save_session import SaveSession, attach_files, decode_results, encode_results, require_files
from . import description as descriptions
from .description import SaveHandoff

WAIT_SECONDS = 30.0
"""The job's ranks end within seconds of each other, or not at all."""
RECORD_BYTES_MAX = 256 << 20

_FIELDS = frozenset({"save", "rank", "chunk_size_bytes", "results", "files", "parts"})


@dataclass(frozen=True)
class ResultExchange:
    """Exchanges the results of dead ranks between nodes, as JSON objects on the shared tier (W6). Blocking.

    Each node's executor writes the staged state of its ranks to its own SSD, then one record of results per rank. The
    executor of the coordinator's node reads the records of the others and commits. A record states that its rank ended
    with durable shards. A live rank, which may still abandon the save, has none, so there is no commit. No content of
    shared storage is executed (P9).
    """

    client: Client
    location: Location
    save: str
    chunk_size_bytes: int
    wait_seconds: float

    def write(self, rank: int, results: list[WriteResult]) -> None:
        data = manifests.seal(self._header(rank) | encode_results(results))
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
                    data = self.client.run(self.client.mover.store(self.location).get(self._key(rank)))
                    heard[rank] = self._decode(rank, data)
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
        return any(self.client.run(self.client.mover.drainer.is_named(entry)) for _ in polls)

    def remove(self, ranks: Iterable[int]) -> None:
        """Never fails: a leftover does no harm."""
        keys = [self._key(rank) for rank in ranks]
        try:
            self.client.run(shared_commit.discard(self.client.mover.store(self.location), keys))
        except TierckptError as error:
            log.warning("%s: records of ended ranks may be left over: %s", self.location.uri, error)

    def _key(self, rank: int) -> str:
        name = hashlib.blake2b(self.save.encode(), digest_size=8).hexdigest()
        return f"{HANDOFF_DIR}/{name}-{rank}.json"

    def _header(self, rank: int) -> Json:
        return {"save": self.save, "rank": rank, "chunk_size_bytes": self.chunk_size_bytes}

    def _decode(self, rank: int, data: bytes) -> list[WriteResult]:
        where = f"{self.location.uri}: record of rank {rank} of a save of dead trainers"
        body = manifests.unseal(data, _FIELDS, where=where, size_bytes_max=RECORD_BYTES_MAX)
        if not self._header(rank).items() <= body.items():
            raise ManifestError(
                f"{where}: it is of another save", hint="Save again with the same settings on all nodes"
            )
        return decode_results(body, self.chunk_size_bytes, where=where)


log = logger("agent")


def execute(order: Json) -> bool:
    """Flush and commit the ranks' staged data. False if the save was settled already. Raises TierckptError."""
    left: list[dict[str, int]] = [one["descriptors"] for one in order["descriptions"]]
    begun: list[bool] = [one["has_begun"] for one in order["descriptions"]]
    locks = [descriptors.pop(LOCK_NAME, None) for descriptors in left]
    found = [
        handoff for descriptors in left if (handoff := descriptions.read(descriptors.pop(HANDOFF_NAME))) is not None
    ]
    if len(found) < len(left):
        return False  # a rank saw the end of the save, but could not report it
    os.environ.update(found[0].environment)
    settings = Settings.received(found[0].settings)
    location = parse_uri(found[0].uri)
    if epoch.current(settings.local_root, location.parent) != found[0].epoch:  # checked again at the commit
        log.warning("%s: staged before the job was restarted, which continued without it: abandoned", found[0].uri)
        return False
    client = get_client(settings)
    coordinator = next((handoff for handoff in found if handoff.is_coordinator), None)
    if coordinator is not None and local_commit.is_committed(
        local_dir(settings.local_root, location), coordinator.token
    ):
        return False  # recovery finds the other ranks' shards
    journal = Journal(settings.local_root)
    if coordinator is None and all(
        handoff.files is not None and journal.read(handoff.token) is None for handoff in found
    ):
        return False  # committed; the coordinator's node did not inform these ranks
    kinds = {name: kind for handoff in found for name, kind in handoff.kinds.items()}
    inherited = {name: descriptor for names in left for name, descriptor in names.items()}
    memories = {name: Memory.from_fd(inherited[name], kind) for name, kind in kinds.items()}
    sessions: dict[int, SaveSession] = {}
    try:
        results: dict[int, list[WriteResult]] = {}
        for handoff, lock, has_begun in zip(found, locks, begun, strict=True):
            if not handoff.token:
                results[handoff.rank] = []
            elif handoff.files is not None:
                require_files(client, location, handoff.files)
                results[handoff.rank] = attach_files(handoff.results.list(), handoff.files, handoff.parts)
            else:
                session = _resume(settings, location, handoff, lock, has_begun=has_begun)
                if session is None:
                    return False
                sessions[handoff.rank] = session
                results[handoff.rank] = _finish_shards(session, handoff, memories)
        wait_seconds = min(WAIT_SECONDS, settings.commit_timeout_seconds)
        meeting = ResultExchange(client, location, order["save"], int(settings.chunk_size_bytes), wait_seconds)
        if coordinator is None:
            _send_results(meeting, results, found)
        else:
            others = set(range(coordinator.world_size)) - results.keys() if coordinator.use_collectives else set()
            _commit(meeting, others, results, coordinator, sessions[coordinator.rank])
        for session in sessions.values():
            session.hand_over()
    finally:
        for session in sessions.values():
            session.settle()
        for memory in memories.values():
            memory.close()
    log.info("%s: staged by a trainer that died, committed now", found[0].uri)
    return True


def _exit_with_agent(life: int) -> None:
    """Exit when the agent ends without a release, by the pipe ``life``. The next recovery removes the files."""

    def watch() -> None:
        if not os.read(life, 1):
            log.warning("the agent that started this process has ended: exiting")
            os.kill(os.getpid(), signal.SIGKILL)

    start_thread(threading.Thread(target=watch, name="tierckpt-life", daemon=True))


def _resume(
    settings: Settings, location: Location, handoff: SaveHandoff, lock: int | None, *, has_begun: bool
) -> SaveSession | None:
    """Continue the save of an ended rank. None if it is settled already.

    ``lock``: the rank's inherited lock on its journal entry. Without an entry (``has_begun``) no shard is on the disk.
    """
    stand_in = SaveDescription(
        rank=handoff.rank,
        world_size=handoff.world_size,
        is_coordinator=handoff.is_coordinator,
        use_collectives=handoff.use_collectives,
        awaits_verdict=True,
        epoch=handoff.epoch,
        notes=handoff.notes,
    )
    session = SaveSession(settings, location, stand_in, save_id=handoff.save_id, replaces=handoff.replaces)
    if not has_begun:
        session.open(handoff.token)
    elif not session.adopt_entry(handoff.token, lock):
        return None
    return session


def _finish_shards(session: SaveSession, handoff: SaveHandoff, memories: Mapping[str, Memory]) -> list[WriteResult]:
    """Durable shards are not rewritten: their memory may have another checkpoint by now."""
    try:
        files = _find_durable_shards(session, handoff)
        if files is None:
            log.info("%s: rank %d is written from memory", session.location.uri, handoff.rank)
            files = session.delivery.write_from_memory(handoff.shards_in(session.directory, memories))
        session.note(files)
        return attach_files(handoff.results.list(), files, handoff.parts)
    except BaseException:
        session.abort()
        raise


def _find_durable_shards(session: SaveSession, handoff: SaveHandoff) -> tuple[FileEntry, ...] | None:
    """Raises CheckpointError if shards that the journal calls durable are missing."""
    noted = {file.path: file for file in session.entry.files}
    if any(shard.name not in noted for shard in handoff.shards):
        return None
    names = [*(shard.name for shard in handoff.shards), blocks_file(handoff.token)]
    files = tuple(noted[name] for name in names if name in noted)
    session.delivery.is_direct_put = not require_files(session.client, session.location, files)
    return files


def _send_results(meeting: ResultExchange, results: dict[int, list[WriteResult]], found: list[SaveHandoff]) -> None:
    """Raises OperationTimeoutError without a commit: the shards stay until it is certain that none will come (S3b)."""
    try:
        for rank, written in results.items():
            meeting.write(rank, written)
        some = next((handoff for handoff in found if handoff.token), None)
        if some is not None and not meeting.await_commit(JournalEntry(some.token, some.uri, some.rank)):
            raise OperationTimeoutError(
                f"{some.uri}: the node of its coordinator has not committed it",
                hint="Its agent may be down, or a rank had not staged its part; the previous checkpoint is unchanged",
                waited_seconds=meeting.wait_seconds,
            )
    finally:
        meeting.remove(results)


def _commit(
    meeting: ResultExchange,
    others: set[int],
    results: dict[int, list[WriteResult]],
    coordinator: SaveHandoff,
    session: SaveSession,
) -> None:
    assert coordinator.metadata is not None
    try:
        results = results | (meeting.read(others) if others else {})
        ranks = range(coordinator.world_size) if coordinator.use_collectives else [coordinator.rank]
        session.commit(pickle.loads(coordinator.metadata), [results.get(rank, []) for rank in ranks])
    finally:
        if others:
            meeting.remove(others)


def main() -> None:
    begin_command()
    log_to(sys.stderr, "text", "info")
    order = json.loads(sys.stdin.read())
    _exit_with_agent(order["life"])
    execute(order)


if __name__ == "__main__":
    main()
