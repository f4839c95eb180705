"""First hour of use: no false warnings, and errors that fit on a screen."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import tierckpt
from tests.agents import until
from tests.command_line import CommandLine, python
from tests.compat.worker import launch
from tests.fault.scenario_tools import of_each_rank
from tests.states import flip

SELF = "tests.integration.test_first_contact"


def save_three_steps(uri: str) -> list[Any]:
    """Save with two ranks to a directory on the local tier's disk. Returns all warnings and the last step's place."""
    warnings: list[str] = []
    own = torch.distributed.get_rank()

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not record.getMessage().startswith("closing: waiting for "):  # of a slow machine
                warnings.append(record.getMessage())

    logging.getLogger("tierckpt").addHandler(Collect(logging.WARNING))
    with tierckpt.Checkpointer(uri) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {f"rank-{rank}": torch.full((1000,), float(step)) for rank in (own, "both")})
    return [of_each_rank(warnings), (Path(uri) / "step-3/.tierckpt/manifest.json").exists()]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("mover", ["inline", "agent"])
def test_two_ranks_on_a_shared_file_system_save_without_a_warning(mover: str, file_uri: str) -> None:
    warnings, is_committed = launch(f"{SELF}:save_three_steps", 2, uri=file_uri, env={"TIERCKPT_MOVER": mover})
    assert warnings == [[], []]
    assert is_committed


SETUP = """
import json, sys, traceback
import torch, tierckpt, fsspec
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tierckpt import Checkpointer, TierStorageReader, TierStorageWriter, load_model, load_safetensors, prefetch
from tierckpt.integrations.directories import Directories

torch.save({"w": torch.ones(3)}, "model.pt")
open("text.safetensors", "w").write("These are notes and no tensors, but they have the name.")
save_file({"w": torch.ones(3)}, "good.safetensors")
state = {"model": torch.nn.Linear(4, 4)}
with Checkpointer("run") as checkpointer:
    checkpointer.save(1, state)
dcp.save({"w": torch.ones(3)}, storage_writer=TierStorageWriter("dcp/step-1"))
here = Checkpointer("run", overwrite=False)
"""
MISTAKES = {
    "unknown scheme": ("Checkpointer('s4://bucket/run')", "unknown scheme 's4'"),
    "one slash": ("Checkpointer('s3:/bucket/run')", "looks like a misspelt URL|Write s3://bucket/run"),
    "of a framework": ("Directories('s3://no-such-bucket/run').restore('out')", "s3://no-such-bucket does not exist"),
    "misspelt": ("Checkpointer('run', keep_lst=3, local_rot='/x')", "unknown setting 'keep_lst'|mean local_root?)"),
    "no setting": ("tierckpt.Settings.load(share_reads_over_group=True)", "unknown setting 'share_reads_over_group'"),
    "misspelt verb": ("tierckpt.latest('run', store_timeout=3)", "did you mean store_timeout_seconds"),
    "no such step": ("here.restore(state, step=77)", "no checkpoint at"),
    "other shapes": ("here.restore({'model': torch.nn.Linear(8, 8)})", "model.weight is (8, 8) here and (4, 4)"),
    "it exists": ("here.save(1, state)", "Checkpoint already exists: |overwrite=True"),
    "no bucket": ("Checkpointer('s3://no-such-bucket/run').save(1, state)", "s3://no-such-bucket does not exist"),
    "no permission": ("Checkpointer('run', local_root='/proc/tierckpt').save(1, state)", "local_root /proc/tierckpt"),
    "no such model": ("load_safetensors('nothing')", "does not exist"),
    "torch.save": ("load_safetensors('model.pt')", "torch.save|torch.load"),
    "text": ("load_safetensors('text.safetensors')", "it begins with b'These are notes and "),
    "no CUDA": ("load_safetensors('good.safetensors', 'cuda')", "there is no device 'cuda'"),
    "no ninth": ("load_safetensors('good.safetensors', device='cuda:9')", "there is no device 'cuda:9'"),
    "no device": ("load_model('run', device='gpu')", "no device 'gpu'|cuda"),
    "no model": ("load_model('nothing')", "no checkpoint at"),
    "no prefix": ("load_model('run', prefix='net')", "model"),
    "nothing there": ("prefetch('s3://no-such-bucket/model')", "s3://no-such-bucket does not exist"),
    "no file": ("fsspec.open('tierckpt://s3/no-such-bucket/x').open()", "no-such-bucket"),
    "wait for what": ("tierckpt.wait('run/step-1', tier='remote')", "'local' or 'shared'"),
}
DCP_MISTAKES = {
    "dcp it exists": (
        "dcp.save({'w': torch.ones(3)}, storage_writer=TierStorageWriter('dcp/step-1', overwrite=False))",
        "Checkpoint already exists: ",
    ),
    "dcp none": ("dcp.load({'w': torch.ones(3)}, storage_reader=TierStorageReader('dcp/step-2'))", "no checkpoint at"),
    "dcp root": (
        "dcp.save({'w': torch.ones(3)}, storage_writer=TierStorageWriter('dcp/step-1', local_root='/proc/tierckpt'))",
        "local_root /proc/tierckpt",
    ),
}
RUN_MISTAKES = """
told = {}
for name, mistake in json.load(sys.stdin).items():
    try:
        exec(compile(mistake, "train.py", "exec"))
        told[name] = "nothing was raised"
    except BaseException:
        told[name] = traceback.format_exc()
