"""``tierckpt ls`` of a bucket, or of a directory above runs: it lists the runs, and asks for no more than it may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierckpt.checkpoint.select import LOOK_MAX
from tierckpt.cli.ui.app import run
from tierckpt.client import get_client
from tierckpt.config import Settings
from tierckpt.errors import PermissionDeniedError
from tierckpt.format.layout import METADATA, local_dir, parse_uri
from tierckpt.stores.local import LocalStore


def put(uri: str, *names: str) -> None:
    """Files of a byte. With a ``.metadata`` a directory is a checkpoint of stock PyTorch."""
    client = get_client(Settings.load())
    for name in names:
        place = parse_uri(f"{uri}/{name}")
        client.run(client.mover.store(place.parent).put(place.name, b"x"))


def ls(uri: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run(["ls", uri, "--json"])
    return code, json.loads(capsys.readouterr().out)


def named(document: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Of each run below the place: how many steps, and the newest."""
    return {
        item["uri"].removeprefix(document["uri"]).strip("/"): (item["steps"], item["newest"]["name"])
        for item in document["runs"]
    }


def test_the_runs_of_a_bucket_are_listed(shared_uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    bucket = shared_uri.rpartition("/")[0]
    steps = [f"lab/run-a/step-{step}/{METADATA}" for step in (2, 10, 9)]
    others = ("run-7/checkpoint-5", "lab/deep/er/final", "lab/deep/er/best")
    put(bucket, *steps, *(f"{name}/{METADATA}" for name in others))
    put(bucket, "lab/run-a/logs/1/events", "data/part-1/a.bin", "data/part-2/b.bin", "notes.txt", "gpt-2/model.bin")
    code, document = ls(bucket, capsys)
    runs = {"lab/run-a": (3, "step-10"), "run-7": (1, "checkpoint-5"), "lab/deep/er": (2, "final")}
    assert (code, named(document), document["runs_complete"], document["checkpoints"]) == (0, runs, True, [])
    assert {item["newest"]["shared"] for item in document["runs"]} == {"stock"}
    assert named(ls(f"{bucket}/lab", capsys)[1]) == {"run-a": (3, "step-10"), "deep/er": (2, "final")}
    assert run(["ls", bucket]) == 0
    assert "lab/run-a" in capsys.readouterr().out


def test_a_checkpoint_beside_runs_hides_none(file_uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    put(file_uri, f"step-3/{METADATA}", f"step-4/{METADATA}", f"eval/step-1/{METADATA}", "logs/1/events")
    code, document = ls(file_uri, capsys)
    assert code == 0 and [row["name"] for row in document["checkpoints"]] == ["step-3", "step-4"]
    assert named(document) == {"eval": (1, "step-1")}
    put(file_uri, *(f"logs/{number}/events" for number in range(LOOK_MAX)))
    code, document = ls(file_uri, capsys)  # of a run the checkpoints are all that is promised
    assert (code, document["runs_complete"]) == (0, False)


def test_a_run_that_is_only_on_this_node_is_listed(
    file_uri: str, local_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = local_dir(local_root, parse_uri(f"{file_uri}/lab/run/step-1"))
    directory.mkdir(parents=True)
    (directory / "__0_0-x.distcp").touch()
    code, document = ls(file_uri, capsys)
    assert (code, named(document)) == (0, {"lab/run": (1, "step-1")})
    assert document["runs"][0]["newest"]["local"] == "uncommitted"


def test_a_large_tree_is_looked_into_as_far_as_a_bound(
    file_uri: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(file_uri, f"a/run/step-1/{METADATA}")
    for number in range(2 * LOOK_MAX):
        Path(file_uri, f"data/{number // 8}/{number:04d}").mkdir(parents=True)
    asked = 0

    def counted(verb: Any) -> Any:
        async def ask(*args: Any) -> Any:
            nonlocal asked
            asked += 1
            return await verb(*args)

        return ask

    for verb in ("head", "get", "list_dirs"):
        monkeypatch.setattr(LocalStore, verb, counted(getattr(LocalStore, verb)))
    code, document = ls(file_uri, capsys)
    assert (code, document["runs_complete"], named(document)) == (3, False, {"a/run": (1, "step-1")})
    assert LOOK_MAX < asked <= 6 * LOOK_MAX
    asked = 0
    assert run(["ls", f"{file_uri}/data"]) == 4
    assert "Name one of them" in capsys.readouterr().err and asked <= 12 * LOOK_MAX


def test_what_may_not_be_read_is_passed_over(
    file_uri: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(file_uri, f"run/step-1/{METADATA}", "lost+found/x")
    list_dirs = LocalStore.list_dirs

    async def refusing(store: LocalStore, prefix: str = "") -> list[str]:
        if store.root.name == "lost+found":
            raise PermissionDeniedError(f"{store.root} may not be read")
        return await list_dirs(store, prefix)

    monkeypatch.setattr(LocalStore, "list_dirs", refusing)
    code, document = ls(file_uri, capsys)
    assert (code, named(document)) == (0, {"run": (1, "step-1")})
    assert "lost+found is passed over" in document["warnings"][0]


def test_where_there_is_nothing_it_says_so(file_uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    put(file_uri, "data/a.bin")
    assert run(["ls", file_uri]) == 4
    assert "no checkpoint at or under" in capsys.readouterr().err
