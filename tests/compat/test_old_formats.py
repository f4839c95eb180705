"""What earlier formats left on a node and on shared storage is read, drained, honoured and cleaned up (tests/data)."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.compat.make_format import BUCKET, CHUNK, GONE, MODELS, RUN, local, pattern, put_models, save, state
from tests.services import S3Server
from tests.states import same
from tierckpt.cache import partial_entry
from tierckpt.cache.pool import Pool
from tierckpt.checkpoint import local_commit, marks
from tierckpt.checkpoint.journal import Journal
from tierckpt.cli.ui.app import run
from tierckpt.client import Client, close_all
from tierckpt.config import Settings
from tierckpt.dcp.handoff.multi_node import ResultExchange
from tierckpt.disk.io_tuner import WAYS, read_tuner_for
from tierckpt.format import layout
from tierckpt.format import manifest as manifests
from tierckpt.replication.local_index import LocalIndex

DATA = Path(__file__).parents[1] / "data"
FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4
FORMATS = sorted(path.name for path in DATA.glob("format-*.tar.gz"))


@pytest.fixture(params=FORMATS)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the shared tier and the local root of a format: its URIs begin with /proc/self/cwd."""
    with tarfile.open(DATA / request.param) as tar:
        tar.extractall(tmp_path, **FILTER)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    close_all()  # before the working directory is another


@pytest.fixture
def models(place: Path, moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in moto.environment().items():
        monkeypatch.setenv(name, value)
    with contextlib.suppress(moto.client().exceptions.BucketAlreadyOwnedByYou):
        put_models(moto)
    yield
    close_all()


def command(*arguments: str, code: int = 0) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert run([*arguments, "--json"]) == code, said.getvalue()
    close_all()
    return json.loads(said.getvalue())  # type: ignore[no-any-return]


def loaded(step: int) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(value) for name, value in state(step).items()}
    dcp.load(found, storage_reader=tierckpt.TierStorageReader(f"{RUN}/step-{step}"))
    return found


def drain() -> None:
    """What a mover does when it starts: the entries that are ready are drained, what is dead is removed."""
    client = Client(Settings.load())
    client.run(client.mover.drains.recover())
    client.close()
    tierckpt.wait(f"{RUN}/step-2", timeout_seconds=60)
    close_all()


def uris(root: Path) -> dict[str, str]:
    return {entry.location.name: entry.state for entry in Journal(root).entries()}


def test_checkpoints_are_listed_verified_and_loaded(place: Path) -> None:
    listed = {row["uri"].rpartition("/")[2]: row for row in command("ls", RUN)["checkpoints"]}
    assert listed.keys() >= {f"step-{step}" for step in (1, 2, 3, 4, 5)}
    for step in (1, 2):
        command("verify", f"{RUN}/step-{step}", "--read-data")  # exit code 0
    wanted = tierckpt.Checkpointer(RUN)
    found = {name: torch.zeros_like(value) for name, value in state(1).items()}
    assert wanted.restore(found, 1) == 1
    assert tierckpt.latest(RUN) == f"{RUN}/step-5"
    for step in (2, 3, 4, 5):
        same(loaded(step), state(step))


def test_what_waited_in_the_journal_is_drained_and_what_never_finished_is_removed(place: Path) -> None:
    before = uris(place / "local")
    assert before.keys() == {"step-2", "step-4", "step-5", "step-6", "step-7"}
    drain()
    after = uris(place / "local")
    assert after.keys() & {"step-2", "step-6"} == set()
    assert after["step-7"] == before["step-7"], "whether its save was committed is not known yet"
    assert not [path for path in local(f"{RUN}/step-6").rglob("*") if path.is_file() and path.name != "lock"]
    assert list(local(f"{RUN}/step-7").glob("*.distcp"))
    assert not local(f"{GONE}/step-1").exists(), "the removal that had begun"
    directory = local(f"{RUN}/step-2")
    manifest = local_commit.read_local_manifest(directory)
    assert manifest is not None and marks.is_drained(directory, manifest.attempt)
    assert Path(f"{RUN}/step-2", layout.MANIFEST).read_bytes() == (directory / layout.MANIFEST).read_bytes()
    shutil.rmtree(place / "local")
    same(loaded(2), state(2))


def test_marks_are_honoured(place: Path) -> None:
    for step, is_evictable in {1: True, 2: False, 3: True, 4: False}.items():
        manifest = local_commit.read_local_manifest(local(f"{RUN}/step-{step}"))
        assert manifest is not None
        assert marks.is_evictable(local(f"{RUN}/step-{step}"), manifest.attempt) is is_evictable, step
        assert marks.is_replicated(local(f"{RUN}/step-{step}"), manifest.attempt) is (step == 4)
    index = LocalIndex(place / "local")
    index.look()
    assert [(one.location.name, set(one.made_by.values())) for one in index.copies()] == [("step-4", {"other-node"})]
    assert {directory.name for directory in index.unnamed} == {"step-6", "step-7"}, "which this node's ranks save"


