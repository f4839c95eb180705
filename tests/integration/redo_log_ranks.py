"""What a rank does in ``test_redo_log_ranks.py``: as ``multi_step_save_ranks``, and its windows are kept as they were
copied, as on an accelerator."""

from __future__ import annotations

from typing import Any

from tests.integration import multi_step_save_ranks
from tierckpt.replay.multi_step import MultiStepStager
from tierckpt.training.every_step import window


class Deferring(MultiStepStager):
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options, defers=True)


if __name__ == "__main__":
    window.MultiStepStager = Deferring  # type: ignore[misc]
    multi_step_save_ranks.main()
