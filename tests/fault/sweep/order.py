"""What must be on the disk before what, read off the system calls of a phase in which nothing went wrong.

A power cut keeps what was fsynced and, of the rest, whatever it likes. Nobody needs to cut the power to see that a file
was renamed before it was fsynced:

    O1  A file is renamed or linked to the name it is known by only when its bytes are durable.
    O2  A manifest appears only when the bytes and the names of all that it may refer to are durable: every file made
        below its directory, and each directory made on the way there.
    O3  A shard that stood there is deleted only after its directory's manifest was replaced or removed, durably; and
        nothing is acknowledged while the name of a manifest is not durable.
    O4  The names of our files change by rename, link and unlink of whole files: a name that a commit may refer to is
        never opened to be written, nor unlinked to make room for its successor.
    O5  Before the first byte of a shard is written the journal's entry is durable (J1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tests.fault.sweep.calls import Call
from tierckpt.disk.processes import is_temporary
from tierckpt.format.layout import MANIFEST, METADATA, SHARD_SUFFIX

LOCAL = "/local/checkpoints/"
KEPT = (MANIFEST, METADATA, SHARD_SUFFIX)
WRITES = ("write", "pwrite64", "ftruncate", "fallocate")


@dataclass
class Disk:
    """What is durable and what is not yet, as the calls go by."""

    standing: frozenset[str]
    """The files that stood there before."""
    known: set[str] = field(default_factory=set)
    """The files that stand there now."""
    unwritten: set[str] = field(default_factory=set)
    """Files with bytes that are not durable."""
    unnamed: set[str] = field(default_factory=set)
    """Names that appeared, manifests' also that went, and that are not durable."""
    unlinked: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    """Manifests that were replaced or removed."""
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known |= self.standing

    def see(self, call: Call) -> None:
        if call.failed:
            return
        if call.creates:
            self._opened(call.path)
        elif call.name in WRITES:
            self.unwritten.add(call.path)
        elif call.name == "fsync":
            self.unwritten.discard(call.path)
            self.unnamed = {name for name in self.unnamed if _parent(name) != call.path}
        elif call.name == "mkdir":
            self.unnamed.add(call.path)
        elif call.name in ("rename", "link", "linkat"):
            self._moved(call.paths[0], call.paths[-1], is_rename=call.name == "rename")
        elif call.name == "unlink":
            self._removed(call.path)

    def acknowledge(self) -> None:
        late = sorted(name for name in self.unnamed if name.endswith(f"/{MANIFEST}"))
        self.problems += [f"O3: a commit was acknowledged before {name} was durable" for name in late]

    def _opened(self, path: str) -> None:
        if path.endswith((".lock", "/lock")):
            return
        if path in self.known:
            self.problems.append(f"O4: {path} stood there and was opened to be written")
        is_shard = path.endswith(SHARD_SUFFIX) and LOCAL in path
        if is_shard and any(_parent(name).endswith("/journal") for name in self.unnamed):
            self.problems.append(f"O5: {path} was made before its journal entry was durable")
        if path.endswith(SHARD_SUFFIX) and f"{_parent(path)}/{MANIFEST}" in self.moved:
            self.problems.append(f"O2: {path} was made after the manifest")
        self.known.add(path)
        self.unnamed.add(path)

    def _moved(self, source: str, target: str, *, is_rename: bool) -> None:
        if source in self.unwritten:
            self.problems.append(f"O1: {target} appeared before its bytes were durable")
        if target in self.unlinked & self.standing and target.endswith(KEPT):
            self.problems.append(f"O4: {target} was unlinked and then made anew")
        if target.endswith(f"/{MANIFEST}"):
            self._committed(target.removesuffix(f"/{MANIFEST}"), source)
        if is_rename:
            self._gone(source)
        self.known.add(target)
        self.unnamed.add(target)
        self.moved.add(target)

    def _committed(self, directory: str, temporary: str) -> None:
        late = {path for path in self.unwritten if path.startswith(f"{directory}/")}
        late |= {
            name for name in self.unnamed if name.startswith(f"{directory}/") or f"{directory}/".startswith(name + "/")
        }
        for path in sorted(late - {temporary}):
            if not is_temporary(PurePosixPath(path).name):
                self.problems.append(f"O2: {path} was not durable when the manifest appeared")

    def _removed(self, path: str) -> None:
        manifest = f"{_parent(path)}/{MANIFEST}"
        if path in self.standing and path.endswith(SHARD_SUFFIX) and manifest in self.standing:
            if manifest not in self.moved:
                self.problems.append(f"O3: {path} was deleted while the manifest stood there that names it")
            elif manifest in self.unnamed:
                self.problems.append(f"O3: {path} was deleted before it was durable that the manifest has changed")
        self.unlinked.add(path)
        self._gone(path)

    def _gone(self, path: str) -> None:
        self.known.discard(path)
        self.unwritten.discard(path)
        self.unnamed.discard(path)
        if path.endswith(f"/{MANIFEST}"):
            self.moved.add(path)
            self.unnamed.add(path)


def _parent(path: str) -> str:
    return str(PurePosixPath(path).parent)


def problems(calls: Sequence[Call], standing: Sequence[str], acknowledgements: str) -> list[str]:
    """What is wrong with the order of ``calls``; ``standing`` are the files before them."""
    disk = Disk(frozenset(standing))
    for call in calls:
        if call.name == "write" and call.path == acknowledgements:
            disk.acknowledge()
        else:
            disk.see(call)
    return disk.problems
