"""The public surface: what import costs, what errors promise, how settings and URIs are read."""

import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tierckpt import errors
from tierckpt.config import Settings
from tierckpt.errors import ConfigError, TierckptError
from tierckpt.format.layout import Location, parse_uri, step_of

SETTINGS_MAX = 30
ALL_ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, TierckptError)]


def test_import_brings_neither_torch_nor_a_cloud_library() -> None:
    heavy = "torch numpy obstore fsspec s3fs adlfs boto3 aiohttp pydantic tenacity typer rich"
    code = f"import sys, tierckpt, tierckpt.errors; found = {{*{heavy!r}.split()}} & set(sys.modules)"
    code += "; assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.slow
def test_who_loads_a_model_does_not_wait_for_the_import_of_torch_distributed_checkpoint() -> None:
    """It takes a second of processor time, which is a third of the load of a small model."""
    code = "import sys; import tierckpt.loading.safetensors; assert 'torch.distributed.checkpoint' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        tierckpt.nothing  # noqa: B018


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_pickles_with_all_it_says(kind: type[TierckptError]) -> None:
    error = kind("a shard is gone", hint="Look elsewhere", file="f", rank=3, failures={"a": "b"})
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is kind
    assert str(twin) == str(error)
    assert twin.context == error.context
    assert twin.exit_code == error.exit_code
    assert "rank=3" in str(error)
    assert str(error).endswith("Look elsewhere")
    assert error.to_json()["error"] == kind.__name__


def test_errors_are_also_the_builtins_people_catch() -> None:
    assert issubclass(errors.ObjectNotFoundError, FileNotFoundError)
    assert issubclass(errors.CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(errors.PermissionDeniedError, PermissionError)
    assert issubclass(errors.OperationTimeoutError, TimeoutError)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.AlreadyCommittedError, FileExistsError)


@pytest.mark.parametrize("bad", ["", "  ", "s3://", "s3:///key", "az://", "s3://bucket/a/../b", 5, None])
def test_uris_that_name_no_place_are_refused(bad: object) -> None:
    with pytest.raises(ConfigError):
        parse_uri(bad)


@pytest.mark.parametrize(
    ("name", "step"), [("step-100", 100), ("global_step7", 7), ("step-0", 0), ("final", None), ("8b-base", None)]
)
def test_the_step_is_the_number_at_the_end(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_a_location_knows_its_children() -> None:
    root = parse_uri("s3://bucket")
    assert root.child("step-1").uri == "s3://bucket/step-1"
    assert root.child("a").parent == Location("s3", "bucket", "")


def test_settings_come_from_arguments_environment_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tierckpt.toml").write_text('shard_size_bytes_max = "2MiB"\nchunk_size_bytes = "1MiB"\nconcurrency = 2\n')
    monkeypatch.setenv("TIERCKPT_CHUNK_SIZE_BYTES", "64KiB")
    monkeypatch.setenv("TIERCKPT_CONCURRENCY", "3")
    settings = Settings.load(concurrency=5)
    assert (settings.shard_size_bytes_max, settings.chunk_size_bytes, settings.concurrency) == (2 << 20, 64 << 10, 5)


@pytest.mark.parametrize(
    "bad",
    [
        {"concurrency": 0},
        {"chunk_size_bytes": "much"},
        {"chunk_size_bytes": 0},
        {"colour": "red"},
        {"drain": "perhaps"},
        {"staging_bytes_max": 0},
        {"checkpoints_in_flight_max": 0},
        {"staging_policy": "grow"},
    ],
)
def test_settings_that_cannot_work_are_named(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Settings.load(**bad)


@pytest.mark.parametrize("size", ["10KB", 4097, 8191, 1])
def test_a_chunk_that_o_direct_cannot_write_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match=r"chunk_size_bytes: .*multiple of 4096"):
        Settings.load(chunk_size_bytes=size)


def test_every_setting_is_on_its_page_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs/guide/settings.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(Settings.model_fields)


def test_there_are_few_settings() -> None:
    assert len(Settings.model_fields) <= SETTINGS_MAX


def test_the_readme_stays_short() -> None:
    assert len((Path(__file__).parents[2] / "README.md").read_text().splitlines()) <= 200


def test_a_process_without_torch_ends_in_order() -> None:
    """The exit hook runs while threads still work, in every order of imports."""
    code = "import sys; sys.modules['torch'] = None; import tierckpt; assert tierckpt.latest('/none/here') is None"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_id_that_holds_a_checkpoint_is_refused_in_the_words_of_stock_dcp(file_uri: str) -> None:
    state = {"weight": torch.ones(4)}
    dcp.save(state, storage_writer=tierckpt.TierStorageWriter(f"{file_uri}/step-1"), no_dist=True)
    writer = tierckpt.TierStorageWriter(f"{file_uri}/step-1", overwrite=False)
    with pytest.raises(dcp.api.CheckpointException) as refused:
        dcp.save(state, storage_writer=writer, no_dist=True)
    (error, _) = refused.value.failures[0]
    assert isinstance(error, errors.AlreadyCommittedError)
    assert "Checkpoint already exists" in str(error).splitlines()[0]
