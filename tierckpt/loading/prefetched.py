"""Directories filled by ``tierckpt prefetch``, read by path and verified by their receipts' digests."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ..cache.file_set import Receipt
from ..cache.partial_entry import read_file
from ..cache.receipt import RECEIPT, is_half_replaced, read_receipt
from ..cache.verifier import Checker
from ..config import Settings
from ..disk.io_tuner import MODEL_READ_MODES, ReadMode, ReadTuner, read_tuner_for
from ..errors import IntegrityError, StoreError, TierckptError
from ..read.file_copies import LocalCopy
from ..telemetry import logger
from ..types import Buffer, ByteRange, ObjectInfo, Tier
from .cached_view import open_entry
from .model_files import Directory

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
                raise _half_replaced(root)
            if not (root / RECEIPT).exists():
                continue
            if (receipt := read_receipt(root)) is not None:
                return PrefetchedDirectory(directory, tuner, root, receipt, settings)
            log.warning("%s is damaged: what %s holds cannot be checked", root / RECEIPT, directory)
            break
    return Directory(directory, tuner)


def _half_replaced(root: Path) -> IntegrityError:
    return IntegrityError(
        f"{root} holds files of two versions: a prefetch replaces them just now, or was interrupted",
        hint="Load it after the prefetch has ended; if none runs, run the same `tierckpt prefetch` again",
        entry=root,
        tier=Tier.LOCAL,
    )


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
