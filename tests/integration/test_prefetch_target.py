"""``tierckpt prefetch --to DIR`` of a new version of a model, into a directory in use."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tierckpt
from tests.model_layouts import LAYOUTS, Layout, write
from tierckpt.cache.partial_entry import PartialEntry
from tierckpt.cache.receipt import RECEIPT, WRITTEN
from tierckpt.errors import CheckpointError, IntegrityError, TierckptError

OLD = LAYOUTS["shards and an index"]
NEW = LAYOUTS["one file"]


def publish(layout: Layout, source: Path, **more: str) -> Path:
    """Replace the model at ``source``."""
    for path in sorted(source.rglob("*"), reverse=True) if source.exists() else ():
        path.rmdir() if path.is_dir() else path.unlink()
    write(layout, source)
    for name, text in more.items():
        (source / f"{name}.json").write_text(text)
    return source


def names_in(target: Path) -> set[str]:
    return {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()} - {RECEIPT}


def same(target: Path, source: Path) -> bool:
    found, wanted = (tierckpt.load_safetensors(place) for place in (target, source))
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("order", [(OLD, NEW), (NEW, OLD)])
def test_new_version_removes_files_of_the_old_one(
    order: tuple[Layout, Layout], tmp_path: Path, local_root: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    tierckpt.prefetch(publish(order[0], source, quantize_config="{}"), to=target)
    tierckpt.prefetch(publish(order[1], source), to=target)
    assert names_in(target) == names_in(source) and same(target, source)


def test_user_files_stay_and_weights_among_them_raise_a_warning(
    tmp_path: Path, local_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = publish(OLD, tmp_path / "source"), tmp_path / "target"
    tierckpt.prefetch(source, to=target)
    (target / "notes.txt").write_text("mine")
    save_file({"mine": torch.zeros(1)}, target / "mine.safetensors")
    with caplog.at_level(logging.WARNING):
        tierckpt.prefetch(publish(NEW, source), to=target)
    assert names_in(target) == names_in(source) | {"notes.txt", "mine.safetensors"}
    assert any("mine.safetensors" in line and "look like weights" in line for line in caplog.messages)
    assert not any("notes.txt" in line for line in caplog.messages)


def test_filtered_prefetch_keeps_other_files_until_a_full_one(tmp_path: Path, local_root: Path) -> None:
    source, target = publish(OLD, tmp_path / "source", tokenizer="{}"), tmp_path / "target"
    tierckpt.prefetch(source, to=target, include=["*.json"])
    tierckpt.prefetch(source, to=target, include=["*.safetensors"])
    assert names_in(target) - {WRITTEN} == names_in(source)
    publish(NEW, source)
    tierckpt.prefetch(source, to=target, include=["*.safetensors"])
    assert names_in(target) - {WRITTEN} == {"model.safetensors", "config.json", "tokenizer.json", *OLD.indexes}
    tierckpt.prefetch(source, to=target)
    assert names_in(target) == names_in(source) and same(target, source)


def test_files_behind_a_user_link_are_not_removed(tmp_path: Path, local_root: Path) -> None:
    source, target, own = publish(NEW, tmp_path / "source"), tmp_path / "target", tmp_path / "own"
    (source / "tokenizer").mkdir()
    (source / "tokenizer" / "vocab.txt").write_text("a")
    tierckpt.prefetch(source, to=target)
    (target / "tokenizer").rename(own)
    (target / "tokenizer").symlink_to(own)
    tierckpt.prefetch(publish(OLD, source), to=target)
    assert (own / "vocab.txt").read_text() == "a"


@pytest.mark.parametrize("is_empty", [True, False])
def test_existing_directory_keeps_its_inode_mode_and_group(is_empty: bool, tmp_path: Path, local_root: Path) -> None:
    source, target = publish(NEW, tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    if not is_empty:
        tierckpt.prefetch(publish(OLD, source), to=target)
        publish(NEW, source)
    if os.geteuid() == 0:
        os.chown(target, 1000, 2000)
    target.chmod(0o2775)
    before = target.stat()
    tierckpt.prefetch(source, to=target)
    after = target.stat()
    assert (after.st_ino, after.st_mode, after.st_uid, after.st_gid) == (
        *(before.st_ino, before.st_mode, before.st_uid, before.st_gid),
    )
    assert (target / "model.safetensors").stat().st_gid == before.st_gid, "setgid is lost"
    assert same(target, source)


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("moves", range(4))
def test_prefetch_interrupted_between_two_files_is_completed(
    moves: int, tmp_path: Path, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of both versions are recorded until the new one is complete, so no old file stays."""
    source, target = publish(NEW, tmp_path / "source", old="{}"), tmp_path / "target"
    tierckpt.prefetch(source, to=target)
    publish(OLD, source)
    real, left = Path.replace, [moves]

    def replace(self: Path, to: Any) -> Path:
        if Path(to).parent == target and left[0] == 0:
            raise _KilledError
        left[0] -= Path(to).parent == target
        return real(self, to)

    with monkeypatch.context() as patched, pytest.raises(_KilledError):
        patched.setattr(Path, "replace", replace)
        tierckpt.prefetch(source, to=target)
    with pytest.raises(IntegrityError, match="two versions"):
        tierckpt.load_safetensors(target)
    tierckpt.prefetch(source, to=target)
    assert names_in(target) == names_in(source) and same(target, source)


@pytest.mark.parametrize("exists", [True, False])
def test_one_of_two_concurrent_versions_wins_and_the_other_raises(
    exists: bool, tmp_path: Path, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, target = [publish(OLD, tmp_path / "one"), publish(NEW, tmp_path / "two")], tmp_path / "target"
    if exists:
        target.mkdir()
    both, real = threading.Barrier(2, timeout=60), PartialEntry.publish

    def together(self: PartialEntry) -> bool:
        both.wait()  # both have fetched everything without seeing the other
        return real(self)

    def fetch(number: int) -> TierckptError | None:
        try:
            tierckpt.prefetch(sources[number], to=target, local_root=tmp_path / f"root-{number}")
        except TierckptError as error:
            return error
        return None

    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as pool:
        patched.setattr(PartialEntry, "publish", _first_call(together, real))
        failures = [*pool.map(fetch, range(2))]
    [lost] = [number for number, error in enumerate(failures) if error is not None]
    assert isinstance(failures[lost], CheckpointError) and str(sources[lost]) in str(failures[lost])
    won = sources[1 - lost]
    assert names_in(target) >= names_in(won) and same(target, won)
    tierckpt.prefetch(sources[lost], to=target)  # the retry that the error suggests
    assert names_in(target) == names_in(sources[lost]) and same(target, sources[lost])


def _first_call(
    first: Callable[[PartialEntry], bool], later: Callable[[PartialEntry], bool]
) -> Callable[[PartialEntry], bool]:
    """Call ``first`` for the first call of each object, then ``later``."""
    seen: set[int] = set()

    def call(self: PartialEntry) -> bool:
        is_new = id(self) not in seen
        seen.add(id(self))
        return (first if is_new else later)(self)

    return call
