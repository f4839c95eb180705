"""The runs and checkpoints of a node on all tiers, and the contents of one, for the agent's page.

Every wait has a deadline. If the store does not answer, rows come from this node, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from ..checkpoint import branches, local_commit, shared_commit
from ..checkpoint.branches import Branch
from ..checkpoint.catalog import Checkpoint, file_size
from ..checkpoint.description import describe_committed
from ..checkpoint.journal import LOCAL_ONLY, SET_ASIDE
from ..checkpoint.retention import Policy
from ..checkpoint.run_records import Lines, local_records, parse_lines, read_history
from ..checkpoint.select import age_of
from ..drain.active_drain import COMMITTING, OTHER_RANKS, QUEUED, SENDING, STORE
from ..errors import ConfigError, ManifestError, StoreError, TierckptError
from ..format.layout import METADATA, Location, parse_uri, step_name, step_of
from ..format.manifest import Manifest
from ..format.tensor_listing import METADATA_BYTES_MAX, TensorRow, tensors_in
from ..mover import Mover
from ..planning.goodput import Seen, analyse, read_start, tier_times
from ..quantities import human_bytes, human_seconds
from ..redaction import redact
from ..types import Json

REFUSED = "refused"
"""Drain state in addition to those of ``ActiveDrain`` and ``SET_ASIDE``."""
RANKED = (QUEUED, SENDING, COMMITTING, OTHER_RANKS, STORE, REFUSED, SET_ASIDE)
"""The last is the most urgent."""


def step_rows(journal: Sequence[Json], local: Sequence[Json], agent: Json) -> list[Json]:
    """Return a row for each step of this node, newest first, with its state on each tier."""
    rows: dict[str, Json] = {}
    done_bytes: Counter[str] = Counter()
    newest = (agent.get("replicas") or {}).get("newest") or {}
    copied = {row["uri"] for row in newest.values() if row["has_all_replicas"]}
    for item in local:
        if item["kind"] == "checkpoint" and (row := _row(rows, item["uri"], item["saved_unix_seconds"])) is not None:
            row["local"] = "committed"
            row["size_bytes"] = item["size_bytes"]
            row["shared"] = "committed" if item["drained"] else None
            row["peers"] = "committed" if item["replicated"] or item["uri"] in copied else None
    for item in journal:
        row = _row(rows, item["uri"], item["created_unix_seconds"])
        if row is None:
            continue
        row["size_bytes"] = max(row["size_bytes"], item["size_bytes"])
        if item["state"] == LOCAL_ONLY:
            row["shared"] = "local only"
            continue
        if (drain := item["drain"]) is None:
            row["local"] = row["local"] or "writing"
            continue
        if row["drain"] is None or RANKED.index(drain["state"]) > RANKED.index(row["drain"]["state"]):
            row["drain"], row["shared"] = drain, drain["state"]
        done_bytes[item["uri"]] += drain["done_bytes"]
    for row in rows.values():
        if row["drain"] is not None and done_bytes[row["uri"]]:
            row["share"] = min(1.0, done_bytes[row["uri"]] / max(1, row["size_bytes"]))
    return sorted(rows.values(), key=lambda row: (row["at_unix_seconds"], row["step"]), reverse=True)


def _row(rows: dict[str, Json], uri: str, at_unix_seconds: float) -> Json | None:
    run, step = _run_and_step(uri)
    if step is None:
        return None
    new = {
        "run": run, "step": step, "uri": uri, "at_unix_seconds": at_unix_seconds, "size_bytes": 0,
        "local": None, "peers": None, "shared": None, "share": None, "drain": None,
    }  # fmt: skip
    return rows.setdefault(uri, new)


@lru_cache(maxsize=8192)
def _run_and_step(uri: str) -> tuple[str, int | None]:
    location = parse_uri(uri)
    return location.parent.uri, step_of(location.name)


def run_rows(steps: Sequence[Json], newest_drained: Callable[[str], Json | None] = lambda run: None) -> list[Json]:
    """Return a row for each run of this node, newest first: its safe step, and the loss if this node fails.

    ``newest_drained``: from the run's log, since the local copy may be deleted.
    """
    by_run: dict[str, list[Json]] = {}
    for row in steps:
        by_run.setdefault(row["run"], []).append(row)
    return [_run(run, rows, newest_drained(run)) for run, rows in by_run.items()]


def _run(run: str, rows: Sequence[Json], drained: Json | None) -> Json:
    safe = next((row for row in rows if row["shared"] == "committed"), None)
    lost = [*(rows[: rows.index(safe)] if safe is not None else rows)]
    if drained is not None and (safe is None or drained["created_at"] > safe["at_unix_seconds"]):
        uri = f"{run.rstrip('/')}/{step_name(drained['step'])}"
        safe = {"step": drained["step"], "uri": uri, "at_unix_seconds": drained["created_at"]}
        lost = [row for row in rows if row["at_unix_seconds"] > drained["created_at"] and row["uri"] != uri]
    on_peers = next((row for row in lost if row["peers"] == "committed"), None)
    lost_tiers = lost[: lost.index(on_peers)] if on_peers is not None else lost
    kept = on_peers or safe
    lag_seconds = rows[0]["at_unix_seconds"] - safe["at_unix_seconds"] if safe is not None else None
    return {
        "run": run,
        "steps": len(rows),
        "newest_step": rows[0]["step"],
        "newest_unix_seconds": rows[0]["at_unix_seconds"],
        "safe_step": safe["step"] if safe is not None else None,
        "safe_uri": safe["uri"] if safe is not None else None,
        "safe_unix_seconds": safe["at_unix_seconds"] if safe is not None else None,
        "lag_steps": len(lost),
        "lag_seconds": lag_seconds,
        "lag_bytes": sum(row["size_bytes"] for row in lost),
        "if_this_node_dies": _loss(lost_tiers, kept, on_peers is not None),
    }


def _loss(gone: Sequence[Json], kept: Json | None, is_on_peers: bool) -> str:
    where = "other nodes" if is_on_peers else "shared storage"
    if not gone and kept is not None:
        return f"nothing is lost: step {kept['step']} is on {where}"
    size = human_bytes(sum(row["size_bytes"] for row in gone))
    if kept is None:
        return f"all {len(gone)} steps of this node are lost ({size}): none is on shared storage"
    names = f"step {gone[0]['step']} is" if len(gone) == 1 else f"{len(gone)} steps up to {gone[0]['step']} are"
    seconds = human_seconds(max(0.0, gone[0]["at_unix_seconds"] - kept["at_unix_seconds"]))
    return f"{names} lost ({size}, {seconds} of training): step {kept['step']} is the newest on {where}"


T = TypeVar("T")

STORE_SECONDS = 4.0
"""A person waits for the page."""
CHECKPOINTS_MAX = 256
"""The newest ones of a run."""
ROWS_MAX = 200
READ_AT_A_TIME = 16
KNOWN_MAX = 4096
"""Each takes 200 bytes."""


@dataclass(frozen=True, slots=True)
class _Committed:
    attempt: str
    created_unix_seconds: float
    files: int
    size_bytes: int
    branch: Branch
    policy: Policy

    @classmethod
    def of(cls, manifest: Manifest, name: str) -> _Committed:
        size, branch, policy = manifest.size_bytes, branches.branch_of(manifest, name), Policy.from_manifest(manifest)
        return cls(manifest.attempt, manifest.created_unix_seconds, len(manifest.entries), size, branch, policy)


@dataclass(slots=True)
class _StepTiers:
    local: _Committed | None = None
    files_here: int = 0
    is_drained: bool = False
    shared: _Committed | None = None
    is_listed: bool = False
    peers: list[str] = field(default_factory=list)

    @property
    def known(self) -> _Committed | None:
        return self.shared or self.local


class RunCatalog:
    """Reads runs through the agent's mover, with its credentials. Runs on its loop."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._shared: OrderedDict[str, _Committed] = OrderedDict()
        self._tensors: tuple[tuple[str, str], list[TensorRow]] = ("", ""), []
        """Of the checkpoint that was opened last."""
        self._gate = asyncio.Semaphore(READ_AT_A_TIME)

    async def run(self, uri: str) -> Json:
        """Return the checkpoints of the run at ``uri``, newest first, and its records.

        ``problem``: why shared storage, or part of it, could not be read.
        """
        location = parse_uri(uri)
        found = await asyncio.to_thread(self._local, location)
        names, problem = await self._in_time(location, self._mover.store(location).list_dirs(), [])
        for name in names:
            if step_of(name) is not None and not name.startswith("."):
                found.setdefault(name, _StepTiers()).is_listed = True
        ordered = sorted(found, key=lambda name: (*age_of(name), name), reverse=True)
        found = {name: found[name] for name in ordered[:CHECKPOINTS_MAX]}
        if not problem:
            _, problem = await self._in_time(location, self._read_shared(location, found), None)
        await self._ask_peers(location, found)
        history = await self._history(location, is_away=bool(problem))
        branch = await self._branch(location, found, names, is_near=bool(problem))
        return {
            "uri": uri,
            "at_unix_seconds": time.time(),
            "problem": problem,
            "checkpoints": [self._row(location, name, tiers, branch, problem) for name, tiers in found.items()],
            "checkpoints_of_run": len(ordered),
            "report": await asyncio.to_thread(_report, history),
            "retention": _retention(found),
        }

    # --- tiers ----------------------------------------------------------------------------------------------------

    def _local(self, run: Location) -> dict[str, _StepTiers]:
        directory = self._mover.directory(run)
        there = directory.iterdir() if directory.is_dir() else ()
        steps = [path for path in there if step_of(path.name) is not None and not path.name.startswith(".")]
        return {path.name: tiers for path in steps if (tiers := _read_local(path)) is not None}

    async def _in_time(self, location: Location, work: Awaitable[T], default: T) -> tuple[T, str]:
        """Return the result of ``work`` on a store or peers; on failure or timeout, ``default`` and the reason."""
        try:
            async with asyncio.timeout(STORE_SECONDS):
                return await work, ""
        except TimeoutError:
            store, outages = f"{location.scheme}://{location.authority}", self._mover.drainer.retries.outages
            cause = next((row["cause"] for row in outages if row["store"] == store), "")
            return default, redact(cause or f"{location.uri} has not answered for {STORE_SECONDS:g} s")
        except (TierckptError, OSError) as error:
            return default, redact(str(error))

    async def _read_shared(self, run: Location, found: Mapping[str, _StepTiers]) -> None:
        async def one(name: str, tiers: _StepTiers) -> None:
            uri = run.child(name).uri
            if tiers.local is not None and tiers.is_drained:
                known: _Committed | None = tiers.local
            elif (known := self._shared.get(uri)) is None:
                manifest = None
                with contextlib.suppress(ManifestError):  # a damaged manifest is no commit
                    async with self._gate:
                        manifest = await shared_commit.read_shared_manifest(self._mover.store(run.child(name)))
                known = _Committed.of(manifest, name) if manifest is not None else None
            if known is not None:
                self._shared[uri] = tiers.shared = known
            while len(self._shared) > KNOWN_MAX:
                self._shared.popitem(last=False)

        for name in [name for name, tiers in found.items() if not tiers.is_listed]:
            self._shared.pop(run.child(name).uri, None)
        listed = [one(name, tiers) for name, tiers in found.items() if tiers.is_listed]
        for result in await asyncio.gather(*listed, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _ask_peers(self, run: Location, found: Mapping[str, _StepTiers]) -> None:
        if self._mover.peers is None:
            return
        committed, _ = await self._in_time(run, self._mover.peers.committed(run), {})
        for name, attempts in committed.items():
            if (tiers := found.get(name)) is not None:
                tiers.peers = sorted(member.name for members in attempts.values() for member in members)

    async def _branch(
        self, run: Location, found: Mapping[str, _StepTiers], names: Sequence[str], *, is_near: bool
    ) -> Branch | None:
        """Return the branch that a job of the run continues; None if no step is abandoned."""
        known = [(tiers.known.branch, step_of(name)) for name, tiers in found.items() if tiers.known is not None]
        noted, _ = await self._in_time(run, self._mover.selector.noted_branch(run, names, is_near=is_near), None)
        return branches.current_branch(known, noted)

    def _row(self, run: Location, name: str, tiers: _StepTiers, branch: Branch | None, problem: str) -> Json:
        known, step = tiers.known, step_of(name)
        shared = "committed" if tiers.shared or (problem and tiers.is_drained) else "unknown" if problem else None
        return {
            "name": name,
            "uri": run.child(name).uri,
            "step": step,
            "attempt": known.attempt if known else "",
            "created_unix_seconds": known.created_unix_seconds if known else None,
            "size_bytes": known.size_bytes if known else 0,
            "files": known.files if known else 0,
            "files_here": tiers.files_here,
            "local": "committed" if tiers.local else None,
            "peers": tiers.peers,
            "shared": shared or ("uncommitted" if tiers.is_listed else None),
            "abandoned": bool(branch and known and not branch.holds(known.branch, step)),
        }

    # --- records of the run ---------------------------------------------------------------------------------------

    async def _history(self, run: Location, *, is_away: bool) -> dict[str, Lines]:
        directory = self._mover.directory(run)
        if not is_away:
            history, problem = await self._in_time(run, read_history(directory, self._mover.store(run)), {})
            if not problem:
                return history
        records = await asyncio.to_thread(local_records, directory)
        return {name: parse_lines(data) for name, data in sorted(records.items())}

    # --- one checkpoint -------------------------------------------------------------------------------------------

    async def checkpoint(self, uri: str, text: str) -> Json:
        """Return the document of ``tierckpt info`` for the checkpoint at ``uri``, and its tensors.

        Lists the first ``ROWS_MAX`` files and tensors with ``text`` in their names. ``problem``: why it cannot be read.
        """
        location = parse_uri(uri)
        checkpoint, problem = await self._in_time(location, self._mover.selector.find(location), None)
        if checkpoint is None or checkpoint.manifest is None:
            return {"uri": uri, "problem": problem or f"{uri} was not written by tierckpt (`tierckpt info` shows it)"}
        manifest = checkpoint.manifest
        document = await asyncio.to_thread(describe_committed, checkpoint, manifest, is_abandoned=False)
        tensors, no_tensors = await self._in_time(location, self._tensors_of(checkpoint, manifest), [])
        lower = text.lower()
        files = [row for row in document["files"] if lower in row["path"].lower()]
        rows = [row.to_json() for row in tensors if lower in row.name.lower()]
        return document | {
            "problem": "",
            "filter": text,
            "files": files[:ROWS_MAX],
            "files_found": len(files),
            "tensors": rows[:ROWS_MAX],
            "tensors_found": len(rows),
            "tensors_problem": no_tensors,
        }

    async def _tensors_of(self, checkpoint: Checkpoint, manifest: Manifest) -> list[TensorRow]:
        key = (checkpoint.location.uri, manifest.attempt)
        if self._tensors[0] != key:
            entry = next(iter(manifest.metadata), None)
            if entry is None:
                raise ConfigError("it was not written by torch.distributed.checkpoint")
            if entry.size_bytes > METADATA_BYTES_MAX:
                raise ConfigError(f"its metadata is too large for a page: {entry.size_bytes} bytes")
            local = checkpoint.local_path(entry)
            data = await (asyncio.to_thread(local.read_bytes) if local else checkpoint.store.get(entry.key))
            rows = await asyncio.to_thread(tensors_in, data, f"{checkpoint.location.uri}/{METADATA}")
            self._tensors = key, rows
        return self._tensors[1]


def _read_local(directory: Path) -> _StepTiers | None:
    with contextlib.suppress(ManifestError, StoreError):
        if (manifest := local_commit.read_local_manifest(directory)) is not None:
            here = sum(file_size(directory / entry.key) == entry.size_bytes for entry in manifest.entries)
            is_drained = local_commit.is_drained(directory, manifest.attempt)
            return _StepTiers(_Committed.of(manifest, directory.name), here, is_drained)
    return None


def _report(history: Mapping[str, Lines]) -> Json | None:
    """Return the numbers of ``tierckpt report --json``. Commits without a record may be missing."""
    by_file = {name: read_start(lines) for name, lines in history.items()}
    commits = [line for name, lines in history.items() if by_file[name] is None for line in lines]
    try:
        found = analyse([start for start in by_file.values() if start is not None], commits)
    except ConfigError:
        return None
    numbers = {name: value for name, value in asdict(found).items() if not isinstance(value, list | tuple)}
    return numbers | {
        "tiers": [
            {name: getattr(one, name) for name in ("tier", "saves", "reached", "median_seconds", "maximum_seconds")}
            for one in tier_times(found.starts, commits, Seen(is_asked=False), time.time())
            if one.is_used
        ],
        "starts": len(found.starts),
        "failures": len(found.failures),
        "lost_seconds": sum(one.lost_seconds for one in found.failures),
        "lost_steps": sum(one.lost_steps for one in found.failures),
    }


def _retention(found: Mapping[str, _StepTiers]) -> Json | None:
    known = [(tiers.known, step_of(name) or 0) for name, tiers in found.items() if tiers.known is not None]
    newest, _ = max(known, key=lambda one: (one[0].branch.order, one[1]), default=(None, 0))
    if newest is None or not newest.policy:
        return None
    return {"local": asdict(newest.policy.local), "shared": asdict(newest.policy.shared)}
