"""``tierckpt ls``: the checkpoints of a run, and how far each is on either tier."""

from __future__ import annotations

from .ui.output import Report, human_bytes, table
from .ui.session import JsonOption, LocalRootOption, UriArgument, location_of, open_client


def ls(uri: UriArgument, as_json: JsonOption = False, local_root: LocalRootOption = None) -> Report:
    """List the checkpoints at or directly under URI, by step. What is not committed is marked so."""
    location = location_of(uri)
    with open_client(local_root) as client:
        rows = client.run(client.mover.list(location))
    lines = [(row.name, row.step, row.local, row.shared, row.files, human_bytes(row.size_bytes)) for row in rows]
    document = {"uri": location.uri, "checkpoints": [row.to_json() for row in rows]}
    return Report(document, [table("name >step local shared >files >size", lines)])
