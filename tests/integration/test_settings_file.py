"""``tierckpt.toml`` is read only if no other user can have written or replaced it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.integration.test_ownership import ATTACKER, ROOT, VICTIM, VICTIMS, as_user, make
from tierckpt import config
from tierckpt.config import Settings
from tierckpt.errors import ConfigError

TEXT = """
peers = "10.6.6.6:7117"
peer_secret_file = "/tmp/known-to-its-author-alone"
peer_listen = "0.0.0.0:6666"
local_root = "/tmp/planted"
concurrency = 7
"""
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


def write(path: Path, mode: int = 0o644, text: str = TEXT) -> None:
    path.write_text(text, encoding="latin-1")
    path.chmod(mode)


def check_read(directory: Path, *, is_read: bool) -> None:
    os.chdir(directory)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("tierckpt.config").addHandler(handler)
    config.reported_files.clear()
    settings = Settings.load(), Settings.load()
    assert {one.concurrency for one in settings} == {7 if is_read else 4}
    assert {one.peers for one in settings} == {"10.6.6.6:7117" if is_read else None}
    assert all(is_read or one.peer_secret_file is None for one in settings)
    warnings = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    assert len(warnings) == (0 if is_read else 1), warnings
    assert is_read or str(directory / "tierckpt.toml") in warnings[0]


@only_root
@VICTIMS
@pytest.mark.parametrize("owner", [ATTACKER, VICTIM, ROOT])
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o666])
def test_file_of_user_or_root_that_others_cannot_write_is_read(
    shared_tmp: Path, monkeypatch: pytest.MonkeyPatch, victim: int, owner: int, mode: int
) -> None:
    monkeypatch.delenv("TIERCKPT_LOCAL_ROOT", raising=False)
    directory = make(shared_tmp / "work", 0o755)
    os.chown(directory, victim, victim)
    write(directory / "tierckpt.toml", mode)
    os.chown(directory / "tierckpt.toml", owner, owner)
    if mode == 0o600 and victim != ROOT and owner == ROOT:
        assert "cannot be read" in as_user(victim, lambda: check_read(directory, is_read=True))
        return
    good = owner in (victim, ROOT) and not mode & 0o022
    assert not as_user(victim, lambda: check_read(directory, is_read=good))


@only_root
@VICTIMS
@pytest.mark.parametrize(("owner", "mode"), [(ATTACKER, 0o755), (VICTIM, 0o775), (VICTIM, 0o777), (ROOT, 0o1777)])
def test_own_file_that_others_can_replace_is_ignored(shared_tmp: Path, victim: int, owner: int, mode: int) -> None:
    directory = make(shared_tmp / "work", 0o777)
    assert not as_user(victim, lambda: write(directory / "tierckpt.toml"))
    directory.chmod(mode)
    os.chown(directory, owner, owner)
    assert not as_user(victim, lambda: check_read(directory, is_read=False))


@only_root
@VICTIMS
def test_owner_of_a_link_and_of_its_target_are_checked(shared_tmp: Path, victim: int) -> None:
    directory, elsewhere = make(shared_tmp / "work", 0o755), make(shared_tmp / "elsewhere", 0o755)
    for one in (directory, elsewhere):
        os.chown(one, victim, victim)
    assert not as_user(victim, lambda: write(elsewhere / "shared.toml"))
    (directory / "tierckpt.toml").symlink_to(elsewhere / "shared.toml")
    os.lchown(directory / "tierckpt.toml", victim, victim)
    assert not as_user(victim, lambda: check_read(directory, is_read=True))
    elsewhere.chmod(0o777)
    assert not as_user(victim, lambda: check_read(directory, is_read=False))
    elsewhere.chmod(0o755)
    os.lchown(directory / "tierckpt.toml", ATTACKER, ATTACKER)
    assert not as_user(victim, lambda: check_read(directory, is_read=False))


@only_root
@pytest.mark.parametrize("text", ["not = [toml", "trust_pickle = true", "colour = 1", "x" * (2 << 20)])
def test_invalid_file_of_another_user_is_ignored(shared_tmp: Path, text: str) -> None:
    directory = make(shared_tmp / "work", 0o777)
    assert not as_user(ATTACKER, lambda: write(directory / "tierckpt.toml", text=text))
    assert not as_user(VICTIM, lambda: check_read(directory, is_read=False))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tierckpt.toml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not = [toml", "is not valid TOML"),
        ("colour = 1", "colour"),
        ("concurrency = 0", "concurrency"),
        ('drain = "perhaps"', "drain"),
        ("\0", "is not valid TOML"),
        ("\xff\xfe", "is not valid TOML"),
        ("#" * (2 << 20), "larger than"),
    ],
)
def test_error_in_own_file_names_the_file(own: Path, text: str, said: str) -> None:
    write(own, text=text)
    with pytest.raises(ConfigError, match=said) as caught:
        Settings.load()
    assert str(own) in str(caught.value)


@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_own_special_file_raises_without_blocking(own: Path, kind: str) -> None:
    os.mkfifo(own, 0o600) if kind == "fifo" else own.mkdir(0o700)
    with pytest.raises(ConfigError, match=r"tierckpt\.toml is not a file|tierckpt\.toml cannot be read"):
        Settings.load()


def test_error_in_an_argument_does_not_name_the_file(own: Path) -> None:
    write(own, text="concurrency = 2")
    with pytest.raises(ConfigError) as caught:
        Settings.load(concurrency=0)
    assert str(own) not in str(caught.value)
