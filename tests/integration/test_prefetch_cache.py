"""``tierckpt prefetch`` into the node cache, by several processes: hits, evictions and shared fetches."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierckpt
from tests.agents import until
from tests.command_line import CommandLine
from tests.integration.test_cli import saved
from tests.servers.origin import Origin
from tests.states import flip
from tierckpt.cache.partial_entry import CLAIMS, FETCHES, read_entry
from tierckpt.disk.file_lock import Claims
from tierckpt.errors import IntegrityError, ObjectNotFoundError, OperationTimeoutError, UncommittedCheckpointError
from tierckpt.format.layout import parse_uri
from tierckpt.format.manifest import digest_of
from tierckpt.loading.cached_view import open_cached

KIB = 1024
CHUNK = 64 * KIB

FILES = {
    "config.json": b'{"architectures": ["Tiny"]}',
    "model-00001.safetensors": os.urandom(20 * CHUNK + 11),
    "model-00002.safetensors": os.urandom(12 * CHUNK),
    "original/consolidated.pth": os.urandom(3 * CHUNK),
    "tokenizer/vocab.txt": b"a\nb\n",
}
TOTAL = sum(map(len, FILES.values()))
CHUNKS = sum(-(-len(data) // CHUNK) for data in FILES.values())


class Bucket:
    """The files of ``s3://bucket``, and the requests for them that a server counts."""

    def __init__(self, origin: Origin, root: Path) -> None:
        self.origin, self.root = origin, root

    @property
    def requests(self) -> int:
        return int(self.origin.counts()["requests"])

    def put(self, key: str, data: bytes) -> None:
        (self.root / "bucket" / key).parent.mkdir(parents=True, exist_ok=True)
        (self.root / "new").write_bytes(data)
        (self.root / "new").replace(self.root / "bucket" / key)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    root = tmp_path_factory.mktemp("origin")
    with Origin.running(root) as running:
        yield Bucket(running, root)


