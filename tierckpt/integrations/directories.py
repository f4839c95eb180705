"""A run of checkpoints that a framework writes as directories: each is adopted, and the newest is given back."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..adoption import Adoption, adopt
from ..cache.node_cache import retry_until_available
from ..checkpoint.journal import Journal
from ..client import get_client
from ..config import Settings
from ..errors import OperationTimeoutError
from ..format.layout import Location, parse_uri
from ..format.uris import local_path
from ..restore.restore import RestoreResult
from ..stores.schemes import check_location
from ..telemetry import logger

log = logger("save")

RESTORE_SECONDS = 600.0
"""How long a node waits for the checkpoint that rank 0 has chosen: another one may still be draining it."""


class Directories:
    """The run at ``uri``: one checkpoint ``uri/NAME`` for each directory ``NAME`` saved. Any thread may save."""

    def __init__(self, uri: str | os.PathLike[str], settings: Settings | None = None, **overrides: Any) -> None:
        self.location = check_location(parse_uri(uri))
        self.settings = Settings.load(settings, **overrides)
        self._saved: dict[str, Path] = {}
        """Directories by the URI that they were adopted to, while nothing was said of them."""
        self._lock, self._restores = threading.Lock(), 0

    def save(self, directory: str | os.PathLike[str]) -> Adoption:
        """Adopt ``directory``, which is written once and by name replaced or deleted later. On every rank of a job."""
        place = local_path(directory, "directory")
        adopted = adopt(place, self.location.child(place.name).uri, overwrite=True, links=True, settings=self.settings)
        with self._lock:
            self._say_what_was_removed()
            self._saved[adopted.uri] = place
        return adopted

    def _say_what_was_removed(self) -> None:
        """The host's retention goes by its own directories; what is not drained yet stays, and that is said."""
        left = {entry.uri for entry in Journal(self.settings.local_root).entries()}
        gone = [uri for uri, place in self._saved.items() if not place.exists()]
        for uri in gone:
            if uri in left:
                log.warning("%s was removed and is not drained yet: tierckpt keeps it until it is", self._saved[uri])
        for uri in {*gone, *(self._saved.keys() - left)}:
            del self._saved[uri]

    def restore(self, into: str | os.PathLike[str]) -> Path | None:
        """Restore the newest usable checkpoint to ``into/NAME``; return that directory, None when there is none.

        In a job of ``torch.distributed`` every rank calls this, and all have the one that rank 0 finds.
        """
        client = get_client(self.settings)
        client.enter(self.location, trains=False)
        found = self._agreed(lambda: client.run(client.mover.latest(self.location)))
        return self.restore_checkpoint(found, into) if found is not None else None

    def restore_checkpoint(self, found: Location, into: str | os.PathLike[str]) -> Path:
        """Restore ``found``, which another node may still be draining, to ``into/NAME``; return that directory."""
        client, target = get_client(self.settings), local_path(into, "into") / found.name

        async def once() -> RestoreResult:
            return await client.mover.restore(found, target)

        client.run(retry_until_available(once, RESTORE_SECONDS, found.uri))
        return target

    def _agreed(self, find: Any) -> Location | None:
        dist: Any = sys.modules.get("torch.distributed")
        is_job = dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if is_job:
            self._restores += 1
            store = dist.distributed_c10d._get_default_store()
            key = f"tierckpt/newest/{self.location.uri}/{self._restores}"
        if not is_job or dist.get_rank() == 0:
            checkpoint = find()
            uri = checkpoint.location.uri if checkpoint is not None else ""
            if is_job:
                store.set(key, uri)
        else:
            try:
                store.wait([key], timedelta(seconds=RESTORE_SECONDS))
            except Exception as error:
                raise OperationTimeoutError(
                    f"rank 0 has not looked for the newest checkpoint of {self.location.uri}",
                    hint="Every rank resumes, in the same order",
                    waited_seconds=RESTORE_SECONDS,
                ) from error
            uri = store.get(key).decode()
        return parse_uri(uri) if uri else None
