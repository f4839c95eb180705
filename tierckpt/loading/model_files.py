"""The safetensors files of a model: finds them, checks their headers, and locates each tensor. Reads no data.

A directory with an index holds what the index names, no more and no less. Without one it holds what its files hold,
and no name twice.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from ..disk.file_io import stat_version
from ..disk.io_tuner import MODEL_WAYS, ReadTuner, device_of
from ..errors import CheckpointNotFoundError, IntegrityError
from ..format.manifest import is_safe_path
from ..quantities import round_up
from ..read.file_copies import Copy, LocalCopy
from ..types import Buffer, ByteRange, ObjectInfo, Tier
from .header import HEADER_BYTES_MAX, Entry, Malformed, read_header, strict_json

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_HEAD_BYTES = 128 << 10
"""Read at once of each file: most headers are shorter."""


class Place(Protocol):
    """Where the files of a model are: a directory of this node, or of the shared tier."""

    where: str

    @property
    def threads(self) -> int:
        """Return how many threads read it fastest, as measured so far."""

    def files(self) -> list[str]:
        """Return the names of the files here, sorted; not those in directories below."""

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and version of a file; None when it is not there."""

    def open(self, name: str) -> Copy:
        """Return a reader of its own for whoever asks, who closes it."""

    def begin(self, names: list[str]) -> None:
        """Say that all of these files will be read, in this order."""

    def close(self) -> None: ...


