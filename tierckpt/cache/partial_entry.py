"""A directory that several processes fill, and one rename publishes when it is whole.

docs/internals/cache.md lists its files. A Hub's version has a digest of each whole file: ``sha256:HEX`` of the bytes
(LFS), or ``git:HEX``, the SHA-1 of a git blob, which detects damage but not forgery.

Invariants:
    G1  A line is appended, by one O_APPEND write, after its bytes were verified and written. A torn line is no line.
    G2  Processes that write the same chunk write the same bytes: of one frozen version, and verified.
    G3  Lines are believed for the same boot only: a power cut may lose the bytes.
    G4  A new directory is renamed when all its bytes and the receipt are durable. Files move into an existing one (R1
        of ``replacement``).
    G5  Block digests are used only after they pass their chunk's digest.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from ..disk.durable import (
    closing_file,
    fsync_dir,
    make_dirs,
    matching,
    name_new,
    publish,
    read_whole,
    remove_tree,
    translated,
    write_new,
)
from ..disk.file_io import allocate, clone_range, read_into
from ..disk.file_lock import LEASE_ATTEMPTS, SILENT_SECONDS, Claims, HostLease, holder_name, locked
from ..disk.processes import boot_id, companion_path, stem_of
from ..disk.quarantine import open_regular
from ..errors import CheckpointError, IntegrityError, ManifestError, ObjectNotFoundError, StoreError, TierckptError
from ..format.layout import PRIVATE_DIR
from ..format.manifest import BLOCK_DIGEST_BYTES, MANIFEST_BYTES_MAX, ChunkDigest, blocks_of, digest_of, has_digest
from ..ownership import file_mode
from ..poll import Poll
from ..stores.verified_read import corrupt
from ..telemetry import logger
from ..types import Buffer, ByteRange, Tier
from .direct_write import write_at
from .file_set import FileSet, FileSpec, Receipt, decode
from .receipt import put_receipt, read_receipt, version_in, whole_receipt
from .replacement import Replacement, folders_of, inherit_group, other_weights, replacement_lock

READ_BYTES = 1 << 20


def check_content(file: int, item: FileSpec, where: str) -> None:
    """Raise IntegrityError if ``file`` differs from a digest in the etag of ``item``. Cost: one read."""
    kind, _, expected = (item.etag or "").partition(":")
    if kind == "sha256":
        digest = hashlib.sha256()
    elif kind == "git":
        digest = hashlib.sha1(b"blob %d\0" % item.size_bytes, usedforsecurity=False)
    else:
        return
    into, offset = bytearray(READ_BYTES), 0
    while count := os.preadv(file, [into], offset):
        digest.update(memoryview(into)[:count])
        offset += count
    if digest.hexdigest() != expected:
        raise IntegrityError(
            f"{item.path} of {where} has not the {kind} that its repository lists",
            hint="It was damaged in transit or on the disk: run the command again to fetch it again",
            file=item.path,
            tier=Tier.SHARED,
        )


log = logger("cache")

BLOCKS = f"{PRIVATE_DIR}/prefetched.blocks"
FILLING = f"{PRIVATE_DIR}/filling"
ENTRY = f"{FILLING}/entry.json"
CLAIMS = f"{FILLING}/claims"
HOST = f"{FILLING}/host"
SUFFIX = ".incoming"
FILLS, PUBLISHES = 0, 1
"""Bytes of the claims file: shared by the filling processes, and exclusive to the publisher."""
STREAMS, FETCHES, SHARED = 1 << 32, 1 << 40, 1 << 48
"""First byte of each range: streamed files, fetched chunks, and chunks fetched together with other nodes."""
STREAM = -1
APPENDS_MAX = 8
OTHERS_SHOWN = 8
REMOVED_ERRNOS = {errno.ENOENT, errno.ESTALE}
"""Errors of an open file that another host removed."""

ChunkAction: TypeAlias = Literal["fetch", "landed", "later"]

_LANDED = re.compile(rb"(\d+) (\d+) (t?[0-9a-f]{32})")
_MARK = re.compile(rb"([!=])(\d+)\.")


def incoming_of(directory: Path, version: str) -> Path:
    """Return the directory that gathers the files: in an existing ``directory`` (perhaps a mount), else next to it."""
    inside = directory / PRIVATE_DIR / f"{version[:8]}{SUFFIX}"
    return inside if directory.exists() else incoming_next_to(directory, version)


def incoming_next_to(directory: Path, version: str) -> Path:
    return companion_path(directory, f".{version[:8]}{SUFFIX}")


def landed_in(directory: Path, version: str) -> dict[str, int]:
    incoming = incoming_of(directory, version)
    frozen = read_entry(incoming)
    if frozen is None or frozen.version != version:
        return {}
    lines = _read_lines(incoming, frozen)
    return {item.path: lines.bytes_of(index) for index, item in enumerate(frozen.files)}


def read_landed(incoming: Path) -> Receipt | None:
    """Return the content of ``incoming``; missing chunks have the digest ''."""
    if (frozen := read_entry(incoming)) is None:
        return None
    return Receipt(frozen, _read_lines(incoming, frozen).digests())


def _read_lines(incoming: Path, frozen: FileSet) -> ProgressLog:
    lines = ProgressLog(frozen)
    with contextlib.suppress(OSError, TierckptError), os.fdopen(open_regular(lines.path(incoming)), "rb") as file:
        lines.read_on(file.fileno())
    return lines


def read_entry(incoming: Path) -> FileSet | None:
    try:
        return _entry_of(incoming)
    except (ObjectNotFoundError, ManifestError):
        return None


def _entry_of(incoming: Path) -> FileSet:
    """Raises ObjectNotFoundError: there is no fill. ManifestError: damaged."""
    return decode(read_whole(incoming / ENTRY, MANIFEST_BYTES_MAX), where=str(incoming / ENTRY)).frozen


def is_filled_here(incoming: Path) -> bool:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError), closing_file(os.open(incoming / CLAIMS, flags)) as file:
        return bool(locked(file, FILLS, FILLS + 1))
    return False


def is_being_filled(incoming: Path) -> bool:
    lease = HostLease(incoming / HOST, holder_name(has_locks=True))
    return is_filled_here(incoming) or lease.is_held_elsewhere()


def remove_dir(directory: Path) -> None:
    aside = directory.with_name(f".{secrets.token_hex(6)}.evicted")
    with translated(directory), contextlib.suppress(FileNotFoundError):
        directory.rename(aside)
        remove_tree(aside, ignore_errors=True)


class ProgressLog:
    def __init__(self, frozen: FileSet) -> None:
        self.frozen = frozen
        self.landed: dict[int, dict[int, str]] = {}
        self.landed_bytes = 0
        self.durable: set[int] = set()
        self.order: list[tuple[int, int]] = []
        """In landing order. A forgotten chunk that landed again appears twice."""
        self.offset = 0

    def path(self, incoming: Path) -> Path:
        """Other boots (G3) and chunk sizes have other files."""
        return incoming / FILLING / f"progress-{boot_id()[:8]}-{self.frozen.chunk_size_bytes}"

    def read_on(self, file: int) -> None:
        data = b""
        while piece := os.pread(file, 1 << 20, self.offset + len(data)):
            data += piece
        whole = data.rpartition(b"\n")[0]
        for line in whole.split(b"\n"):
            self._take(line)
        self.offset += len(whole)  # the last line feed may begin the next record

    def _take(self, line: bytes) -> None:
        if match := _LANDED.fullmatch(line):
            index, chunk = int(match[1]), int(match[2])
            if index < len(self.frozen.files) and chunk < self.frozen.chunks_of(index):
                chunks = self.landed.setdefault(index, {})
                if chunk not in chunks:
                    self.landed_bytes += self.frozen.chunk_range(index, chunk).size_bytes
                    self.order.append((index, chunk))
                chunks[chunk] = match[3].decode()
        elif match := _MARK.fullmatch(line):
            index = int(match[2])
            if match[1] == b"=":
                self.durable.add(index)
            else:
                self.landed_bytes -= self.bytes_of(index)
                self.landed.pop(index, None)
                self.durable.discard(index)

    def digests(self) -> tuple[tuple[str, ...], ...]:
        """Return the digest of each chunk by file; '' for a missing chunk."""
        chunks = (range(self.frozen.chunks_of(index)) for index in range(len(self.frozen.files)))
        return tuple(tuple(self.landed.get(i, {}).get(c, "") for c in each) for i, each in enumerate(chunks))

    def take_all(self, landed: Sequence[Sequence[str]]) -> None:
        for index, digests in enumerate(landed):
            known = self.landed.setdefault(index, {})
            self.order += [(index, chunk) for chunk in range(len(digests)) if chunk not in known]
            known.update(enumerate(digests))
        self.landed_bytes = sum(map(self.bytes_of, range(len(self.frozen.files))))

    def bytes_of(self, index: int) -> int:
        return sum(self.frozen.chunk_range(index, chunk).size_bytes for chunk in self.landed.get(index, ()))


class PartialEntry:
    """One process's part in filling ``directory``. Blocking, thread-safe."""

    def __init__(
        self,
        directory: Path,
        frozen: FileSet,
        *,
        preallocate: bool,
        is_selected: Callable[[str], bool] = lambda path: True,
    ) -> None:
        """``is_selected``: True for paths that would be in ``frozen`` if the source had them. Other files stay."""
        self.directory, self._is_selected = directory, is_selected
        self._replaces = version_in(directory)
        make_dirs(directory.parent)
        self.incoming = incoming_of(directory, frozen.version)
        self.preallocate = preallocate
        self._lock = threading.Lock()
        self._prepared: set[int] = set()
        self._log = -1
        with contextlib.ExitStack() as stack:
            with translated(self.incoming):
                if not self._is_new:
                    make_dirs(self.incoming, is_durable=False)
                    inherit_group(directory, self.incoming)
                make_dirs(self.incoming / FILLING, is_durable=False)  # made durable at publication
                self.claims = Claims(self.incoming / CLAIMS)
                stack.callback(self.claims.close)
                # First: a directory with neither is being made (_is_begun).
                self.claims.share(FILLS)
                self.frozen = self._agree(frozen)
                self._lines = ProgressLog(self.frozen)
                self.progress_path = self._lines.path(self.incoming)
                self._log = open_regular(
                    self.progress_path, os.O_RDWR | os.O_APPEND | os.O_CREAT, file_mode(self.progress_path)
                )
            stack.pop_all()
        self.host = HostLease(self.incoming / HOST, holder_name(has_locks=self.claims.has_locks))
        self.refresh()

    def _agree(self, frozen: FileSet) -> FileSet:
        """Adopt the existing record, with its chunk size.

        A single read tells missing from damaged: between two another process may write it.
        """
        path = self.incoming / ENTRY
        for _ in range(LEASE_ATTEMPTS):
            with contextlib.suppress(ObjectNotFoundError):
                with contextlib.suppress(ManifestError):
                    known = _entry_of(self.incoming)
                    if known.version == frozen.version:
                        return known
                log.warning("%s is damaged: beginning again", path)
                for left in self._lists():
                    left.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            temporary = path.with_name(f"entry.{secrets.token_hex(6)}")
            write_new(temporary, frozen.encode(), file_mode(path))
            try:
                name_new(temporary, path)  # one of several first processes succeeds
            except FileExistsError:
                pass
            except OSError:  # the file system cannot decide
                temporary.replace(path)
            temporary.unlink(missing_ok=True)
        raise StoreError(f"{path} keeps other bytes than were written", path=path, tier=Tier.LOCAL)

    def _lists(self) -> list[Path]:
        return matching(self.incoming / FILLING, "progress-*")

    def close(self) -> None:
        if self._log < 0:
            return
        self.claims.close()
        self.host.release(is_last=not is_filled_here(self.incoming))
        os.close(self._log)
        self._log = -1

    def tidy(self) -> None:
        """Remove a directory that a late process made after publication."""
        if self.incoming.exists() and self.is_published() and not is_being_filled(self.incoming):
            with contextlib.suppress(TierckptError):
                remove_dir(self.incoming)

    def progress_bytes(self) -> dict[str, int]:
        found = {}
        for path in self._lists():
            with contextlib.suppress(OSError):
                found[path.name] = path.stat().st_size
        return found

    def _claim_of(self, index: int, chunk: int) -> int:
        return STREAMS + index if chunk == STREAM else FETCHES + self.frozen.first_ordinals[index] + chunk

    @contextlib.contextmanager
    def claimed(self, index: int, chunk: int) -> Iterator[ChunkAction]:
        claim = self._claim_of(index, chunk)
        if not self.claims.take(claim):
            yield "later"
            return
        try:
            self.refresh()
            yield "landed" if self.has(index, chunk) else "fetch"
        finally:
            self.claims.release(claim)

    def is_claimed(self, index: int, chunk: int) -> bool:
        claim = self._claim_of(index, chunk)
        return bool(self.claims.held(claim, claim + 1))

    async def await_other(self, index: int, chunk: int, timeout_seconds: float) -> Literal["landed", "free", "stalled"]:
        async for _ in Poll(timeout_seconds):
            self.refresh()
            if self.has(index, chunk):
                return "landed"
            if not self.is_claimed(index, chunk):
                return "free"
        return "stalled"

    def count_fetches(self) -> int:
        return len(self.claims.held(FETCHES, FETCHES + self.frozen.first_ordinals[-1]))

    def mark_shared(self, index: int, chunk: int, is_fetched: bool) -> None:
        mark = self.claims.take if is_fetched else self.claims.release
        mark(SHARED + self.frozen.first_ordinals[index] + chunk)

    def refresh(self) -> None:
        """Read lines of other processes. Cost: one fstat when there are none."""
        with self._lock, translated(self.progress_path):
            try:
                if self._log >= 0 and os.fstat(self._log).st_size > self._lines.offset:
                    self._lines.read_on(self._log)
            except OSError as error:
                if error.errno not in REMOVED_ERRNOS:
                    raise
                # On a network mount, another host has published.
                if (receipt := whole_receipt(self.directory, self.frozen.version)) is not None:
                    self._lines.take_all(receipt.landed)

    @property
    def landed_bytes(self) -> int:
        return self._lines.landed_bytes

    def has(self, index: int, chunk: int) -> bool:
        return chunk in self._lines.landed.get(index, ())

    def has_range(self, index: int, byte_range: ByteRange) -> bool:
        """Also reads new lines of other processes."""
        chunks = self.frozen.touched(byte_range)
        if all(self.has(index, chunk) for chunk in chunks):
            return True
        self.refresh()
        return all(self.has(index, chunk) for chunk in chunks)

    def has_file(self, index: int) -> bool:
        return len(self._lines.landed.get(index, ())) == self.frozen.chunks_of(index)

    def has_all(self) -> bool:
        return all(self.has_file(index) for index in range(len(self.frozen.files)))

    def digest(self, index: int, chunk: int) -> str:
        return self._lines.landed.get(index, {}).get(chunk, "")

    def store_chunk(self, index: int, chunk: int, data: Buffer, digest: str = "", clone_of: Path | None = None) -> None:
        """Verify and write one chunk, then record it (G1).

        ``clone_of``: a file to share blocks with. Raises IntegrityError, with nothing written; CapacityError,
        StoreError.
        """
        item, offset = self.frozen.files[index], self.frozen.chunk_range(index, chunk)
        digest = digest or digest_of(data)
        if len(data) != offset.size_bytes or (item.digests and not same_digest(data, digest, item.digests[chunk])):
            raise corrupt(item.path, offset, Tier.SHARED, self.frozen.uri)
        path = self.prepare(index)
        if clone_of is None or not clone_range(clone_of, path, offset):
            write_at(path, data, offset.start)
        self._put_blocks(index, chunk, digest.blocks if isinstance(digest, ChunkDigest) else blocks_of(data))
        self.append_line(f"{index} {chunk} {digest}")
        self.refresh()
        if not self.has(index, chunk):
            raise StoreError(f"{self.progress_path} loses lines that were appended", tier=Tier.LOCAL)
        if self.has_file(index):
            self._make_durable(index)

    def take_over(self, index: int, chunk: int, digest: str, blocks: bytes) -> None:
        """Note a chunk of a file linked from another version, with its block digests if known (G5)."""
        if len(blocks) == self.frozen.blocks_range(index, chunk).size_bytes:
            self._put_blocks(index, chunk, blocks)
        self.append_line(f"{index} {chunk} {digest}")

    def keep(self, index: int) -> None:
        """Make a file durable after ``take_over``. A damaged one is forgotten, and fetched later."""
        self.refresh()
        if self.has_file(index):
            with contextlib.suppress(IntegrityError):
                self._make_durable(index)
            self.refresh()

    def _put_blocks(self, index: int, chunk: int, blocks: bytes) -> None:
        """Write block digests before the chunk's line."""
        if len(blocks) == BLOCK_DIGEST_BYTES:
            return
        path = self.incoming / BLOCKS
        with translated(path), closing_file(open_regular(path, os.O_WRONLY | os.O_CREAT, file_mode(path))) as file:
            os.pwrite(file, blocks, self.frozen.blocks_range(index, chunk).start)

    def append_line(self, line: str) -> None:
        record = f"\n{line}\n".encode()
        with translated(self.progress_path):
            for _ in range(APPENDS_MAX):  # the whole line follows a torn one
                if os.write(self._log, record) == len(record):
                    return
        raise StoreError(f"{self.progress_path} could not be appended to", path=self.progress_path, tier=Tier.LOCAL)

    def prepare(self, index: int) -> Path:
        """Make the file exist with its full size. Idempotent: files are only extended."""
        item = self.frozen.files[index]
        path = self.incoming / item.path
        if index in self._prepared:
            return path
        if not (self.incoming / ENTRY).exists():
            raise ObjectNotFoundError(f"{self.incoming} was published or removed", tier=Tier.LOCAL)
        with translated(path):
            make_dirs(path.parent, is_durable=False)
            self.refresh()
            had_chunks = bool(self._lines.landed.get(index))
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file_mode(path))
                if had_chunks and self.is_published():  # another process made the directory again
                    os.close(file)
                    raise ObjectNotFoundError(f"{self.incoming} was published", tier=Tier.LOCAL)
                if had_chunks:
                    log.warning("%s is missing: fetching it again", path)
                    self.append_line(f"!{index}.")
            except FileExistsError:
                self._check_own_name(path, item)
                file = open_regular(path, os.O_RDWR)
            with closing_file(file):
                status = os.fstat(file)
                if self.preallocate and item.size_bytes > status.st_blocks * 512:
                    allocate(file, item.size_bytes)
                if status.st_size < item.size_bytes:
                    os.ftruncate(file, item.size_bytes)
        self._prepared.add(index)
        return path

    def _check_own_name(self, path: Path, item: FileSpec) -> None:
        """Raise StoreError if another file's name differs by case only (vfat, SMB)."""
        twins = [other.path for other in self.frozen.files if other.path.casefold() == item.path.casefold()]
        if len(twins) > 1 and path.name not in os.listdir(path.parent):  # noqa: PTH208
            raise StoreError(
                f"the file system of {self.directory} takes {' and '.join(twins)} for one name",
                hint="Choose a directory on a file system that tells them apart, or leave one out (--exclude)",
                path=path,
                tier=Tier.LOCAL,
            )

    def read(self, index: int, byte_range: ByteRange, into: memoryview) -> bool:
        if not self.has_range(index, byte_range):
            return False
        path = self.frozen.files[index].path
        if read_file(self.incoming / path, byte_range, into):
            return True
        return self.is_published() and read_file(self.directory / path, byte_range, into)

    def is_published(self) -> bool:
        return whole_receipt(self.directory, self.frozen.version) is not None

    def publish(self) -> bool:
        """Publish the directory when every chunk has landed.

        False while another process does, or after a failed check. Raises StoreError, CapacityError: an fsync failed.
        """
        if self.is_published():
            return True
        if not self.claims.take(PUBLISHES):
            return False
        try:
            if self.is_published():
                return True
            if not (self.incoming / ENTRY).exists():
                raise StoreError(
                    f"{self.incoming} was removed while it was being filled", hint="Run it again", path=self.incoming
                )
            self.refresh()
            if not self.has_all():
                return False
            with translated(self.directory):
                if self._is_new:  # one rename, which fails unless the target is missing or empty
                    self._publish()
                    return True
                with replacement_lock(self.directory) as is_ours:
                    if not is_ours:
                        return False
                    if version_in(self.directory) not in (self._replaces, self.frozen.version, None):
                        raise self._lost_error()
                    if not self.is_published():
                        self._publish()
            return True
        finally:
            self.claims.release(PUBLISHES)

    @property
    def _is_new(self) -> bool:
        return self.incoming.parent == self.directory.parent

    def _lost_error(self) -> CheckpointError:
        receipt = read_receipt(self.directory)
        other = f" of {receipt.frozen.uri}" if receipt is not None and receipt.frozen.uri != self.frozen.uri else ""
        return CheckpointError(
            f"another prefetch has filled {self.directory} with another version{other} meanwhile; "
            f"{self.frozen.uri} was not put there",
            hint="Run it again to put this version there, or give another directory",
            path=self.directory,
            tier=Tier.LOCAL,
        )

    def _publish(self) -> None:
        for index in range(len(self.frozen.files)):
            self.prepare(index)
            if index not in self._lines.durable:
                self._make_durable(index)
        if not self.has_all():
            raise StoreError(f"files of {self.incoming} were removed while it was being filled", hint="Run it again")
        receipt = self.frozen.encode(self._lines.digests())
        if self._is_new:
            put_receipt(self.incoming, receipt, self.incoming / FILLING)
            for folder in folders_of(self.incoming, (item.path for item in self.frozen.files)):
                fsync_dir(folder)
            try:
                publish(self.incoming, self.directory)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise self._lost_error() from error
                raise
        else:
            self._move_in(receipt)
        remove_stale_directory(self.directory)
        if weights := other_weights(self.directory, self.frozen):
            log.warning(
                "%s has files that look like weights and are not of %s: %s. A loader may read them",
                self.directory,
                self.frozen.uri,
                ", ".join(weights[:OTHERS_SHOWN]),
            )

    def _move_in(self, receipt: bytes) -> None:
        scratch = self.incoming / FILLING
        replacement = Replacement(self.directory, self.incoming, self.frozen, self._is_selected, scratch)
        replacement.begin()
        for left in self._lists():  # before the first move: they say that it is in ``incoming``
            left.unlink()
        replacement.move()
        with contextlib.suppress(FileNotFoundError):
            (self.incoming / BLOCKS).replace(self.directory / BLOCKS)
        replacement.end(receipt)
        remove_tree(self.incoming, ignore_errors=True)

    def _make_durable(self, index: int) -> None:
        """Check a whole file and fsync it. On failure, forget all of its chunks."""
        path = self.incoming / self.frozen.files[index].path
        with translated(path), closing_file(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as file:
            try:
                check_content(file, self.frozen.files[index], self.frozen.uri)
                os.fsync(file)
            except (OSError, IntegrityError):
                self.append_line(f"!{index}.")
                raise
        self.append_line(f"={index}.")
        self.refresh()


def same_digest(data: Buffer, digest: str, expected: str) -> bool:
    return digest == expected or has_digest(data, expected)


def read_file(path: Path, byte_range: ByteRange, into: memoryview) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    with closing_file(file), translated(path):
        return read_into(file, into[: byte_range.size_bytes], byte_range.start) == byte_range.size_bytes


def remove_stale_directory(directory: Path) -> None:
    remove_tree(directory / FILLING, ignore_errors=True)


def _is_begun(incoming: Path) -> bool:
    """True while a process makes ``incoming``: recent and without a record."""
    with contextlib.suppress(OSError):
        return not (incoming / ENTRY).exists() and time.time() - incoming.stat().st_mtime < SILENT_SECONDS
    return False


def remove_abandoned(directory: Path, keep: Path) -> None:
    inside = directory / PRIVATE_DIR
    companion_path = matching(directory.parent, f".{glob.escape(stem_of(directory.name))}.*{SUFFIX}")
    for left in [*companion_path, *matching(inside, f"*{SUFFIX}")]:
        if left != keep and not is_being_filled(left) and not _is_begun(left):
            with contextlib.suppress(TierckptError):
                remove_dir(left)
