"""The mover: the stores, drains, node cache and limits that the verbs of one process share.

Verbs are functions in their folders that take a ``Mover``. Each process has one for its settings (``client.py`` runs
it), and so has a node's agent (``agent/agent_server.py``). Where ``settings.mover`` is "agent" only the agent drains,
and its limits are the limits of the node. A process without an answer of its agent drains with limits of its own:
files at a time and bytes per second (``drain/rate_limiter.py``), retries (``stores/retry.py``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from .cache.node_cache import NodeCache
from .checkpoint.catalog import Checkpoint
from .checkpoint.namespace import Browser
from .checkpoint.prune import Pruner
from .checkpoint.select import Selector
from .config import Settings
from .disk import read_lease
from .disk.local_root import use_local_root
from .drain.background_drains import BackgroundDrains
from .drain.drainer import Drainer
from .peer.fetch.fetch_session import PeerJoiner
from .peer.peer_catalog import Live, catalog_of
from .save.replaced_attempts import ReplacedAttempts
from .telemetry import ignore_progress
from .types import ProgressListener


class Mover:
    """Owns the stores and the running drains. Not thread-safe: every coroutine runs on the loop that made it."""

    def __init__(
        self,
        settings: Settings,
        listener: ProgressListener = ignore_progress,
        *,
        live: Callable[[], Awaitable[Live]] | None = None,
    ) -> None:
        """``live``: returns the other nodes. None: requests to this node's agent, with ``peers``.

        Raises PermissionDeniedError: ``local_root`` is not safe to use.
        """
        use_local_root(settings)
        self.settings, self.listener = settings, listener
        self.drainer = drainer = Drainer(settings, listener)
        self.journal, self.limiter = drainer.journal, drainer.limiter
        self.store, self.directory = drainer.store, drainer.directory
        self.drains = BackgroundDrains(settings, drainer)
        """The drains of this process."""
        # The agent knows the other nodes itself, and fetches nothing from them.
        self.sharing = PeerJoiner(settings) if settings.peers is not None and live is None else None
        self.node_cache = NodeCache(settings, drainer.store, listener, self.sharing)
        self.peers = catalog_of(settings, live)
        """The other nodes, where there are ``peers``."""
        self.selector = Selector(settings, drainer.store, drainer.directory, self.peers)
        """The newest checkpoint of a run, and the waiting for a store that does not answer."""
        self.pruner = Pruner(settings, drainer.journal, drainer.store, self.selector)
        self.replaced = ReplacedAttempts(drainer, self.selector)
        self.browser = Browser(drainer.store, self.selector.find, drainer.directory, drainer.journal)

    def reading(self, checkpoint: Checkpoint) -> AbstractAsyncContextManager[None]:
        """Hold ``checkpoint`` against retention and eviction on this node while it is read."""
        return read_lease.reading_async(self.settings.local_root, checkpoint.directory)

    async def close(self) -> None:
        await self.drains.close()
        if self.peers is not None:
            await self.peers.close()
