"""Wills: what one process writes is what another reads, until it is revoked."""

from __future__ import annotations

import os

from tierckpt.dcp import will as wills
from tierckpt.dcp.will import Will
from tierckpt.manifest import FileEntry

WILL = Will(
    rank=1,
    world_size=4,
    is_coordinator=False,
    use_collectives=True,
    token="ab",
    uri="/shared/run/step-1",
    settings="{}",
    save_id="id",
    replaces=(),
    shards=(),
    results=(),
    parts=(),
    metadata=None,
    kinds={},
)


def test_a_will_is_read_by_whoever_has_the_descriptor() -> None:
    written = WILL.written()
    assert wills.read(os.dup(written.fileno())) == WILL


def test_a_revoked_will_is_none_for_all_who_hold_it() -> None:
    """Without a word to them: who hands one in may not reach the agent when the memory has another checkpoint."""
    written = WILL.written()
    held = os.dup(written.fileno())
    wills.revoke(written)
    assert wills.read(held) is None


def test_what_is_durable_needs_no_memory() -> None:
    files = (FileEntry("__1_0-ab.distcp", 0, (), 1, "ab"),)
    durable = WILL.durable(files)
    assert (durable.files, durable.shards, durable.kinds) == (files, (), {})
    assert wills.read(os.dup(durable.written().fileno())) == durable
