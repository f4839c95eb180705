"""``tierckpt ls``."""

from __future__ import annotations

from ..checkpoint.catalog import CheckpointRow
from ..checkpoint.description import describe_run
from ..checkpoint.select import SEARCHED_DIRECTORIES_MAX, RunDirectory
from ..errors import CheckpointNotFoundError, PartialTransferError
from ..format.layout import Location
from ..mover import Mover
from .ui.output import Report, table
from .ui.session import Session, UriArgument, location_of


def ls(session: Session, uri: UriArgument) -> Report:
    """List the checkpoints at or directly under URI, by step. Uncommitted and abandoned ones are marked.

    For a bucket, or a directory above runs, list its runs: the newest step of each, its age and size, and whether it
    was adopted. Exit 3 if there are more directories than are searched.
    """
    location = location_of(uri)
    with session.client() as client:
        rows, runs, is_complete = client.run(_list_run(client.mover, location))
    columns = "name >step local shared >files >size=size_bytes:bytes >age=age_seconds:seconds note"
    view = [table(columns, rows)]
    if any(row.is_abandoned for row in rows):
        view.append("The job went back to an older step: restore(state, step=N) restores an abandoned one.")
    below = f"{location.uri.rstrip('/')}/"
    columns = (
        "run >steps newest=newest.name >age=newest.age_seconds:seconds >size=newest.size_bytes:bytes "
        "local=newest.local shared=newest.shared note=newest.note"
    )
    below_uri = [
        {"run": run.location.uri.removeprefix(below), "steps": run.steps, "newest": run.newest} for run in runs
    ]
    view.append(table(columns, below_uri))
    is_partial = not (rows or is_complete)
    if is_partial:
        view.append(f"Only the first {SEARCHED_DIRECTORIES_MAX} directories were searched: name a subdirectory.")
    document = {
        "uri": location.uri,
        "checkpoints": [row.to_json() for row in rows],
        "runs": [run.to_json() for run in runs],
        "runs_complete": is_complete,
    }
    return Report(document, view, PartialTransferError.exit_code if is_partial else 0)


async def _list_run(mover: Mover, location: Location) -> tuple[list[CheckpointRow], list[RunDirectory], bool]:
    """Return whether the list is complete, too."""
    try:
        rows = await describe_run(mover.selector, location)
    except CheckpointNotFoundError as error:
        runs, is_complete = await mover.selector.runs([location])
        if runs:
            return [], runs, is_complete
        if is_complete:
            raise
        raise CheckpointNotFoundError(
            f"no checkpoint in the first {SEARCHED_DIRECTORIES_MAX} directories at and under {location.uri}",
            hint="Name one of them",
        ) from error
    if rows[0].location == location:
        return rows, [], True
    others = {*await mover.selector.names(location)} - {row.name for row in rows}
    return rows, *await mover.selector.runs(
        [location.child(name) for name in sorted(others)], look_max=SEARCHED_DIRECTORIES_MAX // 8
    )
