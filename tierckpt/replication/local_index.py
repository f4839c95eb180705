"""Index of the saves on the local tier: this node's own, and replicas of others'. Blocking.

A file gets its name after it is whole, verified and durable: a save counts if all its files are here (R1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import local_commit, marks
from ..checkpoint.branches import abandoned_here
from ..checkpoint.catalog import file_size
from ..checkpoint.retention import marked_directories
from ..checkpoint.select import age_of
from ..disk.durable import durable_write, matching, read_whole
from ..errors import ManifestError, ObjectNotFoundError, StoreError
from ..format import manifest as manifests
from ..format.layout import MANIFEST, REPLICA, SHARD_SUFFIX, Location, location_at
from ..format.manifest import Manifest
from ..peer.replica_policy import FreshCheckpoint
from ..telemetry import logger

log = logger("replicas")

STEPS_TOLD = 2
_NOTE_FIELDS = frozenset({"attempt", "of"})


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """A committed checkpoint of the local tier, and its saves that are whole here."""

    directory: Path
    location: Location
    manifest: Manifest
    own: frozenset[str]
    held: frozenset[str]
    made_by: Mapping[str, str]

    @property
    def key(self) -> tuple[str, str]:
        return self.location.uri, self.manifest.attempt

    def fresh(self, *, is_safe: bool) -> FreshCheckpoint:
        uri, manifest = self.location.uri, self.manifest
        return FreshCheckpoint(
            uri, manifest.attempt, manifest.created_unix_seconds, self.own, self.held, is_safe, self.made_by
        )


class LocalIndex:
    """The checkpoints below one local root, as of the last ``refresh``."""

    def __init__(self, local_root: Path) -> None:
        self._root = local_root
        self._manifests: dict[Path, tuple[tuple[int, int, int], Manifest]] = {}
        self.newest: list[LocalCheckpoint] = []
        self.unnamed: dict[Path, set[str]] = {}
        """Saves of this node's ranks that no manifest here names, by directory."""

    def refresh(self) -> None:
        runs: dict[Path, list[tuple[Path, Manifest]]] = {}
        unnamed: dict[Path, set[str]] = {}
        for directory in marked_directories(self._root / "checkpoints"):
            manifest = self._manifest(directory)
            named = manifest.tokens | {manifest.attempt} if manifest is not None else frozenset()
            if lost := {token for token in marks.origins(directory) - named if _is_flushed(directory, token)}:
                unnamed[directory] = lost
            if manifest is not None:
                runs.setdefault(directory.parent, []).append((directory, manifest))
        abandoned = abandoned_here(step for run in runs.values() for step in run)
        kept = [[step for step in run if step[0] not in abandoned] for run in runs.values()]
        steps = [step for run in kept for step in sorted(run, key=_age, reverse=True)[:STEPS_TOLD]]
        self.newest = list(self._here(sorted(steps, key=_age, reverse=True)))
        self.unnamed = unnamed
        existing = {directory for run in runs.values() for directory, _ in run}
        self._manifests = {path: known for path, known in self._manifests.items() if path in existing}

    def copies(self) -> list[LocalCheckpoint]:
        known = [(directory, manifest) for directory, (_, manifest) in self._manifests.items()]
        return list(self._here(step for step in known if (step[0] / REPLICA).exists()))

    def _here(self, steps: Iterable[tuple[Path, Manifest]]) -> Iterable[LocalCheckpoint]:
        for directory, manifest in steps:
            location = location_at(self._root, directory)
            if location is not None:
                yield complete_saves(directory, location, manifest)

    def _manifest(self, directory: Path) -> Manifest | None:
        try:
            status = (directory / MANIFEST).stat()
        except OSError:
            return None
        stamp, known = (status.st_ino, status.st_mtime_ns, status.st_size), self._manifests.get(directory)
        if known is not None and known[0] == stamp:
            return known[1]
        try:
            manifest = local_commit.read_local_manifest(directory)
        except (ManifestError, StoreError) as error:
            log.warning("%s", error)
            return None
        if manifest is not None:
            self._manifests[directory] = (stamp, manifest)
        return manifest


def complete_saves(directory: Path, location: Location, manifest: Manifest) -> LocalCheckpoint:
    """Return the saves of ``manifest`` that are whole in ``directory`` (R1)."""
    missing = {entry.token for entry in manifest.files if file_size(directory / entry.key) != entry.size_bytes}
    whole, own = manifest.tokens - missing, marks.origins(directory)
    return LocalCheckpoint(
        directory, location, manifest, own & whole, whole - own, _read_notes(directory, manifest.attempt)
    )


def note(directory: Path, manifest: Manifest, made_by: Mapping[str, str]) -> None:
    """Record the members that made the saves copied here. Without it they count as own saves."""
    body = {"attempt": manifest.attempt, "of": {**_read_notes(directory, manifest.attempt), **made_by}}
    durable_write(directory / REPLICA, manifests.seal(body))


def _read_notes(directory: Path, attempt: str) -> dict[str, str]:
    path = directory / REPLICA
    try:
        data = read_whole(path, manifests.MANIFEST_BYTES_MAX)
        body = manifests.unseal(data, _NOTE_FIELDS, where=str(path), size_bytes_max=manifests.MANIFEST_BYTES_MAX)
    except ObjectNotFoundError:
        return {}
    except (ManifestError, StoreError) as error:
        log.warning("%s", error)
        return {}
    if body["attempt"] != attempt or not isinstance(body["of"], dict):
        return {}
    return {str(token): str(name) for token, name in body["of"].items()}


def _is_flushed(directory: Path, token: str) -> bool:
    return bool(matching(directory, f"*-{token}{SHARD_SUFFIX}"))


def _age(step: tuple[Path, Manifest]) -> tuple[tuple[bool, int], float]:
    return age_of(step[0].name), step[1].created_unix_seconds
