"""Contract of local files only: durability, hard links, full and forbidden disks."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.store_contract import Pieces, keys_of
from tests.fuse_mount import mounted
from tests.open_files import open_files
from tests.services import unavailable
from tierckpt.disk.durable import durable_link, durable_write, make_dirs, translate_os_error
from tierckpt.errors import (
    CapacityError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
)
from tierckpt.poll import Poll
from tierckpt.stores import local
from tierckpt.stores.local import LocalStore
from tierckpt.types import ByteRange, Tier


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def remount_read_only(mount: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)


class Journal:
    """Records fsync, rename and link in ``folder``, by name, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.events: list[tuple[str, str]] = []
        fsync, replace, link = os.fsync, Path.replace, os.link

        def note(verb: str, path: Path) -> None:
            if path.is_relative_to(folder):
                self.events.append((verb, path.name))

        def on_fsync(file: int) -> None:
            note("fsync", Path(f"/proc/self/fd/{file}").resolve())
            fsync(file)

        def on_replace(path: Path, target: Path) -> Path:
            note("rename", Path(target))
            return replace(path, target)

        def on_link(source: Path, target: Path) -> None:
            note("link", Path(target))
            link(source, target)

        monkeypatch.setattr(os, "fsync", on_fsync)
        monkeypatch.setattr(Path, "replace", on_replace)
        monkeypatch.setattr(os, "link", on_link)

    def take(self) -> list[str]:
        """Return the events since the last call, with temporary names as 'temporary'."""
        taken, self.events = self.events, []
        return [f"{verb} {'temporary' if name.endswith('.tmp') else name}" for verb, name in taken]


async def etag_of(store: LocalStore, key: str) -> str:
    etag = (await store.head(key)).etag
    assert etag is not None
    return etag


async def test_every_put_is_durable_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path / "root")
    (tmp_path / "source").write_bytes(b"x")
    journal = Journal(monkeypatch, tmp_path)
    await store.put("dir/a", b"1")
    made = [f"fsync {tmp_path.name}", "fsync root"]
    assert journal.take() == [*made, "fsync temporary", "rename a", "fsync dir"]
    await store.put("dir/b", b"1", if_absent=True)
    assert journal.take() == ["fsync temporary", "link b", "fsync dir"]
    await store.put_stream("dir/c", Pieces([b"1"]).iterate(), 1)
    assert journal.take() == ["fsync temporary", "rename c", "fsync dir"]
    assert await store.link("dir/d", tmp_path / "source")
    assert journal.take() == ["link d", "fsync d", "fsync dir"]


def test_make_dirs_syncs_the_parent_of_each_new_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(monkeypatch, tmp_path)
    make_dirs(tmp_path / "a" / "b" / "c")
    assert journal.take() == [f"fsync {tmp_path.name}", "fsync a", "fsync b"]
    make_dirs(tmp_path / "a" / "b")
    assert journal.take() == []


def test_make_dirs_where_a_file_stands(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierckptError):
        make_dirs(tmp_path / "file" / "below")


async def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, bytes(data[:7])))
    data = os.urandom(1000)
    durable_write(tmp_path / "one", data)
    assert (tmp_path / "one").read_bytes() == data
    await LocalStore(tmp_path).put_stream("two", Pieces([data]).iterate(), len(data))
    assert (tmp_path / "two").read_bytes() == data


def test_durable_link(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"data")
    assert durable_link(source, target)
    assert target.samefile(source)
    assert durable_link(source, target), "linking again is no error"
    other = tmp_path / "other"
    other.write_bytes(b"else")
    with pytest.raises(PreconditionFailedError):
        durable_link(other, target)
    assert target.read_bytes() == b"data"
    with pytest.raises(ObjectNotFoundError):
        durable_link(tmp_path / "missing", tmp_path / "new")


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
async def test_where_no_link_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "source").write_bytes(b"x")
    store = LocalStore(tmp_path / "root")
    assert not await store.link("linked", tmp_path / "source")
    await store.put("claim", b"first", if_absent=True)
    assert store.has_put_if_absent, "RENAME_NOREPLACE decides"
    with pytest.raises(PreconditionFailedError):
        await store.put("claim", b"second", if_absent=True)
    assert await store.get("claim") == b"first"
    assert await keys_of(store) == ["claim"]


@pytest.mark.parametrize("no", [("link",), ("link", "rename2"), ("link", "rename2", "flock", "utime")])
async def test_one_of_many_puts_a_claim_on_a_real_mount_without_links(tmp_path: Path, no: tuple[str, ...]) -> None:
    with mounted(tmp_path, no=no) as mount:
        stores = [LocalStore(mount.path / "root") for _ in range(8)]
        puts = (store.put("claim", f"{at}".encode(), if_absent=True) for at, store in enumerate(stores))
        came = await asyncio.gather(*puts, return_exceptions=True)
        assert [type(one) for one in came if one is not None] == [PreconditionFailedError] * 7
        assert await stores[0].get("claim") == f"{came.index(None)}".encode()
        assert stores[came.index(None)].has_put_if_absent == ("rename2" not in no)
        assert await keys_of(stores[0]) == ["claim"]


