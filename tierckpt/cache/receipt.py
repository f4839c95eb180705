"""The receipt of a directory: the prefetches that filled it, and their file names."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from pathlib import Path

from ..checkpoint.catalog import file_size
from ..disk.durable import publish, read_whole, write_new
from ..errors import ManifestError, ObjectNotFoundError
from ..format.layout import PRIVATE_DIR
from ..format.manifest import MANIFEST_BYTES_MAX, is_safe_path, seal, unseal
from ..ownership import file_mode
from .file_set import Receipt, decode

RECEIPT = f"{PRIVATE_DIR}/prefetched.json"
WRITTEN = f"{PRIVATE_DIR}/written.json"


def read_receipt(directory: Path) -> Receipt | None:
    try:
        return decode(read_whole(directory / RECEIPT, MANIFEST_BYTES_MAX), where=str(directory / RECEIPT))
    except (ObjectNotFoundError, ManifestError):
        return None


def whole_receipt(directory: Path, version: str) -> Receipt | None:
    receipt = read_receipt(directory)
    if receipt is None or receipt.frozen.version != version:
        return None
    if any(file_size(directory / item.path) != item.size_bytes for item in receipt.frozen.files):
        return None
    return receipt


def version_in(directory: Path) -> str | None:
    receipt = read_receipt(directory)
    return receipt.frozen.version if receipt is not None else None


def written_in(directory: Path) -> set[str]:
    receipt = read_receipt(directory)
    found = {item.path for item in receipt.frozen.files} if receipt is not None else set()
    try:
        data = read_whole(directory / WRITTEN, MANIFEST_BYTES_MAX)
        names = unseal(data, frozenset({"written"}), where=str(directory / WRITTEN))["written"]
    except (ObjectNotFoundError, ManifestError):
        return found
    return found | {name for name in names if isinstance(name, str) and is_safe_path(name)}


def is_half_replaced(directory: Path) -> bool:
    """True after an interrupted replacement (R1)."""
    return (directory / WRITTEN).exists() and not (directory / RECEIPT).exists()


def put_receipt(directory: Path, receipt: bytes, scratch: Path) -> None:
    """Write durably, by ``scratch`` on the same file system."""
    _put(directory / RECEIPT, receipt, scratch)


def put_written(directory: Path, paths: Collection[str], scratch: Path) -> None:
    _put(directory / WRITTEN, seal({"written": sorted(paths)}), scratch)


def _put(path: Path, data: bytes, scratch: Path) -> None:
    temporary = scratch / f"{path.stem}.{secrets.token_hex(6)}"
    write_new(temporary, data, file_mode(temporary))
    publish(temporary, path)
