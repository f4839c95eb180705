"""``tierckpt drill``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.verify import record_check
from ..errors import IntegrityError
from ..restore.drill import drill as restore_drill
from .ui.output import Report, facts, progress_bar, table
from .ui.session import JsonOption, LocalRootOption, ProgressOption, UriArgument, location_of, open_client

Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="The same seed selects the same step.")]
Scratch = Annotated[
    Path | None,
    typer.Option("--scratch", metavar="DIR", help="Directory to restore to, then cleaned up. Default: the local root."),
]


def drill(
    uri: UriArgument,
    seed: Seed = None,
    scratch: Scratch = None,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    local_root: LocalRootOption = None,
) -> Report:
    """Restore a random committed step at or under URI from shared storage only, and check every byte.

    Copies on this node are not used. Exit 0 if all files are good, 5 if one is damaged or missing, 4 if nothing is
    committed there.
    """
    location = location_of(uri)
    with (
        progress_bar(as_json=as_json, progress=progress) as listener,
        open_client(local_root, listener, drain=False) as client,
    ):
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
