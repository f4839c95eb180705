"""``tierckpt://`` write-back: a closed file is durable on the node and drains; no write is lost, no removal undone."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from tests.command_line import CommandLine, python
from tierckpt.checkpoint.journal import FILE_SET_ASIDE, Journal
from tierckpt.cli.ui.app import run as run_cli
from tierckpt.client import close_all
from tierckpt.drain import write_back
from tierckpt.errors import CapacityError, CommitAbandonedError, ConfigError, IntegrityError, OperationTimeoutError
from tierckpt.stores.local import LocalStore
from tierckpt.stores.obstore_store import RemoteStore

SECONDS = 120.0


@pytest.fixture
def fs() -> Any:
    return fsspec.filesystem("tierckpt", skip_instance_cache=True)


@pytest.fixture(params=[pytest.param("file", marks=pytest.mark.slow), pytest.param("s3", marks=pytest.mark.server)])
def top(request: pytest.FixtureRequest) -> str:
    uri: str = request.getfixturevalue(f"{request.param}_uri")
    return f"{request.param}/{uri.partition('://')[2] or uri.lstrip('/')}/top"


@pytest.fixture
def held() -> Iterator[None]:
    """Pause drains."""
    assert run_cli(["drain", "--pause"]) == 0
    yield
    run_cli(["drain", "--resume"])


def stored(top: str) -> dict[str, bytes]:
    """Return the files of the store, as seen from a node with an empty cache."""
    other = fsspec.filesystem(
        "tierckpt", local_root=Path(os.environ["TIERCKPT_LOCAL_ROOT"], "../other"), skip_instance_cache=True
    )
    return {path.removeprefix(f"{top}/"): other.cat_file(path) for path in other.find(top)}


@pytest.mark.slow
@pytest.mark.usefixtures("held")
def test_node_sees_its_writes_renames_and_removals_before_they_drain(top: str, fs: Any) -> None:
    large = os.urandom((17 << 20) + 5)
    for name, data in (("a/one", b"1"), ("a/two", b"22"), ("a/b/large", large), ("a/gone", b"x"), ("empty", b"")):
        fs.pipe_file(f"{top}/{name}", data)
    fs.rm(f"{top}/a/gone")
    fs.mv(f"{top}/a/two", f"{top}/a/renamed")
    fs.cp_file(f"{top}/a/one", f"{top}/a/copy")
    assert stored(top) == {}
    assert [fs.exists(f"{top}/a/{name}") for name in ("one", "two", "gone", "renamed")] == [True, False, False, True]
    assert sorted(fs.ls(f"{top}/a", detail=False)) == [f"{top}/a/{name}" for name in ("b", "copy", "one", "renamed")]
    assert fs.info(f"{top}/a/b/large")["size"] == len(large)
    assert fs.isdir(f"{top}/a/b")
    assert fs.isfile(f"{top}/empty")
    assert sorted(fs.find(top)) == [f"{top}/{name}" for name in ("a/b/large", "a/copy", "a/one", "a/renamed", "empty")]
    assert fs.cat_file(f"{top}/a/b/large") == large
    with fs.open(f"{top}/a/b/large") as file:
        file.seek(8 << 20)
        assert file.read(10) == large[8 << 20 :][:10]
        run_cli(["drain", "--resume"])
        fs.wait(top)
        assert file.read() == large[(8 << 20) + 10 :]  # an open file stays
    assert stored(top) == {"a/b/large": large, "a/copy": b"1", "a/one": b"1", "a/renamed": b"22", "empty": b""}
    assert sorted(fs.find(top)) == [f"{top}/{name}" for name in ("a/b/large", "a/copy", "a/one", "a/renamed", "empty")]
    assert not [*Path(os.environ["TIERCKPT_LOCAL_ROOT"], "written").iterdir()]


def write_and_die_in(name: str, url: str) -> None:
    """Write b"kept" to ``url`` in a process that is killed on its call of ``name``."""
    module, _, attribute = name.partition(":")
    code = (
        "import importlib, os, signal, sys, fsspec\n"
        f"module = importlib.import_module('tierckpt.{module}')\n"
        f"module.{attribute} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "with fsspec.open(sys.argv[1], 'wb') as file:\n    file.write(b'kept' * 5_000_000)\n"
    )
    assert python(code, url).returncode == -signal.SIGKILL


def in_a_process_that_does_not_wait(call: str, url: str) -> None:
    """Call a method of the file system in another process, which exits without waiting for its drains."""
    env = {**os.environ, "TIERCKPT_EXIT_TIMEOUT_SECONDS": "0"}
    python(f"import sys, fsspec; fsspec.filesystem('tierckpt').{call}", url, env=env, check=True)


def test_closed_file_survives_a_kill_right_after_close(top: str, fs: Any) -> None:
    write_and_die_in("client:Client.drain_in_background", f"tierckpt://{top}/kept")
    assert fs.cat_file(f"{top}/kept") == b"kept" * 5_000_000
    assert run_cli(["drain", "--wait"]) == 0
    assert stored(top) == {"kept": b"kept" * 5_000_000}


def test_kill_before_close_leaves_no_file_and_no_leftovers(top: str, fs: Any, tmp_path: Path) -> None:
    write_and_die_in("drain.write_back:publish", f"tierckpt://{top}/half")
    assert not fs.exists(f"{top}/half")
    fs.pipe_file(f"{top}/next", b"next")
    fs.wait(top)
    assert run_cli(["drain", "--wait"]) == 0
    assert stored(top) == {"next": b"next"}
    assert not [*(tmp_path / "local" / "written").iterdir()]
    assert not Journal(tmp_path / "local").entries()


def test_file_removed_during_its_drain_stays_removed(top: str, fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fs.pipe_file(f"{top}/data", b"old")
    fs.wait(top)
    send, begun, written = write_back.send, [], threading.Event()

    async def slow(*arguments: Any, **options: Any) -> None:
        await asyncio.to_thread(written.wait, SECONDS)
        if not begun:
            begun.append(True)
            for name in ("data", "dir/below"):  # during the upload
                in_a_process_that_does_not_wait("rm(sys.argv[1])", f"{top}/{name}")
        await send(*arguments, **options)

    monkeypatch.setattr(write_back, "send", slow)
    fs.pipe_file(f"{top}/dir/below", b"new")
    fs.pipe_file(f"{top}/data", b"new")
    written.set()
    fs.wait(top)
    assert stored(top) == {}
    assert not fs.exists(f"{top}/data")


class StoreOperations:
    """Records puts and deletes at the store. A put of a file named ``held``, or any put, waits until ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: str = "") -> None:
        self.begun, self.go, self.done = threading.Event(), threading.Event(), list[str]()
        send = write_back.send

        async def put(store: Any, place: Path, file: Any, *arguments: Any, **options: Any) -> None:
            if held in ("", file.path.rpartition("/")[2]):
                self.begun.set()
                await asyncio.to_thread(self.go.wait, SECONDS)
            await send(store, place, file, *arguments, **options)
            self.done.append(file.path.partition("/top/")[2])

        monkeypatch.setattr(write_back, "send", put)
        for kind in (LocalStore, RemoteStore):
            monkeypatch.setattr(kind, "delete", self._counted(kind.delete))

    def _counted(self, delete: Any) -> Any:
        async def counted(store: Any, key: str) -> None:
            self.done.append(f"-{key.partition('/top/')[2]}")
            await delete(store, key)

        return counted


