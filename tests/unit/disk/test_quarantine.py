"""Invalid state files: quarantined and counted below a local root, a typed error elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.test_strange_files import KINDS
from tierckpt import ownership
from tierckpt.disk.durable import durable_write, make_dirs, read_whole
from tierckpt.disk.file_lock import Claims, HostLease, lock, try_lock
from tierckpt.disk.quarantine import QUARANTINE, open_regular, set_aside
from tierckpt.errors import ManifestError, ObjectNotFoundError, StoreError, TierckptError
from tierckpt.telemetry import QUARANTINES, Labels, Metric, listen

NOT_FILES = [kind for kind in KINDS if kind != "file"]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "root"
    ownership.open_root(path)
    make_dirs(path)
    yield path
    ownership.roots.clear()


@pytest.fixture
def counted() -> Iterator[list[float]]:
    found: list[float] = []

    def take(metric: Metric, value: float, labels: Labels, /) -> None:
        if metric is QUARANTINES:
            found.append(value)

    stop = listen(take)
    yield found
    stop()


@pytest.mark.parametrize("kind", NOT_FILES)
def test_what_is_no_file_is_set_aside_and_counted(root: Path, counted: list[float], kind: str) -> None:
    KINDS[kind](root / "state")
    with pytest.raises(ObjectNotFoundError):
        read_whole(root / "state", 100)
    [aside] = (root / QUARANTINE).iterdir()
    assert aside.name.endswith(".state") and counted == [1]
    KINDS[kind](root / "state")
    os.close(open_regular(root / "state", os.O_RDWR | os.O_CREAT))
    assert (root / "state").is_file() and not (root / "state").is_symlink()


@pytest.mark.parametrize("kind", NOT_FILES)
def test_locks_records_claims_and_leases_take_the_place_of_what_is_no_file(root: Path, kind: str) -> None:
    for name in ("x.lock", "record", "claims", "host"):
        KINDS[kind](root / name)
    with lock(root / "x.lock", 5, "x"), try_lock(root / "x.lock") as second:
        assert not second
    durable_write(root / "record", b"good")
    assert read_whole(root / "record", 100) == b"good" and not (root / "record").is_symlink()
    claims, lease = Claims(root / "claims"), HostLease(root / "host", "1")
    assert claims.take(1) and lease.take()
    assert not Claims(root / "claims").take(1) and not HostLease(root / "host", "2").take()
    claims.close()
    lease.release()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("directory", "link_to_a_directory")])
def test_a_directory_takes_the_place_of_what_is_none(root: Path, kind: str) -> None:
    KINDS[kind](root / "below")
    make_dirs(root / "below" / "deep")
    assert (root / "below" / "deep").is_dir() and not (root / "below").is_symlink()


@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_a_lease_is_an_error_where_nothing_may_be_moved(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / "host")
    with pytest.raises(StoreError, match="not a file"):
        HostLease(tmp_path / "host", "1").take()


@pytest.mark.parametrize("kind", NOT_FILES)
def test_elsewhere_nothing_is_moved_and_nothing_waited_for(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / "state")
    if kind == "link_to_a_file":
        assert read_whole(tmp_path / "state", 1 << 16)
        return
    with pytest.raises(TierckptError):
        read_whole(tmp_path / "state", 100)
    assert (tmp_path / "state").is_symlink() or (tmp_path / "state").exists()


def test_a_file_that_is_too_large_is_not_read(root: Path) -> None:
    (root / "state").write_bytes(b"x" * 101)
    with pytest.raises(ManifestError, match="101 bytes"):
        read_whole(root / "state", 100)


@pytest.mark.parametrize("kind", ["file", "link_to_a_directory", "fifo"])
def test_a_quarantine_that_is_none_gives_way_itself(root: Path, kind: str) -> None:
    KINDS[kind](root / QUARANTINE)
    KINDS["fifo"](root / "state")
    assert set_aside(root / "state")
    assert len(list((root / QUARANTINE).iterdir())) == 1 and not (root / QUARANTINE).is_symlink()
