"""The files of one committed checkpoint, each over its copies: own SSD, else peers, then the shared tier."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from ..checkpoint import catalog
from ..checkpoint.catalog import Checkpoint
from ..client import Client
from ..config import Settings
from ..disk import read_lease
from ..disk.io_tuner import read_tuner_for
from ..errors import CheckpointNotFoundError
from ..format.layout import Location
from ..format.manifest import FileEntry
from ..peer.membership import Member
from ..read import block_digests
from ..read.file_copies import FileCopy, LocalCopy, RemoteCopy
from ..read.range_sources import PEERS_TRIED_MAX
from ..read.replicated_file import ReplicatedFile
from ..types import ByteRange, Tier

ATTEMPTS_MAX = 5


class CheckpointFiles:
    """Holds the checkpoint against removal on this node until ``close``."""

    def __init__(self, client: Client, settings: Settings, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._client, self._settings = client, settings
        self._lease = contextlib.ExitStack()
        self._lease.enter_context(read_lease.reading(settings.local_root, checkpoint.directory))
        manifest = checkpoint.manifest
        self.chunk_size_bytes = int(manifest.chunk_size_bytes if manifest is not None else settings.chunk_size_bytes)
        self._entries = {entry.path: entry for entry in manifest.entries} if manifest is not None else None
        self._blocks = block_digests.digest_locations(manifest) if manifest is not None else {}

    @classmethod
    def find(cls, client: Client, settings: Settings, location: Location) -> CheckpointFiles:
        """Find the checkpoint at ``location`` and hold it. Raises the errors of ``Selector.found``."""
        for _ in range(ATTEMPTS_MAX):
            files = cls(client, settings, client.run(client.mover.selector.found(location)))
            with contextlib.ExitStack() as stack:
                stack.callback(files.close)
                if client.run(catalog.is_still_committed(files.checkpoint)):
                    stack.pop_all()
                    return files  # else it was removed or replaced meanwhile
        raise CheckpointNotFoundError(
            f"{location.uri} is replaced as fast as it can be found",
            hint="Another job saves to this id; give each job a place of its own",
        )

    def close(self) -> None:
        self._lease.close()

    def entry(self, name: str) -> FileEntry:
        """Entries of stock checkpoints have no digests."""
        if self._entries is None:
            return FileEntry(name, self._client.run(self.checkpoint.store.head(name)).size_bytes, ())
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointNotFoundError(
                f"{name} is not part of the checkpoint {self.checkpoint.location.uri}",
                hint="Its metadata refers to a file that its manifest does not know",
                file=name,
            ) from None

    def open(self, entry: FileEntry) -> ReplicatedFile:
        known = None
        if entry.path in self._blocks:
            kept, start = self._blocks[entry.path]
            known = block_digests.ShardBlockDigests(entry, self.chunk_size_bytes, start, self._copies(kept))
        return ReplicatedFile(entry, self.chunk_size_bytes, self._copies(entry), known)

    def _copies(self, entry: FileEntry) -> list[FileCopy]:
        """The nearest copy is first."""
        checkpoint, location, tuner = self.checkpoint, self.checkpoint.location, read_tuner_for(self._settings)
        local = checkpoint.local_path(entry) if checkpoint.manifest is not None else None
        copies: list[FileCopy] = [LocalCopy(local, tuner=tuner)] if local is not None else self._on_peers(entry)
        if location.scheme == "file":
            return [*copies, LocalCopy(Path(location.path, entry.key), Tier.SHARED, tuner)]

        def get_range(byte_range: ByteRange) -> Any:
            return self._client.run(checkpoint.store.get_range(entry.key, byte_range))

        return [*copies, RemoteCopy(f"{location.uri}/{entry.key}", get_range)]

    def _on_peers(self, entry: FileEntry) -> list[FileCopy]:
        elsewhere, chunk = self.checkpoint.elsewhere, self.chunk_size_bytes
        if elsewhere is None:
            return []

        def copy(member: Member) -> FileCopy:
            return RemoteCopy(
                f"{member.name} ({member.address})",
                lambda at: self._client.run(elsewhere.chunk(member, entry, at.start // chunk)),
                Tier.PEER,
                chunk_size_bytes=chunk,
                report=lambda: elsewhere.report_damage(member),
            )

        return [copy(member) for member in elsewhere.holders(entry)[:PEERS_TRIED_MAX]]
