"""The mover: the stores, drains, node cache and limits shared by the operations of one process.

Operations are functions in their folders that take a ``Mover``. Each process has one for its settings (run by
``client.py``), and so has a node's agent (``agent/agent_server.py``). If ``settings.mover`` is "agent", only the agent
drains, and its limits apply to the node. A process without an answer from its agent drains with its own limits: files
at a time and bytes per second (``drain/rate_limiter.py``), retries (``stores/retry.py``).
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
    """Owns the stores and the running drains. Not thread-safe: every coroutine runs on the loop that created it."""

    def __init__(
        self,
        settings: Settings,
        listener: ProgressListener = ignore_progress,
        *,
        live: Callable[[], Awaitable[Live]] | None = None,
    ) -> None:
        """``live``: returns the other nodes. None: with ``peers``, they are requested from this node's agent.

        Raises PermissionDeniedError if ``local_root`` is not safe to use.
        """
        use_local_root(settings)
        self.settings, self.listener = settings, listener
        self.drainer = drainer = Drainer(settings, listener)
        self.journal, self.limiter = drainer.journal, drainer.limiter
        self.store, self.directory = drainer.store, drainer.directory
        self.drains = BackgroundDrains(settings, drainer)
        """The drains of this process."""
        # The agent has its own list of other nodes, and fetches nothing from them.
        self.sharing = PeerJoiner(settings) if settings.peers is not None and live is None else None
        self.node_cache = NodeCache(settings, drainer.store, listener, self.sharing)
        self.peers = catalog_of(settings, live)
        """The other nodes, if ``peers`` is set."""
        self.selector = Selector(settings, drainer.store, drainer.directory, self.peers)
        """Finds the newest checkpoint of a run; waits for a store that does not answer."""
        self.pruner = Pruner(settings, drainer.journal, drainer.store, self.selector)
        self.replaced = ReplacedAttempts(drainer, self.selector)
        self.browser = Browser(drainer.store, self.selector.find, drainer.directory, drainer.journal)

    def reading(self, checkpoint: Checkpoint) -> AbstractAsyncContextManager[None]:
        """Protect ``checkpoint`` from retention and eviction on this node while it is read."""
        return read_lease.reading_async(self.settings.local_root, checkpoint.directory)

    async def close(self) -> None:
        await self.drains.close()
        if self.peers is not None:
            await self.peers.close()
