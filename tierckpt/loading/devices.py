"""Checks that this machine has a device."""

from __future__ import annotations

import difflib

import torch

from ..errors import ConfigError

_SPELT = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "metal": "mps"}
_KNOWN = ("cpu", "cuda", "mps", "xpu", "meta")


def check_device(device: str | int | torch.device) -> torch.device:
    """Return the device, which this machine has.

    Raises:
        ConfigError: torch knows no such name, or sees no such device here; says which there are.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        name = str(device).partition(":")[0].lower()
        near = _SPELT.get(name) or next(iter(difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.5)), "")
        asked = f"Did you mean {near!r}? " if near else ""
        raise ConfigError(f"torch knows no device {device!r}", hint=f'{asked}Use "cpu" or "cuda:0"') from None
    if found.type in ("cpu", "meta"):
        return found
    backend = getattr(torch, found.type, None)
    count = backend.device_count() if backend is not None and backend.is_available() else 0
    if not count:
        raise ConfigError(
            f"there is no device {str(found)!r}: this torch ({torch.__version__}) sees no {found.type} device",
            hint='Use device="cpu", or look why `torch.cuda.is_available()` is false on this machine',
        )
    if found.index is not None and found.index >= count:
        raise ConfigError(
            f"there is no device {str(found)!r}: this machine has {found.type}:0"
            + (f" to {found.type}:{count - 1}" if count > 1 else ""),
            hint="Devices are counted from 0, and CUDA_VISIBLE_DEVICES hides some",
        )
    return found