def test_a_save_to_an_id_with_an_old_mark_is_not_taken_for_superseded(place: Path) -> None:
    save(3)
    close_all()
    directory = local(f"{RUN}/step-3")
    manifest = local_commit.read_local_manifest(directory)
    assert manifest is not None and marks.is_drained(directory, manifest.attempt)
    assert [path.name for path in (directory / ".tierckpt").glob("*.json")] in (
        ["manifest.json", "drained.json"],
        ["drained.json", "manifest.json"],
    )


def test_pruning_leaves_nothing_of_what_it_removes(place: Path) -> None:
    drain()
    command("prune", RUN, "--keep-last", "1", "--yes")
    assert not local(f"{RUN}/step-1").exists()
    assert not Path(f"{RUN}/step-1").exists()
    same(loaded(5), state(5))


def test_what_agents_told_of_a_dead_rank_is_heard_and_removed(place: Path) -> None:
    client = Client(Settings.load())
    exchange = ResultExchange(client, layout.parse_uri(f"{RUN}/step-7"), "job/7", CHUNK, wait_seconds=1.0)
    [result] = exchange.hear([1])[1]
    assert result.size_in_bytes == 5000
    exchange.forget([1])
    client.close()
    assert not list(Path(f"{RUN}/step-7").rglob("*.json"))


@pytest.mark.server
def test_the_cache_is_used_and_completed(place: Path, models: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(Settings.load())
    rows = {row.uri.rpartition("/")[2]: row for row in pool.rows()}
    assert {name: (row.state, row.is_pinned) for name, row in rows.items()} == {
        "whole": ("complete", True),
        "partial": ("partial", False),
    }
    assert all(row.reserved_bytes for row in rows.values())
    [progress] = (place / "local/cache").glob(".partial-*/.tierckpt/*/progress-*")
    monkeypatch.setattr(partial_entry, "boot_id", lambda: progress.name.split("-")[1])
    client = Client(Settings.load(chunk_size_bytes=CHUNK))
    fetched = {name: client.run(client.mover.prefetch(_bucket(name), None)) for name in MODELS}
    client.close()
    assert {name: result.fetched_bytes for name, result in fetched.items()} == {"whole": 0, "partial": CHUNK}
    for name, size_bytes in MODELS.items():
        assert (fetched[name].directory / "weights.bin").read_bytes() == pattern(size_bytes)


def _bucket(name: str) -> layout.Location:
    return layout.parse_uri(f"s3://{BUCKET}/{name}")


@pytest.mark.server
def test_what_is_pinned_in_the_cache_stays_and_what_is_evicted_is_gone(place: Path, models: None) -> None:
    command("prefetch", f"s3://{BUCKET}/partial", "--evict")
    command("prefetch", f"s3://{BUCKET}/whole", "--evict", code=3)
    pool = Pool(Settings.load())
    [row] = pool.rows()
    assert row.is_pinned and not pool.leases(row.name)
    command("prefetch", f"s3://{BUCKET}/whole", "--unpin")
    command("prefetch", f"s3://{BUCKET}/whole", "--evict")
    assert not list((place / "local/cache").glob("*whole*")) + list((place / "local/cache").glob("*partial*"))


def test_measured_read_modes_are_known(place: Path) -> None:
    tuner = read_tuner_for(Settings.load())
    assert tuner.is_known("8:0 21 a-boot") and tuner.way("8:0 21 a-boot") == WAYS[1]


def test_the_log_of_a_run_is_read(place: Path) -> None:
    report = command("report", RUN)
    assert report["uri"] == RUN and report["starts"]


def test_a_reader_of_format_1_refuses_what_is_written_now_and_says_why(tmp_path: Path) -> None:
    """The reader itself, as it was: what it says to somebody who goes back to the release before."""
    with tarfile.open(DATA / "reader-1.tar.gz") as tar:
        tar.extractall(tmp_path, **FILTER)
    dcp.save(state(1), storage_writer=tierckpt.TierStorageWriter(tmp_path / "run/step-1"))
    tierckpt.wait(tmp_path / "run/step-1", timeout_seconds=60)
    manifest = tmp_path / "run/step-1" / layout.MANIFEST
    read = f"import tierckpt.format.manifest as m; m.decode(open({str(manifest)!r}, 'rb').read())"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "version 2 with digest 'xxh3-128' is not known to this release, which reads version 1" in done.stderr
    assert "Read it with the release that wrote it" in done.stderr


def test_a_manifest_of_format_1_is_written_on_as_it_was(place: Path) -> None:
    for step in (1, 2):
        data = (local(f"{RUN}/step-{step}") / layout.MANIFEST).read_bytes()
        assert manifests.decode(data).version == 1
        assert manifests.decode(data).encode() == data
