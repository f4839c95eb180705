"""tierckpt: hierarchical checkpointing and fast model loading for PyTorch.

This module imports neither torch nor any cloud library; each name loads on first use.
"""

from __future__ import annotations

import sys

if sys.argv[:1] == ["-m"] and any(
    option.startswith("-") and option.endswith("m") and module.partition(".")[0] == "tierckpt"
    for option, module in zip(sys.orig_argv[1:], sys.orig_argv[2:], strict=False)
):
    # `python -m` searches the working directory first: code there, by any user who may write to it, would run as this
    # user.
    import os

    try:
        _working_directory = os.getcwd()  # noqa: PTH109  # pathlib comes later
    except FileNotFoundError:
        _working_directory = ""
    sys.path[:] = [entry for entry in sys.path if entry not in ("", _working_directory)]

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors
from .errors import TierckptError as TierckptError
from .process_start import open_missing_descriptors as _open_missing_descriptors

_open_missing_descriptors()  # else a checkpoint may get descriptor 2, which libraries print to

__version__ = "0.1.0"

_HOME = {
    "AutoInterval": ".training.interval",
    "Checkpointer": ".training.checkpointer",
    "EveryStep": ".training.every_step.window",
    "MultiStepStager": ".replay.multi_step",
    "NearStorageOptimizer": ".near_storage.optimizer",
    "PerRank": ".training.codec.rank_state",
    "RngState": ".training.codec.rank_state",
    "Settings": ".config",
    "TierSavePlanner": ".dcp.planner",
    "TierStager": ".dcp.stager",
    "TierStorageReader": ".dcp.reader",
    "TierStorageWriter": ".dcp.writer",
    "adopt": ".adoption",
    "latest": ".client",
    "load_model": ".training.restore_state",
    "load_safetensors": ".loading.safetensors",
    "prefetch": ".restore.prefetch",
    "stream_safetensors": ".loading.safetensors",
    "wait": ".client",
}

__all__ = ["TierckptError", "errors", *_HOME]

if TYPE_CHECKING:
    from .adoption import adopt as adopt
    from .client import latest as latest
    from .client import wait as wait
    from .config import Settings as Settings
    from .dcp.planner import TierSavePlanner as TierSavePlanner
    from .dcp.reader import TierStorageReader as TierStorageReader
    from .dcp.stager import TierStager as TierStager
    from .dcp.writer import TierStorageWriter as TierStorageWriter
    from .loading.safetensors import load_safetensors as load_safetensors
    from .loading.safetensors import stream_safetensors as stream_safetensors
    from .near_storage.optimizer import NearStorageOptimizer as NearStorageOptimizer
    from .replay.multi_step import MultiStepStager as MultiStepStager
    from .restore.prefetch import prefetch as prefetch
    from .training.checkpointer import Checkpointer as Checkpointer
    from .training.codec.rank_state import PerRank as PerRank
    from .training.codec.rank_state import RngState as RngState
    from .training.every_step.window import EveryStep as EveryStep
    from .training.interval import AutoInterval as AutoInterval
    from .training.restore_state import load_model as load_model


def __getattr__(name: str) -> Any:
    if name in _HOME:
        try:
            value = getattr(import_module(_HOME[name], __name__), name)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in ("", "tierckpt"):
                raise
            raise errors.MissingExtraError(
                f"tierckpt.{name} needs the package {package}, which is not installed",
                hint="Run pip install 'tierckpt[torch]' (in a clone: pip install '.[torch]')",
            ) from None
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
