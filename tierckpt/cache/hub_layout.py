"""Prefetch into the cache of Hugging Face libraries, by their "Hub local cache" documentation.

    models--org--name/blobs/<sha256, or git's sha1>      the bytes
    models--org--name/snapshots/<commit>/PATH            relative links to them
    models--org--name/refs/<revision>                    the commit
    models--org--name/.tierckpt/<commit>                 files in flight

Invariants:
    L1  A blob appears whole, checked and durable, by a hard link; a snapshot with all its links, by a rename; then a
        ref. So a reader finds all requested files or nothing.
    L2  Every step can be repeated: the next prefetch finishes a killed one.
    L3  Without symbolic links (SMB, exFAT) a snapshot holds hard links or copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.catalog import file_size
from ..disk.durable import (
    CANNOT_LINK,
    durable_write,
    fsync_dir,
    hard_link,
    link_or_copy,
    make_dirs,
    matching,
    remove_tree,
    translated,
)
from ..disk.processes import is_abandoned, temporary_of_this_process
from ..errors import ConfigError, IntegrityError, StoreError
from ..format.layout import PRIVATE_DIR
from ..format.manifest import is_safe_path
from ..stores.base import Store
from ..stores.hub.api import Repository
from ..stores.hub.store import HubStore
from .file_set import FileSet, FileSpec
from .node_cache import DIGESTS_AT_A_TIME, CacheCheck
from .partial_entry import check_content
from .prefetch import PrefetchResult, fill_directory
from .receipt import read_receipt


async def fill_hub_cache(store: HubStore, files: Sequence[FileSpec], cache: Path, **options: Any) -> PrefetchResult:
    """Fill the Hugging Face cache ``cache`` with ``files``; ``directory`` is the snapshot.

    ``options`` are those of ``fill_directory``. Raises as that, and ConfigError: the revision cannot be a file name.
    """
    repository, commit = store.repository, store.commit
    if not is_safe_path(repository.revision):
        raise ConfigError(f"the revision {repository.revision!r} cannot be a file name")
    root = cache / repository.folder
    await asyncio.to_thread(_finish_all, root)
    links = root / "snapshots" / commit / repository.path
    missing = [item for item in files if not (_is_there(_blob(root, item), item) or _is_file(links, item))]
    size_bytes = sum(item.size_bytes for item in files)
    missing_bytes = sum(item.size_bytes for item in missing)
    result = PrefetchResult(directory=root, files=len(files), size_bytes=size_bytes)
    if missing:
        result = await fill_directory(store, missing, root / PRIVATE_DIR / commit, **options)
        await asyncio.to_thread(_finish, root, root / PRIVATE_DIR / commit)
    snapshot = await asyncio.to_thread(_link, root, repository, commit, files)
    here_bytes = result.here_bytes + size_bytes - missing_bytes
    return replace(result, directory=snapshot, files=len(files), size_bytes=size_bytes, here_bytes=here_bytes)


def hub_of(store: Store) -> HubStore:
    if not isinstance(store, HubStore):
        raise ConfigError("a Hugging Face cache takes hf:// URIs", hint="Give hf://ORG/NAME")
    return store


async def check_hub_cache(store: HubStore, frozen: FileSet, cache: Path) -> CacheCheck:
    """Digest the files of ``frozen`` in the Hugging Face cache, by the names that libraries read.

    ``missing``: files without link or blob, and a ref to another commit.
    """
    repository, commit = store.repository, store.commit
    root = cache / repository.folder
    snapshot = root / "snapshots" / commit
    found = CacheCheck(frozen.uri, "whole", snapshot / repository.path, len(frozen.files), frozen.size_bytes, 0)
    read_slots = asyncio.Semaphore(DIGESTS_AT_A_TIME)

    async def one(item: FileSpec) -> None:
        async with read_slots:
            try:
                await asyncio.to_thread(_check_file, snapshot / repository.path / item.path, item)
                found.here_bytes += item.size_bytes
            except (FileNotFoundError, NotADirectoryError):
                found.missing[item.path] = 0 if _is_there(_blob(root, item), item) else item.size_bytes
            except (IntegrityError, OSError) as error:
                found.bad[item.path] = error.message if isinstance(error, IntegrityError) else str(error)

    await asyncio.gather(*map(one, frozen.files))
    ref = root / "refs" / repository.revision
    is_named = repository.is_commit or await asyncio.to_thread(_text_of, ref) == commit
    if len(found.missing) == len(frozen.files) and not snapshot.exists():
        found.state, found.directory = "outdated" if matching(root / "snapshots", "*") else "absent", None
    elif found.missing or found.bad or not is_named:
        found.state = "partial"
        found.missing |= {} if is_named else {f"refs/{repository.revision}": 0}
    return found


def _check_file(path: Path, item: FileSpec) -> None:
    with path.open("rb", buffering=0) as file:
        size_bytes, where = os.fstat(file.fileno()).st_size, str(path.resolve())
        if size_bytes != item.size_bytes:
            raise IntegrityError(f"{where} has {size_bytes} bytes, its repository lists {item.size_bytes}")
        check_content(file.fileno(), item, where)


def _text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _blob(root: Path, item: FileSpec) -> Path:
    return root / "blobs" / (item.etag or "").partition(":")[2]


def _is_there(blob: Path, item: FileSpec) -> bool:
    return file_size(blob) == item.size_bytes


def _is_file(directory: Path, item: FileSpec) -> bool:
    path = directory / item.path
    return not path.is_symlink() and _is_there(path, item)


def _finish_all(root: Path) -> None:
    for fetched in matching(root / PRIVATE_DIR, "*"):
        if is_abandoned(fetched.name):
            remove_tree(fetched, ignore_errors=True)
        else:
            _finish(root, fetched)


def _finish(root: Path, fetched: Path) -> None:
    receipt = read_receipt(fetched)
    if receipt is None:
        return
    with translated(root):
        make_dirs(root / "blobs")
        for item in receipt.frozen.files:
            _put_blob(fetched / item.path, _blob(root, item), item)
        fsync_dir(root / "blobs")
    remove_tree(fetched, ignore_errors=True)
    with contextlib.suppress(OSError):
        (root / PRIVATE_DIR).rmdir()


def _put_blob(source: Path, blob: Path, item: FileSpec) -> None:
    if _is_there(blob, item):
        return
    temporary = blob.with_name(f"{blob.name}.{secrets.token_hex(6)}.incomplete")
    try:
        try:
            hard_link(source, temporary)
        except OSError as error:
            if error.errno not in CANNOT_LINK:
                raise
            source.replace(blob)
            return
    except FileNotFoundError:
        if not _is_there(blob, item):
            raise StoreError(f"{source} was removed while it was published", hint="Run it again") from None
        return
    temporary.replace(blob)
    temporary.unlink(missing_ok=True)  # another process linked the same file


def _link(root: Path, repository: Repository, commit: str, files: Sequence[FileSpec]) -> Path:
    snapshot = root / "snapshots" / commit
    copied = set[Path]()
    with translated(root):
        if not snapshot.exists():
            temporary = root / PRIVATE_DIR / temporary_of_this_process(commit)  # same depth: relative links
            try:
                copied |= _link_files(root, temporary / repository.path, files)
                make_dirs(snapshot.parent)
                with contextlib.suppress(OSError):  # another process was first
                    temporary.rename(snapshot)
                fsync_dir(snapshot.parent)
            finally:
                remove_tree(temporary, ignore_errors=True)
                with contextlib.suppress(OSError):
                    temporary.parent.rmdir()
        copied |= _link_files(root, snapshot / repository.path, files)
        if not repository.is_commit:
            ref = root / "refs" / repository.revision
            make_dirs(ref.parent)
            durable_write(ref, commit.encode())
        for blob in copied:
            blob.unlink(missing_ok=True)
    return snapshot


def _link_files(root: Path, directory: Path, files: Sequence[FileSpec]) -> set[Path]:
    """Make durable links to blobs. Return the blobs copied instead (L3)."""
    folders, copied = {directory}, set[Path]()
    for item in files:
        link = directory / item.path
        target = os.path.relpath(_blob(root, item), link.parent)
        make_dirs(link.parent)
        folders.add(link.parent)
        if not _is_file(directory, item) and not (link.is_symlink() and os.readlink(link) == target):  # noqa: PTH115
            temporary = link.with_name(f".{secrets.token_hex(6)}")
            try:
                temporary.symlink_to(target)
            except OSError as error:
                if error.errno not in CANNOT_LINK:
                    raise
                if not link_or_copy(_blob(root, item), temporary):
                    copied.add(_blob(root, item))
            temporary.replace(link)
    for folder in folders:
        fsync_dir(folder)
    return copied
