"""``tierckpt.adopt``: a directory written by another program becomes a checkpoint, complete or not at all."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.command_line import CommandLine, python
from tests.compat.worker import launch
from tests.files import contents as tree
from tests.states import load, same, zeros_like
from tierckpt import adoption
from tierckpt.checkpoint.journal import Journal
from tierckpt.cli.ui.app import run as run_cli
from tierckpt.client import close_all, get_client
from tierckpt.config import Settings
from tierckpt.errors import (
    AlreadyCommittedError,
    CheckpointError,
    ConfigError,
    IntegrityError,
    ManifestError,
    OperationTimeoutError,
    StoreError,
)
from tierckpt.format.layout import parse_uri
from tierckpt.integrations import directories as found_by
from tierckpt.integrations.directories import Directories, make_way, rank_0_finds
from tierckpt.integrations.megatron import TRACKER, MegatronRun
from tierckpt.restore.restore import restore
from tierckpt.save import adopted_directory as directories

SECONDS = 120.0


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Nested, empty and linked files, as a framework may write them."""
    directory = tmp_path / "out" / "checkpoint-5"
    (directory / "optimizer").mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(os.urandom((9 << 20) + 7))
    (directory / "optimizer" / "rank0.pt").write_bytes(os.urandom(300_000))
    (directory / "scheduler.pt").write_bytes(b"")
    (directory / "latest").symlink_to("model.safetensors")
    return directory


def restored(run: Path | str, to: Path) -> dict[str, bytes]:
    assert run_cli(["restore", "--latest", str(run), "--to", str(to), "--json"]) == 0
    return tree(to)


@pytest.mark.parametrize("links", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adopted_directory_is_restored_byte_for_byte_on_another_node(
    links: bool, written: Path, shared_uri: str, tmp_path: Path
) -> None:
    before = tree(written)
    handle = tierckpt.adopt(written, f"{shared_uri}/run/step-5", links=links)
    shutil.rmtree(written)  # right after the adoption
    handle.wait("local", 0)
    handle.wait(timeout_seconds=SECONDS)
    assert (handle.files, handle.size_bytes) == (4, sum(map(len, before.values())))
    close_all()
    shutil.rmtree(tmp_path / "local")
    assert tierckpt.latest(f"{shared_uri}/run") == handle.uri
    assert restored(f"{shared_uri}/run", tmp_path / "back") == before
    assert tree(tierckpt.prefetch(handle.uri)) == before
    assert run_cli(["verify", "--read-data", handle.uri]) == 0
    assert run_cli(["info", handle.uri, "--json"]) == 0


def check_nothing_is_left(tmp_path: Path) -> None:
    assert tierckpt.latest(tmp_path / "run") is None
    assert not list((tmp_path / "local").rglob("files-*"))
    assert not Journal(tmp_path / "local").entries()


@pytest.mark.parametrize("drains", [False, True])
def test_fsspec_shows_adopted_files_as_written(drains: bool, written: Path, s3_uri: str) -> None:
    handle = tierckpt.adopt(written, f"{s3_uri}/run/step-5", drain=drains)
    if drains:
        handle.wait(timeout_seconds=SECONDS)
    fs, top = fsspec.filesystem("tierckpt", skip_instance_cache=True), f"s3/{s3_uri[5:]}/run/step-5"
    assert sorted(path.removeprefix(f"{top}/") for path in fs.find(top)) == sorted(tree(written))
    assert sorted(path.removeprefix(f"{top}/") for path in fs.ls(top, detail=False)) == sorted(
        path.name for path in written.iterdir()
    )
    assert fs.ls(f"{top}/optimizer", detail=False) == [f"{top}/optimizer/rank0.pt"]
    assert fs.isdir(f"{top}/optimizer")
    assert not fs.exists(f"{top}/optimizer/rank1.pt")
    with pytest.raises(ConfigError):
        fs.rm(f"{top}/optimizer/rank0.pt")
    for path, data in tree(written).items():
        assert fs.cat_file(f"{top}/{path}") == data


def test_adopted_stock_dcp_checkpoint_loads_with_dcp(tmp_path: Path, cli: CommandLine) -> None:
    state = {"weight": torch.randn(1000), "step": 7}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    tierckpt.adopt(tmp_path / "stock", tmp_path / "run" / "step-7").wait(timeout_seconds=SECONDS)
    for lose in (False, True):
        if lose:
            close_all()
            shutil.rmtree(tmp_path / "local")
        assert same(load(str(tmp_path / "run" / "step-7"), state), state)
    (folder,) = cli("info", tmp_path / "run" / "step-7").document["adopted_in"]
    loaded = zeros_like(state)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder.removeprefix("file://")), no_dist=True)
    assert same(loaded, state)


