"""``tierckpt ls`` of a bucket or a directory above runs: lists the runs with a bounded number of requests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.command_line import CommandLine
from tests.servers.faultproxy import FaultProxy, Kind, Plan
from tests.services import S3Server
from tierckpt.checkpoint.select import SEARCHED_DIRECTORIES_MAX
from tierckpt.client import close_all, get_client
from tierckpt.config import Settings
from tierckpt.errors import PermissionDeniedError
from tierckpt.format.layout import METADATA, local_dir, parse_uri
from tierckpt.stores.local import LocalStore


def put(uri: str, *names: str) -> None:
    """Create one-byte files. With ``.metadata`` a directory is a checkpoint of stock PyTorch."""
    client = get_client(Settings.load())
    for name in names:
        place = parse_uri(f"{uri}/{name}")
        client.run(client.mover.store(place.parent).put(place.name, b"x"))


def named(document: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Map each run below the place to its number of steps and newest step."""
    return {
        item["uri"].removeprefix(document["uri"]).strip("/"): (item["steps"], item["newest"]["name"])
        for item in document["runs"]
    }


def test_the_runs_of_a_bucket_are_listed(shared_uri: str, cli: CommandLine) -> None:
    bucket = shared_uri.rpartition("/")[0]
    steps = [f"lab/run-a/step-{step}/{METADATA}" for step in (2, 10, 9)]
    others = ("run-7/checkpoint-5", "lab/deep/er/final", "lab/deep/er/best")
    put(bucket, *steps, *(f"{name}/{METADATA}" for name in others))
    put(bucket, "lab/run-a/logs/1/events", "data/part-1/a.bin", "data/part-2/b.bin", "notes.txt", "gpt-2/model.bin")
    document = cli.answer("ls", bucket)
    runs = {"lab/run-a": (3, "step-10"), "run-7": (1, "checkpoint-5"), "lab/deep/er": (2, "final")}
    assert (named(document), document["runs_complete"], document["checkpoints"]) == (runs, True, [])
    assert {item["newest"]["shared"] for item in document["runs"]} == {"stock"}
    assert named(cli("ls", f"{bucket}/lab").document) == {"run-a": (3, "step-10"), "deep/er": (2, "final")}
    assert "lab/run-a" in cli.text("ls", bucket).out


def test_checkpoint_among_runs_hides_no_run(file_uri: str, cli: CommandLine) -> None:
    put(file_uri, f"step-3/{METADATA}", f"step-4/{METADATA}", f"eval/step-1/{METADATA}", "logs/1/events")
    document = cli.answer("ls", file_uri)
    assert [row["name"] for row in document["checkpoints"]] == ["step-3", "step-4"]
    assert named(document) == {"eval": (1, "step-1")}
    put(file_uri, *(f"logs/{number}/events" for number in range(SEARCHED_DIRECTORIES_MAX)))
    assert not cli.answer("ls", file_uri)["runs_complete"]  # for a run only its checkpoints are guaranteed


def test_a_run_that_is_only_on_this_node_is_listed(file_uri: str, local_root: Path, cli: CommandLine) -> None:
    directory = local_dir(local_root, parse_uri(f"{file_uri}/lab/run/step-1"))
    directory.mkdir(parents=True)
    (directory / "__0_0-x.distcp").touch()
    document = cli.answer("ls", file_uri)
    assert named(document) == {"lab/run": (1, "step-1")}
    assert document["runs"][0]["newest"]["local"] == "uncommitted"


