"""The home directory: present, missing, or not accessible."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from tests.users import as_user
from tierckpt.config import Settings
from tierckpt.home import cache_home, expand_user, home
from tierckpt.stores.hub.api import hf_home, hub_cache

NOBODY = 54321


def test_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("TIERCKPT_LOCAL_ROOT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert home() == tmp_path and cache_home() == tmp_path / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert Settings.load().local_root == tmp_path / "c" / "tierckpt"


@pytest.mark.parametrize("value", [None, "", "relative", "."])
def test_a_home_that_is_no_absolute_path_counts_as_not_set(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    expected = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert home() == expected and cache_home() == expected / ".cache"
    assert expand_user("~/x") == str(expected / "x") and expand_user("a/~") == "a/~"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
def test_a_user_without_entry_and_without_home_has_the_root_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIERCKPT_LOCAL_ROOT", "HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def work() -> None:
        assert home() == Path("/")
        assert Settings.load().local_root == Path("/.cache/tierckpt")
        assert hf_home() == Path("/.cache/huggingface") and hub_cache() == hf_home() / "hub"
        assert expand_user("~") == "/" and expand_user("~/x") == "/x"

    assert not as_user(NOBODY, work)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
@pytest.mark.parametrize("closed", ["", ".cache"])
def test_a_closed_home_counts_as_not_set(monkeypatch: pytest.MonkeyPatch, shared_tmp: Path, closed: str) -> None:
    monkeypatch.setenv("HOME", str(shared_tmp / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (shared_tmp / "home" / closed).mkdir(parents=True)
    (shared_tmp / "home" / closed).chmod(0o700)

    def work() -> None:
        assert cache_home() == Path("/.cache")

    assert not as_user(NOBODY, work)