@pytest.fixture
def bucket(origin: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name, data in FILES.items():
        origin.put(f"run/model/{name}", data)
    settings = {"TIERCKPT_CHUNK_SIZE_BYTES": "64KiB", "TIERCKPT_CONCURRENCY": "2"}
    for name, value in {**origin.origin.environment(), **settings}.items():
        monkeypatch.setenv(name, value)
    origin.origin.pace(None)
    origin.origin.reset()
    yield origin
    shutil.rmtree(origin.root / "bucket")


MODEL = "s3://bucket/run/model"


def same(directory: str | Path, files: dict[str, bytes] = FILES) -> bool:
    found = {str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file()}
    whole = all(digest_of(Path(directory, name).read_bytes()) == digest_of(data) for name, data in files.items())
    return whole and found - {".tierckpt/prefetched.json"} == set(files)


def test_model_is_cached_once_and_sources_are_reported(cli: CommandLine, bucket: Bucket) -> None:
    first = cli("prefetch", MODEL)
    assert first.code == 0, first.err
    document = first.document
    assert same(document["directory"])
    assert document["bytes_by_source"] == {"here": 0, "cache": 0, "peer": 0, "shared": TOTAL, "other_processes": 0}
    assert document["chunks_fetched"] == bucket.requests == CHUNKS
    assert document["slowest_chunk"]["seconds"] > 0
    again = cli("prefetch", MODEL).document
    assert (again["directory"], again["fetched_bytes"]) == (document["directory"], 0)
    assert again["bytes_by_source"]["here"] == TOTAL
    assert bucket.requests == CHUNKS


@pytest.mark.slow
def test_model_changed_during_a_fetch_is_an_error_and_not_published(
    cli: CommandLine, bucket: Bucket, local_root: Path
) -> None:
    name = "model-00002.safetensors"
    changed = FILES[name][:-4] + b"\x01\x02\x03\x04"

    def change() -> None:
        until(lambda: bucket.requests >= 3, "three requests")
        bucket.put(f"run/model/{name}", changed)
        bucket.origin.pace(None)

    bucket.origin.pace(64 << 10)
    changing = threading.Thread(target=change)
    changing.start()
    done = cli("prefetch", MODEL)
    changing.join()
    assert done.code == 5
    assert "changed in the store" in done.error["message"]
    assert [path for path in (local_root / "cache").iterdir() if path.is_dir() and path.name[0] != "."] == []
    done = cli("prefetch", MODEL)
    assert done.code == 0
    assert same(done.document["directory"], FILES | {name: changed})


@pytest.mark.slow
def test_globs_select_files_and_reuse_complete_entries(cli: CommandLine, bucket: Bucket) -> None:
    chosen = cli("prefetch", MODEL, "--include", "*.safetensors", "--include", "*.json", "--exclude", "*00002*")
    names = ["config.json", "model-00001.safetensors"]
    assert same(chosen.document["directory"], {name: FILES[name] for name in names})
    assert cli("prefetch", MODEL, "--include", "*.gguf").code == 4
    whole = cli("prefetch", MODEL).document["directory"]
    before = bucket.requests
    again = cli("prefetch", MODEL, "--include", "original/*").document
    assert (again["directory"], bucket.requests) == (whole, before)


@pytest.mark.slow
def test_check_finds_missing_files_and_read_data_damaged_ones(cli: CommandLine, bucket: Bucket) -> None:
    absent = cli("cache", "check", MODEL)
    assert (absent.code, absent.document["state"]) == (3, "absent")
    assert absent.document["missing"] == {name: len(data) for name, data in FILES.items()}
    with open_cached(MODEL) as view:
        view.read("config.json")
    assert cli("prefetch", MODEL, "--check").document["state"] == "partial"
    directory = Path(cli("prefetch", MODEL).document["directory"])
    whole = cli("cache", "check", MODEL, "--read-data")
    assert (whole.code, whole.document["state"], whole.document["bad"]) == (0, "whole", {})
    flip(directory / "model-00001.safetensors", 5 * CHUNK + 9)
    assert cli("cache", "check", MODEL).code == 0
    bad = cli("cache", "check", MODEL, "--read-data")
    assert bad.code == 5
    name = "model-00001.safetensors"
    problem = f"bytes {5 * CHUNK}-{6 * CHUNK} of {name} are not the bytes that were saved"
    assert bad.document["bad"] == {name: problem}
    bucket.put("run/model/config.json", b"{}")
    outdated = cli("cache", "check", MODEL)
    assert (outdated.code, outdated.document["state"]) == (3, "outdated")
    listed = cli("prefetch", "--check").document
    assert [(entry["uri"], entry["state"]) for entry in listed["entries"]] == [(MODEL, "complete")]


@pytest.mark.slow
def test_evict_keeps_pins_and_lists_evicted_and_kept(
    cli: CommandLine, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("run/other/weights.bin", os.urandom(8 * CHUNK))
    directory = cli("prefetch", MODEL, "--pin").document["directory"]
    monkeypatch.setenv("TIERCKPT_CACHE_BYTES_MAX", str(TOTAL + 4 * CHUNK))
    plan = cli("prefetch", "s3://bucket/run/other", "--dry-run")
    assert (plan.code, plan.document["fits"], plan.document["would_evict"]) == (1, False, [])
    refused = cli("prefetch", "s3://bucket/run/other")
    assert refused.code == 1
    assert refused.error["error"] == "CapacityError"
    assert (refused.error["needed_bytes"], refused.error["pinned_bytes"]) == (8 * CHUNK, TOTAL)
    assert MODEL in refused.error["pinned"]
    kept = cli("prefetch", MODEL, "--evict")
    assert (kept.code, kept.document["evicted"], kept.document["kept"][0]["pinned"]) == (3, [], True)
    assert cli("cache", "unpin", MODEL).document == {"unpinned": [MODEL]}
    assert cli("cache", "pin", MODEL).document == {"pinned": [MODEL]}
    assert cli("prefetch", MODEL, "--unpin").document == {"unpinned": [MODEL]}
    plan = cli("prefetch", "s3://bucket/run/other", "--dry-run").document
    assert (plan["would_fetch_bytes"], plan["fits"]) == (8 * CHUNK, True)
    assert plan["would_evict"] == [{"uri": MODEL, "size_bytes": TOTAL}]
    assert same(directory), "a dry run must not evict"
    assert cli("prefetch", "s3://bucket/run/other").code == 0
    assert not Path(directory).exists()
    assert cli("cache", "evict", "s3://bucket/run/other").document["freed_bytes"] == 8 * CHUNK
    assert cli("cache", "evict", "s3://bucket/run/other").code == 4
    assert cli("cache", "ls").document["entries"] == []


def test_entry_in_use_by_a_process_is_not_evicted(cli: CommandLine, bucket: Bucket) -> None:
    directory = tierckpt.prefetch(MODEL)
    kept = cli("cache", "evict", MODEL)
    assert (kept.code, kept.document["kept"][0]["uri"]) == (3, MODEL)
    assert same(directory)


@pytest.mark.slow
def test_several_uris_and_one_failure(cli: CommandLine, bucket: Bucket) -> None:
    bucket.put("run/other/weights.bin", b"weights")
    done = cli("prefetch", MODEL, "s3://bucket/run/nothing", "s3://bucket/run/other")
    assert done.code == 3
    assert list(done.error["failures"]) == ["s3://bucket/run/nothing"]
    both = cli("prefetch", MODEL, "s3://bucket/run/other").document["uris"]
    assert [one["fetched_bytes"] for one in both] == [0, 0]


def test_single_object_is_a_separate_entry_unless_its_directory_is_cached(cli: CommandLine, bucket: Bucket) -> None:
    uri = f"{MODEL}/model-00001.safetensors"
    done = cli("prefetch", uri).document
    assert same(done["directory"], {"model-00001.safetensors": FILES["model-00001.safetensors"]})
    whole = cli("prefetch", MODEL).document["directory"]
    before = bucket.requests
    with open_cached(f"{MODEL}/tokenizer/vocab.txt", kind="object") as view:
        assert view.only is not None
        assert view.directory == Path(whole)
        assert bytes(view.read(view.only.path)) == FILES["tokenizer/vocab.txt"]
    assert bucket.requests == before


@pytest.mark.slow
def test_wait_option_waits_up_to_its_timeout(tmp_path: Path, cli: CommandLine, bucket: Bucket, file_uri: str) -> None:
    late = cli("prefetch", "s3://bucket/run/later", "--wait", "--timeout", "1")
    assert late.code == 7
    assert "has no files" in late.error["message"]
    answers: list[Path] = []
    waiting = threading.Thread(
        target=lambda: answers.append(tierckpt.prefetch(f"{file_uri}/step-1", to=tmp_path / "served", wait_seconds=60))
    )
    waiting.start()
    saved(f"{file_uri}/step-1")
    waiting.join(90)
    assert answers == [tmp_path / "served"]
    assert (tmp_path / "served/.metadata").exists()
    with pytest.raises(OperationTimeoutError):
        tierckpt.prefetch("s3://bucket/run/later", wait_seconds=0.2)


def test_unclaimed_shards_of_a_save_are_not_a_model(tmp_path: Path, file_uri: str) -> None:
    """A save in progress: shards precede its claim, and metadata comes last."""
    saved(f"{file_uri}/step-1")
    place = Path(file_uri, "step-1")
    metadata = (place / ".metadata").read_bytes()
    shutil.rmtree(place / ".tierckpt")
    (place / ".metadata").unlink()
    shutil.rmtree(os.environ["TIERCKPT_LOCAL_ROOT"])
    with pytest.raises(UncommittedCheckpointError, match="not committed"):
        tierckpt.prefetch(f"{file_uri}/step-1", to=tmp_path / "served")
    (place / ".metadata").write_bytes(metadata)  # a manual copy of all files that plain PyTorch needs
    served = tierckpt.prefetch(f"{file_uri}/step-1", to=tmp_path / "served")
    assert (served / ".metadata").read_bytes() == metadata


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (MODEL, "--check", "--evict"),
        (MODEL, "--evict", "--pin"),
        (MODEL, "--dry-run", "--pin"),
        (MODEL, MODEL, "--to", "/tmp/nowhere"),
    ],
)
def test_invalid_option_combinations_are_a_usage_error(
    cli: CommandLine, arguments: tuple[str, ...], bucket: Bucket
) -> None:
    assert cli("prefetch", *arguments).code == 2
    assert bucket.requests == 0


