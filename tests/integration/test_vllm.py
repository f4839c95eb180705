"""The vLLM plugin with a released vLLM: its own registry, default loader and checks."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tierckpt
from tests.command_line import python
from tests.engine_wheels import imported, load_plugin, wheel_python
from tests.reads import asked
from tests.servers.origin import Origin
from tests.services import S3Server
from tests.states import same
from tierckpt.errors import ConfigError, ObjectNotFoundError

REAL_MODULES = (
    "vllm.model_executor.model_loader", "vllm.model_executor.parameter", "vllm.config.load", "vllm.config.utils",
)  # fmt: skip
STUBBED_MODULES = ("transformers", "regex", "huggingface_hub", "filelock", "tqdm", "psutil")
STUBBED_VALUES = {
    "transformers.utils.SAFE_WEIGHTS_INDEX_NAME": "model.safetensors.index.json",
    "vllm.utils.cpu_resource_utils.get_cgroup_memory_limit": lambda: None,
    "psutil.virtual_memory": lambda: SimpleNamespace(available=1 << 40),
    "vllm.distributed.parallel_state.get_node_count": lambda: 1,
}
KIB = 1024


class Model(torch.nn.Module):
    """A model as vLLM's: takes its rows of whole tensors, skips unknown names, returns the names it loaded."""

    def __init__(self, shapes: dict[str, torch.Size], rank: int = 0, world: int = 1) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        self.seen: list[str] = []
        for name, shape in shapes.items():
            self.register_parameter(
                name.replace(".", "_"), torch.nn.Parameter(torch.empty(shape[0] // world, *shape[1:]))
            )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, value in weights:
            assert name not in self.seen, "weight yielded twice"
            self.seen.append(name)
            if (own := name.replace(".", "_")) in dict(self.named_parameters()):
                self.get_parameter(own).data.copy_(value.chunk(self.world)[self.rank])
                loaded.add(own)
        return loaded

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.data for name, value in self.named_parameters()}


class VLLM:
    """A released vLLM in this process, with the plugin loaded through its pyproject.toml entry point."""

    def __init__(self) -> None:
        self.loaders = import_module("vllm.model_executor.model_loader")
        self.current: Any = None
        config = import_module("vllm.config")
        config.get_current_vllm_config = config.get_current_vllm_config_or_none = lambda: self.current
        for _ in range(2):  # vLLM may call a plugin again in the same process
            load_plugin("vllm.general_plugins")

    def loader(self, model: str | Path, load_format: str = "tierckpt", **extra: Any) -> tuple[Any, Any]:
        """Return a loader and model configuration as an engine serving ``model`` builds them."""
        model_config = SimpleNamespace(
            model=str(model), revision=None, quantization=None, is_moe=True, multimodal_config=None,
            get_num_experts=lambda: 4,
        )  # fmt: skip
        parallel = SimpleNamespace(
            enable_expert_parallel=False, enable_ep_weight_filter=False, enable_eplb=False, data_parallel_size=2,
            tensor_parallel_size=1, prefill_context_parallel_size=1, expert_placement_strategy="linear",
        )  # fmt: skip
        self.current = SimpleNamespace(model_config=model_config, parallel_config=parallel, engram_config=None)
        load_config = import_module("vllm.config.load").LoadConfig(
            load_format=load_format, model_loader_extra_config=extra, use_tqdm_on_load=False
        )
        self.current.load_config, self.current.lora_config = load_config, None
        return self.loaders.get_model_loader(load_config), model_config

    def load(self, model: Model, place: str | Path, load_format: str = "tierckpt", **extra: Any) -> Model:
        loader, model_config = self.loader(place, load_format, **extra)
        loader.load_weights(model, model_config)
        return model


@pytest.fixture(scope="module")
def released() -> Iterator[None]:
    with imported(wheel_python("vllm"), REAL_MODULES, STUBBED_MODULES, STUBBED_VALUES):
        yield


@pytest.fixture
def vllm(released: None) -> VLLM:
    return VLLM()


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A model in six files."""
    tensors = {f"layers.{index}.weight": torch.randn(64, 32) for index in range(6)}
    (tmp_path / "model").mkdir()
    for index, (name, value) in enumerate(tensors.items()):
        save_file({name: value}, tmp_path / f"model/model-{index:05d}.safetensors")
    return tensors


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in tensors.items()}


def rows(tensors: dict[str, torch.Tensor], rank: int = 0, world: int = 1) -> dict[str, torch.Tensor]:
    return {name.replace(".", "_"): value.chunk(world)[rank].clone() for name, value in tensors.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_all_weights_arrive_and_each_rank_takes_its_part(
    rank: int, vllm: VLLM, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = vllm.load(Model(shapes(tensors), rank, 2), tmp_path / "model")
    assert same(model.state(), rows(tensors, rank, 2))


def test_missing_parameter_raises_the_default_loaders_error(
    vllm: VLLM, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Never serve a model with uninitialized memory."""
    (tmp_path / "model/model-00003.safetensors").unlink()
    outputs = []
    for load_format in ("auto", "tierckpt"):
        with pytest.raises(ValueError, match="not initialized from checkpoint") as error:
            vllm.load(Model(shapes(tensors)), tmp_path / "model", load_format)
        outputs.append(str(error.value))
    assert outputs[0] == outputs[1]
    assert "layers_3_weight" in outputs[1]
    vllm.load(Model(shapes(tensors)), tmp_path / "model", enable_weights_track=False)


def test_uri_applies_only_to_the_served_model(vllm: VLLM, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """A draft model, and a reload from another path, take the same options."""
    (tmp_path / "draft").mkdir()
    draft = {"draft.weight": torch.ones(8, 4)}
    save_file(draft, tmp_path / "draft/model.safetensors")
    loader, model_config = vllm.loader("meta/llama", uri=(tmp_path / "model").as_uri())
    model_config.model = str(tmp_path / "draft")
    model = Model(shapes(draft))
    loader.load_weights(model, model_config)
    assert same(model.state(), rows(draft))


def test_vllm_reload_weights_reads_the_given_path(vllm: VLLM, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """vLLM's own ``reload_weights``: from the original source, and from another path although a URI is set."""
    given: dict[str, torch.Tensor] = {}

    class Recorded(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            given.update((name, value.clone()) for name, value in weights)
            return {name.replace(".", "_") for name in given}

    model = vllm.load(Recorded(shapes(tensors)), "meta/llama", uri=(tmp_path / "model").as_uri())
    newer = {name: value + 1 for name, value in tensors.items()}
    (tmp_path / "newer").mkdir()
    save_file(newer, tmp_path / "newer/model.safetensors")
    reload_weights = import_module("vllm.model_executor.model_loader.reload.inplace").reload_weights
    for path, expected in ((None, tensors), (str(tmp_path / "newer"), newer)):
        given.clear()
        reload_weights(vllm.current, model, None, path, True)
        assert same(given, expected)


def test_a_hugging_face_id_is_fetched_by_vllm(
    vllm: VLLM, tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = import_module("vllm.model_executor.model_loader.default_loader")
    monkeypatch.setattr(default, "download_weights_from_hf", lambda name, *_, **__: str(tmp_path / name.split("/")[1]))
    monkeypatch.setattr(default, "download_safetensors_index_file_from_hf", lambda *_, **__: None)
    assert same(vllm.load(Model(shapes(tensors)), "meta/model").state(), rows(tensors))


def test_files_other_than_safetensors_are_left_to_vllm(vllm: VLLM, tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(4, 4)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    torch.save({"optimizer": torch.zeros(4)}, tmp_path / "optimizer.bin")
    assert same(vllm.load(Model(shapes(tensors)), tmp_path).state(), rows(tensors))


# --- wanted bytes only -----------------------------------------------------------------------------------------------


def experts() -> dict[str, torch.Tensor]:
    dense = {f"layers.{layer}.attention.weight": torch.randn(32, 64) for layer in range(2)}
    names = [f"layers.{layer}.experts.{expert}.up.weight" for layer in range(2) for expert in range(4)]
    return dense | {name: torch.randn(512, 512) for name in names}


def local_experts(vllm: VLLM, rank: int) -> None:
    vllm.current.parallel_config.enable_expert_parallel = True
    vllm.current.parallel_config.enable_ep_weight_filter = True
    distributed = import_module("vllm.distributed")
    distributed.get_dp_group = lambda: SimpleNamespace(rank_in_group=rank)


def encoder_only(vllm: VLLM, model: Model) -> None:
    model._language_model_names = ("layers.1.",)  # type: ignore[assignment]
    vllm.current.model_config.multimodal_config = SimpleNamespace(mm_encoder_only=True)


def draft(vllm: VLLM, model: Model) -> None:
    model.is_unused_checkpoint_weight = lambda name: not name.startswith("layers.1.")  # type: ignore[assignment]


FILTERS: dict[str, tuple[Callable[[VLLM, Model], None], Callable[[str], bool]]] = {
    "experts": (lambda vllm, _: local_experts(vllm, 1), lambda name: not re.search(r"experts\.[01]\.", name)),
    "encoder": (encoder_only, lambda name: not name.startswith("layers.1.")),
    "draft": (draft, lambda name: name.startswith("layers.1.")),
}


@pytest.mark.parametrize("filtered", FILTERS)
@pytest.mark.parametrize("place", ["directory", "uri"])
def test_weights_a_rank_filters_out_are_not_read(
    filtered: str, place: str, vllm: VLLM, tmp_path: Path, s3_uri: str, moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = experts()
    save_file(tensors, tmp_path / "model.safetensors")
    apply, is_wanted = FILTERS[filtered]
    extra: dict[str, Any] = {}
    if place == "uri":
        moto.client().upload_file(str(tmp_path / "model.safetensors"), s3_uri.split("/")[2], "model/model.safetensors")
        bucket = s3_uri.split("/")[2]
        extra = {"uri": f"s3://{bucket}/model", "chunk_size_bytes": 64 * KIB, "local_root": str(tmp_path / "root")}
    wanted = {name: value for name, value in tensors.items() if is_wanted(name)}
    model = Model(shapes(wanted))
    loader, model_config = vllm.loader(tmp_path, **extra)
    apply(vllm, model)
    with asked(monkeypatch) as read:
        loader.load_weights(model, model_config)
    assert sorted(model.seen) == sorted(wanted)
    assert same(model.state(), rows(wanted))
    size_bytes = sum(value.nbytes for value in wanted.values())
    assert read["stores" if extra else "files"] <= 1.05 * size_bytes + 128 * KIB  # the header too


COLUMNS, ROWS = (512, 1024), (32, 8192)
"""Of float32: 2 and 1 MiB."""


class Parallel(torch.nn.Module):
    """One rank of parallel layers built of vLLM's own parameters, which slice the tensors they are given.

    It is also one pipeline stage: it drops the layers of other stages.
    """

    def __init__(self, rank: int, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        theirs = import_module("vllm.model_executor.parameter")
        monkeypatch.setattr(theirs, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(theirs, "get_tensor_model_parallel_world_size", lambda: world)

        def make_parameter(rows: int, columns: int) -> torch.nn.Parameter:
            data, loader = torch.empty(rows, columns), lambda *_: None
            parameter: torch.nn.Parameter = theirs.ModelWeightParameter(
                data=data, input_dim=1, output_dim=0, weight_loader=loader
            )
            return parameter

        share = COLUMNS[0] // world
        self.column, self.merged, self.qkv = (
            make_parameter(share, COLUMNS[1]),
            make_parameter(2 * share, COLUMNS[1]),
            make_parameter(share, COLUMNS[1]),
        )
        self.row, self.norm = make_parameter(ROWS[0], ROWS[1] // world), make_parameter(1, 8)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded, share = set(), len(self.column)
        for name, value in weights:
            kind = name.removeprefix("model.").partition(".")[0]
            match kind:
                case "column":
                    self.column.load_column_parallel_weight(value)
                case "gate" | "up":
                    self.merged.load_merged_column_weight(
                        value, shard_id=0, shard_offset=share * (kind == "up"), shard_size=share
                    )
                    kind = "merged"
                case "qkv":
                    self.qkv.load_qkv_weight(value, shard_id="q", shard_offset=0, shard_size=share, num_heads=1)
                case "row":
                    self.row.load_row_parallel_weight(value)
                case "z_norm":
                    self.norm.data.copy_(value)
                    kind = "norm"
                case _:
                    continue  # another stage's
            loaded.add(kind)
        return loaded


def parallel_model(path: Path) -> dict[str, torch.Tensor]:
    """Write layers for ``Parallel``, interleaved with layers of another stage."""
    kinds = ("column", "gate", "up", "qkv", "other_stage", "other_stage_too")
    tensors = {f"model.{kind}.weight": torch.randn(COLUMNS) for kind in kinds}
    tensors |= {"model.row.weight": torch.randn(ROWS), "model.z_norm.weight": torch.randn(1, 8)}
    tensors["model.other_stage.weight_scale"] = torch.randn(16)
    save_file(tensors, path)
    return tensors


def check_slices(model: Parallel, tensors: dict[str, torch.Tensor], rank: int, world: int) -> None:
    cut = {name: value.chunk(world)[rank] for name, value in tensors.items() if value.shape == COLUMNS}
    assert torch.equal(model.column, cut["model.column.weight"])
    assert torch.equal(model.merged, torch.cat([cut["model.gate.weight"], cut["model.up.weight"]]))
    assert torch.equal(model.qkv, cut["model.qkv.weight"])
    assert torch.equal(model.row, tensors["model.row.weight"].chunk(world, 1)[rank])
    assert torch.equal(model.norm, tensors["model.z_norm.weight"])


def set_world_size(monkeypatch: pytest.MonkeyPatch, ranks: int, nodes: int = 1) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    monkeypatch.setattr(import_module("vllm.distributed.parallel_state"), "get_node_count", lambda: nodes)


def test_rank_reads_only_the_slices_its_parameters_take(
    vllm: VLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_world_size(monkeypatch, 4)
    tensors = parallel_model(tmp_path / "model.safetensors")
    model = Parallel(2, 4, monkeypatch)
    with asked(monkeypatch) as read:
        vllm.load(model, tmp_path, local_root=str(tmp_path / "root"))  # type: ignore[arg-type]
    check_slices(model, tensors, 2, 4)
    wanted = (4 * tensors["model.column.weight"].nbytes + tensors["model.row.weight"].nbytes) // 4
    assert wanted <= read["files"] <= 1.05 * wanted + 128 * KIB  # the header too


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_node_fetches_the_chunks_of_its_ranks_once(
    nodes: int, vllm: VLLM, tmp_path: Path, s3_uri: str, moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node with all ranks fetches everything; of two nodes, a later full load fetches the rest."""
    assert "def get_node_count() -> int:" in (wheel_python("vllm") / "vllm/distributed/parallel_state.py").read_text()
    path, bucket = tmp_path / "model.safetensors", s3_uri.split("/")[2]
    tensors = parallel_model(path)
    moto.client().upload_file(str(path), bucket, "parallel/model.safetensors")
    extra = {
        "uri": f"s3://{bucket}/parallel", "chunk_size_bytes": 64 * KIB, "local_root": str(tmp_path / "root"),
    }  # fmt: skip
    set_world_size(monkeypatch, 4, nodes)
    ranks = range(4 // nodes)
    with asked(monkeypatch) as read:
        for rank in ranks:
            model = Parallel(rank, 4, monkeypatch)
            vllm.load(model, "meta/llama", **extra)  # type: ignore[arg-type]
            check_slices(model, tensors, rank, 4)
    size_bytes = path.stat().st_size
    if nodes == 1:  # a finished load leaves its pending fetches to the next one
        assert read["stores"] <= 1.05 * size_bytes + 128 * KIB
        return
    used = set(chunks_of(0, 128 * KIB))  # the header
    for name, value in tensors.items():
        if "other_stage" not in name:
            used |= set(chunks_of(*byte_range_of(path, name, 1 / 2 if value.shape == COLUMNS else 1)))
    wanted = sum(min(64 * KIB, size_bytes - chunk * 64 * KIB) for chunk in used)
    assert read["stores"] == wanted < size_bytes / 2
    with asked(monkeypatch) as later:
        directory = tierckpt.prefetch(**extra)  # type: ignore[arg-type]
    assert (directory / path.name).read_bytes() == path.read_bytes()
    assert later["stores"] == size_bytes - wanted


def byte_range_of(path: Path, name: str, share: float) -> tuple[int, int]:
    """Return the byte range of the first part of a tensor in its file."""
    data = path.read_bytes()
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8:header_bytes])[name]["data_offsets"]
    return header_bytes + start, header_bytes + start + int(share * (stop - start))


def chunks_of(start: int, stop: int) -> range:
    return range(start // (64 * KIB), -(-stop // (64 * KIB)))


def test_counting_pass_before_a_reload_reads_nothing(
    vllm: VLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM first runs a layer's loader on meta parameters, to count its weights."""
    set_world_size(monkeypatch, 2)
    save_file({"w": torch.ones(COLUMNS)}, tmp_path / "model.safetensors")
    loader, model_config = vllm.loader(tmp_path, local_root=str(tmp_path / "root"))
    meta = import_module("vllm.model_executor.model_loader.reload.meta")
    target = torch.empty(COLUMNS[0] // 2, COLUMNS[1], device="meta")

    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.copy_(loaded_weight.narrow(0, 0, len(param)))

    for _, value in loader.get_all_weights(model_config, Model({})):
        bound = inspect.signature(load).bind(target, value)
        with asked(monkeypatch) as read:
            assert meta.get_numel_loaded(load, bound)[0] == target.numel()
        assert not read["files"]
        break


RANK = """
import sys, torch, torch.distributed as dist
from tierckpt.integrations.vllm import Options
rank, store, place, root = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
def read():
    fields = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    return int(fields["read_bytes"])
for _ in Options({"local_root": root}).stream([place.replace("model", "small")], None, False):
    pass  # reads the modules
dist.barrier()
before, size = read(), 0
for name, tensor in Options({"local_root": root}).stream([place], None, False):
    size += tensor.chunk(2, 1)[rank].clone().nbytes
print(read() - before, size)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "store"])
def test_the_ranks_of_a_node_read_each_byte_once(place: str, tmp_path: Path) -> None:
    """Interleaved columns. The kernel counts the bytes read from disk, the store those it sent."""
    path = tmp_path / "origin/bucket/model.safetensors"
    path.parent.mkdir(parents=True)
    save_file({f"w{index}": torch.randn(64, 16384) for index in range(8)}, path)  # 32 MiB
    save_file({"w": torch.randn(64, 16)}, path.with_name("small.safetensors"))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    where = str(path) if place == "disk" else "s3://bucket/model.safetensors"
    arguments = [str(tmp_path / "store"), where, str(tmp_path / "root")]
    with Origin.running(tmp_path / "origin") as origin:
        env = {**os.environ, **origin.environment()}
        with ThreadPoolExecutor() as pool:
            ranks = pool.map(lambda rank: python(RANK, rank, *arguments, env=env, check=True), range(2))
        outputs = [rank.stdout.split() for rank in ranks]
        sent_bytes = origin.sent_bytes()
    read_bytes, size_bytes = (sum(int(words[column]) for words in outputs) for column in (0, 1))
    assert size_bytes == 32 << 20
    assert 0 < (read_bytes if place == "disk" else sent_bytes) <= 1.05 * (32 << 20)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [{"urii": "x"}, {"uri": 3}, {"bytes_in_flight_max": True}, {"bytes_in_flight_max": 0}, {"chunk_size_bytes": 7}],
)
def test_invalid_option_is_refused_before_loading(extra: dict[str, Any], vllm: VLLM) -> None:
    with pytest.raises(ConfigError):
        vllm.loader("model", **extra)


def test_torchao_weights_at_a_uri_are_refused_with_the_form_that_works(vllm: VLLM) -> None:
    loader, model_config = vllm.loader("meta/llama", uri="s3://models/llama")
    loader.load_config.safetensors_load_strategy = "torchao"
    with pytest.raises(ConfigError) as error:
        loader.load_weights(Model({}), model_config)
    assert "tierckpt prefetch s3://models/llama --to" in str(error.value)


def test_missing_model_raises(vllm: VLLM, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match="nowhere"):
        vllm.load(Model({}), "meta/llama", uri=(tmp_path / "nowhere").as_uri())


def test_error_in_load_weights_ends_the_stream(vllm: VLLM, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    taken = []

    class Refuses(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            taken.append(next(iter(weights)))
            raise RuntimeError("wrong shape")

    with pytest.raises(RuntimeError, match="wrong shape"):
        vllm.load(Refuses({}), tmp_path / "model", bytes_in_flight_max=4000)
    assert len(taken) == 1
