"""``tierckpt.toml`` counts when nobody else can have written it, or can put another in its place."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.integration.test_ownership import ATTACKER, ROOT, VICTIM, VICTIMS, as_user, machine, make
from tierckpt import config
from tierckpt.config import Settings
from tierckpt.errors import ConfigError

__all__ = ["machine"]
TEXT = """
peers = "10.6.6.6:7117"
peer_secret_file = "/tmp/known-to-its-author-alone"
peer_listen = "0.0.0.0:6666"
local_root = "/tmp/planted"
concurrency = 7
"""
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


def write(path: Path, mode: int = 0o644, text: str = TEXT) -> None:
    path.write_text(text)
    path.chmod(mode)


def believe(directory: Path, *, is_believed: bool) -> None:
    os.chdir(directory)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("tierckpt.config").addHandler(handler)
    config.reported_files.clear()
    settings = Settings.load(), Settings.load()
    assert {one.concurrency for one in settings} == {7 if is_believed else 4}
    assert {one.peers for one in settings} == {"10.6.6.6:7117" if is_believed else None}
    assert all(is_believed or one.peer_secret_file is None for one in settings)
    said = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    assert len(said) == (0 if is_believed else 1), said
    assert is_believed or str(directory / "tierckpt.toml") in said[0]


@only_root
@VICTIMS
@pytest.mark.parametrize("owner", [ATTACKER, VICTIM, ROOT])
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o666])
def test_a_file_counts_when_it_is_ours_or_roots_and_others_cannot_write_it(
    machine: Path, monkeypatch: pytest.MonkeyPatch, victim: int, owner: int, mode: int
) -> None:
    monkeypatch.delenv("TIERCKPT_LOCAL_ROOT", raising=False)
    directory = make(machine / "work", 0o755)
    os.chown(directory, victim, victim)
    write(directory / "tierckpt.toml", mode)
    os.chown(directory / "tierckpt.toml", owner, owner)
    if mode == 0o600 and victim != ROOT and owner == ROOT:
        assert "cannot be read" in as_user(victim, lambda: believe(directory, is_believed=True))
        return
    good = owner in (victim, ROOT) and not mode & 0o022
    assert not as_user(victim, lambda: believe(directory, is_believed=good))


@only_root
@VICTIMS
@pytest.mark.parametrize(("owner", "mode"), [(ATTACKER, 0o755), (VICTIM, 0o775), (VICTIM, 0o777), (ROOT, 0o1777)])
def test_a_file_of_ours_does_not_count_where_others_can_replace_it(
    machine: Path, victim: int, owner: int, mode: int
) -> None:
    directory = make(machine / "work", 0o777)
    assert not as_user(victim, lambda: write(directory / "tierckpt.toml"))
    directory.chmod(mode)
    os.chown(directory, owner, owner)
    assert not as_user(victim, lambda: believe(directory, is_believed=False))


@only_root
@VICTIMS
def test_a_link_counts_by_whose_it_is_and_by_what_it_leads_to(machine: Path, victim: int) -> None:
    directory, elsewhere = make(machine / "work", 0o755), make(machine / "elsewhere", 0o755)
    for one in (directory, elsewhere):
        os.chown(one, victim, victim)
    assert not as_user(victim, lambda: write(elsewhere / "shared.toml"))
    (directory / "tierckpt.toml").symlink_to(elsewhere / "shared.toml")
    os.lchown(directory / "tierckpt.toml", victim, victim)
    assert not as_user(victim, lambda: believe(directory, is_believed=True))
    elsewhere.chmod(0o777)
    assert not as_user(victim, lambda: believe(directory, is_believed=False))
    elsewhere.chmod(0o755)
    os.lchown(directory / "tierckpt.toml", ATTACKER, ATTACKER)
    assert not as_user(victim, lambda: believe(directory, is_believed=False))


@only_root
@pytest.mark.parametrize("text", ["not = [toml", "trust_pickle = true", "colour = 1", "x" * (2 << 20)])
def test_what_a_stranger_wrote_stops_nobody(machine: Path, text: str) -> None:
    directory = make(machine / "work", 0o777)
    assert not as_user(ATTACKER, lambda: write(directory / "tierckpt.toml", text=text))
    assert not as_user(VICTIM, lambda: believe(directory, is_believed=False))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tierckpt.toml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not = [toml", "is no TOML"),
        ("colour = 1", "colour"),
        ("concurrency = 0", "concurrency"),
        ('drain = "perhaps"', "drain"),
        ("\0", "is no TOML"),
        ("#" * (2 << 20), "larger than"),
    ],
)
def test_what_is_wrong_with_our_own_file_is_said_with_its_name(own: Path, text: str, said: str) -> None:
    write(own, text=text)
    with pytest.raises(ConfigError, match=said) as caught:
        Settings.load()
    assert str(own) in str(caught.value)


def test_text_that_is_not_utf_8_is_no_toml(own: Path) -> None:
    own.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no TOML"):
        Settings.load()


@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_our_own_file_that_is_none_is_said_and_not_waited_for(own: Path, kind: str) -> None:
    os.mkfifo(own, 0o600) if kind == "fifo" else own.mkdir(0o700)
    with pytest.raises(ConfigError, match=r"tierckpt\.toml is not a file|tierckpt\.toml cannot be read"):
        Settings.load()


def test_a_value_of_the_caller_is_not_blamed_on_the_file(own: Path) -> None:
    write(own, text="concurrency = 2")
    with pytest.raises(ConfigError) as caught:
        Settings.load(concurrency=0)
    assert str(own) not in str(caught.value)
