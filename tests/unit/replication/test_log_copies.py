"""A gradient log on another node: counted steps, fetches, and removals (R4, R5)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tierckpt.cache import space
from tierckpt.config import Settings
from tierckpt.errors import CapacityError, IntegrityError
from tierckpt.format.layout import GRADIENTS_DIR, local_dir, parse_uri
from tierckpt.peer.membership import Member
from tierckpt.peer.replica_policy import LogRow
from tierckpt.replay.log import GradientLog, roll_forward
from tierckpt.replication import log_copies
from tierckpt.replication.log_copies import LogIndex, fetch_log
from tierckpt.save import log_segments
from tierckpt.types import ByteRange

RUN = "s3://bucket/run"
SOURCE = Member("source", "127.0.0.1:1")


class Source:
    """A node with a log; a ``PeerCatalog`` that asks it and nobody else."""

    def __init__(self, root: Path) -> None:
        self.index = LogIndex(root)
        self.directory = local_dir(root, parse_uri(RUN)) / GRADIENTS_DIR / "rank-0"
        self.log = GradientLog(_optimizer(), self.directory)
        self.flips = False

    def step(self, *numbers: int) -> None:
        for number in numbers:
            for optimizer in self.log.optimizers.values():
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad = torch.full_like(parameter, float(number))
                optimizer.step()
            self.log.end_of_step(number)
        self.log.sync()

    @property
    def row(self) -> LogRow:
        self.index.refresh()
        [row] = self.index.rows
        return row

    async def segment(self, member: Member, identity: str, at: ByteRange) -> bytes:
        opened = self.index.open(identity, at)
        assert opened is not None
        data = os.pread(opened.file, at.size_bytes, at.start)
        opened.close()
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if self.flips else data


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(3000))], lr=0.1)


class Holder:
    def __init__(self, root: Path, source: Source) -> None:
        self.settings = Settings.load(local_root=root)
        self.index, self._source = LogIndex(root), source
        self.directory = local_dir(root, parse_uri(RUN)) / GRADIENTS_DIR / "copies" / "source" / "rank-0"

    async def fetch(self, after: int = -1) -> int:
        cluster: Any = self._source
        return await fetch_log(self.index, self.settings, cluster, SOURCE, self._source.row, after=after)

    @property
    def row(self) -> LogRow:
        self.index.refresh()
        [row] = self.index.rows
        assert row.of == "source"
        return row

    @property
    def begins(self) -> list[int]:
        return [log_segments.step_of_path(path) for path in log_segments.paths_in(self.directory)]


@pytest.fixture
def source(tmp_path: Path) -> Any:
    source = Source(tmp_path / "source")
    source.log.begin("base-0")
    yield source
    source.log.close()


@pytest.fixture
def holder(tmp_path: Path, source: Source) -> Holder:
    return Holder(tmp_path / "holder", source)


async def test_a_copy_grows_as_the_log_does(source: Source, holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_copies, "PIECE_BYTES", 5000)
    source.step(1, 2)
    first = await holder.fetch()
    assert (holder.row.step, holder.row.bases) == (2, ("base-0",))
    source.step(3)
    assert 0 < await holder.fetch() < first
    assert (holder.row.step, await holder.fetch()) == (3, 0)
    again = _optimizer()
    assert roll_forward(again, holder.directory, "base-0").step == 3
    [mine], [theirs] = (one.param_groups[0]["params"] for one in (again, source.log.optimizers[""]))
    assert torch.equal(mine, theirs)


async def test_half_a_frame_does_not_count_and_is_cut_off(source: Source, holder: Holder) -> None:
    source.step(1, 2, 3)
    await holder.fetch()
    [path] = log_segments.paths_in(holder.directory)
    data = path.read_bytes()
    for cut in (len(data) - 4096, len(data) // 2, 4000, 0):
        path.write_bytes(data[:cut] + b"left over")
        holder.index = LogIndex(holder.settings.local_root)  # the agent was killed
        holder.index.refresh()
        assert all(row.step < 3 for row in holder.index.rows)
        await holder.fetch()
        assert (holder.row.step, path.read_bytes()) == (3, data)


async def test_damage_does_not_count_and_says_where(source: Source, holder: Holder) -> None:
    source.step(1)
    await holder.fetch()
    source.step(2)
    source.flips = True
    with pytest.raises(IntegrityError, match="after step 1"):
        await holder.fetch()
    assert holder.row.step == 1
    source.flips = False
    await holder.fetch()
    assert holder.row.step == 2


async def test_without_room_there_is_no_copy(source: Source, holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    source.step(1)
    monkeypatch.setattr(space, "has_room", lambda *_: False)
    with pytest.raises(CapacityError):
        await holder.fetch()
    holder.index.refresh()
    assert holder.begins == []


async def test_what_a_safe_checkpoint_has_goes_and_is_not_fetched_again(source: Source, holder: Holder) -> None:
    for base in (0, 2, 4):
        if base:
            source.log.begin(f"base-{base}", step=base)
        source.step(base + 1, base + 2)
    await holder.fetch()
    assert holder.begins == [0, 2, 4]
    log_segments.remove_before(source.directory, 2)  # the source removes committed steps: the copy stays
    await holder.fetch()
    assert holder.begins == [0, 2, 4]
    holder.index.truncate(holder.row, 4, is_told=True)
    assert holder.begins == [4] and await holder.fetch(after=4) == 0
    holder.index.truncate(holder.row, 6, is_told=True)
    assert holder.begins == [4]
    holder.index.truncate(holder.row, 6, is_told=False)
    assert not holder.directory.exists()


async def test_what_was_given_up_goes_before_what_replaces_it_comes(source: Source, holder: Holder) -> None:
    source.step(1, 2)
    source.log.begin("base-2", step=2)
    source.step(3, 4)
    await holder.fetch()
    source.log.fail("of this test")
    source.log.begin("base-2", step=2)
    source.step(3)
    assert holder.row.step == 4
    await holder.fetch()
    assert (holder.row.step, holder.begins) == (3, [0, 2])


async def test_a_log_goes_on_where_its_copy_was_adopted(source: Source, holder: Holder, tmp_path: Path) -> None:
    """What leads less far goes: a segment of another history, and one that is shorter."""
    source.step(1, 2, 3)
    await holder.fetch()
    own = Source(tmp_path / "holder")
    own.log.begin("base-0")
    own.step(1)
    [copy] = log_segments.paths_in(holder.directory)
    shutil.copyfile(copy, own.directory / copy.name)
    with (own.directory / copy.name).open("r+b") as file:
        file.truncate(5000)
    log_segments.adopt(holder.directory, own.directory)
    assert [path.name for path in log_segments.paths_in(own.directory)] == [copy.name]
    fresh = _optimizer()
    found = roll_forward(fresh, own.directory, "base-0")
    assert found.step == 3
    own.log.close()
    own.log = GradientLog(fresh, own.directory)
    own.log.begin("base-0", found)
    own.step(4)
    reached = roll_forward(_optimizer(), own.directory, "base-0")
    assert (reached.step, reached.steps, reached.end_reason) == (4, 4, "")
    own.log.close()


def test_a_segment_that_goes_between_two_looks_is_not_told_of(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    source.log.begin("one")
    source.step(1, 2)
    assert [one.newest_step for one in log_segments.list_chains(source.directory)] == [2]
    walk_from = log_segments.walk_from

    def of_removed(*given: Any) -> Any:
        for path in log_segments.paths_in(source.directory):
            path.unlink()
        return walk_from(*given)

    monkeypatch.setattr(log_segments, "walk_from", of_removed)
    assert log_segments.list_chains(source.directory) == []
