"""Names made of a user's name fit wherever that name does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierckpt.disk.processes import (
    companion_path,
    is_abandoned,
    is_temporary,
    set_aside_name,
    stem_of,
    temporary_of_this_process,
)

ECRYPTFS_NAME_BYTES_MAX = 143
LONG = pytest.mark.parametrize("name", ["n" * 255, "n" * 143, "é" * 127, "日" * 85, "x" + "é" * 127], ids=len)


@LONG
def test_what_is_added_to_a_long_name_fits(name: str) -> None:
    temporary = temporary_of_this_process(name)
    for made in (
        temporary,
        companion_path(Path("/d", name), ".0123abcd.incoming").name,
        set_aside_name(f"d/{name}")[2:],
    ):
        assert len(made.encode()) <= ECRYPTFS_NAME_BYTES_MAX
    assert is_temporary(temporary) and not is_abandoned(temporary)


def test_a_name_that_is_cut_stays_distinct_and_a_short_one_stays() -> None:
    assert stem_of("model.safetensors") == "model.safetensors"
    assert stem_of("n" * 200 + "1") != stem_of("n" * 200 + "2")
    assert set_aside_name("a/b.distcp") == "a/b.distcp.bad"
    assert set_aside_name("b.distcp") == "b.distcp.bad"


def test_bytes_that_are_no_text_are_cut_too() -> None:
    name = os.fsdecode(b"\xff" * 200)
    assert len(os.fsencode(stem_of(name))) <= 97
