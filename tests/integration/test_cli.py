"""The command line as a separate process against real storage: output, effects and exit codes."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.command_line import Done, python
from tests.compat.test_crossing import assert_stock_loads
from tests.compat.worker import launch
from tests.files import flip, tmpfs
from tests.servers.fleet import Fleet
from tests.services import S3Server, free_port
from tests.states import load, raises_ours, same, save, save_drained, small_state
from tierckpt.checkpoint.journal import Journal
from tierckpt.checkpoint.local_commit import read_local_manifest
from tierckpt.client import close_all
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.stores import retry

KIB = 1024
SMALL_SHARDS = {"shard_size_bytes_max": "64KiB", "chunk_size_bytes": "16KiB"}
COMMAND = (sys.executable, "-m", "tierckpt.cli")


def tierckpt_(*arguments: object, **environment: str) -> Done:
    """Run ``tierckpt ARGUMENTS --json``."""
    return for_people(*arguments, "--json", **environment)


def for_people(*arguments: object, **environment: str) -> Done:
    command = _fleet().start([str(argument) for argument in arguments], {**os.environ, **environment})
    ended = command.wait(120)
    out, err = command.out.read_text(), command.err.read_text()
    assert ended is not None and "Traceback" not in err, err
    return Done(ended.code, out, err)


@lru_cache(maxsize=1)
def _fleet() -> Fleet:
    """Fork commands from a process that has imported their modules, including torch. It ends with this one."""
    folder = _held.enter_context(tempfile.TemporaryDirectory(prefix="commands-"))
    return _held.enter_context(Fleet.running(Path(folder), "torch"))


_held = contextlib.ExitStack()
atexit.register(_held.close)


def saved(uri: str, seed: int = 1, **options: Any) -> dict[str, Any]:
    """Save a state in several small shards and wait for the drain."""
    state = small_state(seed)
    save_drained(uri, state, **{**SMALL_SHARDS, **options})
    close_all()
    return state


@pytest.fixture
def uri(file_uri: str) -> str:
    """A checkpoint on both tiers."""
    saved(f"{file_uri}/step-1")
    return f"{file_uri}/step-1"


def lose_the_node() -> None:
    close_all()
    shutil.rmtree(os.environ["TIERCKPT_LOCAL_ROOT"], ignore_errors=True)


def local_shards(uri: str) -> list[Path]:
    return sorted(local_dir(Path(os.environ["TIERCKPT_LOCAL_ROOT"]), parse_uri(uri)).glob("*.distcp"))


# --- every verb, on every kind of storage -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_main_path_of_every_verb(shared_uri: str, tmp_path: Path) -> None:
    states = {step: saved(f"{shared_uri}/step-{step}", step) for step in (1, 10)}
    uri = f"{shared_uri}/step-10"

    listing = tierckpt_("ls", shared_uri)
    rows = listing.document["checkpoints"]
    assert (listing.code, listing.err) == (0, "")
    assert [(row["step"], row["local"], row["shared"]) for row in rows] == [
        (1, "committed", "committed"),
        (10, "committed", "committed"),
    ]
    manifest = read_local_manifest(local_shards(uri)[0].parent)
    assert manifest is not None
    assert rows[1]["size_bytes"] == manifest.size_bytes

    info = tierckpt_("info", uri).document
    assert (info["kind"], info["step"], info["world_size"], info["attempt"]) == ("checkpoint", 10, 1, manifest.attempt)
    assert info["tiers"] == ["local", "shared"]
    assert {(file["path"], file["size_bytes"]) for file in info["files"]} == {
        (entry.path, entry.size_bytes) for entry in manifest.entries
    }

    verified = tierckpt_("verify", uri, "--read-data")
    assert verified.code == 0
    assert verified.document["good"]
    metadata_bytes = sum(item.size_bytes for item in manifest.metadata)  # stored twice: ours and stock PyTorch's
    assert verified.document["checked_bytes"] == 2 * (manifest.size_bytes + metadata_bytes)

    status = tierckpt_("status").document
    assert status["journal"] == []
    assert [(item["uri"], item["drained"]) for item in status["local"]] == [
        (parse_uri(f"{shared_uri}/step-{step}").uri, True) for step in (1, 10)
    ]
    assert status["local_bytes"] == sum(row["size_bytes"] for row in rows)
    assert tierckpt_("drain", "--wait").document == {"entries": [], "drained": 0, "left": 0}

    lose_the_node()
    assert [row["local"] for row in tierckpt_("ls", shared_uri).document["checkpoints"]] == ["-", "-"]
    fetched = tierckpt_("prefetch", uri, "--to", tmp_path / "fetched").document
    assert fetched["fetched_bytes"] == fetched["size_bytes"] == manifest.size_bytes
    assert_stock_loads(states[10], tmp_path, str(tmp_path / "fetched"))
    again = tierckpt_("prefetch", uri, "--to", tmp_path / "fetched").document
    assert (again["fetched_bytes"], again["files"]) == (0, len(manifest.entries))

    restored = tierckpt_("restore", shared_uri, "--to", tmp_path / "restored").document  # the newest of the run
    assert restored["uri"] == parse_uri(uri).uri
    assert (restored["local_bytes"], restored["shared_bytes"]) == (0, manifest.size_bytes)
    assert_stock_loads(states[10], tmp_path, str(tmp_path / "restored"))

    exported = tierckpt_("export", f"{shared_uri}/step-1", "--to", tmp_path / "exported", "--only", "model")
    assert (exported.code, exported.err) == (0, "")
    assert same(tierckpt.load_safetensors(tmp_path / "exported"), states[1]["model"])

    doctor = tierckpt_("doctor", shared_uri)
    checks = {check["name"]: check["status"] for check in doctor.document["checks"]}
    assert doctor.code == 0
    assert {status for name, status in checks.items() if name.startswith("store")} == {"ok"}
    assert checks["store put-if-absent"] == checks["O_DIRECT"] == checks["local_root"] == "ok"
    assert {row["name"] for row in tierckpt_("ls", shared_uri).document["checkpoints"]} == {"step-1", "step-10"}


WITHOUT_TORCH = """
import importlib.abc, json, sys

