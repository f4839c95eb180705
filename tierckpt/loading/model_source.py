"""Sources of a model's files: a path of this node, a prefetched directory, or a URI through the node cache."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from ..cache.file_set import Receipt
from ..cache.partial_entry import read_file
from ..cache.receipt import RECEIPT, is_half_replaced, read_receipt
from ..cache.verifier import Checker
from ..config import Settings
from ..disk.durable import translated
from ..disk.io_tuner import MODEL_READ_MODES, ReadMode, ReadTuner, read_tuner_for
from ..errors import CheckpointNotFoundError, ConfigError, IntegrityError, StoreError, TierckptError
from ..format.layout import parse_uri
from ..format.manifest import is_safe_path
from ..format.uris import scheme_of, text_of
from ..read.parallel_read import REQUESTS_MAX
from ..read.replicated_file import FileCopy, LocalCopy
from ..stores.schemes import check_location
from ..telemetry import logger
from ..types import Buffer, ByteRange, ObjectInfo, Tier
from .cached_view import CachedView, open_cached, open_entry
from .model_files import SUFFIX, Directory, ModelDirectory, ModelTensors, open_model

log = logger("load")


class PrefetchedDirectory(Directory):
    """Verifies files below ``root`` during reads, if ``receipt`` has digests."""

    def __init__(self, path: Path, tuner: ReadTuner, root: Path, receipt: Receipt, settings: Settings) -> None:
        super().__init__(path, tuner)
        self._root, self._receipt, self._settings = root, receipt, settings
        files = enumerate(receipt.frozen.files)
        self._index = {root / item.path: index for index, item in files}
        self._place = path.resolve()
        self._checker = Checker(receipt.frozen, receipt.digest, self._read, lambda: [root])

    def _read(self, index: int, byte_range: ByteRange, into: memoryview) -> bool:
        return read_file(self._root / self._receipt.frozen.files[index].path, byte_range, into)

    def info(self, name: str) -> ObjectInfo | None:
        """Ignore the times of a prefetched file, whose bytes are checked."""
        found, index = super().info(name), self._index.get(self._place / name)
        if found is None or index is None:
            return found
        item = self._receipt.frozen.files[index]
        if found.size_bytes != item.size_bytes:
            what = f"the {found.size_bytes} bytes of {self._root / item.path} are not the {item.size_bytes}"
            raise self._other(index, what)
        return ObjectInfo(name, found.size_bytes, self._receipt.frozen.version)

    def open(self, name: str) -> LocalCopy:
        index = self._index.get(self._place / name)
        if index is None:
            return super().open(name)
        return _CheckedCopy(self._place / name, self.tuner, self, index)

    def is_good(self, index: int, byte_range: ByteRange, data: memoryview) -> bool:
        return self._checker.is_good(index, byte_range, data)

    def mend(self, index: int, byte_range: ByteRange, into: memoryview, cause: StoreError | None = None) -> None:
        """Repair bytes of the node cache that were damaged, or unreadable (``cause``).

        Raises IntegrityError: no good copy, or a user's directory, perhaps changed on purpose.
        """
        path = self._receipt.frozen.files[index].path
        if self._root.parent != (self._settings.local_root / "cache").resolve():
            what = f"bytes {byte_range.start}-{byte_range.stop} of {self._root / path} are not those"
            raise cause or self._other(index, what)
        try:
            view = open_entry(self._receipt.frozen, self._settings)
        except TierckptError as error:
            raise IntegrityError(
                f"bytes {byte_range.start}-{byte_range.stop} of {path} are damaged in the node cache, "
                f"and {self._receipt.frozen.uri} cannot be read: {error.message}",
                hint="Load it again when its store can be reached",
                file=path,
                entry=self._root,
                tier=Tier.LOCAL,
            ) from error
        with contextlib.closing(view):
            view.read_into(path, byte_range.start, into)

    def _other(self, index: int, what: str) -> IntegrityError:
        uri = self._receipt.frozen.uri
        return IntegrityError(
            f"{what} that were prefetched",
            hint=f"It is damaged, or was changed. Remove it and run `tierckpt prefetch {uri}` again; "
            f"if it was changed on purpose, remove {self._root / RECEIPT}, the list of prefetched files",
            file=self._receipt.frozen.files[index].path,
            entry=self._root,
            tier=Tier.LOCAL,
        )


def open_directory(directory: Path, settings: Settings, modes: tuple[ReadMode, ...] = MODEL_READ_MODES) -> Directory:
    """Verify ``directory`` if it, or a parent, was prefetched with digests.

    Raises IntegrityError while a prefetch replaces its files by another version.
    """
    tuner, resolved = read_tuner_for(settings, modes), directory.resolve()
    for root in (resolved, *resolved.parents):
        with contextlib.suppress(OSError, StoreError):
            if is_half_replaced(root):
                raise IntegrityError(
                    f"{root} holds files of two versions: a prefetch replaces them just now, or was interrupted",
                    hint="Load it after the prefetch has ended; if none runs, run the same `tierckpt prefetch` again",
                    entry=root,
                    tier=Tier.LOCAL,
                )
            if not (root / RECEIPT).exists():
                continue
            if (receipt := read_receipt(root)) is not None:
                return PrefetchedDirectory(directory, tuner, root, receipt, settings)
            log.warning("%s is damaged: what %s holds cannot be checked", root / RECEIPT, directory)
            break
    return Directory(directory, tuner)


class _CheckedCopy(LocalCopy):
    def __init__(self, path: Path, tuner: ReadTuner, prefetched: PrefetchedDirectory, index: int) -> None:
        super().__init__(path, Tier.LOCAL, tuner)
        self._prefetched, self._index = prefetched, index

    def read(
        self, byte_range: ByteRange, into: memoryview | None = None, bounce: memoryview | None = None, /
    ) -> Buffer:
        if into is None:
            into = memoryview(bytearray(byte_range.size_bytes))
        view = into[: byte_range.size_bytes]
        try:
            data = memoryview(super().read(byte_range, into, bounce))
        except StoreError as error:
            self._prefetched.mend(self._index, byte_range, view, error)
            return view
        if len(data) < len(view):
            return data
        if not self._prefetched.is_good(self._index, byte_range, view):
            self._prefetched.mend(self._index, byte_range, view)
        return view


@dataclass(frozen=True, slots=True)
class WeightChoice:
    variant: str = ""
    subfolder: str = ""
    index: str = ""


USUAL = WeightChoice()


def find_model(
    uri_or_dir: str | os.PathLike[str],
    settings: Settings,
    modes: tuple[ReadMode, ...] = MODEL_READ_MODES,
    choice: WeightChoice = USUAL,
) -> ModelTensors:
    """Close the place of the result after use.

    Raises CheckpointNotFoundError, ObjectNotFoundError, ConfigError (a choice with a single file), IntegrityError,
    StoreError.
    """
    if choice.subfolder:
        uri_or_dir = _below(uri_or_dir, choice.subfolder)
    directory, name = _directory_of(uri_or_dir, settings, modes)
    if name and (choice.variant or choice.index):
        directory.close()
        raise ConfigError(f"{directory.where}/{name} is one file", hint="Give its directory with variant= or index=")
    try:
        return open_model(directory, name, variant=choice.variant, index=choice.index)
    except BaseException:
        directory.close()
        raise


def _below(uri_or_dir: str | os.PathLike[str], subfolder: str) -> str:
    if not is_safe_path(subfolder.strip("/")):
        raise ConfigError(f"subfolder is {subfolder!r}", hint='Give a directory of the model, such as "unet"')
    return f"{text_of(uri_or_dir, 'a model').rstrip('/')}/{subfolder.strip('/')}"


def _directory_of(
    uri_or_dir: str | os.PathLike[str], settings: Settings, modes: tuple[ReadMode, ...]
) -> tuple[ModelDirectory, str]:
    if scheme_of(text_of(uri_or_dir, "a model")):
        location = check_location(parse_uri(uri_or_dir))
        is_file = location.name.endswith(SUFFIX)
        view = open_cached(location.uri, kind="object" if is_file else "directory", settings=settings)
        return CachedPlace(location.uri, view, settings, modes), view.only.path if view.only is not None else ""
    path = Path(parse_uri(uri_or_dir).path)
    with translated(path, Tier.SHARED):
        is_directory, is_file = path.is_dir(), path.is_file()
    if not (is_directory or is_file):
        raise CheckpointNotFoundError(f"{path} does not exist", hint="Give a directory, a .safetensors file or a URI")
    if is_directory:
        return open_directory(path, settings, modes), ""
    return open_directory(path.parent, settings, modes), path.name


class CachedPlace:
    def __init__(
        self, uri: str, view: CachedView, settings: Settings, modes: tuple[ReadMode, ...] = MODEL_READ_MODES
    ) -> None:
        self.where = uri
        self._view, self._settings, self._modes = view, settings, modes

    @property
    def threads(self) -> int:
        return REQUESTS_MAX

    def files(self) -> list[str]:
        return sorted(name for name in self._view.files if "/" not in name)

    def info(self, name: str) -> ObjectInfo | None:
        found = self._view.files.get(name)
        return ObjectInfo(name, found.size_bytes, found.etag) if found is not None else None

    def open(self, name: str) -> FileCopy:
        return _CachedCopy(self._view, name, self.where, read_tuner_for(self._settings, self._modes))

    def begin(self, names: list[str]) -> None:
        if self._view.directory is None:
            self._view.fill_in_background(names)

    def close(self) -> None:
        self._view.close()


class _CachedCopy:
    """No ``LocalCopy``: read times that include a store do not measure the disk, so no read mode is tried on it."""

    tier = Tier.LOCAL

    def __init__(self, view: CachedView, name: str, where: str, tuner: ReadTuner) -> None:
        self.where = f"{where}/{name}"
        self._view, self._name, self._tuner = view, name, tuner
        self._file: LocalCopy | None = None
        self._lock = threading.Lock()

    def read(
        self, byte_range: ByteRange, into: memoryview | None = None, bounce: memoryview | None = None, /
    ) -> Buffer:
        if into is None:
            return self._view.read(self._name, byte_range.start, byte_range.stop)
        if self._view.landed(self._name, byte_range.start, byte_range.stop):
            # The view handles a file that was renamed, removed or damaged.
            with contextlib.suppress(TierckptError):
                found = self._available_file().read(byte_range, into, bounce)
                if len(found) == byte_range.size_bytes and self._view.is_good(self._name, byte_range.start, found):
                    return found
        part = into[: byte_range.size_bytes]
        self._view.read_into(self._name, byte_range.start, part)
        return part

    def is_in_memory(self, byte_range: ByteRange, /) -> bool:
        if not self._view.landed(self._name, byte_range.start, byte_range.stop):
            return False
        with contextlib.suppress(TierckptError):
            return self._available_file().is_in_memory(byte_range)
        return False

    def _available_file(self) -> LocalCopy:
        with self._lock:
            if self._file is None:
                self._file = LocalCopy(self._view.path(self._name), Tier.LOCAL, self._tuner)
            return self._file

    def quarantine(self) -> None: ...

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
