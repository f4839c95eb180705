"""Direct puts to shared storage, used if the SSD is full or no faster: complete there, on the SSD, or an error.

T1 and T2 are in ``tierckpt/save/direct_put.py``, D5 and D7 in ``tierckpt/planning/drain_policy.py``.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import tierckpt
from tests.compat.worker import launch
from tests.fault.scenario_tools import of_each_rank
from tests.states import same, small_state, zeros_like
from tierckpt import Checkpointer
from tierckpt.checkpoint.journal import Journal, JournalEntry
from tierckpt.drain.drainer import Drainer
from tierckpt.errors import CapacityError, StoreUnavailableError
from tierckpt.format.layout import SUPERSEDED, local_dir, parse_uri
from tierckpt.read import replicated_file
from tierckpt.save import direct_put as straight
from tierckpt.training.drain_decider import DrainDecider, RankView, SaveDirective

HERE = "tests.integration.test_straight"
KiB, MiB = 1 << 10, 1 << 20
FULL = {"exposure_seconds_max": math.inf, "local_bytes_max": 64 * KiB, "local_full_policy": "error"}


def state_of(seed: int, mib: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {**small_state(seed), "large": torch.randn(mib * MiB // 4 + 13, generator=generator)}


def local_shards(local_root: Path, uri: str) -> list[str]:
    return sorted(path.name for path in local_dir(local_root, parse_uri(uri)).rglob("*.distcp"))


def shared_shards(uri: str) -> list[str]:
    return sorted(path.name for path in Path(uri).rglob("*.distcp"))


def check_restored(uri: str, step: int, expected: dict[str, Any]) -> None:
    state = zeros_like(expected)
    assert Checkpointer(uri).restore(state) == step and same(state, expected)


def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the policy choose a direct put for every save."""
    monkeypatch.setattr(DrainDecider, "decide", lambda *_, **__: SaveDirective(is_direct_put=True))


# --- T1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [64 * KiB, 8 * MiB])
def test_restore_of_direct_puts(shared_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    always(monkeypatch)
    with Checkpointer(shared_uri, exposure_seconds_max=math.inf, chunk_size_bytes=chunk) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step, 3)).result(60)
            assert tierckpt.latest(shared_uri) == f"{shared_uri}/step-{step}", "a completed save must be restorable"
        assert [record.is_direct_put for record in checkpointer.stats] == [True, True]
        assert all(record.shared_commit_seconds is not None for record in checkpointer.stats)
    assert local_shards(local_root, shared_uri) == [] and not Journal(local_root).entries()
    for step in (1, 2):
        state = zeros_like(state_of(step, 3))
        assert Checkpointer(shared_uri).restore(state, step) == step
        assert same(state, state_of(step, 3))


def test_failed_request_is_retried_with_the_same_bytes(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)
    real, tries = straight.Stream.pieces, 0

    def fails_first(self: Any) -> Any:
        nonlocal tries
        tries += 1
        for number, piece in enumerate(real(self)):
            if tries == 1 and number == 3:
                raise StoreUnavailableError("the connection was cut", hint="")
            yield piece

    monkeypatch.setattr(straight.Stream, "pieces", fails_first)
    with Checkpointer(s3_uri, exposure_seconds_max=math.inf, chunk_size_bytes=256 * KiB) as checkpointer:
        checkpointer.save(1, state_of(1, 4)).result(60)
        assert checkpointer.stats[0].is_direct_put
    assert tries == 2
    check_restored(s3_uri, 1, state_of(1, 4))


