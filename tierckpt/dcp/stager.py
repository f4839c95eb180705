"""TierStager: staging buffers that are kept and reused, for ``dcp.async_save(async_stager=...)``."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from .writer import refuse_meta_tensors


class TierStager(DefaultStager):
    """Copies a state dict to host memory it owns, once, and reuses that memory for the next save.

    ``stage`` returns when the copy is complete: training may change the tensors at once. The copy lives until the next
    ``stage``, so finish writing one save before staging the next. Pinned where there is CUDA.

    Cost: one copy of the state; the first call also pays for the memory. Not thread-safe.
    """

    def __init__(self) -> None:
        cuda = torch.cuda.is_available()
        super().__init__(
            StagingOptions(
                use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
            )
        )

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        refuse_meta_tensors(state_dict)
        return super().stage(state_dict, **kwargs)  # type: ignore[return-value]
