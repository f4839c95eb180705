"""tierckpt:// through fsspec: only committed checkpoints, one version per open file, one fetch per node."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import re
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import tierckpt
from tests.command_line import python
from tests.servers.origin import Origin
from tests.services import REPOSITORY
from tests.states import same, small_state, zeros_like
from tierckpt.client import close_all
from tierckpt.errors import ConfigError, IntegrityError, ObjectNotFoundError, TierckptError

MiB = 1 << 20


@pytest.fixture(autouse=True)
def settings_of_this_test() -> None:
    """Clear fsspec's instance cache, whose file systems keep their original settings."""
    fsspec.get_filesystem_class("tierckpt").clear_instance_cache()


@pytest.fixture
def fs() -> Any:
    return fsspec.filesystem("tierckpt", skip_instance_cache=True)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def url_of(uri: str) -> str:
    """Return the tierckpt URL of a native one."""
    scheme, separator, rest = uri.partition("://")
    return f"tierckpt://{scheme}/{rest}" if separator else f"tierckpt://file{uri}"


# --- visibility of checkpoints ------------------------------------------------------------------------------------


def newest_by_listing(fs: Any, run: str) -> int | None:
    """Return the newest step as torchtitan finds it: directories ``step-N`` that hold ``.metadata``."""
    steps = [re.search(r"step-(\d+)$", name) for name in fs.ls(run, detail=False)]
    found = [int(step[1]) for step in steps if step and fs.exists(f"{run}/step-{step[1]}/.metadata")]
    return max(found, default=None)


def save_step(uri: str, step: int, **options: Any) -> None:
    writer = tierckpt.TierStorageWriter(f"{uri}/step-{step}", **options)
    dcp.save(small_state(step), storage_writer=writer, no_dist=True)
    if options.get("drain", True):
        tierckpt.wait(f"{uri}/step-{step}", timeout_seconds=60)


def leave_unfinished(fs: Any, run: str, step: int, *, metadata: bool) -> None:
    """Leave an uncommitted save on the shared tier; with ``metadata``, one that lacks only its manifest."""
    store, _ = fsspec.core.url_to_fs(native_of(run))
    folder = native_of(run).partition("://")[2] or native_of(run)
    names = ["__0_0-00aa.distcp", ".tierckpt/pending/00aa.json"]
    if metadata:
        names += [".metadata", ".tierckpt/claim.json"]
    for name in names:
        path = f"{folder}/step-{step}/{name}"
        store.makedirs(path.rpartition("/")[0], exist_ok=True)
        store.pipe_file(path, b'{"attempt":"00aa","replaces":[]}')


def native_of(url: str) -> str:
    scheme, _, rest = url.removeprefix("tierckpt://").partition("/")
    return f"/{rest}" if scheme == "file" else f"{scheme}://{rest}"


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.server)])
def run_uri(request: pytest.FixtureRequest) -> str:
    uri: str = request.getfixturevalue(f"{request.param}_uri")
    return uri


@pytest.mark.slow
def test_listing_shows_the_newest_committed_checkpoint_only(run_uri: str, fs: Any) -> None:
    run = url_of(run_uri)
    save_step(run_uri, 1)
    save_step(run_uri, 2, drain=False)  # local tier only, as before a drain
    leave_unfinished(fs, run, 3, metadata=False)
    leave_unfinished(fs, run, 4, metadata=True)
    fs.pipe_file(f"{run}/notes.txt", b"mine")
    name = run.removeprefix("tierckpt://")
    assert fs.ls(run, detail=False) == [f"{name}/notes.txt", f"{name}/step-1", f"{name}/step-2"]
    assert newest_by_listing(fs, run) == 2
    shown = fs.find(run)
    assert {one.rpartition("/")[0] for one in shown} == {name, f"{name}/step-1", f"{name}/step-2"}
    assert not any(".tierckpt" in one for one in shown)
    for step in (1, 2):
        files = fs.find(f"{run}/step-{step}", detail=True)
        assert files == {info["name"]: info for info in fs.ls(f"{run}/step-{step}")}
        assert sorted(one.rpartition("/")[2][:8] for one in files) == [".metadat", "__0_0-" + _token(files)[:2]]
        assert all(fs.size(one) == info["size"] == len(fs.cat_file(one)) for one, info in files.items())
    for hidden in ("step-3", "step-4", "step-4/.metadata", "step-3/__0_0-00aa.distcp", "step-1/.tierckpt"):
        assert not fs.exists(f"{run}/{hidden}"), hidden
        with pytest.raises(FileNotFoundError):
            fs.ls(f"{run}/{hidden}")


def _token(files: Any) -> str:
    return next(one for one in files if one.endswith(".distcp")).rpartition("-")[2]


