"""Files and directories outside the local root get the mode and group that ``open`` and ``mkdir`` give."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

import tierckpt
from tests.integration.test_cli import tierckpt_
from tests.users import as_user
from tierckpt.client import close_all, get_client
from tierckpt.config import Settings
from tierckpt.format.layout import parse_uri
from tierckpt.loading.export import export_safetensors
from tierckpt.restore.restore import restore as restore_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users of a group")

TEAM, ALICE, BOB = 5000, 6001, 6002


def team_directory(path: Path) -> Path:
    path.mkdir()
    os.chown(path, -1, TEAM)
    path.chmod(0o2775)
    return path


def save(run: Path, root: Path, steps: range) -> None:
    with tierckpt.Checkpointer(str(run), local_root=root, mover="inline") as checkpointer:
        for step in steps:
            checkpointer.save(step, {"x": torch.full((1 << 18,), float(step))})


def restore(run: Path, root: Path) -> int | None:
    with tierckpt.Checkpointer(str(run), local_root=root, mover="inline") as checkpointer:
        return checkpointer.restore({"x": torch.zeros(1 << 18)})


def unlike_new(base: Path, umask: int) -> dict[str, str]:
    """Return entries below ``base`` with another mode or group than a new one has."""
    found = {}
    for path in base.rglob("*"):
        status = path.lstat()
        expected = 0o666 & ~umask if stat.S_ISREG(status.st_mode) else 0o2000 | (0o777 & ~umask)
        if (stat.S_IMODE(status.st_mode), status.st_gid) != (expected, TEAM):
            found[str(path)] = f"{stat.S_IMODE(status.st_mode):o} {status.st_gid}"
    return found


@pytest.mark.parametrize("umask", [0o002, 0o007, 0o077, 0o000], ids=oct)
def test_files_of_each_verb_have_default_mode_and_group(shared_tmp: Path, umask: int) -> None:
    team, root, source = team_directory(shared_tmp / "team"), shared_tmp / "root", shared_tmp / "source"
    before = os.umask(umask)
    try:
        save(team / "run", root, range(1, 3))
        assert {shard.stat().st_nlink for shard in (team / "run").rglob("*.distcp")} == {2}
        source.mkdir()
        (source / "model.bin").write_bytes(b"weights")
        (source / "model.bin").chmod(0o600)
        tierckpt.adopt(source, str(team / "adopted" / "step-1"), local_root=root).wait(timeout_seconds=60)
        tierckpt.prefetch(str(team / "run" / "step-2"), to=team / "prefetched", local_root=root)
        client = get_client(Settings.load(local_root=root))
        client.run(restore_directory(client.mover, parse_uri(str(team / "run" / "step-2")), team / "restored"))
        export_safetensors(str(team / "run" / "step-2"), team / "exported", local_root=root)
        close_all()
        assert not unlike_new(team, umask)
    finally:
        os.umask(before)


@pytest.mark.slow
def test_users_of_a_group_share_a_run(shared_tmp: Path, tmp_path: Path) -> None:
    team = team_directory(shared_tmp / "team")
    save(shared_tmp / "warm", tmp_path / "warm-root", range(1, 2))  # import modules that the users cannot read
    assert restore(shared_tmp / "warm", tmp_path / "warm-root") == 1
    close_all()
    for first, user in ((1, ALICE), (3, BOB), (5, ALICE)):

        def work(first: int = first, user: int = user) -> None:
            root = shared_tmp / f"root-{user}"
            assert (restore(team / "run", root) or 0) == first - 1
            save(team / "run", root, range(first, first + 2))

        assert not as_user(user, work, groups=[TEAM], umask=0o007)
    assert tierckpt_("prune", team / "run", "--keep-last", 1, "--tier", "shared", "--yes").code == 0
    assert not unlike_new(team, 0o007)


def test_unwritable_run_of_another_user_is_refused_with_a_hint(shared_tmp: Path, tmp_path: Path) -> None:
    team = team_directory(shared_tmp / "team")
    save(team / "run", tmp_path / "root", range(1, 2))  # umask 022
    assert restore(team / "run", tmp_path / "root") == 1
    close_all()

    def work() -> None:
        save(team / "run", shared_tmp / "root-bob", range(2, 3))

    error = as_user(BOB, work, groups=[TEAM])
    assert error.startswith("PermissionDeniedError") and str(team / "run") in error and "umask 002" in error