class Directory:
    """A directory of a mounted file system."""

    def __init__(self, path: Path, tuner: ReadTuner) -> None:
        self.where = str(path)
        self.path, self.tuner = path, tuner

    @property
    def threads(self) -> int:
        with contextlib.suppress(OSError):
            directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return self.tuner.way(device_of(directory)).threads
            finally:
                os.close(directory)
        return MODEL_WAYS[0].threads

    def files(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir() if path.is_file())

    def info(self, name: str) -> ObjectInfo | None:
        try:
            found = (self.path / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        return ObjectInfo(name, found.st_size, stat_version(found))

    def open(self, name: str) -> LocalCopy:
        return LocalCopy(self.path / name, Tier.LOCAL, self.tuner)

    def begin(self, names: list[str]) -> None:
        """They are here."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(eq=False, slots=True)
class ModelFile:
    """One file of a model, as it was when its header was read."""

    place: Place
    info: ObjectInfo
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.info.key

    @property
    def where(self) -> str:
        return f"{self.place.where}/{self.name}"

    def open(self) -> Copy:
        return self.place.open(self.name)

    def check_unchanged(self) -> None:
        """Raise IntegrityError when the file is not the one any more whose header was read: its bytes are others."""
        if self.place.info(self.name) != self.info:
            raise IntegrityError(
                f"{self.where} was changed while it was read", hint="Load the model again", file=self.name
            )


@dataclass(frozen=True, slots=True)
class Model:
    """Where each tensor of a model lies, by name: in the order of the index, else of the files."""

    where: str
    place: Place
    tensors: dict[str, tuple[ModelFile, Entry]]


def open_model(place: Place, name: str = "") -> Model:
    """Read and check the headers of the files at ``place``, or of the one file ``name`` there.

    Raises:
        CheckpointNotFoundError: there is no such file, or none at all.
        IntegrityError: a file or tensor that the index names is missing, a header does not describe its file, two files
            hold one name, or the index is none.
    """
    if name:
        return Model(f"{place.where}/{name}", place, _merged(place, _opened(place, [name])))
    names = place.files()
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        found = ", ".join(indexes)
        raise IntegrityError(f"{place.where} holds several indexes: {found}", hint="Give the file to load", file=found)
    if indexes:
        return Model(place.where, place, _indexed(place, indexes[0]))
    files = [name for name in names if name.endswith(SUFFIX)]
    if not files:
        raise CheckpointNotFoundError(
            f"no safetensors files in {place.where}",
            hint="`tierckpt export` makes them from a DCP checkpoint",
        )
    return Model(place.where, place, _merged(place, _opened(place, files)))


def _opened(place: Place, names: Iterable[str]) -> list[ModelFile]:
    """Read the headers of files. None stays open: a model may have more files than a process may have open."""
    files = []
    for name in names:
        info = place.info(name)
        if info is None:
            raise CheckpointNotFoundError(f"{place.where}/{name} does not exist", hint="Check the name", file=name)
        file = ModelFile(place, info)
        with contextlib.closing(file.open()) as copy:
            header = read_header(file.where, info.size_bytes, _Head(copy, info.size_bytes).read)
        file.entries = {entry.name: entry for entry in header.entries}
        files.append(file)
    return files


class _Head:
    """Reads the beginning of a file once, past the page cache, whose readahead would read far more than a header."""

    def __init__(self, copy: Copy, size_bytes: int) -> None:
        self._copy, self._size_bytes = copy, size_bytes
        self._bytes = memoryview(b"")

    def read(self, byte_range: ByteRange) -> Buffer:
        if byte_range.stop > len(self._bytes):
            wanted = ByteRange(0, min(max(byte_range.stop, _HEAD_BYTES), self._size_bytes))
            into = memoryview(mmap.mmap(-1, round_up(wanted.size_bytes)))  # on a page, as O_DIRECT asks
            self._bytes = memoryview(self._copy.read(wanted, into))
        return self._bytes[byte_range.start : byte_range.stop]


def _merged(place: Place, files: list[ModelFile]) -> dict[str, tuple[ModelFile, Entry]]:
    tensors: dict[str, tuple[ModelFile, Entry]] = {}
    for file in files:
        for name, entry in file.entries.items():
            if name in tensors:
                raise IntegrityError(
                    f"{file.name} holds {name!r}, which {tensors[name][0].name} of {place.where} holds too",
                    hint="Give the file to load; only an index could say which one counts",
                    file=file.name,
                    tensor=name,
                )
            tensors[name] = file, entry
    return tensors


def _indexed(place: Place, index: str) -> dict[str, tuple[ModelFile, Entry]]:
    weight_map = _weight_map(place, index)
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if place.info(name) is None]
    if missing:
        raise IntegrityError(
            f"{place.where}/{index} names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not there",
            hint="Fetch the model again, whole: `tierckpt prefetch`",
            file=", ".join(missing),
        )
    files = {file.name: file for file in _opened(place, names)}
    for tensor, name in weight_map.items():
        if tensor not in files[name].entries:
            raise IntegrityError(
                f"{place.where}/{index} says that {name} holds {tensor!r}, and it does not", file=name, tensor=tensor
            )
    return {tensor: (files[name], files[name].entries[tensor]) for tensor, name in weight_map.items()}


def _weight_map(place: Place, index: str) -> dict[str, str]:
    where, info = f"{place.where}/{index}", place.info(index)
    size_bytes = info.size_bytes if info is not None else 0
    if size_bytes > HEADER_BYTES_MAX:
        raise IntegrityError(f"{where} has {size_bytes} bytes, which no index has", file=index)
    text = _whole(place, index, size_bytes)
    try:
        weight_map = strict_json(text)["weight_map"]
        names = set(weight_map.values())
    except (Malformed, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{where} is not an index of safetensors files: {error}", file=index) from error
    if not all(is_safe_path(name) for name in names):
        raise IntegrityError(f"{where} names files outside its directory", file=index)
    return cast(dict[str, str], weight_map)


def _whole(place: Place, name: str, size_bytes: int) -> bytes:
    with contextlib.closing(place.open(name)) as copy:
        return bytes(copy.read(ByteRange(0, size_bytes)))


def in_file_order(model: Model) -> Iterator[tuple[str, ModelFile, Entry]]:
    """Every tensor, file by file, in the order of their bytes."""
    files: dict[int, list[tuple[str, ModelFile, Entry]]] = {}
    for name, (file, entry) in model.tensors.items():
        files.setdefault(id(file), []).append((name, file, entry))
    for tensors in sorted(files.values(), key=lambda tensors: tensors[0][1].name):
        yield from sorted(tensors, key=lambda tensor: (tensor[2].start, tensor[2].stop))
