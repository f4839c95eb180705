"""The options of ``size`` and ``simulate``, and the sizing that they describe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from typer import Option

from ...errors import ConfigError, MissingExtraError
from ...format.uris import scheme_of
from ...planning import Bandwidths, Mesh, Model, Site, Sizing, TrainingState, from_config, from_number, size, state_of
from ...planning.checked_numbers import parse_bytes, parse_rate, parse_seconds, positive, whole
from ...planning.sizer import STALL_BUDGETS_SECONDS
from .session import Session, closing_clients, location_of

CONFIG_BYTES_MAX = 16 << 20
CONFIG_HINT = "Give the config.json of a Hugging Face model, or --params"
GPU_STATE_BYTES = 40e9
"""Activations use the rest of 80 GB."""


@dataclass(frozen=True)
class PlanningOptions:
    """The model, the job and the site. Values stay text until ``sizing`` parses them: errors name the option."""

    params: Annotated[str | None, Option(help="Parameters: 175e9, 70b.")] = None
    expert_params: Annotated[str | None, Option(help="Of them, in routed experts.")] = None
    config: Annotated[str | None, Option(help="A Hugging Face config.json: file, directory or URI.")] = None
    checkpoint: Annotated[str | None, Option(help="URI of a checkpoint: measured instead of assumed.")] = None
    optimizer: Annotated[str, Option(help="adam, adamw, amsgrad, adam8bit, sgd, ...")] = "adam"
    weights: Annotated[str, Option(help="Their dtype: bf16, fp16, fp32, fp8.")] = "bf16"
    master: Annotated[bool | None, Option(help="fp32 copy of the weights. Default: if they are smaller.")] = None

    tp: Annotated[int, Option(help="Tensor-parallel degree.")] = 1
    pp: Annotated[int, Option(help="Pipeline-parallel degree.")] = 1
    dp: Annotated[int | None, Option(help="Data-parallel degree. Default: --gpus divided by the other degrees.")] = None
    ep: Annotated[int, Option(help="Expert-parallel degree; divides dp x cp.")] = 1
    cp: Annotated[int, Option(help="Context-parallel degree.")] = 1
    stage: Annotated[
        int | None, Option(help="Sharding: 0 none, 1, 2 ZeRO, 3 FSDP. Default: 3 with --gpus and no degree, else 0.")
    ] = None
    gpus: Annotated[int | None, Option(help="All GPUs. Default model: the largest they hold.")] = None
    gpus_per_node: Annotated[int, Option(help="GPUs of one node.")] = 8
    step: Annotated[str, Option(help="Time of one training step.")] = "10s"
    split: Annotated[bool, Option(help="Replicated bytes are shared out among all that hold them.")] = True
    stall: Annotated[list[str] | None, Option(help="A stall budget for a blocking save; may be repeated.")] = None

    shared: Annotated[str, Option(help="Write bandwidth of shared storage, for the job.")] = "100GB/s"
    shared_read: Annotated[str | None, Option(help="Its read bandwidth. Default: as --shared.")] = None
    local_write: Annotated[str, Option(help="Write bandwidth of one node's SSDs.")] = "10GB/s"
    local_read: Annotated[str, Option(help="Read bandwidth of one node's SSDs.")] = "40GB/s"
    nic: Annotated[str, Option(help="Network bandwidth of one node (200Gb/s is bits).")] = "25GB/s"
    pcie: Annotated[str, Option(help="Between one GPU and its host.")] = "25GB/s"
    ssd: Annotated[str, Option(help="SSD capacity of one node.")] = "30TB"
    dwpd: Annotated[float, Option(help="Drive writes per day the SSDs are rated for.")] = 1.0
    keep_local: Annotated[int, Option(help="Checkpoints kept on the SSDs.")] = 2
    in_flight: Annotated[int, Option(help="Checkpoints staged and not yet flushed.")] = 1
    replicas: Annotated[int, Option(help="Nodes that hold each shard, its own included.")] = 2
    mtbf: Annotated[str | None, Option(help="Of the job, like 3h. Default: from --failure-rate and its nodes.")] = None
    failure_rate: Annotated[float, Option(help="Failures in 1000 node-days.")] = 6.5
    node_loss: Annotated[float, Option(help="Share of failures that take a node's SSDs.")] = 0.5
    domain_loss: Annotated[float, Option(help="Share that takes a whole rack.")] = 0.02
    restart: Annotated[str, Option(help="Detect, schedule, initialise: all but loading.")] = "5min"
    drain_slowdown: Annotated[float, Option(help="How much slower training is while a drain runs.")] = 0.01
    load_nodes: Annotated[int | None, Option(help="Nodes that load the model. Default: all.")] = None

    def sizing(self) -> Sizing:
        """Raise ConfigError that names the option."""
        site, mesh = self._site(), self._mesh()
        model, state = self._model(mesh)
        mesh.check(model, self.gpus)
        sizing = size(model, state, mesh, site)
        if self._sources() or self.gpus is None:
            return sizing
        assumed = (
            f"no model was given: {human_count(model.parameters)} parameters are assumed, with "
            f"{GPU_STATE_BYTES / 1e9:.0f} GB of weights, gradients and optimizer state on each GPU; "
            f"give --params, --config or --checkpoint"
        )
        sizing.warnings = (*sizing.warnings, assumed)
        return sizing

    def _mesh(self) -> Mesh:
        dp, stage, others = self.dp, self.stage, self.tp * self.pp * self.cp
        if stage is None:
            stage = 3 if self.gpus is not None and dp is None and others == 1 else 0
        if dp is None:
            dp = 1 if self.gpus is None else max(1, whole(self.gpus, "--gpus") // max(1, others))
        return Mesh(self.tp, self.pp, dp, self.ep, self.cp, stage, self.gpus_per_node)

    def _site(self) -> Site:
        stalls = tuple(parse_seconds(one, "--stall") for one in self.stall or ())
        return Site(
            rates=Bandwidths(
                shared_write=parse_rate(self.shared, "--shared"),
                shared_read=parse_rate(self.shared_read or self.shared, "--shared-read"),
                local_write=parse_rate(self.local_write, "--local-write"),
                local_read=parse_rate(self.local_read, "--local-read"),
                nic=parse_rate(self.nic, "--nic"),
                pcie=parse_rate(self.pcie, "--pcie"),
            ),
            step_seconds=parse_seconds(self.step, "--step"),
            mtbf_seconds=parse_seconds(self.mtbf, "--mtbf") if self.mtbf is not None else None,
            failures_per_node_day=positive(self.failure_rate, "--failure-rate") / 1000,
            node_loss_share=self.node_loss,
            domain_loss_share=self.domain_loss,
            restart_seconds=parse_seconds(self.restart, "--restart", zero=True),
            drain_slowdown=self.drain_slowdown,
            ssd_bytes=parse_bytes(self.ssd, "--ssd"),
            ssd_dwpd=self.dwpd,
            keep_local=self.keep_local,
            in_flight=self.in_flight,
            replicas=self.replicas,
            split=self.split,
            load_nodes=self.load_nodes,
            stall_budgets_seconds=stalls or STALL_BUDGETS_SECONDS,
        )

    def _sources(self) -> list[str]:
        sources = {"--params": self.params, "--config": self.config, "--checkpoint": self.checkpoint}
        return [name for name, value in sources.items() if value is not None]

    def _model(self, mesh: Mesh) -> tuple[Model, TrainingState]:
        given = self._sources()
        if len(given) > 1 or (not given and self.gpus is None):
            raise ConfigError(
                f"{' and '.join(given) or 'none of --params, --config and --checkpoint'} given: exactly one is needed",
                hint="--params 175e9, --config DIR/config.json or --checkpoint s3://bucket/run; or only --gpus 64",
            )
        if self.checkpoint is not None:
            return _measured(self.checkpoint)
        state = state_of(self.optimizer, self.weights, master=self.master)
        if self.params is not None:
            return from_number(self.params, self.expert_params), state
        if self.config is None:
            return _largest_model(mesh, state), state
        return from_config(_read_config(self.config)), state


def _largest_model(mesh: Mesh, state: TrainingState) -> Model:
    probe = Model(10**12)
    held_bytes = sum(mesh.rank_bytes(probe, part) for part in state.components)
    return from_number(f"{probe.parameters * GPU_STATE_BYTES / held_bytes:.1e}")


def human_count(number: float) -> str:
    """Format four digits, as in ``--params``: 70 B."""
    for unit in ("", " k", " M", " B"):
        if number < 999.95:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:,.4g} T"


def _measured(uri: str) -> tuple[Model, TrainingState]:
    try:
        from ...dcp.component_sizes import component_sizes_of
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"--checkpoint needs {error.name}", hint="pip install 'tierckpt[torch]'") from error
    with closing_clients():
        return component_sizes_of(uri, Session().settings())


def _read_config(where: str) -> dict[str, Any]:
    text = _fetch(where) if scheme_of(where) else _read(Path(where))
    try:
        return TypeAdapter(dict[str, Any]).validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{where} holds no JSON object", hint=CONFIG_HINT) from error


def _read(path: Path) -> bytes:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", hint=CONFIG_HINT)
    with path.open("rb") as file:
        return file.read(CONFIG_BYTES_MAX)


def _fetch(uri: str) -> bytes:
    location = location_of(uri)
    is_file = location.name.endswith(".json")
    name, parent = (location.name, location.parent) if is_file else ("config.json", location)
    with Session().client() as client:
        return bytes(client.run(client.mover.store(parent).get(name)))
