"""The branch of a run."""

from __future__ import annotations

import torch.distributed as dist

from ..checkpoint import branches
from ..checkpoint.branches import Branch
from ..checkpoint.going_back import branch_of_restored
from ..client import get_client
from ..config import Settings
from ..format.layout import Location, local_dir, parse_uri
from ..rank_store import portable
from .rank_exchange import all_gather, is_distributed


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
        own_branch: Branch | BaseException | None = None
        if not is_distributed() or dist.get_rank() == 0:
            client, name = get_client(self._settings), f"{self._job}-{self._restored}"
            work = branch_of_restored(
                client.mover.selector, self.location, parse_uri(uri), name, is_asked_for=is_asked_for
            )
            try:
                own_branch = client.run(work)
            except Exception as error:
                own_branch = portable(error)
        decided: Branch | BaseException = all_gather(own_branch)[0]
        if isinstance(decided, BaseException):
            raise decided
        self.now = decided
        return decided

    def read_local(self) -> None:
        """Read this node's branch, for a process that has restored nothing."""
        if self.now is None:
            branch = branches.read_local(local_dir(self._settings.local_root, self.location))
            order = branches.next_order(branch)
            self.now = Branch(branch.id, order, branch.base, branch.ends) if branch else Branch(self._job, order)

    def of_save(self) -> Branch:
        """Return the branch of the next save: a new one if ``read_local`` failed, as the save will."""
        return self.now or Branch(self._job)