def test_direct_put_of_a_step_on_the_ssd(file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain PyTorch reads it, too."""
    with Checkpointer(file_uri) as checkpointer:
        checkpointer.save(1, state_of(1))
    assert local_shards(local_root, file_uri)
    always(monkeypatch)
    with Checkpointer(file_uri, exposure_seconds_max=math.inf) as checkpointer:
        checkpointer.save(1, state_of(7))
    assert local_shards(local_root, file_uri) == []
    target = zeros_like(state_of(7))
    dcp.load(target, storage_reader=FileSystemReader(f"{file_uri}/step-1"), no_dist=True)
    assert same(target, state_of(7))
    check_restored(file_uri, 1, state_of(7))
    assert len(shared_shards(f"{file_uri}/step-1")) == 1, "the replaced shard must be removed"


def test_when_a_direct_put_supersedes(file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K1: kept checkpoints are superseded only by newer ones on the same SSD, and this one is not there."""
    orders = {
        1: SaveDirective(),
        2: SaveDirective(is_sent=False),
        3: SaveDirective(is_sent=False),
        4: SaveDirective(is_direct_put=True),
    }
    monkeypatch.setattr(DrainDecider, "decide", lambda _, step, *__, **___: orders[step])
    run = local_dir(local_root, parse_uri(file_uri))
    passed: list[list[str]] = []
    real = Drainer.send_files

    def check() -> None:
        passed.append(sorted(path.parent.parent.name for path in run.glob(f"*/{SUPERSEDED}")))

    async def send_and_check(self: Drainer, entry: JournalEntry) -> None:
        if entry.uri.endswith("step-4"):
            check()
        await real(self, entry)

    monkeypatch.setattr(Drainer, "send_files", send_and_check)
    with Checkpointer(file_uri, exposure_seconds_max=math.inf) as checkpointer:
        for step in orders:
            checkpointer.save(step, state_of(step)).result(60)
    check()
    assert passed == [[], ["step-2", "step-3"]]
    assert not Journal(local_root).entries()


# --- D5: when ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_saves_continue_on_a_full_ssd(file_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first save detects the full SSD; the policy sends later ones directly."""
    caplog.set_level(logging.INFO)
    with Checkpointer(file_uri, interval=1, **FULL) as checkpointer:
        for step in range(1, 5):
            checkpointer.step(step, state_of(step))
            checkpointer.wait("local")
        assert [record.is_direct_put for record in checkpointer.stats] == [True] * 4
    assert "goes straight to the shared tier: the local tier has no room" in caplog.text
    assert "step 2 goes straight to shared storage: the SSD has no room for it" in caplog.text
    assert local_shards(local_root, file_uri) == []
    check_restored(file_uri, 4, state_of(4))


@pytest.mark.slow
@pytest.mark.parametrize("full_policy", ["error", "wait"])
@pytest.mark.parametrize("mib", [0, 1, 3])
def test_saves_in_a_row_on_a_full_ssd(
    full_policy: str, mib: int, file_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The policy decides the second save before it knows that the first was too large for the SSD."""
    caplog.set_level(logging.INFO)
    limits = {**FULL, "local_bytes_max": mib * MiB + 64 * KiB, "local_full_policy": full_policy}
    with Checkpointer(file_uri, **limits) as checkpointer:
        futures = [checkpointer.save(step, state_of(step, 2)) for step in (1, 2, 3, 4)]
        for future in futures:
            future.result(60)
        assert not any(record.error for record in checkpointer.stats)
        assert all(record.is_sent for record in checkpointer.stats if record.is_direct_put)
    check_restored(file_uri, 4, state_of(4, 2))
    if mib < 2:
        assert "on the local tier (" not in caplog.text, "the local tier is empty"
        assert caplog.text.count("is on the shared tier") == 4
    assert not Journal(local_root).entries()


@pytest.mark.slow
def test_saves_return_to_an_ssd_with_room(file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierckpt.planning.drain_policy.vote", lambda state, *_: state)  # both tiers are one disk here
    other = local_root / "checkpoints" / "somebody" / "else"
    other.mkdir(parents=True)
    (other / "large.bin").write_bytes(bytes(12 * MiB))
    limits: dict[str, Any] = {**FULL, "local_bytes_max": 12 * MiB}
    with Checkpointer(file_uri, interval=1, **limits) as checkpointer:
        for step in range(1, 7):
            if step == 4:
                shutil.rmtree(other)
            checkpointer.step(step, state_of(step))
            checkpointer.wait()
        assert [record.is_direct_put for record in checkpointer.stats] == [True] * 3 + [False] * 3


# --- T2 ------------------------------------------------------------------------------------------------------------


def test_a_save_that_neither_tier_takes(file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two shards arrives, the second does not, and the SSD is full."""
    always(monkeypatch)
    real = straight.send_shard

    async def half(store: Any, shard: Any, *rest: Any) -> Any:
        if "__0_1" in shard.path.name:
            raise StoreUnavailableError("nobody answers", hint="")
        return await real(store, shard, *rest)

    monkeypatch.setattr(straight, "send_shard", half)
    checkpointer = Checkpointer(file_uri, shard_size_bytes_max=MiB, **FULL)
    with pytest.raises(CapacityError, match="no room"):
        checkpointer.save(1, {f"t{n}": torch.randn(100_000) for n in range(5)}).result(60)
    assert shared_shards(f"{file_uri}/step-1") == [] and local_shards(local_root, file_uri) == []
    assert not Journal(local_root).entries() and tierckpt.latest(file_uri) is None


def digests_fail_once(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Fail once to write the block digests on this node, after all shards are stored."""
    real, errors = replicated_file.write_digests, [error]

    def keep(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*arguments)

    monkeypatch.setattr(replicated_file, "write_digests", keep)


@pytest.mark.slow
def test_error_after_the_last_shard_falls_back_to_the_ssd(
    file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    always(monkeypatch)
    digests_fail_once(monkeypatch, InterruptedError(errno.EINTR, os.strerror(errno.EINTR)))
    with Checkpointer(file_uri, exposure_seconds_max=math.inf) as checkpointer:
        checkpointer.save(1, state_of(1)).result(60)
        assert not checkpointer.stats[0].is_direct_put
    assert "cannot go straight to the shared tier, it goes to the SSD" in caplog.text
    assert shared_shards(f"{file_uri}/step-1") == local_shards(local_root, f"{file_uri}/step-1") != []
    check_restored(file_uri, 1, state_of(1))


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which would end pytest."""


def test_interrupt_after_the_last_shard(file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)
    digests_fail_once(monkeypatch, Interrupted())
    checkpointer = Checkpointer(file_uri, exposure_seconds_max=math.inf)
    with pytest.raises(Interrupted):
        checkpointer.save(1, state_of(1)).result(60)
    assert shared_shards(f"{file_uri}/step-1") == [] and local_shards(local_root, file_uri) == []


# --- several ranks -------------------------------------------------------------------------------------------------


def one_full_node(uri: str, roots: str) -> dict[str, Any]:
    """Two nodes; one starts with a full SSD."""
    rank = dist.get_rank()
    root = Path(roots, f"node-{rank}")
    full = {"local_bytes_max": 64 * KiB, "local_full_policy": "error"} if rank == 1 else {}
    name, state = f"own-{rank}", {}
    with Checkpointer(uri, local_root=root, exposure_seconds_max=math.inf, **full) as checkpointer:
        state = {name: torch.full((200_000,), rank + 1.0), "both": torch.ones(10)}
        checkpointer.save(1, state).result(60)
        first = tierckpt.latest(uri, local_root=root)
        checkpointer.save(2, state).result(60)
        straight = [record.is_direct_put for record in checkpointer.stats]
    outcome = {"first": first, "straight": straight, "shards": len(local_shards(root, f"{uri}/step-1"))}
    dist.barrier()
    shutil.rmtree(root)
    restored = {name: torch.zeros(200_000), "both": torch.zeros(10)}
    outcome["restored"] = Checkpointer(uri, local_root=root).restore(restored)
    outcome["value"] = restored[name].unique().tolist()
    outcomes = of_each_rank(outcome)
    return {key: [one[key] for one in outcomes] for key in outcome}


@pytest.mark.slow
@pytest.mark.distributed
def test_one_full_node_makes_all_ranks_put_directly(tmp_path: Path, file_uri: str) -> None:
    found = launch(f"{HERE}:one_full_node", 2, uri=file_uri, roots=str(tmp_path))
    assert found["first"] == [f"{file_uri}/step-1"] * 2, "a completed save must be restorable on every rank"
    assert found["shards"][0] >= 1 and found["shards"][1] == 0, "first save: each rank decides by its own SSD"
    assert found["straight"] == [[True, True]] * 2
    assert found["restored"] == [2, 2] and found["value"] == [[1.0], [2.0]]


def test_policy_uses_the_fullest_ssd_and_the_slowest_step() -> None:
    assert RankView.of_all([RankView(3.5, 0.01), RankView(0.5), RankView(drain_slowdown=0.2)]) == RankView(0.5, 0.2)
