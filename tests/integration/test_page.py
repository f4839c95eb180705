"""``tierckpt status --web``: documents of a node about real runs and of a cluster, and the page in a browser."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import torch

import tierckpt
from tests import agents
from tests.agents import agent_with_page, until
from tests.browser import CHROMIUM, MISSING, PATIENCE_SECONDS, Browser
from tests.command_line import CommandLine
from tests.integration.test_peers_agent import Node, NodesOf, agree, fleet, nodes
from tests.services import S3Server
from tests.states import save, save_drained
from tierckpt.agent.history import FIELDS, History
from tierckpt.agent.node_document import node_document
from tierckpt.checkpoint import local_commit
from tierckpt.checkpoint.journal import READY, SET_ASIDE, WRITING, Journal, JournalEntry
from tierckpt.checkpoint.run_records import newest_lines, parse_lines
from tierckpt.checkpoint.verify import read_checks, record_check
from tierckpt.client import close_all
from tierckpt.config import Settings
from tierckpt.drain.rate_limiter import change_control
from tierckpt.format.layout import HISTORY_DIR, checks_file, local_dir, parse_uri
from tierckpt.planning.goodput import stalls_of

__all__ = ["fleet", "nodes"]  # fixtures
HINT = '<img src=x onerror="document.title=1">'


def training(uri: object, steps: range, **options: Any) -> None:
    """Train and save each of ``steps``, with time records."""
    state = {"w": torch.ones(1 << 16)}
    with tierckpt.Checkpointer(uri, **options) as checkpointer:  # type: ignore[arg-type]
        for step in steps:
            checkpointer.step(step, state)
            checkpointer.save(step, state)
    close_all()


# --- documents ------------------------------------------------------------------------------------------------------


def waiting(uri: str, local_root: Path, error: str = "") -> JournalEntry:
    """A step on this node with a journal entry that no mover drains here."""
    save(uri, {"w": torch.ones(64)}, drain=False)
    close_all()
    journal, location = Journal(local_root), parse_uri(uri)
    entry = replace(journal.open(f"{os.getpid():016x}", location, 0, 1 << 20), state=READY, error=error)
    return journal.write(entry)


def test_steps_are_listed_by_tier_newest_first(file_uri: str, local_root: Path) -> None:
    save_drained(f"{file_uri}/step-1", {"w": torch.ones(64)})
    entry = waiting(f"{file_uri}/step-2", local_root)
    document = node_document(Settings.load())
    rows = document["steps"]
    assert [(row["step"], row["local"], row["shared"]) for row in rows] == [
        (2, "committed", "queued"),
        (1, "committed", "committed"),
    ]
    assert {row["run"] for row in rows} == {parse_uri(file_uri).uri}
    (of_run,) = document["runs"]
    assert (of_run["newest_step"], of_run["safe_step"], of_run["safe_uri"]) == (2, 1, rows[1]["uri"])
    assert (of_run["lag_steps"], of_run["lag_bytes"]) == (1, rows[0]["size_bytes"])
    assert of_run["lag_seconds"] == rows[0]["at_unix_seconds"] - rows[1]["at_unix_seconds"]
    assert 0 <= time.time() - rows[1]["at_unix_seconds"] < 3600
    journal = Journal(local_root)
    journal.fail(entry.token, "no such bucket")
    assert [row["shared"] for row in node_document(Settings.load())["steps"]] == ["refused", "committed"]
    journal.fail(entry.token, "StoreUnavailableError: it does not answer")
    assert [row["shared"] for row in node_document(Settings.load())["steps"]] == ["waiting for the store", "committed"]
    journal.write(replace(entry, state=SET_ASIDE, error="no such bucket"))
    (row, _) = node_document(Settings.load())["steps"]
    assert (row["shared"], row["drain"]["cause"]) == ("set aside", "no such bucket")
    journal.write(replace(entry, state=WRITING))
    assert node_document(Settings.load())["steps"][0]["local"] == "committed"


def test_changed_checkpoint_is_read_again(file_uri: str, local_root: Path) -> None:
    known: Any = {}
    save(f"{file_uri}/step-1", {"w": torch.ones(64)}, drain=False)
    close_all()
    (before,) = node_document(Settings.load(), known)["local"]
    assert [row for _, row in known.values()] == [before]
    directory = local_dir(local_root, parse_uri(f"{file_uri}/step-1"))
    manifest = local_commit.read_local_manifest(directory)
    assert manifest is not None
    local_commit.mark_drained(directory, manifest.attempt)
    (drained,) = node_document(Settings.load(), known)["local"]
    assert (before["drained"], drained["drained"]) == (False, True)
    next(directory.glob("*.distcp")).unlink()
    (damaged,) = node_document(Settings.load(), known)["local"]
    assert damaged["files"] == drained["files"] - 1
    assert damaged == node_document(Settings.load())["local"][0]


def test_stalls_of_the_newest_run(file_uri: str, local_root: Path) -> None:
    training(f"{file_uri}/old", range(1, 3))
    training(f"{file_uri}/new", range(7, 11))
    document = node_document(Settings.load())
    assert [row["step"] for row in document["stalls"]] == [7, 8, 9, 10]
    assert {row["run"] for row in document["stalls"]} == {parse_uri(f"{file_uri}/new").uri}
    (history,) = local_dir(local_root, parse_uri(f"{file_uri}/new")).glob(f"{HISTORY_DIR}/*.jsonl")
    lines = parse_lines(history.read_bytes())
    first = next(line["blocked_seconds"] for line in lines if line["what"] == "save")
    before_the_end = max(line["blocked_seconds"] for line in lines if line["what"] != "end")
    assert sum(row["seconds"] for row in document["stalls"]) == pytest.approx(before_the_end - first, abs=1e-3)
    assert before_the_end > first
    with history.open("ab") as file:
        file.write(b'{"what": "save", "at"')
    assert stalls_of(newest_lines(history.parent.parent)) == stalls_of(lines)


def test_stall_of_saves_with_missing_records_is_shared() -> None:
    lines = [
        {"what": "step", "at": 1, "step": 1, "saves": 0, "blocked_seconds": 0.0},
        {"what": "save", "at": 2, "step": 2, "saves": 1, "blocked_seconds": 0.0},
        {"what": "save", "at": 3, "step": 4, "saves": 2, "blocked_seconds": 0.5},
        {"what": "save", "at": 9, "step": 10, "saves": 5, "blocked_seconds": 0.8},
        {"what": "durable", "at": 10, "step": 10, "saves": 5, "blocked_seconds": 1.0},
        {"what": "end", "at": 11, "step": 10, "saves": 5, "blocked_seconds": 9.0},
        {"what": "save", "at": "x"},
    ]
    assert [(one.step, round(one.seconds, 6)) for one in stalls_of(lines)] == [(2, 0.5), (4, 0.1), (10, 0.2)]
    assert stalls_of([]) == stalls_of(lines[:1]) == []


def test_last_verify_and_drill_are_recorded(file_uri: str, local_root: Path, cli: CommandLine) -> None:
    assert node_document(Settings.load())["checks"] == {"verify": None, "drill": None}
    save_drained(f"{file_uri}/step-3", {"w": torch.ones(64)})
    close_all()
    cli.answer("verify", f"{file_uri}/step-3")
    cli.answer("drill", file_uri)
    checks = node_document(Settings.load())["checks"]
    assert {verb: (row["good"], parse_uri(row["uri"]).name) for verb, row in checks.items()} == {
        "verify": (True, "step-3"),
        "drill": (True, "step-3"),
    }
    next(Path(file_uri.removeprefix("file://"), "step-3").glob("*.distcp")).write_bytes(b"short")
    assert cli("verify", f"{file_uri}/step-3").code == 5
    assert not read_checks(local_root)["verify"]["good"]
    checks_file(local_root).write_bytes(b"[1")
    assert read_checks(local_root) == {"verify": None, "drill": None}
    record_check(local_root, "drill", {"uri": "file:///x", "good": True})
    assert read_checks(local_root)["drill"]["good"]


# --- progress as lines ------------------------------------------------------------------------------------------------


def test_progress_is_one_json_object_per_line(file_uri: str, tmp_path: Path, cli: CommandLine) -> None:
    save_drained(f"{file_uri}/step-1", {"w": torch.ones(1 << 16)})
    close_all()
    for verb, *more in (
        ("restore", "--to", tmp_path / "restored"), ("verify", "--read-data"), ("drill",), ("prefetch",),
    ):  # fmt: skip
        done = cli(verb, f"{file_uri}/step-1", *more, "--progress", "json")
        assert done.code == 0
        events = [json.loads(line) for line in done.err.splitlines()]
        assert all({"what", "done_bytes", "total_bytes", "note", "at_unix_seconds"} == row.keys() for row in events)
        assert events[-1]["done_bytes"] >= events[-1]["total_bytes"] > 0
        assert verb in events[-1]["what"] or verb == "prefetch"
        assert verb != "restore" or "shared" not in events[-1]["note"]  # read from this node
    done = cli("restore", f"{file_uri}/step-9", "--to", tmp_path / "x", "--progress=json")
    assert done.code == 4
    assert json.loads(done.err.splitlines()[-1])["error"] == "CheckpointNotFoundError"


# --- the page -----------------------------------------------------------------------------------------------------


@pytest.fixture
def agent(local_root: Path) -> Iterator[str]:
    """The URL of a real agent's page."""
    with agent_with_page() as url:
        yield url


