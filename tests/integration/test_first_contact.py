"""What somebody meets in the first hour: no alarm where nothing is wrong, and errors that fit on a screen."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.compat.worker import launch

SELF = "tests.integration.test_first_contact"


def save_three_steps(uri: str) -> list[Any]:
    """Save with two ranks to a directory beside the local tier. Returns what either rank's log warns of, and where the
    last step is."""
    warnings: list[str] = []
    own = torch.distributed.get_rank()

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logging.getLogger("tierckpt").addHandler(Collect(logging.WARNING))
    with tierckpt.Checkpointer(uri) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {f"rank-{rank}": torch.full((1000,), float(step)) for rank in (own, "both")})
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, warnings)
    return [gathered, (Path(uri) / "step-3/.tierckpt/manifest.json").exists()]


@pytest.mark.distributed
@pytest.mark.parametrize("mover", ["inline", "agent"])
def test_two_ranks_on_a_shared_file_system_save_without_a_warning(mover: str, file_uri: str) -> None:
    warnings, is_committed = launch(f"{SELF}:save_three_steps", 2, uri=file_uri, env={"TIERCKPT_MOVER": mover})
    assert warnings == [[], []]
    assert is_committed
