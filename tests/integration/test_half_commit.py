"""A local commit that can neither be made durable nor undone: two consecutive errors.

The save reports a failure. The commit that remains is complete: shards it names are never deleted on either tier, and
it drains like any other.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.states import load, same, save, save_drained, small_state
from tierckpt.checkpoint import local_commit
from tierckpt.checkpoint.journal import Journal
from tierckpt.checkpoint.local_commit import read_local_manifest
from tierckpt.dcp import writer
from tierckpt.dcp.save_planning import SaveDescription
from tierckpt.disk import durable
from tierckpt.errors import StoreError
from tierckpt.format.layout import MANIFEST, local_dir, parse_uri


def fail_commit(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fail the directory's fsync after the rename, once, and what undoes the commit."""
    fired: list[str] = []

    def durable_write(path: Path, data: bytes) -> None:
        durable.durable_write(path, data)
        if path.name == Path(MANIFEST).name and not fired:
            fired.append("commit")
            raise StoreError("no fsync (injected)")

    def take_back(*_: Any) -> None:
        fired.append("take back")
        raise StoreError("nor can it be undone (injected)")

    monkeypatch.setattr(local_commit, "durable_write", durable_write)
    monkeypatch.setattr(local_commit, "undo_commit", take_back)
    return fired


@pytest.mark.slow
@pytest.mark.parametrize("way", ["by the SSD", "direct put"])
@pytest.mark.parametrize("before", [False, True], ids=["new", "replaces another"])
def test_commit_that_cannot_be_undone_is_complete_and_drains(
    way: str, before: bool, s3_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"{s3_uri}/step-1"
    if before:
        save_drained(uri, small_state(1))
    if way == "direct put":
        monkeypatch.setattr(writer, "SaveDescription", functools.partial(SaveDescription, route="direct put"))
    fired = fail_commit(monkeypatch)
    with pytest.raises(StoreError, match="no fsync"):
        save(uri, small_state(2))
    assert fired == ["commit", "take back"]
    directory = local_dir(local_root, parse_uri(uri))
    manifest = read_local_manifest(directory)
    assert manifest is not None
    if way == "by the SSD":
        assert all((directory / entry.key).exists() for entry in manifest.files)
    tierckpt.wait(uri, timeout_seconds=60)
    assert same(load(uri, small_state(2)), small_state(2))
    assert same(load(uri, small_state(2), local_root=local_root.parent / "another"), small_state(2))
    assert Journal(local_root).entries() == []
