"""How many parameters a model has, and how many of them belong to experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .checked_numbers import parse_count

EXPERT_MARK = ".experts."


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters, all and those of routed experts. ``experts`` and ``layers`` are 0 where they are not known."""

    parameters: int
    expert_parameters: int = 0
    experts: int = 0
    layers: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if self.parameters < 1:
            raise ConfigError(f"parameters is {self.parameters}: a model has at least one, like 175e9 or 70b")
        if not 0 <= self.expert_parameters <= self.parameters:
            raise ConfigError(
                f"expert parameters are {self.expert_parameters}: they must lie between 0 and all {self.parameters}"
            )

    @property
    def dense_parameters(self) -> int:
        return self.parameters - self.expert_parameters


def from_number(text: str | float, expert_text: str | float | None = None) -> Model:
    """Return a model of which only the size is given: ``"175e9"``, ``"70b"``. Raises ConfigError."""
    experts = parse_count(expert_text, "expert parameters") if expert_text else 0
    return Model(parse_count(text, "parameters"), experts)


def from_shapes(shapes: Mapping[str, Sequence[int]], name: str = "") -> Model:
    """Return a model from the full shape of each of its parameters. What lies below ``.experts.`` counts as expert.

    Raises:
        ConfigError: no parameters.
    """
    counts = {key: math.prod(shape) for key, shape in shapes.items()}
    return Model(sum(counts.values()), sum(count for key, count in counts.items() if EXPERT_MARK in key), name=name)


def from_config(config: Mapping[str, Any]) -> Model:
    """Count the parameters of a decoder from its Hugging Face ``config.json``, exactly, for the families below.

    Raises:
        ConfigError: another ``model_type``, or a value that its family needs is missing; says which.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and "model_type" in text:
        raise ConfigError(
            "this config.json is of a model of several parts (it has a text_config), which is not counted",
            hint="Give the number of parameters: --params 70b",
        )
    family = str(config.get("model_type", ""))
    count = _FAMILIES.get(family)
    if count is None:
        raise ConfigError(
            f"config.json has model_type {family or 'missing'!r}: known are {', '.join(sorted(_FAMILIES))}",
            hint="Give the number of parameters instead: --params 70b",
        )
    return count(_Fields(config, family))


class _Fields:
    """Whole numbers of a config.json by name; a sentence for each that is missing or no number."""

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        self.config, self.family = config, family

    def __call__(self, *names: str, default: int | None = None) -> int:
        value = next((self.config[name] for name in names if self.config.get(name) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(
                f"config.json of a {self.family} model has {names[0]} {value!r}: a whole number is needed"
            )
        return value

    def has(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        return default if value is None else bool(value)


def _gpt2(get: _Fields) -> Model:
    width, layers = get("n_embd"), get("n_layer")
    inner = get("n_inner", default=4 * width)
    block = 4 * width * width + 4 * width + 2 * width * inner + inner + width + 4 * width
    embeddings = (get("vocab_size") + get("n_positions", "n_ctx")) * width
    return Model(embeddings + layers * block + 2 * width, layers=layers, name=get.family)


def _llama(get: _Fields) -> Model:
    """Llama and what is built like it: gated MLP, grouped queries, RMS norms, experts in place of some MLPs."""
    width, layers = get("hidden_size"), get("num_hidden_layers")
    experts = get("num_local_experts", "num_experts", "n_routed_experts", default=0)
    expert_width = get("moe_intermediate_size", "intermediate_size") if experts else 0
    dense_layers = _dense_layers(get, layers) if experts else layers
    moe_layers = layers - dense_layers

    expert = 3 * width * expert_width
    beside = moe_layers * _beside_experts(get, width, experts, expert)
    mlp = dense_layers * 3 * width * get("intermediate_size") if dense_layers else 0
    embeddings = get("vocab_size") * width * (1 if get.has("tie_word_embeddings") else 2)
    routed = moe_layers * experts * expert
    everything = embeddings + layers * (_attention(get, width) + 2 * width) + mlp + beside + routed + width
    return Model(everything, routed, experts, layers, get.family)


def _attention(get: _Fields, width: int) -> int:
    heads = get("num_attention_heads")
    if get.family.startswith("deepseek"):
        return _latent_attention(get, width, heads)
    head = get("head_dim", default=width // max(heads, 1))
    queries, keys = heads * head, get("num_key_value_heads", default=heads) * head
    biases = queries + 2 * keys if get.has("attention_bias", default=get.family.startswith("qwen2")) else 0
    output_bias = width if get.family == "llama" and get.has("attention_bias") else 0
    norms = 2 * head if get.family.startswith("qwen3") else 0
    return 2 * width * queries + 2 * width * keys + biases + output_bias + norms


def _latent_attention(get: _Fields, width: int, heads: int) -> int:
    """Queries and keys through a low rank (DeepSeek)."""
    rotary, plain, value = get("qk_rope_head_dim"), get("qk_nope_head_dim"), get("v_head_dim")
    rank, query_rank = get("kv_lora_rank"), get("q_lora_rank", default=0)
    query = heads * (plain + rotary)
    queries = width * query_rank + query_rank + query_rank * query if query_rank else width * query
    keys = width * (rank + rotary) + rank + rank * heads * (plain + value)
    return queries + keys + heads * value * width


def _beside_experts(get: _Fields, width: int, experts: int, expert: int) -> int:
    """Router and shared experts of one layer."""
    correction = experts if get.family == "deepseek_v3" else 0
    if get.family == "qwen2_moe":
        shared = 3 * width * get("shared_expert_intermediate_size") + width
    else:
        shared = get("n_shared_experts", default=0) * expert
    return width * experts + correction + shared


def _dense_layers(get: _Fields, layers: int) -> int:
    if get("decoder_sparse_step", default=1) != 1 or get("moe_layer_freq", default=1) != 1:
        raise ConfigError(
            "config.json puts experts into some layers only, in a pattern that is not counted",
            hint="Give the numbers: --params 57b --expert-params 50b",
        )
    return min(layers, get("first_k_dense_replace", default=0))


_LLAMA_LIKE = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3",
)  # fmt: skip
_FAMILIES: dict[str, Callable[[_Fields], Model]] = {"gpt2": _gpt2, **dict.fromkeys(_LLAMA_LIKE, _llama)}
