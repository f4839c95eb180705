"""The state of a training job: parameters, bytes for each, and the ranks and nodes with them.

Parameters count as spread evenly over tensor- and pipeline-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from ..errors import ConfigError
from .checked_numbers import Checked, Count, parse_count

EXPERT_MARK = ".experts."


@dataclass(frozen=True, slots=True)
class Model:
    """``expert_parameters``: of routed experts. ``experts`` and ``layers`` are 0 if unknown."""

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
                f"expert parameters are {self.expert_parameters}: they must be between 0 and all {self.parameters}"
            )

    @property
    def dense_parameters(self) -> int:
        return self.parameters - self.expert_parameters


def from_number(text: str | float, expert_text: str | float | None = None) -> Model:
    """Parse ``"175e9"``, ``"70b"``. Raises ConfigError."""
    experts = parse_count(expert_text, "expert parameters") if expert_text else 0
    return Model(parse_count(text, "parameters"), experts)


def from_shapes(shapes: Mapping[str, Sequence[int]], name: str = "") -> Model:
    """Count full shapes. Names with ``.experts.`` are experts. Raises ConfigError: no parameters."""
    counts = {key: math.prod(shape) for key, shape in shapes.items()}
    return Model(sum(counts.values()), sum(count for key, count in counts.items() if EXPERT_MARK in key), name=name)


def from_config(config: Mapping[str, Any]) -> Model:
    """Count exactly what a ``config.json`` describes. Raises ConfigError: an unknown family or a missing value."""
    text = config.get("text_config")
    if isinstance(text, Mapping) and "model_type" in text:
        raise ConfigError(
            "this config.json describes a model of several parts (it has a text_config), which is not supported",
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
    """Raises ConfigError for a missing or invalid number."""

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
    rotary, plain, value = get("qk_rope_head_dim"), get("qk_nope_head_dim"), get("v_head_dim")
    rank, query_rank = get("kv_lora_rank"), get("q_lora_rank", default=0)
    query = heads * (plain + rotary)
    queries = width * query_rank + query_rank + query_rank * query if query_rank else width * query
    keys = width * (rank + rotary) + rank + rank * heads * (plain + value)
    return queries + keys + heads * value * width


def _beside_experts(get: _Fields, width: int, experts: int, expert: int) -> int:
    correction = experts if get.family == "deepseek_v3" else 0
    if get.family == "qwen2_moe":
        shared = 3 * width * get("shared_expert_intermediate_size") + width
    else:
        shared = get("n_shared_experts", default=0) * expert
    return width * experts + correction + shared


def _dense_layers(get: _Fields, layers: int) -> int:
    if get("decoder_sparse_step", default=1) != 1 or get("moe_layer_freq", default=1) != 1:
        raise ConfigError(
            "config.json has experts in some layers only, in an unsupported pattern",
            hint="Give the numbers: --params 57b --expert-params 50b",
        )
    return min(layers, get("first_k_dense_replace", default=0))


_LLAMA_LIKE = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3",
)  # fmt: skip
_FAMILIES: dict[str, Callable[[_Fields], Model]] = {"gpt2": _gpt2, **dict.fromkeys(_LLAMA_LIKE, _llama)}


Kind: TypeAlias = Literal["weights", "optimizer", "gradients"]

DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
_BLOCK_SCALES = 4 / 256
"""One fp32 scale for each block of 256."""

OPTIMIZERS: dict[str, dict[str, float]] = {
    "adam": {"exp_avg": 4.0, "exp_avg_sq": 4.0},
    "adamw": {"exp_avg": 4.0, "exp_avg_sq": 4.0},
    "amsgrad": {"exp_avg": 4.0, "exp_avg_sq": 4.0, "max_exp_avg_sq": 4.0},
    "adam8bit": {"exp_avg": 1 + _BLOCK_SCALES, "exp_avg_sq": 1 + _BLOCK_SCALES},
    "adafactor": {},
    "lion": {"exp_avg": 4.0},
    "muon": {"momentum_buffer": 4.0},
    "momentum": {"momentum_buffer": 4.0},
    "sgd": {},
}
"""Bytes per parameter. Adafactor's rows and columns are negligible."""


