"""The private names of torch that tierckpt uses. No other module uses any.

A torch without a name disables only the feature that needs it: the lookup, on first use, raises
``UnsupportedTorchError``. This module imports no torch.

Example:
    >>> from tierckpt import torch_internals
    >>> torch_internals.missing()
    {}
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedTorchError

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor import metadata as old_metadata
    from torch.distributed.checkpoint import _state_dict_stager, filesystem, metadata

    MemoryFormatEncoding = metadata._MEM_FORMAT_ENCODING
    OldMemoryFormatEncoding = old_metadata.MEM_FORMAT_ENCODING
    OldTensorProperties = old_metadata.TensorProperties
    StateDictStager = _state_dict_stager.StateDictStager
    StorageInfo = filesystem._StorageInfo
    StorageReaderTransforms = filesystem._StorageReaderTransforms
    StorageWriterTransforms = filesystem._StorageWriterTransforms

CHECKED_VERSIONS = ("2.10", "2.11", "2.13", "2.14", "2.15")
"""`make matrix` tests each of them."""

_SAVE_AND_LOAD = "saving and loading checkpoints"
_ODD_ITEMS = "saving tensor subclasses and stream extensions"
_STAGE = "TierStager and async_save"
_SHARED_MEMORY = "async_save in another process"
_CHECKPOINTER = "Checkpointer"
_RANKS = "a job of several ranks"
_DEFERRED = "load_safetensors from a URI"
_REDO = "the redo log, the gradient log and MultiStepStager"

_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"

NAMES: dict[str, tuple[str, str]] = {
    "StorageInfo": (f"{_FILESYSTEM}:_StorageInfo", _SAVE_AND_LOAD),
    "StorageReaderTransforms": (f"{_FILESYSTEM}:_StorageReaderTransforms", _SAVE_AND_LOAD),
    "StorageWriterTransforms": (f"{_FILESYSTEM}:_StorageWriterTransforms", _SAVE_AND_LOAD),
    "MemoryFormatEncoding": ("torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING", _SAVE_AND_LOAD),
    "OldMemoryFormatEncoding": (f"{_OLD_METADATA}:MEM_FORMAT_ENCODING", "checkpoints of torch before 2.3"),
    "OldTensorProperties": (f"{_OLD_METADATA}:TensorProperties", "checkpoints of torch before 2.3"),
    "PyTorchFileReader": ("torch:_C.PyTorchFileReader", _SAVE_AND_LOAD),
    "write_item": (f"{_FILESYSTEM}:_write_item", _ODD_ITEMS),
    "StateDictStager": ("torch.distributed.checkpoint._state_dict_stager:StateDictStager", _STAGE),
    "foreach_copy": ("torch:_foreach_copy_", _STAGE),
    "local_tensor_of": ("torch.distributed.tensor:DTensor._local_tensor", "saving DTensor"),
    "spec_of": ("torch.distributed.tensor:DTensor._spec", "saving DTensor"),
    "storage_address_of": ("torch:UntypedStorage._cdata", _SAVE_AND_LOAD),
    "new_shared_storage": ("torch:UntypedStorage._new_shared_fd_cpu", _SHARED_MEMORY),
    "storage_use_count": ("torch:_C._storage_Use_Count", _SHARED_MEMORY),
    "get_default_store": ("torch.distributed.distributed_c10d:_get_default_store", _RANKS),
    "DistWrapper": ("torch.distributed.checkpoint.utils:_DistWrapper", _CHECKPOINTER),
    "flatten_state_dict": ("torch.distributed.checkpoint._nested_dict:flatten_state_dict", _CHECKPOINTER),
    "set_element": ("torch.distributed.checkpoint._traverse:set_element", _CHECKPOINTER),
    "tree_leaves": ("torch.utils._pytree:tree_leaves", _CHECKPOINTER),
    "tree_flatten": ("torch.utils._pytree:tree_flatten", _DEFERRED),
    "tree_map_only": ("torch.utils._pytree:tree_map_only", _DEFERRED),
    "tree_unflatten": ("torch.utils._pytree:tree_unflatten", _DEFERRED),
    "make_wrapper_subclass": ("torch:Tensor._make_wrapper_subclass", _DEFERRED),
    "throw_on_mutable_data_ptr": ("torch:_C._set_throw_on_mutable_data_ptr", _DEFERRED),
    "DisableTorchFunctionSubclass": ("torch:_C.DisableTorchFunctionSubclass", _DEFERRED),
    "version_of": ("torch:Tensor._version", _REDO),
    "default_to_fused_or_foreach": ("torch.optim.optimizer:_default_to_fused_or_foreach", _REDO),
    "flatten_dense_tensors": ("torch:_C._nn.flatten_dense_tensors", _REDO),
    "unflatten_dense_tensors": ("torch:_C._nn.unflatten_dense_tensors", _REDO),
    "eval_frame": ("torch:_C._dynamo.eval_frame", _REDO),
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, feature = NAMES[name]
    found = globals()[name] = _find(path, feature)
    return found


def _find(path: str, feature: str) -> Any:
    """Return ``module:attribute.attribute``; for a descriptor, a function that reads it."""
    module, _, attributes = path.partition(":")
    try:
        found = attrgetter(attributes)(import_module(module))
    except (ImportError, AttributeError) as error:
        raise _unsupported(path.replace(":", "."), feature) from error
    return attrgetter(attributes.rpartition(".")[2]) if inspect.isdatadescriptor(found) else found


def _unsupported(name: str, feature: str) -> UnsupportedTorchError:
    ours = import_module("tierckpt").__version__
    return UnsupportedTorchError(
        f"torch {import_module('torch').__version__} has no {name}, which {feature} needs",
        hint=f"Use torch {CHECKED_VERSIONS[0]} to {CHECKED_VERSIONS[-1]}, or a tierckpt newer than {ours}",
    )


def set_local_tensor(tensor: Any, local: Any) -> None:
    _find(*NAMES["local_tensor_of"])  # raises if this torch has another name for it
    tensor._local_tensor = local


def step_post_hooks_of(optimizer: Any) -> Any:
    try:
        return optimizer._optimizer_step_post_hooks
    except AttributeError as error:
        raise _unsupported("torch.optim.Optimizer._optimizer_step_post_hooks", _REDO) from error


def is_compiled(module: Any) -> bool:
    frame = sys.modules.get("torch._dynamo.eval_frame")
    return frame is not None and isinstance(module, frame.OptimizedModule)


def submodules_that_load_themselves(root: Any) -> list[str]:
    """Return the paths of submodules with their own rules for loading a state dict: others get a copy.

    Does not count hooks of torch's wrappers, which translate names or gather shards, and batch norms, which add a key.
    """
    base: Any = import_module("torch.nn").Module
    norm: Any = import_module("torch.nn.modules.batchnorm")._NormBase
    plain = {base._load_from_state_dict, norm._load_from_state_dict}

    def is_own(path: str, module: Any) -> bool:
        kind = type(module)
        hooks = (
            *module._load_state_dict_pre_hooks.values(),
            *module._load_state_dict_post_hooks.values(),
            *module._state_dict_hooks.values(),
        )
        names = {"load_state_dict", "_load_from_state_dict"} & vars(module).keys()
        loads = kind._load_from_state_dict not in plain
        is_root = not path and kind.load_state_dict is not base.load_state_dict
        return bool(names) or loads or is_root or not all(map(_is_of_wrapper, hooks))

    return [path for path, module in root.named_modules() if is_own(path, module)]


def _is_of_wrapper(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)
    return (getattr(function, "__module__", None) or "").startswith("torch.distributed.")


def load_hooks_of(optimizer: Any) -> list[Any]:
    names = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return [hook for name in names for hook in getattr(optimizer, name, {}).values()]


def cached_global_plans() -> dict[str, Any]:
    """Return the plans of DCP's ``enable_plan_caching``, if this torch has them."""
    planner = import_module("torch.distributed.checkpoint.planner").SavePlanner
    return getattr(planner, "_cached_global_plan", {})


def missing() -> dict[str, str]:
    """Return the feature of each name that this torch lacks."""
    found = {}
    for path, feature in NAMES.values():
        try:
            _find(path, feature)
        except UnsupportedTorchError:
            found[path.replace(":", ".")] = feature
    return found
