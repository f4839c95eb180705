"""``tierckpt cache``: contents of the node cache, checks, pins and evictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_cli import KIB, tierckpt_

SIZE = 256 * KIB


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """Three models, fetched in order."""
    uris = []
    for number in range(3):
        folder = tmp_path / f"model-{number}"
        folder.mkdir()
        (folder / "weights.bin").write_bytes(bytes([number]) * SIZE)
        uris.append(str(folder))
        assert tierckpt_("prefetch", uris[-1]).code == 0
    return uris


def cached_models() -> list[str]:
    return [entry["uri"] for entry in tierckpt_("cache", "ls").document["entries"]]


def test_ls_sorts_by_last_use(models: list[str]) -> None:
    assert cached_models() == models[::-1]


def test_check_of_a_directory_that_prefetch_filled(models: list[str], tmp_path: Path) -> None:
    assert tierckpt_("cache", "check", models[0], "--to", str(tmp_path / "to")).code == 3
    assert tierckpt_("prefetch", models[0], "--to", str(tmp_path / "to")).code == 0
    assert tierckpt_("cache", "check", models[0], "--to", str(tmp_path / "to")).code == 0


def test_evict_down_to_a_size(models: list[str]) -> None:
    done = tierckpt_("cache", "evict", "--max-bytes", "600KiB")
    assert [row["uri"] for row in done.document["evicted"]] == [models[0]]
    tierckpt_("cache", "pin", models[1])
    done = tierckpt_("cache", "evict", "--max-bytes", "0")
    assert (done.code, [row["uri"] for row in done.document["kept"]]) == (3, [models[1]])
    assert cached_models() == [models[1]]


def test_pin_and_evict_of_a_missing_entry_raise(models: list[str], tmp_path: Path) -> None:
    for verb in ("pin", "evict"):
        done = tierckpt_("cache", verb, tmp_path / "other")
        assert done.code == 4 and "has no files of" in done.err
    assert tierckpt_("cache", "evict").code == 2


def test_max_bytes_of_a_prefetch(models: list[str], tmp_path: Path) -> None:
    """The cache evicts to stay below it; a larger fetch into a directory is refused."""
    tierckpt_("cache", "evict", models[2])
    assert tierckpt_("prefetch", models[2], "--max-bytes", "300KiB").code == 0
    assert cached_models() == [models[2]]
    done = tierckpt_("prefetch", models[0], "--to", str(tmp_path / "to"), "--max-bytes", "100KiB")
    assert done.code == 1 and "more than 100.0 KiB" in done.err
    assert not (tmp_path / "to").exists()
    assert tierckpt_("prefetch", models[0], "--max-bytes", "100KiB").code == 1