def test_listing_is_the_same_before_and_after_the_drain(file_uri: str, fs: Any, tmp_path: Path) -> None:
    run = url_of(file_uri)
    save_step(file_uri, 1)
    seen = fs.find(run, detail=True)
    close_all()
    elsewhere = fsspec.filesystem("tierckpt", local_root=str(tmp_path / "elsewhere"))
    assert elsewhere.find(run, detail=True) == seen


def test_stock_pytorch_reads_a_checkpoint_from_the_local_tier_and_through_the_cache(
    run_uri: str, tmp_path: Path
) -> None:
    for step, options in ((1, {}), (2, {"drain": False})):
        save_step(run_uri, step, **options)
        for where in ({}, {"local_root": str(tmp_path / "elsewhere")}):
            if where and step == 2:
                continue  # unknown to the other node
            assert same(_loaded(f"{url_of(run_uri)}/step-{step}", **where), small_state(step))


def test_files_of_a_checkpoint_cannot_be_changed(file_uri: str, fs: Any) -> None:
    step = f"{url_of(file_uri)}/step-1"
    save_step(file_uri, 1)
    for change in (
        lambda: fs.rm(step, recursive=True),
        lambda: fs.rm(url_of(file_uri), recursive=True),
        lambda: fs.rm_file(f"{step}/.metadata"),
        lambda: fs.pipe_file(f"{step}/.metadata", b"x"),
        lambda: fs.open(f"{step}/.metadata", "wb"),
        lambda: fs.pipe_file(f"{step}/.tierckpt/manifest.json", b"x"),
        lambda: fs.rm("tierckpt://file", recursive=True),
    ):
        with pytest.raises(ConfigError):
            change()
    assert same(_loaded(step), small_state(1))


def _loaded(url: str, **options: Any) -> dict[str, Any]:
    state = zeros_like(small_state())
    dcp.load(state, storage_reader=FsspecReader(url, **options), no_dist=True)
    return state