# --- reading through -------------------------------------------------------------------------------------------------


def test_range_reads_fetch_each_chunk_once(bucket: Bucket) -> None:
    name, data = "model-00001.safetensors", FILES["model-00001.safetensors"]
    with open_cached(MODEL) as view:
        assert view.files.keys() == FILES.keys()
        assert not view.landed(name, 0, 1)
        assert bytes(view.read(name, CHUNK - 5, CHUNK + 5)) == data[CHUNK - 5 : CHUNK + 5]
        assert bucket.requests == 2
        into = bytearray(100)
        view.read_into(name, CHUNK + 7, into)
        assert (bytes(into), bucket.requests) == (data[CHUNK + 7 : CHUNK + 107], 2)
        assert view.landed(name, 0, 2 * CHUNK)
        assert not view.landed(name)
        assert view.directory is None
        assert view.path(name).stat().st_size == len(data)
        assert bytes(view.read(name, len(data) - 1)) == data[-1:]
        assert bytes(view.read("tokenizer/vocab.txt", 2, 2)) == b""
        with pytest.raises(tierckpt.errors.ConfigError):
            view.read(name, 0, len(data) + 1)
        with pytest.raises(ObjectNotFoundError):
            view.read("no-such-file")
        view.fill()
        assert same(view.directory or "")
        assert digest_of(view.read(name)) == digest_of(data)
    assert bucket.requests == CHUNKS


