"""The sizer compared with published figures, and its messages for invalid input.

Units: bytes and decimal multiples of them (GB is 1e9), seconds. Tolerances are stated where they are used.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.planning.test_simulator import GB, RATES, TB
from tierckpt.errors import ConfigError
from tierckpt.planning import Mesh, Model, Site, Sizing, from_config, from_number, from_shapes, size, state_of
from tierckpt.planning.checked_numbers import parse_bytes, parse_count, parse_rate, parse_seconds
from tierckpt.planning.ettr import mtbf_seconds
from tierckpt.planning.training_state import Tensor, component_of, take_stock
from tierckpt.training.sizing import measure

SUPERPOD = Mesh(tp=8, pp=16, dp=8)


def gpt3(mesh: Mesh = SUPERPOD, **site: Any) -> Sizing:
    return size(from_number("175e9"), state_of("adam"), mesh, Site(**({"rates": RATES} | site)))


# --- published figures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "model_gb", "state_tb"),
    [("175e9", 350, 2.4), ("544e9", 1088, 7.0), ("1e12", 2000, 13.8)],
    ids=["GPT-3 175B", "544B", "1T"],
)
def test_model_and_checkpoint_sizes_match_published_figures(parameters: str, model_gb: float, state_tb: float) -> None:
    sizing = size(from_number(parameters), state_of("adam"))
    assert sizing.model_bytes == model_gb * GB
    # No single number of bytes per parameter fits all three in one unit: 14 is 2 % to 9 % above them.
    assert 1.0 <= sizing.checkpoint_bytes / (state_tb * TB) <= 1.10
    assert sizing.bytes_per_parameter == 14


def test_mtbf_of_131072_gpus() -> None:
    assert mtbf_seconds(131_072 / 8, 6.5e-3) / 60 == pytest.approx(13.5, abs=0.05)
    hours = {gpus: mtbf_seconds(gpus / 8, 6.5e-3) / 3600 for gpus in (16_384, 4_096, 1_024)}
    assert hours == pytest.approx({16_384: 1.8, 4_096: 7.2, 1_024: 28.8}, rel=0.01)


def test_without_splitting_only_one_model_parallel_group_writes() -> None:
    sizing = gpt3(split=False)
    assert sizing.writing_nodes == 16
    assert sizing.node_written_bytes == pytest.approx(153 * GB, rel=0.01)
    ten_seconds = next(row for row in sizing.writes if row.stall_seconds == 10)
    assert ten_seconds.node_bytes_per_second == pytest.approx(15.3 * GB, rel=0.01)


@pytest.mark.parametrize(("stage", "sharded_tb"), [(0, 19.6), (1, 4.9), (3, 2.45)])
def test_bytes_read_from_shared_storage_by_a_restore(stage: int, sharded_tb: float) -> None:
    paths = {row.name: row for row in gpt3(Mesh(tp=8, pp=16, dp=8, stage=stage)).restores}
    assert paths["naive"].shared_bytes == pytest.approx(19.6 * TB)
    assert paths["sharded"].shared_bytes == pytest.approx(sharded_tb * TB)
    assert paths["fanned out"].shared_bytes == pytest.approx(2.45 * TB)
    assert paths["local"].shared_bytes == paths["peer"].shared_bytes == 0
    assert paths["naive"].seconds == pytest.approx(196)
    assert paths["fanned out"].seconds == pytest.approx(24.5)
    assert paths["local"].seconds < paths["fanned out"].seconds


def test_load_of_350_gb_on_many_nodes() -> None:
    loads = [{row.name: row.seconds for row in gpt3(load_nodes=nodes).loads} for nodes in (10, 128, 1000)]
    assert [one["direct"] for one in loads] == pytest.approx([35, 448, 3500])
    assert [one["cached"] for one in loads] == pytest.approx([8.75] * 3)
    assert [one["fanned out"] for one in loads[1:]] == pytest.approx([17.5] * 2, rel=0.01)


# --- parameters ---------------------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
MOE = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "GPT-2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024},
        124439808,
    ),
    "Llama 2 7B": (LLAMA | {"intermediate_size": 11008, "vocab_size": 32000}, 6738415616),
    "Llama 3 8B": (LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}, 8030261248),
    "Mixtral 8x7B": (
        LLAMA
        | {"model_type": "mixtral", "intermediate_size": 14336, "num_key_value_heads": 8}
        | {"vocab_size": 32000, "num_local_experts": 8},
        46702792704,
    ),
    "Qwen2.5 7B": (
        {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944}
        | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
        7615616512,
    ),
    "Qwen3 30B A3B": (
        MOE
        | {"intermediate_size": 6144, "moe_intermediate_size": 768, "num_key_value_heads": 4, "head_dim": 128}
        | {"vocab_size": 151936, "num_experts": 128, "decoder_sparse_step": 1},
        30532122624,
    ),
    "DeepSeek V2 Lite": (
        {"model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "vocab_size": 102400}
        | {"num_attention_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
        | {"qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408}
        | {"n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 1},
        15706484224,
    ),
}


@pytest.mark.parametrize(("config", "parameters"), CONFIGS.values(), ids=CONFIGS)
def test_parameters_of_a_config_json_are_exact(config: dict[str, Any], parameters: int) -> None:
    assert from_config(config).parameters == parameters


def test_routed_experts_are_counted_separately() -> None:
    model = from_config(CONFIGS["Mixtral 8x7B"][0])
    assert model.expert_parameters == 32 * 8 * 3 * 4096 * 14336
    assert model.experts == 8


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba': known are deepseek_v2"),
        ({}, "model_type 'missing'"),
        (LLAMA, "intermediate_size None"),
        (LLAMA | {"vocab_size": "many", "intermediate_size": 1}, "vocab_size 'many'"),
        (
            MOE | {"num_experts": 8, "decoder_sparse_step": 2, "intermediate_size": 1, "vocab_size": 1},
            "some layers only",
        ),
    ],
)
def test_unsupported_config_json_is_explained(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_config(config)


def test_sizes_of_a_live_model_and_optimizer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    counted, state = measure(model, optimizer)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert counted.parameters == from_shapes(shapes).parameters == 8 * 16 + 16 + 16 * 4 + 4
    parts = {part.name: part.bytes_per_parameter for part in state.saved}
    assert parts["weights"] == parts["exp_avg"] == parts["exp_avg_sq"] == 2
    assert size(counted, state).model_bytes == 2 * counted.parameters


def test_components_are_recognized_by_name() -> None:
    names = {
        "model.layers.0.mlp.experts.3.up.weight": "weights",
        "optimizer.state.layers.0.weight.exp_avg": "exp_avg",
        "optimizer.state.layers.0.weight.master_param": "master",
        "optimizer.state.layers.0.weight.step": "other",
    }
    assert {name: component_of(Tensor(name, 1, 4)) for name in names} == names
    assert component_of(Tensor("model.position_ids", 1, 8, is_floating=False)) == "other"
    model, state = take_stock(
        [Tensor("a.experts.0.w", 60, 120), Tensor("w", 40, 80), Tensor("optim.w.exp_avg", 100, 400)]
    )
    assert (model.parameters, model.expert_parameters) == (100, 60)
    assert {part.name: part.bytes_per_parameter for part in state.saved} == {"weights": 2, "exp_avg": 4}
    with pytest.raises(ConfigError, match="no tensor of the checkpoint looks like a weight"):
        take_stock([Tensor("optim.w.exp_avg", 100, 400)])


# --- optimizers and shards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "weights", "saved", "in_memory"),
    [
        ("adam", "bf16", 14, 16),
        ("adam", "fp32", 12, 16),
        ("amsgrad", "bf16", 18, 20),
        ("momentum", "bf16", 10, 12),
        ("sgd", "fp32", 4, 8),
        ("adafactor", "bf16", 6, 8),
        ("adam8bit", "bf16", 8 + 2 / 64, 10 + 2 / 64),
    ],
)
def test_bytes_per_parameter(optimizer: str, weights: str, saved: float, in_memory: float) -> None:
    state = state_of(optimizer, weights)
    assert state.saved_bytes == pytest.approx(saved)
    assert sum(part.bytes_per_parameter for part in state.components) == pytest.approx(in_memory)


degrees = st.sampled_from([1, 2, 4, 8])


@given(tp=degrees, pp=degrees, dp=degrees, cp=degrees, stage=st.integers(0, 3), data=st.data())
@settings(max_examples=200, deadline=None)
def test_shards_add_up_to_the_checkpoint(tp: int, pp: int, dp: int, cp: int, stage: int, data: st.DataObject) -> None:
    ep = data.draw(st.sampled_from([one for one in (1, 2, 4, 8) if (dp * cp) % one == 0]))
    mesh, model, state = Mesh(tp, pp, dp, ep, cp, stage, gpus_per_node=1), Model(10**12, 4 * 10**11), state_of()
    whole_bytes = model.parameters * state.saved_bytes
    assert mesh.gpus * mesh.written_bytes(model, state, split=True) == pytest.approx(whole_bytes)
    held = mesh.gpus * mesh.held_bytes(model, state)
    assert held >= whole_bytes * (1 - 1e-9)
    if stage == 3:
        assert held == pytest.approx(whole_bytes)
    if stage == 0 and ep == 1:
        assert held == pytest.approx(whole_bytes * dp * cp)


def test_experts_are_sharded_over_expert_parallel_ranks() -> None:
    model, state = Model(100 * 10**9, 90 * 10**9), state_of()
    alone, spread = Mesh(dp=64), Mesh(dp=64, ep=8)
    assert alone.held_bytes(model, state) == pytest.approx(14 * 100 * GB)
    assert spread.held_bytes(model, state) == pytest.approx(14 * (10 + 90 / 8) * GB)


def test_the_local_tier_reports_ssd_endurance() -> None:
    sizing = gpt3()
    seconds = sizing.tiers[-1].interval_seconds(0)
    assert seconds is not None
    assert sizing.ssd.written_bytes_per_day == pytest.approx(sizing.node_written_bytes * 86400 / seconds)
    assert sizing.ssd.drive_writes_per_day == pytest.approx(sizing.ssd.written_bytes_per_day / 30e12)
    assert sizing.ssd.years == pytest.approx(5 * 1.0 / sizing.ssd.drive_writes_per_day)
    assert sizing.ssd.needed_bytes == pytest.approx(3 * sizing.node_written_bytes)


def test_the_interval_respects_the_endurance_of_small_drives() -> None:
    sizing = gpt3(ssd_bytes=1 * TB)
    assert sizing.ssd.drive_writes_per_day <= 1.0
    assert sizing.tiers[-1].schedule is not None
    assert sizing.tiers[-1].schedule.bound_by[0] == "throughput"


def test_each_added_tier_raises_ettr() -> None:
    ratios = [row.ettr for row in gpt3().tiers]
    assert gpt3().tiers[0].name == "shared, blocking"
    assert len(ratios) == 4
    assert all(below < above for below, above in itertools.pairwise(ratios))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Mesh(tp=0), "tp is 0: it must be a whole number of at least 1"),
        (lambda: Mesh(dp=-8), "dp is -8"),
        (lambda: Mesh(stage=4), "sharding stage is 4: it must be 0"),
        (lambda: Mesh(dp=4, ep=3), "ep is 3: it must divide dp x cp = 4"),
        (lambda: Mesh(tp=3, dp=3), "9 GPUs, which do not fill nodes of 8"),
        (lambda: SUPERPOD.check(Model(10), gpus=2048), "GPUs is 2048, but .* is 1024: valid is 1024 GPUs"),
        (lambda: Mesh(dp=8, ep=8).check(Model(10)), "ep is 8, and the model has no experts"),
        (lambda: Mesh(pp=16, dp=8).check(Model(10, layers=8)), "pp is 16: .* has 8 layers"),
        (lambda: state_of("adamx"), "optimizer is 'adamx': known are adam, adamw"),
        (lambda: state_of("adam", "int4"), "dtype is 'int4': known are fp32"),
        (lambda: replace(RATES, nic=0.0), "nic is 0: it must be a number above 0"),
        (lambda: Site(mtbf_seconds=0), "mtbf seconds is 0"),
        (lambda: Site(step_seconds=math.nan), "step seconds is nan"),
        (lambda: Site(node_loss_share=0.8, domain_loss_share=0.3), "together they must not pass 1"),
        (lambda: Model(0), "parameters is 0"),
        (lambda: gpt3(mtbf_seconds=300.0), "MTBF is 300 s, and a restart takes 305 s at best"),
        (lambda: parse_rate("0GB/s", "--shared"), "--shared is 0: it must be a number above 0"),
        (lambda: parse_rate("10gb/s", "--nic"), "--nic is 10gb/s: write a rate like 25GB/s"),
        (lambda: parse_count("many", "--params"), "--params is many: write it like 175e9"),
        (lambda: parse_seconds("5 weeks", "--mtbf"), "--mtbf is 5 weeks: write a duration"),
    ],
)
def test_errors_name_the_invalid_value_and_the_valid_ones(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_number_formats() -> None:
    counts = {"175e9": 175 * 10**9, "70b": 70 * 10**9, "1.5T": 15 * 10**11, "8_000": 8000}
    assert {text: parse_count(text, "n") for text in counts} == counts
    assert parse_rate("200Gb/s", "r") == parse_rate("25GB/s", "r") == 25e9
    assert parse_bytes("1GiB", "s") == 2**30
    assert [parse_seconds(text, "t") for text in ("90", "1.5min", "2h", "1d")] == [90, 90, 7200, 86400]