class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "safetensors"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
from tierckpt.cli import main

codes = []
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as exit:
        codes.append(exit.code)
assert "torch" not in sys.modules
print(codes)
"""


@pytest.mark.slow
def test_everything_but_export_runs_without_torch(s3_uri: str, tmp_path: Path) -> None:
    state = saved(f"{s3_uri}/step-1")
    uri = f"{s3_uri}/step-1"
    verbs = [
        ["ls", s3_uri], ["info", uri], ["verify", uri, "--read-data"], ["status"], ["drain", "--wait"],
        ["doctor", s3_uri], ["prefetch", uri, "--to", str(tmp_path / "fetched")],
        ["restore", s3_uri, "--to", str(tmp_path / "restored")],
        ["export", uri, "--to", str(tmp_path / "exported")],
    ]  # fmt: skip
    done = python(WITHOUT_TORCH, json.dumps(verbs))
    assert done.stdout.splitlines()[-1:] == ["[0, 0, 0, 0, 0, 0, 0, 0, 2]"], done.stderr
    assert "pip install 'tierckpt[torch]'" in done.stderr
    assert_stock_loads(state, tmp_path, str(tmp_path / "fetched"))


# --- exit codes: missing, not committed, damaged, partial -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["ls", "info", "verify", "prefetch", "restore", "export"])
def test_missing_checkpoint_is_exit_4(verb: str, s3_uri: str, tmp_path: Path) -> None:
    to = ["--to", tmp_path / "out"] if verb in {"prefetch", "restore", "export"} else []
    done = tierckpt_(verb, f"{s3_uri}/step-7", *to)
    assert (done.code, done.out) == (4, "")
    assert "step-7" in done.error["message"]
    assert done.error["hint"]
    assert not (tmp_path / "out").exists()
    shown = for_people(verb, f"{s3_uri}/step-7", *to)
    assert (shown.code, shown.out) == (4, "")
    assert shown.err.startswith("error: ")
    assert "hint: " in shown.err


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["info", "verify", "prefetch", "restore", "export"])
def test_unfinished_save_is_exit_4_with_a_message(verb: str, file_uri: str, tmp_path: Path) -> None:
    uri = f"{file_uri}/step-2"
    saved(uri)
    lose_the_node()
    Path(uri, ".tierckpt/manifest.json").unlink()
    to = ["--to", tmp_path / "out"] if verb in {"prefetch", "restore", "export"} else []
    done = tierckpt_(verb, uri, *to)
    assert (done.code, done.error["error"]) == (4, "UncommittedCheckpointError")
    assert not (tmp_path / "out").exists()
    rows = tierckpt_("ls", file_uri).document["checkpoints"]
    assert [(row["step"], row["shared"]) for row in rows] == [(2, "uncommitted")]


def test_a_run_is_not_a_checkpoint(file_uri: str) -> None:
    saved(f"{file_uri}/step-3")
    done = tierckpt_("info", file_uri)
    assert done.code == 4
    assert f"{file_uri}/step-3" in done.error["hint"]


def test_log_events_use_the_requested_format(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights.bin").write_bytes(b"some")
    verbose = tierckpt_("--log-level", "info", "--log-format", "json", "adopt", model, tmp_path / "run/step-1")
    quiet = tierckpt_("adopt", model, tmp_path / "run/step-2")
    assert (verbose.code, quiet.code, quiet.err) == (0, 0, "")
    assert {json.loads(line)["level"] for line in verbose.err.splitlines()} == {"info"}


@pytest.mark.parametrize("tier", ["local", "shared"])
def test_flipped_bit_is_found_by_full_verify_and_is_exit_5(tier: str, uri: str) -> None:
    shard = local_shards(uri)[0]
    flip(shard if tier == "local" else Path(uri, shard.name))
    assert tierckpt_("verify", uri).code == 0  # sizes match
    done = tierckpt_("verify", uri, "--read-data")
    assert done.code == 5
    assert not done.document["good"]
    (problem,) = done.document["problems"]
    assert (problem["tier"], problem["file"]) == (tier, shard.name)
    assert problem["good_copy_on"] == ["shared" if tier == "local" else "local"]
    assert done.document["lost"] == []
    assert shard.name in for_people("verify", uri, "--read-data").out


def test_a_short_shard_is_found_without_reading(uri: str) -> None:
    shard = Path(uri, local_shards(uri)[0].name)
    data = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(data[:-1])
    done = tierckpt_("verify", uri)
    assert (done.code, done.document["problems"][0]["tier"]) == (5, "shared")


def test_file_without_a_good_copy_is_lost_and_not_restored(uri: str, tmp_path: Path) -> None:
    shard = local_shards(uri)[0]
    for path in (shard, Path(uri, shard.name)):
        flip(path)
    done = tierckpt_("verify", uri, "--read-data")
    assert (done.code, done.document["lost"]) == (5, [shard.name])
    assert [problem["good_copy_on"] for problem in done.document["problems"]] == [[], []]
    assert "lost" in for_people("verify", uri, "--read-data").out
    done = tierckpt_("restore", uri, "--to", tmp_path / "out")
    assert (done.code, done.out) == (5, "")
    assert shard.name in done.error["message"]
    assert not (tmp_path / "out").exists()


def test_shards_on_other_nodes_are_not_damage(uri: str) -> None:
    """Each node keeps its own ranks' shards and the whole manifest."""
    shard = local_shards(uri)[0]
    shard.unlink()
    done = tierckpt_("verify", uri, "--read-data")
    assert (done.code, done.document["problems"]) == (0, [])
    assert done.document["absent_on_this_node"] == [shard.name]
    Path(uri, shard.name).unlink()
    done = tierckpt_("verify", uri)
    assert (done.code, done.document["lost"]) == (5, [shard.name])