print("TOLD" + json.dumps(told))
"""


@pytest.fixture(scope="module")
def outputs(moto: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the output of each mistake, all tried in one process."""
    work = tmp_path_factory.mktemp("work")
    environment = os.environ | moto.environment() | {"TIERCKPT_MOVER": "inline"}
    environment |= {"TIERCKPT_LOCAL_ROOT": str(work / "ssd"), "PYTHONPATH": str(Path.cwd())}
    mistakes = json.dumps({name: code for name, (code, _) in (MISTAKES | DCP_MISTAKES).items()})
    done = python(SETUP + RUN_MISTAKES, input=mistakes, cwd=work, env=environment, timeout=300)
    assert "TOLD" in done.stdout, done.stderr
    result: dict[str, str] = json.loads(done.stdout.partition("TOLD")[2])
    return result


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_prints_a_short_error(name: str, outputs: dict[str, str]) -> None:
    text = outputs[name]
    assert all(part in text.splitlines()[-1] for part in MISTAKES[name][1].split("|")), text
    assert len(text.splitlines()) < 20, text
    if name in ("unknown scheme", "one slash", "misspelt", "of a framework", "no bucket"):
        assert re.findall(r'File ".*/tierckpt/(.+)", line', text) == ["tracebacks.py"]


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize("name", DCP_MISTAKES)
def test_dcp_traceback_has_one_tierckpt_frame_each(name: str, outputs: dict[str, str]) -> None:
    """DCP prints its own frames twice. Each traceback has only one frame of tierckpt."""
    text = outputs[name]
    assert DCP_MISTAKES[name][1] in text
    assert text.count("/tierckpt/") - text.count("/proc/tierckpt") <= 3 and len(text.splitlines()) < 45, text
    assert "direct cause" not in text and "another exception" not in text


@pytest.mark.slow
def test_full_traceback_on_request() -> None:
    code = "import tierckpt; tierckpt.load_safetensors('/nothing/at/all')"
    assert "find_model" in python(code, env=os.environ | {"TIERCKPT_TRACEBACK": "1"}).stderr


def test_without_torch_the_error_names_the_package() -> None:
    done = python("import sys; sys.modules['torch'] = None; import tierckpt; tierckpt.Checkpointer")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tierckpt.errors.MissingExtraError: tierckpt.Checkpointer needs the package torch"), last
    assert "pip install 'tierckpt[torch]'" in last
    assert len(done.stderr.splitlines()) < 12


def test_invalid_location_error_names_it_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setenv("TIERCKPT_STORE_TIMEOUT_SECONDS", "1")
    (tmp_path / "model").mkdir()
    for name in ("model/weights", "file", "run/step-1/.metadata"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    model, file = str(tmp_path / "model"), str(tmp_path / "file")

    def fails(code: int, words: str, *arguments: str, **environment: str) -> None:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            done = cli.text(*arguments)
        assert done.code == code and words in done.err and len(done.err) < 1000, (arguments, done)
        assert len(done.err.splitlines()) <= 4, done.err

    away = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    fails(7, "Is AWS_ENDPOINT_URL=http://127.0.0.1:9 right", "prefetch", "s3://bucket/model", **away)
    fails(4, "no checkpoint at", "info", "/nothing/here")
    fails(2, "unknown scheme", "ls", "s4://bucket")
    fails(2, "--to", "restore", "/nothing")
    fails(2, f"{file} is a file", "prefetch", model, "--to", file)
    fails(2, f"{file} is a file", "restore", str(tmp_path / "run"), "--to", file)
    for root in ("/proc/tierckpt", file):
        fails(2, f"local_root {root} cannot be used", "prefetch", model, TIERCKPT_LOCAL_ROOT=root)
    fails(2, "local_root: it is empty", "status", TIERCKPT_LOCAL_ROOT=" ")
    fails(7, "127.0.0.1", "ls", "http://127.0.0.1:9/x")
    fails(6, "AWS_SKIP_SIGNATURE to true", "ls", "s3://bucket/run")


def test_invalid_step_state_and_directory_raise(file_uri: str, tmp_path: Path) -> None:
    module: Any = torch.nn.Linear(2, 2)
    with tierckpt.Checkpointer(file_uri) as checkpointer:
        for step in ("one", -1, 1.5, None):
            with pytest.raises(tierckpt.errors.ConfigError, match="step is"):
                checkpointer.save(step, {"model": module})  # type: ignore[arg-type]
        for call in (lambda: checkpointer.save(1, module), lambda: checkpointer.restore(module)):
            with pytest.raises(tierckpt.errors.StateMismatchError, match="the state is a Linear"):
                call()
        checkpointer.save(1, {"model": module})
    (tmp_path / "file").touch()
    for uri in (tmp_path / "file", tmp_path / "file/run"):
        with pytest.raises(tierckpt.errors.ConfigError, match="is a file"), tierckpt.Checkpointer(uri) as checkpointer:
            checkpointer.save(1, {"model": module}).result()


def test_verify_of_a_run_checks_its_newest_step(file_uri: str, cli: CommandLine) -> None:
    with tierckpt.Checkpointer(file_uri) as checkpointer:
        for step in (9, 10):
            checkpointer.save(step, {"weights": torch.ones(1000)})
    done = cli.text("verify", file_uri, "--read-data")
    assert (done.code, "step-10" in done.out) == (0, True)
    [shard] = Path(file_uri, "step-10").glob("*.distcp")
    flip(shard)  # one inode, so damaged on both tiers
    assert cli("verify", file_uri, "--read-data").code == 5


@pytest.mark.slow
def test_hundred_data_set_shards_are_one_status_line(tmp_path: Path, cli: CommandLine) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(100):
        (data / f"{number:06d}.tar").write_bytes(b"x" * 1000)
        with fsspec.open(f"tierckpt://file{data}/{number:06d}.tar") as stream:
            stream.read()
    until(lambda: f"{data}/ (100 objects)" in cli.text("status").out, "the last one in the cache")
    assert len(cli.text("status").out.splitlines()) < 20
