"""A job with a gradient log, killed at any moment, loses at most one step, and resumes bit for bit."""

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


class JobOutput:
    """The output of all ranks of a job, over all its restarts."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.ranks = ranks
        self.lines = [
            [line.split(" ") for line in (folder / f"seen-{rank}").read_text().splitlines(keepends=True)]
            for rank in range(ranks)
        ]

    def lines_with(self, rank: int, word: str, *, since_resume: bool = False) -> list[tuple[int, str]]:
        lines = self.lines[rank]
        last_resume = max((number for number, line in enumerate(lines) if line[0] == "resumed"), default=0)
        lines = lines[last_resume if since_resume else 0 :]
        return [(int(line[1]), line[2].strip()) for line in lines if line[0] == word and len(line) == 3]

    def count(self, word: str) -> int:
        return len(self.lines_with(0, word))

    def ended(self) -> int:
        """The newest step that ended on all ranks since the last restart."""
        ended = [self.lines_with(rank, "ended", since_resume=True) for rank in range(self.ranks)]
        return min(max((step for step, _ in lines), default=0) for lines in ended)

    def resumed(self) -> int:
        """The step of the last resume, the same on all ranks, with the bits that it had before."""
        steps = {self.lines_with(rank, "resumed")[-1][0] for rank in range(self.ranks)}
        assert len(steps) == 1, steps
        self.check()
        return steps.pop()

    def check(self) -> None:
        for rank in range(self.ranks):
            trained: dict[int, str] = {}
            for step, digest in self.lines_with(rank, "trained"):
                assert trained.setdefault(step, digest) == digest, f"step {step} of rank {rank} has other bits"
            for step, digest in self.lines_with(rank, "resumed"):
                assert not step or trained[step] == digest, f"rank {rank} resumed with other bits at step {step}"


def wait_for(job: Job, folder: Path, word: str, times: int, ranks: int = 1) -> None:
    seen = [folder / f"seen-{rank}" for rank in range(ranks)]
    job.until(lambda: all(path.exists() and path.read_text().count(word) >= times for path in seen), word, 120)


@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (1, {"window_steps": 4}), (2, {})], ids=["1", "windows", "2"])
def test_killed_job_loses_at_most_one_step(
    tmp_path: Path, local_root: Path, file_uri: str, ranks: int, options: dict[str, Any]
) -> None:
    chosen, lost, ended = random.Random(ranks), [], 0
    for kill in range(KILLS):
        job = start(
            step_log_scenarios.train, tmp_path, ranks, uri=file_uri, interval=20 if not options else 6, **options
        )
        wait_for(job, tmp_path, "resumed", kill + 1, ranks)
        first = 4 if options and not kill else 0  # no log before the first checkpoint
        wait_for(job, tmp_path, "ended", JobOutput(tmp_path, 1).count("ended") + first + chosen.choice((0, 3, 10, 30)))
        time.sleep(chosen.uniform(0.0, 0.05))
        job.kill()
        seen = JobOutput(tmp_path, ranks)
        resumed = seen.resumed()
        lost.append(ended - resumed)
        assert lost[-1] <= 1, job.output()[-3000:]
        ended = max(seen.ended(), resumed)
    print(f"{KILLS} kills over {ended} steps; steps lost: {max(lost)} at most")


@pytest.mark.slow
def test_ranks_with_near_storage_optimizers_resume_from_one_checkpoint(
    tmp_path: Path, local_root: Path, file_uri: str
) -> None:
    """The shards are joined without copies of the optimizer, and plain PyTorch reads the checkpoint."""
    chosen = random.Random(0)
    for kill in range(max(1, KILLS // 2)):
        job = start(step_log_scenarios.train, tmp_path, 2, uri=file_uri, near=True, interval=3)
        wait_for(job, tmp_path, "resumed", kill + 1)
        wait_for(job, tmp_path, "ended", JobOutput(tmp_path, 1).count("ended") + chosen.choice((4, 5, 8)))
        time.sleep(chosen.uniform(0.0, 0.05))
        job.kill()
    newest = max(step for step, _ in JobOutput(tmp_path, 1).lines_with(0, "ended"))
    steps = 3 * (newest // 3 + 2)
    seen, _ = run(tmp_path, 2, uri=file_uri, near=True, interval=3, steps=steps)
    assert seen.resumed() >= 3
    assert seen.ended() == steps
    directory = local_dir(local_root, parse_uri(f"{file_uri}/step-{steps}"))
    reader = FileSystemReader(directory)
    found = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in reader.read_metadata().state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    load(found, storage_reader=reader, no_dist=True)
    assert found["model.0.weight"].shape == found["optimizer.state.0.weight.exp_avg"].shape == (64, 24)
    assert all(found[f"optimizer.state.{name}.step"] == steps for name in ("0.weight", "0.bias", "3.weight", "3.bias"))
    assert torch.equal(found["optimizer.state.0.weight.master"].bfloat16(), found["model.0.weight"])


def run(folder: Path, ranks: int, **options: Any) -> tuple[JobOutput, str]:
    job = start(step_log_scenarios.train, folder, ranks, **options)
    assert job.codes(120) == [0] * ranks, job.output()[-3000:]
    return JobOutput(folder, ranks), job.output()


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["a missing frame", "a frame of another step", "frames out of order"])
def test_gap_in_the_log_ends_the_replay_and_is_reported(
    tmp_path: Path, local_root: Path, file_uri: str, bug: str
) -> None:
    run(tmp_path, 1, uri=file_uri, steps=9, bug=bug)
    seen, output = run(tmp_path, 1, uri=file_uri, steps=9)
    assert seen.resumed() == 5  # the first step is a checkpoint, so the fifth frame is step 6
    assert "4 steps of the gradient log" in output and ", which ends there" in output


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["a stale hyperparameter", "gradients cast"])
def test_control_step_with_other_bits_is_found(tmp_path: Path, local_root: Path, file_uri: str, bug: str) -> None:
    """Control: the comparison of bits finds a seeded bug."""
    run(tmp_path, 1, uri=file_uri, steps=9, bug=bug)
    seen, _ = run(tmp_path, 1, uri=file_uri, steps=9)
    with pytest.raises(AssertionError, match="other bits"):
        seen.check()


@pytest.mark.slow
def test_ranks_resume_at_the_newest_common_step(tmp_path: Path, local_root: Path, file_uri: str) -> None:
    """One rank loses two steps, then half a frame; then the number of ranks changes."""
    seen, _ = run(tmp_path, 2, uri=file_uri, steps=9)
    digests = [dict(seen.lines_with(rank, "trained")) for rank in range(2)]
    root = local_dir(local_root, parse_uri(file_uri)) / GRADIENTS_DIR
    [path] = log_segments.paths_in(root / "rank-1")
    data = path.read_bytes()
    # The head takes a block, and the first step is a checkpoint.
    frame = (len(data) - 4096) // data.count(log_segments.FRAME)
    path.write_bytes(data[: 4096 + 6 * frame + 5000])
    seen, output = run(tmp_path, 2, uri=file_uri, steps=0)
    at = seen.resumed()
    assert at == 7, output[-3000:]
    assert "rank 1:" in output and "cut short" in output
    assert all(seen.lines_with(rank, "resumed")[-1] == (at, digests[rank][at]) for rank in range(2))
    damaged = bytearray(path.read_bytes())
    damaged[4096 + 3 * frame + frame // 2] ^= 1  # in a gradient: found by the digest
    path.write_bytes(damaged)
    seen, output = run(tmp_path, 2, uri=file_uri, steps=0)
    back = seen.resumed()
    assert back == 4 and "does not match its digest" in output
    assert all(seen.lines_with(rank, "resumed")[-1] == (back, digests[rank][back]) for rank in range(2))
    _, output = run(tmp_path / "one", 1, uri=file_uri, steps=0, has_statistics=False)
    assert "it was written by a job of 2 ranks" in output
    assert JobOutput(tmp_path / "one", 1).lines_with(0, "resumed")[-1][0] == 1
