"""``tierckpt drill``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from ..checkpoint.verify import record_check
from ..errors import IntegrityError
from ..restore.drill import drill as restore_drill
from .ui.output import Report, facts, table
from .ui.session import ProgressSession, UriArgument, location_of


def drill(
    session: ProgressSession,
    uri: UriArgument,
    seed: Annotated[int | None, Option(metavar="N", help="The same seed selects the same step.")] = None,
    scratch: Annotated[
        Path | None, Option(metavar="DIR", help="Directory to restore to, then cleaned up. Default: the local root.")
    ] = None,
) -> Report:
    """Restore a random committed step at or under URI from shared storage only, and check every byte.

    Copies on this node are not used. Exit 0 if all files are good, 5 if one is damaged or missing, 4 if nothing is
    committed there.
    """
    location = location_of(uri)
    with session.progress_bar() as listener, session.client(listener, drain=False) as client:
        found = client.run(
            restore_drill(client.mover, location, seed=seed, scratch=scratch.absolute() if scratch else None)
        )
        record_check(client.settings.local_root, "drill", found.to_json())
    document = found.to_json()
    summary = {
        "checkpoint": "{uri}",
        "chosen from": "{committed} committed on shared storage, seed {seed}",
        "restored": "{restored_bytes:bytes} of {size_bytes:bytes} in {files} files",
        "took": "{seconds:seconds}, {bytes_per_second:rate}",
        "result": f"{len(found.problems)} damaged or missing files" if found.problems else "good",
    }
    view = [facts(summary, document), table("file problem", document["problems"])]
    return Report(document, view, IntegrityError.exit_code if found.problems else 0)
