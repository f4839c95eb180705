"""Adopts a framework's checkpoint directories as a run, and restores the newest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..adoption import Adoption, adopt
from ..cache.node_cache import retry_until_available
from ..checkpoint.select import age_of
from ..client import get_client
from ..config import Settings
from ..errors import CheckpointError, ConfigError, IntegrityError, StoreError
from ..format.layout import Location, parse_uri
from ..format.uris import local_path
from ..rank_store import RankStore, ranks_of_job
from ..restore.restore import RestoreResult, restore
from ..stores.schemes import check_location
from ..telemetry import logger
from ..tracebacks import short_traceback

log = logger("save")

RESTORE_SECONDS = 600.0
"""Wait of a node for rank 0's checkpoint, which another node may still be draining."""


class Directories:
    """The run at ``uri``: one checkpoint ``uri/NAME`` per saved directory ``NAME``. Any thread may save."""

    @short_traceback
    def __init__(self, uri: str | os.PathLike[str], settings: Settings | None = None, **overrides: Any) -> None:
        self.location = check_location(parse_uri(uri))
        self.settings = Settings.load(settings, **overrides)

    @short_traceback
    def save(
        self, directory: str | os.PathLike[str], name: str | None = None, *, is_written_once: bool = True
    ) -> Adoption:
        """Adopt ``directory`` on every rank. ``is_written_once``: it is never written in place, so links suffice."""
        place = local_path(directory, "directory")
        uri = self.location.child(name or place.name).uri
        return adopt(place, uri, overwrite=True, links=is_written_once, settings=self.settings)

    @short_traceback
    def restore(self, into: str | os.PathLike[str]) -> Path | None:
        """Restore the newest usable checkpoint to ``into/NAME``; return that directory, or None.

        Every rank calls this, and gets rank 0's choice. Raises ConfigError: several ranks without a process group.
        CheckpointError: this node has an undrained checkpoint newer than rank 0's.
        """
        client = get_client(self.settings)
        client.enter(self.location, trains=False)
        seen: list[str] = []

        def find() -> str:
            checkpoint = client.run(client.mover.selector.newest(self.location))
            seen.append(checkpoint.location.uri if checkpoint is not None else "")
            return seen[-1]

        found = rank_0_finds(self.location.uri, find)
        if not seen:
            with contextlib.suppress(StoreError):  # the store answered a moment ago, and the restore waits for it
                find()
            if seen and age_of(seen[0]) > age_of(found):
                raise CheckpointError(
                    f"this node has {seen[0]}, which is newer than what rank 0 has found ({found or 'none'})",
                    hint="`tierckpt drain --wait` on this node; then start the job again",
                )
        return self.restore_checkpoint(parse_uri(found), into) if found else None

    def restore_named(self, name: str, into: str | os.PathLike[str]) -> None:
        """Restore ``uri/NAME`` to ``into/NAME``, if missing there and found by rank 0. Every rank calls this."""
        client, location = get_client(self.settings), self.location.child(name)

        def find() -> str:
            try:
                return client.run(client.mover.selector.find(location)).location.uri
            except (CheckpointError, StoreError) as error:
                log.warning("%s is not restored: %s", location.uri, error)
                return ""

        if rank_0_finds(location.uri, find) and not (local_path(into, "into") / name).is_dir():
            try:
                self.restore_checkpoint(location, into)
            except IntegrityError as error:  # of all copies; the job continues from another checkpoint
                log.warning("%s is not restored: %s", location.uri, error)

    @short_traceback
    def restore_checkpoint(self, found: Location, into: str | os.PathLike[str]) -> Path:
        """Restore ``found``, which another node may still be draining, to ``into/NAME``."""
        client, target = get_client(self.settings), local_path(into, "into") / found.name

        async def once() -> RestoreResult:
            return await restore(client.mover, found, target)

        client.run(retry_until_available(once, RESTORE_SECONDS, found.uri))
        return target


def make_way(directory: Path) -> None:
    """Unlink adopted files of ``directory``, before a rank writes there in place into the links."""
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # another rank's
                if path.lstat().st_nlink > 1:
                    path.unlink()


def rank_0_finds(what: str, find: Callable[[], str]) -> str:
    """Return rank 0's result of ``find`` on every rank: ranks see different tiers.

    Every rank calls this, in the same order. Raises ``find``'s error; ConfigError: ``WORLD_SIZE`` above 1 without a
    process group; OperationTimeoutError: rank 0 did not arrive.
    """
    job_ranks = ranks_of_job()
    if job_ranks is None and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"ranks cannot agree on the newest checkpoint of {what}: there is no process group yet",
            hint="Ask when the framework is set up: after Accelerator(), Trainer() or init_process_group()",
        )
    if job_ranks is None or job_ranks[1] == 1:
        return find()
    return RankStore.numbered(f"tierckpt/newest/{what}", RESTORE_SECONDS).broadcast(
        "found",
        find,
        f"rank 0 has not looked for the newest checkpoint of {what}",
        "Every rank resumes, in the same order",
    )