def test_scan_of_a_large_tree_is_bounded(file_uri: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    put(file_uri, f"a/run/step-1/{METADATA}")
    for number in range(2 * SEARCHED_DIRECTORIES_MAX):
        Path(file_uri, f"data/{number // 8}/{number:04d}").mkdir(parents=True)
    requests = 0

    def counted(verb: Any) -> Any:
        async def ask(*args: Any) -> Any:
            nonlocal requests
            requests += 1
            return await verb(*args)

        return ask

    for verb in ("head", "get", "list_dirs"):
        monkeypatch.setattr(LocalStore, verb, counted(getattr(LocalStore, verb)))
    done = cli("ls", file_uri)
    assert (done.code, done.document["runs_complete"]) == (3, False)
    assert named(done.document) == {"a/run": (1, "step-1")}
    assert SEARCHED_DIRECTORIES_MAX < requests <= 6 * SEARCHED_DIRECTORIES_MAX
    requests = 0
    done = cli("ls", f"{file_uri}/data")
    assert done.code == 4 and "Name one of them" in done.err and requests <= 12 * SEARCHED_DIRECTORIES_MAX


def test_unreadable_directories_are_skipped(file_uri: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    put(file_uri, f"run/step-1/{METADATA}", "lost+found/x")
    list_dirs = LocalStore.list_dirs

    async def refusing(store: LocalStore, prefix: str = "") -> list[str]:
        if store.root.name == "lost+found":
            raise PermissionDeniedError(f"{store.root} may not be read")
        return await list_dirs(store, prefix)

    monkeypatch.setattr(LocalStore, "list_dirs", refusing)
    document = cli.answer("ls", file_uri)
    assert named(document) == {"run": (1, "step-1")}
    assert "lost+found is passed over" in document["warnings"][0]


def adopted(directory: Path, uri: str, size_bytes: int) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "model.bin").write_bytes(bytes(size_bytes))
    tierckpt.adopt(directory, uri).wait()


def test_the_newest_step_of_a_run_has_age_size_and_origin(shared_uri: str, tmp_path: Path, cli: CommandLine) -> None:
    bucket, begun = shared_uri.rpartition("/")[0], time.time()
    for step in (1, 2):
        adopted(tmp_path / "theirs", f"{bucket}/lab/adopted/step-{step}", 1000 * step)
    adopted(tmp_path / "model", f"{bucket}/models/llama", 5000)
    with tierckpt.Checkpointer(f"{bucket}/lab/ours") as checkpointer:
        checkpointer.save(7, {"weights": torch.ones(1000)})
    put(bucket, f"lab/stock/step-3/{METADATA}", "lab/stock/step-3/__0_0.distcp")
    document = cli.answer("ls", bucket)
    runs = {"lab/adopted": (2, "step-2"), "models": (1, "llama"), "lab/ours": (1, "step-7"), "lab/stock": (1, "step-3")}
    assert (named(document), document["runs_complete"]) == (runs, True)
    rows = {item["uri"].removeprefix(f"{document['uri'].rstrip('/')}/"): item["newest"] for item in document["runs"]}
    assert {name for name, row in rows.items() if row["adopted"]} == {"lab/adopted", "models"}
    sizes = {name: row["size_bytes"] for name, row in rows.items()}
    assert sizes.pop("lab/ours") > 4000 and sizes == {"lab/adopted": 2000, "models": 5000, "lab/stock": 2}
    assert rows["lab/stock"]["age_seconds"] is rows["lab/stock"]["created_unix_seconds"] is None
    for name in ("lab/adopted", "models", "lab/ours"):
        assert begun - 1 <= rows[name]["created_unix_seconds"] <= time.time() + 1
        assert 0 <= rows[name]["age_seconds"] <= time.time() - begun + 1
    rows_of_text = [line.split() for line in cli.text("ls", bucket).out.splitlines() if line.split()]
    lines = {row[0]: row for row in rows_of_text}
    assert lines["run"] == ["run", "steps", "newest", "age", "size", "local", "shared", "note"]
    assert lines["models"][1:3] == ["1", "llama"] and lines["models"][-1] == "adopted"
    assert lines["lab/stock"][1:] == ["1", "step-3", "-", "2", "B", "-", "stock"]
    document = cli("ls", f"{bucket}/lab/adopted").document
    assert [(row["name"], row["adopted"]) for row in document["checkpoints"]] == [("step-1", True), ("step-2", True)]


@pytest.mark.slow
def test_bucket_listing_cost_depends_on_directories(
    s3_uri: str, moto: S3Server, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, client = s3_uri.rpartition("/")[0], moto.client()
    name = bucket.removeprefix("s3://")
    for number in range(5):
        for step in range(40):
            for file in (METADATA, "__0_0.distcp", "__1_0.distcp"):
                client.put_object(Bucket=name, Key=f"lab/run-{number}/step-{step}/{file}", Body=b"x")
    proxy = FaultProxy(moto.endpoint)
    plan = proxy.plans[name] = Plan(Kind.RESET)  # counts without faults
    with proxy.running() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        document = cli.answer("ls", bucket)
        close_all()
    assert ({steps for steps, _ in named(document).values()}, len(document["runs"])) == ({40}, 5)
    assert plan.requests <= 23 + 5 * len(document["runs"]), plan.after  # for 600 objects in 200 steps
    listings = [path for verb, path in plan.after if "list-type=2" in path and "delimiter" not in path]
    assert len(listings) <= 1 + 5 and all("step-39" in path for path in listings[1:]), "other objects were listed"
