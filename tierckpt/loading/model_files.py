"""The safetensors files of a model: chooses them, checks their headers, locates each tensor. Reads no data.

A set of weights is a file, an index with the files it names, or numbered shards, of one base name and variant:

    model.safetensors                  model-00001-of-00002.safetensors        model.safetensors.index.json
    model.fp16.safetensors             model.fp16-00001-of-00002.safetensors   model.safetensors.index.fp16.json

Order of sets, as in ``transformers``: ``model``, ``diffusion_pytorch_model`` and ``pytorch_model`` without a variant;
files of other names, together; one set of an adapter or of Mistral's names (``consolidated``), if it is the only one;
one variant, if it is the only one. Within a set a single file comes before an index, and an index before shards.

Source: ``_get_resolved_checkpoint_files`` of transformers 5, ``_get_checkpoint_shard_files`` of diffusers 0.36.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from ..disk.durable import closing_file
from ..disk.file_io import stat_version
from ..disk.io_tuner import MODEL_READ_MODES, ReadTuner, device_of
from ..errors import CheckpointNotFoundError, IntegrityError
from ..format.manifest import is_safe_path
from ..quantities import first_of, round_up
from ..read.replicated_file import FileCopy, LocalCopy
from ..telemetry import logger
from ..types import Buffer, ByteRange, ObjectInfo, Tier
from .header import HEADER_BYTES_MAX, TensorEntry, read_header

SUFFIX = ".safetensors"
_FIRST = ("model", "diffusion_pytorch_model", "pytorch_model")
_LAST = ("adapter_model", "consolidated", "pytorch_lora_weights")
_BASE = "|".join(_FIRST + _LAST)
_VARIANT = r"\d*[A-Za-z_][\w-]*?"
_SHARD = r"-(?P<number>\d+)-of-(?P<count>\d+)"
_FILE = re.compile(rf"(?P<base>{_BASE})(?:\.(?P<a>{_VARIANT}))?(?:{_SHARD})?(?:\.(?P<b>{_VARIANT}))?\.safetensors")
_INDEX = re.compile(
    rf"(?P<base>{_BASE})(?:\.(?P<a>{_VARIANT}))?\.safetensors(?:\.(?P<b>{_VARIANT}))?\.index(?:\.(?P<c>{_VARIANT}))?\.json"
)
_OTHER_INDEX = re.compile(r"(?P<base>.*)\.safetensors\.index\.json")
_CHOOSE = "Choose one: give its file, or variant=, subfolder= or index="


@dataclass(frozen=True, slots=True)
class Weights:
    files: tuple[str, ...] = ()
    index: str = ""


@dataclass(slots=True)
class _Set:
    base: str
    variant: str
    single: str = ""
    index: str = ""
    shards: dict[tuple[int, int], str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [name for name in (self.single, self.index, *self.shards.values()) if name]

    def chosen(self, where: str) -> Weights:
        if self.single or self.index:
            return Weights((self.single,)) if self.single else Weights(index=self.index)
        counts = sorted({count for count, _ in self.shards})
        count = counts[0]
        missing = [number for number in range(1, count + 1) if (count, number) not in self.shards]
        if len(counts) > 1:
            problem = f"holds shards of {' and of '.join(map(str, counts))} files, and no index"
        else:
            problem = f"lacks shards {', '.join(map(str, missing))} of {count} of {self.base}" if missing else ""
        if problem:
            raise IntegrityError(
                f"{where} {problem}",
                hint="Fetch the model again, whole: `tierckpt prefetch`",
                file=", ".join(self.names),
            )
        return Weights(tuple(self.shards[count, number] for number in range(1, count + 1)))


def _is_index(name: str) -> bool:
    return _INDEX.fullmatch(name) is not None or _OTHER_INDEX.fullmatch(name) is not None


def choose(where: str, names: Sequence[str], *, variant: str = "", index: str = "") -> Weights:
    """Return the set to load, or the set of ``variant`` ("fp16") or ``index`` (a name).

    Raises IntegrityError: several sets without a preferred one, or missing shards. CheckpointNotFoundError: no such
    variant or index, or no safetensors file.
    """
    sets, other_files, other_indexes = _sets(names)
    if index:
        if index not in names:
            hint = f"Its indexes: {_list([name for name in names if _is_index(name)])}"
            raise CheckpointNotFoundError(f"{where} has no {index}", hint=hint, file=index)
        return Weights(index=index)
    if variant:
        found = [one for base in _FIRST + _LAST for one in sets if (one.base, one.variant) == (base, variant)]
        if not found:
            variants = sorted({one.variant for one in sets if one.variant})
            raise CheckpointNotFoundError(
                f"{where} has no weights of the variant {variant!r}",
                hint=f"It has {_list([repr(one) for one in variants])}" if variants else "Load it without variant=",
            )
        return found[0].chosen(where)
    plain = [one for one in sets if not one.variant]
    for base in _FIRST:
        for one in plain:
            if one.base == base:
                return one.chosen(where)
    if len(other_indexes) == 1:
        return Weights(index=other_indexes[0])
    if other_files and not other_indexes:
        return Weights(tuple(other_files))
    left = plain or sets
    if not other_indexes and len(left) == 1:
        return left[0].chosen(where)
    several = other_indexes or [one.names[0] for one in left]
    if several:
        raise IntegrityError(
            f"{where} holds several sets of weights: {_list(several)}", hint=_CHOOSE, file=", ".join(several)
        )
    raise CheckpointNotFoundError(
        f"no safetensors files in {where}",
        hint="Give subfolder= of a pipeline; `tierckpt export` makes safetensors files from a DCP checkpoint",
    )


def _sets(names: Sequence[str]) -> tuple[list[_Set], list[str], list[str]]:
    sets: dict[tuple[str, str], _Set] = {}
    other_files, other_indexes = [], []
    for name in sorted(names):
        match = _FILE.fullmatch(name) or _INDEX.fullmatch(name)
        if match is None:
            other_files += [name] if name.endswith(SUFFIX) else []
            other_indexes += [name] if _OTHER_INDEX.fullmatch(name) else []
            continue
        groups = match.groupdict()
        variant = groups["a"] or groups["b"] or groups.get("c") or ""
        one = sets.setdefault((groups["base"], variant), _Set(groups["base"], variant))
        if name.endswith(".json"):
            one.index = one.index or name
        elif groups["number"]:
            one.shards[int(groups["count"]), int(groups["number"])] = name
        else:
            one.single = name
    return list(sets.values()), other_files, other_indexes


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


log = logger("load")

SHOWN = 5
_HEAD_BYTES = 128 << 10


class ModelDirectory(Protocol):
    where: str

    @property
    def threads(self) -> int: ...

    def files(self) -> list[str]:
        """Exclude subdirectories; sort."""

    def info(self, name: str) -> ObjectInfo | None:
        """Return None if the file is missing."""

    def open(self, name: str) -> FileCopy: ...

    def begin(self, names: list[str]) -> None:
        """Announce reads, in this order."""

    def close(self) -> None: ...


class Directory:
    def __init__(self, path: Path, tuner: ReadTuner) -> None:
        self.where = str(path)
        self.path, self.tuner = path, tuner

    @property
    def threads(self) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with contextlib.suppress(OSError), closing_file(os.open(self.path, flags)) as directory:
            return self.tuner.mode(device_of(directory)).threads
        return MODEL_READ_MODES[0].threads

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

    def begin(self, names: list[str]) -> None: ...

    def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class ModelFile:
    directory: ModelDirectory
    info: ObjectInfo
    entries: dict[str, TensorEntry] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.info.key

    @property
    def where(self) -> str:
        return f"{self.directory.where}/{self.name}"

    def open(self) -> FileCopy:
        return self.directory.open(self.name)

    def check_unchanged(self) -> None:
        if self.directory.info(self.name) != self.info:
            raise IntegrityError(
                f"{self.where} was changed while it was read", hint="Load the model again", file=self.name
            )


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """Keeps the order of the index, else of the files."""

    where: str
    directory: ModelDirectory
    tensors: dict[str, tuple[ModelFile, TensorEntry]]


def open_model(directory: ModelDirectory, name: str = "", *, variant: str = "", index: str = "") -> ModelTensors:
    """Read and check the headers of the files at ``directory``, or of its one file ``name``.

    Raises as ``choose``; and IntegrityError: a missing file of the index, a header that does not describe its file, one
    name in two files, or an invalid index.
    """
    if name:
        return ModelTensors(f"{directory.where}/{name}", directory, _merged(directory, _opened(directory, [name])))
    names = directory.files()
    weights = choose(directory.where, names, variant=variant, index=index)
    tensors = (
        _indexed(directory, weights.index) if weights.index else _merged(directory, _opened(directory, weights.files))
    )
    used = {file.name for file, _ in tensors.values()} | {*weights.files}
    skipped = [one for one in names if one.endswith(SUFFIX) and one not in used]
    if skipped:
        log.warning(
            "%s: loading %s; not loaded: %s",
            directory.where,
            weights.index or ", ".join(weights.files[:SHOWN]),
            first_of(skipped, SHOWN),
        )
    return ModelTensors(directory.where, directory, tensors)


def _opened(directory: ModelDirectory, names: Iterable[str]) -> list[ModelFile]:
    """Keep no file open: a model may have more files than descriptors."""
    files = []
    for name in names:
        info = directory.info(name)
        if info is None:
            raise CheckpointNotFoundError(f"{directory.where}/{name} does not exist", hint="Check the name", file=name)
        file = ModelFile(directory, info)
        with contextlib.closing(file.open()) as copy:
            header = read_header(file.where, info.size_bytes, _Head(copy, info.size_bytes).read)
        file.entries = {entry.name: entry for entry in header.entries}
        files.append(file)
    return files


class _Head:
    """Bypasses the page cache: its readahead would read far more than a header."""

    def __init__(self, copy: FileCopy, size_bytes: int) -> None:
        self._copy, self._size_bytes = copy, size_bytes
        self._bytes = memoryview(b"")

    def read(self, byte_range: ByteRange) -> Buffer:
        if byte_range.stop > len(self._bytes):
            head_range = ByteRange(0, min(max(byte_range.stop, _HEAD_BYTES), self._size_bytes))
            into = memoryview(mmap.mmap(-1, round_up(head_range.size_bytes)))
            self._bytes = memoryview(self._copy.read(head_range, into))
        return self._bytes[byte_range.start : byte_range.stop]


def _merged(directory: ModelDirectory, files: list[ModelFile]) -> dict[str, tuple[ModelFile, TensorEntry]]:
    tensors: dict[str, tuple[ModelFile, TensorEntry]] = {}
    for file in files:
        for name, entry in file.entries.items():
            if name in tensors:
                raise IntegrityError(
                    f"{file.name} holds {name!r}, which {tensors[name][0].name} of {directory.where} holds too",
                    hint="Give the file to load; only an index could say which one counts",
                    file=file.name,
                    tensor=name,
                )
            tensors[name] = file, entry
    return tensors


def _indexed(directory: ModelDirectory, index: str) -> dict[str, tuple[ModelFile, TensorEntry]]:
    weight_map = _weight_map(directory, index)
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if directory.info(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise IntegrityError(
            f"{directory.where}/{index} names {', '.join(missing)}, which {verb} not there",
            hint="Fetch the model again, whole: `tierckpt prefetch`",
            file=", ".join(missing),
        )
    files = {file.name: file for file in _opened(directory, names)}
    holders: dict[str, list[ModelFile]] = {}
    for file in files.values():
        for tensor in file.entries:
            holders.setdefault(tensor, []).append(file)
    tensors: dict[str, tuple[ModelFile, TensorEntry]] = {}
    other_files = []
    for tensor in (*(one for one in weight_map if one in holders), *(one for one in holders if one not in weight_map)):
        named, found = files.get(weight_map.get(tensor, "")), holders[tensor]
        if named not in found:
            other_files.append(repr(tensor))
            if len(found) > 1:
                raise IntegrityError(
                    f"{found[0].name} and {found[1].name} of {directory.where} both hold {tensor!r}",
                    hint=f"{index} does not say which one counts: ask for the model without it",
                    file=found[1].name,
                    tensor=tensor,
                )
        file = named if named in found and named is not None else found[0]
        tensors[tensor] = file, file.entries[tensor]
    if other_files:
        log.warning("%s/%s does not name the file of %s", directory.where, index, first_of(other_files, SHOWN))
    # Many indexes name a head that is tied to another tensor, and is in no file.
    if absent := [repr(tensor) for tensor in weight_map if tensor not in holders]:
        log.warning("%s/%s names %s, which no file holds", directory.where, index, first_of(absent, SHOWN))
    return tensors


def _weight_map(directory: ModelDirectory, index: str) -> dict[str, str]:
    where, info = f"{directory.where}/{index}", directory.info(index)
    size_bytes = info.size_bytes if info is not None else 0
    if size_bytes > HEADER_BYTES_MAX:
        raise IntegrityError(f"{where} has {size_bytes} bytes, which no index has", file=index)
    with contextlib.closing(directory.open(index)) as copy:
        text = bytes(copy.read(ByteRange(0, size_bytes)))
    try:
        weight_map = json.loads(text)["weight_map"]
        names = set(weight_map.values())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{where} is not an index of safetensors files: {error}", file=index) from error
    if not all(is_safe_path(name) for name in names):
        raise IntegrityError(f"{where} names files outside its directory", file=index)
    return cast(dict[str, str], weight_map)


def in_file_order(model: ModelTensors) -> Iterator[tuple[str, ModelFile, TensorEntry]]:
    files: dict[int, list[tuple[str, ModelFile, TensorEntry]]] = {}
    for name, (file, entry) in model.tensors.items():
        files.setdefault(id(file), []).append((name, file, entry))
    for tensors in sorted(files.values(), key=lambda tensors: tensors[0][1].name):
        yield from sorted(tensors, key=lambda tensor: (tensor[2].start, tensor[2].stop))
