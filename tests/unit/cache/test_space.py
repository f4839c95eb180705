"""Eviction order on the SSD: for a save, for a copy of another node's checkpoint, and for a prefetch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.unit.cache.test_pool import SIZE, fill, model, present
from tierckpt import telemetry
from tierckpt.cache import space
from tierckpt.cache.pool import Pool
from tierckpt.checkpoint import local_commit
from tierckpt.config import Settings
from tierckpt.disk.durable import Space
from tierckpt.disk.file_lock import try_lock
from tierckpt.errors import CapacityError
from tierckpt.format.layout import METADATA, attempt_metadata, local_dir, parse_uri
from tierckpt.format.manifest import FileEntry, Manifest, digests_of

RUN = "s3://bucket/run"
STEP_BYTES = 2 * SIZE
Lack: TypeAlias = Callable[[int], None]


def checkpoint(root: Path, step: int, *, is_drained: bool = True) -> Path:
    location, attempt = parse_uri(f"{RUN}/step-{step}"), f"attempt{step}"
    directory, metadata, shard = local_dir(root, location), b"metadata", bytes(STEP_BYTES)

    def entry(path: str, data: bytes, source: str = "") -> FileEntry:
        return FileEntry(path, len(data), digests_of(data, 1 << 20), 0, attempt, source)

    files = (entry(f"__0_0-{attempt}.distcp", shard),)
    described = (entry(METADATA, metadata, attempt_metadata(attempt)),)
    manifest = Manifest(attempt, 1, 1 << 20, described, files, created_unix_seconds=1000.0 + step)
    directory.mkdir(parents=True)
    (directory / files[0].path).write_bytes(shard)
    local_commit.write_attempt_metadata(directory, manifest, {METADATA: metadata})
    local_commit.commit_local(directory, location, manifest, {METADATA: metadata})
    if is_drained:
        local_commit.mark_drained(directory, attempt)
    return directory


@pytest.fixture
def node(local_root: Path) -> Pool:
    """Three drained steps and three cache entries."""
    pool = Pool(Settings.load(local_root=local_root, local_high_water=1.0))
    for step in (1, 2, 3):
        checkpoint(local_root, step)
    for name in "abc":
        fill(pool, model(name))
    return pool


def steps(node: Pool) -> set[int]:
    found = local_dir(node.settings.local_root, parse_uri(RUN)).iterdir()
    return {int(path.name[5:]) for path in found if path.name != ".tierckpt"}


def make_room(node: Pool, **changed: int) -> None:
    """Make room for a save of one byte."""
    space.make_room(node.settings.model_copy(update=changed), 1, node.settings.local_root / "checkpoints/new")


@pytest.fixture
def evicted() -> Iterator[dict[str, float]]:
    """Evicted bytes, by kind."""
    seen: dict[str, float] = {}

    def listener(metric: telemetry.Metric, value: float, labels: telemetry.Labels, /) -> None:
        if metric is telemetry.EVICTED_BYTES:
            seen[labels["kind"]] = seen.get(labels["kind"], 0) + value

    stop = telemetry.listen(listener)
    yield seen
    stop()


@pytest.fixture
def lack(evicted: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Shrink a disk of 1 GiB until one more byte lacks this many bytes, and return the evictions."""
    size_bytes = 1 << 30

    def set_lack(lacking_bytes: int) -> None:
        begun = sum(evicted.values())

        def space_of(_: Path) -> Space:
            gone = int(sum(evicted.values()) - begun)
            free = 1 + int(size_bytes * space.MARGIN_FRACTION) - lacking_bytes + gone
            return Space(free, size_bytes - free)

        monkeypatch.setattr(space, "space_of", space_of)

    return set_lack


def test_a_save_evicts_old_checkpoints_before_models(node: Pool, lack: Lack) -> None:
    for lacking_bytes, left, models in ((1, {2, 3}, "abc"), (STEP_BYTES + 1, {3}, "bc")):
        lack(lacking_bytes)
        make_room(node)
        assert steps(node) == left and present(node) == {*models}
    lack(1 << 30)
    with pytest.raises(CapacityError):
        make_room(node)
    assert steps(node) == {3}, "the newest checkpoint stays"


def test_the_checkpoint_quota_evicts_no_model(node: Pool) -> None:
    with pytest.raises(CapacityError):
        make_room(node, local_bytes_max=STEP_BYTES)
    assert steps(node) == {3} and present(node) == {*"abc"}


def test_a_peer_copy_evicts_no_model(node: Pool, lack: Lack) -> None:
    lack(1 << 30)
    assert not space.has_room(node.settings, 1, node.settings.local_root / "checkpoints/new")
    assert steps(node) == {3} and present(node) == {*"abc"}


def test_a_prefetch_evicts_no_checkpoint(node: Pool, lack: Lack) -> None:
    node.pin(model("a").name)
    lack(SIZE + 2)
    with pytest.raises(CapacityError) as caught:
        space.reserve(node, model("d"), SIZE)
    assert caught.value.context["pinned_bytes"] == SIZE
    assert steps(node) == {1, 2, 3} and present(node) == {*"abc"}


def test_evictions_are_counted_by_kind(node: Pool, lack: Lack, evicted: dict[str, float]) -> None:
    lack(2 * STEP_BYTES + 1)
    make_room(node)
    assert evicted == {"checkpoint": 2 * STEP_BYTES, "cache": SIZE}


def test_a_hanging_admission_does_not_fail_a_save(node: Pool, lack: Lack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "SAVE_ADMISSION_SECONDS", 0.01)
    lack(1)
    with try_lock(node.settings.local_root / "admission.lock"):
        make_room(node)
    assert steps(node) == {2, 3}


def test_a_model_leased_during_eviction_is_not_counted(node: Pool, lack: Lack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader leases the first candidate between the plan of a reservation and its evictions."""
    real, leases = Pool.evict, []

    def late(pool: Pool, name: str) -> bool:
        if not leases:
            leases.append(pool.lease(name))
        return real(pool, name)

    monkeypatch.setattr(Pool, "evict", late)
    lack(2 - SIZE)
    plan = space.reserve(node, model("d"), SIZE)
    leases[0].close()
    assert [one.uri for one in plan.evicted] == ["s3://bucket/b"]
    assert present(node) == {"a", "c"}
