"""The documentation matches the program: each Python block runs and each command line is valid."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from safetensors.torch import save_file as save_safetensors

import tierckpt
from tests.command_line import python
from tests.servers.hub import Repository, fake_hub
from tests.services import S3Server
from tierckpt import telemetry
from tierckpt.agent.metrics import GAUGES
from tierckpt.cli.ui.app import app, run
from tierckpt.client import close_all
from tierckpt.config import Settings

ROOT = Path(__file__).parents[2]
FRONT = ROOT / "docs/index.md"
PAGES = [ROOT / "README.md", FRONT, *sorted((ROOT / "docs/guide").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PREPARE = """
import os, torch
from safetensors.torch import save_file
import fsspec

os.makedirs("model")
save_file({"w": torch.arange(64.0).reshape(8, 8)}, "model/model.safetensors")
fsspec.filesystem("tierckpt").put_file("model/model.safetensors", "tierckpt://s3/models/llama-70b/model.safetensors")
"""
RUN = """
import json, sys, traceback

wrong = {}
for name, block in json.load(sys.stdin).items():
    try:
        exec(compile(block, name, "exec"), {"__name__": "__main__"})
    except BaseException:
        wrong[name] = traceback.format_exc()
print("WRONG" + json.dumps(wrong))
"""


def blocks(page: Path, *languages: str) -> Iterator[tuple[str, str]]:
    """Yield each block of a page in one of ``languages``, with its first line number."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        if found[1] in languages:
            yield f"{page.relative_to(ROOT)}:{text[: found.start()].count(chr(10)) + 1}", found[2]


@pytest.mark.slow
@pytest.mark.server
def test_every_python_block_runs(moto: S3Server, tmp_path: Path) -> None:
    """All run in one process, each in its own namespace; local paths are moved below ``tmp_path``."""
    written = dict(block for page in PAGES for block in blocks(page, "python"))
    assert len(written) > 15
    here = re.compile(r"/tmp/tierckpt-demo|/nvme(?=/)|/mnt/nfs")
    runnable = {name: here.sub(str(tmp_path), block) for name, block in written.items()}
    for bucket in ("bucket", "models"):
        moto.client().create_bucket(Bucket=bucket)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
    environment = os.environ | moto.environment() | alone | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf")}
    with fake_hub() as hub:
        hub.repositories["org/name"] = Repository()
        hub.repositories["org/name"].commit({"config.json": b"{}"})
        environment |= {"HF_ENDPOINT": hub.endpoint}
        done = python(PREPARE + RUN, input=json.dumps(runnable), cwd=tmp_path, env=environment, timeout=500)
    assert "WRONG" in done.stdout, done.stderr
    wrong = json.loads(done.stdout.rpartition("WRONG")[2])
    assert not wrong, "\n".join(f"{name}\n{text}" for name, text in wrong.items())
    assert "1 0 True" in done.stdout  # the quickstart's documented output


