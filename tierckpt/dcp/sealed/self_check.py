"""The check of a save: could this process load its metadata?"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ..gc_pause import gc_paused
from ..metadata_pickle import encode
from .machine import Refused
from .metadata import FIELDS, HAS_FURTHER, MetadataBuilder, check_stored, load_metadata, refusal

_verified: tuple[dict[str, Any], Any] = {}, None
"""Entries and planner data of the newest metadata that was read back whole: the very objects, which a plan that is
remembered gives to each save."""


def read_back(data: bytes, metadata: Metadata, *, where: str, partial: bool = False) -> None:
    """Raise what ``load_metadata`` would raise for ``data``, the encoding of ``metadata``.

    Entries that are the objects of the last call have been read; of such a save only the others and the places are.
    Cost: that of ``load_metadata`` for a new structure; 1.5 microseconds for each tensor of the last one.
    """
    global _verified
    entries, planner = metadata.state_dict_metadata, metadata.planner_data
    known, known_planner = _verified
    new = {fqn: entry for fqn, entry in entries.items() if known.get(fqn) is not entry}
    has_further = HAS_FURTHER or not FIELDS[Metadata].issuperset(vars(metadata))
    if partial or has_further or planner is not known_planner or 2 * len(new) > len(entries):
        load_metadata(data, where=where, partial=partial)
        if not partial:
            _verified = dict(entries), planner
        return
    if new:
        load_metadata(encode(Metadata(new)), where=where)
    try:
        with gc_paused():
            check_stored(entries, MetadataBuilder(len(data), partial).places(metadata.storage_data or {}))
    except Refused as error:
        raise refusal(f"{where} is refused: {error}", error.wanted, file=where) from None
    _verified = dict(entries), planner