def test_agent_page_url_and_metrics(agent: str, cli: CommandLine) -> None:
    assert cli.answer("status", "--web")["url"] == agent
    document = get(agent, "status.json")
    assert cli.answer("status").keys() == (document.keys() - {"peers", "rollout"}) | {"gradient_logs"}
    assert "tierckpt_lag_seconds" in agents.get(f"{agent}metrics")


def get(url: str, path: str, **query: str) -> Any:
    """Return the document at ``path``, or the HTTP status of an error."""
    try:
        return json.loads(agents.get(f"{url}{path}?{urlencode(query)}"))
    except urllib.error.HTTPError as error:
        return error.code


def test_run_page_matches_info_and_report(agent: str, file_uri: str, local_root: Path, cli: CommandLine) -> None:
    run_uri = parse_uri(f"{file_uri}/run").uri
    training(f"{file_uri}/run", range(1, 6), keep_last={"local": 3, "shared": 4}, keep_every=5)
    cli.answer("verify", f"{run_uri}/step-5")
    found = get(agent, "run.json", uri=run_uri)
    assert (found["problem"], found["run"]["newest_step"], found["run"]["safe_step"]) == ("", 5, 5)
    rows = {row["name"]: row for row in found["checkpoints"]}
    listed = {path.name for path in Path(run_uri).iterdir() if path.name.startswith("step-")}
    assert rows.keys() == listed and found["checkpoints"][0]["name"] == "step-5"
    assert {row["shared"] for row in rows.values()} == {"committed"}
    assert {name for name, row in rows.items() if row["local"] == "committed"} == {
        path.name for path in local_dir(local_root, parse_uri(run_uri)).iterdir() if path.name.startswith("step-")
    }
    assert found["retention"] == {"local": {"last": 3, "every": 5}, "shared": {"last": 4, "every": 5}}
    assert found["checks"]["verify"]["good"] and found["checks"]["drill"] is None and found["pins"] == []

    report = cli.answer("report", run_uri)
    for name in ("saves", "kept_steps", "blocked_seconds", "local_commit_seconds", "steps_per_hour"):
        assert found["report"][name] == pytest.approx(report[name]), name
    for row in found["report"]["tiers"]:
        for name in ("saves", "reached", "median_seconds", "maximum_seconds"):
            assert row[name] == pytest.approx(report["tiers"][row["tier"]][name]), (row, name)
    assert {row["tier"]: row["reached"] for row in found["report"]["tiers"]} == {"local": 5, "shared": 5}
    assert (found["report"]["starts"], found["report"]["failures"]) == (1, 0)

    document = cli.answer("info", f"{run_uri}/step-5")
    opened = get(agent, "checkpoint.json", uri=f"{run_uri}/step-5")
    assert {name: opened[name] for name in document.keys() - {"gradient_logs"}} == {
        name: value for name, value in document.items() if name != "gradient_logs"
    }
    tensors = {row["name"]: row for row in opened["tensors"]}
    assert tensors["w"] == {"name": "w", "dtype": "float32", "shape": [1 << 16], "size_bytes": 4 << 16}
    assert opened["tensors_problem"] == opened["problem"] == ""
    only = get(agent, "checkpoint.json", uri=f"{run_uri}/step-5", filter="DISTCP")
    assert (only["files_found"], only["tensors_found"], only["tensors"]) == (1, 0, [])