def kill_while_adopting(where: str, written: Path, uri: str) -> None:
    """Adopt in a process that is killed when it calls a function of tierckpt."""
    code = (
        "import os, pkgutil, signal, sys, tierckpt\n"
        "owner, _, name = sys.argv[3].rpartition('.')\n"
        "setattr(pkgutil.resolve_name(f'tierckpt.{owner}'), name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))\n"
        "tierckpt.adopt(sys.argv[1], sys.argv[2])\n"
    )
    assert python(code, written, uri, where).returncode == -signal.SIGKILL


def test_another_process_drains_after_a_kill_right_after_adopting(written: Path, tmp_path: Path) -> None:
    before, uri = tree(written), str(tmp_path / "run" / "step-5")
    kill_while_adopting("client.Client.drain_in_background", written, uri)
    shutil.rmtree(written)
    assert run_cli(["drain", "--wait", "--json"]) == 0
    shutil.rmtree(tmp_path / "local")
    assert restored(tmp_path / "run", tmp_path / "back") == before


@pytest.mark.parametrize("where", ["save.adopted_directory.make_durable", "checkpoint.local_commit.commit_local"])
def test_kill_before_the_commit_leaves_no_files_and_permits_a_retry(where: str, written: Path, tmp_path: Path) -> None:
    uri = str(tmp_path / "run" / "step-5")
    kill_while_adopting(where, written, uri)
    get_client(Settings()).recover()
    assert tierckpt.latest(tmp_path / "run") is None
    run_cli(["drain", "--wait", "--json"])
    check_nothing_is_left(tmp_path)
    tierckpt.adopt(written, uri).wait(timeout_seconds=SECONDS)
    assert restored(tmp_path / "run", tmp_path / "back") == tree(written)


# --- refusals --------------------------------------------------------------------------------------------------


def test_an_empty_directory_a_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("empty", "file", "missing"):
        with pytest.raises(ConfigError):
            tierckpt.adopt(tmp_path / name, tmp_path / "run" / "step-1")
    assert tierckpt.latest(tmp_path / "run") is None


@pytest.mark.parametrize("target", ["/etc/hostname", "../elsewhere", "nothing", ".", "a pipe"])
def test_pipe_and_link_outside_dangling_or_circular_are_refused(target: str, written: Path) -> None:
    (written.parent / "elsewhere").write_text("not of the checkpoint")
    if target == "a pipe":
        os.mkfifo(written / "pipe")
    else:
        (written / "link").symlink_to(target)
    with pytest.raises(ConfigError, match="pipe" if target == "a pipe" else "link"):
        tierckpt.adopt(written, written.parents[1] / "run" / "step-5")


def test_names_invalid_for_journal_or_store_are_refused_first(written: Path, s3_uri: str, tmp_path: Path) -> None:
    """Otherwise they would be committed here and never drained."""
    for uri in (
        "hf://org/name",
        f"{s3_uri}/\udcff",
        str(tmp_path / "run\udcff"),
        str(tmp_path / "a\0b"),
        written / "sub",
    ):
        with pytest.raises(ConfigError):
            tierckpt.adopt(written, uri)
    with pytest.raises(ConfigError, match="ranks"):
        tierckpt.adopt(written, f"{s3_uri}/step-5", ranks=(0, 99_999_999), attempt="one")
    name = "n" * 200
    for levels, uri in ((5, tmp_path / "run"), (4, f"{s3_uri}/{name}")):
        deep = written.joinpath(*[name] * levels)
        deep.mkdir(parents=True)
        (deep / "file").touch()
        with pytest.raises(ConfigError, match="name"):
            tierckpt.adopt(written, uri)
        shutil.rmtree(written / name)
    check_nothing_is_left(tmp_path)
    (written / ("n" * 255)).write_bytes(b"as long as a name can be")
    tierckpt.adopt(written, tmp_path / "run" / "step-5").wait(timeout_seconds=SECONDS)
    fetched = tierckpt.prefetch(tmp_path / "run" / "step-5", tmp_path / "fetched")
    assert tree(fetched) == tree(written)


def test_directory_with_a_file_open_for_writing_is_refused(written: Path, tmp_path: Path) -> None:
    with (written / "scheduler.pt").open("ab"), pytest.raises(CheckpointError, match="still being written"):
        tierckpt.adopt(written, tmp_path / "run" / "step-5")
    tierckpt.adopt(written, tmp_path / "run" / "step-5")


def write_in_place(model: Path) -> None:
    with model.open("r+b") as file:
        file.write(b"later")


def rename_over(model: Path) -> None:
    shutil.copy2(model, model.parents[1] / "new")
    (model.parents[1] / "new").replace(model)


CHANGES: dict[str, Callable[[Path], object]] = {
    "in place": write_in_place,
    "new file": lambda model: model.with_name("new").touch(),
    "gone": lambda model: model.unlink(missing_ok=True),
    "renamed over": rename_over,
}


