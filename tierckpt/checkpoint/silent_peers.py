"""Waits for configured nodes that do not answer: one of them may have the newest checkpoint."""

from __future__ import annotations

import time

from ..errors import PermissionDeniedError
from ..format.layout import Location
from ..poll import Pauses, Poll
from ..telemetry import logger
from .peer_copies import PeerLookup

log = logger("select")

DENIED_SECONDS = 5.0
"""Nodes that are given a new secret have it at different moments; a refusal that lasts longer is meant."""
QUIET_SECONDS = 2.0
"""Nodes that have not answered for so long are reported, and every ``TELL_SECONDS`` from then on."""
TELL_SECONDS = 10.0
PAUSES = Pauses(0.2, 1.0)


class SilentPeers:
    """Waits once for each node that is silent; one that has answered since is waited for again.

    Args:
        cluster: the other nodes; None where there are no ``peers``.
        wait_seconds: ``store_wait_seconds``, as for shared storage.
    """

    def __init__(self, cluster: PeerLookup | None, wait_seconds: float) -> None:
        self._cluster, self._seconds = cluster, wait_seconds
        self._given_up: set[str] = set()

    async def wait(self, run: Location) -> list[str]:
        """Return the nodes that have not said which checkpoints of ``run`` they have; [] when all have.

        Raises PermissionDeniedError: a node does not take this one for a member.
        """
        if self._cluster is None:
            return []
        begun = time.monotonic()
        tell_at, denied_at = begun + QUIET_SECONDS, None
        silent: list[str] = []
        denial: PermissionDeniedError | None = None
        async for _ in Poll(self._seconds, PAUSES):
            now = time.monotonic()
            try:
                silent, denial, denied_at = await self._cluster.silent(run), None, None
            except PermissionDeniedError as error:
                denial, denied_at = error, denied_at or now
                if now - denied_at >= DENIED_SECONDS:
                    break
                continue
            self._given_up &= {*silent}
            if self._given_up >= {*silent}:
                return silent
            if now >= tell_at:
                tell_at = now + TELL_SECONDS
                log.warning(
                    "waiting for %s to say which checkpoints of %s they have, %.0f of %.0f s. Ctrl-C stops; "
                    "store_wait_seconds (TIERCKPT_STORE_WAIT_SECONDS) says how long to wait",
                    ", ".join(silent),
                    run.uri,
                    now - begun,
                    self._seconds,
                )
        if denial is not None:
            raise denial
        self._given_up |= {*silent}
        return silent
