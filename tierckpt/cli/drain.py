"""``tierckpt drain``: bring everything that this node still holds to the shared tier."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.journal import ASIDE, FILE_SET_ASIDE, LOCAL_ONLY, SET_ASIDE, TO_DRAIN, Journal, JournalEntry
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
from ..ipc.agent_client import contact_for
from ..mover import Mover
from ..poll import Pauses, Poll
from ..types import Json
from .ui.output import Report, facts, human_bytes, progress_bar, table
from .ui.session import JsonOption, LocalRootOption, ProgressOption, load_settings, open_client, rate_of

NOTHING = "The journal is empty: nothing to drain."

Wait = Annotated[
    bool, typer.Option("--wait", help="Keep trying, and wait for other ranks and other movers, until nothing is left.")
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Give up waiting after this long (exit 7)."),
]


Limit = Annotated[
    str | None,
    typer.Option(
        "--limit",
        metavar="RATE",
        help="Bytes per second for each mover of this node, as 200MiB/s; 'none', or 'default' for what its settings "
        "say. Kept until it is changed; drains that run follow within a second.",
    ),
]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", metavar="N", help="Files in flight for each mover of this node.")
]
Paused = Annotated[
    bool | None,
    typer.Option("--pause/--resume", help="Stop sending on this node, or go on. Kept until it is changed."),
]


Retry = Annotated[
    bool, typer.Option("--retry", help="First put back what was set aside because its drain had failed for too long.")
]
Forget = Annotated[
    str | None,
    typer.Option(
        "--forget",
        metavar="URI",
        help="Give up draining what was set aside of this checkpoint, whose files stay on this node, or of this single "
        "file, which goes.",
    ),
]


def drain(
    wait: Wait = False,
    timeout: Timeout = None,
    limit: Limit = None,
    concurrency: Concurrency = None,
    paused: Paused = None,
    retry: Retry = False,
    forget: Forget = None,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    local_root: LocalRootOption = None,
) -> Report:
    """Drain what earlier processes left in the journal of this node. Exit 0 when nothing is left.

    With --limit, --concurrency, --pause or --resume it only changes how this node drains; with --wait too it then
    drains.
    """
    if forget is not None:
        if wait or retry:
            raise ConfigError("--forget drains nothing", hint="Leave --wait and --retry out")
        return _forget(Journal(load_settings(local_root).local_root), parse_uri(forget).uri)
    if paused and wait:
        raise ConfigError("--pause and --wait contradict each other", hint="Leave one out")
    if limit is not None or concurrency is not None or paused is not None:
        report = _change(load_settings(local_root).local_root, limit, concurrency, paused)
        if not wait:
            return report
    # drain=False keeps the mover from starting drains of its own beside the ones asked for here.
    with (
        progress_bar(as_json=as_json, progress=progress) as listener,
        open_client(local_root, listener, drain=False) as client,
    ):
        if retry:
            client.mover.journal.put_back()
        work = client.run(_drain_within(client.mover, wait, timeout))
    rows = work.rows()
    document: Json = {"entries": rows, "drained": work.drained, "left": len(work.left)}
    columns = "uri >rank outcome >size=size_bytes:bytes error"
    return Report(document, [table(columns, rows) if rows else NOTHING], work.exit_code())


def _forget(journal: Journal, uri: str) -> Report:
    gone = journal.forget(uri)
    if not gone:
        raise CheckpointNotFoundError(
            f"nothing of {uri} is set aside on this node", hint="`tierckpt status` lists what is, and why"
        )
    size_bytes = sum(entry.size_bytes for entry in gone)
    rest = "it is removed from this node" if gone[0].state == FILE_SET_ASIDE else "its files stay here"
    line = f"{uri} is not drained any more ({len(gone)} entries, {human_bytes(size_bytes)}); {rest}"
    return Report({"uri": uri, "forgotten": len(gone), "size_bytes": size_bytes}, [line])


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
    """Read ``200MiB/s``. Raises ConfigError."""
    if text is None:
        return UNCHANGED
    if text in {"none", "default"}:
        return None if text == "none" else text
    return rate_of("--limit", text, "Write 200MiB/s, none or default")


@dataclass
class _Work:
    """What was in the journal, what became of it, and what is left."""

    seen: dict[str, JournalEntry] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    errors: list[TierckptError] = field(default_factory=list)
    left: dict[str, JournalEntry] = field(default_factory=dict)

    @property
    def drained(self) -> int:
        return len(self.seen) - len(self.left)

    def rows(self) -> list[Json]:
        return [self._row(entry) for entry in self.seen.values()]

    def _row(self, entry: JournalEntry) -> Json:
        now = self.left.get(entry.token)
        outcome = self.outcomes.get(entry.token, "committed") if now is None else _outcome_of(now)
        return {
            "uri": entry.uri,
            "rank": entry.rank,
            "outcome": outcome,
            "size_bytes": (now or entry).size_bytes,
            "error": now.error if now else "",
        }

    @property
    def is_done(self) -> bool:
        """Nothing is left that this command could drain."""
        return all(entry.state in ASIDE for entry in self.left.values())

    def exit_code(self) -> int:
        if not self.left:
            return 0
        if self.drained:
            return PartialTransferError.exit_code
        if not self.errors and self.is_done:
            return CommitAbandonedError.exit_code
        if not self.errors:
            return OperationTimeoutError.exit_code  # other processes hold them: try again later
        return next((error for error in self.errors if not error.retryable), self.errors[0]).exit_code


def _outcome_of(left: JournalEntry) -> str:
    if left.state in ASIDE:
        return SET_ASIDE
    return "failed" if left.error else "held"


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
        await _look(mover, work)
        work.errors.append(OperationTimeoutError(f"not drained within {timeout_seconds:g} s"))
    return work


async def _drain(mover: Mover, work: _Work, wait: bool) -> None:
    """Pass over the journal until it is empty, or until a pass without ``wait`` brings nothing further.

    A rank may have to look again: its own files are sent in one pass, and what commits them may be the part of
    another rank that is drained later in the same pass.
    """
    await _look(mover, work)
    await mover.drains.recover()  # with drain=False: only removes what dead processes never finished
    await mover.drains.promote_newest()
    await _look(mover, work)
    pauses = Poll(pauses=Pauses(0.5, 0.5))
    while not work.is_done:
        before = len(work.left)
        results, work.errors = await mover.drains.drain_all(patient=wait)
        work.outcomes |= {result.token: result.outcome for result in results if result.outcome != "held"}
        await _look(mover, work)
        if work.errors and wait:
            return  # a patient drain raises only what waiting does not mend
        if not wait and len(work.left) == before:
            return
        if wait and not work.is_done:
            with contextlib.suppress(TierckptError, OSError):  # an agent that owns them and hangs is ended
                await asyncio.to_thread(contact_for(mover.settings).ask, {"op": "here"}, start=False)
            await pauses.pause_async()


async def _look(mover: Mover, work: _Work) -> None:
    found = await asyncio.to_thread(mover.journal.entries)
    entries = {entry.token: entry for entry in found if entry.state != LOCAL_ONLY}  # those are not to be drained
    for token in work.left.keys() - entries.keys():
        if token not in work.outcomes and work.left[token].state not in TO_DRAIN:
            work.outcomes[token] = "removed"
    work.seen = {**entries, **work.seen}
    work.left = entries
