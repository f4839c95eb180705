"""Host memory that parts of a state are copied to: mapped and faulted in once, and used again by each window.

For copies from a device it is page-locked too, so that they run beside everything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..arena.pinning import pin
from ..arena.slots import Arena, Policy
from ..dcp.stager import base_of
from ..errors import CapacityError
from ..quantities import round_up

ALIGNMENT_BYTES = 64
SLOTS_MAX = 1024
"""Parts and gradients of a window, and of the one that is being written."""


class PinnedMemory:
    """Slots of a process's own arena: one that no tensor refers to any more is used again, page-locked as it is."""

    def __init__(self) -> None:
        self._arena = Arena(slots_max=SLOTS_MAX, policy=Policy.SKIP)

    def tensors(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors in host memory to copy ``sources`` to, contiguous, all in one piece of memory.

        Raises MemoryError when there is none left.
        """
        offsets, size_bytes = [], 0
        for source in sources:
            offsets.append(size_bytes)
            size_bytes += round_up(source.numel() * source.element_size(), ALIGNMENT_BYTES)
        if not size_bytes:
            return [torch.empty(source.shape, dtype=source.dtype, device="cpu") for source in sources]
        try:
            lease = self._arena.lease(size_bytes)
        except CapacityError as error:
            raise MemoryError(str(error)) from error
        if lease is None:
            raise MemoryError(f"all of {SLOTS_MAX} pieces of page-locked memory are in use")
        if any(source.is_cuda for source in sources):
            pin(lease.memory)  # where it cannot be had the copies are slower, and right all the same
        base = base_of(lease, size_bytes)
        return [
            base[offset : offset + source.numel() * source.element_size()].view(source.dtype).view(source.shape)
            for offset, source in zip(offsets, sources, strict=True)
        ]

    def close(self) -> None:
        """Release what nothing refers to. The rest goes with its last tensor."""
        self._arena.close()