@pytest.mark.parametrize(
    ("step", "change"),
    [*(("make_durable", change) for change in CHANGES), *((step, "gone") for step in ("check_quiet", "import_files"))],
)
def test_directory_that_changes_during_adoption_is_refused(
    step: str, change: str, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(directories, step)

    def called(*given: object, **named: object) -> object:
        CHANGES[change](written / "model.safetensors")
        return real(*given, **named)

    monkeypatch.setattr(directories, step, called)
    with pytest.raises((CheckpointError, ConfigError), match="" if step == "make_durable" else "still being written"):
        tierckpt.adopt(written, tmp_path / "run" / "step-5")
    check_nothing_is_left(tmp_path)


@pytest.mark.slow
def test_existing_checkpoint_is_replaced_only_on_request_and_atomically(written: Path, s3_uri: str) -> None:
    uri, before = f"{s3_uri}/run/step-5", tree(written)
    tierckpt.adopt(written, uri).wait(timeout_seconds=SECONDS)
    (written / "more").write_text("more")
    with pytest.raises(AlreadyCommittedError, match="Checkpoint already exists"):
        tierckpt.adopt(written, uri)
    assert restored(uri, written.parent / "old") == before
    tierckpt.adopt(written, uri, overwrite=True).wait(timeout_seconds=SECONDS)
    assert restored(uri, written.parent / "new") == tree(written)
    names = {name for name, _ in listing(uri)}
    assert len({name.partition("/")[0] for name in names if name.startswith("files-")}) == 1  # the old one is removed


def listing(uri: str) -> list[tuple[str, int]]:
    client = get_client(Settings())

    async def keys() -> list[tuple[str, int]]:
        return [(info.key, info.size_bytes) async for info in client.mover.store(parse_uri(uri)).list()]

    return client.run(keys())


# --- a writer that continues -----------------------------------------------------------------------------------


def test_later_writes_in_place_do_not_change_the_adopted_copy(written: Path, tmp_path: Path) -> None:
    before = tree(written)
    tierckpt.adopt(written, tmp_path / "run" / "step-5", links=True, drain=False)  # links have no effect for a path
    for path in written.rglob("*"):
        if path.is_file():
            path.write_bytes(b"something else")
    assert restored(tmp_path / "run" / "step-5", tmp_path / "back") == before


def test_digests_detect_a_write_in_place_to_a_linked_file(written: Path, s3_uri: str, tmp_path: Path) -> None:
    tierckpt.adopt(written, f"{s3_uri}/run/step-5", links=True, drain=False)
    with (written / "model.safetensors").open("r+b") as file:
        file.write(b"something else")
    client = get_client(Settings(drain=False))
    with pytest.raises(IntegrityError):
        client.run(restore(client.mover, parse_uri(f"{s3_uri}/run/step-5"), tmp_path / "back"))


def test_make_way_removes_only_linked_names(written: Path, s3_uri: str) -> None:
    before = tree(written)
    tierckpt.adopt(written, f"{s3_uri}/run/step-5", links=True, drain=False)
    (written / "own").write_text("own")
    make_way(written)
    assert sorted(path.name for path in written.rglob("*") if path.is_file()) == ["own"]
    (written / "model.safetensors").write_bytes(b"something else")
    assert restored(f"{s3_uri}/run", written.parent / "back") == before


def test_megatron_rewrite_in_place_leaves_the_adopted_copy(written: Path, s3_uri: str) -> None:
    """A run resumed at ``--ckpt-step`` overwrites ``iter_N`` and is killed."""
    run, before = MegatronRun(f"{s3_uri}/run", drain=False), tree(written)
    run.finalize(written)()
    (written / "model.safetensors").write_bytes(b"again")
    assert run.restore(written.parent / "back") == str(written.parent / "back")
    assert (written.parent / "back" / TRACKER).read_text() == "5"
    assert tree(written.parent / "back" / written.name) == before


# --- several ranks ---------------------------------------------------------------------------------------------


def test_two_nodes_adopt_into_one_checkpoint(s3_uri: str, tmp_path: Path) -> None:
    uri = f"{s3_uri}/run/step-5"
    for rank in (0, 1):
        (tmp_path / f"node{rank}").mkdir()
        (tmp_path / f"node{rank}" / f"shard-{rank}").write_bytes(os.urandom(100_000))
        (tmp_path / f"node{rank}" / "config.json").write_text("{}")  # the same on both
    handles = []
    for rank in (0, 1):
        assert tierckpt.latest(f"{s3_uri}/run", local_root=tmp_path / "third") is None
        handles.append(
            tierckpt.adopt(
                *(tmp_path / f"node{rank}", uri), ranks=(rank, 2), attempt="try-1", local_root=tmp_path / f"local{rank}"
            )
        )
    for handle in handles:
        handle.wait(timeout_seconds=SECONDS)
    assert restored(uri, tmp_path / "back") == {**tree(tmp_path / "node0"), **tree(tmp_path / "node1")}
    with pytest.raises(AlreadyCommittedError, match="Checkpoint already exists"):
        tierckpt.adopt(tmp_path / "node0", uri, ranks=(0, 2), attempt="try-1", overwrite=True)


def test_ranks_with_different_bytes_under_one_name_raise(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"node{rank}").mkdir()
        (tmp_path / f"node{rank}" / "config.json").write_text(f"{{{rank}}}")
    uri = tmp_path / "run" / "step-5"
    tierckpt.adopt(tmp_path / "node0", uri, ranks=(0, 2), attempt="a")
    with pytest.raises(ManifestError, match=r"config.json of rank 1 differs"):
        tierckpt.adopt(tmp_path / "node1", uri, ranks=(1, 2), attempt="a")
    assert tierckpt.latest(tmp_path / "run") is None


@pytest.mark.parametrize("bad", [{"ranks": (2, 2)}, {"ranks": (0, 2)}, {"attempt": "a/b"}])
def test_invalid_ranks_are_refused(bad: dict[str, object], written: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        tierckpt.adopt(written, tmp_path / "run" / "step-5", **bad)  # type: ignore[arg-type]


def job(top: str, shares: bool) -> None:
    """Each rank but the last writes its file: all into one directory, or two into one on each node."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    node = "" if shares else str(rank // 2)
    place = Path(top, f"out{node}")
    place.mkdir(exist_ok=True)
    is_last = rank == world_size - 1
    if not is_last:
        (place / f"shard-{rank}").write_bytes(bytes([rank]) * 50_000)
    handle = tierckpt.adopt(place, f"{top}/run/step-5", local_root=Path(top, f"local{node}"))
    handle.wait(timeout_seconds=SECONDS)
    mine = world_size - 1 if shares else 2
    assert handle.files == (0 if is_last or rank % mine else mine)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [True, False])
def test_ranks_of_a_job_divide_the_adoption(shares: bool, tmp_path: Path) -> None:
    launch("tests.integration.test_adopt:job", 5, top=str(tmp_path), shares=shares)
    back = restored(tmp_path / "run", tmp_path / "back")
    assert back == {f"shard-{rank}": bytes([rank]) * 50_000 for rank in range(4)}


def late(top: str) -> None:
    def fail() -> str:
        raise StoreError("the store refuses")

    with pytest.raises(StoreError, match="the store refuses"):
        rank_0_finds("run", fail)
    if dist.get_rank() == 1:
        return
    adoption.RANKS_SECONDS = 10.0
    Path(top, "out").mkdir()
    Path(top, "out", "file").touch()
    with pytest.raises(OperationTimeoutError, match="some ranks have not called adopt"):
        tierckpt.adopt(f"{top}/out", f"{top}/run/step-5")


@pytest.mark.slow
def test_missing_rank_or_files_raise_instead_of_hanging(tmp_path: Path) -> None:
    launch("tests.integration.test_adopt:late", 2, top=str(tmp_path))


# --- the verb --------------------------------------------------------------------------------------------------


def test_adopt_verb_prints_the_location(written: Path, tmp_path: Path, cli: CommandLine) -> None:
    arguments = ("adopt", written, tmp_path / "run" / "step-5", "--wait", 60)
    document = cli(*arguments).document
    assert (document["files"], document["tier"]) == (4, "shared")
    again = cli(*arguments)
    assert again.code == 1 and "Checkpoint already exists" in again.error["message"]
    assert cli(*arguments, "--overwrite", "--ranks", "x").code == 2


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="there is no process group yet"):
        Directories(tmp_path / "run").restore(tmp_path / "back")


def test_node_with_a_newer_step_than_rank_0_raises(
    file_uri: str, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Directories(file_uri, drain=False)
    older, newer = run.save(written), run.save(written, "checkpoint-20")
    monkeypatch.setattr(found_by, "rank_0_finds", lambda what, find: older.uri)
    with pytest.raises(CheckpointError, match=f"this node has {newer.uri}, which is newer than .*{older.uri}"):
        run.restore(tmp_path / "back")
    monkeypatch.setattr(found_by, "rank_0_finds", lambda what, find: "")
    with pytest.raises(CheckpointError, match="rank 0 has found"):
        run.restore(tmp_path / "back")
    assert not (tmp_path / "back").exists()
    monkeypatch.setattr(found_by, "rank_0_finds", lambda what, find: newer.uri)
    assert run.restore(tmp_path / "back") == tmp_path / "back/checkpoint-20"