@pytest.mark.parametrize("tier", ["local", "shared"])
def test_damaged_manifest_is_exit_5_although_the_other_tier_is_good(tier: str, uri: str) -> None:
    place = local_shards(uri)[0].parent if tier == "local" else Path(uri)
    flip(place / ".tierckpt/manifest.json")
    done = tierckpt_("verify", uri)
    assert done.code == 5
    (problem,) = done.document["problems"]
    assert (problem["tier"], problem["file"]) == (tier, ".tierckpt/manifest.json")
    assert done.document["warnings"]


@pytest.mark.slow
def test_stock_pytorch_checkpoint_is_shown_and_restored_but_not_verified(file_uri: str, tmp_path: Path) -> None:
    uri, state = f"{file_uri}/step-1", small_state(1)
    with raises_ours():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(uri), no_dist=True)
    assert tierckpt_("info", uri).document["kind"] == "stock"
    done = tierckpt_("verify", uri)
    assert done.code == 1
    assert "digests" in done.error["message"]
    assert tierckpt_("restore", uri, "--to", tmp_path / "out").code == 0
    assert_stock_loads(state, tmp_path, str(tmp_path / "out"))


def test_a_partial_prefetch_is_exit_3_names_the_file_and_publishes_nothing(
    s3_uri: str, moto: S3Server, tmp_path: Path
) -> None:
    uri = f"{s3_uri}/step-1"
    saved(uri)
    gone = local_shards(uri)[0].name
    local_shards(uri)[0].unlink()  # prefetch would copy it
    bucket = urlsplit(uri).netloc
    body = moto.client().get_object(Bucket=bucket, Key=f"run/step-1/{gone}")["Body"].read()
    moto.client().delete_object(Bucket=bucket, Key=f"run/step-1/{gone}")
    done = tierckpt_("prefetch", uri, "--to", tmp_path / "out")
    assert (done.code, done.out) == (3, "")
    assert list(done.error["failures"]) == [gone]
    assert not (tmp_path / "out").exists()
    assert gone in for_people("prefetch", uri, "--to", tmp_path / "out").err
    moto.client().put_object(Bucket=bucket, Key=f"run/step-1/{gone}", Body=body)
    done = tierckpt_("prefetch", uri, "--to", tmp_path / "out")
    assert (done.code, done.document["fetched_bytes"]) == (0, len(body))  # only the missing file