def test_front_page_has_ten_lines_of_code_and_links_every_guide_page() -> None:
    [(_, code)] = blocks(FRONT, "python")
    assert len([line for line in code.splitlines() if line]) == 10
    rows = re.findall(r"^\| .+ \| \[.+\]\((guide/.+\.md)\) \|$", FRONT.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(f"guide/{page.name}" for page in (ROOT / "docs/guide").glob("*.md"))
    install = "pip install '.[torch,cli]'"
    paragraphs = [paragraph for paragraph in FRONT.read_text().split("\n\n") if paragraph.startswith("tierckpt saves")]
    readme = (ROOT / "README.md").read_text()
    assert len(paragraphs) == 1 and paragraphs[0] in readme and install in FRONT.read_text() and install in readme


def options_of(*commands: Any) -> set[str]:
    parameters = [parameter for command in commands for parameter in command.params]
    return {option for one in parameters for option in (*one.opts, *one.secondary_opts)}


def command_lines(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield every ``tierckpt VERB ...`` of a page: lines of shell blocks, and text in backticks."""
    lines = [(name, line) for name, block in blocks(page, "", "sh", "bash") for line in block.splitlines()]
    lines += [(page.name, found) for found in re.findall(r"`(tierckpt [a-z][^`|\n]*)`", page.read_text())]
    for name, line in lines:
        words = shlex.split(line, comments=True)
        while "tierckpt" in words:
            words = words[words.index("tierckpt") + 1 :]
            end = next((at for at, word in enumerate(words) if word in ("&&", "|", ";", ">")), len(words))
            yield name, words[:end]


def test_every_command_line_is_valid() -> None:
    lines = [line for page in PAGES for line in command_lines(page)]
    assert len(lines) > 60
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for where, words in lines:
        if not words or words[0].startswith("-") or words[0] in ("on", "is"):
            continue
        assert words[0] in commands, (where, words)
        command = commands[words[0]]
        for verb in getattr(command, "commands", {}):
            if words[1:2] == [verb]:
                command = command.commands[verb]
                break
        else:
            assert not hasattr(command, "commands") or len(words) == 1, (where, words)
        named = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
        assert named <= options_of(command) | {"--help"}, (where, words)


def test_cli_page_lists_every_verb_and_only_existing_options() -> None:
    page = (ROOT / "docs/guide/command-line.md").read_text()
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [verb for verb in verbs if f"| `tierckpt {verb}" not in page] == []
    for verb, row in re.findall(r"^\| `tierckpt (\w+)(.*)", page, re.MULTILINE):
        known = options_of(verbs[verb], *getattr(verbs[verb], "commands", {}).values())
        assert {*re.findall(r"--[a-z][a-z-]+", row)} <= known, verb


def forms(page: Path) -> Iterator[list[str]]:
    """Yield each ``tierckpt VERB ...`` in a table's first column, with and without its bracketed part."""
    for row in re.findall(r"^\| (`tierckpt .*?) \| ", page.read_text(), re.MULTILINE):
        for form in re.findall(r"`tierckpt ([^`]*)`", row):
            for text in dict.fromkeys((re.sub(r"[\[\]]", "", form), re.sub(r" \[.*?\]", "", form))):
                yield text.split()


def exit_code_of(words: list[str]) -> int:
    """Return the exit code of a command in its own process; interrupt one that keeps running, as a user does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tierckpt", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    code = process.returncode
    return 0 if code == 130 else code if not code else pytest.fail(f"{words}: exit code {code}\n{shown}")


@pytest.mark.slow
def test_every_form_on_the_cli_page_runs_as_typed(
    file_uri: str, local_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Placeholders become a model, a run or its newest checkpoint in directories, so no server is needed."""
    model = tmp_path / "shared/model"
    model.mkdir(parents=True)
    save_safetensors({"w": torch.ones(8)}, model / "model.safetensors")
    with tierckpt.Checkpointer(file_uri) as checkpointer:
        for step in (1, 2):
            checkpointer.step(step, {"model": torch.nn.Linear(4, 4)})
            checkpointer.save(step, {"model": torch.nn.Linear(4, 4)})
    close_all()
    restored, ran = f"{file_uri}/step-2", 0
    for number, words in enumerate(forms(ROOT / "docs/guide/command-line.md")):
        source = file_uri if words[0] in ("ls", "prune", "drill", "doctor") else restored
        source = str(model) if words[0] in ("prefetch", "cache") else source
        source = f"{file_uri}-{number}/step-1" if words[0] == "adopt" else source
        places = {"RUN": file_uri, "URI": source, "DIR": str(tmp_path / f"to-{number}"), "DIRECTORY": restored}
        typed = [places.get(word, word) for word in words]
        assert not [word for word in typed if word.isupper()], f"unknown placeholder in {typed}: add it to this test"
        if {"agent", "--watch"} & {*words}:
            assert exit_code_of(typed) == 0
        else:
            assert run(typed) == 0, (typed, capsys.readouterr().err)
        ran += 1
    assert ran >= 25


def test_metrics_page_lists_exactly_the_metrics() -> None:
    page = (ROOT / "docs/guide/monitoring.md").read_text()
    there = re.findall(r"^\| `(tierckpt_\w+)` \|", page, re.MULTILINE)
    assert sorted(there) == sorted([*GAUGES, *(metric.name for metric in telemetry.METRICS.values())])


def test_scrape_configuration_fits_the_alerts_and_the_settings() -> None:
    page = ROOT / "docs/guide/monitoring.md"
    configurations = [yaml.safe_load(block) for _, block in blocks(page, "yaml")]
    (scrape,) = (one["scrape_configs"][0] for one in configurations if "scrape_configs" in one)
    (containers,) = (one["containers"] for one in configurations if "containers" in one)
    assert f'up{{job="{scrape["job_name"]}"}}' in (ROOT / "deploy/prometheus/tierckpt-alerts.yaml").read_text()
    variables = {item["name"]: item["value"] for item in containers[0]["env"]}
    port = containers[0]["command"][-1]
    assert f"127.0.0.1:{port}" in containers[1]["args"][1]
    assert {name.removeprefix("TIERCKPT_").lower() for name in variables} <= Settings.model_fields.keys()


MEASURE = """
import os, resource, sys, threading, time
import torch
from tierckpt import Checkpointer

def resident():
    fields = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Rss"))
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))

def stored():
    total = 0
    for folder, _, names in os.walk(sys.argv[1] + "/checkpoints"):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                pass
    return total

state = {"weights": torch.ones(32 << 20)}
peak, done = [0], threading.Event()
def watch():
    while not done.wait(0.005):
        peak[0] = max(peak[0], stored())
with Checkpointer("s3://bucket-of-sizes/small") as checkpointer:  # import and connect before the measurement
    checkpointer.save(1, {"weights": torch.ones(16)})
with Checkpointer("s3://bucket-of-sizes/run", keep_last={"local": 1, "shared": 2}) as checkpointer:
    before = resident()
    threading.Thread(target=watch).start()
    for step in range(1, 3):
        checkpointer.save(step, state)
        checkpointer.save(step + 100, state)  # two in flight
        checkpointer.wait("shared")
    done.set()
    print(resident() - before, peak[0], checkpointer.stats[-1].size_bytes)
"""


@pytest.mark.slow
@pytest.mark.server
def test_memory_and_disk_match_the_documented_formula(moto: S3Server, tmp_path: Path) -> None:
    """2 S in memory; N (2 + undrained) on the SSD, with one checkpoint undrained here."""
    moto.client().create_bucket(Bucket="bucket-of-sizes")
    root = tmp_path / "ssd"
    environment = os.environ | moto.environment() | {"TIERCKPT_LOCAL_ROOT": str(root), "PYTHONPATH": str(ROOT)}
    environment |= {"TIERCKPT_STAGING_MEMORY": "private"}
    done = python(MEASURE, root, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    memory_bytes, disk_bytes, size_bytes = map(int, done.stdout.split())
    assert 128 << 20 <= size_bytes < 129 << 20
    print(f"{memory_bytes >> 20} MiB of memory and {disk_bytes >> 20} MiB of disk for {size_bytes >> 20} MiB")
    # The mover runs in this process, with a few chunks of each file in flight: 34 to 121 MiB, never a third copy.
    assert 2 * size_bytes <= memory_bytes < 3 * size_bytes + (64 << 20), memory_bytes
    assert size_bytes <= disk_bytes <= 3 * size_bytes + (1 << 20), disk_bytes
