"""Two jobs on one local root: removals by one job during a scan of the other cause no error in either.

TIERCKPT_TEST_TWO_JOBS sets how many steps each job saves.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import tierckpt
from tests.command_line import python
from tierckpt.agent.node_document import checkpoints
from tierckpt.cache import space
from tierckpt.cache.pool import Pool
from tierckpt.checkpoint import local_commit
from tierckpt.checkpoint.catalog import has_shards
from tierckpt.checkpoint.journal import LOCAL_ONLY, Journal, JournalEntry
from tierckpt.checkpoint.prune import Pruner, finish_local
from tierckpt.checkpoint.retention import drop_superseded, local_checkpoints, marked_directories
from tierckpt.checkpoint.run_records import local_records
from tierckpt.config import Settings
from tierckpt.disk.durable import make_dirs
from tierckpt.disk.local_root import clear_leftovers
from tierckpt.errors import TierckptError
from tierckpt.format import layout
from tierckpt.format.layout import DRAINED, MANIFEST, METADATA, ORIGIN_DIR, PARTS_DIR, local_dir, parse_uri
from tierckpt.format.manifest import FileEntry, Manifest
from tierckpt.replication.replicator import LocalIndex
from tierckpt.training.checkpointer import Checkpointer

STEPS = int(os.environ.get("TIERCKPT_TEST_TWO_JOBS", "6"))
SCAN_SECONDS = 0.3
COMMITTED = Manifest("cd34", 1, 65536, (FileEntry(METADATA, 0, ()),), ()).encode()

JOB = """
import sys
import torch
from tierckpt import Checkpointer
uri, steps = sys.argv[1], int(sys.argv[2])
with Checkpointer(uri, keep_last=2) as checkpointer:
    for step in range(1, steps + 1):
        checkpointer.save(step, {"w": torch.full((4096,), float(step))}).result(60)
print("saved", steps)
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load(None, local_root=tmp_path / "local", mover="inline", local_bytes_max="10GiB")


def run_of(settings: Settings) -> Path:
    return local_dir(settings.local_root, parse_uri("file:///elsewhere/run/step-1")).parent


def superseded(settings: Settings) -> None:
    """Drop local-only steps older than the newest drained one."""
    journal = Journal(settings.local_root)
    journal.write(JournalEntry("ef56", "file:///elsewhere/run/step-99", 0, LOCAL_ONLY))
    drop_superseded(settings.local_root, journal)


SCANS: dict[str, Callable[[Settings], object]] = {
    "unfinished removals": lambda settings: finish_local(settings.local_root, Journal(settings.local_root)),
    "checkpoints": lambda settings: list(local_checkpoints(settings.local_root)),
    "byte count": lambda settings: space.checkpoint_bytes(settings.local_root),
    "eviction": lambda settings: space.evict(settings, 1 << 50, settings.local_root),
    "local index": lambda settings: LocalIndex(settings.local_root).refresh(),
    "status": lambda settings: list(
        checkpoints(settings.local_root, [*marked_directories(settings.local_root / "checkpoints")], {})
    ),
    "leftovers": lambda settings: clear_leftovers(settings.local_root),
    "journal": lambda settings: Journal(settings.local_root).entries(),
    "cache": lambda settings: Pool(settings).rows(),
    "superseded": superseded,
    "shards": lambda settings: [has_shards(run_of(settings) / f"step-{step}") for step in range(8)],
    "history": lambda settings: [local_records(run_of(settings) / f"step-{step}") for step in range(8)],
    "discarded attempts": lambda settings: [
        local_commit.discard_attempt(run_of(settings) / f"step-{step}", "ab12") for step in range(8)
    ],
    "created directories": lambda settings: all(
        make_dirs(run_of(settings) / f"step-{step}" / PARTS_DIR) is None for step in range(8)
    ),
}


@pytest.mark.parametrize("name", SCANS)
def test_scans_tolerate_directories_that_appear_and_vanish(name: str, settings: Settings) -> None:
    """The other job changes names as fast as it can, to hit each moment between a scan and the use of a name."""
    stop = threading.Event()

    def comes_and_goes() -> None:
        for number in itertools.count():
            directory = run_of(settings) / f"step-{number % 8}"
            try:
                for inside in (PARTS_DIR, ORIGIN_DIR, layout.REMOVED_DIR, "history"):
                    (directory / inside).mkdir(parents=True, exist_ok=True)
                (directory / "new").write_bytes(COMMITTED)
                (directory / "new").replace(directory / MANIFEST)
                (directory / "__0_0-ab12.distcp").write_bytes(bytes(100))
                (directory / DRAINED).write_bytes(b"cd34")
            except OSError:
                pass  # an empty directory was removed by the other side
            shutil.rmtree(run_of(settings) / f"step-{(number + 4) % 8}", ignore_errors=True)
            if stop.is_set():
                return

    other = threading.Thread(target=comes_and_goes)
    other.start()
    try:
        deadline, scans = time.monotonic() + SCAN_SECONDS, 0
        while scans == 0 or time.monotonic() < deadline:
            SCANS[name](settings)
            scans += 1
    finally:
        stop.set()
        other.join()


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * STEPS)
def test_two_jobs_save_and_prune_on_one_local_root(tmp_path: Path) -> None:
    def job(number: int) -> subprocess.CompletedProcess[str]:
        return python(JOB, tmp_path / "shared" / f"run-{number}", STEPS, timeout=60 + 10 * STEPS)

    with ThreadPoolExecutor() as pool:
        for done in pool.map(job, range(2)):
            assert (done.returncode, done.stdout) == (0, f"saved {STEPS}\n"), done.stderr[-3000:]
            assert "Traceback" not in done.stderr
    for number in range(2):
        run = str(tmp_path / "shared" / f"run-{number}")
        assert tierckpt.latest(run) == f"{run}/step-{STEPS}"


@pytest.mark.parametrize("error", [FileNotFoundError("x"), RuntimeError("x"), TierckptError("x")])
def test_retention_errors_do_not_fail_saves(error: Exception, file_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Pruner, "prune", fails)
    with Checkpointer(file_uri, keep_last=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.ones(3)})
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-2"