# --- restore ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_restore_takes_good_local_copies_and_replaces_bad_ones(s3_uri: str, tmp_path: Path) -> None:
    uri = f"{s3_uri}/step-1"
    state = saved(uri)
    first, second, *_ = local_shards(uri)
    size_bytes = second.stat().st_size
    flip(first)
    second.unlink()
    done = tierckpt_("restore", uri, "--to", tmp_path / "out")
    assert done.code == 0
    assert any(first.name in warning for warning in done.document["warnings"])
    assert done.document["local_bytes"] + done.document["shared_bytes"] == done.document["size_bytes"]
    assert done.document["local_bytes"] > 0
    assert done.document["shared_bytes"] > size_bytes  # the missing file and the bad chunk, possibly a short last one
    assert_stock_loads(state, tmp_path, str(tmp_path / "out"))


@pytest.mark.slow
def test_restore_does_not_read_shared_storage_for_local_files(s3_uri: str, moto: S3Server, tmp_path: Path) -> None:
    uri = f"{s3_uri}/step-1"
    state = saved(uri)
    for shard in local_shards(uri):  # a request to shared storage would fail
        moto.client().delete_object(Bucket=urlsplit(uri).netloc, Key=f"run/step-1/{shard.name}")
    done = tierckpt_("restore", uri, "--to", tmp_path / "out")
    assert (done.code, done.document["shared_bytes"]) == (0, 0)
    assert_stock_loads(state, tmp_path, str(tmp_path / "out"))


def test_restore_onto_its_own_source_is_refused(uri: str) -> None:
    before = {path: path.read_bytes() for path in Path(uri).rglob("*") if path.is_file()}
    for target in (uri, local_shards(uri)[0].parent):
        assert tierckpt_("restore", uri, "--to", target).code == 2
    assert before == {path: path.read_bytes() for path in Path(uri).rglob("*") if path.is_file()}


# --- drain ------------------------------------------------------------------------------------------------------


@pytest.fixture
def dead_endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """S3 does not answer until ``undo()``."""
    with monkeypatch.context() as patch:
        patch.setattr(retry, "RETRIES_MAX", 0)
        patch.setenv("TIERCKPT_EXIT_TIMEOUT_SECONDS", "0")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        yield patch


@pytest.mark.slow
def test_drain_finishes_saves_of_a_dead_trainer(s3_uri: str, dead_endpoint: pytest.MonkeyPatch) -> None:
    uri, state = f"{s3_uri}/step-1", small_state(1)
    save(uri, state, **SMALL_SHARDS)
    close_all()
    assert tierckpt_("drain").code == 7
    status = tierckpt_("status").document
    assert [(entry["uri"], entry["state"]) for entry in status["journal"]] == [(uri, "ready")]
    assert "StoreUnavailableError" in status["journal"][0]["last_error"]
    assert not status["local"][0]["drained"]
    checks = {check["name"]: check["status"] for check in tierckpt_("doctor").document["checks"]}
    assert checks["journal"] == "warn"
    dead_endpoint.undo()
    done = tierckpt_("drain")
    assert (done.code, done.document["left"]) == (0, 0)
    assert [(entry["uri"], entry["outcome"]) for entry in done.document["entries"]] == [(uri, "committed")]
    lose_the_node()
    assert same(load(uri, state), state)


def test_partial_drain_is_exit_3_and_failed_drain_is_its_error(s3_uri: str, dead_endpoint: pytest.MonkeyPatch) -> None:
    save(f"{s3_uri}/step-1", small_state(1))
    save("s3://no-such-bucket-here/run/step-2", small_state(2))
    close_all()
    dead_endpoint.undo()
    done = tierckpt_("drain", "--wait")
    assert done.code == 3
    outcomes = {entry["uri"]: entry["outcome"] for entry in done.document["entries"]}
    assert outcomes == {f"{s3_uri}/step-1": "committed", "s3://no-such-bucket-here/run/step-2": "failed"}
    again = tierckpt_("drain", "--wait")
    assert (again.code, again.document["left"]) == (4, 1)  # the bucket does not exist
    assert "no-such-bucket-here" in for_people("drain").out


