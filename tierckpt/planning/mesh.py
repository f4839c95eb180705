"""Who holds what: parallel degrees, and the bytes each rank, node and checkpoint comes to.

Parameters are taken to be spread evenly over tensor- and pipeline-parallel ranks; embeddings at either end of a
pipeline make its first and last stage somewhat larger than the mean given here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from .checked_numbers import whole
from .model_size import Model
from .training_state import Component, State


@dataclass(frozen=True, slots=True)
class Mesh:
    """The degrees of a job. Context-parallel ranks hold the same weights, so they count as replicas with ``dp``.

    Experts are spread over ``ep`` of the replicas; ``stage`` is ZeRO's (3 is FSDP: everything sharded).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    stage: int = 0
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep", "cp"):
            whole(getattr(self, name), f"{name}, a parallel degree,")
        whole(self.gpus_per_node, "GPUs per node")
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
        """Raises ConfigError where ``model`` cannot be spread like this, or ``gpus`` is another number than ours."""
        if gpus is not None and gpus != self.gpus:
            others = self.tp * self.pp * self.cp
            fits = f", or dp {gpus // others}" if gpus > 0 and gpus % others == 0 else ""
            raise ConfigError(
                f"GPUs is {gpus}, but tp {self.tp} x pp {self.pp} x cp {self.cp} x dp {self.dp} is {self.gpus}: "
                f"valid is {self.gpus} GPUs{fits}"
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
        """Bytes of ``part`` that one rank holds."""
        dense, expert = self._parameters(model)
        if part.is_sharded(self.stage):
            dense /= self.replicas
            expert /= self.replicas // self.ep
        return part.bytes_per_parameter * (dense + expert)

    def held_bytes(self, model: Model, state: State) -> float:
        """Saved bytes that one rank holds, and so must get back in a restore."""
        return sum(self.rank_bytes(model, part) for part in state.saved)

    def held_by_node_bytes(self, model: Model, state: State) -> float:
        """Saved bytes that the ranks of one node hold, each byte once."""
        return min(self.ranks_per_node * self.held_bytes(model, state), model.parameters * state.saved_bytes)

    def written_bytes(self, model: Model, state: State, *, split: bool) -> float:
        """Bytes that a writing rank writes.

        ``split`` shares replicated bytes out among all that hold them; without it one of the replicas writes them all.
        """
        if split:
            return model.parameters * state.saved_bytes / self.gpus
        return self.held_bytes(model, state)

    def writing_nodes(self, state: State, *, split: bool) -> int:
        """Nodes that write. Without ``split``, and where nothing is sharded, those of one replica."""
        if split or any(part.is_sharded(self.stage) for part in state.saved):
            return self.nodes
        return max(1, -(-self.tp * self.pp * self.ep // self.ranks_per_node))

    def _parameters(self, model: Model) -> tuple[float, float]:
        cells = self.tp * self.pp
        return model.dense_parameters / cells, model.expert_parameters / (cells * self.ep)
