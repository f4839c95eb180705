"""A file that shares its bytes with the local tier looks like a new file of its directory."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierckpt import ownership
from tierckpt.config import Settings
from tierckpt.disk.durable import create_file, durable_link, durable_write, make_dirs, translate_os_error
from tierckpt.disk.local_root import make_local_root
from tierckpt.disk.processes import current_umask
from tierckpt.types import Tier

UMASKS = pytest.mark.parametrize("umask", [0o002, 0o007, 0o022, 0o077, 0o000], ids=oct)


@pytest.fixture
def masked(umask: int) -> Iterator[int]:
    before = os.umask(umask)
    yield umask
    os.umask(before)


@pytest.fixture
def source(masked: int, tmp_path: Path) -> Path:
    """A file of the local tier."""
    root = make_local_root(Settings.load(local_root=tmp_path / "root"))
    durable_write(root / "shard", b"bytes")
    return root / "shard"


def looks(path: Path) -> tuple[int, int]:
    status = path.stat()
    return stat.S_IMODE(status.st_mode), status.st_gid


def new_file(directory: Path) -> Path:
    os.close(create_file(directory / "new"))
    return directory / "new"


@UMASKS
def test_current_umask(masked: int) -> None:
    assert current_umask() == masked


@UMASKS
def test_a_second_name_has_the_mode_of_a_new_file(source: Path, tmp_path: Path) -> None:
    assert looks(source)[0] & 0o022 == 0
    make_dirs(tmp_path / "shared")
    assert durable_link(source, tmp_path / "shared" / "shard")
    assert looks(tmp_path / "shared" / "shard") == looks(new_file(tmp_path / "shared"))


@pytest.mark.parametrize("umask", [0o022])
def test_a_file_of_another_umask_keeps_its_mode(source: Path, tmp_path: Path) -> None:
    source.chmod(0o600)
    assert durable_link(source, tmp_path / "shard") and looks(tmp_path / "shard")[0] == 0o600


@pytest.mark.parametrize("umask", [0o022])
def test_a_directory_with_a_default_acl_gets_a_copy(source: Path, tmp_path: Path) -> None:
    entries = [(1, 7, 0xFFFFFFFF), (4, 7, 0xFFFFFFFF), (0x10, 7, 0xFFFFFFFF), (0x20, 0, 0xFFFFFFFF)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", acl)
    except OSError:
        pytest.skip("no ACLs on this file system")
    assert not durable_link(source, tmp_path / "shard")
    assert not (tmp_path / "shard").exists()


def test_a_permission_error_of_the_shared_tier_names_the_remedy_of_a_group(tmp_path: Path) -> None:
    error = translate_os_error(PermissionError(13, "denied"), tmp_path / "step-1", Tier.SHARED)
    assert str(tmp_path / "step-1") in str(error) and "umask 002" in error.hint


def test_a_permission_error_below_the_local_root_names_its_variable(tmp_path: Path) -> None:
    ownership.open_root(tmp_path)
    try:
        error = translate_os_error(PermissionError(13, "denied"), tmp_path / "x", Tier.LOCAL)
    finally:
        del ownership.roots[tmp_path]
    assert "TIERCKPT_LOCAL_ROOT" in error.hint
