"""Damaged small files under the local root: no save, restore or process start fails because of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.states import same, small_state, zeros_like
from tierckpt import Checkpointer
from tierckpt.checkpoint import local_commit
from tierckpt.checkpoint.journal import Journal
from tierckpt.client import close_all, get_client
from tierckpt.config import Settings
from tierckpt.errors import AlreadyCommittedError
from tierckpt.format.layout import DRAINED, MANIFEST, METADATA, local_dir, parse_uri


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "garbage": lambda path: path.write_bytes(b"\x00\xffgarbage"),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a directory": make_directory,
}


def save(uri: str, steps: tuple[int, ...], seed: int = 0, **options: object) -> None:
    with Checkpointer(uri, **options) as checkpointer:  # type: ignore[arg-type]
        for step in steps:
            checkpointer.save(step, small_state(seed + step)).result(60)
    close_all()


@pytest.mark.parametrize(
    ("name", "damage", "drain"),
    [
        *((MANIFEST, damage, True) for damage in DAMAGES),
        (MANIFEST, "half", False),
        (MANIFEST, "a directory", False),
        (DRAINED, "a directory", True),
        (METADATA, "a directory", True),
    ],
)
def test_damaged_local_manifest_does_not_block_a_save_of_its_step(
    name: str, damage: str, drain: bool, file_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(file_uri, (1, 2), drain=drain)
    directory = local_dir(local_root, parse_uri(f"{file_uri}/step-2"))
    DAMAGES[damage](directory / name)
    for seed in (10, 20):
        save(file_uri, (2,), seed, drain=drain)
    assert local_commit.read_local_manifest(directory) is not None
    state = zeros_like(small_state())
    with Checkpointer(file_uri, drain=drain) as checkpointer:
        assert checkpointer.restore(state, 2) == 2
    assert same(state, small_state(22))
    if name == MANIFEST and damage == "a directory":
        assert [*(local_root / "quarantine").glob("*.manifest.json")]
    elif name == MANIFEST:
        assert len([*directory.glob(".tierckpt/*.bad")]) == 1
        assert "was renamed to" in caplog.text
        assert len([*directory.glob("*.distcp")]) == (1 if drain else 2), "shards named only by the damaged manifest"
        assert local_commit.remove_local(directory)
        assert not [*directory.glob(".tierckpt/*.bad")], "the bad copy must be removed with its checkpoint"


@pytest.mark.slow
def test_damage_to_any_small_file_of_the_local_root(file_uri: str, local_root: Path, tmp_path: Path) -> None:
    save(file_uri, (1, 2))
    kept = tmp_path / "kept"
    shutil.copytree(local_root, kept / "local")
    shutil.copytree(Path(file_uri).parent, kept / "shared")
    names = [path.relative_to(local_root) for path in local_root.rglob("*") if path.is_file()]
    names = [name for name in names if name.suffix != ".distcp"]
    assert len(names) >= 8
    for name in names:
        for place in (local_root, Path(file_uri).parent):
            shutil.rmtree(place)
            shutil.copytree(kept / place.name, place)
        DAMAGES["garbage"](local_root / name)
        save(file_uri, (2, 3), 10, keep_last=2)
        state = zeros_like(small_state())
        with Checkpointer(file_uri) as checkpointer:
            assert checkpointer.restore(state) == 3 and same(state, small_state(13)), name
        close_all()


def test_undrained_step_with_a_damaged_manifest_is_drained(
    s3_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal entry is enough; the drain brings back a good manifest."""
    location = parse_uri(f"{s3_uri}/step-1")
    directory = local_dir(local_root, location)
    with monkeypatch.context() as patch:
        patch.setattr("tierckpt.client.Client.drain_in_background", lambda *_: None)
        checkpointer = Checkpointer(s3_uri)
        checkpointer.save(1, small_state(1)).result(60)
    assert Journal(local_root).entries()
    DAMAGES["garbage"](directory / MANIFEST)
    close_all()
    client = get_client(Settings.load())
    client.run(client.mover.drains.drain_all(patient=True))
    assert not Journal(local_root).entries()
    assert local_commit.read_local_manifest(directory) is not None
    state = zeros_like(small_state())
    assert Checkpointer(s3_uri).restore(state) == 1 and same(state, small_state(1))


def test_permanently_refused_step_is_still_refused(file_uri: str, local_root: Path) -> None:
    """Damage is no permission to replace: the shared tier has a checkpoint of this id."""
    save(file_uri, (1,))
    DAMAGES["garbage"](local_dir(local_root, parse_uri(f"{file_uri}/step-1")) / MANIFEST)
    checkpointer = Checkpointer(file_uri, overwrite=False)
    with pytest.raises(Exception) as caught:
        checkpointer.save(1, {"w": torch.zeros(3)}).result(60)
    causes = [cause for cause, _ in getattr(caught.value, "failures", {0: (caught.value, None)}).values()]
    assert any(isinstance(cause, AlreadyCommittedError) for cause in causes)