@dataclass(frozen=True, slots=True)
class Component:
    name: str
    bytes_per_parameter: float
    kind: Kind

    @property
    def is_saved(self) -> bool:
        return self.kind != "gradients"

    def is_sharded(self, stage: int) -> bool:
        """Whether ZeRO ``stage`` splits it over the data-parallel ranks."""
        return stage >= {"optimizer": 1, "gradients": 2, "weights": 3}[self.kind]


@dataclass(frozen=True, slots=True)
class TrainingState:
    components: tuple[Component, ...]

    @property
    def weight_bytes(self) -> float:
        """Bytes per parameter of a model file."""
        return sum(part.bytes_per_parameter for part in self.components if part.kind == "weights")

    @property
    def saved(self) -> tuple[Component, ...]:
        return tuple(part for part in self.components if part.is_saved)

    @property
    def saved_bytes(self) -> float:
        """Bytes per parameter of a checkpoint."""
        return sum(part.bytes_per_parameter for part in self.saved)


def state_of(
    optimizer: str = "adam", weights: str = "bf16", *, master: bool | None = None, gradients: str | None = None
) -> TrainingState:
    """Return the state per parameter of training with ``optimizer``, a key of ``OPTIMIZERS``.

    ``master``: a copy of the weights in fp32; None: if the weights are smaller. ``gradients``: None is the weights'
    dtype. Raises ConfigError with the known names.
    """
    moments = OPTIMIZERS.get(optimizer.lower())
    if moments is None:
        raise ConfigError(f"optimizer is {optimizer!r}: known are {', '.join(OPTIMIZERS)}")
    for dtype in (weights, gradients or weights):
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype is {dtype!r}: known are {', '.join(DTYPE_BYTES)}")
    size = DTYPE_BYTES[weights]
    parts = [Component("weights", size, "weights")]
    if (size < 4) if master is None else master:
        parts.append(Component("master", 4.0, "optimizer"))
    parts += [Component(name, value, "optimizer") for name, value in moments.items()]
    parts.append(Component("gradients", DTYPE_BYTES[gradients or weights], "gradients"))
    return TrainingState(tuple(parts))


def measured_state(component_bytes: Mapping[str, float], parameters: int) -> TrainingState:
    """Build from bytes by component. Raises ConfigError without ``weights``."""
    if not component_bytes.get("weights"):
        raise ConfigError(
            "no tensor of the checkpoint looks like a weight, so its parameters cannot be counted",
            hint="Size it by number: --params 70b --optimizer adam",
        )
    parts = [
        Component(name, size_bytes / parameters, "weights" if name == "weights" else "optimizer")
        for name, size_bytes in component_bytes.items()
    ]
    weights = next(part for part in parts if part.name == "weights")
    return TrainingState((*parts, replace(weights, name="gradients", kind="gradients")))


