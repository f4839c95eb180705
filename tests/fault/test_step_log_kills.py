"""A job with a gradient log that is killed at any moment resumes at most one step before, bit for bit."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.fault import step_log_scenarios
from tests.fault.runner import Job, start
from tests.services import ENVIRONMENT
from tierckpt.format.layout import GRADIENTS_DIR, local_dir, parse_uri
from tierckpt.save import log_segments

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

KILLS = int(ENVIRONMENT.get("TIERCKPT_TEST_LOG_KILLS", "1"))


class Seen:
    """What the ranks of a job, in all its lives, said of each step."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.lines = [
            [line.split(" ") for line in (folder / f"seen-{rank}").read_text().splitlines(keepends=True)]
            for rank in range(ranks)
        ]

    def said(self, rank: int, word: str) -> list[tuple[int, str]]:
        return [(int(line[1]), line[2].strip()) for line in self.lines[rank] if line[0] == word and len(line) == 3]

    def count(self, word: str) -> int:
        return len(self.said(0, word))

    def ended(self) -> int:
        """The newest step that ended on all ranks, in the last life."""
        return min(max((step for step, _ in self._last_life(rank, "ended")), default=0) for rank in range(self.ranks))

    @property
    def ranks(self) -> int:
        return len(self.lines)

    def resumed(self) -> int:
        """Where the last life began: at one step, and with the bits that an earlier life had there."""
        steps = {self.said(rank, "resumed")[-1][0] for rank in range(self.ranks)}
        assert len(steps) == 1, steps
        self.check()
        return steps.pop()

    def check(self) -> None:
        for rank in range(self.ranks):
            trained: dict[int, str] = {}
            for step, digest in self.said(rank, "trained"):
                assert trained.setdefault(step, digest) == digest, f"step {step} of rank {rank} has other bits"
            for step, digest in self.said(rank, "resumed"):
                assert not step or trained[step] == digest, f"rank {rank} was brought to other bits at step {step}"

    def _last_life(self, rank: int, word: str) -> list[tuple[int, str]]:
        lines = self.lines[rank]
        begun = max(number for number, line in enumerate(lines) if line[0] == "resumed")
        return [(int(line[1]), line[2].strip()) for line in lines[begun:] if line[0] == word and len(line) == 3]


def wait_for(job: Job, folder: Path, word: str, times: int, ranks: int = 1) -> None:
    seen = [folder / f"seen-{rank}" for rank in range(ranks)]
    job.until(lambda: all(path.exists() and path.read_text().count(word) >= times for path in seen), word, 120)


@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (1, {"window_steps": 4}), (2, {})], ids=["1", "windows", "2"])
def test_a_job_that_is_killed_loses_one_step_at_most(
    tmp_path: Path, local_root: Path, file_uri: str, ranks: int, options: dict[str, Any]
) -> None:
    chosen, lost, ended = random.Random(ranks), [], 0
    for kill in range(KILLS):
        job = start(
            step_log_scenarios.train, tmp_path, ranks, uri=file_uri, interval=20 if not options else 6, **options
        )
        wait_for(job, tmp_path, "resumed", kill + 1, ranks)
        first = 4 if options and not kill else 0  # nothing is logged before the first checkpoint
        wait_for(job, tmp_path, "ended", Seen(tmp_path, 1).count("ended") + first + chosen.choice((0, 3, 10, 30)))
        time.sleep(chosen.uniform(0.0, 0.05))
        job.kill()
        seen = Seen(tmp_path, ranks)
        resumed = seen.resumed()
        lost.append(ended - resumed)
        assert lost[-1] <= 1, job.output()[-3000:]
        ended = max(seen.ended(), resumed)
    print(f"{KILLS} kills over {ended} steps; steps lost: {max(lost)} at most")


