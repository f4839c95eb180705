"""``tierckpt prune``. Only lists checkpoints without ``--yes``."""

from __future__ import annotations

from typing import Annotated, Literal

from rich.console import RenderableType
from typer import Option

from ..checkpoint import local_commit, shared_commit
from ..checkpoint.prune import FAILED, REMOVED, WOULD_GO, Outcome, PruneResult
from ..checkpoint.retention import Policy, Rule
from ..errors import CheckpointNotFoundError, ConfigError, PartialTransferError, TierckptError
from ..format.layout import Location
from ..mover import Mover
from ..types import Json, Tier
from .ui.output import Report, human_bytes, table
from .ui.session import Session, UriArgument, location_of


def prune(
    session: Session,
    uri: UriArgument,
    keep_last: Annotated[
        int | None, Option(metavar="K", min=1, help="Keep the K newest checkpoints of each tier.")
    ] = None,
    keep_every: Annotated[int | None, Option(metavar="N", min=1, help="Also keep every step divisible by N.")] = None,
    abandoned: Annotated[
        bool, Option(help="Remove steps that were abandoned when the job went back to an older one.")
    ] = False,
    tier: Annotated[Literal["local", "shared", "both"], Option(help="Tier to prune: local, shared or both.")] = "both",
    yes: Annotated[bool, Option(help="Remove. Without it, only show.")] = False,
) -> Report:
    """Show which checkpoints directly under URI retention would remove, and why it keeps the others.

    Rules do not count abandoned steps; only --abandoned removes them.

    Never removed: the newest of a tier and its newest good one, a local copy that is not yet on the shared tier,
    checkpoints being saved, drained or read on this node, and files that tierckpt did not write.
    """
    location = location_of(uri)
    rule = Rule(keep_last, keep_every)
    policy = Policy(
        local=rule if tier != "shared" else Rule(),
        shared=rule if tier != "local" else Rule(),
        abandoned=frozenset(one for one in Tier if abandoned and tier in ("both", one.value)),
    )
    with session.client() as client:
        result = client.run(client.mover.pruner.prune(location, policy, dry_run=not yes))
        if not result.outcomes and not result.leftovers:
            raise client.run(_nothing_here(client.mover, location))
    code = result.errors[0].exit_code if result.errors else 0
    if result.errors and result.only(REMOVED):
        code = PartialTransferError.exit_code
    return Report(_document(location, result, yes), _view(result, yes, bool(policy)), code)


async def _nothing_here(mover: Mover, location: Location) -> TierckptError:
    if await shared_commit.read_shared_manifest(mover.store(location)) or local_commit.read_local_manifest(
        mover.directory(location)
    ):
        return ConfigError(
            f"{location.uri} is a checkpoint, not a run of several",
            hint=f"Prune its run: tierckpt prune {location.parent.uri}",
        )
    return CheckpointNotFoundError(
        f"no checkpoint of tierckpt under {location.uri}: nothing to remove",
        hint="Give the run with step-1, step-2, ... (`tierckpt ls` finds it); check the endpoint and local_root",
    )


def _document(location: Location, result: PruneResult, yes: bool) -> Json:
    going = result.only(REMOVED if yes else WOULD_GO)
    return {
        "uri": location.uri,
        "dry_run": not yes,
        "copies": [one.to_json() for one in result.outcomes],
        "others": result.others,
        "leftovers": result.leftovers,
        "going": len(going),
        "going_bytes": _size_bytes(going),
        "failed": len(result.only(FAILED)),
        "errors": [error.to_json() for error in result.errors],
    }


def _view(result: PruneResult, yes: bool, has_rule: bool) -> list[RenderableType]:
    went, cut_short = "removed" if yes else "would be removed", "leftovers of an interrupted removal"
    rows = [
        *result.outcomes,
        *((name, None, None, "kept", None, "", why) for name, why in sorted(result.others.items())),
        *((name, None, None, went, None, "", cut_short) for name in result.leftovers),
    ]
    columns = (
        "name=copy.name >step=copy.step tier=copy.tier outcome >size=copy.size_bytes:bytes files=copy.health why=reason"
    )
    view = [table(columns, rows)]
    if not has_rule:
        view.append("Without a rule everything is kept: --keep-last K, --keep-every N, --abandoned.")
    elif not yes:
        going = result.only(WOULD_GO)
        size = human_bytes(_size_bytes(going))
        view.append(f"Nothing was removed. --yes removes {len(going)} of {len(result.outcomes)} copies, {size}.")
    else:
        removed = result.only(REMOVED)
        failed = f"; {len(result.only(FAILED))} could not be removed" if result.only(FAILED) else ""
        view.append(f"Removed {len(removed)} copies, {human_bytes(_size_bytes(removed))}{failed}.")
    return view


def _size_bytes(outcomes: list[Outcome]) -> int:
    return sum(one.copy.size_bytes for one in outcomes)