@dataclass(frozen=True, slots=True)
class Mesh(Checked):
    """The parallel degrees of a job. Context-parallel ranks are replicas like ``dp``.

    ``ep`` of the replicas share the experts; ``stage`` is ZeRO's (3 is FSDP: everything sharded).
    """

    tp: Count = 1
    pp: Count = 1
    dp: Count = 1
    ep: Count = 1
    cp: Count = 1
    stage: int = 0
    gpus_per_node: Count = 8

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.stage not in (0, 1, 2, 3):
            raise ConfigError(f"sharding stage is {self.stage}: it must be 0 (none), 1, 2 (ZeRO) or 3 (ZeRO-3, FSDP)")
        if self.replicas % self.ep:
            raise ConfigError(
                f"ep is {self.ep}: it must divide dp x cp = {self.replicas}, whose ranks share the experts out"
            )
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ConfigError(
                f"tp x pp x cp x dp is {self.gpus} GPUs, which do not fill nodes of {self.gpus_per_node}: "
                f"valid is a multiple of {self.gpus_per_node}, or other GPUs per node"
            )

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense weights."""
        return self.dp * self.cp

    @property
    def ranks_per_node(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def nodes(self) -> int:
        return self.gpus // self.ranks_per_node

    def check(self, model: Model, gpus: int | None = None) -> None:
        """Raise ConfigError if ``model`` cannot be spread like this, or ``gpus`` differs from the mesh."""
        if gpus is not None and gpus != self.gpus:
            raise ConfigError(
                f"GPUs is {gpus}, but tp {self.tp} x pp {self.pp} x cp {self.cp} x dp {self.dp} is {self.gpus}: "
                f"valid is {self.gpus} GPUs"
            )
        if model.layers and self.pp > model.layers:
            raise ConfigError(
                f"pp is {self.pp}: {model.name or 'the model'} has {model.layers} layers, so at most that"
            )
        if self.ep > 1 and not model.expert_parameters:
            raise ConfigError(f"ep is {self.ep}, and the model has no experts: give their parameters, or ep 1")
        if model.experts and model.experts % self.ep:
            raise ConfigError(f"ep is {self.ep}: it must divide the {model.experts} experts of the model")

    def rank_bytes(self, model: Model, part: Component) -> float:
        dense, expert = self._parameters(model)
        if part.is_sharded(self.stage):
            dense /= self.replicas
            expert /= self.replicas // self.ep
        return part.bytes_per_parameter * (dense + expert)

    def held_bytes(self, model: Model, state: TrainingState) -> float:
        """Saved bytes that one rank restores."""
        return sum(self.rank_bytes(model, part) for part in state.saved)

    def written_bytes(self, model: Model, state: TrainingState, *, split: bool) -> float:
        """Bytes of one writing rank. ``split``: all holders share replicated bytes, instead of one replica."""
        if split:
            return model.parameters * state.saved_bytes / self.gpus
        return self.held_bytes(model, state)

    def writing_nodes(self, state: TrainingState, *, split: bool) -> int:
        if split or any(part.is_sharded(self.stage) for part in state.saved):
            return self.nodes
        return max(1, -(-self.tp * self.pp * self.ep // self.ranks_per_node))

    def _parameters(self, model: Model) -> tuple[float, float]:
        cells = self.tp * self.pp
        return model.dense_parameters / cells, model.expert_parameters / (cells * self.ep)


OTHER = "other"

_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
_MASTERS = frozenset({"master", "master_param", "master_weight", "fp32_param"})


@dataclass(frozen=True, slots=True)
class Tensor:
    """``count`` and ``size_bytes`` are over all ranks."""

    name: str
    count: int
    size_bytes: int
    is_floating: bool = True


def component_of(tensor: Tensor) -> str:
    last = tensor.name.rpartition(".")[2]
    if last in _MOMENTS:
        return last
    if last in _MASTERS:
        return "master"
    top = tensor.name.partition(".")[0]
    is_state = top.startswith("optim") or ".state." in tensor.name
    return OTHER if is_state or not tensor.is_floating else "weights"


def take_stock(tensors: Iterable[Tensor], name: str = "") -> tuple[Model, TrainingState]:
    """Count the tensors. Weights with ``.experts.`` in their name are experts. Raises ConfigError without weights."""
    size_bytes: dict[str, float] = {}
    parameters = expert_parameters = 0
    for tensor in tensors:
        component = component_of(tensor)
        size_bytes[component] = size_bytes.get(component, 0.0) + tensor.size_bytes
        if component == "weights":
            parameters += tensor.count
            expert_parameters += tensor.count if EXPERT_MARK in tensor.name else 0
    state = measured_state(size_bytes, parameters)
    return Model(parameters, expert_parameters, name=name), state