def test_abandoned_steps_and_pins_are_marked(moto: S3Server, s3_uri: str, agent: str, cli: CommandLine) -> None:
    run_uri = f"{s3_uri}/run"
    training(run_uri, range(1, 5))
    state = {"w": torch.ones(1 << 16)}
    with tierckpt.Checkpointer(run_uri) as checkpointer:
        assert checkpointer.restore(state, step=2) == 2
        checkpointer.step(3, state)
        checkpointer.save(3, state)
    close_all()
    bucket, key = s3_uri.split("/", 3)[2:]
    moto.client().put_object(Bucket=bucket, Key=f"{key}/run/export/model.bin", Body=b"weights")
    cli.answer("prefetch", f"{run_uri}/export", "--pin")
    found = get(agent, "run.json", uri=run_uri)
    assert {row["step"]: row["abandoned"] for row in found["checkpoints"]} == {1: False, 2: False, 3: False, 4: True}
    assert [item["uri"] for item in found["pins"]] == [f"{run_uri}/export"]


def test_large_lists_are_truncated_with_a_count(agent: str, file_uri: str) -> None:
    uri = parse_uri(f"{file_uri}/step-1").uri
    save_drained(uri, {f"layer.{n:04}": torch.ones(1) for n in range(300)})
    close_all()
    opened = get(agent, "checkpoint.json", uri=uri)
    assert (len(opened["tensors"]), opened["tensors_found"]) == (200, 300)
    assert get(agent, "checkpoint.json", uri=uri, filter="layer.029")["tensors_found"] == 10


