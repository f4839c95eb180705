"""Handing the will of a staged save to the agent, and taking it back when the save has ended (P6)."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.checkpoint.metadata import Metadata

from ..arena import pages
from ..arena.memory import Memory
from ..config import Settings
from ..dcp import will as wills
from ..dcp.will import Will
from ..dcp.writer import Prepared, TierStorageWriter
from ..errors import OperationTimeoutError, TierckptError
from ..mover.contact import LOCK_NAME, WILL_NAME, Contact, NoAgentError, contact_for
from ..telemetry import logger

log = logger("checkpointer")


def is_wanted(settings: Settings) -> bool:
    """Whether staged checkpoints are to outlive this process: see ``Settings.staging_memory``."""
    if settings.staging_memory == "auto":
        return settings.mover == "agent" and pages.shared_memory_is_huge()
    return settings.mover == "agent" and settings.staging_memory == "shared"


class Testament:
    """A will that the agent has. Thread-safe."""

    def __init__(self, contact: Contact, save: str, rank: int) -> None:
        self._contact, self._save, self._rank = contact, save, rank

    def take_back(self) -> bool:
        """The save has ended. False when the agent is there and cannot be told: it will see for itself."""
        try:
            self._contact.ask({"op": "take_back", "save": self._save, "rank": self._rank}, start=False)
        except NoAgentError:
            pass  # it has lost the will with its process
        except (TierckptError, OSError) as error:
            log.warning("the will of %s could not be taken back: %s", self._save, error)
            return False
        return True

    def hand_in(self, will: Will, memories: Mapping[str, Memory], lock: int | None, world_size: int) -> None:
        """All that the will needs goes along in one message, so that no agent ever has a part of it."""
        with will.written() as descriptor:
            left = {WILL_NAME: descriptor}
            if lock is not None:
                left[LOCK_NAME] = lock
            left |= {name: memory.fd for name, memory in memories.items() if memory.fd is not None}
            message = {"op": "hand_in", "save": self._save, "rank": self._rank, "world_size": world_size}
            self._contact.ask({**message, "names": list(left)}, list(left.values()))


def hand_in(
    writer: TierStorageWriter, prepared: Prepared | None, metadata: Metadata | None, save: str
) -> Testament | None:
    """Hand in the will of one rank. None when that cannot be done: then the save is as safe as this process, and the
    log says why. Never fails a save, but for one whose staged copy has been dropped (CheckpointSkippedError).
    """
    leases = prepared.leases if prepared is not None else set()
    for lease in leases:
        lease.ask_before_drop(lambda: False)  # while it is handed in
    testament = Testament(contact_for(writer.settings), save, writer.rank)
    try:
        found = _will(writer, prepared, metadata)
        if found is None:
            log.info("%s: the agent cannot hold all of it while it is staged", writer.path)
            return None
        will, memories = found
        testament.hand_in(will, memories, prepared.lock if prepared is not None else None, writer.world_size)
    except OperationTimeoutError as error:
        log.warning("%s: the agent may not have the will of it: %s", writer.path, error)
    except Exception as error:
        log.warning("%s is lost if this process ends before it is on the local tier: %s", writer.path, error)
        return None
    finally:
        for lease in leases:
            lease.ask_before_drop(testament.take_back)
    return testament


def _will(
    writer: TierStorageWriter, prepared: Prepared | None, metadata: Metadata | None
) -> tuple[Will, dict[str, Memory]] | None:
    described = wills.describe(prepared.shards if prepared is not None else ())
    if described is None or (prepared is not None and prepared.streamed):
        return None
    shards, memories = described
    will = Will(
        rank=writer.rank,
        is_coordinator=writer.is_coordinator,
        token=prepared.token if prepared is not None else "",
        uri=writer.path,
        settings=writer.settings.model_dump_json(),
        save_id=writer.save_id,
        replaces=writer.replaces,
        shards=shards,
        results=tuple(prepared.results) if prepared is not None else (),
        parts=prepared.parts if prepared is not None else (),
        metadata=metadata,
        kinds={name: memory.kind for name, memory in memories.items()},
    )
    return will, memories
