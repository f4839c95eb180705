"""Locks of one node: one holder (K1), and a removed lock file lets no second one in (K3). K2: fault/test_ranks.py."""

from pathlib import Path

import pytest

from tierckpt.errors import OperationTimeoutError
from tierckpt.mover.lock import lock, try_lock


def test_who_is_refused_does_not_remove_the_lock_of_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with try_lock(path, remove=True) as first:
        assert first
        for _ in range(2):
            with try_lock(path, remove=True) as other:
                assert not other
        assert path.exists()
    assert not path.exists()


def test_a_lock_on_a_removed_file_is_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with try_lock(path) as first:
        assert first
        path.unlink()
        with try_lock(path) as second:
            assert second  # a new file, a new lock
        path.write_text("")
    with try_lock(path) as again:
        assert again


def test_waiting_has_a_deadline(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with try_lock(path) as held:
        assert held
        with pytest.raises(OperationTimeoutError, match=r"0\.1 s"), lock(path, 0.1, "the thing"):
            pytest.fail("two holders")