def test_url_cannot_select_a_path_or_bucket(agent: str, file_uri: str, tmp_path: Path) -> None:
    """D1: an existing checkpoint that the node document does not name is not read."""
    run_uri = parse_uri(f"{file_uri}/run").uri
    training(f"{file_uri}/run", range(1, 3))
    elsewhere = tmp_path / "elsewhere" / "step-1"
    torch.distributed.checkpoint.save({"w": torch.ones(3)}, checkpoint_id=elsewhere)
    assert get(agent, "run.json", uri=run_uri)["checkpoints"]
    for uri in (
        "", "/", "/etc", str(elsewhere.parent), f"{run_uri}/", f"{run_uri}/..", f"file://{run_uri}", "s3://bucket/run",
        f"{run_uri}/step-1", "http://127.0.0.1:9/x", f"{run_uri}\0", "~", "%2e%2e",
    ):  # fmt: skip
        assert get(agent, "run.json", uri=uri) == 404, uri
    for uri in (
        "", str(elsewhere), run_uri, f"{run_uri}/", f"{run_uri}/step-9", f"{run_uri}/../run/step-1",
        f"{run_uri}/../../elsewhere/step-1", f"{run_uri}/step-1/", f"{run_uri}/.tierckpt-history", "s3://bucket/run/step-1",
    ):  # fmt: skip
        assert get(agent, "checkpoint.json", uri=uri) == 404, uri
    assert get(agent, "checkpoint.json", uri=f"{run_uri}/step-1")["tensors_found"] > 0


@pytest.mark.slow
def test_history_outlives_the_agent(s3_uri: str, agent: str, local_root: Path, cli: CommandLine) -> None:
    run_uri = f"{s3_uri}/run"
    change_control(local_root, paused=True)
    save(f"{run_uri}/step-3", {"w": torch.ones(1 << 16)})
    close_all()

    def samples() -> dict[str, list[float]]:
        found = get(agent, "history.json", run=run_uri)["recent"]
        return {name: [value for value in found[name] if value is not None] for name in FIELDS}

    (waiting,) = node_document(Settings.load())["journal"]
    until(lambda: samples()["lag_bytes"][-2:] == [waiting["size_bytes"]] * 2, "the lag")
    assert node_document(Settings.load())["lag_bytes"] == waiting["size_bytes"] > 1 << 18
    found = samples()
    assert found["lag_seconds"][-1] > found["lag_seconds"][-2] and max(found["bytes_per_second"]) == 0
    change_control(local_root, paused=False)
    until(lambda: samples()["lag_bytes"][-1:] == [0.0], "end of the drain")
    rates = samples()["bytes_per_second"]
    assert 0.3 <= 2 * sum(rates) / waiting["size_bytes"] <= 3  # a busy machine takes samples late
    assert cli.text("agent", "--stop").code == 0
    after = History.read(local_root).to_json(run_uri)["recent"]  # written by the agent before its end
    assert [value for value in after["bytes_per_second"] if value is not None][: len(rates)] == rates


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--listen", "127.0.0.1"], "--listen is the address"),
        (["--web", "--listen", "127.0.0.1:x"], "--listen is '127.0.0.1:x'"),
        (["--web", "--listen", "example.org:80"], "'example.org' is not an address"),
        (["--web", "--json"], "serves no page"),
    ],
)
def test_invalid_page_options_are_refused(arguments: list[str], says: str, cli: CommandLine) -> None:
    done = cli.text("status", *arguments)
    assert done.code == 2
    assert says in done.out + done.err