def test_stock_pytorch_saves_and_loads_through_it(file_uri: str, fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, synced = f"{url_of(file_uri)}/stock", []
    monkeypatch.setattr(os, "sync", lambda: synced.append("the whole machine"))
    dcp.save(small_state(1), storage_writer=FsspecWriter(url), no_dist=True)
    assert synced == []
    assert same(_loaded(url), small_state(1))
    fs.rm(url, recursive=True)
    assert not fs.exists(url)


# --- files ----------------------------------------------------------------------------------------------------------


def test_random_reads(place: Path, fs: Any) -> None:
    data = random.Random(1).randbytes(3 * MiB + 5)
    (place / "data").write_bytes(data)
    small = fsspec.filesystem("tierckpt", chunk_size_bytes="256KiB", skip_instance_cache=True)
    with small.open(f"file{place}/data") as file:
        assert (file.size, file.seekable(), file.readable()) == (len(data), True, True)
        for start, count in ((0, 10), (MiB - 3, 7), (len(data) - 4, 100), (len(data), 1), (5, 2 * MiB)):
            file.seek(start)
            assert file.read(count) == data[start : start + count], start
        file.seek(-5, io.SEEK_END)
        assert file.read() == data[-5:]
    path = f"tierckpt://file{place}/data"
    ranges = [(0, 3), (-4, None), (MiB, MiB + 1), (7, 7), (None, 5)]
    found = fs.cat_ranges([path] * len(ranges), [start for start, _ in ranges], [stop for _, stop in ranges])
    assert found == [data[start:stop] for start, stop in ranges]
    assert isinstance(fs.cat_ranges([path, f"{path}-not"], 0, 1)[1], FileNotFoundError)
    assert fs.tail(path, 9) == data[-9:]


def test_open_file_keeps_its_version(place: Path, fs: Any) -> None:
    old, new = random.Random(1).randbytes(MiB), random.Random(2).randbytes(MiB)
    (place / "data").write_bytes(old)
    small = fsspec.filesystem("tierckpt", chunk_size_bytes="64KiB", write_back=False, skip_instance_cache=True)
    with small.open(f"file{place}/data") as file:
        assert file.read(300 << 10) == old[: 300 << 10]
        small.pipe_file(f"file{place}/data", new)
        file.seek(0)
        assert file.read(300 << 10) == old[: 300 << 10]  # from the cache
        with pytest.raises(IntegrityError):
            file.seek(900 << 10)
            file.read()
    assert small.cat_file(f"file{place}/data") == new


@pytest.mark.parametrize("name", ["a?", "a*", "a[1]"])
def test_existing_name_with_wildcards_is_taken_literally(name: str, place: Path, fs: Any) -> None:
    root = f"file{place}"
    for one in (name, "a1"):
        fs.pipe_file(f"{root}/{one}", one.encode())
        fs.pipe_file(f"{root}/dir/{one}/file", one.encode())
    assert fs.cat(f"{root}/{name}") == name.encode()
    fs.get(f"{root}/{name}", str(place.parent / "here"))
    fs.get(f"{root}/dir/{name}", str(place.parent / "all"), recursive=True)
    assert (place.parent / "here").read_text() == (place.parent / "all/file").read_text() == name
    fs.mv(f"{root}/{name}", f"{root}/moved[2]")
    fs.cp(f"{root}/moved[2]", f"{root}/{name}")
    fs.mv(f"{root}/moved[2]", f"{root}/dir/")
    fs.rm(f"{root}/{name}")
    fs.mv(f"{root}/dir/{name}", f"{root}/new*", recursive=True)
    fs.wait(root)
    files = {str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()}
    assert files == {"a1": "a1", "dir/a1/file": "a1", "dir/moved[2]": name, "new*/file": name}
    fs.rm(f"{root}/new*", recursive=True)
    fs.wait(root)
    assert not (place / "new*").exists() and (place / "a1").exists()


def test_file_appears_complete_on_close(place: Path, fs: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = f"tierckpt://file{place}/new"
    with fs.open(path, "wb") as file:
        file.write(b"all ")
        file.flush()
        assert not fs.exists(path)
        file.write(b"of it")
    assert fs.cat_file(path) == b"all of it"
    with pytest.raises(ZeroDivisionError), fs.open(path, "wb") as file:
        file.write(b"half")
        raise ZeroDivisionError
    fs.open(path, "wb").write(b"forgotten")
    assert "never closed" in caplog.text
    with fs.open(path, "ab") as file:
        file.write(b", and more")
    assert fs.cat_file(path) == b"all of it, and more"
    with fs.transaction:
        with fs.open(path, "wb") as file:
            file.write(b"in a transaction")
        assert fs.cat_file(path) == b"all of it, and more"
    assert fs.cat_file(path) == b"in a transaction"
    large = os.urandom(20 * MiB)
    with fs.open(path, "wb") as file:
        file.write(large)
    assert fs.cat_file(path) == large
    fs.wait(path)
    assert (place / "new").read_bytes() == large


WAYS: dict[str, Any] = {
    "text": ({"mode": "w"}, "half"),
    "compressed": ({"mode": "wb", "compression": "gzip"}, b"half"),
    "compressed text": ({"mode": "wt", "compression": "infer", "encoding": "utf-16"}, "half"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("opens", ["file system", "fsspec"])
def test_text_and_compressed_files_appear_complete_or_not_at_all(way: str, opens: str, place: Path, fs: Any) -> None:
    """``fsspec.open`` closes files even after errors, and few compressors close theirs."""
    (how, data), path = WAYS[way], f"tierckpt://file{place}/new.gz"
    files = {"file system": partial(fs.open, path, **how), "fsspec": partial(fsspec.open, path, **how)}
    open_file = files[opens]
    with pytest.raises(ZeroDivisionError), open_file() as file:
        file.write(data)
        raise ZeroDivisionError
    assert not fs.exists(path)
    try:
        raise ZeroDivisionError  # noqa: TRY301
    except ZeroDivisionError:  # no partial file may remain
        with open_file() as file:
            file.write(data)
    with fs.open(path, **how | {"mode": how["mode"].replace("w", "r")}) as file:
        assert file.read() == data


def test_transaction_publishes_all_its_files(place: Path, fs: Any, tmp_path: Path) -> None:
    top = f"tierckpt://file{place}/in"
    (tmp_path / "put").write_bytes(b"put")

    def write() -> None:
        fs.pipe_file(f"{top}/piped", b"piped")
        fs.put_file(str(tmp_path / "put"), f"{top}/put")
        with fs.open(f"{top}/text", "w") as file:
            file.write("text")
        with suppress(ZeroDivisionError), fs.open(f"{top}/half", "wb") as file:
            file.write(b"half")
            raise ZeroDivisionError
        assert not fs.exists(top)

    with pytest.raises(ZeroDivisionError), fs.transaction:
        write()
        raise ZeroDivisionError
    assert not fs.exists(top)
    with fs.transaction:
        write()
    assert {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.find(top)} == {
        name: name.encode() for name in ("piped", "put", "text")
    }


def test_forked_child_can_read(place: Path, fs: Any) -> None:
    """DataLoader workers do this."""
    data = random.Random(3).randbytes(MiB)
    (place / "data").write_bytes(data)
    small = fsspec.filesystem("tierckpt", chunk_size_bytes="64KiB", skip_instance_cache=True)
    with small.open(f"file{place}/data") as file:
        assert file.read(10) == data[:10]
        pid = os.fork()
        if pid == 0:
            file.seek(700 << 10)
            os._exit(0 if file.read(1000) == data[700 << 10 : (700 << 10) + 1000] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert file.read(10) == data[10:20]


@pytest.mark.slow
def test_unreachable_store_is_not_an_empty_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    fs = fsspec.filesystem("tierckpt", store_timeout_seconds=1, skip_instance_cache=True)
    for verb in (fs.exists, fs.ls, fs.find):
        with pytest.raises(TierckptError) as caught:
            verb("s3/bucket/run")
        assert not isinstance(caught.value, ObjectNotFoundError)


# --- other libraries -------------------------------------------------------------------------------------------------


def test_pandas_reads_and_writes_through_it(place: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": range(1000), "b": [f"row {number}" for number in range(1000)]})
    url = f"tierckpt://file{place}"
    frame.to_parquet(f"{url}/frame.parquet")
    frame.to_csv(f"{url}/frame.csv", index=False)
    assert pandas.read_parquet(f"{url}/frame.parquet").equals(frame)
    assert pandas.read_parquet(f"{url}/frame.parquet", columns=["a"]).equals(frame[["a"]])
    assert pandas.read_csv(f"{url}/frame.csv").equals(frame)
    fsspec.filesystem("tierckpt").wait(url)
    assert (place / "frame.csv").read_text() == frame.to_csv(index=False)


@pytest.mark.slow
def test_datasets_and_webdataset_read_through_it(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a separate process: ``datasets`` reads its settings on import."""
    import tarfile

    (place / "rows.jsonl").write_text("".join(json.dumps({"n": number}) + "\n" for number in range(50)))
    with tarfile.open(place / "shard-0.tar", "w") as tar:
        for number in range(5):
            text = f"sample {number}".encode()
            info = tarfile.TarInfo(f"{number:04}.txt")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    program = f"""
import fsspec, datasets, webdataset
from webdataset.gopen import gopen_schemes
url = "tierckpt://file{place}"
rows = datasets.load_dataset("json", data_files=url + "/*.jsonl", split="train", streaming=True)
print(sum(row["n"] for row in rows))
gopen_schemes["tierckpt"] = lambda url, mode="rb", bufsize=8192: fsspec.open(url, mode).open()
samples = webdataset.WebDataset(url + "/shard-0.tar", shardshuffle=False).decode()
print(",".join(sample["txt"] for sample in samples))
"""
    done = python(program, env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"})
    assert done.stdout.split("\n")[:2] == [str(sum(range(50))), ",".join(f"sample {number}" for number in range(5))], (
        done.stderr[-3000:]
    )


# --- one fetch per node ----------------------------------------------------------------------------------------------

READER = """
import hashlib, random, sys, fsspec
with fsspec.open("tierckpt://s3/bucket/data", chunk_size_bytes="256KiB") as file:
    data = bytearray(file.size)
    starts = list(range(0, file.size, 100_000))
    random.Random(int(sys.argv[1])).shuffle(starts)
    for start in starts:
        file.seek(start)
        part = file.read(100_000)
        data[start : start + len(part)] = part
print(hashlib.sha256(data).hexdigest())
"""


def test_two_processes_fetch_uncached_bytes_once(tmp_path: Path) -> None:
    body = random.Random(9).randbytes(4 * MiB + 321)
    (tmp_path / "store/bucket").mkdir(parents=True)
    (tmp_path / "store/bucket/data").write_bytes(body)
    with Origin.running(tmp_path / "store") as origin:
        command = [sys.executable, "-c", READER]
        options: dict[str, Any] = {"env": {**os.environ, **origin.environment()}, "stdout": subprocess.PIPE}
        processes = [subprocess.Popen([*command, seed], cwd=REPOSITORY, text=True, **options) for seed in ("1", "2")]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        counts = origin.counts()
    assert [output.strip() for output in outputs] == [hashlib.sha256(body).hexdigest()] * 2
    assert (counts["sent_bytes"], counts["requests"]) == (len(body), -(-len(body) // (256 << 10))), counts


def test_reading_files_does_not_import_torch() -> None:
    program = "import sys, fsspec; fsspec.filesystem('tierckpt'); print('torch' in sys.modules)"
    done = python(program)
    assert done.stdout.strip() == "False", done.stderr


def test_unpickled_file_continues_at_its_position(fs: Any, place: Path) -> None:
    """PyTorch's DataLoader pickles datasets to spawned workers."""
    (place / "data.bin").write_bytes(bytes(range(256)) * 4)
    with fs.open(url_of(str(place / "data.bin")), "rb") as file:
        file.read(100)
        with pickle.loads(pickle.dumps(file)) as sent:
            assert (sent.tell(), sent.read(8)) == (100, bytes(range(100, 108)))
        assert file.read(1) == bytes([100])
