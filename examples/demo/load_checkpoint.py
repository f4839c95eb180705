"""Read every item of a checkpoint and write the SHA-256 of each, with PyTorch's own reader or with tierckpt's.

    python load_checkpoint.py s3://bucket/run/step-60 --reader stock --out digests.json

With ``--reader stock`` this process verifies that it cannot import tierckpt: it reads like any machine with PyTorch and
s3fs but without tierckpt (P1).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.abc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


class _NotInstalled(importlib.abc.MetaPathFinder):
    """An import finder, ahead of editable installs, that hides tierckpt."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] == "tierckpt":
            raise ModuleNotFoundError("No module named 'tierckpt' (hidden by the demo)", name=fullname)


def forget_tierckpt() -> None:
    """Make importing tierckpt impossible in this process, and verify that."""
    sys.meta_path.insert(0, _NotInstalled())
    try:
        import tierckpt  # noqa: F401
    except ImportError:
        return
    raise SystemExit("tierckpt can still be imported, so the check is void")


def stock_reader(uri: str) -> dcp.StorageReader:
    forget_tierckpt()
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(uri)


def tierckpt_reader(uri: str) -> dcp.StorageReader:
    from tierckpt import TierStorageReader

    return TierStorageReader(uri)


def read_all(reader: dcp.StorageReader) -> dict[str, Any]:
    """Return every item by its flat name, with unsharded tensors."""
    items = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(item.size, dtype=item.properties.dtype) if isinstance(item, TensorStorageMetadata) else None
        for name, item in items.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def digest(value: object) -> str:
    data = value.reshape(-1).view(torch.uint8).numpy() if isinstance(value, Tensor) else repr(value).encode()
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("uri")
    parser.add_argument("--reader", choices=("stock", "tierckpt"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    reader = stock_reader(arguments.uri) if arguments.reader == "stock" else tierckpt_reader(arguments.uri)
    state = read_all(reader)
    found = {kind: {} for kind in ("tensors", "others")}  # type: dict[str, dict[str, str]]
    for name, value in state.items():
        found["tensors" if isinstance(value, Tensor) else "others"][name] = digest(value)
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "tierckpt")
    if arguments.reader == "stock" and loaded:
        raise SystemExit(f"tierckpt was imported: {loaded}")
    arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
