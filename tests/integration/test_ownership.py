"""A shared shared_tmp: directories and links that another user created or can write are refused.

The users are real: each part runs in a child process with its own uid. Needs root, as in CI.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.integration.test_cli import tierckpt_
from tests.users import as_user
from tierckpt import Checkpointer, TierStorageWriter, latest, ownership
from tierckpt.client import close_all
from tierckpt.config import Settings
from tierckpt.disk.durable import read_whole
from tierckpt.disk.local_root import use_local_root
from tierckpt.errors import PermissionDeniedError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")

ATTACKER, VICTIM, ROOT = 12345, 12346, 0
VICTIMS = pytest.mark.parametrize("victim", [VICTIM, ROOT], ids=["user", "root"])


@pytest.fixture
def warm(tmp_path: Path) -> None:
    """Import all modules that a save needs, as the users of these tests may not read them."""
    run = str(tmp_path / "warm")
    _save(run, tmp_path / "warm-root")
    assert latest(run, local_root=tmp_path / "warm-root")
    close_all()


def use(root: Path) -> Callable[[], None]:
    def work() -> None:
        ownership.roots.clear()
        use_local_root(Settings(local_root=root))

    return work


def make(path: Path, mode: int = 0o755) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    return path


BY_ANOTHER = f"belongs to user {ATTACKER}"
WRITABLE = "can be written by other users"


@VICTIMS
@pytest.mark.parametrize(
    ("mode", "said"),
    [
        *((mode, BY_ANOTHER) for mode in (0o700, 0o755, 0o777, 0o1777)),
        *((mode, WRITABLE) for mode in (0o777, 0o1777, 0o770, 0o775, 0o702)),
    ],
)
def test_local_root_created_by_another_user_or_writable_by_others_is_refused(
    shared_tmp: Path, victim: int, mode: int, said: str
) -> None:
    root = shared_tmp / "root"
    assert not as_user(ATTACKER if said == BY_ANOTHER else victim, lambda: make(root, mode))
    error = as_user(victim, use(root))
    assert error.startswith("PermissionDeniedError: local_root")
    assert said in error and "TIERCKPT_LOCAL_ROOT" in error


@VICTIMS
@pytest.mark.parametrize("below", ["cache", "checkpoints", "cache/.state/x"])
@pytest.mark.parametrize("said", [BY_ANOTHER, WRITABLE])
def test_directory_below_the_local_root_created_or_writable_by_another_user_is_refused(
    shared_tmp: Path, victim: int, below: str, said: str
) -> None:
    root = shared_tmp / "root"
    assert not as_user(victim, lambda: make(root, 0o777))
    creator = ATTACKER if said == BY_ANOTHER else victim
    for parent in reversed([Path(below), *Path(below).parents][:-1]):
        assert not as_user(creator, lambda parent=parent: make(root / parent, 0o777))  # type: ignore[misc]
    assert not as_user(victim, lambda: root.chmod(0o700))

    def work() -> None:
        use(root)()
        ownership.check(root / below)

    assert said in as_user(victim, work)


@VICTIMS
def test_file_planted_while_the_root_was_writable_is_refused(shared_tmp: Path, victim: int) -> None:
    root = shared_tmp / "root"
    assert not as_user(victim, lambda: make(make(root, 0o700) / "journal", 0o777) and root.chmod(0o777))
    assert not as_user(ATTACKER, lambda: (root / "journal" / "planted.json").write_text("{}"))
    assert not as_user(victim, lambda: [path.chmod(0o700) for path in (root, root / "journal")])

    def work() -> None:
        use(root)()
        read_whole(root / "journal" / "planted.json", 100)

    assert BY_ANOTHER in as_user(victim, work)


@VICTIMS
@pytest.mark.parametrize("where", ["root", "above", "below"])
def test_link_of_another_user_is_refused_and_own_link_followed(shared_tmp: Path, victim: int, where: str) -> None:
    home = shared_tmp / "home"
    assert not as_user(victim, lambda: (make(home, 0o755), make(home / "own", 0o700), make(home / "own" / "x", 0o700)))
    link, root = {
        "root": (shared_tmp / "link", shared_tmp / "link"),
        "above": (shared_tmp / "link", shared_tmp / "link" / "own"),
        "below": (home / "own" / "cache", home / "own"),
    }[where]
    target = {"root": home / "own", "above": home, "below": home / "own" / "x"}[where]

    link.symlink_to(target)
    os.lchown(link, ATTACKER, ATTACKER)
    assert "which another user controls" in as_user(victim, use(root))
    link.unlink()
    assert not as_user(victim, lambda: link.symlink_to(target))
    assert not as_user(victim, use(root))


def test_own_link_that_others_can_replace_is_refused(shared_tmp: Path) -> None:
    shared_tmp.chmod(0o777)  # not sticky

    def work() -> None:
        make(shared_tmp / "own", 0o700)
        (shared_tmp / "link").symlink_to(shared_tmp / "own")
        use(shared_tmp / "link")()

    assert "which another user controls" in as_user(VICTIM, work)


def test_root_replaced_while_running_is_refused(shared_tmp: Path) -> None:
    root = shared_tmp / "root"

    def work() -> None:
        make(root, 0o700)
        use(root)()
        ownership.check(root)
        root.chmod(0o777)  # as another user's directory, in the worst case with the inode of the checked one
        ownership.check(root)

    assert WRITABLE in as_user(VICTIM, work)


@VICTIMS
def test_files_are_private_with_any_umask(shared_tmp: Path, warm: None, victim: int) -> None:
    root = shared_tmp / "deep" / "root"

    def work() -> None:
        os.umask(0)
        _save(str(shared_tmp / "shared" / "run"), root)

    assert not as_user(victim, work)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (root, *root.rglob("*")) if path.is_dir()}
    assert not {path: oct(mode) for path, mode in modes.items() if mode & 0o022}
    assert modes[root] == 0o700 and modes[root / "checkpoints"] == 0o700
    shard = next(root.rglob("*.distcp"))
    assert "PermissionError" in as_user(ATTACKER, shard.read_bytes)
    assert not as_user(victim, lambda: _save(str(shared_tmp / "shared" / "run"), root, step=2))


def test_new_root_is_private_without_a_warning(
    file_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By any thread of a Checkpointer that writes first."""
    with Checkpointer(file_uri, interval=1) as checkpointer:
        checkpointer.step(1, {"w": torch.zeros(10)})
        checkpointer.save(2, {"w": torch.zeros(10)}).result(60)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text for text in told if str(local_root) in text] == []
    assert {path.stat().st_mode & 0o777 for path in (local_root, local_root / "checkpoints")} == {0o700}


