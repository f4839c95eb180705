"""Compare tierckpt with ``load_state_dict`` for one row of the table of training states."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tests.exact import check_same
from tierckpt import Checkpointer
from tierckpt.errors import TierckptError

STEPS = 3
"""Steps of training before the save."""


@dataclass
class Job:
    """The saved state, and one step of its training loop."""

    state: dict[str, Any]
    step: Callable[[int], None]


@dataclass
class Shape:
    """A row: how a job is built and trained, and its changes between save and restore.

    ``expect``:
        same: the restored job equals the reference, which ``load_state_dict`` restored.
        error: ``load_state_dict`` raises, and so does tierckpt.
        same or refused: the save may raise an error of tierckpt instead.
        exact: the restored job equals the saved one, also where ``load_state_dict`` casts a state.
    """

    name: str
    build: Callable[[int], Job]
    rebuild: Callable[[int], Job] | None = None
    """Builds the restored job; None: ``build``."""
    before: Callable[[Job], Any] = field(default=lambda job: None)
    """Changes the trained job before it is saved."""
    change: Callable[[Job], Any] = field(default=lambda job: None)
    """Changes the job that is restored, before the restore."""
    translate: Callable[[dict[str, Any]], dict[str, Any]] = field(default=lambda saved: saved)
    """Changes that a user of ``load_state_dict`` makes to the saved state first."""
    train: int = STEPS
    after: int = 2
    expect: str = "same"
    needs: str = ""
    """``process group``, or a name of ``torch.optim`` that this torch must have."""


# --- values, bit for bit ----------------------------------------------------------------------------------------------


def frozen(value: Any) -> Any:
    """Return a copy for ``check_same``: tensors become metadata and bytes, keys are sorted."""
    if isinstance(value, torch.Tensor):
        return _frozen_tensor(value)
    if isinstance(value, torch.Generator):
        return ("generator", value.get_state().cpu().numpy().tobytes())
    if isinstance(value, io.BytesIO):
        return ("stream", value.getvalue())
    if isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: repr((type(item[0]).__name__, item[0])))
        return (type(value).__name__, [(key, frozen(item)) for key, item in items])
    if type(value) in (list, tuple):
        return type(value)(map(frozen, value))
    return value


def _frozen_tensor(value: torch.Tensor) -> Any:
    if isinstance(value, nn.parameter.UninitializedTensorMixin):
        return ("uninitialized", type(value).__name__, value.dtype)
    kind = "tensor" if type(value) in (torch.Tensor, nn.Parameter, nn.Buffer) else type(value).__name__
    about = (kind, value.dtype, tuple(value.shape), str(value.device), value.layout, value.requires_grad)
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        return (about, context, [(name, frozen(getattr(value, name))) for name in names])
    if value.is_meta:
        return (about, None)
    if value.is_quantized:
        return (about, value.q_scale(), frozen(value.int_repr()))
    dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
    flat = dense.contiguous().resolve_conj().resolve_neg().reshape(-1).clone()
    return (about, flat.view(torch.uint8).cpu().numpy().tobytes() if flat.numel() else b"")


def states_of(job: Job) -> dict[str, Any]:
    """Return the state of each object of the job."""
    return {name: frozen(state_of(value)) for name, value in job.state.items()}


def state_of(value: Any) -> Any:
    if hasattr(value, "consolidate_state_dict"):
        value.consolidate_state_dict()
    return value.state_dict() if hasattr(value, "state_dict") else value


def about(job: Job) -> dict[str, Any]:
    """Return module data outside state dicts: gradients, flags, non-persistent buffers."""
    found: dict[str, Any] = {}
    for name, value in job.state.items():
        if isinstance(value, nn.Module):
            found[name] = [
                [(key, frozen(p.grad), frozen(p.detach())) for key, p in value.named_parameters() if _is_real(p)],
                [(key, p.requires_grad) for key, p in value.named_parameters()],
                [(key, module.training) for key, module in value.named_modules()],
                [(key, frozen(buffer)) for key, buffer in value.named_buffers()],
            ]
    return found


def _is_real(parameter: torch.Tensor) -> bool:
    return not isinstance(parameter, nn.parameter.UninitializedTensorMixin)


def places(job: Job) -> list[Any]:
    """Return the id of each parameter and buffer, to see which a restore keeps."""
    modules = [value for value in job.state.values() if isinstance(value, nn.Module)]
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def optimizers(job: Job) -> list[torch.optim.Optimizer]:
    return [value for value in job.state.values() if isinstance(value, torch.optim.Optimizer)]


def watched(job: Job) -> list[str]:
    """Record the names of step hooks that run from now on."""
    ran: list[str] = []
    for optimizer in optimizers(job):
        optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
        optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    return ran


# --- the two ways -----------------------------------------------------------------------------------------------------


def torch_saved(job: Job) -> bytes:
    stream = io.BytesIO()
    torch.save({name: state_of(value) for name, value in job.state.items()}, stream)
    return stream.getvalue()


def torch_restored(job: Job, saved: bytes, translate: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    loaded = translate(torch.load(io.BytesIO(saved), weights_only=False))
    for name, value in job.state.items():
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(loaded[name])
        else:
            job.state[name] = loaded[name]


def trained(job: Job, steps: range) -> Job:
    for step in steps:
        job.step(step)
    return job


def same_state(left: Mapping[str, Any], right: Mapping[str, Any], where: str) -> None:
    assert left.keys() == right.keys(), where
    for name in left:
        check_same(left[name], right[name], f"{where}: {name}")


def check(shape: Shape, uri: str) -> None:
    """Run one row. Raises AssertionError if tierckpt differs from ``torch.save`` and ``load_state_dict``."""
    with warnings.catch_warnings(action="ignore"):
        _check(shape, uri)


def _check(shape: Shape, uri: str) -> None:
    job = trained(shape.build(1), range(shape.train))
    shape.before(job)
    was, flags = states_of(job), about(job)
    try:
        saved: bytes | None = torch_saved(job)
    except Exception:
        saved = None
    ran = watched(job)
    try:
        with Checkpointer(uri) as checkpointer:
            checkpointer.save(STEPS, job.state)
    except TierckptError:
        assert saved is None or "refused" in shape.expect
        same_state(was, states_of(job), "a save that fails changed")
        return
    assert saved is not None, "torch.save raises, and tierckpt saved"
    same_state(was, states_of(job), "the save changed")
    same_state(flags, about(job), "the save changed")
    assert ran == [], f"the save ran step hooks: {ran}"

    ours, reference = (_changed(shape) for _ in range(2))
    try:
        torch_restored(reference, saved, shape.translate)
        error: Exception | None = None
    except Exception as raised:
        error = raised
    assert (error is not None) == (shape.expect == "error"), f"load_state_dict: {error!r}"
    was, flags, at, ran = states_of(ours), about(ours), places(ours), watched(ours)
    expected_places = [id(tensor) for tensor in at]
    if error is not None:
        _check_refused(ours, uri)
        same_state(was, states_of(ours), "a restore that fails changed")
        same_state(flags, about(ours), "a restore that fails changed")
        assert [id(tensor) for tensor in places(ours)] == expected_places, "a restore that fails replaced tensors"
        assert ran == [], f"the restore ran step hooks: {ran}"
        return
    with Checkpointer(uri) as checkpointer:
        assert checkpointer.restore(ours.state) == STEPS
    ran_in_restore = list(ran)
    if shape.expect == "exact":
        for optimizer in optimizers(job):
            optimizer.zero_grad()
        reference = job
    same_state(states_of(reference), states_of(ours), "after the restore")
    same_state(about(reference), about(ours), "after the restore")
    for step in range(STEPS, STEPS + shape.after):
        trained(reference, range(step, step + 1))
        trained(ours, range(step, step + 1))
        same_state(states_of(reference), states_of(ours), f"after step {step}")
        same_state(about(reference), about(ours), f"after step {step}")
    assert ran_in_restore == [], f"the restore ran step hooks: {ran_in_restore}"


def _changed(shape: Shape) -> Job:
    job = (shape.rebuild or shape.build)(2)
    shape.change(job)
    return job


def _check_refused(job: Job, uri: str) -> None:
    refused = None
    with contextlib.suppress(TierckptError), Checkpointer(uri) as checkpointer:
        refused = checkpointer.restore(job.state)
    assert refused is None, "load_state_dict raises, and tierckpt restored"