async def test_one_of_many_replaces_a_version_where_flock_holds_within_one_host(tmp_path: Path) -> None:
    """As with NFS `nolock` and Lustre `localflock`: locks are refused."""
    with mounted(tmp_path, no=("flock",)) as mount:
        stores = [LocalStore(mount.path) for _ in range(8)]
        await stores[0].put("claim", b"old")
        etag = await etag_of(stores[0], "claim")
        came = await asyncio.gather(
            *(store.replace("claim", f"{at:3}".encode(), etag=etag) for at, store in enumerate(stores)),
            return_exceptions=True,
        )
        assert [type(one) for one in came if one is not None] == [PreconditionFailedError] * 7
        assert await stores[0].get("claim") == f"{came.index(None):3}".encode()
        assert names_in(mount.path) == ["claim"]


async def test_the_mark_of_a_killed_writer_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(local, "Poll", lambda _, pauses: Poll(60.0, pauses))
    store = LocalStore(tmp_path)
    await store.put("claim", b"old")
    for left in (b"", b"somebody"):
        (tmp_path / ".claim.00000000.tmp").write_bytes(left)
        await store.replace("claim", b"new" + left, etag=await etag_of(store, "claim"))
    assert await store.get("claim") == b"newsomebody" and names_in(tmp_path) == ["claim"]


async def test_a_change_calls_no_fsync_under_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An fsync would make the mark durable, and after a power cut the next process waits until it is stale."""
    store, fsync, marked = LocalStore(tmp_path), os.fsync, []
    await store.put("claim", b"old")

    def look(file: int) -> None:
        if file in open_files(tmp_path):
            marked.append((tmp_path / ".claim.00000000.tmp").exists())
        fsync(file)

    monkeypatch.setattr(os, "fsync", look)
    await store.replace("claim", b"new", etag=await etag_of(store, "claim"))
    assert marked == [False, False]  # the data, then the directory
    await store.remove("claim", etag=await etag_of(store, "claim"))
    assert marked == [False, False, False] and names_in(tmp_path) == []


async def test_a_lock_that_others_always_hold_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LOCK_SECONDS", 0.3)
    store = LocalStore(tmp_path)
    await store.put("claim", b"old")
    etag = await etag_of(store, "claim")
    (tmp_path / ".claim.00000000.tmp").write_bytes(b"somebody")
    holders = map(str, itertools.count())
    monkeypatch.setattr(local, "_mark_of", lambda _: next(holders))  # private: what is in a mark, at each look
    with pytest.raises(StoreUnavailableError, match="locked by other processes"):
        await store.replace("claim", b"new", etag=etag)
    assert await store.get("claim") == b"old"


async def test_each_write_is_another_version_also_in_one_tick_of_a_coarse_clock(tmp_path: Path) -> None:
    with mounted(tmp_path, step_ns=2_000_000_000) as mount:
        store, etags = LocalStore(mount.path), []
        await store.put("claim", b"1")
        for data in (b"2", b"3", b"4"):
            etags.append(await etag_of(store, "claim"))
            await store.replace("claim", data, etag=etags[-1])
        await store.put("claim", b"5")
        etags.append(await etag_of(store, "claim"))
        assert len(set(etags)) == 4


async def test_an_inode_number_is_no_part_of_a_version(tmp_path: Path) -> None:
    with mounted(tmp_path, inodes="changing") as mount:
        store = LocalStore(mount.path)
        await store.put("a/b/c", b"data")
        etag = await etag_of(store, "a/b/c")
        assert etag == await etag_of(store, "a/b/c")
        assert await store.get_range("a/b/c", ByteRange(1, 3), if_match=etag) == b"at"
        await store.replace("a/b/c", b"other", etag=etag)
        await store.delete_dir("a")
        assert names_in(mount.path) == []


async def test_a_link_that_an_nfs_server_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server makes the link, its answer is lost, the client asks again and hears EEXIST about its own link."""
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    store = LocalStore(tmp_path)
    await store.put("claim", b"mine", if_absent=True)
    assert await store.get("claim") == b"mine"