def test_older_readable_root_gets_private_checkpoints_unless_configured(shared_tmp: Path, warm: None) -> None:
    root = shared_tmp / "root"

    def older() -> None:
        make(root, 0o755)
        make(root / "checkpoints", 0o755)

    assert not as_user(VICTIM, older)
    assert not as_user(VICTIM, lambda: _save(str(shared_tmp / "shared" / "run"), root))
    assert stat.S_IMODE(root.stat().st_mode) == 0o755, "an existing root must keep its mode"
    shard = next(root.rglob("*.distcp"))
    assert "PermissionError" in as_user(ATTACKER, shard.read_bytes)
    assert not as_user(VICTIM, lambda: _save(str(shared_tmp / "shared" / "run"), root, step=2, local_readable_by="all"))
    assert not as_user(ATTACKER, shard.read_bytes)
    assert "PermissionError" in as_user(ATTACKER, (root / "planted").mkdir)


@VICTIMS
def test_planted_checkpoint_and_cache_are_not_used(shared_tmp: Path, warm: None, victim: int) -> None:
    """The attacker guesses and creates the local root, and saves a newer step of the victim's run."""
    root, run = shared_tmp / "guess", str(make(shared_tmp / "shared" / "run", 0o1777))
    assert not as_user(victim, lambda: _save(run, shared_tmp / "victims-own", step=1))

    def plant() -> None:
        _save(run, root, step=999)
        for path in (root, *root.rglob("*")):
            path.chmod(0o777)

    assert not as_user(ATTACKER, plant)

    def find_newest() -> None:
        raise AssertionError(f"believed {latest(run, local_root=root)}")

    assert as_user(victim, find_newest).startswith("PermissionDeniedError: local_root")
    assert as_user(victim, lambda: _save(run, root, step=2)).startswith("PermissionDeniedError: local_root")


@pytest.mark.slow
def test_cli_exit_code_of_a_permission_error(shared_tmp: Path) -> None:
    root = shared_tmp / "root"
    assert not as_user(ATTACKER, lambda: make(root, 0o777))
    for verb in (["drain", "--pause"], ["agent"]):
        done = tierckpt_(*verb, "--local-root", root)
        assert done.code == PermissionDeniedError.exit_code, (verb, done.err)
        assert done.error["error"] == "PermissionDeniedError"
    assert not list(root.iterdir())


def _save(run: str, root: Path, step: int = 1, **settings: object) -> None:
    ownership.roots.clear()
    writer = TierStorageWriter(f"{run}/step-{step}", local_root=root, mover="inline", drain=False, **settings)
    dcp.save({"x": torch.arange(4.0)}, storage_writer=writer, no_dist=True)
    close_all()
