"""The options of ``size`` and ``simulate``, and the sizing that they describe."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ...config import Settings
from ...errors import ConfigError, MissingExtraError
from ...format.uris import scheme_of
from ...planning import Bandwidths, Mesh, Model, Site, Sizing, TrainingState, from_config, from_number, size, state_of
from ...planning.checked_numbers import parse_bytes, parse_rate, parse_seconds, positive, whole
from .output import Report
from .session import closing_clients, load_settings, location_of, open_client

CONFIG_BYTES_MAX = 16 << 20
GPU_STATE_BYTES = 40e9
"""Activations use the rest of 80 GB."""

_MODEL, _JOB, _SITE = "The model", "The job", "The site: give your own numbers, the defaults are assumptions"


def _option(name: str, text: str, panel: str, **more: Any) -> Any:
    return typer.Option(*name.split(), help=text, rich_help_panel=panel, **more)


@dataclass(frozen=True)
class PlanningOptions:
    """Values stay text until ``sizing`` parses them, so that errors name the option."""

    params: Annotated[str | None, _option("--params", "Parameters: 175e9, 70b.", _MODEL)] = None
    expert_params: Annotated[str | None, _option("--expert-params", "Of them, in routed experts.", _MODEL)] = None
    config: Annotated[
        str | None, _option("--config", "A Hugging Face config.json: file, directory or URI.", _MODEL)
    ] = None
    checkpoint: Annotated[
        str | None, _option("--checkpoint", "URI of a checkpoint: measured instead of assumed.", _MODEL)
    ] = None
    optimizer: Annotated[str, _option("--optimizer", "adam, adamw, amsgrad, adam8bit, sgd, ...", _MODEL)] = "adam"
    weights: Annotated[str, _option("--weights", "Their dtype: bf16, fp16, fp32, fp8.", _MODEL)] = "bf16"
    master: Annotated[
        bool | None, _option("--master/--no-master", "fp32 copy of the weights. Default: if they are smaller.", _MODEL)
    ] = None

    tp: Annotated[int, _option("--tp", "Tensor-parallel degree.", _JOB)] = 1
    pp: Annotated[int, _option("--pp", "Pipeline-parallel degree.", _JOB)] = 1
    dp: Annotated[
        int | None, _option("--dp", "Data-parallel degree. Default: --gpus divided by the other degrees.", _JOB)
    ] = None
    ep: Annotated[int, _option("--ep", "Expert-parallel degree; divides dp x cp.", _JOB)] = 1
    cp: Annotated[int, _option("--cp", "Context-parallel degree.", _JOB)] = 1
    stage: Annotated[
        int | None,
        _option("--stage", "Sharding: 0 none, 1, 2 ZeRO, 3 FSDP. Default: 3 with --gpus and no degree, else 0.", _JOB),
    ] = None
    gpus: Annotated[int | None, _option("--gpus", "All GPUs. Default model: the largest they hold.", _JOB)] = None
    gpus_per_node: Annotated[int, _option("--gpus-per-node", "GPUs of one node.", _JOB)] = 8
    step: Annotated[str, _option("--step", "Time of one training step.", _JOB)] = "10s"
    split: Annotated[
        bool, _option("--split/--no-split", "Replicated bytes are shared out among all that hold them.", _JOB)
    ] = True
    stall: Annotated[
        list[str] | None, _option("--stall", "A stall budget for a blocking save; may be repeated.", _JOB)
    ] = None

    shared: Annotated[str, _option("--shared", "Write bandwidth of shared storage, for the job.", _SITE)] = "100GB/s"
    shared_read: Annotated[str | None, _option("--shared-read", "Its read bandwidth. Default: as --shared.", _SITE)] = (
        None
    )
    local_write: Annotated[str, _option("--local-write", "Write bandwidth of one node's SSDs.", _SITE)] = "10GB/s"
    local_read: Annotated[str, _option("--local-read", "Read bandwidth of one node's SSDs.", _SITE)] = "40GB/s"
    nic: Annotated[str, _option("--nic", "Network bandwidth of one node (200Gb/s is bits).", _SITE)] = "25GB/s"
    pcie: Annotated[str, _option("--pcie", "Between one GPU and its host.", _SITE)] = "25GB/s"
    ssd: Annotated[str, _option("--ssd", "SSD capacity of one node.", _SITE)] = "30TB"
    dwpd: Annotated[float, _option("--dwpd", "Drive writes per day the SSDs are rated for.", _SITE)] = 1.0
    keep_local: Annotated[int, _option("--keep-local", "Checkpoints kept on the SSDs.", _SITE)] = 2
    in_flight: Annotated[int, _option("--in-flight", "Checkpoints staged and not yet flushed.", _SITE)] = 1
    replicas: Annotated[int, _option("--replicas", "Nodes that hold each shard, its own included.", _SITE)] = 2
    mtbf: Annotated[
        str | None, _option("--mtbf", "Of the job, like 3h. Default: from --failure-rate and its nodes.", _SITE)
    ] = None
    failure_rate: Annotated[float, _option("--failure-rate", "Failures in 1000 node-days.", _SITE)] = 6.5
    node_loss: Annotated[float, _option("--node-loss", "Share of failures that take a node's SSDs.", _SITE)] = 0.5
    domain_loss: Annotated[float, _option("--domain-loss", "Share that takes a whole rack.", _SITE)] = 0.02
    restart: Annotated[str, _option("--restart", "Detect, schedule, initialise: all but loading.", _SITE)] = "5min"
    drain_slowdown: Annotated[
        float, _option("--drain-slowdown", "How much slower training is while a drain runs.", _SITE)
    ] = 0.01
    load_nodes: Annotated[int | None, _option("--load-nodes", "Nodes that load the model. Default: all.", _SITE)] = None

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
            **(
                {"stall_budgets_seconds": tuple(parse_seconds(one, "--stall") for one in self.stall)}
                if self.stall
                else {}
            ),
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
            return _measured(self.checkpoint, load_settings(None))
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


def taking_options(verb: Callable[..., Report]) -> Callable[..., Report]:
    hints = get_type_hints(verb, include_extras=True)
    own = list(inspect.signature(verb).parameters.values())[1:]
    kinds = get_type_hints(PlanningOptions, include_extras=True)
    shared = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=kinds[one.name])
        for one in fields(PlanningOptions)
    ]

    def command(**values: Any) -> Report:
        options = PlanningOptions(**{one.name: values.pop(one.name) for one in fields(PlanningOptions)})
        return verb(options, **values)

    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__annotations__ = {one.name: one.annotation for one in shared} | {one.name: hints[one.name] for one in own}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        shared + [one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name]) for one in own]
    )
    return command


def human_count(number: float) -> str:
    """Format four digits, as in ``--params``: 70 B."""
    for unit in ("", " k", " M", " B"):
        if number < 999.95:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:,.4g} T"


def _measured(uri: str, settings: Settings) -> tuple[Model, TrainingState]:
    try:
        from ...dcp.component_sizes import component_sizes_of
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"--checkpoint needs {error.name}", hint="pip install 'tierckpt[torch]'") from error
    with closing_clients():
        return component_sizes_of(uri, settings)


def _read_config(where: str) -> dict[str, Any]:
    text = _fetch(where) if scheme_of(where) else _read(Path(where))
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{where} is not JSON: {error}", hint="Give the config.json of a Hugging Face model"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{where} holds no JSON object", hint="Give the config.json of a Hugging Face model")
    return config


def _read(path: Path) -> bytes:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", hint="Give the config.json of a Hugging Face model, or --params")
    with path.open("rb") as file:
        return file.read(CONFIG_BYTES_MAX)


def _fetch(uri: str) -> bytes:
    location = location_of(uri)
    is_file = location.name.endswith(".json")
    name, parent = (location.name, location.parent) if is_file else ("config.json", location)
    with open_client(None) as client:
        return bytes(client.run(client.mover.store(parent).get(name)))