def test_ranks_with_optimizers_near_storage_go_on_from_one_checkpoint(
    tmp_path: Path, local_root: Path, file_uri: str
) -> None:
    """Its shards are joined, nothing of the optimizer was copied, and plain PyTorch reads it."""
    chosen = random.Random(0)
    for kill in range(max(1, KILLS // 2)):
        job = start(step_log_scenarios.train, tmp_path, 2, uri=file_uri, near=True, interval=3)
        wait_for(job, tmp_path, "resumed", kill + 1)
        wait_for(job, tmp_path, "ended", Seen(tmp_path, 1).count("ended") + chosen.choice((4, 5, 8)))
        time.sleep(chosen.uniform(0.0, 0.05))
        job.kill()
    seen, _ = run(tmp_path, 2, uri=file_uri, near=True, interval=3, steps=12)
    assert seen.resumed() >= 3
    assert seen.ended() == 12
    directory = local_dir(local_root, parse_uri(f"{file_uri}/step-12"))
    reader = FileSystemReader(directory)
    found = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in reader.read_metadata().state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    load(found, storage_reader=reader, no_dist=True)
    assert found["model.0.weight"].shape == found["optimizer.state.0.weight.exp_avg"].shape == (64, 24)
    assert all(found[f"optimizer.state.{name}.step"] == 12 for name in ("0.weight", "0.bias", "3.weight", "3.bias"))
    assert torch.equal(found["optimizer.state.0.weight.master"].bfloat16(), found["model.0.weight"])


def run(folder: Path, ranks: int, **options: Any) -> tuple[Seen, str]:
    job = start(step_log_scenarios.train, folder, ranks, **options)
    assert job.codes(120) == [0] * ranks, job.output()[-3000:]
    return Seen(folder, ranks), job.output()


@pytest.mark.parametrize("bug", ["a missing frame", "a frame of another step", "frames out of order"])
def test_what_does_not_follow_is_not_applied_and_said(
    tmp_path: Path, local_root: Path, file_uri: str, bug: str
) -> None:
    run(tmp_path, 1, uri=file_uri, steps=9, bug=bug)
    seen, said = run(tmp_path, 1, uri=file_uri, steps=9)
    assert seen.resumed() == 5  # the first step is a checkpoint, and the fifth frame is of the sixth
    assert "4 steps of the gradient log" in said and ", which ends there" in said


@pytest.mark.parametrize("bug", ["a stale hyperparameter", "gradients cast"])
def test_a_step_that_is_made_again_otherwise_is_seen_by_its_bits(
    tmp_path: Path, local_root: Path, file_uri: str, bug: str
) -> None:
    """Seeded: the comparison of the kills must be able to fail."""
    run(tmp_path, 1, uri=file_uri, steps=9, bug=bug)
    seen, _ = run(tmp_path, 1, uri=file_uri, steps=9)
    with pytest.raises(AssertionError, match="other bits"):
        seen.check()


def test_ranks_go_to_the_newest_step_that_all_have(tmp_path: Path, local_root: Path, file_uri: str) -> None:
    """One rank has lost two steps, then half a frame; then there are other ranks."""
    seen, _ = run(tmp_path, 2, uri=file_uri, steps=9)
    digests = [dict(seen.said(rank, "trained")) for rank in range(2)]
    root = local_dir(local_root, parse_uri(file_uri)) / GRADIENTS_DIR
    [path] = log_segments.paths_in(root / "rank-1")
    data = path.read_bytes()
    frame = (len(data) - 4096) // data.count(
        log_segments.FRAME
    )  # the head takes a block; the first step is a checkpoint
    path.write_bytes(data[: 4096 + 6 * frame + 5000])
    seen, said = run(tmp_path, 2, uri=file_uri, steps=0)
    at = seen.resumed()
    assert at == 7, said[-3000:]
    assert "rank 1:" in said and "cut short" in said
    assert all(seen.said(rank, "resumed")[-1] == (at, digests[rank][at]) for rank in range(2))
    damaged = bytearray(path.read_bytes())
    damaged[4096 + 3 * frame + frame // 2] ^= 1  # of a gradient: found when it is read
    path.write_bytes(damaged)
    seen, said = run(tmp_path, 2, uri=file_uri, steps=0)
    back = seen.resumed()
    assert back == 4 and "does not match its digest" in said
    assert all(seen.said(rank, "resumed")[-1] == (back, digests[rank][back]) for rank in range(2))
    _, said = run(tmp_path / "one", 1, uri=file_uri, steps=0, has_statistics=False)
    assert "it was written by a job of 2 ranks" in said
    assert Seen(tmp_path / "one", 1).said(0, "resumed")[-1][0] == 1
