"""The check of a save: could this process load its metadata?"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ...format.pickle_machine import RefusedPickle
from ..bulk_objects import gc_paused
from ..metadata_pickle import encode, renamed
from .metadata import FIELDS, HAS_LATER_FIELDS, MetadataBuilder, check_stored, load_metadata, relative_of, unsafe_error

_verified: tuple[dict[str, Any], Any, bytes] = {}, None, b""
"""The newest verified metadata: a cached plan gives its objects to each save."""


def read_back(data: bytes, metadata: Metadata, *, where: str, partial: bool = False) -> None:
    """Raise the error of ``load_metadata`` for ``data``, the encoding of ``metadata``.

    Only changes since the last call are checked.
    """
    global _verified
    entries, planner = metadata.state_dict_metadata, metadata.planner_data
    known, known_planner, known_data = _verified
    if (made := renamed(data)) is not None and made[0] is known_data:
        try:
            for path in made[1]:
                relative_of(path)
        except RefusedPickle as error:
            raise unsafe_error(f"{where} is refused: {error}", error.global_name, file=where) from None
        _verified = dict(entries), planner, data
        return
    new = {fqn: entry for fqn, entry in entries.items() if known.get(fqn) is not entry}
    has_further = HAS_LATER_FIELDS or not FIELDS[Metadata].issuperset(vars(metadata))
    if partial or has_further or planner is not known_planner or 2 * len(new) > len(entries):
        load_metadata(data, where=where, partial=partial)
        if not partial:
            _verified = dict(entries), planner, data
        return
    if new:
        load_metadata(encode(Metadata(new)), where=where)
    try:
        with gc_paused():
            check_stored(entries, MetadataBuilder(len(data), partial).places(metadata.storage_data or {}))
    except RefusedPickle as error:
        raise unsafe_error(f"{where} is refused: {error}", error.global_name, file=where) from None
    _verified = dict(entries), planner, data
