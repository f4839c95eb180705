"""Memory of safetensors loads: little beside the tensors, returned to the system after them; sharing with children.

The kernel's counters are read in a separate process for each case.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tierckpt
from tests.command_line import python
from tests.open_files import open_files
from tests.states import same
from tierckpt.errors import CapacityError, IntegrityError
from tierckpt.loading import fill

MIB = 1 << 20

PRELUDE = """
import gc, json, sys, torch, tierckpt

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key + ":"))

torch.ones(2, 2) @ torch.ones(2, 2)
list(tierckpt.stream_safetensors(sys.argv[2]))  # imports everything that is imported lazily
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """192 MiB in two files, one tensor of 48 MiB among them."""
    directory = tmp_path_factory.mktemp("model")
    for number in range(2):
        tensors = {f"f{number}.w{index}": torch.full((3 * MIB,), float(index)) for index in range(4)}
        tensors |= {f"f{number}.large": torch.full((12 * MIB // (number + 1),), 7.0)}
        tensors |= {f"f{number}.b{index}": torch.full((8,), float(index)) for index in range(20)}
        save_file(tensors, directory / f"model-{number}.safetensors")
    return directory


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    save_file({"w": torch.ones(3 * MIB), "columns": torch.ones(4, 4)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def measured(model: Path, small: Path) -> Callable[[str], dict[str, int]]:
    """Run a script in a process of its own, and return what it prints."""

    def run(script: str) -> dict[str, int]:
        done = python(PRELUDE + script, model, small)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    return run


@pytest.mark.slow
def test_load_needs_one_copy_and_returns_all_memory(measured: Callable[[str], dict[str, int]]) -> None:
    found = measured("""tensors = tierckpt.load_safetensors(sys.argv[1])
size = sum(value.nbytes for value in tensors.values())
peak, present = status("VmHWM") - before, status("VmRSS") - before
one = tensors["f1.large"]
tensors.clear()
gc.collect()
half = status("VmRSS") - before  # without the other file's memory
right = bool((one == 7.0).all())
del one
gc.collect()
print(json.dumps(dict(size=size, peak=peak, present=present, half=half, left=status("VmRSS") - before, right=right)))
""")
    assert found["size"] > 150 * MIB
    assert found["present"] >= found["size"]
    assert found["peak"] <= found["size"] + 24 * MIB
    assert found["half"] <= 0.6 * found["size"]
    assert found["left"] <= 24 * MIB
    assert found["right"]


@pytest.mark.slow
def test_stream_memory_is_bounded_for_any_model_size(measured: Callable[[str], dict[str, int]]) -> None:
    found = measured("""total = 0
for name, value in tierckpt.stream_safetensors(sys.argv[1], bytes_in_flight_max=32 << 20):
    total += value.nbytes
    del value
print(json.dumps(dict(total=total, peak=status("VmHWM") - before)))
""")
    assert found["total"] > 150 * MIB
    assert found["peak"] <= 48 * MIB + 32 * MIB + 24 * MIB  # the largest tensor, reads in flight, and slack


@pytest.mark.slow
def test_control_full_load_exceeds_the_stream_bound(measured: Callable[[str], dict[str, int]]) -> None:
    found = measured("""whole = tierckpt.load_safetensors(sys.argv[1])
print(json.dumps(dict(peak=status("VmHWM") - before)))
""")
    assert found["peak"] > 48 * MIB + 32 * MIB + 24 * MIB


@pytest.mark.slow
def test_tensors_are_writable_and_each_has_its_own_storage(model: Path, tmp_path: Path) -> None:
    tensors = tierckpt.load_safetensors(model)
    expected = {name: value for path in sorted(model.glob("*.safetensors")) for name, value in load_file(path).items()}
    assert same(tensors, expected)
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in tensors.values())
    tensors["f0.w1"].add_(1)
    tensors["f0.w1"][0] = -1
    assert same(tierckpt.load_safetensors(model), expected), "writing to a tensor changed the file"
    torch.save(tensors["f0.b3"], tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 100_000
    save_file(tensors, tmp_path / "again.safetensors")
    assert same(load_file(tmp_path / "again.safetensors"), tensors)


def test_forked_child_has_a_private_copy_of_the_tensors(model: Path) -> None:
    """Unlike staging memory, a model must not read as zeros in a child."""
    tensors = tierckpt.load_safetensors(model)
    large, small = tensors["f1.large"].numpy(), tensors["f0.b3"].numpy()  # torch's threads do not survive a fork
    child = os.fork()
    if child == 0:
        right = bool((large == 7.0).all()) and bool((small == 3.0).all())
        large[:] = 0
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool((tensors["f1.large"] == 7.0).all())


def test_lazy_mapping_is_thread_safe(model: Path) -> None:
    lazy = tierckpt.load_safetensors(model, lazy=True)
    expected = tierckpt.load_safetensors(model)

    def wrong(number: int) -> list[str]:
        return [name for name in sorted(lazy)[number::4] if not same(lazy[name], expected[name])]

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(wrong, range(4))] == [[]] * 4
    assert lazy.keys() == expected.keys()
    assert lazy["f0.large"] is not lazy["f0.large"]
    assert lazy.meta("f0.large").shape == expected["f0.large"].shape
    with pytest.raises(KeyError):
        lazy["nothing"]


def test_no_file_stays_open(model: Path) -> None:
    lazy = tierckpt.load_safetensors(model, lazy=True)
    assert lazy["f0.b1"].numel() == 8
    stream = tierckpt.stream_safetensors(model, bytes_in_flight_max=MIB)
    next(stream)
    stream.close()
    tierckpt.load_safetensors(model)
    assert open_files(model) == {}


def test_stream_checks_headers_first_and_stops_at_an_error(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damaged = tmp_path / "model-1.safetensors"
    stream = tierckpt.stream_safetensors(tmp_path, bytes_in_flight_max=4 * MIB)
    next(stream)
    os.truncate(damaged, damaged.stat().st_size - MIB)
    with pytest.raises(IntegrityError, match="model-1"):
        list(stream)
    with pytest.raises(IntegrityError, match="model-1"):
        tierckpt.stream_safetensors(tmp_path)


def test_a_model_larger_than_memory_is_refused_before_it_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size_bytes: int, *, asked_bytes: int) -> None:
        raise CapacityError("no room", asked_bytes=asked_bytes)

    monkeypatch.setattr(fill.capacity, "require", full)
    monkeypatch.setattr(fill, "Memory", None)
    with pytest.raises(CapacityError):
        tierckpt.load_safetensors(model)


def test_torch_thread_local_modes_do_not_change_a_load(model: Path) -> None:
    plan = {"f0.w1": slice(5, 9), "f0.large": (0, 2, 0)}
    with torch.inference_mode(), torch.device("meta"):
        tensors = tierckpt.load_safetensors(model, plan=plan)
    assert {value.device.type for value in tensors.values()} == {"cpu"}
    assert tensors["f0.w1"].tolist() == [1.0] * 4
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert tierckpt.load_safetensors(model)["f0.w1"].dtype == torch.float32
    finally:
        torch.set_default_dtype(default)
