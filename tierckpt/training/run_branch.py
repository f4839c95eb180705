"""The branch of a run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ..checkpoint import branches
from ..checkpoint.branches import Branch
from ..checkpoint.catalog import SHARED_TIMEOUT_SECONDS
from ..checkpoint.select import Selector, age_of, below
from ..client import get_client
from ..config import Settings
from ..errors import CheckpointError, IntegrityError, StoreError
from ..format.layout import WINDOWS_DIR, Location, local_dir, parse_uri, step_of
from ..telemetry import logger
from .rank_exchange import broadcast

log = logger("branches")

CONCURRENT_READS = 32


async def branch_of_restored(
    selector: Selector, run: Location, restored: Location, name: str, *, is_asked_for: bool
) -> Branch:
    """Return the branch of a process that has restored ``restored`` of ``run``; ``name`` for a new branch.

    It goes back from newer steps if the caller named this one (``is_asked_for``), from an abandoned step, and if the
    shared tier does not answer. Cost: a listing, and with ``is_asked_for`` a manifest of each later step.
    """
    names, is_near = await selector.all_names(run, SHARED_TIMEOUT_SECONDS)
    if WINDOWS_DIR in names and not is_near:
        names |= below(WINDOWS_DIR, await selector.names(run.child(WINDOWS_DIR)))
    age = age_of(restored.name)
    later = [one for one in sorted(names) if is_asked_for and age_of(one) > age]
    gate = asyncio.Semaphore(CONCURRENT_READS)

    async def find(location: Location) -> list[tuple[Branch, int | None]]:
        try:
            async with gate:
                found = await selector.committed_near(location) if is_near else [await selector.find(location)]
        except (CheckpointError, IntegrityError, StoreError) as error:
            log.info("%s: %s", location.uri, error)
            return []
        return [(one.branch, one.step) for one in found]

    base, *found = await asyncio.gather(*(find(one) for one in (restored, *map(run.child, later))))
    own = base[0][0] if base else Branch(restored.name)
    step, newer = step_of(restored.name), [one for some in found for one in some]
    branch = await selector.noted_branch(run, names, is_near=is_near)
    current = branches.current_branch([(own, step), *newer], branch)
    seen = [one for one, _ in newer]
    if is_asked_for and step is not None:
        has_newer = any(current is None or current.holds(*one) for one in newer)
        if has_newer or is_near or (current is not None and not current.holds(own, step)):
            return branches.branch_going_back(name, own, step, current, seen)
    before = current or own
    return replace(before if before.order else Branch(name), order=branches.next_order(current, own, *seen))


class RunBranch:
    """The branch that this process saves to: the restored checkpoint's, or a new one from there.

    ``job``: the same on all ranks, and unique to this job.
    """

    def __init__(self, location: Location, job: str, settings: Settings) -> None:
        self.location, self._job, self._settings, self._restored = location, job, settings, 0
        self.now: Branch | None = None

    def restored(self, uri: str, *, is_asked_for: bool) -> Branch:
        """Return the branch of later saves, after a restore of ``uri``. Collective.

        ``is_asked_for``: the next save abandons newer checkpoints. Raises on all ranks if rank 0 cannot read the run.
        """
        self._restored += 1

        def find() -> Branch:
            client, name = get_client(self._settings), f"{self._job}-{self._restored}"
            selector, restored = client.mover.selector, parse_uri(uri)
            return client.run(branch_of_restored(selector, self.location, restored, name, is_asked_for=is_asked_for))

        self.now = broadcast(find)
        return self.now

    def read_local(self) -> None:
        """Read this node's branch, for a process that has restored nothing."""
        if self.now is None:
            branch = branches.read_local(local_dir(self._settings.local_root, self.location))
            order = branches.next_order(branch)
            self.now = Branch(branch.id, order, branch.base, branch.ends) if branch else Branch(self._job, order)

    def of_save(self) -> Branch:
        """Return the branch of the next save: a new one if ``read_local`` failed, as the save will."""
        return self.now or Branch(self._job)
