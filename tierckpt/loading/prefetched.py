"""Directories that ``tierckpt prefetch`` has filled, read by path: their receipts have digests, which are checked."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ..cache.file_set import Receipt
from ..cache.partial_entry import RECEIPT, read_file, read_receipt
from ..cache.verifier import Checker
from ..client import open_entry
from ..config import Settings
from ..disk.read_tuner import ReadTuner
from ..errors import IntegrityError, StoreError, TierckptError
from ..read.replicated_file import LocalCopy
from ..telemetry import logger
from ..types import Buffer, ByteRange, ObjectInfo, Tier
from .model import Directory

log = logger("load")


class Prefetched:
    """What was prefetched to ``root``, and how its bytes are known to be good. Those of the node cache are mended."""

    def __init__(self, root: Path, receipt: Receipt, settings: Settings) -> None:
        self.root, self.receipt, self.settings = root, receipt, settings
        self._index = {item.path: index for index, item in enumerate(receipt.frozen.files)}
        self._checker = Checker(receipt.frozen, receipt.digest, self._read, lambda: [root])

    def index(self, path: Path) -> int | None:
        """Which of the files that were prefetched ``path`` is; None: it is somebody else's, and nothing is known."""
        return self._index.get(path.relative_to(self.root).as_posix())

    def _read(self, index: int, byte_range: ByteRange, into: memoryview) -> bool:
        return read_file(self.root / self.receipt.frozen.files[index].path, byte_range, into)

    def check_size(self, index: int, size_bytes: int) -> None:
        """Raise IntegrityError: a file that was prefetched has another size by now."""
        item = self.receipt.frozen.files[index]
        if size_bytes != item.size_bytes:
            raise self._other(index, f"the {size_bytes} bytes of {self.root / item.path} are not the {item.size_bytes}")

    def _other(self, index: int, what: str) -> IntegrityError:
        uri = self.receipt.frozen.uri
        return IntegrityError(
            f"{what} that were prefetched",
            hint=f"It is damaged, or somebody has changed it. Remove it and run `tierckpt prefetch {uri}` as before; "
            f"if it was changed on purpose, remove {self.root / RECEIPT}, which says what was prefetched",
            file=self.receipt.frozen.files[index].path,
            entry=self.root,
            tier=Tier.LOCAL,
        )

    def is_good(self, index: int, byte_range: ByteRange, data: memoryview) -> bool:
        return self._checker.is_good(index, byte_range, data)

    def mend(self, index: int, byte_range: ByteRange, into: memoryview, cause: StoreError | None = None) -> None:
        """Fill ``into`` with the right bytes, of which this node has wrong ones, or none that it can read (``cause``).

        Raises:
            IntegrityError: they are nowhere to be had, or the directory is the user's, who may have meant it.
        """
        path = self.receipt.frozen.files[index].path
        if self.root.parent != (self.settings.local_root / "cache").resolve():
            what = f"bytes {byte_range.start}-{byte_range.stop} of {self.root / path} are not those"
            raise cause or self._other(index, what)
        try:
            view = open_entry(self.receipt.frozen, self.settings)
        except TierckptError as error:
            raise IntegrityError(
                f"bytes {byte_range.start}-{byte_range.stop} of {path} are damaged in the node cache, "
                f"and {self.receipt.frozen.uri} cannot be read: {error.message}",
                hint="Load it again when its store can be reached",
                file=path,
                entry=self.root,
                tier=Tier.LOCAL,
            ) from error
        with contextlib.closing(view):
            view.read_into(path, byte_range.start, into)


def find_prefetched(directory: Path, settings: Settings) -> Prefetched | None:
    """What was prefetched to ``directory``, or to one above it; None where nobody knows any digests."""
    place = directory.resolve()
    for root in (place, *place.parents):
        with contextlib.suppress(OSError, StoreError):
            if not (root / RECEIPT).exists():
                continue
            if (receipt := read_receipt(root)) is not None:
                return Prefetched(root, receipt, settings)
            log.warning("%s is damaged: what %s holds cannot be checked", root / RECEIPT, directory)
            return None
    return None


class PrefetchedDirectory(Directory):
    """``Directory`` whose files are verified while they are read, those of them that were prefetched."""

    def __init__(self, path: Path, tuner: ReadTuner, prefetched: Prefetched) -> None:
        super().__init__(path, tuner)
        self._prefetched, self._place = prefetched, path.resolve()

    def info(self, name: str) -> ObjectInfo | None:
        """Of a file that was prefetched the version: its bytes are checked, so that its times need not be."""
        found, index = super().info(name), self._prefetched.index(self._place / name)
        if found is None or index is None:
            return found
        self._prefetched.check_size(index, found.size_bytes)
        return ObjectInfo(name, found.size_bytes, self._prefetched.receipt.frozen.version)

    def open(self, name: str) -> LocalCopy:
        index = self._prefetched.index(self._place / name)
        if index is None:
            return super().open(name)
        return _CheckedCopy(self._place / name, self._tuner, self._prefetched, index)


class _CheckedCopy(LocalCopy):
    """A file of a ``PrefetchedDirectory``."""

    def __init__(self, path: Path, tuner: ReadTuner, prefetched: Prefetched, index: int) -> None:
        super().__init__(path, Tier.LOCAL, tuner)
        self._prefetched, self._index = prefetched, index

    def read(
        self, byte_range: ByteRange, into: memoryview | None = None, through: memoryview | None = None, /
    ) -> Buffer:
        if into is None:
            into = memoryview(bytearray(byte_range.size_bytes))
        wanted = into[: byte_range.size_bytes]
        try:
            data = memoryview(super().read(byte_range, into, through))
        except StoreError as error:
            self._prefetched.mend(self._index, byte_range, wanted, error)
            return wanted
        if len(data) < len(wanted):
            return data  # whoever asked says that it is cut short
        if not self._prefetched.is_good(self._index, byte_range, wanted):
            self._prefetched.mend(self._index, byte_range, wanted)
        return wanted