def test_reader_uses_chunks_of_a_running_fetch(bucket: Bucket) -> None:
    bucket.origin.pace(8 << 20)
    with open_cached(MODEL) as view:
        view.fill_in_background()
        for name, data in FILES.items():
            for start in range(0, len(data), CHUNK):
                view.wait(name, start, min(start + CHUNK, len(data)), timeout_seconds=60)
                got = view.read(name, start, min(start + CHUNK, len(data)))
                assert digest_of(got) == digest_of(data[start : start + CHUNK])
    assert bucket.requests == CHUNKS


def test_a_version_that_has_gone_is_an_error_and_never_other_bytes(bucket: Bucket) -> None:
    name = "model-00001.safetensors"
    with open_cached(MODEL) as view:
        first = bytes(view.read(name, 0, 10))
        bucket.put(f"run/model/{name}", os.urandom(len(FILES[name])))
        assert bytes(view.read(name, 0, 10)) == first
        with pytest.raises(IntegrityError, match="changed in the store"):
            view.read(name, 5 * CHUNK, 5 * CHUNK + 10)


def test_a_holder_that_does_not_get_on_is_overtaken(bucket: Bucket) -> None:
    name = "model-00001.safetensors"
    with open_cached(MODEL) as view:
        view._cached.stall_seconds = 0.3  # private: the setting's minimum is a minute
        incoming = view.path(name).parent
        stuck = Claims(incoming / CLAIMS)  # as of a stopped process
        frozen = read_entry(incoming)
        assert frozen is not None
        assert stuck.take(FETCHES + frozen.first_ordinals[frozen.index_of(name)])
        assert bytes(view.read(name, 0, 10)) == FILES[name][:10]
        stuck.close()


def test_prefetched_checkpoint_is_found_by_restore(cli: CommandLine, file_uri: str, local_root: Path) -> None:
    saved(f"{file_uri}/step-1")
    shutil.rmtree(local_root)
    done = cli("prefetch", f"{file_uri}/step-1").document
    assert done["directory"] == str(
        local_root / "checkpoints/file/_" / parse_uri(f"{file_uri}/step-1").path.lstrip("/")
    )
    assert [(item["kind"]) for item in cli("status").document["local"]] == ["checkpoint"]
    assert cli("cache", "check", f"{file_uri}/step-1").document["state"] == "whole"
    assert cli("prefetch", f"{file_uri}/step-1", "--pin").code == 2