def test_stock_dcp_metadata_reaches_the_store_after_its_shards(
    top: str, fs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = StoreOperations(monkeypatch)
    order.go.set()
    state = {"weight": torch.randn(1000)}
    url = f"tierckpt://{top}/step-1"
    run_cli(["drain", "--pause"])
    dcp.save(state, storage_writer=FsspecWriter(url, overwrite=True), no_dist=True)
    loaded = {"weight": torch.zeros(1000)}
    dcp.load(loaded, storage_reader=FsspecReader(url), no_dist=True)
    assert torch.equal(loaded["weight"], state["weight"])
    run_cli(["drain", "--resume"])
    fs.wait(top)
    *shards, metadata = [name for name in order.done if not name.startswith("-")]
    assert metadata == "step-1/.metadata" and any(name.endswith(".distcp") for name in shards)


def test_shards_drained_before_their_metadata_stay_visible(top: str, fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, uploads = f"{top}/step-1", StoreOperations(monkeypatch, ".metadata")
    fs.pipe_file(f"{step}/__0_0.distcp", b"shard")
    fs.pipe_file(f"{step}/.metadata", b"... __0_0.distcp ...")
    try:
        assert uploads.begun.wait(SECONDS)
        assert fs.is_drained(f"{step}/__0_0.distcp")
        both = [f"{step}/.metadata", f"{step}/__0_0.distcp"]
        assert fs.cat_file(f"{step}/__0_0.distcp") == b"shard"
        assert fs.exists(f"{step}/__0_0.distcp")
        assert sorted(fs.ls(step, detail=False)) == both
        assert fs.find(top) == both
    finally:
        uploads.go.set()
    fs.wait(top)
    assert fs.find(top) == both


def test_directory_removed_during_a_drain_into_it_stays_removed(
    top: str, fs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = StoreOperations(monkeypatch, "data")
    fs.makedirs(f"{top}/dir")
    fs.pipe_file(f"{top}/dir/data", b"data")
    assert uploads.begun.wait(SECONDS)
    timer = threading.Timer(1.0, uploads.go.set)
    timer.start()
    fs.rm(f"{top}/dir", recursive=True)
    timer.join()
    fs.wait(top)
    assert not fs.exists(f"{top}/dir")
    fs.mkdir(f"{top}/dir")
    assert stored(top) == {}


@pytest.mark.usefixtures("held")
def test_removal_or_newer_write_cancels_an_upload_that_has_not_started(
    top: str, fs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierckpt.integrations.fsspec.ARRIVE_SECONDS", 120.0)
    written = tmp_path / "local" / "written"
    fs.makedirs(f"{top}/dir")
    for number in range(10):
        fs.pipe_file(f"{top}/dir/data", b"%d" % number)
    assert len([*written.iterdir()]) == 1
    fs.pipe_file(f"{top}/dir/other", b"other")
    begun = time.monotonic()
    fs.rm(f"{top}/dir", recursive=True)
    assert time.monotonic() - begun < 60, "waited for an upload that had not started"
    assert not [*written.iterdir()]
    assert not fs.exists(f"{top}/dir/data")
    fs.makedirs(f"{top}/dir", exist_ok=True)
    fs.pipe_file(f"{top}/dir/data", b"new")
    run_cli(["drain", "--resume"])
    fs.wait(top)
    assert stored(top) == {"dir/data": b"new"}
    assert not Journal(tmp_path / "local").entries()


def set_aside(top: str, fs: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Damage ``top/dir/data`` on this node and let its drain give up. Returns the path of its bytes."""
    fs.makedirs(f"{top}/dir")
    fs.pipe_file(f"{top}/dir/data", b"good")
    (entry,) = Journal(root).files()
    place = root / "written" / entry.token
    place.write_bytes(b"evil")
    with pytest.raises(IntegrityError):
        fs.cat_file(f"{top}/dir/data")
    close_all()
    run_cli(["drain", "--resume"])
    monkeypatch.setenv("TIERCKPT_COMMIT_TIMEOUT_SECONDS", "0.1")
    for _ in range(2):
        assert run_cli(["drain", "--wait"]) == IntegrityError.exit_code
        time.sleep(0.2)
    (entry,) = Journal(root).files()
    assert entry.state == FILE_SET_ASIDE
    return place


@pytest.mark.usefixtures("held")
def test_undrainable_file_is_set_aside_and_reported(
    top: str, fs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    place = set_aside(top, fs, tmp_path / "local", monkeypatch)
    fs.pipe_file(f"{top}/dir/index", b"names data")  # W2: must not precede data
    with pytest.raises(CommitAbandonedError, match="set aside"):
        fs.wait(f"{top}/dir/data")
    assert run_cli(["drain", "--wait"]) == CommitAbandonedError.exit_code
    document = cli.answer("status")
    assert document["set_aside"] >= 1
    errors = {item["uri"].rpartition("/")[2]: item["last_error"] for item in document["journal"]}
    assert "IntegrityError" in errors["data"]
    assert "dir/data, which was set aside" in errors["index"]
    assert stored(top) == {}
    place.write_bytes(b"good")
    monkeypatch.delenv("TIERCKPT_COMMIT_TIMEOUT_SECONDS")
    assert run_cli(["drain", "--retry", "--wait"]) == 0
    assert stored(top) == {"dir/data": b"good", "dir/index": b"names data"}


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("end", ["forget", "write", "remove"])
def test_set_aside_file_is_released_by_forget_or_rewrite(
    end: str, top: str, fs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = set_aside(top, fs, tmp_path / "local", monkeypatch)
    match end:
        case "forget":
            (entry,) = Journal(tmp_path / "local").files()
            assert run_cli(["drain", "--forget", entry.uri]) == 0
        case "write":
            fs.pipe_file(f"{top}/dir/data", b"newer")
        case "remove":
            fs.rm_file(f"{top}/dir/data")
    assert not place.exists()
    fs.wait(top)
    assert stored(top) == ({"dir/data": b"newer"} if end == "write" else {})
    assert not Journal(tmp_path / "local").entries()


def test_store_always_has_a_file_while_a_job_replaces_the_newest(
    top: str, fs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W6: a job that keeps only the newest file, on a store slower than the job."""
    order = StoreOperations(monkeypatch)
    for step in range(1, 5):
        fs.pipe_file(f"{top}/step={step}", b"%d" % step)
        if step > 1:
            fs.rm_behind(f"{top}/step={step - 1}")
    assert [path.rpartition("=")[2] for path in fs.ls(top, detail=False)] == ["4"]
    order.go.set()
    fs.wait(top)
    assert stored(top) == {"step=4": b"4"}
    assert order.done == ["step=1", "step=2", "-step=1", "step=3", "-step=2", "step=4", "-step=3"]


@pytest.mark.usefixtures("held")
def test_file_rewritten_before_its_removal_drains_is_kept(top: str, fs: Any) -> None:
    for step in (1, 2):
        fs.pipe_file(f"{top}/step={step}", b"%d" % step)
    fs.rm_behind(f"{top}/step=1")
    fs.pipe_file(f"{top}/step=1", b"again")
    assert run_cli(["drain", "--resume"]) == 0
    fs.wait(top)
    assert stored(top) == {"step=1": b"again", "step=2": b"2"}


@pytest.mark.parametrize("seconds", [-60, -(10**9), 10**9])
def test_clock_steps_do_not_let_removals_or_markers_overtake_writes(
    seconds: int, top: str, fs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _resume_to_step_2(top, fs, monkeypatch, seconds, lambda: fs.rm(f"{top}/step-1", recursive=True))


@pytest.mark.server
def test_removal_file_by_file_does_not_overtake_the_next_step(
    s3_uri: str, fs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = f"{s3_uri.replace('://', '/')}/top"
    names = [f"{top}/step-1/data", f"{top}/step-1/more"]
    _resume_to_step_2(top, fs, monkeypatch, -60, lambda: fs.rm(names))


def _resume_to_step_2(
    top: str, fs: Any, monkeypatch: pytest.MonkeyPatch, seconds: int, remove: Callable[[], None]
) -> None:
    for name in ("data", "more"):
        fs.pipe_file(f"{top}/step-1/{name}", b"old")
    fs.wait(top)
    order = StoreOperations(monkeypatch)
    fs.pipe_file(f"{top}/step-2/data", b"new")
    step_clock(seconds, monkeypatch)
    fs.pipe_file(f"{top}/latest", b"step-2")
    remove()
    step_clock(0, monkeypatch)
    fs.pipe_file(f"{top}/after", b"last")
    order.go.set()
    fs.wait(top)
    assert order.done[:2] == ["step-2/data", "latest"]
    assert sorted(order.done[2:4]) == ["-step-1/data", "-step-1/more"]
    assert stored(top) == {"step-2/data": b"new", "latest": b"step-2", "after": b"last"}


def step_clock(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: time.clock_gettime_ns(time.CLOCK_REALTIME) + seconds * 10**9)
    monkeypatch.setattr(time, "time", lambda: time.clock_gettime(time.CLOCK_REALTIME) + seconds)


@pytest.mark.usefixtures("held")
def test_writes_of_other_processes_before_a_reboot_drain_first(
    top: str, fs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node clock restarts in 1980. Only the journal survives from the earlier processes."""
    in_a_process_that_does_not_wait("pipe_file(sys.argv[1], b'data')", f"{top}/step-1/data")
    order = StoreOperations(monkeypatch)
    step_clock(-(10**9), monkeypatch)
    fs.pipe_file(f"{top}/latest", b"step-1")
    order.go.set()
    run_cli(["drain", "--resume"])
    fs.wait(top)
    assert order.done == ["step-1/data", "latest"]


@pytest.mark.parametrize("goes", ["xb", "write_back=False"])
def test_direct_write_follows_pending_drains_to_the_same_store(
    goes: str, top: str, fs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker follows its data, and a file its own removal."""
    straight = fsspec.filesystem("tierckpt", write_back=goes == "xb", skip_instance_cache=True)
    mode = "xb" if goes == "xb" else "wb"
    order = StoreOperations(monkeypatch)
    fs.pipe_file(f"{top}/step-1/data", b"data")
    threading.Timer(0.5, order.go.set).start()
    with straight.open(f"{top}/latest", mode) as file:
        file.write(b"step-1")
    assert order.done == ["step-1/data"]
    fs.pipe_file(f"{top}/again", b"old")
    fs.rm(f"{top}/again")
    with straight.open(f"{top}/again", mode) as file:
        file.write(b"new")
    fs.wait(top)
    assert stored(top) == {"step-1/data": b"data", "latest": b"step-1", "again": b"new"}


def test_step_stays_on_the_store_until_a_later_one_arrives(
    top: str, fs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its removal is visible on the node at once. The next step is removed before it has drained."""

    def names(step: int) -> list[str]:
        return [f"{top}/step-{step}/{name}" for name in (".metadata", f"__{step}_0.distcp")]

    def save(step: int) -> None:
        for name in reversed(names(step)):
            fs.pipe_file(name, b"%d" % step)

    save(1)
    fs.wait(top)
    second, third = (StoreOperations(monkeypatch, f"__{step}_0.distcp") for step in (2, 3))
    try:
        save(2)
        assert second.begun.wait(SECONDS)
        fs.rm(f"{top}/step-1", recursive=True)
        assert "stays on the store until" in caplog.text
        assert fs.ls(top, detail=False) == [f"{top}/step-2"] and not fs.exists(f"{top}/step-1")
        assert fs.find(top) == names(2)
        save(3)
        fs.rm(f"{top}/step-2", recursive=True)
        second.go.set()
        assert third.begun.wait(SECONDS)
        time.sleep(0.3)  # long enough for a removal that does not wait
        assert stored(top).keys() >= {"step-1/.metadata", "step-1/__1_0.distcp"}  # a lost node must leave these
    finally:
        second.go.set()
        third.go.set()
    fs.wait(top)
    assert stored(top) == {"step-3/.metadata": b"3", "step-3/__3_0.distcp": b"3"}
    assert fs.ls(top, detail=False) == [f"{top}/step-3"]


@pytest.mark.usefixtures("held")
def test_removals_and_repeated_saves_do_not_deadlock(top: str, fs: Any) -> None:
    """The job removes undrained steps, then saves one of them again."""
    for step in (0, 1, 2, 9):
        fs.pipe_file(f"{top}/step-{step}/old", b"old")
    for step in (1, 2):
        fs.rm(f"{top}/step-{step}", recursive=True)
    fs.pipe_file(f"{top}/step-2/new", b"new")
    fs.rm(f"{top}/step-0", recursive=True)
    run_cli(["drain", "--resume"])
    fs.wait(top, SECONDS / 4)
    assert stored(top) == {"step-2/new": b"new", "step-9/old": b"old"}


@pytest.mark.parametrize("old", ["tmp/file", "tmp"])
def test_renamed_file_is_on_the_store_at_every_moment(
    old: str, top: str, fs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.pipe_file(f"{top}/tmp/file", b"data")
    fs.wait(top)
    order = StoreOperations(monkeypatch)
    for new in ("a/b", "c/d"):  # two renames before the first drain
        fs.mv(f"{top}/{old}", f"{top}/{new}", recursive=True)
        old = new
    file = f"{top}/{old}" if fs.isfile(f"{top}/{old}") else f"{top}/{old}/file"
    assert fs.find(top) == [file]
    time.sleep(0.3)  # long enough for a removal that does not wait
    assert stored(top) == {"tmp/file": b"data"}
    order.go.set()
    fs.wait(top, SECONDS / 4)
    assert stored(top) == {file.removeprefix(f"{top}/"): b"data"}
    fs.mv(file, f"tierckpt://{file}/")  # an alias of the same file
    assert fs.cat_file(file) == b"data"
    with pytest.raises(ConfigError, match="is inside"):
        fs.mv(top, f"{top}/below", recursive=True)


def test_metadata_waits_for_the_shards_of_other_nodes(top: str, fs: Any, tmp_path: Path) -> None:
    short = fsspec.filesystem("tierckpt", commit_timeout_seconds=0.5, skip_instance_cache=True)
    short.pipe_file(f"{top}/step-1/.metadata", b"... __1_0.distcp ...")
    with pytest.raises(OperationTimeoutError, match="1 files"):
        short.wait(top, timeout_seconds=0.1)
    deadline = time.monotonic() + SECONDS
    while CommitAbandonedError.__name__ not in Journal(tmp_path / "local").files()[0].error:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    other = fsspec.filesystem("tierckpt", local_root=tmp_path / "node1", skip_instance_cache=True)
    other.pipe_file(f"{top}/step-1/__1_0.distcp", b"shard")
    other.wait(top)
    assert run_cli(["drain", "--retry", "--wait"]) == 0
    assert set(stored(top)) == {"step-1/.metadata", "step-1/__1_0.distcp"}


def test_full_disk_raises_enospc_and_leaves_no_file(top: str, fs: Any, tmp_path: Path) -> None:
    """``torch.save`` turns an error of the file into a RuntimeError, which the caller may ignore."""
    tight = fsspec.filesystem("tierckpt", local_bytes_max="4MiB", skip_instance_cache=True)
    with pytest.raises(CapacityError), tight.open(f"{top}/large", "wb") as file:
        torch.save({"weight": torch.zeros(1 << 22)}, file)
    file = tight.open(f"{top}/large", "wb")
    with suppress(CapacityError):
        file.write(bytes(8 << 20))
    with pytest.raises(CapacityError):
        file.close()
    assert not fs.exists(f"{top}/large")
    assert not [path for path in (tmp_path / "local" / "written").rglob("*") if path.is_file()]


def test_file_the_journal_cannot_name_is_removed_during_another_drain(top: str, fs: Any) -> None:
    fs.pipe_file(f"{top}/a\\b", b"straight")
    assert run_cli(["drain", "--pause"]) == 0
    fs.pipe_file(f"{top}/data", b"data")
    fs.rm_file(f"{top}/a\\b")
    assert fs.find(top) == [f"{top}/data"]
    assert run_cli(["drain", "--resume"]) == 0
    fs.wait(top)
    assert stored(top) == {"data": b"data"}


@pytest.mark.parametrize("name", ["a\\b", "n" * 300])
def test_key_that_is_no_valid_file_name_is_read_through_the_cache(name: str, s3_uri: str, fs: Any) -> None:
    path = f"s3/{s3_uri[5:]}/{name}"
    for data in (b"one", b"two"):
        fs.pipe_file(path, data)
        assert [fs.cat_file(path), fs.cat_file(path)] == [data, data]


def test_key_too_long_for_s3_is_refused_on_open(s3_uri: str, fs: Any) -> None:
    """1,024 characters but twice as many bytes. A late error would block files closed afterwards."""
    above = f"s3/{s3_uri[5:]}"
    name = f"{above}/{'/'.join(['ü' * 100] * 8)}"
    with pytest.raises(ConfigError, match=r"1024 bytes.*Shorten it"):
        fs.open(name, "wb")
    with pytest.raises(ConfigError, match="1024 bytes"):
        fs.pipe_file(name, b"x")
    fs.pipe_file(f"{above}/after", b"x")
    fs.wait(above, SECONDS)
    assert not Journal(Path(os.environ["TIERCKPT_LOCAL_ROOT"])).files()


@pytest.mark.parametrize("drains", [True, False])
def test_mount_refuses_files_below_a_file_and_over_a_directory(
    drains: bool, tmp_path: Path, fs: Any, request: pytest.FixtureRequest
) -> None:
    if not drains:
        request.getfixturevalue("held")
    above = f"file{tmp_path}/mount"
    fs.pipe_file(f"{above}/file", b"x")
    (tmp_path / "mount/directory").mkdir(parents=True)
    if drains:
        fs.wait(above, SECONDS)
    for name, problem in (("file/below/it", "mount/file is a file"), ("directory", "it is a directory")):
        with pytest.raises(ConfigError, match=problem):
            fs.open(f"{above}/{name}", "wb")
        with pytest.raises(ConfigError, match=problem):
            fs.pipe_file(f"{above}/{name}", b"x")
    fs.rm(f"{above}/file")
    fs.pipe_file(f"{above}/file/below", b"y")
    fs.pipe_file(f"{above}/directory/below", b"y")
    assert run_cli(["drain", "--resume"]) == 0
    fs.wait(above, SECONDS)
    assert (tmp_path / "mount/file/below").read_bytes() == b"y"


def test_hung_mount_does_not_block_writes(tmp_path: Path, fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    is_dir = Path.is_dir
    monkeypatch.setattr(
        Path, "is_dir", lambda path: (path.name == "file" and hangs.wait(SECONDS) and False) or is_dir(path)
    )
    for number in range(8):  # more writes than threads
        with fs.open(f"file{tmp_path}/mount/file", "wb") as file:
            file.write(b"%d" % number)
    assert not hangs.is_set()
    hangs.set()
    fs.wait(f"file{tmp_path}/mount", SECONDS)
    assert (tmp_path / "mount/file").read_bytes() == b"7"
