"""``tierckpt drain``."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Option

from ..checkpoint.journal import (
    DRAIN_STATES,
    FILE_SET_ASIDE,
    LOCAL_ONLY,
    SET_ASIDE,
    SET_ASIDE_STATES,
    Journal,
    JournalEntry,
)
from ..drain.rate_limiter import UNCHANGED, Unchanged, change_control
from ..errors import (
    CheckpointNotFoundError,
    CommitAbandonedError,
    ConfigError,
    OperationTimeoutError,
    PartialTransferError,
    TierckptError,
)
from ..format.layout import control_file, parse_uri
from ..ipc.agent_client import shared_client
from ..mover import Mover
from ..poll import Pauses, Poll
from ..types import Json
from .ui.output import Report, facts, human_bytes, table
from .ui.session import ProgressSession, rate_of

NOTHING = "The journal is empty: nothing to drain."


def drain(
    session: ProgressSession,
    wait: Annotated[
        bool, Option(help="Retry, and wait for other ranks and movers, until the journal is empty.")
    ] = False,
    timeout: Annotated[
        float | None, Option(metavar="SECONDS", min=0.0, help="Stop waiting after this long (exit 7).")
    ] = None,
    limit: Annotated[
        str | None,
        Option(
            metavar="RATE",
            help="Rate limit for each mover of this node, as 200MiB/s; 'none', or 'default' for the settings' rate. "
            "Kept until it is changed; running drains follow within a second.",
        ),
    ] = None,
    concurrency: Annotated[int | None, Option(metavar="N", help="Files in flight for each mover of this node.")] = None,
    paused: Annotated[
        bool | None,
        Option("--pause/--resume", help="Pause or resume all drains of this node. Kept until it is changed."),
    ] = None,
    retry: Annotated[bool, Option(help="First requeue drains that failed for too long.")] = False,
    forget: Annotated[
        str | None,
        Option(
            metavar="URI",
            help="Give up the failed drains of this checkpoint (its files stay on this node) or single file  "
            "(which is deleted).",
        ),
    ] = None,
) -> Report:
    """Drain the pending checkpoints of earlier processes of this node. Exit 0 if all are drained.

    --limit, --concurrency, --pause and --resume change how this node drains; it then drains only with --wait.
    """
    if forget is not None:
        if wait or retry:
            raise ConfigError("--forget drains nothing", hint="Leave --wait and --retry out")
        return _forget(Journal(session.settings().local_root), parse_uri(forget).uri)
    if paused and wait:
        raise ConfigError("--pause and --wait contradict each other", hint="Leave one out")
    if limit is not None or concurrency is not None or paused is not None:
        report = _change(session.settings().local_root, limit, concurrency, paused)
        if not wait:
            return report
    # drain=False: the mover starts only the drains requested here.
    with session.progress_bar() as listener, session.client(listener, drain=False) as client:
        if retry:
            client.mover.journal.put_back()
        work = client.run(_drain_within(client.mover, wait, timeout))
    rows = [work.row(entry) for entry in work.seen.values()]
    document: Json = {"entries": rows, "drained": work.drained, "left": len(work.left)}
    columns = "uri >rank outcome >size=size_bytes:bytes error"
    return Report(document, [table(columns, rows) if rows else NOTHING], work.exit_code())


def _forget(journal: Journal, uri: str) -> Report:
    entries = journal.forget(uri)
    if not entries:
        raise CheckpointNotFoundError(
            f"no failed drain of {uri} on this node", hint="`tierckpt status` lists failed drains, with their errors"
        )
    size_bytes = sum(entry.size_bytes for entry in entries)
    rest = "it is removed from this node" if entries[0].state == FILE_SET_ASIDE else "its files stay here"
    line = f"{uri} is not drained any more ({len(entries)} entries, {human_bytes(size_bytes)}); {rest}"
    return Report({"uri": uri, "forgotten": len(entries), "size_bytes": size_bytes}, [line])


def _change(local_root: Path, limit: str | None, concurrency: int | None, paused: bool | None) -> Report:
    control = change_control(local_root, bytes_per_second=_rate_of(limit), concurrency=concurrency, paused=paused)
    rate = control.bytes_per_second
    document: Json = {"control": str(control_file(local_root)), **control.to_json()}
    summary = {
        "drains": "paused" if control.paused else "on",
        "limit": "as the settings say" if rate is UNCHANGED else f"{human_bytes(rate)}/s" if rate else "none",
        "files at a time": control.concurrency or "as the settings say",
        "for": f"every mover of this node, by {document['control']}",
    }
    return Report(document, [facts(summary)])


def _rate_of(text: str | None) -> int | str | Unchanged | None:
    if text is None:
        return UNCHANGED
    if text in {"none", "default"}:
        return None if text == "none" else text
    return rate_of("--limit", text, "Write 200MiB/s, none or default")


@dataclass
class _Work:
    seen: dict[str, JournalEntry] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    errors: list[TierckptError] = field(default_factory=list)
    left: dict[str, JournalEntry] = field(default_factory=dict)

    @property
    def drained(self) -> int:
        return len(self.seen) - len(self.left)

    def row(self, entry: JournalEntry) -> Json:
        now = self.left.get(entry.token)
        if now is None:
            outcome = self.outcomes.get(entry.token, "committed")
        else:
            outcome = SET_ASIDE if now.state in SET_ASIDE_STATES else "failed" if now.error else "held"
        return {
            "uri": entry.uri,
            "rank": entry.rank,
            "outcome": outcome,
            "size_bytes": (now or entry).size_bytes,
            "error": now.error if now else "",
        }

    @property
    def is_done(self) -> bool:
        return all(entry.state in SET_ASIDE_STATES for entry in self.left.values())

    def exit_code(self) -> int:
        if not self.left:
            return 0
        if self.drained:
            return PartialTransferError.exit_code
        if not self.errors and self.is_done:
            return CommitAbandonedError.exit_code
        if not self.errors:
            return OperationTimeoutError.exit_code  # other processes hold them: retry later
        return next((error for error in self.errors if not error.retryable), self.errors[0]).exit_code


async def _drain_within(mover: Mover, wait: bool, timeout_seconds: float | None) -> _Work:
    work = _Work()
    try:
        async with asyncio.timeout(timeout_seconds):
            await _drain(mover, work, wait)
            await mover.drains.drop_superseded()
            await mover.pruner.prune_due()
    except TimeoutError as error:
        if isinstance(error, TierckptError):
            raise
        await _read_state(mover, work)
        work.errors.append(OperationTimeoutError(f"not drained within {timeout_seconds:g} s"))
    return work


async def _drain(mover: Mover, work: _Work, wait: bool) -> None:
    """Drain until the journal is empty, or, without ``wait``, until a pass makes no progress.

    A rank's commit may need the part of another rank that the same pass drains later.
    """
    await _read_state(mover, work)
    await mover.drains.recover()  # only removes unfinished saves of dead processes
    await mover.drains.promote_newest()
    await _read_state(mover, work)
    pauses = Poll(pauses=Pauses(0.5, 0.5))
    while not work.is_done:
        before = len(work.left)
        results, work.errors = await mover.drains.drain_all(patient=wait)
        work.outcomes |= {result.token: result.outcome for result in results if result.outcome != "held"}
        await _read_state(mover, work)
        if work.errors and wait:
            return  # a patient drain raises only permanent errors
        if not wait and len(work.left) == before:
            return
        if wait and not work.is_done:
            with contextlib.suppress(TierckptError, OSError):  # a hanging agent that owns entries is stopped
                await asyncio.to_thread(shared_client(mover.settings).ask, {"op": "here"}, start=False)
            await pauses.pause_async()


async def _read_state(mover: Mover, work: _Work) -> None:
    found = await asyncio.to_thread(mover.journal.entries)
    entries = {entry.token: entry for entry in found if entry.state != LOCAL_ONLY}
    for token in work.left.keys() - entries.keys():
        if token not in work.outcomes and work.left[token].state not in DRAIN_STATES:
            work.outcomes[token] = "removed"
    work.seen = {**entries, **work.seen}
    work.left = entries
