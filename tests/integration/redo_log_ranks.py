"""What a rank does in ``test_redo_log_ranks.py``: as ``multi_step_save_ranks``, and its windows are kept as they were
copied, as on an accelerator."""

from __future__ import annotations

from tests.fault.redo_log_job import Deferring
from tests.integration import multi_step_save_ranks
from tierckpt.training.every_step import window

if __name__ == "__main__":
    window.MultiStepStager = Deferring  # type: ignore[misc]
    multi_step_save_ranks.main()