@pytest.mark.slow
def test_drain_wait_ends_at_its_deadline(s3_uri: str, dead_endpoint: pytest.MonkeyPatch) -> None:
    save(f"{s3_uri}/step-1", small_state(1))
    close_all()
    assert tierckpt_("drain", "--wait", "--timeout", "2").code == 7


@pytest.mark.slow
def test_drain_commits_the_saves_of_several_ranks(
    s3_uri: str, local_root: Path, dead_endpoint: pytest.MonkeyPatch
) -> None:
    """Without --wait too: the last rank drained commits for all."""
    uri = f"{s3_uri}/step-1"
    launch("tests.integration.test_cli:save_and_leave", 3, uri=uri)
    assert len(Journal(local_root).entries()) == 3
    dead_endpoint.undo()
    done = tierckpt_("drain")
    assert (done.code, done.document["drained"], done.document["left"]) == (0, 3, 0), done.out
    lose_the_node()
    expected = {f"rank-{rank}": torch.full((1000,), float(rank)) for rank in range(3)}
    assert same(load(uri, expected), expected)


def save_and_leave(uri: str) -> int:
    """Save as one rank of a job that ends before the drain. Run by tests/compat/worker.py."""
    rank = dist.get_rank()
    dcp.save({f"rank-{rank}": torch.full((1000,), float(rank))}, storage_writer=tierckpt.TierStorageWriter(uri))
    return rank


@pytest.mark.slow
def test_drain_skips_entries_another_process_drains(
    s3_uri: str, local_root: Path, dead_endpoint: pytest.MonkeyPatch
) -> None:
    save(f"{s3_uri}/step-1", small_state(1))
    close_all()
    (entry,) = Journal(local_root).entries()
    dead_endpoint.undo()
    with Journal(local_root).own(entry.token) as is_owned:
        assert is_owned
        done = tierckpt_("drain")
        assert (done.code, done.document["entries"][0]["outcome"]) == (7, "held")
        waiting = subprocess.Popen([*COMMAND, "drain", "--wait", "--json"], stdout=subprocess.PIPE, text=True)
        time.sleep(2)
        assert waiting.poll() is None
    out, _ = waiting.communicate(timeout=60)
    assert (waiting.returncode, json.loads(out)["left"]) == (0, 0)


# --- doctor -----------------------------------------------------------------------------------------------------


def test_doctor_finds_a_missing_bucket(s3_uri: str) -> None:
    done = tierckpt_("doctor", "s3://no-such-bucket-here/run")
    assert (done.code, done.document["ok"]) == (1, False)
    failed = [check for check in done.document["checks"] if check["status"] == "fail"]
    assert [check["name"] for check in failed] == ["store reachable"]
    assert "no-such-bucket-here" in failed[0]["detail"]


def test_doctor_shows_the_source_of_store_settings(s3_uri: str) -> None:
    done = tierckpt_("doctor", s3_uri)
    (check,) = (check for check in done.document["checks"] if check["name"] == "store configuration")
    assert "(AWS_ENDPOINT_URL)" in check["detail"]
    assert "us-east-1 (AWS_REGION)" in check["detail"]
    assert "credentials AWS_ACCESS_KEY_ID" in check["detail"]
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in check["detail"].split()


def test_doctor_finds_an_unusable_local_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = tierckpt_("doctor", "--local-root", tmp_path / "file/below")
    failed = [check["name"] for check in done.document["checks"] if check["status"] == "fail"]
    assert (done.code, failed) == (1, ["local_root"])


def test_doctor_warns_of_memory_and_leaves_no_files(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "memory", "mode=700") as directory:
        done = tierckpt_("doctor", tmp_path / "new/place", "--local-root", directory)
        assert list(directory.iterdir()) == []
    checks = {check["name"]: check for check in done.document["checks"]}
    assert done.code == 0
    assert checks["file system"]["status"] == "warn"
    assert "tmpfs" in checks["file system"]["detail"]
    assert not (tmp_path / "new").exists()


def test_the_command_is_installed(tmp_path: Path) -> None:
    """The entry point of pyproject.toml runs the same program."""
    script = Path(sys.executable).with_name("tierckpt")
    done = subprocess.run([str(script), "--version"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"tierckpt {tierckpt.__version__}\n")
