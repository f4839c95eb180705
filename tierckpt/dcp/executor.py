"""``python -m tierckpt.dcp.executor``: brings a staged checkpoint whose trainers have died to the local tier.

Started by the agent, with all that the ranks left as inherited descriptors and its order as JSON on stdin:
``{"wills": [{"descriptors": {name: descriptor}, "has_begun": whether there is a journal entry}, one of each rank]}``.
Writes the shards that are not on the SSD yet, then commits as the coordinator would have. They are left in the page
cache: the trainer that restarts reads them at memory speed.

Exit code 0: the checkpoint is committed on the local tier, or was settled before. Anything else: it is not, and what
was written of it is removed.
"""

from __future__ import annotations

import json
import sys

from torch.distributed.checkpoint.storage import WriteResult

from ..arena.memory import Memory
from ..config import Settings
from ..layout import local_dir
from ..mover import commit
from ..mover.contact import LOCK_NAME, WILL_NAME
from ..telemetry import log_to, logger
from ..types import Json
from . import will as wills
from .will import Will
from .writer import TierStorageWriter

log = logger("agent")


def execute(orders: list[Json]) -> bool:
    """Flush and commit what the ranks left. False when the save was settled already. Raises TierckptError."""
    left: list[dict[str, int]] = [order["descriptors"] for order in orders]
    locks = [descriptors.pop(LOCK_NAME, None) for descriptors in left]
    found = [wills.read(descriptors.pop(WILL_NAME)) for descriptors in left]
    coordinator = next(will for will in found if will.is_coordinator)
    settings = Settings.model_validate_json(coordinator.settings)
    writers = [TierStorageWriter(will.uri, settings=settings) for will in found]
    directory = local_dir(settings.local_root, writers[0].location)
    if commit.is_committed(directory, coordinator.token):
        return False  # the shards of the other ranks are named by it: recovering finds that
    memories = _mapped(found, left)
    try:
        results: dict[int, list[WriteResult]] = {}
        for will, writer, lock, order in zip(found, writers, locks, orders, strict=True):
            has_begun = order["has_begun"]
            written = writer.stand_in(will, memories, lock, has_begun=has_begun) if will.token else []
            if written is None:
                return False
            results[will.rank] = written
        if coordinator.metadata is None:
            raise ValueError("the coordinator's will has no metadata")
        ranks = range(coordinator.world_size) if coordinator.use_collectives else [coordinator.rank]
        of_all = [results.get(rank, []) for rank in ranks]
        writers[found.index(coordinator)].finish(coordinator.metadata, of_all)
        for writer in writers:
            writer.hand_over()
    finally:
        for writer in writers:
            writer.let_go()
        for memory in memories.values():
            memory.close()
    log.info("%s: staged by a trainer that has ended, committed on the local tier now", coordinator.uri)
    return True


def _mapped(found: list[Will], left: list[dict[str, int]]) -> dict[str, Memory]:
    """The staging memory that the wills speak of, by the names they use."""
    kinds = {name: kind for will in found for name, kind in will.kinds.items()}
    descriptors = {name: descriptor for names in left for name, descriptor in names.items()}
    return {name: Memory.from_fd(descriptors[name], kind) for name, kind in kinds.items()}


def main() -> None:
    log_to(sys.stderr, "text", "info")
    order = json.loads(sys.stdin.read())
    execute(order["wills"])


if __name__ == "__main__":
    main()
