"""Brings the parts of a window, copied at several versions, to the last version.

Invariants (docs/adr/0015-redo-log.md):
    D1  ``fold`` returns a state at the last version, or raises. The output of ``pack`` is stored where readers do not
        find it as a checkpoint.
    D2  A missing or repeated step raises (A1); a wrong gradient, part or hyperparameter changes a fingerprint.
    D3  A tensor with another fingerprint is accepted only with "approximate", on another build, device or
        implementation, if a sample of its elements is within ``tolerance``. The result is reported.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from ..errors import CheckpointError, ConfigError, IntegrityError, StateMismatchError, TierckptError
from ..types import Json
from .apply import Key, Replay
from .capture import Step
from .checksum import Fingerprint, sample_of
from .frame import HOST, decode_step, encode_step, from_json, to_json
from .optimizers import CLASS_BY_NAME
from .tree import fill, wrap_shard

Exact = Literal["required", "approximate"]
FORMAT = 2


def checked_exact(exact: Exact) -> Exact:
    if exact not in get_args(Exact):
        raise ConfigError(f"exact is {exact!r}", hint="Write one of " + ", ".join(map(repr, get_args(Exact))))
    return exact


@dataclass(frozen=True, slots=True)
class Conditions:
    """Equal conditions give a replayed step the same bits."""

    build: str
    device: str
    implementation: str

    @classmethod
    def current(cls, device: torch.device, implementation: str) -> Conditions:
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        else:
            name = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else "?"
        return cls(f"torch {torch.__version__}", f"{device.type} ({name})", implementation)

    def differences(self, other: Conditions) -> str:
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return ", ".join(
            f"{name} {trained} in training and {now} here" for name, trained, now in pairs if trained != now
        )


@dataclass
class Redo:
    """A window, in host memory.

    Attributes:
        parts: each at the version of its copy or of the last step applied. ``fold`` overwrites them.
        devices: kind of device of each tensor in training.
        sharded: keys of the parameters that are DTensors.
        steps: with the gradients of parts copied before them.
    """

    kind: type[torch.optim.Optimizer]
    version: int
    conditions: Conditions
    layout: str
    parts: list[Replay] = field(default_factory=list)
    devices: dict[Key, str] = field(default_factory=dict)
    sharded: frozenset[str] = frozenset()
    steps: list[Step] = field(default_factory=list)
    fingerprints: dict[Key, Fingerprint] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[Key, torch.Tensor]:
        """Views, each at its part's version."""
        return {tensor_key: tensor for part in self.parts for tensor_key, tensor in part.tensors().items()}

    @property
    def replay_steps(self) -> int:
        return max((self.version - part.version for part in self.parts), default=0)

    def fold(self, exact: Exact = "required") -> str:
        """Bring all tensors to the last version, part by part, on the devices in ``devices``.

        Returns '' for the bits of training, else the accepted differences (D3). Memory on the device: one part and its
        gradients.

        Raises:
            StateMismatchError: other bits on another build, device or implementation.
            IntegrityError: other bits under the same conditions, or a missing step.
        """
        accepted = ""
        for number, part in enumerate(self.parts):
            try:
                replay = part.to_devices(lambda tensor_key: _device_of(self.devices[tensor_key]))
                for step in self.steps:
                    if step.version > part.version:
                        replay.apply(step)
                if replay.version != self.version:
                    raise IntegrityError(
                        f"a part of the window ends at version {replay.version} and not at {self.version}",
                        hint="A step is missing. The previous checkpoint is used",
                    )
                tensors = replay.tensors()
                for tensor_key, tensor in tensors.items():
                    accepted = self._check(tensor_key, tensor, part.version, exact) or accepted
                if missing := [one for one in self.fingerprints if one[0] in replay.parameters and one not in tensors]:
                    raise IntegrityError(
                        f"the window has no {missing[0]} after its steps", hint="The previous checkpoint is used"
                    )
                self.parts[number] = replay.to_devices(lambda _: HOST)
            except (TierckptError, torch.OutOfMemoryError):
                raise
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise IntegrityError(
                    f"the steps of a window cannot be replayed: {type(error).__name__}: {error}",
                    hint="It is damaged, or from another release. The previous checkpoint is used",
                ) from error
        return accepted

    def _check(self, tensor_key: Key, tensor: torch.Tensor, version: int, exact: Exact) -> str:
        (key, name), fingerprint = tensor_key, self.fingerprints.get(tensor_key)
        if fingerprint is not None and fingerprint.matches(tensor):
            return ""
        current = Conditions.current(_device_of(self.devices.get((key, ""), "cpu")), self.conditions.implementation)
        differences = self.conditions.differences(current)
        message = f"{name or 'the value'} of parameter {key} has other bits than in training"
        if not differences or fingerprint is None:
            raise IntegrityError(
                f"{message}, with the same build, device and implementation",
                hint="The window is damaged, or it was changed outside the optimizer while it was being copied",
            )
        if exact == "approximate" and self._is_close(tensor_key, tensor, version):
            return differences
        raise StateMismatchError(
            f"{message}: {differences}",
            hint='Use the build and device of training, or exact="approximate" to accept differences in the last bits',
        )

    def _is_close(self, tensor_key: Key, tensor: torch.Tensor, version: int) -> bool:
        (key, name), training_sample = tensor_key, self.fingerprints[tensor_key].sample.cpu()
        sample = sample_of(tensor).cpu()
        gradients = [step.gradients[key] for step in self.steps if step.version > version and key in step.gradients]
        largest_gradient = max((float(one.abs().max()) for one in gradients if one.numel()), default=0.0)
        rates = [float(step.hyperparameters[int(key.partition(".")[0])].get("lr", 0.0)) for step in self.steps]
        bound = tolerance(name, training_sample, self.version - version, max(rates, default=0.0), largest_gradient)
        return sample.shape == training_sample.shape and bool(
            ((sample - training_sample).abs().double() <= bound).all()
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A training state in host memory, of one version."""

    state: Any
    steps: int
    """Counted from the beginning of the window."""
    moved_bytes: int
    blocked_seconds: float
    waited_bytes: int = 0
    inexact: str = ""
    """Empty for the bits of training."""
    conditions: Conditions | None = None
    redo: Redo | None = None
    """The parts, at several versions; ``state`` is None."""
    tree: Any = None
    """With ``redo``: the value of ``take``, with gaps for the optimizer's tensors."""
    optimizer_tensors: Mapping[Key, torch.Tensor] = field(default_factory=dict, repr=False)

    def fold(self, exact: Exact = "required") -> Snapshot:
        """Fold ``redo`` into ``state``. One call at a time. Raises as ``Redo.fold``."""
        if self.redo is None:
            return self
        inexact = self.redo.fold(exact)
        state = fill_tensors(self.tree, self.optimizer_tensors, self.redo.tensors)
        return replace(self, state=state, inexact=inexact, redo=None, tree=None, optimizer_tensors={})


class SnapshotFuture(Future[Snapshot]):
    """``result`` on the training thread raises CheckpointError before the last step of the window."""

    def __init__(self) -> None:
        super().__init__()
        self.is_sealed = False
        self._thread = threading.get_ident()

    def result(self, timeout: float | None = None) -> Snapshot:
        if threading.get_ident() == self._thread and not (self.is_sealed or self.done() or timeout == 0):
            raise CheckpointError(
                "the training thread waits for a multi-step copy before the last step of its window",
                hint="Call end_of_step after each step of the window, then result()",
            )
        try:
            return super().result(timeout)
        finally:
            del self  # the error's traceback has this frame: a reference cycle


def fill_tensors(tree: Any, optimizer_tensors: Mapping[Key, torch.Tensor], copies: Mapping[Key, torch.Tensor]) -> Any:
    wrapped = {key: wrap_shard(tensor, copies[key]) for key, tensor in optimizer_tensors.items() if key in copies}
    return fill(tree, wrapped)


def tolerance(name: str, sample: torch.Tensor, steps: int, rate: float, gradient: float) -> torch.Tensor:
    """Return the bound on the error of each element after ``steps`` steps by another implementation.

    Parameter: 8 K u max(abs(p), lr). Second moment: 4 K u v. Other state: 8 u max(abs(m)) + 4 K u max(abs(g)). u is
    2**-24 for float32. Integers must be equal.
    """
    if not sample.is_floating_point() or name == "step":
        return torch.zeros(sample.shape, dtype=torch.float64, device="cpu")
    unit = torch.finfo(sample.dtype).eps / 2
    size = sample.abs().double()
    if not name:
        return 8 * steps * unit * size.clamp(min=rate)
    if name.endswith("_sq"):
        return 4 * steps * unit * size
    largest = float(size.max()) if size.numel() else 0.0
    return torch.full_like(size, 8 * unit * largest + 4 * steps * unit * gradient)


def _device_of(name: str) -> torch.device:
    if name.startswith("cuda") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return HOST


# --- encoding as tensors and a JSON recipe ------------------------------------------------------------------------


def pack(redo: Redo, names: Mapping[str, str]) -> tuple[dict[str, torch.Tensor], Json]:
    """``names`` has prefixes that are equal on two ranks only for equal tensors."""
    tensors: dict[str, torch.Tensor] = {}
    stored_as = []
    for (key, name), tensor in redo.tensors.items():
        stored = f"{names[key]}/{name or 'parameter'}"
        tensors[stored] = tensor
        stored_as.append([key, name, stored, redo.devices[key, name]])
    steps = []
    for step in redo.steps:
        described, gradients = encode_step(step)
        steps.append(described)
        tensors |= zip(gradient_names(described, names), gradients, strict=True)
    recipe = {
        "format": FORMAT,
        "optimizer": redo.kind.__name__,
        "version": redo.version,
        "build": redo.conditions.build,
        "device": redo.conditions.device,
        "implementation": redo.conditions.implementation,
        "layout": redo.layout,
        "sharded": sorted(redo.sharded),
        "names": dict(names),
        "parts": [[part.version, list(part.parameters)] for part in redo.parts],
        "tensors": stored_as,
        "values": to_json({key: value for part in redo.parts for key, value in part.values().items()}),
        "steps": steps,
        "fingerprints": [
            [key, name, str(fingerprint.int_value), fingerprint.is_sum, to_json(fingerprint.sample.cpu())]
            for (key, name), fingerprint in redo.fingerprints.items()
        ],
    }
    return tensors, recipe


def unpack(tensors: Mapping[str, torch.Tensor], recipe: Json) -> Redo:
    """Raise IntegrityError for an unusable recipe."""
    try:
        {FORMAT: None}[recipe["format"]]
        kind, conditions = CLASS_BY_NAME[recipe["optimizer"]], [str(recipe[name]) for name in Conditions.__slots__]
        redo = Redo(kind, int(recipe["version"]), Conditions(*conditions), str(recipe["layout"]))
        redo.sharded = frozenset(recipe["sharded"])
        state = {key: dict(values) for key, values in from_json(recipe["values"]).items()}
        parameters: dict[str, torch.Tensor] = {}
        for key, name, stored, device in recipe["tensors"]:
            (state.setdefault(key, {}) if name else parameters)[name or key] = tensors[stored]
            redo.devices[key, name] = str(device)
        for version, keys in recipe["parts"]:
            redo.parts.append(Replay(kind, {key: parameters[key] for key in keys}, state, int(version)))
        for described in recipe["steps"]:
            gradients = [tensors[stored] for stored in gradient_names(described, recipe["names"])]
            redo.steps.append(decode_step(described, gradients, _device_of))
        for key, name, number, is_sum, sample in recipe["fingerprints"]:
            redo.fingerprints[key, name] = Fingerprint(int(number), from_json(sample), bool(is_sum))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise IntegrityError(
            f"the recipe of a window cannot be used: {type(error).__name__}: {error}",
            hint="It is damaged, or from another release. The previous checkpoint is used",
        ) from error
    return redo


def gradient_names(described: Json, names: Mapping[str, str]) -> list[str]:
    return [f"{names[key]}/gradient-{described['version']}" for key, *_ in described["gradients"]]
