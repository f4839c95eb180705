"""``tierckpt drill``: restores from shared storage alone, and reports of every kind of damage."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import CommandLine
from tests.services import S3Server
from tests.states import save_drained, small_state
from tierckpt.checkpoint.local_commit import read_local_manifest
from tierckpt.client import close_all
from tierckpt.disk import durable
from tierckpt.disk.durable import Space
from tierckpt.errors import StoreUnavailableError
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.restore import drill as drills
from tierckpt.restore.drill import PREFIX

SMALL_SHARDS = {"shard_size_bytes_max": "64KiB", "chunk_size_bytes": "16KiB"}


def saved(uri: str, *steps: int) -> None:
    for step in steps:
        save_drained(f"{uri}/step-{step}", small_state(step), **SMALL_SHARDS)
    close_all()


def on_fetch(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object]) -> None:
    """Call ``act`` with each file that a drill has fetched."""
    real = drills.fetch

    async def fetch(store: Any, entry: Any, path: Path, *rest: Any) -> None:
        await real(store, entry, path, *rest)
        act(path)

    monkeypatch.setattr(drills, "fetch", fetch)


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*drill*"))


def damage(path: Path, how: str) -> None:
    """Damage the shared copy only: break a hard link first, so that this node's copy stays good."""
    data = bytearray(path.read_bytes())
    path.unlink()
    if how == "flip":
        data[len(data) // 2] ^= 1
    elif how == "zero":
        data[4096:8192] = bytes(4096)
    if how != "gone":
        path.write_bytes({"cut": data[:-1], "grow": data + b"\0"}.get(how, data))


def test_a_good_checkpoint(shared_uri: str, cli: CommandLine, local_root: Path) -> None:
    saved(shared_uri, 1, 2, 3)
    manifest = read_local_manifest(local_dir(local_root, parse_uri(f"{shared_uri}/step-1")))
    assert manifest is not None
    shutil.rmtree(local_root)  # lose the node
    found = cli("drill", shared_uri, "--seed", 5)
    assert found.code == 0
    assert found.document["good"] is True
    assert found.document["problems"] == []
    assert (found.document["committed"], found.document["seed"]) == (3, 5)
    assert found.document["restored_bytes"] == found.document["size_bytes"] > 100_000
    assert found.document["files"] == len(manifest.entries)
    assert found.document["bytes_per_second"] > 0
    assert left_in(local_root) == []


@pytest.mark.slow
def test_seed_selects_the_step(file_uri: str, cli: CommandLine) -> None:
    saved(file_uri, 1, 2, 3)
    chosen = [cli("drill", file_uri, "--seed", seed).document["uri"] for seed in (1, 1, *range(12))]
    assert chosen[0] == chosen[1] == chosen[3]
    assert {uri.rpartition("/")[2] for uri in chosen} == {"step-1", "step-2", "step-3"}
    assert cli("drill", f"{file_uri}/step-2").document["uri"].endswith("step-2")
    first = cli("drill", file_uri).document["seed"]
    assert cli("drill", file_uri, "--seed", first).document["seed"] == first


@pytest.mark.parametrize("how", ["flip", "cut", "grow", "zero", "gone"])
@pytest.mark.parametrize("victims", [["1"], ["0", "1", ".metadata"]])
def test_damage_on_shared_storage(
    how: str, victims: list[str], file_uri: str, cli: CommandLine, local_root: Path
) -> None:
    saved(file_uri, 4)
    shards = sorted(Path(file_uri, "step-4").glob("*.distcp"))
    paths = [shards[int(one)] if one.isdigit() else Path(file_uri, "step-4", one) for one in victims]
    for path in paths:
        damage(path, how)
    found = cli("drill", file_uri)
    assert (found.code, found.document["good"]) == (5, False)
    assert sorted(row["file"] for row in found.document["problems"]) == sorted(path.name for path in paths)
    assert left_in(local_root) == []
    damage(Path(file_uri, "step-4/.tierckpt/manifest.json"), "flip")
    assert cli("drill", file_uri).code == 5


def test_damage_on_the_scratch_disk(file_uri: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comparison: bytes received correctly and stored wrong."""
    saved(file_uri, 4)
    on_fetch(monkeypatch, lambda path: path.name.startswith("__0_0-") and damage(path, "flip"))
    found = cli("drill", file_uri)
    assert (found.code, len(found.document["problems"])) == (5, 1)


def test_nothing_is_committed(file_uri: str, s3_uri: str, moto: S3Server, cli: CommandLine) -> None:
    Path(file_uri).mkdir(parents=True)
    assert cli("drill", file_uri).code == 4
    saved(file_uri, 1)
    Path(file_uri, "step-1/.tierckpt/manifest.json").unlink()  # files without a commit
    assert cli("drill", file_uri).code == 4
    assert cli("drill", s3_uri).code == 4
    missing = cli("drill", "s3://there-is-no-such-bucket/run")
    assert (missing.code, missing.error["error"]) == (4, "BucketNotFoundError")


def test_scratch_and_cleanup(file_uri: str, cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(file_uri, 1)
    scratch = tmp_path / "somewhere" / "else"
    scratch.mkdir(parents=True)
    (scratch / "drill-notes").mkdir()  # a user's own directory
    used: list[bool] = []
    on_fetch(monkeypatch, lambda path: used.append(path.is_relative_to(scratch)))
    assert cli("drill", file_uri, "--scratch", scratch).code == 0
    assert used and all(used)
    assert [path.name for path in scratch.iterdir()] == ["drill-notes"]


def test_no_room(file_uri: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch, local_root: Path) -> None:
    saved(file_uri, 1)
    on_fetch(monkeypatch, lambda _: pytest.fail("a byte was fetched"))
    monkeypatch.setattr(durable, "space_of", lambda _: Space(1000, 1000))
    found = cli("drill", file_uri)
    assert (found.code, found.error["error"]) == (1, "CapacityError")
    assert left_in(local_root) == []


def test_unreachable_store(file_uri: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch, local_root: Path) -> None:
    saved(file_uri, 1)

    async def away(*_: Any) -> None:
        raise StoreUnavailableError("the store is away")

    monkeypatch.setattr(drills, "fetch", away)
    found = cli("drill", file_uri)
    assert (found.code, found.error["error"], left_in(local_root)) == (7, "StoreUnavailableError", [])


def test_next_drill_removes_files_of_a_killed_one(file_uri: str, cli: CommandLine, local_root: Path) -> None:
    saved(file_uri, 1)
    code = (
        "import asyncio, sys\n"
        "from tierckpt.restore import drill\n"
        "async def slow(*_): print('fetching', flush=True); await asyncio.sleep(60)\n"
        "drill.fetch = slow\n"
        "from tierckpt.cli.ui.app import run\n"
        "sys.exit(run(['drill', sys.argv[1]]))"
    )
    with subprocess.Popen([sys.executable, "-c", code, file_uri], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (alive,) = local_root.glob(f"{PREFIX}*")
        assert cli("drill", file_uri).code == 0
        assert alive.is_dir()  # a running drill's directory must stay
        process.kill()
        process.wait(60)
    assert alive.is_dir()
    assert cli("drill", file_uri).code == 0
    assert left_in(local_root) == []


def test_drill_text_output(file_uri: str, cli: CommandLine) -> None:
    saved(file_uri, 1)
    done = cli.text("drill", file_uri)
    assert done.code == 0 and "good" in done.out and "1 committed" in done.out