def test_link_to_another_filesystem(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        unavailable("/dev/shm is not another filesystem")
    (tmp_path / "source").write_bytes(b"x")
    target = elsewhere / f"tierckpt-test-{os.getpid()}"
    assert not durable_link(tmp_path / "source", target)
    assert not target.exists()


class TestTranslation:
    @pytest.mark.parametrize(
        ("number", "kind"),
        [
            (errno.ENOSPC, CapacityError),
            (errno.EDQUOT, CapacityError),
            (errno.EROFS, PermissionDeniedError),
            (errno.EACCES, PermissionDeniedError),
            (errno.EPERM, PermissionDeniedError),
            (errno.ENOENT, ObjectNotFoundError),
            (errno.ESTALE, StoreUnavailableError),
            (errno.ENOTCONN, StoreUnavailableError),
            (errno.EIO, StoreError),
        ],
    )
    def test_by_errno(self, tmp_path: Path, number: int, kind: type[TierckptError]) -> None:
        path = tmp_path / "no" / "such" / "file"
        ours = translate_os_error(OSError(number, os.strerror(number)), path, Tier.LOCAL)
        assert type(ours) is kind
        assert str(path) in str(ours)
        assert ours.context["tier"] == Tier.LOCAL

    def test_no_room_says_how_much_there_is(self, tmp_path: Path) -> None:
        ours = translate_os_error(OSError(errno.ENOSPC, "x"), tmp_path / "file", Tier.LOCAL)
        assert abs(ours.context["free_bytes"] - shutil.disk_usage(tmp_path).free) < 1 << 30

    def test_read_only_is_said(self, tmp_path: Path) -> None:
        assert "read-only mount" in str(translate_os_error(OSError(errno.EROFS, "x"), tmp_path, Tier.SHARED))

    def test_our_own_errors_pass(self, tmp_path: Path) -> None:
        ours = ObjectNotFoundError("gone")
        assert translate_os_error(ours, tmp_path, Tier.LOCAL) is ours


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of 4 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        unavailable("mounting a small tmpfs needs root")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


async def test_a_full_disk(small_disk: Path) -> None:
    store = LocalStore(small_disk)
    await store.put("old", b"o" * 1000)
    for put in (
        lambda: store.put("old", b"n" * (8 << 20)),
        lambda: store.put("new", b"n" * (8 << 20), if_absent=True),
        lambda: store.put_stream("old", Pieces([b"n" * (1 << 20)] * 8).iterate(), 8 << 20),
    ):
        with pytest.raises(CapacityError) as caught:
            await put()
        assert "free" in str(caught.value)
        assert str(small_disk) in str(caught.value)
    assert await store.get("old") == b"o" * 1000
    assert names_in(small_disk) == ["old"]
    assert shutil.disk_usage(small_disk).free > 3 << 20, "the partial files are still there"


async def test_a_read_only_mount(small_disk: Path) -> None:
    store = LocalStore(small_disk / "root")
    await store.put("old", b"kept")
    remount_read_only(small_disk)
    for put in (store.put("new", b"1"), store.put_stream("new", Pieces([b"1"]).iterate(), 1), store.delete("old")):
        with pytest.raises(PermissionDeniedError, match="read-only mount"):
            await put
    assert await store.get("old") == b"kept"


async def test_no_file_descriptor_is_lost(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for _ in range(20):
        transfer = asyncio.create_task(store.put_stream("key", Pieces([b"x" * 100_000] * 20).iterate(), 2_000_000))
        await asyncio.sleep(0.001)
        transfer.cancel()
        await asyncio.gather(transfer, return_exceptions=True)
    async with asyncio.timeout(60):
        while open_files(tmp_path):  # noqa: ASYNC110  # a worker thread may still be closing its own
            await asyncio.sleep(0.01)
    assert [name for name in names_in(tmp_path) if name.endswith(".tmp")] == []


async def test_a_cancelled_write_is_finished_before_its_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that writes after its descriptor was closed would write into whatever file got that number next."""
    started, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    failures: list[OSError] = []
    write_all = local.write_all

    def slow(file: int, data: bytes) -> int:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(60)
        try:
            return write_all(file, data)
        except OSError as error:
            failures.append(error)
            raise

    monkeypatch.setattr(local, "write_all", slow)
    transfer = asyncio.create_task(LocalStore(tmp_path).put_stream("key", Pieces([b"data"]).iterate(), 4))
    await started.wait()
    transfer.cancel()
    await asyncio.sleep(0.05)
    assert not transfer.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await transfer
    assert failures == []
    assert names_in(tmp_path) == []


async def test_links_to_files_are_listed_as_files(tmp_path: Path) -> None:
    """Hugging Face caches are directories of symbolic links."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_bytes(b"weights")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").symlink_to("../blobs/abc")
    (tmp_path / "model" / "broken").symlink_to("nowhere")
    (tmp_path / "model" / "loop").symlink_to(".")
    store = LocalStore(tmp_path / "model")
    assert [(info.key, info.size_bytes) async for info in store.list()] == [("weights.bin", 7)]
    assert await store.get("weights.bin") == b"weights"