@pytest.mark.slow
def test_without_an_agent_the_command_serves_the_page() -> None:
    command = [sys.executable, "-u", "-m", "tierckpt", "status", "--web"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert get(url, "status.json")["agent"] is None
    finally:
        process.send_signal(2)
        assert process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
async def test_browser_shows_a_run_in_progress(agent: str, file_uri: str, local_root: Path) -> None:
    training(f"{file_uri}/run", range(1, 4), keep_last=8)
    record_check(local_root, "drill", {"uri": f"{file_uri}/run/step-3", "good": True})
    async with Browser() as browser:
        await browser.open(agent)
        await browser.until("document.querySelector('#safe b')?.textContent === 'step 3'")
        assert await browser.value("document.querySelectorAll('#steps tbody tr td.num:first-child').length") == 3
        assert await browser.value("document.querySelectorAll('#stalls rect').length") == 3
        assert "good" in await browser.value("document.querySelector('#checks').textContent")

        change_control(local_root, paused=True)
        entry = waiting(f"{file_uri}/run/step-4", local_root)
        Journal(local_root).write(replace(entry, state=SET_ASIDE, error=HINT))
        await browser.until("document.querySelector('#steps').textContent.includes('set aside')")
        assert HINT in await browser.value("document.querySelector('#steps').textContent")
        assert await browser.value("document.querySelectorAll('img').length") == 0
        to_drain = await browser.value("document.querySelector('#lag').textContent")
        assert "paused" in to_drain and "1 set aside" in to_drain
        assert "all is on shared storage" not in to_drain
        assert (await browser.screenshot("page.png")).startswith(b"\x89PNG")
        assert browser.errors == []


HOSTILE = "run-<img src=x onerror=document.title=1>&\"'" + "very-long-" * 18


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_browser_run_page_keeps_charts_on_reload(agent: str, file_uri: str, width: int, theme: str) -> None:
    """Hostile names stay text, also in the page's URL."""
    run_uri = parse_uri(f"{file_uri}/{HOSTILE}").uri
    await asyncio.to_thread(training, run_uri, range(1, 4))
    async with Browser(width=width) as browser:
        await browser.emulate_theme(theme)
        await browser.open(agent)
        rate = "document.querySelector('#rates figure path')?.getAttribute('d').length"
        await browser.until(f"{rate} > 20 && document.querySelector('#rates').textContent.includes('10 min')")
        drawn = await browser.value(rate)
        await browser.open(f"{agent}#again")
        await browser.open(agent)
        await browser.until(f"{rate} >= {drawn}")  # correct on the first load
        background = await browser.value("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(20, 24, 27)") == (theme == "dark")

        await browser.value("document.querySelector('#steps .run a').click()")
        await browser.until("document.querySelectorAll('#checkpoints tbody tr').length === 3")
        assert await browser.value("document.querySelector('#run b').textContent") == run_uri
        await browser.value("document.querySelector('#checkpoints a').click()")
        await browser.until("document.querySelector('#opened')?.textContent.includes('float32')")
        opened = await browser.value("location.href")
        await browser.open(agent)
        await browser.open(opened)
        await browser.until("document.querySelector('#opened')?.textContent.includes('float32')")
        assert await browser.value("document.documentElement.scrollWidth") <= width
        assert await browser.value("document.querySelectorAll('img').length") == 0
        assert await browser.value("document.title") != "1"
        await browser.screenshot(f"run-{width}-{theme}.png")
        await browser.open(f"{agent}#/run/{quote('/etc', safe='')}")
        await browser.until("document.querySelector('#run').textContent.includes('knows no such run')")
        assert [error for error in browser.errors if "404" not in error] == []


# --- the cluster page -------------------------------------------------------------------------------------------------

DETECTION_SECONDS = 10.0


@pytest.fixture
def three(nodes: NodesOf) -> list[Node]:
    """Three agents with pages."""
    found = [node.start_with_page() for node in nodes(3)]
    until(lambda: agree(found), "three connected agents")
    return found


def cluster(node: Node) -> dict[str, Any]:
    """Return the nodes on its page, by address."""
    return {row["address"]: row for row in json.loads(node.get("cluster.json"))["nodes"]}


def waiting_step(root: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the node at ``root`` that its agent may not drain."""
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(root))
    change_control(root, paused=True)
    save(uri, {"w": torch.ones(1 << 16)})
    close_all()


@pytest.mark.slow
def test_cluster_page_shows_drains_and_a_silent_node(
    three: list[Node], s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer, _, stopped = three
    first, second, third = (node.address for node in three)
    waiting_step(three[1].root, f"{s3_uri}/run/step-7", monkeypatch)

    def is_reported() -> Any:
        found = cluster(observer)
        have_answered = len(found) == 3 and all(row["answers"] and row["drains"] for row in found.values())
        return found if have_answered and found[second]["drains"].get("entries") else None

    found = until(is_reported, "the backlog of the second node")
    drains = found[second]["drains"]
    assert (drains["state"], drains["entries"]) == ("paused", 1) and drains["lag_bytes"] > 1 << 18
    (run,) = drains["runs"]
    assert (run["run"], run["newest_step"], run["safe_step"]) == (f"{s3_uri}/run", 7, None)
    assert found[first]["is_this"] and found[first]["drains"]["state"] == "nothing to drain"

    for _ in range(3):  # a busy machine is late
        stopped.signal(signal.SIGCONT)
        until(lambda: cluster(observer)[third]["answers"], "the third node")
        stopped.signal(signal.SIGSTOP)
        begun = time.time()
        row = until(lambda: row if not (row := cluster(observer)[third])["answers"] else None, "the stopped node")
        seconds = time.time() - begun
        if seconds <= DETECTION_SECONDS:
            break
    assert seconds <= DETECTION_SECONDS
    assert begun - DETECTION_SECONDS <= row["silent_since_unix_seconds"] <= time.time()
    assert row["drains"]["state"] == "nothing to drain"  # from its last answer
    assert next(iter(cluster(observer))) == third  # sorted first
    stopped.signal(signal.SIGCONT)
    until(lambda: cluster(observer)[third]["answers"], "return of the stopped node")
    stopped.signal(signal.SIGTERM)
    until(lambda: cluster(observer)[third]["state"] == "left", "departure of the stopped node")
    assert cluster(observer)[third]["silent_since_unix_seconds"] is None


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (420, "dark")])
async def test_browser_shows_a_stopped_node_first(three: list[Node], width: int, theme: str) -> None:
    observer, _, stopped = three
    async with Browser(width=width) as browser:
        await browser.emulate_theme(theme)
        await browser.open(f"{observer.page}#/cluster")
        await browser.until("document.querySelectorAll('#nodes tbody tr').length === 3")
        await asyncio.to_thread(stopped.signal, signal.SIGSTOP)
        await browser.until("document.querySelector('#cluster .alarm')?.textContent.includes('does not answer')")
        first = await browser.value("document.querySelector('#nodes tbody tr').textContent")
        assert "silent for" in first
        await browser.until("document.querySelector('#nav').textContent.includes('1 node silent')")
        assert await browser.value("document.documentElement.scrollWidth") <= width
        await browser.screenshot(f"cluster-{width}-{theme}.png")
        assert browser.errors == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
async def test_running_rollout_is_at_the_top_of_the_page(
    three: list[Node], s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its end it moves below the runs."""
    observer = three[0]
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(observer.root))
    model = f"{s3_uri}/model"
    await asyncio.to_thread(save, f"{model}/step-1", {"w": torch.ones(24 << 20)}, drain=True)
    await asyncio.to_thread(tierckpt.wait, f"{model}/step-1", timeout_seconds=PATIENCE_SECONDS)
    await asyncio.to_thread(close_all)
    async with Browser() as browser:
        await browser.open(observer.page)
        await browser.until("document.querySelector('#peers')?.parentElement.id === 'idle'")
        own = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
        own |= {"TIERCKPT_CHUNK_SIZE_BYTES": "1MiB", "TIERCKPT_CONCURRENCY": "1"}  # so that it takes a while
        prefetch = ["prefetch", f"{model}/step-1", "--json"]
        fetching = [node.fleet.start(prefetch, node.environment() | own) for node in three]
        await browser.until("document.querySelector('#active').children.length > 0")
        order = "[...document.querySelectorAll('#active, #steps')].map(node => node.id).join()"
        assert await browser.value(order) == "active,steps"
        assert await browser.value("document.querySelector('#active').getBoundingClientRect().top") < 200
        await browser.screenshot("rollout.png")
        ended = [await asyncio.to_thread(process.wait, PATIENCE_SECONDS) for process in fetching]
        assert [one and one.code for one in ended] == [0, 0, 0]
        await browser.until("document.querySelector('#active').children.length === 0")
        assert browser.errors == []
